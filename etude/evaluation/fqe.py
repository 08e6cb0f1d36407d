# SPDX-License-Identifier: Apache-2.0
"""Fitted Q evaluation (Le, Voloshin & Yue 2019, "Batch policy learning under constraints", algorithm 3)."""

import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import SettingsError
from etude.evaluation.pool import shuffled
from etude.evaluation.q_nets import QNets
from etude.evaluation.target import Target
from etude.experience import Experience
from etude.experience.returns import discounted_returns
from etude.learners import seeded
from etude.learners.adam import Adam
from etude.learners.flat import FlatParameters
from etude.modules import NetworkConfig
from etude.modules.critics import TargetNetwork, frozen_copy
from etude.settings import settings

FORWARD = 2_048
"""Rows that go through the networks at once."""
WARM_UP = 4
"""The first of so many parts of the steps fits the returns that were recorded."""


@settings
class FQEConfig:
    """How action values are fitted."""

    members: int = 10
    """Networks that are fitted side by side, each to another bootstrap sample of the episodes; at least 2."""

    steps: int = 3_000
    """Gradient steps, at least 1. The first quarter fits the recorded returns, from where the target policy's values
    are not as far as from nothing."""

    batch_size: int = 256
    """Steps of the recording in a gradient step, at least 1."""

    lr: float = 3e-3
    """Learning rate of Adam at the start; it falls to 0 along a straight line. Greater than 0."""

    tau: float = 0.2
    """How far the target networks move after each gradient step, above 0, at most 1."""

    draws: int = 4
    """Actions that are drawn from the target policy for an expected value, at least 1; Discrete ones are not drawn, but
    weighed by their probabilities."""

    network: NetworkConfig = NetworkConfig(activation="relu")
    """The shape of each network: `hidden`, `activation` and those of convolutions."""

    def __post_init__(self) -> None:
        for name, right, words in (
            ("members", self.members >= 2, "at least 2"),
            ("steps", self.steps >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("lr", self.lr > 0, "greater than 0"),
            ("tau", 0 < self.tau <= 1, "greater than 0, at most 1"),
            ("draws", self.draws >= 1, "at least 1"),
        ):
            if not right:
                raise SettingsError(f"`fqe.{name}` is {getattr(self, name)}, but must be {words}.")


class Values(NamedTuple):
    """What the networks say of a chunk of whole episodes."""

    start: NDArray[np.float64]
    """``[members, episodes]``: the value of each first observation."""
    at: NDArray[np.float64]
    """``[steps]``: the value of each observation, by members that did not learn from its episode."""
    after: NDArray[np.float64]
    """``[steps]``: likewise of the next one; 0 where the episode terminated."""
    taken: NDArray[np.float64]
    """``[steps]``: likewise of the action taken."""
    times: NDArray[np.uint8]
    """``[episodes, members]``: how often each episode is in the sample that each member learned from."""


class FQE:
    """Fits Q of a target policy, ``Q(s, a) = r + gamma * E[Q(s', a')]`` with a' as the target policy acts.

    Each member learns from a bootstrap sample of the episodes, drawn by a Poisson distribution with mean 1, so that
    their spread says how much the fit hangs on the data (Hao et al. 2021, "Bootstrapping fitted Q-evaluation for
    off-policy inference"), and so that for each episode there are members that have not learned from it.

    Args:
        target: The policy.
        gamma: Discount, 0 to 1.
        config: How to fit.
        seed: Of weights, samples, order and draws.
    """

    def __init__(self, target: Target, gamma: float, config: FQEConfig, seed: int) -> None:
        self._target = target
        self._gamma = gamma
        self._config = config
        self._seed = seed
        self._device = target.module.device
        module = target.module
        with seeded(seed, "cpu"):
            self.nets = QNets(module.obs_space, module.action_space, config.network, config.members).to(self._device)

    def fit(self, chunks: Callable[[], Iterator[Experience]]) -> None:
        """Fit to episodes, given as `Target.seen` gives them."""
        config = self._config
        batches = shuffled(lambda: map(self._rows, chunks()), config.batch_size, self._seed)
        example = self._tensors(self._rows(next(iter(chunks()))))
        self.nets.scale(col.subtree(example, col.OBS), example["taken"], example["returns"])
        adam = Adam(FlatParameters(list(self.nets.parameters())))
        frozen = frozen_copy(self.nets)
        follower = TargetNetwork(frozen, self.nets)
        for i, rows in enumerate(islice(batches, config.steps)):
            batch = self._tensors(rows)
            obs, following = col.subtree(batch, col.OBS), col.renamed(batch, col.NEXT_OBS, col.OBS)
            with torch.no_grad():
                if i < config.steps // WARM_UP:
                    wanted = batch["returns"]
                else:
                    wanted = batch["reward"] + batch["discount"] * frozen.expected(following, batch["policy"])
            error = (self.nets.taken(obs, batch["taken"]) - wanted) / self.nets.spread
            loss = (batch["times"].T * error.square()).mean(1).sum()
            adam.parameters.attach_grads()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step(config.lr * (1 - i / config.steps))
            follower.follow(config.tau if i >= config.steps // WARM_UP else 1.0)

    def values(self, seen: Experience) -> Values:
        """What the networks say of whole episodes."""
        obs, following, policy = self._looked_ahead(seen)
        times = self._times(seen)
        unseen = times[seen.segment_of_step()] == 0
        actions = self._actions(seen)
        first = seen.offsets[:-1]
        at, after, taken = np.empty(seen.num_steps), np.empty(seen.num_steps), np.empty(seen.num_steps)
        start = np.empty((self._config.members, len(first)))
        here = self._policy(obs)
        for begin in range(0, seen.num_steps, FORWARD):
            rows = slice(begin, begin + FORWARD)
            with torch.inference_mode():
                part = self._tensors({n: c[rows] for n, c in obs.items()})
                of_obs = self.nets.expected(part, self._tensor(here[rows]))
                of_action = self.nets.taken(part, self._tensor(actions[rows]))
                part = self._tensors({n: c[rows] for n, c in following.items()})
                of_next = self.nets.expected(part, self._tensor(policy[rows]))
            is_first = np.flatnonzero((first >= begin) & (first < begin + FORWARD))
            start[:, is_first] = of_obs.cpu().numpy()[:, first[is_first] - begin]
            for out, found in ((at, of_obs), (after, of_next), (taken, of_action)):
                out[rows] = np.average(found.double().cpu().numpy(), 0, weights=unseen[rows].T)
        after[seen.at_ends(seen.segments.terminated)] = 0.0
        return Values(start, at, after, taken, times)

    # -- rows to learn from ------------------------------------------------------------------------------------

    def _rows(self, seen: Experience) -> Columns:
        """A row a step, with all that its target needs."""
        obs, following, policy = self._looked_ahead(seen)
        reward = seen.steps[col.REWARD].astype(np.float64)
        returns = discounted_returns(reward, np.zeros(seen.num_segments), seen.offsets, self._gamma)
        ended = seen.at_ends(seen.segments.terminated)
        return {
            **obs,
            **col.renamed(following, col.OBS, col.NEXT_OBS),
            "policy": policy,
            "taken": self._actions(seen),
            "reward": reward.astype(np.float32),
            "returns": returns.astype(np.float32),
            "discount": np.where(ended, 0.0, self._gamma).astype(np.float32),
            "times": self._times(seen)[seen.segment_of_step()],
        }

    def _looked_ahead(self, seen: Experience) -> tuple[Columns, Columns, NDArray[np.float32]]:
        """The observations, those after them, and what the policy does there; zeros where nothing follows.

        Where what followed was not recorded, the last observation stands for it.
        """
        obs = col.subtree(seen.steps, col.OBS)
        following = {name: np.array(column) for name, column in seen.next_obs().items()}
        last, segments = seen.offsets[1:] - 1, seen.segments
        for name, column in following.items():
            unknown = last[~segments.has_final_obs]
            column[unknown] = obs[name][unknown]
        here = self._policy(obs)
        policy = np.zeros_like(here)
        policy[:-1] = here[1:]
        policy[last] = 0.0
        goes_on = last[~segments.terminated]
        if len(goes_on):
            policy[goes_on] = self._policy({name: column[goes_on] for name, column in following.items()})
        return obs, following, policy

    def _policy(self, obs: Columns) -> NDArray[np.float32]:
        """Probabilities ``[rows, n]``, or drawn actions ``[rows, num, F]``."""
        if self._target.has_choices:
            return self._target.choices(obs)
        crc = zlib.crc32(np.ascontiguousarray(next(iter(obs.values()))[:1]).tobytes())
        drawn = self._target.draws(obs, self._config.draws, np.random.default_rng([self._seed, crc]))
        each = np.stack([self._encoded(action) for action in drawn], 1)
        if self.nets.actions is not None:
            return each
        shares: NDArray[np.float32] = np.eye(self.nets.num_actions, dtype=np.float32)[each].mean(1)
        return shares

    def _actions(self, seen: Experience) -> NDArray[np.float32]:
        return self._encoded(col.subtree(seen.steps, col.ACTION))

    def _encoded(self, action: Columns) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = self.nets.encoded(self._tensors(action)).cpu().numpy()
        return found

    def _times(self, seen: Experience) -> NDArray[np.uint8]:
        """``[episodes, members]``, by the episode's id alone; each episode is left out by one member at least."""
        out = np.empty((seen.num_segments, self._config.members), np.uint8)
        for i, episode_id in enumerate(seen.segments.episode_id.tolist()):
            rng = np.random.default_rng([self._seed, zlib.crc32(str(episode_id).encode())])
            out[i] = rng.poisson(1.0, self._config.members)
            if out[i].all():
                out[i, rng.integers(self._config.members)] = 0
        return out

    def _tensor(self, column: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column)).to(self._device)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def _tensors(self, columns: Columns) -> dict[str, torch.Tensor]:
        return {name: self._tensor(column) for name, column in columns.items() if column.dtype != object}
