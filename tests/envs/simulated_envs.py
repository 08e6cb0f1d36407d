# SPDX-License-Identifier: Apache-2.0
"""Envs whose state lies in a simulator, with and without wrappers, by names that another process can import."""

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class LastFrames(gym.ObservationWrapper[Any, Any, Any]):
    """The last two RAMs, the frame before kept in a deque."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.frames: deque[Any] = deque(maxlen=2)
        self.observation_space = spaces.Box(0, 255, (2, *env.observation_space.shape), np.uint8)  # type: ignore[misc]

    def reset(self, **kwargs: Any) -> Any:
        self.frames.clear()
        return super().reset(**kwargs)

    def observation(self, observation: Any) -> Any:
        self.frames.append(observation)
        return np.stack([self.frames[0], self.frames[-1]])


class EndsWithALife(gym.Wrapper[Any, Any, Any, Any]):
    """An episode is one life: it knows how many are left."""

    lives = 0

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        self.lives = info["lives"]
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        lost, self.lives = info["lives"] < self.lives, info["lives"]
        return obs, reward, terminated or lost, truncated, info


def breakout(**kwargs: Any) -> gym.Env[Any, Any]:
    import ale_py

    gym.register_envs(ale_py)
    return EndsWithALife(LastFrames(gym.make("ALE/Breakout-v5", obs_type="ram", **kwargs)))


def sticky_pong() -> gym.Env[Any, Any]:
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", obs_type="ram", frameskip=1, repeat_action_probability=0.5, max_episode_steps=60)


def wrapped_hopper() -> gym.Env[Any, Any]:
    env = gym.make("Hopper-v5", max_episode_steps=30)
    env = gym.wrappers.TimeAwareObservation(gym.wrappers.NormalizeObservation(env))
    return gym.wrappers.FrameStackObservation(gym.wrappers.RecordEpisodeStatistics(env), 3)


def heavier_every_time() -> gym.Env[Any, Any]:
    """The model is changed at each reset."""
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    class Heavier(HopperEnv):
        def reset_model(self) -> Any:
            self.model.body_mass[:] *= 1.1
            self.model.opt.gravity[2] -= self.np_random.random()
            return super().reset_model()

    return gym.wrappers.TimeLimit(Heavier(), 25)


def with_views() -> gym.Env[Any, Any]:
    """Holds views of the simulator's memory, and writes into one of them."""
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    class Pushed(HopperEnv):
        def __init__(self) -> None:
            super().__init__()
            self.push = self.data.qfrc_applied[:2]
            self.height = self.data.qpos[1:2]

        def step(self, action: Any) -> Any:
            self.push[:] = self.np_random.normal(size=2) - self.height
            return super().step(action)

    return gym.wrappers.TimeLimit(Pushed(), 25)


def with_a_get_state() -> gym.Env[Any, Any]:
    """Has a get_state, but the set_state(qpos, qvel) of MuJoCo's envs."""
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    class Telling(HopperEnv):
        def get_state(self) -> Any:
            return self.data.qpos.copy()

    return gym.wrappers.TimeLimit(Telling(), 25)
