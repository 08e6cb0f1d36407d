# SPDX-License-Identifier: Apache-2.0
"""Arena: copies of an env, each with one slot per agent, stepped with columns of actions."""

import copy
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.env_state import order_of
from etude.errors import EnvError
from etude.experience import arrays
from etude.spaces import Space, in_words, leaves, outside_bounds

if TYPE_CHECKING:
    import torch

Ints: TypeAlias = NDArray[np.int64]

_log = logging.getLogger("etude.envs")


class Kind(NamedTuple):
    """A group of slots whose agents have the same spaces, so that one module can act for them."""

    obs_space: Space
    """The space of one observation, as the env returns it."""
    action_space: Space
    """The space of one action, as the env takes it."""
    slots: range
    """The ids of its slots, which are consecutive."""


@dataclasses.dataclass(slots=True)
class Turn:
    """The current rows of some slots of one kind: the results of their last actions and the next observations.

    A row whose ``terminated`` or ``truncated`` is True ends the agent's episode: ``obs`` is the final observation, and
    no action is expected. The slot's next row, if any, has ``first``.
    """

    slots: NDArray[np.int64]
    """``[n]``: the slots, each at most once. If each env has one slot and all slots are here in order, this may be
    `Arena.env_of` itself, so that readers recognise it without comparing numbers."""
    obs: Columns
    """``[n, ...]`` each: the observations to act on, or final observations. NumPy arrays, or tensors on
    `Arena.device`; all other columns are NumPy arrays."""
    reward: NDArray[np.float64]
    """``[n]``: the total reward of the slot's last action; meaningless where ``first``."""
    terminated: NDArray[np.bool_] | None
    """``[n]``: the episode ended by the env's own rules. None: False for all rows."""
    truncated: NDArray[np.bool_] | None
    """``[n]``: the episode was stopped from outside. None: False for all rows."""
    first: NDArray[np.bool_] | None = None
    """``[n]``: ``obs`` is the first of an episode. None: False for all rows."""
    kind: int = 0
    """The index in `Arena.kinds`."""
    waits: bool = True
    """Whether to send actions. If True, send one for every row; those for rows that end an episode are ignored. False
    if every row ends an episode."""
    blind: NDArray[np.bool_] | None = None
    """``[n]``: the env gave no final observation for this end of an episode, so ``obs`` is meaningless. None: False for
    all rows."""
    taken: tuple[NDArray[np.int64], Columns] | None = None
    """The rows whose env took another action than the one sent, and those actions as flat columns ``[rows, ...]``."""
    env_t: NDArray[np.int64] | None = None
    """``[n]``: the env's steps in its episode before ``obs``. None if each env has one slot: count the slot's steps."""
    episode: NDArray[np.int64] | None = None
    """``[n]``: the index of the env's episode, counted from 0 since the arena was made; `reset` does not restart the
    count. None if each env has one slot; a runner then counts, and sets it in turns that begin episodes."""
    over: NDArray[np.int64] | None = None
    """The envs whose episode ended for all agents with the rows of this turn; their next rows are in later turns. None
    if each env has one slot, whose end is the env's."""
    unacted_reward: NDArray[np.float64] | None = None
    """``[num_slots]``: the rewards of agents that never acted in an episode that is ``over``, NaN for all others. None:
    there are none."""
    lost: NDArray[np.int64] | None = None
    """Slots, of any kind, whose episodes were cut before this turn because their env failed. The last observation they
    were shown is their final one; the results of the actions sent then are lost. None: no slot."""
    infos: Any = None
    """The envs' infos, in the arena's own form: read them with `Arena.info_of`."""

    @property
    def done(self) -> NDArray[np.bool_] | None:
        """``[n]``: the row ends an episode, terminated or truncated. None: no row does."""
        if self.terminated is None or self.truncated is None:
            return self.truncated if self.terminated is None else self.terminated
        return self.terminated | self.truncated

    def select(self, rows: Ints) -> "Turn":
        """A turn with these rows only, and without what does not belong to rows, as ``over`` and ``infos``."""
        columns_of = [(name, getattr(self, name)) for name in _ROWS]
        own: dict[str, Any] = {name: column.take(rows) for name, column in columns_of if column is not None}
        taken = None
        if self.taken is not None and (there := np.isin(self.taken[0], rows)).any():
            columns: Columns = {name: column[there] for name, column in self.taken[1].items()}
            taken = (np.searchsorted(rows, self.taken[0][there]), columns)
        return Turn(
            obs={name: arrays.take(column, rows) for name, column in self.obs.items()},
            kind=self.kind,
            waits=self.waits,
            taken=taken,
            **{"terminated": None, "truncated": None, **own},
        )


def turn_to_state(turn: Turn) -> dict[str, Any]:
    """A turn as plain data, copied, without ``infos``.

    ``orders`` is the memory order of each observation column: the rounding of matrix products depends on it.
    """
    orders = {name: order_of(np.asarray(column)) for name, column in turn.obs.items()}
    return copy.deepcopy({name: getattr(turn, name) for name in _FIELDS if name != "infos"}) | {"orders": orders}


def turn_from_state(state: dict[str, Any]) -> Turn:
    """The inverse of `turn_to_state`.

    Raises:
        ValueError: the columns have another number of rows than ``slots``.
    """
    turn = Turn(**{name: value for name, value in state.items() if name != "orders"})
    turn.obs = {name: np.array(column, order=state["orders"][name]) for name, column in turn.obs.items()}
    if turn.taken is not None:
        turn.taken = (turn.taken[0], turn.taken[1])
    own = [getattr(turn, name) for name in _ROWS]
    for column in (*own, *turn.obs.values()):
        if column is not None and (not isinstance(column, np.ndarray) or column.shape[:1] != turn.slots.shape):
            raise ValueError("the columns of a turn have another number of rows than it has slots")
    return turn


_FIELDS = tuple(field.name for field in dataclasses.fields(Turn))
_NOT_ROWS = ("obs", "kind", "waits", "taken", "over", "unacted_reward", "lost", "infos")
_ROWS = tuple(name for name in _FIELDS if name not in _NOT_ROWS)


@runtime_checkable
class Arena(Protocol):
    """Copies of an env, whose slots wait for actions: call `reset` once, then `recv` and `send` in turn."""

    kinds: tuple[Kind, ...]
    num_slots: int
    num_envs: int
    env_of: NDArray[np.int64]
    """``[num_slots]``: the index of each slot's copy of the env, 0 to ``num_envs - 1``."""
    agents: list[str | None]
    """``[num_slots]``: the name of each slot's agent; None in envs with a single, unnamed agent."""
    device: "torch.device | None" = None
    """The device of observations and actions, as torch tensors; None: both are NumPy arrays."""

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every env; a seed gives each env a random stream of its own."""

    def recv(self) -> list[Turn]:
        """Wait for rows, and return them as turns. The waiting agents of one env are always returned together.

        Calling it again before `send` returns the same turns.

        Raises:
            EnvError: an env failed, and may not be made again or has failed too often.
        """

    def send(self, turn: Turn, action: Columns) -> None:
        """Send actions for all rows of a waiting turn, as flat columns ``[n, ...]``. Answer each turn once.

        The envs step once all turns of a `recv` are answered.
        """

    def state_dict(self) -> dict[str, Any]:
        """The running episodes as plain data; ``{"how": "new episodes", "why": ...}`` if they can't be captured."""

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Restore a `state_dict`, and return how: ``get_state``, ``snapshot`` or ``new episodes: why``.

        After ``new episodes`` the arena must be reset.
        """

    def env_at(self, env: int) -> Any | None:
        """Env number ``env``. If it is part of a ``VectorEnv`` and not an object of its own, the ``VectorEnv``; None
        if it is in another process."""

    def info_of(self, turn: Turn, slot: int) -> dict[str, Any] | None:
        """The env's info for ``slot`` with its row in ``turn``; {} if there is none, None if it stays in another
        process. Call it before `send`."""

    def stats(self) -> dict[str, float]:
        """Counts since the last call by name, such as ``faulty_episodes`` and ``restarts``; {} if there are none."""

    def close(self) -> None:
        """Close the envs and what they hold open."""


def closed() -> EnvError:
    """The error of an arena that is used after `Arena.close`."""
    return EnvError("the arena is closed: make it, or the algorithm that it belongs to, again.")


class BoundsCheck:
    """Warns about observations outside the bounds of their Box, once for each part of the observation.

    The run goes on: Etude does not rely on the bounds, and many envs exceed theirs slightly.

    Args:
        kinds: See `Arena.kinds`.
        env_of: See `Arena.env_of`.
        agents: See `Arena.agents`.
        check: See `Workers.check`.
    """

    def __init__(
        self, kinds: Sequence[Kind], env_of: Ints, agents: Sequence[str | None], check: int | Literal["always"]
    ) -> None:
        self._env_of, self._agents = env_of, agents
        self._rows_left = float("inf") if check == "always" else check * len(agents)
        self._boxes: list[dict[str, Box]] = [
            {
                name: leaf
                for name, leaf in leaves(kind.obs_space, col.OBS).items()
                if isinstance(leaf, Box) and (np.isfinite(leaf.low).any() or np.isfinite(leaf.high).any())
            }
            for kind in kinds
        ]
        self.is_over = self._rows_left <= 0 or not any(self._boxes)
        """Whether no further observations are checked."""

    def look_at(self, turns: Sequence[Turn]) -> None:
        """Warn about observations outside their bounds in ``turns``."""
        for turn in turns:
            self._rows_left -= len(turn.slots)
            rows = slice(None) if turn.blind is None else ~turn.blind
            for name, box in list(self._boxes[turn.kind].items()):
                obs = arrays.host(turn.obs[name])[rows]
                outside = outside_bounds(box, obs)
                if outside.any():
                    self._warn(turn.slots[rows], turn.kind, name, box, obs, outside)
        self.is_over = self._rows_left <= 0 or not any(self._boxes)

    def _warn(self, slots: Ints, kind: int, name: str, box: Box, obs: NDArray[Any], outside: NDArray[np.bool_]) -> None:
        row, *at = np.argwhere(outside)[0].tolist()
        slot = int(slots[row])
        agent = self._agents[slot]
        _log.warning(
            "env %d%s: `%s` is %s at %s, outside its space's bounds [%s, %s]. Training, evaluations and recordings use "
            "such values as they are. If that is not what you want, correct the env or its space; "
            "gymnasium.wrappers.TransformObservation (for a VectorEnv, gymnasium.wrappers.vector.TransformObservation) "
            "changes both from outside.",
            self._env_of[slot],
            "" if agent is None else f", agent {agent!r}",
            name,
            obs[(row, *at)],
            at,
            in_words(box.low[tuple(at)]),
            in_words(box.high[tuple(at)]),
        )
        del self._boxes[kind][name]
