# SPDX-License-Identifier: Apache-2.0
"""Connectors of one's own: a function, and a class with both sides. CartPole without its velocities."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

import etude
from etude.connectors import Inputs
from etude.spaces import Space


def without_velocities(obs: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[B, 4]`` to ``[B, 2]``: position and angle."""
    return obs[:, [0, 2]]


class Clock(etude.Connector):
    """Adds the step's index in its episode, in hundreds, to the observation."""

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """One number more."""
        assert obs_space.shape is not None
        return Box(-np.inf, np.inf, (obs_space.shape[0] + 1,), np.float32), action_space

    def start(self, num_slots: int) -> None:
        """A clock for each slot."""
        self.t = np.zeros(num_slots, np.float32)

    def online(self, inputs: Inputs) -> Inputs:
        """While acting, a batch of slots at a time."""
        t = np.where(inputs.first, 0, self.t[inputs.slots] + 1).astype(np.float32)
        self.t[inputs.slots] = t
        return inputs.with_obs({"obs": np.column_stack([inputs.obs["obs"], t / 100])})

    def offline(self, exp: etude.Experience, module: etude.Module | None = None) -> etude.Experience:
        """The same from recorded experience, where the index is known."""
        obs = np.column_stack([exp.steps["obs"], exp.t().astype(np.float32) / 100])
        after = (exp.segments.t_start + exp.lengths).astype(np.float32) / 100
        final_obs = {"obs": np.column_stack([exp.final_obs["obs"], after])}
        return etude.Experience({**exp.steps, "obs": obs}, exp.offsets, exp.segments, final_obs)

    def state_dict(self) -> dict[str, Any]:
        """The clocks, for checkpoints and for a policy that acts elsewhere."""
        return {"t": self.t.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the clocks."""
        self.t = np.array(state["t"])


config = etude.PPOConfig(env="CartPole-v1", connectors=(without_velocities, etude.FrameStack(4), Clock()), seed=1)
ppo = etude.PPO(config)
result = ppo.fit(etude.Stop(return_mean=120, env_steps=100_000))
print(f"saw {ppo.module.obs_space.shape}; return {result.return_mean:.1f} after {result.env_steps:,} steps")
