# SPDX-License-Identifier: Apache-2.0
"""Arena: a set of slots, each of them one agent in one running copy of an env."""

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
from etude.experience import arrays
from etude.spaces import Space, leaves, outside_bounds

if TYPE_CHECKING:
    import torch

Ints: TypeAlias = NDArray[np.int64]

_log = logging.getLogger("etude.envs")


class Kind(NamedTuple):
    """Slots whose agents have the same spaces: what one module can act for."""

    obs_space: Space
    """The space of one observation, as the env gives it."""
    action_space: Space
    """The space of one action, as the env takes it."""
    slots: range
    """Their ids, which stand next to each other."""


@dataclasses.dataclass(slots=True)
class Turn:
    """What some slots of one kind show at one moment: what their last actions brought, and what to act on next.

    Rows whose ``terminated`` or ``truncated`` is True end an episode (for the agent): ``obs`` is the last observation,
    and no action is wanted. The slot's next row, if it has one, is a ``first``.
    """

    slots: NDArray[np.int64]
    """``[n]``: the slots, each at most once. Where each env has one slot and all of them are here, in order, it may be
    `Arena.env_of` itself, by which a reader can tell that without looking at the numbers."""
    obs: Columns
    """``[n, ...]`` each: the observation to act on, or the last one of an episode. NumPy arrays, or tensors on
    `Arena.device`; all other columns are NumPy arrays."""
    reward: NDArray[np.float64]
    """``[n]``: all that the slot's last action brought; means nothing where ``first``."""
    terminated: NDArray[np.bool_] | None
    """``[n]``: the episode ended by the env's own rules. None: for no row."""
    truncated: NDArray[np.bool_] | None
    """``[n]``: the episode was stopped from outside. None: for no row."""
    first: NDArray[np.bool_] | None = None
    """``[n]``: ``obs`` begins an episode. None: for no row."""
    kind: int = 0
    """The index in `Arena.kinds`."""
    waits: bool = True
    """False: every row ends an episode, so that nothing is to be sent. Where True, send an action for every row; those
    for rows that end an episode are ignored."""
    blind: NDArray[np.bool_] | None = None
    """``[n]``: an episode's end whose observation the env never gave: ``obs`` means nothing there. None: for no
    row."""
    taken: tuple[NDArray[np.int64], Columns] | None = None
    """Rows whose last action was not the one that was sent, and the flat action columns ``[rows, ...]`` that were."""
    env_t: NDArray[np.int64] | None = None
    """``[n]``: the steps that the env had made in its episode when it showed ``obs``. None where a slot is alone in its
    env, whose steps are its own."""
    episode: NDArray[np.int64] | None = None
    """``[n]``: which of its env's episodes a row belongs to, counted from 0 when the arena was made: no `reset` begins
    anew. None where a slot is alone in its env."""
    over: NDArray[np.int64] | None = None
    """Envs whose episode has ended for all agents with the rows of this turn. None where a slot is alone in its env,
    whose episode ends as its own."""
    lost: NDArray[np.int64] | None = None
    """Slots, of any kind, whose episodes were cut before this turn because their env failed. They end with what the
    slots were shown last: the result of the action that was sent then is lost. None: no slot."""
    infos: Any = None
    """What the envs said beside, in whatever form they are in: `Arena.info_of` reads it."""

    @property
    def done(self) -> NDArray[np.bool_] | None:
        """``[n]``: the row ends an episode, either way. None: no row does."""
        if self.terminated is None or self.truncated is None:
            return self.truncated if self.terminated is None else self.terminated
        return self.terminated | self.truncated

    def select(self, rows: Ints) -> "Turn":
        """A turn with some rows of this one, without what is not about rows: ``over``, ``lost`` and ``infos``."""
        columns_of = {name: getattr(self, name) for name in _FIELDS if name not in _NOT_ROWS}
        own: dict[str, Any] = {n: None if column is None else column.take(rows) for n, column in columns_of.items()}
        taken = None
        if self.taken is not None and (there := np.isin(self.taken[0], rows)).any():
            columns: Columns = {name: column[there] for name, column in self.taken[1].items()}
            taken = (np.searchsorted(rows, self.taken[0][there]), columns)
        return Turn(
            obs={name: arrays.take(column, rows) for name, column in self.obs.items()},
            kind=self.kind,
            waits=self.waits,
            taken=taken,
            **own,
        )


def turn_to_state(turn: Turn) -> dict[str, Any]:
    """A turn as plain data of its own, without ``infos``.

    ``orders`` are how its observations lie in memory, by name: products of matrices round differently by it.
    """
    orders = {name: order_of(np.asarray(column)) for name, column in turn.obs.items()}
    return copy.deepcopy({name: getattr(turn, name) for name in _FIELDS if name != "infos"}) | {"orders": orders}


def turn_from_state(state: dict[str, Any]) -> Turn:
    """The inverse of `turn_to_state`.

    Raises:
        ValueError: its columns do not have as many rows as it has slots.
    """
    turn = Turn(**{name: value for name, value in state.items() if name != "orders"})
    turn.obs = {name: np.array(column, order=state["orders"][name]) for name, column in turn.obs.items()}
    if turn.taken is not None:
        turn.taken = (turn.taken[0], turn.taken[1])
    own = [getattr(turn, name) for name in _FIELDS if name not in _NOT_ROWS]
    for column in (*own, *turn.obs.values()):
        if column is not None and (not isinstance(column, np.ndarray) or column.shape[:1] != turn.slots.shape):
            raise ValueError("the columns of a turn have other numbers of rows than it has slots")
    return turn


_FIELDS = tuple(field.name for field in dataclasses.fields(Turn))
_NOT_ROWS = ("obs", "kind", "waits", "taken", "over", "lost", "infos")


@runtime_checkable
class Arena(Protocol):
    """A set of slots that wait for actions. After `reset`, `recv` and `send` take turns."""

    kinds: tuple[Kind, ...]
    num_slots: int
    num_envs: int
    env_of: NDArray[np.int64]
    """``[num_slots]``: the running copy of the env, 0 to ``num_envs - 1``, that a slot is in."""
    agents: list[str | None]
    """``[num_slots]``: the name of each slot's agent; None where there is one agent without a name."""
    device: "torch.device | None" = None
    """Where observations are, and actions are wanted, as torch tensors; None: both are NumPy arrays."""

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every env; with a seed, seed the envs, each with its own stream."""

    def recv(self) -> list[Turn]:
        """What slots show now: waits until there is something. An env's agents that wait come all at once.

        Asked again before anything is sent, it gives the same again.

        Raises:
            EnvError: an env fails, and was not to be made again or has failed too often.
        """

    def send(self, turn: Turn, action: Columns) -> None:
        """Act for all rows of a turn that waits: flat action columns ``[n, ...]``. Each turn is answered once.

        Once all turns of a `recv` are answered, the envs go on.
        """

    def state_dict(self) -> dict[str, Any]:
        """The running episodes as plain data; ``{"how": "new episodes", "why": ...}`` where that can't be had."""

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on where `state_dict` was taken; says how: ``get_state``, ``snapshot`` or ``new episodes: why``.

        After ``new episodes`` the arena must be reset.
        """

    def env_at(self, env: int) -> Any | None:
        """The object of env number ``env``; the ``VectorEnv`` that it is a part of, where it has none of its own; None
        where it lives in another process."""

    def info_of(self, turn: Turn, slot: int) -> dict[str, Any] | None:
        """What the env said to ``slot`` beside its row in ``turn``, as it said it; {} where nothing, None where that
        stays in another process. To be asked before anything is sent."""

    def stats(self) -> dict[str, float]:
        """Counts since this was last asked, by name, such as ``faulty_episodes`` and ``restarts``; {} where none."""

    def close(self) -> None:
        """Close the envs and what they hold open."""


class BoundsCheck:
    """Warns of observations outside the bounds of their Box, once for each part of an observation.

    Nothing here needs them to be inside, and many envs overstep a bound of theirs a little, so that the run goes on.

    Args:
        kinds: See `Arena.kinds`.
        env_of: See `Arena.env_of`.
        agents: See `Arena.agents`.
        check: See `EnvLimits.check`.
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
        """Whether there is nothing more to look at."""

    def look_at(self, turns: Sequence[Turn]) -> None:
        """Warn of what is outside in ``turns``."""
        for turn in turns:
            self._rows_left -= len(turn.slots)
            rows = slice(None) if turn.blind is None else ~turn.blind
            for name, box in list(self._boxes[turn.kind].items()):
                outside = outside_bounds(box, turn.obs[name][rows])
                if outside.any():
                    self._warn(turn, rows, name, box, outside)
        self.is_over = self._rows_left <= 0 or not any(self._boxes)

    def _warn(self, turn: Turn, rows: Any, name: str, box: Box, outside: NDArray[np.bool_]) -> None:
        row, *at = np.argwhere(outside)[0].tolist()
        slot = int(turn.slots[rows][row])
        agent = self._agents[slot]
        _log.warning(
            "env %d%s: `%s` is %s at %s, outside its space's bounds [%s, %s]. Training, evaluations and recordings use "
            "such values as they are. If that is not what you want, correct the env or its space; "
            "gymnasium.wrappers.TransformObservation changes both from outside.",
            self._env_of[slot],
            "" if agent is None else f", agent {agent!r}",
            name,
            turn.obs[name][rows][(row, *at)],
            at,
            box.low[tuple(at)],
            box.high[tuple(at)],
        )
        del self._boxes[turn.kind][name]
