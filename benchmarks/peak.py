# SPDX-License-Identifier: Apache-2.0
"""The most memory that PPO holds while it trains, in a process of its own."""

from collections.abc import Iterator

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, python, race_processes

ENVS, STEPS, ITERATIONS = 64, 128, 3
SB3, TORCH = "SB3 PPO", "import torch alone"

_ETUDE = f"""
import etude
network = etude.NetworkConfig(hidden=(256, 256))
config = etude.PPOConfig(env="{ENV}", num_envs={ENVS}, num_steps={ENVS * STEPS}, network=network, seed=0)
etude.PPO(config).fit(etude.Stop(env_steps={ITERATIONS * ENVS * STEPS}))
"""

_SB3 = f"""
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
env = make_vec_env("{ENV}", {ENVS})
model = PPO("MlpPolicy", env, n_steps={STEPS}, batch_size=256, seed=0, policy_kwargs=dict(net_arch=[256, 256]))
model.learn({ITERATIONS * ENVS * STEPS})
"""


def rows(options: Options) -> Iterator[Row]:
    """PPO with 2x256 networks, 64 envs and 128 steps of each."""
    codes = {ETUDE: _ETUDE, SB3: _SB3, TORCH: "import torch"}
    runs = {name: (lambda _, code=code: python(code)) for name, code in codes.items()}
    done = race_processes(runs, options)
    memory = {name: [finished.megabytes for finished in processes] for name, processes in done.items()}
    yield Row(
        f"PPO with 2x256 networks, {ENVS} envs, {STEPS} steps of each: most memory held",
        "MB",
        [Figure(ETUDE, memory[ETUDE], "etude"), Figure(TORCH, memory[TORCH]), Figure(SB3, memory[SB3], "peer")],
        Reach(1.0, SB3),
    )
