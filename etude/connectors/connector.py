# SPDX-License-Identifier: Apache-2.0
"""Connector: a transformation with an online side (a batch of slots) and an offline side (an Experience)."""

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.errors import DataError, SpaceError
from etude.experience import Experience
from etude.experience.arrays import Array, Constant, cast, concat, host, host_columns
from etude.modules.module import Module
from etude.spaces import Flattener, Nester, Space, leaf_dtype, leaf_shape, leaves


@dataclasses.dataclass(slots=True)
class Inputs:
    """What the env → module side sees for the rows of one turn. Never write to its arrays: they are the caller's."""

    slots: NDArray[np.int64]
    """``[rows]``: the slot of each row; no slot twice."""
    obs: Columns
    """Each ``[rows, ...]``: the observations that wait for an action."""
    first: NDArray[np.bool_]
    """``[rows]``: this observation begins an episode."""
    prev_action: Columns
    """Each ``[rows, ...]``: what the module chose in the step before; zeros where ``first``."""
    prev_reward: NDArray[np.float64]
    """``[rows]``: what that step earned; zeros where ``first``."""

    def with_obs(self, obs: Columns) -> "Inputs":
        """The same rows with other observations."""
        return Inputs(self.slots, obs, self.first, self.prev_action, self.prev_reward)


def snake_case(name: str) -> str:
    """``FrameStack`` as ``frame_stack``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Connector:
    """A transformation on the way between env and module, and the same one on recorded Experience. Does nothing itself.

    Override what is needed. What `online` makes step by step, `offline` must make from the recorded episode. The calls
    come in this order: `spaces` once, `start`, then `online` and `act` at every step; `offline` and `update` after each
    collection. ``__init__`` keeps its arguments as attributes of the same names, which ``repr`` shows.
    """

    context: int = 0
    """How many earlier steps of an episode `offline` must see to make a step's observation: the lookback it needs."""

    needs: tuple[str, ...] | None = None
    """The step columns, by name or root, that `offline` and `update` look at: of recordings, others need not be read.
    None: it is not known, all of them."""

    uses_module: bool = False
    """`offline` asks the module something: where the module learns meanwhile, it is called for each batch anew."""

    hindsight: bool = False
    """`offline` shows what was known only when an episode had ended, so that it is not what `online` would have shown.
    Only algorithms that learn from recordings take such a connector."""

    takes_tensors: bool = False
    """`online`, `act`, `unact`, `offline` and `update` work on torch tensors, too, and then give tensors on the same
    device, as they do where a vector env gives tensors. Others are refused there."""

    sum_over_learners: Callable[[NDArray[np.float64]], None] | None = None
    """Where several learners work on a batch, each on its share: makes an array, in place, the sum of everyone's. For
    statistics over a batch, which all must then ask for equally often. None: there is one learner."""

    @property
    def name(self) -> str:
        """What `Pipeline.add` finds it by: the class's name in snake case."""
        return snake_case(type(self).__name__)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """The spaces that the module sees, given those on the env's side.

        Raises:
            SpaceError: the connector can't work on these spaces.
        """
        return obs_space, action_space

    def start(self, num_slots: int) -> None:
        """Make the running state of ``num_slots`` slots, and forget that of earlier ones; what was learned stays."""

    def online(self, inputs: Inputs) -> Inputs:
        """Env → module: what the module sees, for the rows of one turn."""
        return inputs

    def new_state(self, num_rows: int) -> dict[str, Any]:
        """What `step` is given at the start of an episode, by name; {} if nothing is kept from step to step.

        Where a connector has a `step` of its own, these are zeros ``[num_rows, ...]``. By default, it is what
        `state_dict` gives after `start`.
        """
        if not self._remembers():
            return {}
        own = copy.deepcopy(self)
        own.start(num_rows)
        return own.state_dict()

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        """As `online`, but what is kept from step to step is given and returned, and nothing here changes.

        `Policy.act` calls it. By default, a copy of the connector does the work, which takes longer. `Policy.export`
        needs a `step` of a connector that has a `start`, and of one that does not take tensors: written for NumPy
        arrays and torch tensors alike, without decisions in Python by their values.

        Args:
            inputs: The rows. Those where an episode begins (``first``) don't depend on ``state``.
            state: `new_state`, or what the last step returned. It is not written to.
        """
        if not self._remembers():
            return self.online(inputs), state
        own = copy.deepcopy(self)
        own.load_state_dict(state)
        return own.online(inputs), own.state_dict()

    def _remembers(self) -> bool:
        return overrides(self, "start") and overrides(self, "online")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "online" in cls.__dict__ and "step" not in cls.__dict__:  # an inherited one would do something else
            cls.step, cls.new_state = Connector.step, Connector.new_state  # type: ignore[method-assign]

    def act(self, action: Columns) -> Columns:
        """Module → env: what the env gets; columns ``[rows, ...]``. Recorded is what the module chose."""
        return action

    def unact(self, action: Columns) -> Columns:
        """Env → module: the inverse of `act`, for actions that the env took of itself (``off_policy_action``)."""
        return action

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """What the module saw, ``final_obs`` included, from Experience as recorded; the same rows and segments.

        The first row of a segment is taken for the start of its episode; where it is not, give `context` rows of
        lookback: then all rows after them are right.
        """
        return exp

    def update(self, exp: Experience) -> None:
        """Learn from newly collected Experience. Online and offline work the same until the next call."""

    def metrics(self) -> dict[str, float]:
        """What results are to say of it, by name: they have it as ``metrics``, with the connector's name before it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned and the running state of the slots: plain data and arrays, copied."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; called after `spaces`. A `start` after it keeps only what was learned.

        Raises:
            CheckpointError: the state is of other columns or shapes.
        """

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        given = ",".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))
        return self.name + (f":{given}" if given else "")


def overrides(connector: Connector, method: str) -> bool:
    """Whether a connector does anything in a method of `Connector`."""
    return getattr(type(connector), method) is not getattr(Connector, method)


class ObservationMap(Connector):
    """A connector that changes each observation by itself, by `map_rows`: online and offline are the same."""

    needs: tuple[str, ...] | None = (col.OBS,)

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        """What the module sees, columns ``[rows, ...]``, for what the env gave; nothing is written to."""
        raise NotImplementedError

    def online(self, inputs: Inputs) -> Inputs:
        return inputs.with_obs(self.map_rows(inputs.obs, len(inputs.slots)))

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        obs, final_obs = (col.subtree(exp.steps, col.OBS), exp.final_obs) if self.takes_tensors else observations(exp)
        return replace_obs(exp, self.map_rows(obs, exp.num_steps), self.map_rows(final_obs, exp.num_segments))


def observations(exp: Experience) -> tuple[Columns, Columns]:
    """The observations of the steps and ``final_obs``, in NumPy."""
    return host_columns(col.subtree(exp.steps, col.OBS)), host_columns(exp.final_obs)


def map_leaves(space: Space, change: Callable[[str, Space], Space], root: str) -> Space:
    """``space`` with each simple space in it replaced by ``change(column name, simple space)``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            [(key, map_leaves(sub, change, f"{root}{SEPARATOR}{key}")) for key, sub in space.spaces.items()]
        )
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaves(sub, change, f"{root}{SEPARATOR}{i}") for i, sub in enumerate(space.spaces)])
    return change(root, space)


def with_parts(obs_space: Space, parts: Mapping[str, Space], who: str) -> Space:
    """The observation space as a Dict with more ``parts``; one that is no Dict becomes the part ``obs``.

    Raises:
        SpaceError: it has a part of that name already; ``who`` adds one.
    """
    there = dict(obs_space.spaces) if isinstance(obs_space, spaces.Dict) else {col.OBS: obs_space}
    for key in parts:
        if key in there:
            raise SpaceError(f"{who} adds the key {key!r}, but the observation has it: rename the env's.")
    return spaces.Dict([*there.items(), *parts.items()])


def with_part_columns(obs: Columns, parts: Columns, *, wraps: bool) -> Columns:
    """Observation columns with those of more ``parts``; ``wraps`` where the observation was no Dict before."""
    there = col.renamed(obs, col.OBS, f"{col.OBS}{SEPARATOR}{col.OBS}") if wraps else obs
    return {**there, **{f"{col.OBS}{SEPARATOR}{key}": column for key, column in parts.items()}}


def replace_obs(exp: Experience, obs: Columns, final_obs: Columns) -> Experience:
    """``exp`` with all its observation columns replaced; everything else is shared."""
    others = {name: column for name, column in exp.steps.items() if not col.is_under(name, col.OBS)}
    return Experience({**obs, **others}, exp.offsets, exp.segments, final_obs)


def column(exp: Experience, name: str, who: str) -> NDArray[Any]:
    """The step column ``name`` in NumPy.

    Raises:
        DataError: there is none; ``who`` needs it.
    """
    return host(array_column(exp, name, who))


def array_column(exp: Experience, name: str, who: str) -> Array:
    """The step column ``name`` as it is, for connectors that take tensors.

    Raises:
        DataError: there is none; ``who`` needs it.
    """
    if name not in exp.steps:
        raise DataError(f"{who} needs the column `{name}`, but the experience has only {', '.join(exp.steps)}.")
    return exp.steps[name]


PREV_ACTION: Final = "prev_action"
"""The part of an observation that says what was done before it."""


class ActionCodes:
    """Actions as numbers ``[rows, width]``: one-hot for choices, else as they are, flattened; all columns in a row.

    Args:
        action_space: Whose columns these are; None: of none yet.
    """

    def __init__(self, action_space: Space | None = None) -> None:
        found = {} if action_space is None else leaves(action_space, col.ACTION)
        self._codes = {name: _ActionCode(leaf) for name, leaf in found.items()}
        self.names = list(self._codes)
        """The columns."""
        self.width = sum(code.width for code in self._codes.values())
        """How many numbers an action becomes."""

    def __call__(self, action: Columns) -> Array:
        """float32 ``[rows, width]``: the numbers; tensors of tensors."""
        return concat([cast(code(action[name]), np.float32) for name, code in self._codes.items()], 1)

    def write(self, action: Columns, out: NDArray[np.float32]) -> None:
        """Write the numbers into the first columns of ``out`` ``[rows, at least width]``."""
        at = 0
        for name, code in self._codes.items():
            out[:, at : at + code.width] = code(action[name])
            at += code.width


class _ActionCode:
    """One action column as numbers."""

    def __init__(self, leaf: Space) -> None:
        self._components = self.width = math.prod(leaf_shape(leaf))
        self._is_choice = isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            sizes = np.reshape(leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec, -1)
            starts = np.reshape(leaf.start, -1)
            self._component = Constant(np.repeat(np.arange(len(sizes)), sizes))  # of each number
            choices = [first + np.arange(n) for first, n in zip(starts, sizes, strict=True)]
            self._choice = Constant(np.concatenate(choices))
            self.width = len(self._choice.value)

    def __call__(self, action: Array) -> Array:
        flat = action.reshape(action.shape[0], self._components)
        if not self._is_choice:
            return flat
        each = flat if self._components == 1 else flat[:, self._component.like(flat)]
        return each == self._choice.like(flat)


_PROBES = 2


class FunctionConnector(ObservationMap):
    """Maps observations by a plain function: ``fn(obs) -> obs``, both nested and with the batch's axis in front.

    The space of what it gives is found by calling it on two samples: arrays that it hands through keep their space,
    others become Boxes of their shape and dtype without bounds (MultiBinary for bool).

    Args:
        fn: Works on each row by itself, remembers nothing, and does not write to what it is given.
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
        """Calls the function on two samples of ``obs_space``.

        Raises:
            SpaceError: it fails, changes its input, or gives something else than arrays of two rows.
        """
        samples = copy.deepcopy(obs_space)
        samples.seed(0)
        self._nest = Nester(obs_space, col.OBS)
        flat = Flattener(obs_space, col.OBS)
        drawn = [flat(samples.sample()) for _ in range(_PROBES)]
        given = {name: np.stack([one[name] for one in drawn]) for name in flat.leaves}
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
        kept = {id(values): flat.leaves[name] for name, values in passed.items()}
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
        if not rows:  # functions such as a maximum fail on nothing
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
