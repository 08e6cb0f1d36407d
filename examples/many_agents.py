# SPDX-License-Identifier: Apache-2.0
"""Two players in turn: Nim, learned by self-play of one network, which finds the rule of fours."""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from matplotlib.figure import Figure
from numpy.typing import NDArray

import etude

MOST = 12


class Nim:
    """In turn, take one to three of a heap of sticks. Who takes the last one wins.

    An env for many agents, in dicts keyed by agent: who is shown an observation acts next.
    """

    possible_agents = ("first", "second")
    observation_spaces = dict.fromkeys(possible_agents, Box(0, 1, (MOST + 1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, Discrete(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A heap of some sticks; it is the first one's turn."""
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.heap, self.turn = int(self.random.integers(1, MOST + 1)), 0
        return {"first": heap_of(self.heap)}, {}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """The one whose turn it was takes; the other's turn comes."""
        ((player, choice),) = action.items()
        other = "second" if player == "first" else "first"
        self.heap = max(self.heap - 1 - int(choice), 0)
        won = self.heap == 0
        reward = {player: 1.0, other: -1.0} if won else {}  # the other's goes to its last step
        return {other: heap_of(self.heap)}, reward, {"__all__": won}, {}, {}


def heap_of(sticks: int) -> NDArray[np.float32]:
    """What a player sees: one-hot."""
    return np.eye(MOST + 1, dtype=np.float32)[sticks]


how = {"num_envs": 32, "num_steps": 2048, "minibatch_size": 256, "lr": 1e-3, "entropy_weight": 0.02}
ppo = etude.PPO(etude.PPOConfig(env=Nim, seed=1, **how))
result = ppo.fit(etude.Stop(env_steps=80_000))  # no modules named: both players share one
heaps = np.array([sticks for sticks in range(3, MOST) if sticks % 4])  # of fewer, several moves take the last
with torch.no_grad():
    logits = ppo.module(torch.stack([torch.from_numpy(heap_of(sticks)) for sticks in heaps])).dist_inputs
right = logits.argmax(dim=1).numpy() + 1 == heaps % 4

figure = Figure((7, 2.3), layout="constrained")
axes = figure.subplots()
axes.imshow(logits.softmax(dim=1).T, cmap="Blues", vmin=0, vmax=1)
axes.plot(heaps % 4 - 1, "o", color="tab:orange", label="leaves a multiple of 4")
axes.set_xticks(range(len(heaps)), heaps)
axes.set_yticks(range(3), (1, 2, 3))
axes.set(xlabel="sticks in the heap", ylabel="sticks taken", title="How likely each move is")
axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
figure.savefig("many_agents.png")
print(f"plays {right.sum()} of {len(heaps)} heaps right after {result.env_steps:,} steps")
