# SPDX-License-Identifier: Apache-2.0
"""RLlib as a peer on a Ray cluster: the same work through its own public classes.

As a module, ``python -m benchmarks.ray_rllib SEED``, it trains PPO on CartPole until the mean return is 450, with the
settings of its own tuned example for it and 2 env runners, and says the mean return and the steps that it took.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import ENV, Work

GOAL, BUDGET = 450.0, 400_000


def is_there() -> bool:
    """Whether this interpreter has it, with all that it needs."""
    try:
        importlib.import_module("ray.rllib.algorithms.ppo")
    except ImportError:
        return False
    return True


@contextmanager
def sampling(env: str, steps: int) -> Iterator[Work]:
    """Collect ``steps`` with 2 env runners of 8 envs each, as its PPO does."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    config = (
        PPOConfig()
        .environment(env)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=steps // 16)
        .training(train_batch_size=steps)
    )
    algorithm = config.build_algo()

    def work() -> int:
        episodes, _ = synchronous_parallel_sample(
            worker_set=algorithm.env_runner_group,
            max_env_steps=steps,
            _uses_new_env_runners=True,
            _return_metrics=True,
        )
        return sum(len(episode) for episode in episodes)

    yield work
    algorithm.stop()


def train(seed: int) -> dict[str, Any]:
    """PPO with the settings of RLlib's ``examples/algorithms/ppo/cartpole_ppo.py``, and 2 env runners."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    network = DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True)
    algorithm = (
        PPOConfig()
        .environment(ENV)
        .env_runners(num_env_runners=2)
        .training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(model_config=network)
        .debugging(seed=seed)
        .build_algo()
    )
    mean, steps = 0.0, 0
    while mean < GOAL and steps < BUDGET:
        result = algorithm.train()["env_runners"]
        mean, steps = float(result["episode_return_mean"]), int(result["num_env_steps_sampled_lifetime"])
    algorithm.stop()
    ray.shutdown()
    return {"return_mean": mean, "env_steps": steps}


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]))))
