# SPDX-License-Identifier: Apache-2.0
"""DQN: deep Q-learning (Mnih et al. 2015, "Human-level control through deep reinforcement learning")."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from etude.algorithms.config import NO_STD, ModuleLike
from etude.algorithms.critics import of_kind
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.algorithms.results import together
from etude.columns import ACTION, WEIGHT
from etude.errors import SettingsError
from etude.learners import Batch, Loss, Schedule, Update, points_of, value_at
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.critics import FollowedModule
from etude.modules.distributions import ALLOWED_ABOVE, EpsilonGreedy
from etude.modules.network import Output
from etude.settings import settings
from etude.spaces import Space


@settings
class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    double: bool = True
    """Let the net that is trained choose the action whose value the target network says (van Hasselt et al. 2016, "Deep
    reinforcement learning with double Q-learning"); else the target network does both (Mnih et al. 2015)."""

    dueling: bool = False
    """Learn the value of a state and the advantages of its actions apart (Wang et al. 2016, "Dueling network
    architectures"). A network of your own is dueling where it gives a `value`."""

    epsilon: Schedule = ((0, 1.0), (10_000, 0.05))
    """Probability of a random action, 0 to 1; or points of (env_steps, probability) with straight lines between."""

    num_envs: int = 4
    """Copies of the env that step together, at least 1."""

    updates_per_step: float = 0.25
    """Gradient steps of each module for each env step, above 0. What is left of one is kept for the next time. Default:
    Mnih et al. 2015, table 1."""

    n_step: int = 5
    """Rewards that are summed before a target bootstraps, at least 1. Default: with `lr` and
    `target_interval` the best of a dozen settings tried together on CartPole. The steps between are taken as they were
    made, without correction for the policy that made them."""

    target_interval: int = 100
    """Gradient steps between two updates of the target network, at least 1."""

    tau: float = 1.0
    """How far the target network then moves towards the one that is trained, above 0, at most 1: 1 makes them equal
    (Mnih et al. 2015); less, with a `target_interval` of 1, averages (Lillicrap et al. 2016)."""

    lr: Schedule = 2e-3
    """Learning rate of Adam; or points of (env_steps, rate) with straight lines between. Default: as for
    `n_step`; larger networks want less."""

    grad_clip: float | None = 10.0
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are. Default: as in
    Stable-Baselines3 and Wang et al. 2016."""

    batch_size: int = 64
    """Steps in a gradient step, at least 1."""

    capacity: int = 100_000
    """Steps that the replay of each module holds, at least `batch_size`: when it is full, the oldest make room."""

    network: NetworkConfig = NetworkConfig(hidden=(128, 128), activation="relu", separate=False)
    """The shape of the built-in network. With `dueling` and `separate`, values and advantages share no layers."""

    unused: ClassVar[Mapping[str, str]] = {"squash": "actions are Discrete"} | NO_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            epsilon=(all(value <= 1 for _, value in points_of(self.epsilon)), "probabilities from 0 to 1"),
            target_interval=(self.target_interval >= 1, "at least 1"),
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
        )


class QModule(FollowedModule):
    """Acts epsilon-greedily on the values of a Discrete space's actions: the net's ``dist_inputs``.

    Where the net gives a ``value``, too, its ``dist_inputs`` are advantages: Q = value + advantage - mean(advantage)
    (the dueling network of Wang et al. 2016, "Dueling network architectures", eq. 9), which have the same best action.
    A frozen copy of the net, the target network, belongs to the module and so to its checkpoints.

    Args:
        net: Called with observations, returns an `Output`.
        obs_space: What the net sees.
        action_space: What it chooses from.

    Raises:
        SettingsError: the action space is not Discrete.
    """

    dist: EpsilonGreedy

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise SettingsError(
                f"the action space is {action_space}, but values can be learned only of the actions of a Discrete "
                "space. Take SAC for Box actions, or PPO for any."
            )
        super().__init__(net, obs_space, action_space, EpsilonGreedy(action_space, ACTION))

    def values(self, obs: Any) -> Tensor:
        """float32 ``[B, n]``: the value of each action; those that the action mask forbids are far below all others."""
        return action_values(self(obs))

    def target_values(self, obs: Any) -> Tensor:
        """The same by the target network."""
        return action_values(self.target(obs))

    def values_of(self, values: Tensor, action: Tensor) -> Tensor:
        """``[B]``: of ``values`` ``[B, n]``, those of the actions that were taken."""
        return values.gather(-1, self.dist.index_of(action).unsqueeze(-1)).squeeze(-1)

    def best_of(self, values: Tensor, by: Tensor | None = None) -> Tensor:
        """``[B]``: of ``values`` ``[B, n]`` the greatest, or that of the action which ``by`` ``[B, n]`` finds best.

        Where an action mask allows nothing, as it may after the last step of an episode, it is 0.
        """
        if by is None:
            best = values.amax(-1)
        else:
            best = values.gather(-1, by.argmax(-1, keepdim=True)).squeeze(-1)
        return best if self.mask is None else torch.where(best > ALLOWED_ABOVE, best, 0.0)


def action_values(output: Output) -> Tensor:
    """``[B, n]``: the values of actions that a net's output says; see `QModule`."""
    _, advantages = output.bound()
    if output.value is None:
        return advantages
    allowed = advantages > ALLOWED_ABOVE
    sums = torch.where(allowed, advantages, 0.0).sum(-1, keepdim=True)
    centred = output.value.unsqueeze(-1) + advantages - sums / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, centred, advantages)


class DQN(OffPolicyAlgorithm[DQNConfig]):
    """Deep Q-learning, with double and dueling networks, n-step targets and priorities as settings."""

    name = "dqn"
    Config = DQNConfig

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """A net whose ``dist_inputs`` are the values of the actions, and its target network; see `QModule`."""
        module = make_module(given, obs_space, action_space, self.config.network, value=self.config.dueling)
        return module if isinstance(module, QModule) else QModule(module.net, obs_space, action_space)

    def before_collect(self, env_steps: int) -> None:
        """Sets epsilon to its schedule's value."""
        for name, policy in self.policies.items():
            with self.settings_of(name):
                of_kind(policy.module, QModule).dist.epsilon = value_at(self.config.epsilon, env_steps)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Huber's loss of the errors r + discount * max Q_target(next_obs, .) - Q(obs, action).

        Mnih et al. 2015, "Training algorithm": errors clipped to 1 are the gradient of Huber's loss. Where `double` is
        set, Q chooses the action in place of the maximum.
        """
        net = of_kind(module, QModule)
        with torch.no_grad():
            by = action_values(batch.forward_next(net)) if self.config.double else None
            best = net.best_of(action_values(batch.forward_next(net.target)), by)
            target = torch.addcmul(batch.reward, batch.discount, best)
        values = net.values_of(action_values(batch.forward(net)), batch.action)
        if WEIGHT not in batch:
            return Loss(td=F.smooth_l1_loss(values, target)).log(q=values.mean())
        losses = F.smooth_l1_loss(values, target, reduction="none")
        return Loss(td=(batch[WEIGHT] * losses).mean()).log(q=values.mean()).keep(td_error=target - values)

    def after_step(self, module: Module) -> None:
        """Moves the target network."""
        learner = next(learner for learner in self.learner.modules.values() if learner.module is module)
        if learner.updates % self.config.target_interval == 0:
            of_kind(module, QModule).follower.follow(self.config.tau)

    def training_step(self) -> Update:
        """As for every off-policy algorithm; epsilon is among the metrics."""
        update, epsilons = super().training_step(), {}
        for name in self.policies:
            with self.settings_of(name):
                epsilons[name] = {"epsilon": value_at(self.config.epsilon, self.env_steps)}
        return Update(update.losses, update.metrics | together(epsilons, several=len(epsilons) > 1))
