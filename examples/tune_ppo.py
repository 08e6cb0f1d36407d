# SPDX-License-Identifier: Apache-2.0
"""Settings are tried: PPO with four learning rates and networks, each trial in a process of its own, through Ray Tune.

Needs ``pip install ".[ray]"`` in the clone.
"""

import tempfile
from pathlib import Path

from ray import tune

import etude
import etude.ray

config = etude.PPOConfig(env="CartPole-v1", num_envs=8, num_steps=512, epochs=4, seed=1)
found = etude.ray.tune(
    config,
    {"lr": tune.loguniform(1e-4, 1e-2), "network.hidden": [[32], [64, 64]]},
    num_samples=2,  # of the learning rate, for each of the networks
    stop=etude.Stop(return_mean=200, env_steps=16_000),
    out=Path(tempfile.mkdtemp()) / "cartpole",
    verbose=0,
)
print(found.get_dataframe()[["config/lr", "config/network.hidden", "return_mean", "env_steps"]])

best = etude.load(found.get_best_result().checkpoint.path)
print(f"lr {best.config.lr:.2g}, network {best.config.network.hidden}: {best.evaluate(20, seed=2).return_mean:.1f}")
best.close()
