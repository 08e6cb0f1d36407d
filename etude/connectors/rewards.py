# SPDX-License-Identifier: Apache-2.0
"""Connectors that clip, scale or sum rewards for the learner, and one that adds next observations."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors.connector import Connector, Inputs, array_column, column
from etude.connectors.observations import Moments
from etude.errors import DataError
from etude.experience import Experience, Segments, returns
from etude.experience.arrays import Array, Index, clip, library, ranges, where_rows
from etude.experience.experience import check_finite
from etude.settings import FloatAbove0, IntFrom1, UnitInterval, check_arguments, check_range

if TYPE_CHECKING:
    from etude.modules.module import Module


class RewardMap(Connector):
    """Base class of connectors that map each reward independently, with `map_reward`, both online and offline."""

    needs = (col.REWARD,)
    takes_tensors = True

    def map_reward(self, reward: Array) -> Array:
        """Map the env's rewards ``[rows]`` to the module's."""
        raise NotImplementedError

    def online(self, inputs: Inputs) -> Inputs:
        """Map the reward of the previous step."""
        reward = where_rows(inputs.first, 0.0, self.map_reward(inputs.prev_reward))
        return Inputs(inputs.slots, inputs.obs, inputs.first, inputs.prev_action, reward)

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Map the column ``reward``."""
        return exp.with_steps(reward=self.map_reward(array_column(exp, col.REWARD, self.name)))


class ClipReward(RewardMap):
    """Clips rewards. Recordings and episode returns keep the env's rewards.

    Args:
        low: Smallest reward after clipping. The default range is that of Mnih et al. 2015, "Human-level control through
            deep RL".
        high: Largest reward after clipping, at least ``low``.
        sign: Replace the reward by its sign (-1, 0 or 1) before clipping.
    """

    def __init__(self, low: float = -1.0, high: float = 1.0, *, sign: bool = False) -> None:
        check_arguments("ClipReward", low=(float, low), high=(float, high), sign=(bool, sign))
        check_range("ClipReward", low=(low <= high, f"at most high ({high}), not {low}"))
        self.low, self.high, self.sign = low, high, sign

    def map_reward(self, reward: Array) -> Array:
        return clip(library(reward).sign(reward) if self.sign else reward, self.low, self.high)


class NormalizeReward(RewardMap):
    """Divides rewards by the standard deviation of the discounted return so far, then clips them.

    That return is ``G[t] = gamma * G[t - 1] + r[t]`` within an episode, as in ``VecNormalize`` of OpenAI Baselines and
    Stable-Baselines3. The mean is not subtracted, so rewards keep their sign. Statistics are over all steps passed to
    `update`, and are frozen between two updates; before the first, rewards are only clipped. Recordings and episode
    returns keep the env's rewards.

    Args:
        gamma: Discount factor, 0 to 1. Set it to that of the algorithm, as in ``normalize_reward:gamma=0.9``.
        clip: Largest magnitude after scaling, above 0, in standard deviations; ``inf`` for none. ``VecNormalize`` uses
            10.
    """

    def __init__(self, gamma: float = 0.99, clip: float = 10.0) -> None:
        check_arguments("NormalizeReward", gamma=(UnitInterval, gamma), clip=(FloatAbove0, clip))
        self.gamma, self.clip = float(gamma), float(clip)
        self._moments = Moments(())
        self._running: dict[tuple[str | None, str | None], float] = {}
        """Discounted return so far of episodes that may continue, by episode and agent; the newest last."""

    def start(self, num_slots: int) -> None:
        """Forget the running episodes."""
        self._running = {}

    def map_reward(self, reward: Array) -> Array:
        return clip(reward * float(1 / self._moments.deviation()), -self.clip, self.clip)

    def new_state(self, num_rows: int) -> dict[str, Any]:
        return {}  # only `update` uses running episodes

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        return self.online(inputs), state

    def update(self, exp: Experience) -> None:
        """Add the discounted returns so far to the statistics. Episodes continue from one call to the next.

        Raises:
            DataError: a reward is not finite; the message says where. The statistics are then unchanged.
        """
        reward = column(exp, col.REWARD, "NormalizeReward")
        check_finite(exp, (col.REWARD,))
        starts, own = exp.segments.t_start + exp.segments.lookback, exp.lengths - exp.segments.lookback
        order = np.lexsort((starts, exp.segments.tracks()))
        order = order[own[order] > 0]
        if len(order):
            segments, starts, own = exp.segments[order], starts[order], own[order]
            rows = ranges((exp.offsets[:-1] + exp.segments.lookback)[order], own)
            self._moments.add(self._so_far(reward[rows].astype(np.float64), segments, starts, own))

    def _so_far(self, reward: NDArray[np.float64], segments: Segments, starts: Index, lengths: Index) -> Any:
        """The discounted return so far at each step, ``[rows]``, of segments sorted by episode and time."""
        tracks, ends = segments.tracks(), np.cumsum(lengths)
        goes_on = np.zeros(len(segments), bool)
        goes_on[1:] = (tracks[1:] == tracks[:-1]) & (starts[1:] == (starts + lengths)[:-1]) & ~segments.done[:-1]
        first, names = ends - lengths, list(zip(segments.episode_id, segments.agent_id, strict=True))
        for i in np.flatnonzero(~goes_on & (starts > 0)).tolist():
            reward[first[i]] += self.gamma * self._running.get(names[i], 0.0)
        decay = np.full(len(reward), self.gamma)
        decay[first[~goes_on]] = 0
        so_far = returns.scan(reward[::-1].copy(), decay[::-1].copy())[::-1]
        for i, name in enumerate(names):
            self._running.pop(name, None)
            if not segments.done[i]:
                self._running[name] = float(so_far[ends[i] - 1])
        for name in list(self._running)[: max(0, len(self._running) - _MOST_RUNNING)]:
            del self._running[name]
        return so_far

    def metrics(self) -> dict[str, float]:
        """``deviation``: the divisor of rewards."""
        return {"deviation": float(self._moments.deviation())}

    def state_dict(self) -> dict[str, Any]:
        """``count``, ``mean`` and ``squares`` of the returns; ``running``: the returns of episodes that may
        continue."""
        running = [[*name, value] for name, value in self._running.items()]
        return self._moments.state_dict() | {"running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._moments.load_state_dict(state)
        self._running = {(episode, agent): float(value) for episode, agent, value in state["running"]}


_MOST_RUNNING = 65_536
"""Maximum number of unfinished episodes that are remembered. The oldest are assumed to be abandoned and dropped."""


class NStep(Connector):
    """Sums the next ``n`` rewards of each step, for losses with n-step targets; on the learner's side only.

    ``reward`` becomes the discounted sum of up to n rewards (float32), ``next_obs`` the observation after the last of
    them, ``terminated`` (bool) whether the episode terminated there, and ``discount`` (float32) the factor of the value
    of ``next_obs``: ``gamma ** k`` after k rewards, 0 if it terminated (Sutton & Barto 2018, 7.1). At the end of a
    segment, k is less than n.

    Args:
        n: Number of rewards, at least 1.
        gamma: Discount factor, 0 to 1.
    """

    needs = (col.OBS, col.REWARD)

    def __init__(self, n: int, gamma: float = 0.99) -> None:
        check_arguments("NStep", n=(IntFrom1, n), gamma=(UnitInterval, gamma))
        self.n, self.gamma = n, gamma

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Sum rewards within segments.

        Raises:
            DataError: the final observation of a segment that did not terminate is unknown.
        """
        segments = exp.segments
        unknown = np.flatnonzero(~segments.has_final_obs & ~segments.terminated)
        if len(unknown):
            episode = segments.episode_id[unknown[0]]
            raise DataError(
                f"NStep needs the observation after the last step of episode {episode!r}, which was not recorded "
                f"({len(unknown)} such segment(s)). Repair that with on_bad='repair', or leave these out."
            )
        summed, sums = with_summed_rewards(exp, self.n, self.gamma, "NStep")
        next_obs = {name: np.asarray(values).take(sums.last, axis=0) for name, values in exp.next_obs().items()}
        return summed.with_steps(**col.renamed(next_obs, col.OBS, col.NEXT_OBS))


def with_summed_rewards(exp: Experience, n: int, gamma: float, who: str) -> tuple[Experience, returns.NStepSums]:
    """Experience with the columns ``reward``, ``terminated`` and ``discount`` of `NStep`, and the n-step sums."""
    sums = returns.n_step(column(exp, col.REWARD, who).astype(np.float32, copy=False), exp.offsets, n, gamma)
    terminated = exp.at_ends(exp.segments.terminated)[sums.last]
    discount = np.where(terminated, 0.0, np.power(gamma, sums.steps)).astype(np.float32)
    return exp.with_steps(**{col.REWARD: sums.reward, col.TERMINATED: terminated, col.DISCOUNT: discount}), sums


class NextObs(Connector):
    """Adds ``next_obs``, the observation after each step, for losses that use it."""

    needs = (col.OBS,)
    takes_tensors = True

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Add the columns ``next_obs...``."""
        return exp.with_steps(**col.renamed(exp.next_obs(), col.OBS, col.NEXT_OBS))
