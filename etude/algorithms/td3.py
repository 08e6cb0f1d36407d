# SPDX-License-Identifier: Apache-2.0
"""TD3 (Fujimoto et al. 2018, "Addressing function approximation error in actor-critic methods", arXiv 1802.09477)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import NO_STD, NO_VALUE
from etude.algorithms.critics import CriticModule, check_box, check_memories, draw_by_gate, of_kind, target_of
from etude.algorithms.nested import ModuleLike, OptimizerConfig, ReplayConfig
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.columns import ACTION, WEIGHT, Columns
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, Network, NetworkConfig, make_module
from etude.modules.critics import TargetNetwork, frozen_copy
from etude.modules.distributions import DiagGaussian, Floats, SquashedGaussian
from etude.modules.random import RandomFirstModule
from etude.settings import check_rules, settings
from etude.spaces import Space


@settings
class TwinDelayedSettings:
    """Settings of TD3 and TD3+BC."""

    policy_delay: int = 2
    """Gradient steps of the critics for each of the policy and of all targets, at least 1. Default: Fujimoto et al.
    2018."""

    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions, at least 0, with actions scaled to [-1, 1].
    Default: Fujimoto et al. 2018."""

    target_noise_clip: float = 0.5
    """The most that this noise moves an action, at least 0. Default: Fujimoto et al. 2018."""

    tau: float = 0.005
    """How far targets move at a time, above 0, at most 1. Default: Fujimoto et al. 2018."""

    def twin_delayed_rules(self) -> dict[str, tuple[bool, str]]:
        """What these settings must be, for `AlgorithmConfig.check`."""
        return {
            "policy_delay": (self.policy_delay >= 1, "at least 1"),
            "target_noise": (self.target_noise >= 0, "at least 0"),
            "target_noise_clip": (self.target_noise_clip >= 0, "at least 0"),
            "tau": (0 < self.tau <= 1, "above 0 and at most 1"),
        }


@settings
class TD3Config(OffPolicyConfig, TwinDelayedSettings):
    """Settings of TD3."""

    action_noise: float = 0.1
    """Standard deviation of the normal noise on actions where it explores, above 0, with actions scaled to [-1, 1].
    Default: Fujimoto et al. 2018."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for policy and critics; or a schedule of it: points of (env_steps, rate) with straight
    lines between. Default: the published code of Fujimoto et al.; 1e-3 in the paper."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """How gradients become steps. Default: none are clipped, as in Fujimoto et al. 2018."""

    replay: ReplayConfig = ReplayConfig()
    """What the replay holds, and how steps are drawn from it. Default of `learning_starts`: Fujimoto et al. 2018, for
    the envs that end early; 10,000 for others."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy and critics. Default: the published code of Fujimoto et al.; 400 and 300 in the paper."""

    unused: ClassVar[Mapping[str, str]] = NO_STD | NO_VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            **self.twin_delayed_rules(),
            action_noise=(self.action_noise > 0, "greater than 0"),
        )
        check_rules(self.network, "network", squash=(self.network.squash is not False, "true: the policy is a tanh"))


class NoisyTanh(SquashedGaussian):
    """tanh of the inputs, scaled to a Box's bounds; to explore, with normal noise added, clipped to the bounds.

    Inputs: one for each number of an action. Log-probabilities, entropy and divergence are those of the normal numbers
    before they are clipped.

    Attributes:
        std: The standard deviation of the noise, in units of half of each number's range; may be set at any time.

    Raises:
        SpaceError: a bound is infinite, or the Box has an integer dtype.
    """

    def __init__(self, space: Any, root: str, std: float = 0.1) -> None:
        super().__init__(space, root)
        self.num_inputs, self.log_std = self._size, np.empty(0, np.int64)  # means alone
        self.std = std

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        action = np.tanh(inputs)
        if noise is not None:
            action += self.std * noise
        action = (self._middle + self._half * action).reshape(len(inputs), *self._shape)
        return {self._name: np.clip(action.astype(self._low.dtype), self._low, self._high)}

    def act_tensors(self, inputs: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        _, _, low, high = (part.like(inputs) for part in self._range)
        action = self._drawn(inputs, noise).reshape(inputs.shape[0], *self._shape)
        return {self._name: action.to(low.dtype).clamp(low, high)}

    def _normal(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of actions before they are clipped, in the action's own units."""
        middle, half = (
            torch.as_tensor(x, dtype=inputs.dtype, device=inputs.device) for x in (self._middle, self._half)
        )
        return middle + half * torch.tanh(inputs), torch.log(half * self.std).expand_as(inputs)

    logp, entropy, rsample = DiagGaussian.logp, DiagGaussian.entropy, DiagGaussian.rsample


class DeterministicModule(RandomFirstModule, CriticModule):
    """What TD3 learns: a policy and twin critics, each with its target.

    The policy is tanh of what the net gives, scaled to the bounds.

    Args:
        net: The policy: ``dist_inputs`` are the actions before tanh.
        obs_space: What it sees.
        action_space: A Box with finite bounds.
        config: The shape of the critics.

    Attributes:
        is_policy_due: Whether the next gradient step is one of the policy, too.
    """

    dist: NoisyTanh

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, config: NetworkConfig) -> None:
        dist = NoisyTanh(action_space, ACTION)
        super().__init__(net, obs_space, action_space, dist, config)
        self.target = Module(frozen_copy(net), obs_space, action_space, dist)
        self.target.eval()
        self._policy_follower = TargetNetwork(self.target.net, net)
        self.is_policy_due = False
        self._steps: Tensor
        self.register_buffer("_steps", torch.zeros((), dtype=torch.int64))

    def follow(self, tau: float) -> None:
        """Move the targets of critics and policy."""
        self.follower.follow(tau)
        self._policy_follower.follow(tau)

    def count_step(self, delay: int) -> None:
        """Note that a gradient step was made; the policy is due in every ``delay``-th."""
        self._steps += 1
        self.update_due(delay)

    def update_due(self, delay: int) -> None:
        """Look anew whether the policy is due, as after weights were loaded: the count of steps is one of them."""
        self.is_policy_due = (int(self._steps) + 1) % delay == 0


class TwinDelayed(Algorithm[Any]):
    """What TD3 and TD3+BC share: the targets of twin critics, and a policy that moves in some steps only."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """A policy with its target, critics with theirs; see `DeterministicModule`."""
        config, is_built_in = self.config, given is None
        if given is None:
            given = Network(obs_space, action_space, config.network, NoisyTanh(action_space, ACTION), value=False)
        made = make_module(given, obs_space, action_space)
        self.check_policy(made)
        if isinstance(made, DeterministicModule):
            return made
        if is_built_in:  # weights that were given stay as they are
            draw_by_gate(made.net)
        module = DeterministicModule(made.net, obs_space, action_space, config.network)
        module.update_due(config.policy_delay)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]]:
        """Optimizers ``actor`` and ``critic``."""
        net = of_kind(module, DeterministicModule)
        return {
            "actor": [p for p in net.net.parameters() if p.requires_grad],
            "critic": [p for p in net.critic.parameters() if p.requires_grad],
        }

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Fujimoto et al. 2018, algorithm 1: critics in each step, every `policy_delay` steps the policy, too.

        The policy's gradient does not reach the critics.
        """
        net = of_kind(module, DeterministicModule)
        encoded, action = batch.encode(net.critic), net.encoded(batch.action)
        target = self._target(net, batch)
        values = net.critic.values(encoded, action)
        errors = values - target
        squares = errors.square() * batch[WEIGHT] if WEIGHT in batch else errors.square()
        parts, figures = {"critic": squares.mean(1).sum()}, {"q": values.mean()}
        if net.is_policy_due:
            chosen = torch.tanh(batch.forward(net).bound()[1])
            worth = net.critic.values(encoded, chosen, frozen=True, first_only=True)
            policy = self.policy_loss(worth, chosen, action)
            parts, figures = parts | policy.parts, figures | policy.logged
        loss = Loss(**parts).log(**figures).rest(*(() if net.is_policy_due else ("actor",)))
        return loss.keep(td_error=errors.abs().mean(0)) if WEIGHT in batch else loss

    def _target(self, net: DeterministicModule, batch: Batch) -> Tensor:
        """``[B]``: r + discount * min Q_target(next_obs, a'), with a' the target policy's action and clipped noise."""
        config = self.config
        with torch.no_grad():
            action = torch.tanh(batch.forward_next(net.target).bound()[1])
            noise = torch.randn_like(action) * config.target_noise
            action = (action + noise.clamp(-config.target_noise_clip, config.target_noise_clip)).clamp(-1.0, 1.0)
            value = net.target_critic.values(batch.encode_next(net.target_critic), action).amin(0)
            return target_of(batch, config.gamma, value)

    def check_policy(self, policy: Module) -> None:
        """Raise a SettingsError for a policy that can't be learned."""

    def policy_loss(self, worth: Tensor, chosen: Tensor, action: Tensor) -> Loss:
        """What the policy minimises, as the part ``actor``.

        Args:
            worth: ``[1, B]``: the first critic's values of ``chosen``.
            chosen: ``[B, action_size]``: the policy's actions, in [-1, 1].
            action: ``[B, action_size]``: the actions that were taken, likewise.
        """
        return Loss(actor=-worth.mean())

    def after_step(self, module: Module) -> None:
        """Moves the targets where the policy was moved, and counts."""
        net = of_kind(module, DeterministicModule)
        if net.is_policy_due:
            net.follow(self.config.tau)
        net.count_step(self.config.policy_delay)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`."""
        super().set_state(state)
        for name, policy in self.policies.items():
            with self.settings_of(name):
                of_kind(policy.module, DeterministicModule).update_due(self.config.policy_delay)


class TD3(TwinDelayed, OffPolicyAlgorithm[TD3Config]):
    """Twin delayed deep deterministic policy gradient: twin critics, smoothed targets, a delayed policy; for Boxes."""

    name = "td3"
    Config = TD3Config

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """A policy with its target, critics with theirs; see `DeterministicModule`."""
        check_box(action_space, "TD3")
        return super().make_module(given, obs_space, action_space)

    def check_policy(self, policy: Module) -> None:
        """Policy and critics have a memory, or none has."""
        check_memories(policy, self.config.network, "TD3")

    def before_collect(self, env_steps: int) -> None:
        """Lets modules act at random until learning starts, and sets the noise of what they do then."""
        for name, policy in self.policies.items():
            with self.settings_of(name):
                module = of_kind(policy.module, DeterministicModule)
                module.acts_at_random = env_steps < self.config.replay.learning_starts
                module.dist.std = self.config.action_noise
