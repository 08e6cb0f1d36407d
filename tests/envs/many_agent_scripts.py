# SPDX-License-Identifier: Apache-2.0
"""Envs with many agents that are scripted, or log what happens: one lost, shifted or invented step shows."""

import random
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

Flags = tuple[bool, bool]
"""terminated, truncated"""


class Scene(NamedTuple):
    """What one step of a scripted episode shows; the first one is the reset's."""

    shown: tuple[str, ...]
    """Who gets an observation."""
    rewards: dict[str, float] = {}  # noqa: RUF012
    ends: dict[str, Flags] = {}  # noqa: RUF012
    """Who ends, and how."""
    taken: dict[str, int] = {}  # noqa: RUF012
    """Who took another action than the one that it was to take."""


Script = list[Scene]


class _Scripted:
    """Observations are (agent, t); what was done is in ``log``: (t of the observation, agent, action).

    An agent's observations are one array, written over with each step: as rude as envs may be.
    """

    def __init__(self, agents: tuple[str, ...], script: Script) -> None:
        self.possible_agents = list(agents)
        self.script, self.t = script, 0
        self.log: list[tuple[int, str, int]] = []
        self._seen = np.array([[i, 0] for i in range(len(agents))], np.float32)
        self._obs_space = spaces.Box(0, 1e6, (2,), np.float32)
        self._action_space = spaces.Discrete(1_000_000)

    def observation_space(self, agent: str) -> Any:
        return self._obs_space

    def action_space(self, agent: str) -> Any:
        return self._action_space

    def obs(self) -> dict[str, Any]:
        self._seen[:, 1] = self.t
        return {agent: self._seen[self.possible_agents.index(agent)] for agent in self.script[self.t].shown}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.t = 0
        return self.obs(), {agent: {} for agent in self.script[0].shown}

    def step(self, action: dict[str, Any]) -> Any:
        self.log += [(self.t, agent, int(choice)) for agent, choice in action.items()]
        self.t += 1
        scene = self.script[self.t]
        terminated, truncated = ({agent: flags[i] for agent, flags in scene.ends.items()} for i in (0, 1))
        infos: dict[str, Any] = {agent: {} for agent in (*scene.shown, *scene.ends)}
        for agent, choice in scene.taken.items():
            infos.setdefault(agent, {})["off_policy_action"] = choice
        return self.obs(), dict(scene.rewards), terminated, truncated, infos


class ScriptedDicts(_Scripted):
    """By our own protocol. ``__all__`` among a scene's ``ends`` ends the episode."""

    def step(self, action: dict[str, Any]) -> Any:
        scene = self.script[self.t]
        assert set(action) == set(scene.shown) - set(scene.ends), (action, scene)
        obs, rewards, terminated, truncated, infos = super().step(action)
        return obs, rewards, terminated, truncated, {**infos, "__common__": {"t": self.t}}


class ScriptedParallel(_Scripted, ParallelEnv[str, Any, Any]):
    """By PettingZoo: who is shown something and does not end is in ``agents``."""

    metadata = {"name": "scripted", "is_parallelizable": True}  # noqa: RUF012
    render_mode = None

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        given = super().reset(seed=seed)
        self.agents = list(self.script[0].shown)
        return given

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        scene = self.script[self.t]
        self.agents = [agent for agent in scene.shown if agent not in scene.ends]
        told = [*self.agents, *(agent for agent in scene.ends if agent not in self.agents)]
        return (
            obs,
            {agent: rewards.pop(agent, 0.0) for agent in told} | rewards,
            {agent: terminated.get(agent, False) for agent in told},
            {agent: truncated.get(agent, False) for agent in told},
            {agent: infos.get(agent, {}) for agent in told},
        )


class Event(NamedTuple):
    """Something that truly happened in a `Rounds`."""

    what: str
    """``acts``, ``rewarded``, ``shown`` (its turn came), ``dies`` (its last turn came) or ``gone`` (without one)."""
    agent: str
    number: float
    """The action; the reward; or how many actions there were before."""
    flags: Flags = (False, False)


class Rounds(AECEnv[str, Any, Any]):
    """Agents come, act in random order, are rewarded at any time, and go; what happens is logged as it happens.

    Args:
        seed: All of it depends on this.
        at_once: Agents that end leave at once; else when it would have been their turn, and may be rewarded till then.
        orderly: At the end every agent is selected once more; else ``agents`` is just cleared.
    """

    metadata = {"name": "rounds"}  # noqa: RUF012

    def __init__(self, seed: int, num_agents: int = 4, *, at_once: bool = True, orderly: bool = True) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.seed, self.at_once, self.orderly = seed, at_once, orderly
        self._obs_space = spaces.Box(0, 1e6, (2,), np.float32)
        self._action_space = spaces.Discrete(1_000_000)
        self.board = np.zeros(2, np.float32)  # for all, written over each time

    def observation_space(self, agent: str) -> Any:
        return self._obs_space

    def action_space(self, agent: str) -> Any:
        return self._action_space

    def observe(self, agent: str) -> Any:
        self.board[:] = self.possible_agents.index(agent), self.steps
        return self.board

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.random = random.Random(self.seed)
        self.steps, self.log = 0, []
        self.absent = list(self.possible_agents)
        self.agents: list[str] = []
        self.rewards: dict[str, float] = {}
        self._cumulative_rewards: dict[str, float] = {}
        self.terminations: dict[str, bool] = {}
        self.truncations: dict[str, bool] = {}
        self.infos: dict[str, Any] = {}
        self.join()
        self.join()
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None
        self.select()

    def join(self) -> None:
        if self.absent:
            agent = self.absent.pop(self.random.randrange(len(self.absent)))
            self.agents.append(agent)
            self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
            self.terminations[agent] = self.truncations[agent] = False
            self.infos[agent] = {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            if not any(self.terminations.values()) and not any(self.truncations.values()) and self.agents:
                self.agent_selection = self.agents[self.random.randrange(len(self.agents))]
            if self.agents:
                self.select()
            return
        self.log.append(Event("acts", agent, float(action)))
        self.steps += 1
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if self.random.random() < 0.3:
            self.join()
        for other in self.agents:
            if self.random.random() < 0.5:
                self.rewards[other] = float(self.random.randrange(1, 10**6))
                self.log.append(Event("rewarded", other, self.rewards[other]))
        self._accumulate_rewards()
        is_last = self.steps == 12
        for other in self.agents:
            if is_last or self.random.random() < 0.15:
                self.terminations[other] = self.random.random() < 0.5
                self.truncations[other] = not self.terminations[other] or self.random.random() < 0.2
        if is_last and not self.orderly:
            self.log += [Event("gone", other, self.steps, self.flags(other)) for other in self.agents]
            self.agents = []
            return
        self.agent_selection = self.agents[self.random.randrange(len(self.agents))]
        if self.at_once or is_last:
            self._deads_step_first()
        self.select()

    def flags(self, agent: str) -> Flags:
        return self.terminations[agent], self.truncations[agent]

    def select(self) -> None:
        agent = self.agent_selection
        flags = self.flags(agent)
        self.log.append(Event("dies" if any(flags) else "shown", agent, self.steps, flags))

    def close(self) -> None:
        self.is_closed = True
