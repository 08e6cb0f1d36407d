# SPDX-License-Identifier: Apache-2.0
"""Connector: a transformation that works online (on a batch of slots) and offline (on an Experience)."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.errors import CheckpointError, DataError, SettingsError, SpaceError
from etude.experience import Experience
from etude.experience.arrays import ActionCodes, Array, Index, host, host_columns
from etude.settings import warn_of_misspelt
from etude.spaces import Flattener, Nester, Space, leaf_dtype, leaf_shape, leaves

if TYPE_CHECKING:
    from etude.modules.module import Module


@dataclasses.dataclass(slots=True)
class Inputs:
    """The input of `Connector.online`: the rows of one turn, one for each slot that needs an action now.

    A slot is one agent in one copy of the env. Never write to these arrays.
    """

    slots: NDArray[np.int64]
    """The slot of each row, int64 ``[rows]``, all different."""
    obs: Columns
    """The observations to act on, each ``[rows, ...]``."""
    first: NDArray[np.bool_]
    """Whether the observation begins an episode, bool ``[rows]``."""
    prev_action: Columns
    """The module's action in the previous step, each column ``[rows, ...]``; zeros where ``first``."""
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

    Override what is needed. `offline` must compute from a recorded episode what `online` computes step by step.
    `spaces` is called once, then `start`, then `online` and `act` at every step; `offline` and `update` are called for
    each collection.

    ``__init__`` must store its arguments unchanged in attributes of the same names: ``repr`` shows them, and a loaded
    checkpoint creates the connector again with them. `state_dict` and `load_state_dict` are required with an `update`,
    and with a `start` but no `step`.
    """

    context: int = 0
    """Number of preceding steps of the episode (lookback) that `offline` needs to compute a step's observation."""

    needs: tuple[str, ...] | None = None
    """The step columns, by name or root, that `offline` and `update` use. Others need not be read from recordings.
    None: unknown, so all are read."""

    uses_module: bool = False
    """Whether `offline` uses the module. If so, it is called again for each batch, because the module changes."""

    hindsight: bool = False
    """Whether `offline` uses what is known only after the end of an episode, so that it differs from `online`. Only
    algorithms that learn from recordings accept such a connector."""

    takes_tensors: bool = False
    """Whether `online`, `act`, `unact`, `offline` and `update` also work on torch tensors, and then return tensors on
    the same device. Vector envs that return tensors require it."""

    sum_over_learners: Callable[[NDArray[np.float64]], None] | None = None
    """Replaces an array, in place, by its sum over all learners that share a batch, for statistics of the whole batch.
    All learners must call it equally often. None: there is one learner."""

    @property
    def name(self) -> str:
        """The class's name in snake case, as used in settings, metrics and messages."""
        return snake_case(type(self).__name__)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Return the observation and action spaces on the module's side, given those on the env's side.

        Raises:
            SpaceError: the connector can't work on these spaces.
        """
        return obs_space, action_space

    def start(self, num_slots: int) -> None:
        """Create the per-episode state of ``num_slots`` slots, and forget earlier slots; keep what was learned."""

    def online(self, inputs: Inputs) -> Inputs:
        """Transform observations on their way from env to module, for the rows of one turn."""
        return inputs

    def new_state(self, num_rows: int) -> dict[str, Any]:
        """Return the state to pass to the first `step` of an episode; {} if nothing is kept from step to step.

        By default, this is what `state_dict` returns after `start`. A connector with its own `step` must return zeros
        ``[num_rows, ...]`` by name.
        """
        if not self.remembers():
            return {}
        own = copy.deepcopy(self)
        own.start(num_rows)
        return own.state_dict()

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        """Like `online`, but pure: the state is an argument and a result, and the connector does not change.

        `Policy.act` calls it. By default, it runs `online` on a copy of the connector, which is slower. `Policy.export`
        requires connectors that override `start` or don't take tensors to override `step`, too. It must work on NumPy
        arrays and torch tensors alike, without Python branches on their values.

        Args:
            inputs: The rows. The results where ``first`` must not depend on ``state``.
            state: The result of `new_state`, or the state that the last step returned. It must not be written to.

        Returns:
            The module's inputs, and the new state.
        """
        if not self.remembers():
            return self.online(inputs), state
        own = self._with_state(state)
        return own.online(inputs), own.state_dict()

    def step_and_act(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, "Acting"]:
        """Like `online` and then `act`, but pure, as `step` is.

        Returns:
            The module's inputs; and a function that takes the module's action, and returns the env's action and the
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
        """Whether the connector may keep state from step to step."""
        return overrides(self, "start") and (overrides(self, "online") or overrides(self, "act"))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_misspelt(cls, ("spaces", "online", "offline", "update", "metrics", "state_dict", "load_state_dict"))
        if "online" in cls.__dict__ and "step" not in cls.__dict__:  # an inherited `step` would do something else
            cls.step, cls.new_state = Connector.step, Connector.new_state  # type: ignore[method-assign]

    def act(self, action: Columns) -> Columns:
        """Transform the module's action, columns ``[rows, ...]``, into the env's. Recordings keep the module's.

        If a connector has a `start` but no `step`, `Policy.act` calls `act` on a copy with the given state. Everything
        that `act` changes, such as a random generator, must therefore be in `state_dict`. In a connector with a `step`,
        `act` must neither use nor change the state.
        """
        return action

    def unact(self, action: Columns) -> Columns:
        """Transform the env's action into the module's: the inverse of `act`. It is used for actions that the env
        executed instead (``off_policy_action``), and for recordings whose action space is not the module's."""
        return action

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Compute what the module saw, including ``final_obs``, from raw Experience.

        A connector that also acts keeps all rows and segments. One that only prepares what is learned from may leave
        segments out, which are then not learned from, or add copies of them under other episode ids.

        The first row of a segment is treated as the start of its episode. If it is not, pass `context` rows of
        lookback; all rows after them are then correct.
        """
        return exp

    def update(self, exp: Experience) -> None:
        """Learn from newly collected Experience, such as statistics for `online` and `offline`.

        ``exp`` is what this connector's `offline` gets: only the connectors before it have been applied. Lookback rows
        were in it before; ``exp.trained()`` is True for the new ones. Between two calls, `online` and `offline` must
        not change.
        """

    def metrics(self) -> dict[str, float]:
        """Metrics by name. Results list them with the connector's name in front."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned, and the per-episode state of the slots: copies of plain data and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``. It is called after `spaces`; a later `start` keeps only what was learned.

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


def check_state_methods(connector: Connector) -> None:
    """Raise a SettingsError if a connector has state, but lacks `state_dict` or `load_state_dict`."""
    if overrides(connector, "state_dict") and overrides(connector, "load_state_dict"):
        return
    if overrides(connector, "update") or (connector.remembers() and not overrides(connector, "step")):
        raise SettingsError(
            f"the connector `{connector.name}` has an `update` or a `start`, and so a state, but lacks "
            "`state_dict` or `load_state_dict`: checkpoints and policies that act would lose it. Write both; they may "
            "return {} and do nothing if it is not needed later. For a `start` without an `act`, `new_state` and "
            "`step` will do."
        )


class MemoryConnector(Connector):
    """Base class of connectors that keep arrays of each slot from step to step.

    Subclasses implement `_empty` and `_advance`; `online`, `step` and `state_dict` are based on these.
    """

    state_key: str = "kept"
    """The name of the arrays in the state."""

    def __init__(self) -> None:
        self._kept: Columns = {}
        self._slots = np.zeros(0, np.int64)
        self._is_borrowed = False
        """Whether the caller also holds the arrays in ``_kept``, so that they must not be written to."""

    def _empty(self, num_rows: int) -> Columns:
        """The arrays before the first step, zeros ``[num_rows, ...]``."""
        raise NotImplementedError

    def _advance(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """See `step`; for NumPy arrays and tensors."""
        raise NotImplementedError

    def start(self, num_slots: int) -> None:
        """Create slots that have not begun an episode yet."""
        self._kept, self._slots, self._is_borrowed = self._empty(num_slots), np.arange(num_slots), False

    def online(self, inputs: Inputs) -> Inputs:
        """Advance the slots of the rows by one step."""
        slots = inputs.slots
        if len(slots) == len(self._slots) and bool((slots == self._slots).all()):
            inputs, self._kept = self._advance(inputs, self._kept)
            self._is_borrowed = True
            return inputs
        if self._is_borrowed:
            self._kept = {name: column.copy() for name, column in self._kept.items()}
            self._is_borrowed = False
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
        return {self.state_key: {name: column.copy() for name, column in self._kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the arrays and the number of slots.

        Raises:
            CheckpointError: the arrays have other names or shapes.
        """
        given = state[self.state_key]
        here = {name: column.shape[1:] for name, column in self._empty(0).items()}
        there = {name: np.shape(column)[1:] for name, column in given.items()}
        if there and here != there:
            raise CheckpointError(
                f"the {self.state_key} of {self} have the shapes {there} in the checkpoint, but {here} here: "
                "it is of another env, or of other arguments."
            )
        self.start(max(map(len, given.values()), default=0))
        for name, column in given.items():
            self._kept[name][...] = column


class ObservationMap(Connector):
    """Base class of connectors that map each observation independently, with `map_rows`, both online and offline."""

    needs: tuple[str, ...] | None = (col.OBS,)

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        """Map the env's observations to the module's, columns ``[rows, ...]``, without writing to them."""
        raise NotImplementedError

    def online(self, inputs: Inputs) -> Inputs:
        return inputs.with_obs(self.map_rows(inputs.obs, len(inputs.slots)))

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        obs, final_obs = (col.subtree(exp.steps, col.OBS), exp.final_obs) if self.takes_tensors else observations(exp)
        return replace_obs(exp, self.map_rows(obs, exp.num_steps), self.map_rows(final_obs, exp.num_segments))


def observations(exp: Experience) -> tuple[Columns, Columns]:
    """The observations of the steps and ``final_obs``, as NumPy arrays."""
    return host_columns(col.subtree(exp.steps, col.OBS)), host_columns(exp.final_obs)


def with_parts(obs_space: Space, parts: Mapping[str, Space], who: str) -> Space:
    """The observation space as a Dict with more ``parts``; a space that is not a Dict becomes the part ``obs``.

    Raises:
        SpaceError: it already has a part with such a name. ``who`` names the connector in the message.
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
        DataError: there is no such column. ``who`` names the connector in the message.
    """
    return host(array_column(exp, name, who))


def array_column(exp: Experience, name: str, who: str) -> Array:
    """The step column ``name`` without conversion, for connectors that take tensors.

    Raises:
        DataError: there is no such column. ``who`` names the connector in the message.
    """
    if name not in exp.steps:
        raise DataError(f"{who} needs the column `{name}`, but the experience has only {', '.join(exp.steps)}.")
    return exp.steps[name]


def windows(
    values: NDArray[Any], newest: NDArray[Any], rows: Index, starts: Index, k: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """For each of ``rows``, the last ``k`` values up to it: ``[len(rows), k, ...]``.

    Values before the start of the row's segment are replaced by the one at the start.

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
    """The space of several values of a simple space. ``join`` repeats an array, such as a bound, for all of them."""
    dtype: Any = leaf_dtype(leaf).type
    if isinstance(leaf, spaces.Box):
        return spaces.Box(join(leaf.low), join(leaf.high), dtype=dtype)
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        sizes = leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec
        return spaces.MultiDiscrete(join(sizes), dtype, start=join(leaf.start))
    shape = join(np.zeros(leaf_shape(leaf))).shape
    return spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))


def step_before(exp: Experience, names: Iterable[str], who: str) -> tuple[Columns, Columns, NDArray[np.bool_]]:
    """Columns of the step before each step, for connectors that show the module the previous step.

    Returns:
        The columns ``[num_steps, ...]`` of the step before, meaningless where a segment begins; the columns
        ``[num_segments, ...]`` of each segment's last step; and where segments begin, bool ``[num_steps]``.
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
    """The module's action space, if a connector after this one may change it. The pipeline sets it before `spaces`."""

    _codes: ActionCodes
    """Set by `_set_codes`."""

    def _set_codes(self, action_space: Space) -> int:
        """Set up the encoding of the module's actions, from `chosen` or else ``action_space``. Returns its width."""
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
            SpaceError: it fails, writes to its input, or returns anything but (nested) arrays of numbers with two rows.
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
