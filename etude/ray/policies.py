# SPDX-License-Identifier: Apache-2.0
"""Policies, weights and learner states in Ray's object store."""

import contextlib
import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import ray
import ray.cloudpickle
import torch

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.policies import MAIN
from etude.algorithms.task import TaskModule
from etude.connectors import Pipeline
from etude.connectors.connector import overrides
from etude.errors import SettingsError
from etude.learners import ModuleLearner
from etude.modules import Module
from etude.policies import Policy
from etude.ray.cluster import first_line
from etude.runners import ModuleOf
from etude.runners.callbacks import is_plain

# -- tensors as arrays, which can be read from the object store without copying -----------------------------------


def as_arrays(state: Any) -> Any:
    """Plain data with arrays in place of tensors; tensors of a dtype that NumPy lacks remain."""
    return _mapped(state, torch.Tensor, _array)


def from_arrays(state: Any) -> Any:
    """The inverse of `as_arrays`: tensors on the CPU that share the arrays' memory; copy them before writing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the object store is read-only
        return _mapped(state, np.ndarray, torch.from_numpy)


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _mapped(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(state, kind):
        return change(state)
    if isinstance(state, Mapping):
        return {name: _mapped(value, kind, change) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_mapped(value, kind, change) for value in state]
    return state


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other, equal_nan=isinstance(one, np.ndarray) and one.dtype.kind == "f")


def learner_state(learner: ModuleLearner, *, connectors: bool = True) -> dict[str, Any]:
    """The state of a learner, including weights and optionally its connectors, with arrays in place of tensors."""
    state: dict[str, Any] = as_arrays(learner.state_dict())
    return {**state, "connectors": learner.connectors.state_dict()} if connectors else state


def set_learner_state(learner: ModuleLearner, state: Mapping[str, Any]) -> None:
    """Restore a `learner_state`."""
    learner.load_state_dict(from_arrays({name: value for name, value in state.items() if name != "connectors"}))
    if "connectors" in state:
        learner.connectors.load_state_dict(copy.deepcopy(state["connectors"]))  # copied, as the original is read-only


def fingerprint(module: torch.nn.Module) -> list[int]:
    """A sum over the words of each parameter and buffer, which shows whether any of them has changed."""
    sums = []
    for tensor in (*module.parameters(), *module.buffers()):
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        whole = len(flat) // 8 * 8
        sums.append(int(flat[:whole].view(np.int64).sum()) + int(flat[whole:].sum()))
    return sums


# -- what runners act with ----------------------------------------------------------------------------------------


def sent(config: AlgorithmConfig, **changes: Any) -> Any:
    """A reference to the config with these changes, in the object store, for the local engine.

    Raises:
        SettingsError: it can't be pickled.
    """
    try:
        return ray.put(Sent(dataclasses.replace(config, engine="local", **changes)))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise SettingsError(
            f"the settings can't be sent to other processes: {first_line(error.__cause__ or error)}. For the env, give "
            "a function or an id, not an env object. The same goes for callbacks and connectors."
        ) from error


class Sent:
    """Settings that are sent to another process, where they arrive as the config itself.

    If the env is an id that is registered here, it is registered there too. An id that the other process already knows
    keeps its meaning there.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        spec = None
        if isinstance(self.config.env, str) and self.config.env in gym.registry:
            with contextlib.suppress(Exception):  # it can't be pickled: other processes must register it themselves
                spec = ray.cloudpickle.dumps(gym.registry[self.config.env])  # type: ignore[no-untyped-call]
        return _arrived, (self.config, spec)


def _arrived(config: AlgorithmConfig, spec: bytes | None) -> AlgorithmConfig:
    if spec is not None:
        with contextlib.suppress(Exception):  # its code is not here: making the env says that it is not registered
            found = ray.cloudpickle.loads(spec)
            gym.registry.setdefault(found.id, found)
    return config


@dataclasses.dataclass(frozen=True, slots=True)
class Acting:
    """The policies that act, and the agents that they act for."""

    policies: dict[str, Policy]
    """By module id."""
    is_only: bool
    """Whether there is only one module, without an id."""
    module_of: ModuleOf | None


def acting_of(algorithm: Algorithm[Any]) -> Acting:
    """The acting policies of an algorithm, ready to be sent: copies on the CPU, without what only learning needs."""
    config, policies = algorithm.config, {}
    for name, own in algorithm.policies.items():
        own.connectors.start(0)  # no slots: only the learned state is sent
        spaces = {"obs_space": own.obs_space, "action_space": own.action_space}
        policies[name] = Policy(portable(own.module), own.connectors, **spaces)
    return Acting(policies, config.agents.modules is None, config.agents.module_of)


def known_as(name: str, *, is_only: bool) -> str | None:
    """A runner's id for a module."""
    return None if is_only and name == MAIN else name


def portable(module: Module) -> Module:
    """A copy on the CPU whose tensors have separate memory, as a learner stores them in one block."""
    memo: dict[int, Any] = {}
    if isinstance(module, TaskModule):
        task = module._task
        light = memo[id(task)] = object.__new__(type(task))
        vars(light).update({name: value for name, value in vars(task).items() if is_plain(value)})
        light.config = dataclasses.replace(task.config, engine="local")
    own = copy.deepcopy(module, memo).to("cpu")
    for tensor in (*own.parameters(), *own.buffers()):
        tensor.data = tensor.data.clone()
    return own


class Weights(NamedTuple):
    """Everything that acting depends on and training changes, by module id."""

    seq_nos: dict[str, int]
    """The number of gradient steps behind the weights."""
    values: dict[str, Any]
    """The module's ``state_dict()``, with arrays in place of tensors."""
    learned: dict[str, dict[int, Any]]
    """The states of connectors that learn, see `learned_of`."""
    plain: dict[str, dict[str, dict[str, Any]]]
    """Attributes, see `plain_attributes`."""


_LOCAL_SECONDS: Final = 1.0
"""How long to wait for an object that is on this machine unless it was lost."""


class Broadcast:
    """The newest weights of an algorithm's modules, in the object store."""

    def __init__(self) -> None:
        self.version = 0
        self.ref: Any = None
        """The reference to the `Weights`."""
        self.seq_nos: dict[str, int] = {}
        self._marks: Any = None

    def refresh(self, algorithm: Algorithm[Any], *, again: bool = False) -> None:
        """Store the weights again if something has changed, or, with ``again``, because they were lost."""
        policies = algorithm.policies
        seq_nos = {name: own.updates for name, own in algorithm.learner.modules.items()}
        learned = {name: learned_of(policy.connectors) for name, policy in policies.items()}
        plain = {name: plain_attributes(policy.module) for name, policy in policies.items()}
        marks = (seq_nos, pickle.dumps((learned, plain)))
        values = {name: as_arrays(policy.module.state_dict()) for name, policy in policies.items()}
        if again or marks != self._marks or not self._is_stored(values):
            self.ref = ray.put(Weights(seq_nos, values, learned, plain))
            self._marks, self.seq_nos = marks, seq_nos
            self.version += 1

    def _is_stored(self, values: Mapping[str, Any]) -> bool:
        """Whether the object store has these values. A callback may change weights without a gradient step."""
        try:
            stored = ray.get(self.ref, timeout=_LOCAL_SECONDS).values
        except ray.exceptions.RayError:
            return False
        return _equal(stored, values)


def plain_attributes(module: Module) -> dict[str, dict[str, Any]]:
    """Numbers, texts and booleans that are not in a ``state_dict()``, such as epsilon, by owner.

    These are attributes, without a leading underscore, of the distribution, of the module and its parts, and of the
    task if there is one.
    """
    return {owner: plain_of(thing) for owner, thing in _owners(module)}


def plain_of(thing: Any) -> dict[str, bool | int | float | str]:
    """The attributes of an object, without a leading underscore, that are numbers, texts or booleans."""
    return {n: v for n, v in vars(thing).items() if n[:1] != "_" and isinstance(v, bool | int | float | str)}


def set_plain_attributes(module: Module, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the `plain_attributes` of a module of the same structure."""
    for owner, thing in _owners(module):
        for name, value in given.get(owner, {}).items():
            if name != "training":
                setattr(thing, name, value)


def _owners(module: Module) -> Iterator[tuple[str, Any]]:
    yield "dist", module.dist
    if isinstance(module, TaskModule):
        yield "task", module._task
    for name, part in module.named_modules():
        yield f"module/{name}", part


def learned_of(connectors: Pipeline) -> dict[int, Any]:
    """The states of the connectors that learn from experience, by their indices."""
    return {i: c.state_dict() for i, c in enumerate(connectors.connectors) if overrides(c, "update")}


def set_learned(connectors: Pipeline, learned: Mapping[int, Any]) -> None:
    """Load what connectors learned elsewhere; their state of their own slots stays."""
    for i, state in learned.items():
        connector = connectors.connectors[i]
        connector.load_state_dict(_with_slots(state, connector.state_dict()))


def _with_slots(learned: Any, own: Any) -> Any:
    """A state without slots, completed with the slots of ``own``: the parts that are empty only in ``learned``."""
    if isinstance(learned, np.ndarray):
        return own if isinstance(own, np.ndarray) and not learned.size and own.size else learned
    if isinstance(learned, Mapping) and isinstance(own, Mapping):
        if not learned:
            return own
        return {name: _with_slots(value, own.get(name)) for name, value in learned.items()}
    return own if isinstance(learned, list | tuple) and not learned and own else learned
