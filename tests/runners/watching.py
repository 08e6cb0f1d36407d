# SPDX-License-Identifier: Apache-2.0
"""A callback that writes everything down, and what it must have written, by naive loops."""

from typing import Any, NamedTuple

import numpy as np
from some_envs import is_terminated, length_of, reward_of

from etude.experience import Experience
from etude.runners import Callback, RunningEpisode


class Seen(NamedTuple):
    """What a callback saw of a single agent's episode, in one call."""

    event: str
    episode: int
    t: int = 0
    obs: Any = None
    reward: float = 0.0
    total: float = 0.0
    ended: tuple[bool, bool] = (False, False)


class Diary(Callback):
    """Writes down each call, by env."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Seen]] = {}
        self.actions: dict[tuple[int, int, int], Any] = {}
        """By env, episode and step."""
        self.infos: list[tuple[int, Any]] = []
        """``t`` and what the env said, at each step."""

    def note(self, event: str, episode: RunningEpisode) -> None:
        now = (episode.t, numbers(episode.obs), episode.reward, episode.return_so_far)
        entry = Seen(event, episode.number, *now, (episode.terminated, episode.truncated))
        self.seen.setdefault(episode.env_index, []).append(entry)

    def on_episode_created(self, episode: RunningEpisode) -> None:
        assert not episode.agents
        assert episode.t == 0
        episode.data["diary"] = 0
        self.seen.setdefault(episode.env_index, []).append(Seen("created", episode.number))

    def on_episode_start(self, episode: RunningEpisode) -> None:
        assert episode.action is None
        self.note("start", episode)

    def on_episode_step(self, episode: RunningEpisode) -> None:
        episode.data["diary"] += 1
        self.actions[episode.env_index, episode.number, episode.t - 1] = episode.action
        self.infos.append((episode.t, episode.info))
        self.note("step", episode)

    def on_episode_end(self, episode: RunningEpisode) -> None:
        assert episode.data["diary"] == episode.t
        assert not episode.is_over
        self.note("end", episode)


def numbers(obs: Any) -> tuple[int, int, int]:
    """(copy, episode, t) in whatever form the observation has."""
    if isinstance(obs, dict):
        assert obs["t"] == obs["a"]["numbers"][2]
        obs = obs["a"]["numbers"]
    if isinstance(obs, tuple):
        np.testing.assert_array_equal(obs[1], obs[0][1:])
        obs = obs[0]
    copy, episode, t = obs.astype(int).tolist()
    return copy, episode, t


def naive(copy: int, calls: int) -> list[Seen]:
    """The first calls in the life of one copy of `Numbered`."""
    out: list[Seen] = []
    episode = 0
    while len(out) < calls:
        out += [Seen("created", episode), Seen("start", episode, 0, (copy, episode, 0))]
        total, length = 0.0, length_of(copy, episode)
        for t in range(length):
            reward = reward_of(copy, episode, t)
            total += reward
            is_last, ends = t == length - 1, is_terminated(copy, episode)
            ended = (is_last and ends, is_last and not ends)
            out.append(Seen("step", episode, t + 1, (copy, episode, t + 1), reward, total, ended))
        out.append(out[-1]._replace(event="end"))
        episode += 1
    return out[:calls]


def actions_in(exp: Experience) -> dict[tuple[int, int, int], Any]:
    """The actions of steps whose observations are numbers."""
    rows = exp.steps["obs"].astype(int).tolist()
    return {(c, e, t): exp.steps["action"][i] for i, (c, e, t) in enumerate(rows)}
