# SPDX-License-Identifier: Apache-2.0
"""What runners are sent: modules and connectors once, then what has changed of what acting depends on."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.students import MAIN, Student
from etude.algorithms.task_module import TaskModule
from etude.connectors import Pipeline
from etude.connectors.pipeline import overrides
from etude.errors import SettingsError
from etude.modules import Module
from etude.ray.faults import first_line
from etude.ray.states import as_arrays
from etude.runners import ModuleOf
from etude.runners.callbacks import is_plain

Weights: TypeAlias = dict[str, dict[str, NDArray[Any]]]
"""By module id, what its ``state_dict()`` holds; see `as_arrays`."""


@dataclasses.dataclass(slots=True)
class Role:
    """One module, and the connectors between it and its envs."""

    module: Module
    connectors: Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """All that act, and for whom."""

    roles: dict[str, Role]
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


def cast_of(students: Mapping[str, Student], *, module_of: ModuleOf | None, is_only: bool) -> Cast:
    """The modules and connectors of an algorithm, to be sent: copies on the CPU, without what belongs to learning."""
    roles = {}
    for name, student in students.items():
        student.connectors.start(0)  # here nobody acts: their states hold what was learned, and nothing of slots
        roles[name] = Role(portable(student.module), student.connectors)
    seq_nos = {name: student.learner.updates for name, student in students.items()}
    return Cast(roles, is_only, module_of, seq_nos)


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

    def refresh(self, students: Mapping[str, Student], ref: Any = None) -> None:
        """See what has changed.

        Args:
            students: Whose modules and connectors.
            ref: Of their `Weights` as they are now, where these lie in the store already.
        """
        seq_nos = {name: student.learner.updates for name, student in students.items()}
        marks = {name: (seq_nos[name], _mark(student.module)) for name, student in students.items()}
        if marks != self._marks:
            self._marks, self.seq_nos = marks, seq_nos
            self.ref = ray.put(weights_of(students)) if ref is None or self._is_lost else ref
            self._is_lost = False
            self.version += 1
        news = News(
            {name: learned_of(student.connectors) for name, student in students.items()},
            {name: plain_attributes(student.module) for name, student in students.items()},
        )
        known = pickle.dumps(news)
        if known != self._known:
            self._known, self.news = known, news
            self.news_version += 1

    def put_again(self) -> None:
        """The weights were lost from the store: put them there anew when they are next wanted."""
        self._marks, self._is_lost = None, True


def weights_of(students: Mapping[str, Student]) -> Weights:
    """The weights of all modules; views where they are on the CPU."""
    return {name: as_arrays(student.module.state_dict()) for name, student in students.items()}


def _mark(module: Module) -> int:
    """Changes when weights are changed in place, gradient steps or not."""
    return sum(tensor._version for tensor in (*module.parameters(), *module.buffers()))


def known_as(name: str, *, is_only: bool) -> str | None:
    """What a runner calls a module."""
    return None if is_only and name == MAIN else name
