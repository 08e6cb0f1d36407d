# SPDX-License-Identifier: Apache-2.0
"""Rewards as the learner sees them: clipped, or summed over n steps; and what each step led to."""

import numpy as np

from etude import columns as col
from etude.connectors.connector import Connector, Inputs, array_column, column
from etude.errors import DataError
from etude.experience import Experience, returns
from etude.experience.arrays import Array, clip, sign
from etude.modules.module import Module
from etude.settings import check_range


class ClipReward(Connector):
    """Clips rewards. Recorded stays what the env said; episode returns are of that too.

    Args:
        low: The least reward that passes.
        high: The greatest; -1 to 1 as in Mnih et al. 2015, "Human-level control through deep RL".
        sign: Take only the sign of the reward (-1, 0 or 1), before clipping.
    """

    needs = (col.REWARD,)
    takes_tensors = True

    def __init__(self, low: float = -1.0, high: float = 1.0, *, sign: bool = False) -> None:
        check_range("ClipReward", low=(low <= high, f"at most high ({high}), not {low}"))
        self.low, self.high, self.sign = low, high, sign

    def _clipped(self, reward: Array) -> Array:
        return clip(sign(reward) if self.sign else reward, self.low, self.high)

    def online(self, inputs: Inputs) -> Inputs:
        """Clips the reward of the step before."""
        reward = self._clipped(inputs.prev_reward)
        reward[inputs.first] = 0
        return Inputs(inputs.slots, inputs.obs, inputs.first, inputs.prev_action, reward)

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Clips the column ``reward``."""
        return exp.with_steps(reward=self._clipped(array_column(exp, col.REWARD, "ClipReward")))


class NStep(Connector):
    """Sums the next ``n`` rewards of each step, for losses that look at what comes after them; the learner's side only.

    ``reward`` becomes the discounted sum of up to n rewards (float32), ``next_obs`` what was observed after the last of
    them, ``terminated`` whether the episode ended there, and ``discount`` the factor of the value of ``next_obs``:
    ``gamma ** k`` after k rewards, 0 where it terminated (Sutton & Barto 2018, 7.1). At the end of a segment, k is less
    than n.

    Args:
        n: How many rewards, at least 1.
        gamma: Discount a step, 0 to 1.
    """

    needs = (col.OBS, col.REWARD)

    def __init__(self, n: int, gamma: float = 0.99) -> None:
        check_range("NStep", n=(n >= 1, f"at least 1, not {n}"), gamma=(0 <= gamma <= 1, f"from 0 to 1, not {gamma}"))
        self.n, self.gamma = n, gamma

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Looks ahead, within segments.

        Raises:
            DataError: what was observed after a segment that did not terminate is not known.
        """
        segments = exp.segments
        unknown = np.flatnonzero(~segments.has_final_obs & ~segments.terminated)
        if len(unknown):
            episode = segments.episode_id[unknown[0]]
            raise DataError(
                f"NStep needs what was observed after the last step of episode {episode!r}, which was not recorded "
                f"({len(unknown)} such segment(s)). Repair that with on_bad='repair', or leave these out."
            )
        reward = column(exp, col.REWARD, "NStep").astype(np.float32, copy=False)
        sums = returns.n_step(reward, exp.offsets, self.n, self.gamma)
        next_obs = {name: np.asarray(values).take(sums.last, axis=0) for name, values in exp.next_obs().items()}
        terminated = exp.at_ends(segments.terminated)[sums.last]
        discount = np.where(terminated, 0.0, np.power(self.gamma, sums.steps)).astype(np.float32)
        return exp.with_steps(
            **{col.REWARD: sums.reward, col.TERMINATED: terminated, "discount": discount},
            **col.renamed(next_obs, col.OBS, col.NEXT_OBS),
        )


class NextObs(Connector):
    """Adds ``next_obs`` for losses that look at it: the observation after each step."""

    needs = (col.OBS,)
    takes_tensors = True

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """The columns ``next_obs...``."""
        return exp.with_steps(**{col.NEXT_OBS + name[len(col.OBS) :]: c for name, c in exp.next_obs().items()})
