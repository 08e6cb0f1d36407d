# SPDX-License-Identifier: Apache-2.0
"""Fitted Q evaluation (Le, Voloshin & Yue 2019, "Batch policy learning under constraints", algorithm 3)."""

import itertools
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from etude import columns as col
from etude.algorithms.progress import gauge
from etude.columns import Columns
from etude.evaluation.policies import Chunks, Floats, TargetPolicy, shuffled_rows
from etude.experience import Experience
from etude.experience.returns import discounted_returns
from etude.learners import seeded
from etude.learners.optim import Adam, FlatParameters
from etude.modules import NetworkConfig
from etude.modules.critics import TargetNetwork, frozen_copy
from etude.modules.network import ACTIVATIONS, ObsEncoder
from etude.settings import FloatAbove0, IntFrom1, Rate, Rule, settings
from etude.spaces import Space

FORWARD: Final = 2_048
"""Rows that go through the networks at a time."""
WARM_UP: Final = 4
"""The first ``1 / WARM_UP`` of the gradient steps fit the recorded returns."""


@settings
class FQEConfig:
    """Settings of the fit of action values."""

    members: Annotated[int, Rule(lambda value: value >= 2, "at least 2")] = 10
    """Number of networks, at least 2. Each is fitted to its own bootstrap sample of the episodes."""

    steps: IntFrom1 = 3_000
    """Gradient steps, at least 1. The first quarter fits the recorded returns, a better starting point for the target
    policy's values than random weights."""

    batch_size: IntFrom1 = 256
    """Recorded steps per gradient step, at least 1."""

    lr: FloatAbove0 = 3e-3
    """Initial learning rate of Adam, greater than 0. It decreases linearly to 0."""

    tau: Rate = 0.2
    """How far the target networks move towards the networks at each gradient step, above 0, at most 1."""

    draws: IntFrom1 = 4
    """Actions sampled from the target policy for an expected value, at least 1. Discrete actions are not sampled, but
    weighted by their probabilities."""

    network: NetworkConfig = NetworkConfig(activation="relu")
    """Architecture of each network: `hidden`, `activation` and the settings of convolutions."""


class QEnsemble(nn.Module):
    """``members`` networks Q(observation, action). Their layers are stacked, so that each layer is one batched product.

    For a Discrete space, each network has an output for every action; for other spaces, the action is part of its
    input. Inputs are scaled to mean 0 and standard deviation 1, and outputs are scaled back; see `scale`. Images are
    encoded once for all members. Weights are initialized as in ``torch.nn.Linear``.
    """

    def __init__(self, obs_space: Space, action_space: Space, config: NetworkConfig, members: int) -> None:
        super().__init__()
        self.members = members
        self.encoder = ObsEncoder(obs_space, config.conv, config.conv_width)
        self.actions: ObsEncoder | None = None
        self._start, outputs, width = 0, 1, self.encoder.width
        if isinstance(action_space, spaces.Discrete):
            self.num_actions = outputs = int(action_space.n)
            self._start = int(action_space.start)
        else:
            self.actions = ObsEncoder(action_space, config.conv, config.conv_width)
            width += self.actions.width
        self.activation = ACTIVATIONS[config.activation].torch()
        widths = [width, *config.hidden, outputs]
        self._num_layers = len(widths) - 1
        for i, (rows, columns) in enumerate(itertools.pairwise(widths)):
            limit = 1.0 / math.sqrt(rows)
            for name, size in (("weight", rows), ("bias", 1)):
                drawn = torch.empty(members, size, columns).uniform_(-limit, limit)
                self.register_parameter(f"{name}_{i}", nn.Parameter(drawn))
        self.mean = nn.Buffer(torch.zeros(width))
        self.std = nn.Buffer(torch.ones(width))
        self.middle = nn.Buffer(torch.zeros(()))
        self.spread = nn.Buffer(torch.ones(()))

    @torch.no_grad()
    def scale(self, obs: Mapping[str, Tensor], action: Tensor, returns: Tensor) -> None:
        """Set the scales of inputs and outputs from an example batch; ``returns`` is ``[B]``, others as for `taken`."""
        x = self._inputs(obs, None if self.actions is None else action)
        mean, std = x.mean(0), x.std(0, correction=0)
        if not self.encoder.vector:
            mean[: self.encoder.width], std[: self.encoder.width] = 0.0, 1.0  # outputs of convolutions will change
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))
        spread = returns.std(correction=0)
        self.middle.copy_(returns.mean())
        self.spread.copy_(torch.where(spread > 1e-6, spread, 1.0))

    def encoded(self, action: Mapping[str, Tensor]) -> Tensor:
        """Encode actions for `taken`: int64 ``[B]`` indices for a Discrete space, else float32 ``[B, F]``."""
        if self.actions is None:
            return action[col.ACTION].long() - self._start
        features: Tensor = self.actions(col.renamed(dict(action), col.ACTION, col.OBS))
        return features

    def taken(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Return Q of the actions taken, ``[members, B]``.

        Args:
            obs: Columns ``[B, ...]``.
            action: The actions, as returned by `encoded`.
        """
        if self.actions is not None:
            return self._run(self._inputs(obs, action)).squeeze(-1)
        q = self._run(self._inputs(obs, None))
        return q.gather(-1, action.expand(self.members, -1).unsqueeze(-1)).squeeze(-1)

    def expected(self, obs: Mapping[str, Tensor], policy: Tensor) -> Tensor:
        """Return the mean of Q over a policy's actions, ``[members, B]``.

        Args:
            obs: Columns ``[B, ...]``.
            policy: Probabilities ``[B, n]`` of a Discrete space's actions; for other spaces, sampled actions
                ``[B, num, F]``.
        """
        if self.actions is None:
            return (self._run(self._inputs(obs, None)) * policy).sum(-1)
        x = self.encoder(obs)
        num = policy.shape[1]
        each = torch.cat((x.unsqueeze(1).expand(-1, num, -1), policy), -1).flatten(0, 1)
        return self._run(each).view(self.members, len(x), num).mean(-1)

    def _inputs(self, obs: Mapping[str, Tensor], action: Tensor | None) -> Tensor:
        x: Tensor = self.encoder(obs)
        return x if action is None else torch.cat((x, action), -1)

    def _run(self, x: Tensor) -> Tensor:
        x = ((x - self.mean) / self.std).expand(self.members, -1, -1)
        for i in range(self._num_layers):
            x = torch.baddbmm(getattr(self, f"bias_{i}"), x, getattr(self, f"weight_{i}"))
            if i + 1 < self._num_layers:
                x = self.activation(x)
        return self.middle + self.spread * x


class Values(NamedTuple):
    """The networks' values for a chunk of whole episodes."""

    start: Floats
    """``[members, episodes]``: the value of each first observation."""
    at: Floats
    """``[steps]``: the value of each observation, by members that did not learn from its episode."""
    after: Floats
    """``[steps]``: the value of the next observation, by the same members; 0 where the episode terminated."""
    taken: Floats
    """``[steps]``: the value of the action taken, by the same members."""
    times: NDArray[np.uint8]
    """``[episodes, members]``: how often each episode is in each member's bootstrap sample."""


class FQE:
    """Fits the action values of a target policy: ``Q(s, a) = r + gamma * E[Q(s', a')]`` with a' sampled from it.

    Each member learns from a bootstrap sample of the episodes, drawn by a Poisson distribution with mean 1. Their
    spread shows how much the fit depends on the data (Hao et al. 2021, "Bootstrapping fitted Q-evaluation for
    off-policy inference"), and each episode has members that have not learned from it.

    Args:
        target: The target policy.
        gamma: Discount factor, 0 to 1.
        config: Settings of the fit.
        seed: Seed of the initial weights, the bootstrap samples, the order of rows and the sampled actions.
    """

    def __init__(self, target: TargetPolicy, gamma: float, config: FQEConfig, seed: int) -> None:
        self._target = target
        self._gamma = gamma
        self._config = config
        self._seed = seed
        self._device = target.module.device
        obs_space, action_space = target.module.obs_space, target.module.action_space
        with seeded(seed, "cpu"):
            self.ensemble = QEnsemble(obs_space, action_space, config.network, config.members).to(self._device)

    def fit(self, chunks: Chunks, *, quiet: bool = True) -> None:
        """Fit to whole episodes; shows the progress unless ``quiet``."""
        config = self._config
        batches = shuffled_rows(lambda: map(self._rows, chunks()), config.batch_size, self._seed)
        example = self._tensors(self._rows(next(iter(chunks()))))
        self.ensemble.scale(col.subtree(example, col.OBS), example["taken"], example["returns"])
        adam = Adam(FlatParameters(list(self.ensemble.parameters())))
        frozen = frozen_copy(self.ensemble)
        follower = TargetNetwork(frozen, self.ensemble)
        with gauge("fitting action values", quiet=quiet) as show:
            for i, rows in enumerate(itertools.islice(batches, config.steps)):
                batch = self._tensors(rows)
                obs, following = col.subtree(batch, col.OBS), col.renamed(batch, col.NEXT_OBS, col.OBS)
                with torch.no_grad():
                    if i < config.steps // WARM_UP:
                        wanted = batch["returns"]
                    else:
                        wanted = batch["reward"] + batch["discount"] * frozen.expected(following, batch["policy"])
                error = (self.ensemble.taken(obs, batch["taken"]) - wanted) / self.ensemble.spread
                loss = (batch["times"].T * error.square()).mean(1).sum()
                adam.parameters.attach_grads()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step(config.lr * (1 - i / config.steps))
                follower.follow(config.tau if i >= config.steps // WARM_UP else 1.0)
                show((i + 1) / config.steps)

    def values(self, episodes: Experience) -> Values:
        """Return the networks' values for a chunk of whole episodes."""
        obs = col.subtree(episodes.steps, col.OBS)
        here = self._policy(obs)
        following, policy = self._next(episodes, here)
        times = self._times(episodes)
        held_out = times[episodes.segment_of_step()] == 0
        actions = self._actions(episodes)
        first = episodes.offsets[:-1]
        at, after, taken = (np.empty(episodes.num_steps) for _ in range(3))
        start = np.empty((self._config.members, len(first)))
        for begin in range(0, episodes.num_steps, FORWARD):
            rows = slice(begin, begin + FORWARD)
            with torch.inference_mode():
                part = self._tensors({n: c[rows] for n, c in obs.items()})
                of_obs = self.ensemble.expected(part, self._tensor(here[rows]))
                of_action = self.ensemble.taken(part, self._tensor(actions[rows]))
                part = self._tensors({n: c[rows] for n, c in following.items()})
                of_next = self.ensemble.expected(part, self._tensor(policy[rows]))
            is_first = np.flatnonzero((first >= begin) & (first < begin + FORWARD))
            start[:, is_first] = of_obs.cpu().numpy()[:, first[is_first] - begin]
            for out, found in ((at, of_obs), (after, of_next), (taken, of_action)):
                out[rows] = np.average(found.double().cpu().numpy(), 0, weights=held_out[rows].T)
        after[episodes.at_ends(episodes.segments.terminated)] = 0.0
        return Values(start, at, after, taken, times)

    # -- training rows -----------------------------------------------------------------------------------------

    def _rows(self, episodes: Experience) -> Columns:
        """A row for each step, with everything that its target needs."""
        obs = col.subtree(episodes.steps, col.OBS)
        following, policy = self._next(episodes, self._policy(obs))
        reward = episodes.steps[col.REWARD].astype(np.float64)
        returns = discounted_returns(reward, np.zeros(episodes.num_segments), episodes.offsets, self._gamma)
        ended = episodes.at_ends(episodes.segments.terminated)
        return {
            **obs,
            **col.renamed(following, col.OBS, col.NEXT_OBS),
            "policy": policy,
            "taken": self._actions(episodes),
            "reward": reward.astype(np.float32),
            "returns": returns.astype(np.float32),
            "discount": np.where(ended, 0.0, self._gamma).astype(np.float32),
            "times": self._times(episodes)[episodes.segment_of_step()],
        }

    def _next(self, episodes: Experience, here: NDArray[np.float32]) -> tuple[Columns, NDArray[np.float32]]:
        """The next observations, and the policy there; zeros where nothing follows.

        If the next observation was not recorded, the last one replaces it. ``here`` is the policy at the observations
        themselves.
        """
        following: Columns = {name: np.array(column) for name, column in episodes.next_obs().items()}
        last, segments = episodes.offsets[1:] - 1, episodes.segments
        for name, column in following.items():
            unknown = last[~segments.has_final_obs]
            column[unknown] = episodes.steps[name][unknown]
        policy = np.zeros_like(here)
        policy[:-1] = here[1:]
        policy[last] = 0.0
        goes_on = last[~segments.terminated]
        if len(goes_on):
            policy[goes_on] = self._policy({name: column[goes_on] for name, column in following.items()})
        return following, policy

    def _policy(self, obs: Columns) -> NDArray[np.float32]:
        """Probabilities ``[rows, n]``, or sampled actions ``[rows, num, F]``."""
        if self._target.has_choices:
            return self._target.choices(obs)
        crc = zlib.crc32(np.ascontiguousarray(next(iter(obs.values()))[:1]).tobytes())
        drawn = self._target.draws(obs, self._config.draws, np.random.default_rng([self._seed, crc]))
        each = np.stack([self._encoded(action) for action in drawn], 1)
        if self.ensemble.actions is not None:
            return each
        shares: NDArray[np.float32] = np.eye(self.ensemble.num_actions, dtype=np.float32)[each].mean(1)
        return shares

    def _actions(self, episodes: Experience) -> NDArray[np.float32]:
        return self._encoded(col.subtree(episodes.steps, col.ACTION))

    def _encoded(self, action: Columns) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = self.ensemble.encoded(self._tensors(action)).cpu().numpy()
        return found

    def _times(self, episodes: Experience) -> NDArray[np.uint8]:
        """How often each episode is in each member's bootstrap sample, uint8 ``[episodes, members]``.

        It depends on the seed and the episode's id alone. At least one member leaves out each episode.
        """
        out = np.empty((episodes.num_segments, self._config.members), np.uint8)
        for i, episode_id in enumerate(episodes.segments.episode_id.tolist()):
            rng = np.random.default_rng([self._seed, zlib.crc32(str(episode_id).encode())])
            out[i] = rng.poisson(1.0, self._config.members)
            if out[i].all():
                out[i, rng.integers(self._config.members)] = 0
        return out

    def _tensor(self, column: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column)).to(self._device)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def _tensors(self, columns: Columns) -> dict[str, Tensor]:
        return {name: self._tensor(column) for name, column in columns.items() if column.dtype != object}
