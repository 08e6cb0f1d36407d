# SPDX-License-Identifier: Apache-2.0
"""Train PPO, record it, and clone it from the recording alone."""

import tempfile
from functools import partial
from pathlib import Path

import gymnasium as gym

import etude

folder = Path(tempfile.mkdtemp())

expert = etude.PPO(etude.preset("ppo", "CartPole-v1", seed=1))
for result in expert.iterate(etude.Stop(return_mean=450, env_steps=200_000)):
    print(f"{result.env_steps:>7,} steps  return {result.return_mean:6.1f}")
expert.save(folder / "expert")

played = expert.record(folder / "data", num_episodes=60, seed=5)
print(f"recorded {played.episodes} episodes, mean return {played.return_mean:.1f}")

exp = etude.Recording.open(folder / "data").read()
print(exp)

clone = etude.BC(etude.BCConfig(data=str(folder / "data"), env="CartPole-v1", seed=1))
result = clone.fit(etude.Stop(return_mean=450, updates=2_000))
print(f"clone: return {result.return_mean:.1f} after {result.updates:,} updates")

four_seconds = partial(gym.make, "CartPole-v1", max_episode_steps=200)
etude.clip(clone, four_seconds, "train_record_clone.gif", size="300x200", seed=0)
