# SPDX-License-Identifier: Apache-2.0
"""Connector: a transformation that works online (on a batch of slots) and offline (on an Experience)."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.errors import CheckpointError, DataError, SettingsError, SpaceError
from etude.experience import Experience
from etude.experience.arrays import ActionCodes, Array, Index, host, host_columns
from etude.modules.module import Module
from etude.settings import warn_of_misspelt
from etude.spaces import Flattener, Nester, Space, leaf_dtype, leaf_shape, leaves


@dataclasses.dataclass(slots=True)
class Inputs:
    """What connectors get on the way from env to module, for the rows of one turn. Never write to its arrays."""

    slots: NDArray[np.int64]
    """The slot of each row, int64 ``[rows]``, without repetitions."""
    obs: Columns
    """The observations that need an action, each ``[rows, ...]``."""
    first: NDArray[np.bool_]
    """Whether the observation begins an episode, bool ``[rows]``."""
    prev_action: Columns
    """What the module chose in the previous step, each ``[rows, ...]``; zeros where ``first``."""
    prev_reward: NDArray[np.float64]
    """The reward of the previous step, float64 ``[rows]``; zeros where ``first``."""

    def with_obs(self, obs: Columns) -> "Inputs":
        """The same rows with other observations."""
        return Inputs(self.slots, obs, self.first, self.prev_action, self.prev_reward)


def snake_case(name: str) -> str:
    """A class name in snake case: ``FrameStack`` as ``frame_stack``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Connector:
    """Base class of transformations between env and module, online and on recorded Experience. Does nothing itself.

    Override what is needed. `offline` must compute from a recorded episode what `online` computes step by step. The
    calls come in this order: `spaces` once, `start`, then `online` and `act` at every step; `offline` and `update`
    after each collection. ``__init__`` must keep its arguments as attributes of the same names, which ``repr`` shows,
    unchanged, since a loaded checkpoint makes the connector again with them. With an `update`, or a `start` without a
    `step`, it also needs `state_dict` and `load_state_dict`.
    """

    context: int = 0
    """Number of earlier steps of an episode, as lookback, that `offline` needs to compute a step's observation."""

    needs: tuple[str, ...] | None = None
    """The step columns, by name or root, that `offline` and `update` use, so that others need not be read from
    recordings. None: unknown, all of them."""

    uses_module: bool = False
    """Whether `offline` uses the module: while the module learns, it is then called again for each batch."""

    hindsight: bool = False
    """Whether `offline` uses what is known only after an episode ended, and so differs from `online`. Only algorithms
    that learn from recordings accept such a connector."""

    takes_tensors: bool = False
    """Whether `online`, `act`, `unact`, `offline` and `update` also work on torch tensors, and then return tensors on
    the same device. Vector envs that return tensors require it."""

    sum_over_learners: Callable[[NDArray[np.float64]], None] | None = None
    """If several learners share a batch: replaces an array, in place, by the sum over all learners, for statistics over
    the batch. All of them must then call it equally often. None: there is one learner."""

    @property
    def name(self) -> str:
        """The class's name in snake case, as in settings, metrics and messages."""
        return snake_case(type(self).__name__)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """The spaces that the module sees, given those on the env's side.

        Raises:
            SpaceError: the connector can't work on these spaces.
        """
        return obs_space, action_space

    def start(self, num_slots: int) -> None:
        """Make the running state of ``num_slots`` slots, and forget that of earlier ones; keep what was learned."""

    def online(self, inputs: Inputs) -> Inputs:
        """Env to module: what the module sees, for the rows of one turn."""
        return inputs

    def new_state(self, num_rows: int) -> dict[str, Any]:
        """The state that `step` gets at the start of an episode, by name; {} if nothing is kept from step to step.

        For a connector with its own `step`, these are zeros ``[num_rows, ...]``. By default, it is what `state_dict`
        returns after `start`.
        """
        if not self.remembers():
            return {}
        own = copy.deepcopy(self)
        own.start(num_rows)
        return own.state_dict()

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        """Like `online`, but the state kept from step to step is passed and returned, and nothing here changes.

        `Policy.act` calls it. By default, a copy of the connector does the work, which takes longer. `Policy.export`
        needs a custom `step` from connectors that override `start` and from those that don't take tensors. It must work
        on NumPy arrays and torch tensors alike, without Python branches on their values.

        Args:
            inputs: The rows. Those where an episode begins (``first``) don't depend on ``state``.
            state: `new_state`, or the state that the last step returned. It is not written to.
        """
        if not self.remembers():
            return self.online(inputs), state
        own = self._with_state(state)
        return own.online(inputs), own.state_dict()

    def step_and_act(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, "Acting"]:
        """Like `online` and then `act`, as `step` is like `online`.

        Returns:
            What the module sees; and a function that takes what the module chose, and returns the env's action and the
            state after the step.
        """
        if self.remembers() and overrides(self, "act") and not overrides(self, "step"):  # `act` may change the state
            own = self._with_state(state)
            return own.online(inputs), lambda chosen: (own.act(chosen), own.state_dict())
        inputs, after = self.step(inputs, state)
        return inputs, lambda chosen: (self.act(chosen), after)

    def _with_state(self, state: dict[str, Any]) -> Self:
        own = copy.deepcopy(self)
        own.load_state_dict(state)
        return own

    def remembers(self) -> bool:
        """Return whether it may keep something from step to step."""
        return overrides(self, "start") and (overrides(self, "online") or overrides(self, "act"))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_misspelt(cls, ("spaces", "online", "offline", "update", "metrics", "state_dict", "load_state_dict"))
        if "online" in cls.__dict__ and "step" not in cls.__dict__:  # an inherited `step` would do something else
            cls.step, cls.new_state = Connector.step, Connector.new_state  # type: ignore[method-assign]

    def act(self, action: Columns) -> Columns:
        """Module to env: the action that the env gets, columns ``[rows, ...]``. Recordings keep what the module
        chose.

        In `Policy.act`, the `act` of a connector with a `start` and without a `step` works on a copy, which has the
        state that was given: whatever it changes, a random generator for instance, must be in `state_dict`. With a
        `step`, it must neither use nor change what is kept.
        """
        return action

    def unact(self, action: Columns) -> Columns:
        """Env to module: the inverse of `act`, for actions that the env took by itself (``off_policy_action``), and for
        recorded ones where the recording's action space is not the module's."""
        return action

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """What the module saw, ``final_obs`` included, computed from Experience as recorded; same rows and segments.

        The first row of a segment is treated as the start of its episode. If it is not, pass `context` rows of
        lookback; all rows after them are then right.
        """
        return exp

    def update(self, exp: Experience) -> None:
        """Learn from newly collected Experience, after `offline` was applied to it. `online` and `offline` don't change
        until the next call. Rows of context are in it again (lookback): ``exp.trained()`` is True for the new ones."""

    def metrics(self) -> dict[str, float]:
        """Metrics for results, by name; results list them with the connector's name in front."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned and the running state of the slots: plain data and arrays, copied."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``; called after `spaces`. A `start` after it keeps only what was learned.

        Raises:
            CheckpointError: the state has other columns or shapes.
        """

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        given = ",".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))
        return self.name + (f":{given}" if given else "")


Acting: TypeAlias = Callable[[Columns], tuple[Columns, dict[str, Any]]]
"""See `Connector.step_and_act`."""


def overrides(connector: Connector, method: str) -> bool:
    """Whether a connector overrides a method of `Connector`."""
    return getattr(type(connector), method) is not getattr(Connector, method)


def check_kept(connector: Connector) -> None:
    """Raise a SettingsError if a connector has something to keep, but no `state_dict` or no `load_state_dict`."""
    if overrides(connector, "state_dict") and overrides(connector, "load_state_dict"):
        return
    if overrides(connector, "update") or (connector.remembers() and not overrides(connector, "step")):
        raise SettingsError(
            f"the connector `{connector.name}` keeps something, since it has an `update` or a `start`, but lacks "
            "`state_dict` or `load_state_dict`: checkpoints and policies that act would lose it. Write both; they may "
            "return {} and do nothing if it is not needed later. For a `start` without an `act`, `new_state` and "
            "`step` will do."
        )


class MemoryConnector(Connector):
    """Base class of connectors that keep arrays of each slot from step to step.

    Subclasses write `_empty` and `_advance`; acting with slots, `step` and the state of a checkpoint follow from them.
    """

    kept_as: str = "kept"
    """The name of the arrays in the state."""

    def __init__(self) -> None:
        self._kept: Columns = {}
        self._slots = np.zeros(0, np.int64)
        self._lent = False
        """Whether the caller also holds the arrays in ``_kept``, so that they must not be written to."""

    def _empty(self, num_rows: int) -> Columns:
        """The arrays before the first step, zeros ``[num_rows, ...]``."""
        raise NotImplementedError

    def _advance(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """See `step`; for NumPy arrays and tensors."""
        raise NotImplementedError

    def start(self, num_slots: int) -> None:
        """Make slots that have not begun an episode yet."""
        self._kept, self._slots, self._lent = self._empty(num_slots), np.arange(num_slots), False

    def online(self, inputs: Inputs) -> Inputs:
        """Advance the slots of the rows by one step."""
        slots = inputs.slots
        if len(slots) == len(self._slots) and bool((slots == self._slots).all()):
            inputs, self._kept = self._advance(inputs, self._kept)
            self._lent = True
            return inputs
        if self._lent:
            self._kept = {name: column.copy() for name, column in self._kept.items()}
            self._lent = False
        inputs, after = self._advance(inputs, {name: column.take(slots, axis=0) for name, column in self._kept.items()})
        for name, column in after.items():
            self._kept[name][slots] = column
        return inputs

    def new_state(self, num_rows: int) -> Columns:
        return self._empty(num_rows)

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        return self._advance(inputs, state)

    def state_dict(self) -> dict[str, Any]:
        """The arrays by name, ``[num_slots, ...]``."""
        return {self.kept_as: {name: column.copy() for name, column in self._kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the arrays, and as many slots."""
        given = state[self.kept_as]
        here = {name: column.shape[1:] for name, column in self._empty(0).items()}
        there = {name: np.shape(column)[1:] for name, column in given.items()}
        if there and here != there:
            raise CheckpointError(
                f"the {self.kept_as} of {self} have the shapes {there} in the checkpoint, but {here} here: "
                "it is of another env, or of other arguments."
            )
        self.start(max(map(len, given.values()), default=0))
        for name, column in given.items():
            self._kept[name][...] = column


class ObservationMap(Connector):
    """Base class of connectors that map each observation on its own, by `map_rows`, online and offline alike."""

    needs: tuple[str, ...] | None = (col.OBS,)

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        """Map the env's observations to the module's, columns ``[rows, ...]``, without writing to them."""
        raise NotImplementedError

    def online(self, inputs: Inputs) -> Inputs:
        return inputs.with_obs(self.map_rows(inputs.obs, len(inputs.slots)))

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        obs, final_obs = (col.subtree(exp.steps, col.OBS), exp.final_obs) if self.takes_tensors else observations(exp)
        return replace_obs(exp, self.map_rows(obs, exp.num_steps), self.map_rows(final_obs, exp.num_segments))


def observations(exp: Experience) -> tuple[Columns, Columns]:
    """The observations of the steps and ``final_obs``, as NumPy arrays."""
    return host_columns(col.subtree(exp.steps, col.OBS)), host_columns(exp.final_obs)


def with_parts(obs_space: Space, parts: Mapping[str, Space], who: str) -> Space:
    """The observation space as a Dict with more ``parts``; a space that is not a Dict becomes the part ``obs``.

    Raises:
        SpaceError: it already has a part with such a name; ``who`` adds one.
    """
    there = dict(obs_space.spaces) if isinstance(obs_space, spaces.Dict) else {col.OBS: obs_space}
    for key in parts:
        if key in there:
            raise SpaceError(f"{who} adds the key {key!r}, but the observation has it: rename the env's.")
    return spaces.Dict([*there.items(), *parts.items()])


def with_part_columns(obs: Columns, parts: Columns, *, wraps: bool) -> Columns:
    """Observation columns with those of more ``parts``; ``wraps`` if the observation was not a Dict before."""
    there = col.renamed(obs, col.OBS, f"{col.OBS}{SEPARATOR}{col.OBS}") if wraps else obs
    return {**there, **{f"{col.OBS}{SEPARATOR}{key}": column for key, column in parts.items()}}


def replace_obs(exp: Experience, obs: Columns, final_obs: Columns) -> Experience:
    """``exp`` with all its observation columns replaced; everything else is shared."""
    others = {name: column for name, column in exp.steps.items() if not col.is_under(name, col.OBS)}
    return Experience({**obs, **others}, exp.offsets, exp.segments, final_obs)


def column(exp: Experience, name: str, who: str) -> NDArray[Any]:
    """The step column ``name`` as a NumPy array.

    Raises:
        DataError: there is none; ``who`` needs it.
    """
    return host(array_column(exp, name, who))


def array_column(exp: Experience, name: str, who: str) -> Array:
    """The step column ``name`` without conversion, for connectors that take tensors.

    Raises:
        DataError: there is none; ``who`` needs it.
    """
    if name not in exp.steps:
        raise DataError(f"{who} needs the column `{name}`, but the experience has only {', '.join(exp.steps)}.")
    return exp.steps[name]


def windows(
    values: NDArray[Any], newest: NDArray[Any], rows: Index, starts: Index, k: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """The last ``k`` of ``values`` up to each of ``rows``, none from before ``starts``: ``[len(rows), k, ...]``.

    Missing values before the start repeat the value at the start.

    Args:
        values: ``[num_steps, ...]``.
        newest: The values at ``rows``, ``[len(rows), ...]``; a row may also be the one after the end of its segment.
        rows: int64 ``[N]``.
        starts: int64 ``[N]``: for each row, the first row of its segment.
        k: Number of values in a window.
        out: Where to write the windows; None: a new array.
    """
    if out is None:
        out = np.empty((len(rows), k, *values.shape[1:]), values.dtype)
    out[:, -1] = newest
    for lag in range(1, k):
        out[:, k - 1 - lag] = values.take(np.maximum(rows - lag, starts), axis=0)
    return out


def stacked_space(leaf: Space, join: Callable[[Any], NDArray[Any]]) -> Space:
    """The space of several values of a simple space, which are joined as ``join`` joins copies of one."""
    dtype: Any = leaf_dtype(leaf).type
    if isinstance(leaf, spaces.Box):
        return spaces.Box(join(leaf.low), join(leaf.high), dtype=dtype)
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        sizes = leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec
        return spaces.MultiDiscrete(join(sizes), dtype, start=join(leaf.start))
    shape = join(np.zeros(leaf_shape(leaf))).shape
    return spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))


def step_before(exp: Experience, names: Iterable[str], who: str) -> tuple[Columns, Columns, NDArray[np.bool_]]:
    """Columns of the step before each step, and of each segment's last step; and where segments begin, ``[num_steps]``.

    Where a segment begins, the values of the step before are meaningless.
    """
    rows, last = np.maximum(np.arange(exp.num_steps) - 1, 0), exp.offsets[1:] - 1
    columns = {name: column(exp, name, who) for name in names}
    first = np.zeros(exp.num_steps, bool)
    first[exp.offsets[:-1]] = True
    before, ends = ({n: c.take(index, axis=0) for n, c in columns.items()} for index in (rows, last))
    return before, ends, first


PREV_ACTION: Final = "prev_action"
"""The part of an observation that holds the previous action."""


class PreviousActions(Connector):
    """Base class of connectors that show the module its previous actions, as `ActionCodes`."""

    chosen: Space | None = None
    """Set by the pipeline before `spaces`: the module's action space, if a connector after this one may change it."""

    _codes: ActionCodes
    """Set by `_set_codes`."""

    def _set_codes(self, action_space: Space) -> int:
        """Encode the module's actions; ``action_space`` is that of this connector's place. Returns the width."""
        self._codes = ActionCodes(action_space if self.chosen is None else self.chosen)
        return self._codes.width


def sampled(obs_space: Space, rows: int) -> Columns:
    """Random observations of a space, the same ones in each call, as columns ``[rows, ...]``."""
    space = copy.deepcopy(obs_space)
    space.seed(0)
    flatten = Flattener(space, col.OBS)
    drawn = [flatten(space.sample()) for _ in range(rows)]
    return {
        name: np.stack([np.asarray(one[name]) for one in drawn]).astype(leaf_dtype(leaf), copy=False)
        for name, leaf in flatten.leaves.items()
    }


_PROBES = 2


class FunctionConnector(ObservationMap):
    """Maps observations with a plain function, ``fn(obs) -> obs``; both are nested, with a batch axis in front.

    The output space is found by calling it on two samples: arrays that are passed through keep their space, others
    become Boxes of their shape and dtype without bounds (MultiBinary for bool).

    Args:
        fn: Must work on each row on its own, keep no state, and not write to its input.
    """

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        self._nest: Nester
        self._flatten: Flattener

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))

    def __repr__(self) -> str:
        return self.name

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Call the function on two samples of ``obs_space`` to find its output space.

        Raises:
            SpaceError: it fails, changes its input, or returns anything but arrays of two rows.
        """
        self._nest = Nester(obs_space, col.OBS)
        given = sampled(obs_space, _PROBES)
        passed = {name: values.copy() for name, values in given.items()}
        try:
            result = self.fn(self._nest(passed))
        except Exception as error:
            raise SpaceError(
                f"the connector function `{self.name}` fails on {_PROBES} samples of {obs_space}: {error!r}."
            ) from error
        for name, values in given.items():
            if not np.array_equal(values, passed[name], equal_nan=values.dtype.kind == "f"):
                raise SpaceError(
                    f"the connector function `{self.name}` writes to its input `{name}`: let it return a copy."
                )
        kept = {id(passed[name]): leaf for name, leaf in leaves(obs_space, col.OBS).items()}
        space = self._space_of(result, kept, col.OBS)
        self._flatten = Flattener(space, col.OBS)
        return space, action_space

    def _space_of(self, result: Any, kept: Mapping[int, Space], name: str) -> Space:
        if isinstance(result, Mapping):
            return spaces.Dict([(key, self._space_of(v, kept, f"{name}{SEPARATOR}{key}")) for key, v in result.items()])
        if isinstance(result, tuple):
            return spaces.Tuple([self._space_of(v, kept, f"{name}{SEPARATOR}{i}") for i, v in enumerate(result)])
        if id(result) in kept:
            return kept[id(result)]
        if not isinstance(result, np.ndarray) or result.shape[:1] != (_PROBES,) or result.dtype.kind not in "fiub":
            found = f"{result.dtype}{list(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
            raise SpaceError(
                f"the connector function `{self.name}` gives {found} as `{name}` for {_PROBES} observations; expected "
                f"a NumPy array of numbers with {_PROBES} rows, or a dict or tuple of them."
            )
        return _box(result)

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        if not rows:  # functions such as max fail on empty arrays
            return {n: np.zeros((0, *leaf_shape(at)), leaf_dtype(at)) for n, at in self._flatten.leaves.items()}
        out: dict[str, NDArray[Any]] = self._flatten(self.fn(self._nest(obs)))
        for name, values in out.items():
            if len(values) != rows:
                raise SpaceError(
                    f"the connector function `{self.name}` gives {len(values)} rows as `{name}` for {rows}."
                )
            if values.dtype == np.bool_:
                out[name] = values.view(np.int8)
        return out


def _box(values: NDArray[Any]) -> Space:
    shape, dtype = values.shape[1:], values.dtype
    if dtype.kind == "b":
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype.type)
