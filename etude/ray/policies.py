# SPDX-License-Identifier: Apache-2.0
"""What runners are sent: policies once, then what has changed of what acting depends on."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.policies import MAIN
from etude.algorithms.task import TaskModule
from etude.connectors import Pipeline
from etude.connectors.connector import overrides
from etude.errors import SettingsError
from etude.learners import Learner
from etude.modules import Module
from etude.policies import Policy
from etude.ray.faults import first_line
from etude.ray.states import as_arrays
from etude.runners import ModuleOf
from etude.runners.callbacks import is_plain

Weights: TypeAlias = dict[str, dict[str, NDArray[Any]]]
"""By module id, what its ``state_dict()`` holds; see `as_arrays`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Acting:
    """All that act, and for whom."""

    policies: dict[str, Policy]
    """By module id."""
    is_only: bool
    """There is one module, without an id."""
    module_of: ModuleOf | None
    seq_nos: dict[str, int]
    """By module id, the gradient steps that made it."""


class News(NamedTuple):
    """What has changed beside weights, by module id."""

    learned: dict[str, dict[int, Any]]
    """The state of each connector that learns, by its place."""
    plain: dict[str, dict[str, dict[str, Any]]]
    """Attributes that acting may depend on, see `plain_attributes`."""


def acting_of(algorithm: Algorithm[Any]) -> Acting:
    """The policies of an algorithm, to be sent: copies on the CPU, without what belongs to learning."""
    config, policies = algorithm.config, {}
    for name, own in algorithm.policies.items():
        own.connectors.start(0)  # here nobody acts: their states hold what was learned, and nothing of slots
        spaces = {"obs_space": own.obs_space, "action_space": own.action_space}
        policies[name] = Policy(portable(own.module), own.connectors, **spaces)
    return Acting(policies, config.agents.modules is None, config.agents.module_of, seq_nos_of(algorithm.learner))


def sent(config: AlgorithmConfig, **changes: Any) -> Any:
    """A reference to the config with these changes, for the local engine, as processes elsewhere need it.

    Raises:
        SettingsError: it can't be sent.
    """
    try:
        return ray.put(dataclasses.replace(config, engine="local", **changes))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise SettingsError(
            f"the settings can't be sent to other processes: {first_line(error.__cause__ or error)}. Give what makes "
            "an env, such as a function or an id, not an env object; likewise for callbacks and connectors."
        ) from error


def portable(module: Module) -> Module:
    """A copy on the CPU, whose tensors have memory of their own: learners keep theirs in one block, sent with each."""
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


def plain_attributes(module: Module) -> dict[str, dict[str, Any]]:
    """Numbers, texts and truth values that stand in no ``state_dict()``, such as epsilon.

    They are attributes, without a leading underscore, of the distribution, of the module and its parts, and of the task
    where there is one; by whose they are.
    """
    return {
        owner: {n: v for n, v in vars(thing).items() if n[:1] != "_" and isinstance(v, bool | int | float | str)}
        for owner, thing in _owners(module)
    }


def set_plain_attributes(module: Module, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over `plain_attributes` of a module built alike."""
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
    """The states of the connectors that learn from experience, by their places."""
    return {i: c.state_dict() for i, c in enumerate(connectors.connectors) if overrides(c, "update")}


def set_learned(connectors: Pipeline, learned: Mapping[int, Any]) -> None:
    """Let connectors know what others have learned; what they remember of their slots stays."""
    for i, state in learned.items():
        connector = connectors.connectors[i]
        connector.load_state_dict(_with_slots(state, connector.state_dict()))


def _with_slots(learned: Any, own: Any) -> Any:
    """A state of no slots, with what ``own`` has of them: everything that is empty there and not here."""
    if isinstance(learned, np.ndarray):
        return own if isinstance(own, np.ndarray) and not learned.size and own.size else learned
    if isinstance(learned, Mapping) and isinstance(own, Mapping):
        if not learned:
            return own
        return {name: _with_slots(value, own.get(name)) for name, value in learned.items()}
    return own if isinstance(learned, list | tuple) and not learned and own else learned


class Broadcast:
    """The newest weights of an algorithm's modules, put into the store once, and what else is new."""

    def __init__(self) -> None:
        self.version = 0
        """Of the weights."""
        self.news_version = 0
        self.seq_nos: dict[str, int] = {}
        """By module id, the gradient steps that made the weights."""
        self.ref: Any = None
        """Of `Weights`."""
        self.news = News({}, {})
        self._marks: Any = None
        self._is_lost = False
        self._known = b""

    def refresh(self, algorithm: Algorithm[Any], ref: Any = None) -> None:
        """See what has changed.

        Args:
            algorithm: Whose policies.
            ref: Of their `Weights` as they are now, where these lie in the store already.
        """
        policies, seq_nos = algorithm.policies, seq_nos_of(algorithm.learner)
        marks = {name: (seq_nos[name], changes_of(policy.module)) for name, policy in policies.items()}
        if marks != self._marks:
            self._marks, self.seq_nos = marks, seq_nos
            self.ref = ray.put(weights_of(policies)) if ref is None or self._is_lost else ref
            self._is_lost = False
            self.version += 1
        news = News(
            {name: learned_of(policy.connectors) for name, policy in policies.items()},
            {name: plain_attributes(policy.module) for name, policy in policies.items()},
        )
        known = pickle.dumps(news)
        if known != self._known:
            self._known, self.news = known, news
            self.news_version += 1

    def put_again(self) -> None:
        """The weights were lost from the store: put them there anew when they are next wanted."""
        self._marks, self._is_lost = None, True


def weights_of(policies: Mapping[str, Policy]) -> Weights:
    """The weights of all modules; views where they are on the CPU."""
    return {name: as_arrays(policy.module.state_dict()) for name, policy in policies.items()}


def seq_nos_of(learner: Learner) -> dict[str, int]:
    """The gradient steps that made the weights of each module, by its id."""
    return {name: own.updates for name, own in learner.modules.items()}


def changes_of(module: Module) -> int:
    """A number that changes when weights are changed in place, by gradient steps or not."""
    return sum(tensor._version for tensor in (*module.parameters(), *module.buffers()))


def known_as(name: str, *, is_only: bool) -> str | None:
    """What a runner calls a module."""
    return None if is_only and name == MAIN else name
