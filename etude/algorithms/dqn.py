# SPDX-License-Identifier: Apache-2.0
"""DQN: deep Q-learning (Mnih et al. 2015, "Human-level control through deep reinforcement learning")."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from etude.algorithms.config import NO_STD, ONE_RATE, ModuleLike, ReplayConfig, Share, TargetConfig
from etude.algorithms.critics import of_kind, update_when_due
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.algorithms.results import together
from etude.columns import ACTION, WEIGHT
from etude.errors import SettingsError
from etude.learners import Batch, Loss, OptimizerConfig, Schedule, Update, value_at
from etude.modules import Actor, Module, Network, NetworkConfig, make_module
from etude.modules.actors import NoisyActor, NoisyLinear, NoisyNetwork
from etude.modules.critics import FollowedModule
from etude.modules.distributions import ALLOWED_ABOVE, EpsilonGreedy, check_no_integers
from etude.modules.network import Output
from etude.settings import IntFrom1, check_rules, settings
from etude.spaces import Space, in_words


@settings
class QTargetConfig(TargetConfig):
    """How targets are computed, and how the target network is updated."""

    interval: IntFrom1 = 100
    """Gradient steps between two updates of the target network, at least 1."""

    double: bool = True
    """Let the trained network choose the action that the target network evaluates. Otherwise the target network does
    both, as in Mnih et al. 2015. Default: van Hasselt et al. 2016, "Deep reinforcement learning with double
    Q-learning"."""


@settings
class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    dueling: bool = False
    """Learn state values and action advantages separately (Wang et al. 2016, "Dueling network architectures"). Your own
    network is dueling if it returns a `value`."""

    noisy: bool = False
    """Explore by noise of learned size on the network's weights instead of random actions. Only for the built-in
    network. Source: Fortunato et al. 2018, "Noisy networks for exploration"."""

    epsilon: Share | None = None
    """Probability of a random action, 0 to 1, or a schedule: points of (env_steps, probability) with straight lines
    between. None: 0 if `noisy`, else from 1 to 0.05 over 10,000 env steps."""

    num_envs: int = 4
    """Copies of the env that step together, at least 1."""

    updates_per_step: float = 0.25
    """Gradient steps of each module per env step, above 0. Fractions of a gradient step are carried over. Default: Mnih
    et al. 2015, table 1."""

    n_step: int = 5
    """Rewards summed before a target bootstraps, at least 1. There is no off-policy correction for the actions in
    between. Default: with `lr` and `target_interval` the best of a dozen settings tried together on CartPole."""

    target: QTargetConfig = QTargetConfig()
    """How targets are computed, and how the target network is updated."""

    lr: Schedule = 2e-3
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between. Default: as for
    `n_step`; larger networks need less."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=10.0)
    """Settings of the optimizer. Default of `grad_clip`: as in Stable-Baselines3 and Wang et al. 2016."""

    batch_size: int = 64
    """Steps in each batch, at least 1."""

    replay: ReplayConfig = ReplayConfig(capacity=100_000)
    """Size of the replay buffer, and how steps are sampled from it."""

    network: NetworkConfig = NetworkConfig(hidden=(128, 128), activation="relu", separate=False)
    """The shape of the built-in network. With `dueling` and `separate`, values and advantages share no layers."""

    unused: ClassVar[Mapping[str, str]] = {"network.squash": "actions are Discrete"} | NO_STD | ONE_RATE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self, noisy=(not self.noisy or self.module is None, "false where you give a `module`"))

    @property
    def exploration(self) -> Schedule:
        """The schedule of epsilon; its default if `epsilon` is None."""
        if self.epsilon is not None:
            return self.epsilon
        return 0.0 if self.noisy else ((0, 1.0), (10_000, 0.05))


class QModule(FollowedModule):
    """Q-network with a target network: acts epsilon-greedily on the action values in the net's ``dist_inputs``.

    If the net also returns a ``value``, its ``dist_inputs`` are advantages: Q = value + advantage - mean(advantage)
    (the dueling network of Wang et al. 2016, "Dueling network architectures", eq. 9), which have the same best action.
    The target network, a frozen copy of the net, belongs to the module and so to its checkpoints.

    Args:
        net: Called with observations, returns an `Output`.
        obs_space: The observation space of the net.
        action_space: A Discrete action space.
        dist: The action distribution; None: `EpsilonGreedy`.

    Raises:
        SettingsError: the action space is not Discrete.
    """

    dist: EpsilonGreedy

    def __init__(
        self, net: nn.Module, obs_space: Space, action_space: Space, dist: EpsilonGreedy | None = None
    ) -> None:
        dist = dist or EpsilonGreedy(check_discrete(action_space), ACTION)
        super().__init__(net, obs_space, action_space, dist)
        for part in self.target.modules():
            if isinstance(part, NoisyLinear):
                part.train()  # targets have noise of their own (Fortunato et al. 2018, eq. 16)

    @property
    def has_own_actor(self) -> bool:
        """Whether the net's weights have noise."""
        return isinstance(self.net, NoisyNetwork)

    def actor(self, *, explore: bool) -> Actor:
        """The actor; it has noise on the weights if the net does and it explores."""
        return NoisyActor(self) if explore and self.has_own_actor else super().actor(explore=explore)

    def action_values(self, output: Output) -> Tensor:
        """The action values ``[B, n]`` in a net's output."""
        return dueling(output.bound()[1], output.value, (-1,))

    def values(self, obs: Any) -> Tensor:
        """The value of each action, float32 ``[B, n]``; actions that the mask forbids are far below all others."""
        return self.action_values(self(obs))

    def target_values(self, obs: Any) -> Tensor:
        """`values` by the target network."""
        return self.action_values(self.target(obs))

    def values_of(self, values: Tensor, action: Tensor) -> Tensor:
        """The values ``[B]`` of the actions that were taken, from ``values`` ``[B, n]``."""
        return values.gather(-1, self.dist.index_of(action).unsqueeze(-1)).squeeze(-1)

    def best_of(self, values: Tensor, by: Tensor | None = None) -> Tensor:
        """The greatest of ``values`` ``[B, n]``, or the value of the best action according to ``by`` ``[B, n]``:
        ``[B]``.

        It is 0 where an action mask allows nothing, as it may after the last step of an episode.
        """
        if by is None:
            best = values.amax(-1)
        else:
            best = values.gather(-1, by.argmax(-1, keepdim=True)).squeeze(-1)
        return best if self.mask is None else torch.where(best > ALLOWED_ABOVE, best, 0.0)


def dueling(advantages: Tensor, value: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """``value`` plus advantages, whose mean over the last ``axes`` is subtracted; forbidden choices stay as they are.

    Without a ``value``, the advantages themselves.
    """
    if value is None:
        return advantages
    allowed = advantages > ALLOWED_ABOVE
    sums = torch.where(allowed, advantages, 0.0).sum(axes, keepdim=True)
    centred = value[(..., *(None for _ in axes))] + advantages - sums / allowed.sum(axes, keepdim=True).clamp(min=1)
    return torch.where(allowed, centred, advantages)


def check_discrete(action_space: Space) -> spaces.Discrete:
    """Return the action space.

    Raises:
        SettingsError: it is not Discrete.
        SpaceError: it is a Box of integers.
    """
    check_no_integers(action_space)
    if isinstance(action_space, spaces.Discrete):
        return action_space
    raise SettingsError(
        f"the action space is {in_words(action_space)}, but values can be learned only of the actions of a Discrete "
        "space. Take SAC for Box actions, or PPO for any."
    )


class DQN(OffPolicyAlgorithm[DQNConfig]):
    """Deep Q-learning; double, dueling and noisy networks, n-step targets and priorities are settings."""

    kind: ClassVar[type[QModule]] = QModule
    """The class of modules that `make_module` makes."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a `QModule`: a net whose ``dist_inputs`` are action values, and its target network."""
        config, dist = self.config, self.distribution(check_discrete(action_space))
        if given is None:
            network = NoisyNetwork if config.noisy else Network
            given = network(obs_space, action_space, config.network, dist, value=config.dueling)
        module = make_module(given, obs_space, action_space)
        return module if isinstance(module, QModule) else self.kind(module.net, obs_space, action_space, dist)

    def distribution(self, action_space: spaces.Discrete) -> EpsilonGreedy:
        """The distribution that chooses actions from the net's output."""
        return EpsilonGreedy(action_space, ACTION)

    def before_collect(self, env_steps: int) -> None:
        """Set epsilon to its schedule's value."""
        for name, policy in self.policies.items():
            with self.settings_of(name):
                of_kind(policy.module, QModule).dist.epsilon = value_at(self.config.exploration, env_steps)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Huber loss of the errors r + discount * max Q_target(next_obs, .) - Q(obs, action).

        Clipping errors to 1, as in Mnih et al. 2015, "Training algorithm", gives the gradient of the Huber loss. With
        `double`, Q chooses the action that Q_target evaluates.
        """
        net = of_kind(module, QModule)
        with torch.no_grad():
            by = net.action_values(batch.forward_next(net)) if self.config.target.double else None
            best = net.best_of(net.action_values(batch.forward_next(net.target)), by)
            target = torch.addcmul(batch.reward, batch.discount, best)
        values = net.values_of(net.action_values(batch.forward(net)), batch.action)
        if WEIGHT not in batch:
            return Loss(td=F.smooth_l1_loss(values, target)).log(q=values.mean())
        losses = F.smooth_l1_loss(values, target, reduction="none")
        return Loss(td=(batch[WEIGHT] * losses).mean()).log(q=values.mean()).keep(td_error=target - values)

    def after_step(self, module: Module) -> None:
        """Update the target network when it is due."""
        update_when_due(self.learner, module, self.config.target)

    def training_step(self) -> Update:
        """Run one iteration, and add the ``epsilon`` of its last actions to the metrics."""
        update = super().training_step()
        nets = {name: of_kind(policy.module, QModule) for name, policy in self.policies.items()}
        epsilons = {name: {"epsilon": float(net.dist.epsilon)} for name, net in nets.items()}
        return Update(update.losses, update.metrics | together(epsilons, several=len(self.policies) > 1))
