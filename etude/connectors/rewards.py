# SPDX-License-Identifier: Apache-2.0
"""Rewards as the learner sees them."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors.base import Connector, Inputs, column
from etude.experience import Experience
from etude.settings import check_range

if TYPE_CHECKING:
    from etude.modules.module import Module


class ClipReward(Connector):
    """Clips rewards. Recorded stays what the env said; episode returns are of that too.

    Args:
        low: The least reward that passes.
        high: The greatest; -1 to 1 as in Mnih et al. 2015, "Human-level control through deep RL".
        sign: Take only the sign of the reward (-1, 0 or 1), before clipping.
    """

    needs = (col.REWARD,)

    def __init__(self, low: float = -1.0, high: float = 1.0, *, sign: bool = False) -> None:
        check_range("ClipReward", low=(low <= high, f"at most high ({high}), not {low}"))
        self.low, self.high, self.sign = low, high, sign

    def _clipped(self, reward: NDArray[Any]) -> NDArray[Any]:
        values = np.sign(reward) if self.sign else reward
        clipped: NDArray[Any] = np.minimum(np.maximum(values, self.low), self.high)
        return clipped

    def online(self, inputs: Inputs) -> Inputs:
        """Clips the reward of the step before."""
        reward = self._clipped(inputs.prev_reward)
        reward[inputs.first] = 0
        return Inputs(inputs.slots, inputs.obs, inputs.first, inputs.prev_action, reward)

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Clips the column ``reward``."""
        return exp.with_steps(reward=self._clipped(column(exp, col.REWARD, "ClipReward")))
