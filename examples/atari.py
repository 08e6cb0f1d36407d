# SPDX-License-Identifier: Apache-2.0
"""Atari from pixels: PPO learns to cross the ten lanes of Freeway from what is on the screen.

Needs ``pip install ".[atari]"`` in the clone. The argument is how many steps to train, such as 2000 for a try.
"""

import sys
from typing import Any

import ale_py
import gymnasium as gym

import etude

gym.register_envs(ale_py)


def make_game(render_mode: str | None = None, max_steps: int | None = None) -> gym.Env[Any, Any]:
    """The game in grey, 42 by 42 pixels, with two actions, wait and go up: small, to be learned in minutes.

    ``env="atari:Freeway"`` has the wrappers that most results are reported with: 84 by 84 pixels, and all actions.
    """
    env = gym.make("ALE/Freeway-v5", frameskip=1, repeat_action_probability=0.0, render_mode=render_mode)
    env = gym.wrappers.AtariPreprocessing(env, screen_size=42)
    env = gym.wrappers.TransformAction(env, lambda action: action, gym.spaces.Discrete(2))
    return env if max_steps is None else gym.wrappers.TimeLimit(env, max_steps)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
config = etude.PPOConfig(
    env=make_game,
    connectors=("frame_stack:4",),
    network=etude.NetworkConfig(conv=((16, 8, 4), (32, 4, 2)), conv_width=128, hidden=(), separate=False),
    num_envs=8,
    num_steps=1024,
    minibatch_size=256,
    epochs=4,
    lr=1e-3,
    entropy_weight=0.003,
    seed=1,
)
ppo = etude.PPO(config)
for result in ppo.iterate(etude.Stop(env_steps=steps)):
    print(f"{result.env_steps:>7,} steps  crossings {result.return_mean:5.1f}")
print(f"the likeliest actions cross {ppo.evaluate(1, seed=2).return_mean:.0f} times")
etude.clip(ppo, lambda render_mode: make_game(render_mode, max_steps=150), "atari.gif", seed=0)
