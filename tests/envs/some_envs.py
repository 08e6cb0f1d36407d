# SPDX-License-Identifier: Apache-2.0
"""Envs that number their steps, so that one shifted, lost or invented step shows; and awkward ones."""

import enum
import itertools
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

LENGTHS = (3, 1, 5, 2, 7)


def length_of(copy: int, episode: int) -> int:
    """How many steps an episode has."""
    return LENGTHS[(3 * copy + episode) % len(LENGTHS)]


def is_terminated(copy: int, episode: int) -> bool:
    """How it ends: else it is truncated."""
    return (copy + episode) % 2 == 0


def reward_of(copy: int, episode: int, t: int) -> float:
    """Of the step from observation t to t + 1."""
    return 10_000 * copy + 100 * episode + t + 0.5


class Numbered(gym.Env[Any, Any]):
    """The observation is (copy, episode, t); episodes of given lengths; actions do nothing but must be right.

    Args:
        copy: Which copy this is.
        kind: The form of observation: ``box``, ``dict`` or ``tuple``.
        reuse: Give the same array each time, written over.
    """

    def __init__(self, copy: int = 0, kind: str = "box", *, reuse: bool = False) -> None:
        box = spaces.Box(-1, 1e6, (3,), np.float32)
        self.kind = kind
        self.observation_space: Any = {
            "box": box,
            "dict": spaces.Dict({"a": spaces.Dict({"numbers": box}), "t": spaces.Discrete(100)}),
            "tuple": spaces.Tuple([box, spaces.MultiDiscrete([100, 100])]),
        }[kind]
        self.action_space: Any = {
            "box": spaces.Discrete(3),
            "dict": spaces.Dict({"move": spaces.Box(-np.inf, np.inf, (2,), np.float32), "jump": spaces.Discrete(2)}),
            "tuple": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)]),
        }[kind]
        self.copy, self.episode, self.t = copy, -1, 0
        self.buffer = np.zeros(3, np.float32) if reuse else None

    def obs(self) -> Any:
        numbers = np.array([self.copy, self.episode, self.t], np.float32)
        if self.buffer is not None:
            self.buffer[:] = numbers
            numbers = self.buffer
        if self.kind == "dict":
            return {"a": {"numbers": numbers}, "t": np.int64(self.t)}
        return (numbers, np.array([self.episode, self.t])) if self.kind == "tuple" else numbers

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self.obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        reward = reward_of(self.copy, self.episode, self.t)
        self.t += 1
        done = self.t >= length_of(self.copy, self.episode)
        ends = is_terminated(self.copy, self.episode)
        return self.obs(), reward, done and ends, done and not ends, {"t": self.t}


class LendingVectorEnv(VectorEnv[Any, Any, Any]):
    """`Numbered` copies in any mode, written with NumPy; lends its own arrays, which it writes over at each step."""

    def __init__(self, num_envs: int, mode: AutoresetMode) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-1, 1e6, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.mode = mode
        self.copies = np.arange(num_envs)
        self.episode = np.full(num_envs, -1)
        self.t = np.zeros(num_envs, int)
        self.done = np.zeros(num_envs, bool)
        self._obs = np.zeros((num_envs, 3), np.float32)
        self._reward = np.zeros(num_envs, np.float32)
        self._ended = np.zeros(num_envs, bool), np.zeros(num_envs, bool)

    def _renew(self, where: Any) -> None:
        self.episode[where] += 1
        self.t[where] = 0
        self.done[where] = False

    def _look(self) -> Any:
        self._obs[:] = np.stack([self.copies, self.episode, self.t], 1)
        return self._obs

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        where = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self._renew(where)
        for flags in self._ended:
            flags[where] = False
        return self._look(), {}

    def step(self, actions: Any) -> Any:
        assert self.action_space.contains(actions)
        renewed = self.done.copy() if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        assert not (self.done & ~renewed).any(), "stepped after the end"
        self._reward[:] = 10_000 * self.copies + 100 * self.episode + self.t + 0.5
        self._renew(renewed)
        self.t[~renewed] += 1
        self._reward[renewed] = np.nan  # nobody may look at it
        lengths = np.array([length_of(c, e) for c, e in zip(self.copies, self.episode, strict=True)])
        ends = np.array([is_terminated(c, e) for c, e in zip(self.copies, self.episode, strict=True)])
        self.done = (self.t >= lengths) & ~renewed
        self._ended[0][:], self._ended[1][:] = self.done & ends, self.done & ~ends
        info = {}
        if self.mode is AutoresetMode.SAME_STEP and self.done.any():
            info = {"final_obs": self._look().copy()}
            self._renew(self.done.copy())
        return self._look(), self._reward, *self._ended, info

    def close(self, **kwargs: Any) -> None:
        self.closed = True


def numbered(num_envs: int, mode: AutoresetMode, kind: str = "box", *, reuse: bool = False) -> VectorEnv[Any, Any, Any]:
    makers = [lambda copy=copy: Numbered(copy, kind, reuse=reuse) for copy in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


class NumberedAgent:
    """`Numbered` with one agent in dicts."""

    def __init__(self, copy: int) -> None:
        self.env = Numbered(copy)
        self.possible_agents = ["a"]
        self.observation_spaces = {"a": self.env.observation_space}
        self.action_spaces = {"a": self.env.action_space}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.env.reset(seed=seed)
        return {"a": obs}, {"a": info}

    def step(self, action: Any) -> Any:
        return tuple({"a": value} for value in self.env.step(action["a"]))

    def close(self) -> None:
        self.env.close()


def numbered_in_turn(folder: str, *, is_agent: bool = False) -> Any:
    """`Numbered` with the next number that nobody in any process has taken in ``folder``."""
    for copy in itertools.count():
        try:
            (Path(folder) / str(copy)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return NumberedAgent(copy) if is_agent else Numbered(copy)


# -- envs with awkward states ---------------------------------------------------------------------------------------


class Phase(enum.Enum):
    REST = 0
    RUN = 1


class Ball:
    def __init__(self) -> None:
        self.speed = 0.0


class Juggler(gym.Env[Any, Any]):
    """Holds everything that a snapshot can keep, and shows it in the observation."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float64)

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)
        self.balls = [Ball(), Ball()]
        self.dice = random.Random(7)
        self.goals = spaces.Discrete(1000, seed=3)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.phase = Phase.REST
        self.last = self.best = self.balls[0]  # one thing now, two later
        self.history: Any = {("a", 1): [0.0], "b": (1, 2.0)}
        self.t = 0
        self.late = None
        return self._look(), {}

    def _look(self) -> Any:
        total = sum(self.history[("a", 1)])
        speeds = self.last.speed, self.best.speed
        return np.array([self.phase.value, *speeds, total, self.t, len(self.history)], np.float64)

    def step(self, action: Any) -> Any:
        self.t += 1
        self.last = self.balls[self.t % 2]
        self.last.speed += self.dice.random() + self.goals.sample() + self.np_random.random()
        if self.last.speed > self.best.speed:
            self.best = self.last
        self.phase = Phase.RUN if self.phase is Phase.REST and action == 1 else Phase.REST
        self.history[("a", 1)].append(float(action))
        self.history[self.t] = None
        return self._look(), self.last.speed, False, self.t >= 25, {}


class Stateful(gym.Env[Any, Any]):
    """Has get_state and set_state, and hides its state where no snapshot finds it."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        hidden = {"x": 0.0, "t": 0}
        self._hidden = lambda: hidden

    def get_state(self) -> dict[str, Any]:
        return dict(self._hidden())

    def set_state(self, state: dict[str, Any]) -> None:
        self._hidden().update(state)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.set_state({"x": float(self.np_random.random()), "t": 0})
        return np.array([self._hidden()["x"]], np.float32), {}

    def step(self, action: Any) -> Any:
        state = self._hidden()
        state["x"] += self.np_random.normal() + int(action)
        state["t"] += 1
        return np.array([state["x"]], np.float32), state["x"], False, state["t"] >= 9, {}


class Simulated(Numbered):
    """Holds something that is no plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.simulator = iter(range(10))


class Growing(Numbered):
    """Makes objects on the way, which a new env does not have."""

    def step(self, action: Any) -> Any:
        self.enemies = [*getattr(self, "enemies", []), Ball()]
        return super().step(action)


def make_numbered() -> Numbered:
    return Numbered()


def make_lending() -> LendingVectorEnv:
    return LendingVectorEnv(4, AutoresetMode.SAME_STEP)


def fails() -> Numbered:
    raise RuntimeError("no licence")


def makes_text() -> str:
    return "text"
