# SPDX-License-Identifier: Apache-2.0
"""Pipelines of connectors, how connectors are found by name, and their learned state as JSON."""

import ast
import copy
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from etude import columns as col
from etude.columns import Columns
from etude.connectors.actions import BoundedActions, ClipAction, RescaleAction
from etude.connectors.advantages import GAE, LiftAdvantages, NormalizeAdvantages, VTrace
from etude.connectors.connector import (
    Acting,
    Connector,
    FunctionConnector,
    Inputs,
    PreviousActions,
    check_state_methods,
    overrides,
    snake_case,
)
from etude.connectors.history import History, ReturnToGo
from etude.connectors.observations import Drop, FrameStack, NormalizeObs, PrevActionReward
from etude.connectors.rewards import ClipReward, NormalizeReward
from etude.errors import CheckpointError, DataError, SettingsError, SpaceError
from etude.experience import Experience
from etude.experience.arrays import Array, check_scalars, host, is_array
from etude.settings import choice
from etude.spaces import Space, described_value, leaf_shape, leaves

if TYPE_CHECKING:
    from etude.modules.module import Module

_log = logging.getLogger("etude.connectors")

Connect: TypeAlias = Callable[[Experience], Experience]
"""Applies the connectors to Experience."""


class PreLearner:
    """Base class of your own step between the recording and the learner. By default, it only applies the connectors.

    It is called with each part of the recording, possibly in workers, so it must keep no state between calls.
    ``__init__`` must keep its arguments as attributes of the same names, so that checkpoints can save them.
    """

    def __call__(self, exp: Experience, connect: Connect) -> Experience:
        """Return the Experience to train on.

        Args:
            exp: Whole segments as recorded.
            connect: Applies the connectors to Experience, as would be done without this step.
        """
        return connect(exp)


PreLearnerLike: TypeAlias = PreLearner | Callable[[Experience, Connect], Experience]
"""A `PreLearner`, or a function with the same arguments."""


_BUILT_IN = (
    *(ClipAction, ClipReward, Drop, FrameStack, GAE, History, LiftAdvantages, NormalizeAdvantages),
    *(NormalizeObs, NormalizeReward, PrevActionReward, RescaleAction, ReturnToGo, VTrace),
)
BY_NAME: dict[str, type[Connector]] = {snake_case(cls.__name__): cls for cls in _BUILT_IN}
"""The connectors that come with Etude, by name."""

ConnectorLike: TypeAlias = str | type[Connector] | Connector | Callable[[Any], Any]


def connector_from(spec: ConnectorLike) -> Connector:
    """Make a connector.

    Args:
        spec: A name from `BY_NAME`, alone or with arguments (``"frame_stack:4"``, ``"clip_reward:-5,high=5"``,
            ``"drop:mission"``); a class, made without arguments; a connector, which is returned; or a function, see
            `FunctionConnector`.

    Raises:
        SettingsError: there is no such connector, it takes other arguments, or it can't be kept in a checkpoint.
    """
    connector = _found(spec)
    check_state_methods(connector)
    return connector


def _found(spec: ConnectorLike) -> Connector:
    if isinstance(spec, Connector):
        return spec
    if isinstance(spec, str):
        name, _, text = spec.partition(":")
        cls = BY_NAME.get(name)
        if cls is None and ":" in text:
            raise SettingsError(
                f"`{spec}`: a connector of your own, `module:Class`, is made without arguments: give them as defaults, "
                "such as those of a subclass."
            )
        if cls is None:
            raise SettingsError(f"there is no connector `{name}`. {choice(name.replace('-', '_'), BY_NAME)}")
        args, kwargs = ([text], {}) if cls is Drop else _arguments(spec, text)
        return _made(cls, spec, args, kwargs)
    if isinstance(spec, type) and issubclass(spec, Connector):
        return _made(spec, spec.__name__, [], {})
    if isinstance(spec, type) or not callable(spec):
        raise SettingsError(f"{spec!r} is no connector: give a name, a Connector (class or object), or a function.")
    return FunctionConnector(spec)


def _arguments(spec: str, text: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not a list of arguments")
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for what is nested too deeply
        raise SettingsError(
            f"connector `{spec[:100]}`: can't read {text[:100]!r}. Write plain values, such as `clip_reward:-1,high=1`."
        ) from None
    if len(kwargs) < len(call.keywords):
        raise SettingsError(f"connector `{spec[:100]}` has an argument twice: leave one of them out.")
    return args, kwargs


def _made(cls: type[Connector], spec: str, args: list[Any], kwargs: dict[str, Any]) -> Connector:
    try:
        return cls(*args, **kwargs)
    except TypeError as error:
        raise SettingsError(f"connector `{spec}`: {error}. It takes {inspect.signature(cls)}.") from error


class Pipeline(Connector):
    """Connectors in a row, from the env's side to the module's. An empty one costs nothing.

    Args:
        connectors: What `connector_from` accepts, in order.
    """

    chosen: Space | None = None
    """The value for `PreviousActions.chosen` of these connectors, set by an outer pipeline, if there is one."""

    def __init__(self, connectors: Iterable[ConnectorLike] = ()) -> None:
        self.connectors = [connector_from(spec) for spec in connectors]
        self._online_alone: str | None = None
        self._obs_shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the module's observations, by column; {} before `spaces`."""
        self._action_shapes: dict[str, tuple[int, ...]] = {}
        self._arrange()

    def _arrange(self) -> None:
        # methods that do nothing are not called at every step
        self.context = sum(connector.context for connector in self.connectors)
        self._online = [c for c in self.connectors if overrides(c, "online")]
        self._may_lack_offline = any(_lacks_offline(c) for c in self.connectors)
        self._act = [c.act for c in reversed(self.connectors) if _changes_actions(c)]
        self._offline = [c for c in self.connectors if overrides(c, "offline")]
        self._learning = [i for i, c in enumerate(self.connectors) if overrides(c, "update")]
        self.observes = bool(self._online)
        """Whether `online` does anything; if not, the module sees the env's observations."""
        self.acts = bool(self._act)
        """Whether `act` does anything; if not, the env gets the module's actions."""
        self.learns = bool(self._learning)
        """Whether `update` does anything."""
        # only first results are checked, but all of `online` if a connector may lack `offline`
        self._checks_online, self._checks_act, self._checks_offline = self.observes, self.acts, bool(self._offline)
        self.hindsight = any(connector.hindsight for connector in self.connectors)
        self.takes_tensors = all(connector.takes_tensors for connector in self.connectors)

    def __repr__(self) -> str:
        return f"Pipeline({self.connectors!r})"

    def __len__(self) -> int:
        return len(self.connectors)

    def add(self, connector: ConnectorLike, *, at: int | None = None) -> None:
        """Insert a connector. Call this before `spaces`.

        Args:
            connector: What `connector_from` accepts.
            at: Its index, as in ``list.insert``; None: the end, the module's side.
        """
        self.connectors.insert(len(self.connectors) if at is None else at, connector_from(connector))
        self._arrange()

    def copy(self) -> "Pipeline":
        """A copy of the connectors with what they have learned and with slots of their own, for another runner."""
        return copy.deepcopy(self)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Return the module's spaces: those after all connectors."""
        self._online_alone = None
        self._action_shapes = {name: leaf_shape(leaf) for name, leaf in leaves(action_space, col.ACTION).items()}
        chosen = self._chosen(obs_space, action_space) if self.chosen is None else self.chosen
        for connector in self.connectors:
            before = obs_space
            if isinstance(connector, PreviousActions | Pipeline):
                connector.chosen = chosen
            obs_space, action_space = connector.spaces(obs_space, action_space)
            if obs_space != before and _lacks_offline(connector):
                self._online_alone = connector.name
        self._obs_shapes = {name: leaf_shape(leaf) for name, leaf in leaves(obs_space, col.OBS).items()}
        self._arrange()  # whether there are bounds is known only now
        return obs_space, action_space

    def _chosen(self, obs_space: Space, action_space: Space) -> Space | None:
        """The module's action space, if a connector that shows actions stands before one that may change it."""
        shows = next((i for i, c in enumerate(self.connectors) if isinstance(c, PreviousActions | Pipeline)), None)
        if shows is None or not any(overrides(connector, "spaces") for connector in self.connectors[shows + 1 :]):
            return None
        for connector in copy.deepcopy(self.connectors):  # since `spaces` is called once
            obs_space, action_space = connector.spaces(obs_space, action_space)
        return action_space

    def start(self, num_slots: int) -> None:
        for connector in self.connectors:
            connector.start(num_slots)

    def online(self, inputs: Inputs) -> Inputs:
        """Apply the connectors to observations. One that changes them without having an `offline` is remembered.

        Raises:
            SpaceError: a connector does not return Inputs, or the shapes are not those of the connectors' `spaces`.
        """
        if not self._checks_online:
            for connector in self._online:
                inputs = connector.online(inputs)
            return inputs
        num_rows = len(inputs.slots)
        for connector in self._online:
            before, inputs = inputs, connector.online(inputs)
            if not isinstance(inputs, Inputs):
                raise SpaceError(
                    f"`{connector.name}.online` returned a {type(inputs).__name__}: it must return Inputs, such as "
                    "inputs.with_obs(columns)."
                )
            if _lacks_offline(connector) and any(inputs.obs.get(n) is not c for n, c in before.obs.items()):
                self._online_alone = connector.name
        self._check_shapes("online", inputs.obs, self._obs_shapes, num_rows)
        self._checks_online = self._may_lack_offline
        return inputs

    def _check_shapes(
        self, method: str, columns: Columns, shapes: Mapping[str, tuple[int, ...]], num_rows: int | None = None
    ) -> None:
        """Raise a SpaceError unless columns have these shapes in each row; None: any number of rows."""
        for name, shape in shapes.items():
            found: Any = columns.get(name) if isinstance(columns, Mapping) else None
            if is_array(found):
                if tuple(found.shape[1:]) == shape and num_rows in (None, len(found)):
                    continue
                what = f"has the shape {tuple(found.shape)}"
            else:
                what = f"is {described_value(found)}"
            makers = ", ".join(c.name for c in self.connectors if overrides(c, method))
            raise SpaceError(
                f"`{name}` {what} after `{method}` of the connectors ({makers}), but must be an array of "
                f"{'all' if num_rows is None else num_rows} rows of shape {shape}, as their `spaces` say."
            )

    def new_state(self, num_rows: int) -> dict[str, Any]:
        """The states of connectors that keep one, by index."""
        states = {str(i): connector.new_state(num_rows) for i, connector in enumerate(self.connectors)}
        return {i: state for i, state in states.items() if state}

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        after = {}
        for i, connector in enumerate(self.connectors):
            inputs, kept = connector.step(inputs, state.get(str(i), {}))
            if kept:
                after[str(i)] = kept
        return inputs, after

    def step_and_act(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, Acting]:
        acts: list[Acting] = []
        for i, connector in enumerate(self.connectors):
            inputs, act = connector.step_and_act(inputs, state.get(str(i), {}))
            acts.append(act)

        def act_all(chosen: Columns) -> tuple[Columns, dict[str, Any]]:
            after: dict[str, Any] = {}

            def one(action: Columns, i: int) -> Columns:
                action, kept = acts[i](action)
                if kept:
                    after[str(i)] = kept
                return action

            return self._acted(chosen, [partial(one, i=i) for i in reversed(range(len(acts)))]), after

        return inputs, act_all

    def act(self, action: Columns) -> Columns:
        return self._acted(action, self._act)

    def _acted(self, action: Columns, by: Sequence[Callable[[Columns], Columns]]) -> Columns:
        """Apply ``by`` to the module's action. The first result is checked: a SpaceError is raised if its shapes are
        not those of the env's action space."""
        num_rows = len(next(iter(action.values()))) if self._checks_act else 0
        for act in by:
            action = act(action)
            if self._checks_act and not isinstance(action, Mapping):
                raise SpaceError(f"`act` of a connector returned a {type(action).__name__}: it must return columns.")
        if self._checks_act:
            self._check_shapes("act", action, self._action_shapes, num_rows)
            self._checks_act = False
        return action

    def unact(self, action: Columns) -> Columns:
        for connector in self.connectors:
            is_own = overrides(connector, "act") and not isinstance(connector, BoundedActions)
            if is_own and not overrides(connector, "unact"):
                raise SettingsError(
                    f"there are the env's actions (in a recording whose action space is not the module's, or as "
                    f"off_policy_action), but the connector `{connector.name}` has an `act` without an `unact`: write "
                    "this method, the inverse of `act`."
                )
            action = connector.unact(action)
        return action

    def check_offline(self) -> None:
        """Raise a SettingsError if a connector has changed the observations that the module acts on, but can't change
        those that it learns from."""
        if self._online_alone is not None:
            raise SettingsError(
                f"the connector `{self._online_alone}` changes the observations that the module sees when it acts "
                "(online), but not those that it learns from: write its method offline, too."
            )

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        self.check_offline()
        for i, connector in enumerate(self._offline):
            before, exp = exp, connector.offline(exp, module)
            if not isinstance(exp, Experience):
                raise DataError(
                    f"`{connector.name}.offline` returned a {type(exp).__name__}: it must return "
                    "an Experience, such as exp.with_steps(name=array)."
                )
            of_steps, of_segments = (exp.steps, exp.num_steps, "steps"), (exp.final_obs, exp.num_segments, "segments")
            for columns, num, what in (of_steps, of_segments):
                for name, column in columns.items():
                    if len(column) != num:
                        raise DataError(
                            f"`{connector.name}.offline` gave a column `{name}` of {len(column)} rows for {num} "
                            f"{what}: it must have a row for each."
                        )
            check_scalars(exp.steps, f"`{connector.name}.offline`")
            if self._checks_offline and before.num_steps == exp.num_steps:
                _warn_of_differences(connector, before, exp, self._offline[i + 1 :])
        if self._offline:
            self._checks_offline = self._checks_offline and not exp.num_segments
            for columns in (exp.steps, exp.final_obs):
                self._check_shapes("offline", columns, {n: s for n, s in self._obs_shapes.items() if n in columns})
        return exp

    def update(self, exp: Experience, module: "Module | None" = None) -> None:
        """Call `update` of each connector that has one, with the output of those before it, as of before their updates.

        Args:
            exp: The input of the first connector.
            module: The module, for a learner's connectors that use it (`GAE`).
        """
        last = self._learning[-1] if self._learning else -1
        for i, connector in enumerate(self.connectors[: last + 1]):
            seen = connector.offline(exp, module) if i < last else exp
            connector.update(exp)
            exp = seen

    def metrics(self) -> dict[str, float]:
        """The metrics of all connectors, with their names in front: ``normalize_obs/count``."""
        figures: dict[str, float] = {}
        for connector in self.connectors:
            for own_name, value in connector.metrics().items():
                name, number = f"{connector.name}/{own_name}", np.asarray(value)
                if number.ndim or number.dtype.kind not in "biuf":
                    raise SettingsError(f"the metric `{name}` of a connector is {str(value)[:80]!r}, not a number.")
                figures[name] = number.item()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """``connectors``: the name and the state of each, in order."""
        return {"connectors": [{"name": c.name, "state": c.state_dict()} for c in self.connectors]}

    def load_state_dict(self, state: dict[str, Any], *, stateless_may_differ: bool = False) -> None:
        """Restore the state of each connector.

        Args:
            state: What `state_dict` returned.
            stateless_may_differ: Whether connectors without state may differ from those that were saved. This is for a
                learner's connectors, which follow its settings. Connectors in front of a module must be the same, since
                the meaning of its weights depends on them.

        Raises:
            CheckpointError: the state is of other connectors.
        """
        parts, own = state["connectors"], self.connectors
        if stateless_may_differ:
            own = [c for c in own if overrides(c, "state_dict")]
            names = {c.name for c in own}
            parts = [part for part in parts if part["state"] or part["name"] in names]
        there, here = [part["name"] for part in parts], [c.name for c in own]
        if there != here:
            raise CheckpointError(
                f"the state is of the connectors {there}, but here are {here}: use the same ones in the same order."
            )
        for connector, part in zip(own, parts, strict=True):
            connector.load_state_dict(part["state"])


def _lacks_offline(connector: Connector) -> bool:
    return overrides(connector, "online") and not overrides(connector, "offline")


def _warn_of_differences(
    connector: Connector, before: Experience, after: Experience, later: Sequence[Connector]
) -> None:
    """Warn if a connector changes in `offline` what the module sees, but not what it sees when it acts."""
    changed = [n for n, c in after.steps.items() if n not in before.steps or not _same(before.steps[n], c)]
    obs_changed = bool(col.under(changed, col.OBS)) and not connector.hindsight
    acts_alike = overrides(connector, "online")
    if obs_changed and not acts_alike:
        _log.warning(
            "the connector `%s` changes the observations that the module learns from (offline), but not those that it "
            "sees when it acts: write its method online, too, unless this is meant, as for augmentation.",
            connector.name,
        )
    elif obs_changed and before.final_obs and all(before.final_obs.get(n) is c for n, c in after.final_obs.items()):
        _log.warning(
            "the connector `%s` changes the observations of the steps in `offline`, but not `final_obs`, the last "
            "observation of each segment, whose value many algorithms estimate: change it, too, unless this is meant.",
            connector.name,
        )
    uses = [other.name for other in later if isinstance(other, PrevActionReward | ReturnToGo)]
    if uses and col.REWARD in changed and not acts_alike:
        _log.warning(
            "the connector `%s` changes the rewards that the module learns from (offline), but not those that `%s` "
            "gets when the module acts: derive it from etude.connectors.RewardMap, which changes both, or put it "
            "behind `%s`.",
            *(connector.name, uses[0], uses[0]),
        )


def _same(one: Array, other: Array) -> bool:
    return one is other or np.array_equal(host(one), host(other))


def _changes_actions(connector: Connector) -> bool:
    return bool(connector.bounds) if isinstance(connector, BoundedActions) else overrides(connector, "act")


def check_takes_tensors(pipeline: Pipeline) -> None:
    """Raise a SettingsError for a connector that can't work on tensors."""
    for connector in pipeline.connectors:
        if not connector.takes_tensors:
            able = ", ".join(name for name, cls in BY_NAME.items() if cls.takes_tensors)
            raise SettingsError(
                f"the env gives torch tensors, on which the connector `{connector.name}` can't work: leave it out, do "
                f"its work in the env, or let the env give NumPy arrays. If your own connector can work on tensors, "
                f"set takes_tensors = True in its class. These can: {able}."
            )


_ARRAY: Final = "$array"
_FLOAT: Final = "$float"


def state_to_json(pipeline: Pipeline) -> dict[str, Any]:
    """What the connectors have learned, without the running state of slots.

    Arrays become ``{"$array": [numbers in C order], "shape": [...], "dtype": "float64"}``; numbers that are not finite
    become ``{"$float": "inf"}``.

    Raises:
        DataError: a connector's state holds anything but plain data and arrays.
    """
    learned = pipeline.copy()
    learned.start(0)
    found = _encoded(learned.state_dict(), "connectors")
    assert isinstance(found, dict)
    return found


def state_from_json(pipeline: Pipeline, data: Any) -> None:
    """Restore what `state_to_json` returned; call it after `Pipeline.spaces`, before `start`.

    Raises:
        DataError: the data is of other connectors or shapes, or is invalid; nothing has changed then.
    """
    if isinstance(data, Mapping) and data and "connectors" not in data:
        raise DataError(
            f"the recording stores the state of the connectors of each module ({', '.join(map(str, data))}), not one "
            "for all of them. Let them learn from the data instead (`obs_filter` 'data')."
        )
    try:
        state = json.loads(json.dumps(data), object_hook=_restored)
        pipeline.copy().load_state_dict(state)
    except CheckpointError as error:
        raise DataError(f"what the recording stores of its connectors does not fit: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"what the recording stores of its connectors can't be read ({type(error).__name__}: {error}). Let them "
            "learn from the data instead."
        ) from error
    pipeline.load_state_dict(state)


def _encoded(node: Any, path: str) -> Any:
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else {_FLOAT: str(node)}
    if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
        return {key: _encoded(value, f"{path}/{key}") for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_encoded(value, f"{path}/{i}") for i, value in enumerate(node)]
    if isinstance(node, np.ndarray) and node.dtype.kind in "biuf":
        numbers = [_encoded(value, path) for value in node.reshape(-1).tolist()]
        return {_ARRAY: numbers, "shape": list(node.shape), "dtype": node.dtype.name}
    raise DataError(
        f"`{path}` is {type(node).__name__}, which can't be kept with a recording: what state_dict() of a connector "
        "gives must be plain data and arrays of numbers."
    )


def _restored(node: dict[str, Any]) -> Any:
    if _FLOAT in node:
        return float(node[_FLOAT])
    if _ARRAY not in node:
        return node
    dtype = np.dtype(str(node["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.array(node[_ARRAY], dtype).reshape(node["shape"])
