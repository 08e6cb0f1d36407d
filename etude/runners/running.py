# SPDX-License-Identifier: Apache-2.0
"""The running episode, as callbacks see it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.errors import DataError, EtudeError
from etude.modules import Module
from etude.runners.episodes import Episode
from etude.runners.media import MediaLike, encoded

if TYPE_CHECKING:
    from etude.runners.watch import Watch


class _Kept(NamedTuple):
    """What stays known of an agent when its episode is over."""

    steps: int
    total: float
    reward: float
    terminated: bool
    truncated: bool


class RunningAgent:
    """One agent in a running episode.

    `obs`, `action` and `info` are there in `Callback.on_episode_start`, `Callback.on_episode_step` and
    `Callback.on_episode_end`; None at other times.
    """

    __slots__ = ("_kept", "_slot", "_watch", "id", "module_id")

    def __init__(
        self, watch: "Watch", slot: int, agent_id: str | None, module_id: str | None, kept: _Kept | None = None
    ) -> None:
        self._watch = watch
        self._slot = slot
        self._kept = kept
        self.id = agent_id
        """Its name; None where agents have none."""
        self.module_id = module_id
        """What acts for it; None for a module without an id."""

    @property
    def steps(self) -> int:
        """The steps that it made in this episode, and whose results are known."""
        return int(self._watch.seats.steps[self._slot]) if self._kept is None else self._kept.steps

    @property
    def return_so_far(self) -> float:
        """The sum of what they brought."""
        return float(self._watch.seats.returns[self._slot]) if self._kept is None else self._kept.total

    @property
    def reward(self) -> float:
        """What the last of them brought; 0.0 before there is one."""
        return float(self._watch.seats.rewards[self._slot]) if self._kept is None else self._kept.reward

    @property
    def terminated(self) -> bool:
        """The episode has ended for it, by the env's own rules."""
        return bool(self._watch.seats.terminated[self._slot]) if self._kept is None else self._kept.terminated

    @property
    def truncated(self) -> bool:
        """The episode was stopped for it, from outside."""
        return bool(self._watch.seats.truncated[self._slot]) if self._kept is None else self._kept.truncated

    @property
    def obs(self) -> Any:
        """What it was shown last, as the env gave it, nested where the space is; None where the env gave nothing."""
        return self._watch.seats.obs(self._slot) if self._kept is None else None

    @property
    def action(self) -> Any:
        """What its module chose in the last of its steps, nested as the module's action space; None before there is
        one. The env may have got another, behind connectors."""
        return self._watch.seats.action(self._slot) if self._kept is None else None

    @property
    def info(self) -> Any:
        """What the env said beside `obs`: a dict; {} where it said nothing, and None where worker processes keep it."""
        return self._watch.seats.info(self._slot) if self._kept is None else None

    def keep(self) -> None:
        """Know no more than this from now on."""
        self._kept = _Kept(self.steps, self.return_so_far, self.reward, self.terminated, self.truncated)

    def state(self) -> list[Any]:
        """For the episode's state."""
        return [self._slot, self.id, self.module_id, None if self._kept is None else list(self._kept)]


class RunningEpisode:
    """An episode that callbacks are called for, from its beginning until it is over.

    ``obs``, ``action``, ``reward``, ``info``, ``terminated`` and ``truncated`` are of its only agent; where there are
    several, ask one of ``agents``.
    """

    def __init__(self, watch: "Watch", episode: Episode, began: float) -> None:
        self._watch = watch
        self._began = began
        self._over: tuple[int, float] | None = None
        self.id = episode.id
        """As in ``episode_id`` of Experience."""
        self.env_index = episode.env
        """Which copy of the env, from 0."""
        self.number = episode.number
        """Which of that copy's episodes, from 0."""
        self.agents: dict[str | None, RunningAgent] = {}
        """Those that were shown something in it so far, by name; None is that of an agent without one."""
        self.data: dict[Any, Any] = {}
        """Yours, for notes from one call to the next. It is saved with a run where it holds plain data and arrays only;
        else a resumed run does not follow the episode any more."""
        self.values: dict[str, tuple[float, int]] = {}
        """What was logged: sum and number of the values."""
        self.histograms: dict[str, list[NDArray[np.float64]]] = {}
        """Likewise: arrays of values."""
        self.media: dict[str, bytes] = {}
        """Likewise: PNGs and GIFs, the newest of each name."""

    # -- what is known of it ------------------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The env object. Where copies step as one ``VectorEnv`` of their own making, that; None where it lives in
        another process."""
        return self._watch.env_at(self.env_index)

    @property
    def modules(self) -> Mapping[str | None, Module]:
        """All modules by id; one alone without an id is at None."""
        return self._watch.modules

    @property
    def t(self) -> int:
        """The steps that the env made in it."""
        return self._watch.seats.t(self.env_index) if self._over is None else self._over[0]

    @property
    def duration(self) -> float:
        """Seconds since it began, those left out in which nothing was collected."""
        return self._watch.clock() - self._began if self._over is None else self._over[1]

    @property
    def is_over(self) -> bool:
        """It has ended, and `Callback.on_episode_end` was called for it."""
        return self._over is not None

    @property
    def return_so_far(self) -> float:
        """The sum of all rewards, of all agents."""
        return sum(agent.return_so_far for agent in self.agents.values())

    @property
    def obs(self) -> Any:
        """See `RunningAgent.obs`."""
        return self._only.obs

    @property
    def action(self) -> Any:
        """See `RunningAgent.action`."""
        return self._only.action

    @property
    def reward(self) -> float:
        """See `RunningAgent.reward`."""
        return self._only.reward

    @property
    def info(self) -> Any:
        """See `RunningAgent.info`."""
        return self._only.info

    @property
    def terminated(self) -> bool:
        """See `RunningAgent.terminated`."""
        return self._only.terminated

    @property
    def truncated(self) -> bool:
        """See `RunningAgent.truncated`."""
        return self._only.truncated

    @property
    def _only(self) -> RunningAgent:
        if len(self.agents) != 1 or None not in self.agents:
            raise EtudeError(
                f"the episode has the agents {list(self.agents)}: say which is meant, as in episode.agents[name].obs."
                if self.agents
                else "no agent is in the episode yet: wait for on_episode_start."
            )
        return self.agents[None]

    def render(self) -> Any:
        """What the env draws now. The time that it takes is reported as ``render``.

        Raises:
            EnvError: the env lives in another process.
        """
        return self._watch.render(self.env_index)

    # -- what is logged -----------------------------------------------------------------------------------------

    def log(self, name: str, value: float) -> None:
        """Log a figure of the episode: results have it as ``custom``, with mean, least and greatest over episodes.

        Logged several times in one episode, their mean is its figure.

        Raises:
            DataError: it is no finite number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = np.nan
        if not np.isfinite(number):
            raise DataError(f"episode.log({name!r}, {value!r}): the value must be a finite number.")
        total, count = self.values.get(name, (0.0, 0))
        self.values[name] = (total + number, count + 1)

    def log_histogram(self, name: str, values: ArrayLike) -> None:
        """Log any number of values, of which TensorBoard shows how they are spread over all episodes of an iteration.

        Raises:
            DataError: they are no finite numbers.
        """
        try:
            array = np.array(values, np.float64).reshape(-1)
        except (TypeError, ValueError):
            array = np.full(1, np.nan)
        if not np.isfinite(array).all():
            raise DataError(f"episode.log_histogram({name!r}, ...): the values must be finite numbers.")
        self.histograms.setdefault(name, []).append(array)

    def log_media(self, name: str, media: MediaLike, *, fps: float = 30.0) -> None:
        """Log a picture or a clip, which TensorBoard shows. Of each iteration, the newest by each name is kept.

        Args:
            name: What it is called.
            media: A frame, ``[H, W, 3]`` or whatever envs draw; a list of frames or ``[T, H, W, C]``; or a figure of
                matplotlib's, which is yours to close.
            fps: Frames a second.

        Raises:
            DataError: it is none of these.
        """
        try:
            self.media[name] = encoded(media, fps)
        except DataError as error:
            raise DataError(f"episode.log_media({name!r}, ...) takes a frame, frames or a figure: {error}") from error

    # -- for those who call callbacks ---------------------------------------------------------------------------

    def keep(self) -> None:
        """Know no more than this from now on: the episode is over."""
        for agent in self.agents.values():
            agent.keep()
        self._over = (self.t, self.duration)

    def state_dict(self) -> dict[str, Any]:
        """All that is known of it, but for what the arena and the logs know."""
        return {
            "env": self.env_index,
            "number": self.number,
            "agents": [agent.state() for agent in self.agents.values()],
            "duration": self.duration,
            "over": None if self._over is None else self._over[0],
            "values": {name: list(pair) for name, pair in self.values.items()},
            "histograms": {name: np.concatenate(parts) for name, parts in self.histograms.items()},
            "media": dict(self.media),
            "data": self.data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for slot, name, module_id, kept in state["agents"]:
            self.agents[name] = RunningAgent(self._watch, slot, name, module_id, None if kept is None else _Kept(*kept))
        self._over = None if state["over"] is None else (state["over"], state["duration"])
        self.values = {name: (total, count) for name, (total, count) in state["values"].items()}
        self.histograms = {name: [values] for name, values in state["histograms"].items()}
        self.media, self.data = dict(state["media"]), state["data"]
