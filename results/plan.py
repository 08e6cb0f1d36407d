# SPDX-License-Identifier: Apache-2.0
"""Which runs there are to be, in the order in which they are made."""

from typing import Final, NamedTuple


class Planned(NamedTuple):
    """A preset, and how much of it is run."""

    preset: str
    budget: int | None = None
    """Env steps, or updates offline; None is what the preset says."""
    seeds: int = 3
    by: str = "etude"
    """Etude, another library with the same settings, or ``defaults``: Etude with the algorithm's default settings."""
    data: str | None = None
    """Offline: the level of the recording, see `results.data`."""


PLAN: Final = (
    Planned("ppo-CartPole-v1"),
    Planned("ppo-no_velocity-CartPole-v1"),
    Planned("dqn-MountainCar-v0"),
    Planned("dqn-Acrobot-v1"),
    Planned("dqn-LunarLander-v3"),
    Planned("qr_dqn-MountainCar-v0"),
    Planned("qr_dqn-Acrobot-v1"),
    Planned("qr_dqn-LunarLander-v3"),
    Planned("ppo-LunarLander-v3"),
    Planned("ppo-Acrobot-v1"),
    Planned("ppo-MountainCar-v0"),
    Planned("ppo-HalfCheetah-v5"),
    Planned("ppo-Hopper-v5"),
    Planned("ppo-Walker2d-v5"),
    Planned("ppo-Ant-v5"),
    Planned("td3-HalfCheetah-v5", budget=200_000),
    Planned("td3-Hopper-v5", budget=200_000),
    Planned("sac-HalfCheetah-v5", budget=200_000),
    Planned("sac-Hopper-v5", budget=200_000),
    Planned("dqn-MountainCar-v0", by="sb3"),
    Planned("dqn-LunarLander-v3", by="sb3"),
    Planned("ppo-no_velocity-CartPole-v1", by="sb3-contrib"),
    Planned("ppo-HalfCheetah-v5", by="sb3"),
    Planned("ppo-Hopper-v5", by="sb3"),
    Planned("ppo-Ant-v5", by="sb3"),
    Planned("sac-HalfCheetah-v5", budget=200_000, by="sb3"),
    Planned("sac-Hopper-v5", budget=200_000, by="sb3"),
    Planned("td3-Hopper-v5", budget=200_000, by="sb3"),
    Planned("ppo-LunarLander-v3", by="defaults"),
    Planned("ppo-HalfCheetah-v5", by="defaults"),
    Planned("ppo-MountainCar-v0", by="defaults"),
    Planned("ppo-Hopper-v5", by="defaults"),
    Planned("dqn-LunarLander-v3", by="defaults"),
    *(
        Planned(f"{name}-HalfCheetah-v5", budget=50_000, data=level)
        for level in ("medium", "medium-replay", "expert")
        for name in ("bc", "marwil", "iql", "td3_bc", "cql", "decision_transformer")
    ),
    Planned("iql-HalfCheetah-v5", budget=50_000, data="medium", by="d3rlpy"),
    Planned("td3_bc-HalfCheetah-v5", budget=50_000, data="medium", by="d3rlpy"),
    Planned("ppo-pursuit_v5"),
    Planned("ppo-multiwalker_v9"),
    Planned("ppo-atari-Pong", budget=500_000),
)
