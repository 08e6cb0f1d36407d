# SPDX-License-Identifier: Apache-2.0
"""Makers of envs that an id does not name: PettingZoo's, one of ALE, and one of the API before Gymnasium."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def breakout_ram(render_mode: str | None = None) -> Any:
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Breakout-v5", obs_type="ram", render_mode=render_mode)


def tictactoe(render_mode: str | None = None) -> Any:
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env(render_mode=render_mode)


def connect_four(render_mode: str | None = None) -> Any:
    from pettingzoo.classic import connect_four_v3

    return connect_four_v3.env(render_mode=render_mode)


def rock_paper_scissors(render_mode: str | None = None) -> Any:
    from pettingzoo.classic import rps_v2

    return rps_v2.parallel_env(render_mode=render_mode)


def leduc_holdem(render_mode: str | None = None) -> Any:
    from pettingzoo.classic import leduc_holdem_v4

    return leduc_holdem_v4.env(render_mode=render_mode)


class OldEnv(gym.Env[Any, Any]):
    """The API of Gym 0.21: reset gives no info, and step gives four things."""

    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, {}
