# SPDX-License-Identifier: Apache-2.0
"""CQL: conservative Q-learning (Kumar et al. 2020, "Conservative Q-learning for offline reinforcement learning", arXiv
2006.04779)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from etude.algorithms.config import ModuleLike
from etude.algorithms.critics import (
    OfflineCriticAlgorithm,
    OfflineCriticConfig,
    check_box,
    not_recurrent,
    of_kind,
    target_of,
)
from etude.algorithms.dqn import QModule
from etude.algorithms.sac import SoftModule, check_target_entropy, fix, groups_of
from etude.errors import SettingsError
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.distributions import SquashedGaussian
from etude.settings import FloatAbove0, IntFrom1, check_rules, settings
from etude.spaces import Space


def soft_maximum(
    soft: SoftModule,
    obs: Mapping[str, Tensor],
    policies: tuple[Tensor, Tensor],
    recorded: Tensor,
    num_actions: int,
    gradient_actions: int | None,
) -> tuple[Tensor, Tensor]:
    """Log of the integral of exp Q(obs, a) over actions a in [-1, 1], for each critic, and Q(obs, recorded): ``[2, B]``
    each.

    The integral is estimated from actions drawn uniformly, by the policy at ``obs`` and by the policy at the next
    observation, each weighted by its density (Kumar et al. 2020, appendix F). The gradient goes through all of them, or
    through ``gradient_actions`` of them, resampled by their shares in the sum, which leaves its mean unchanged.

    Args:
        soft: The policy and its critics.
        obs: Columns of observations ``[B, *shape]``.
        policies: The policy's ``dist_inputs`` at these and at the next observations, without gradients.
        recorded: The recorded actions as critics see them, ``[B, action_size]``.
        num_actions: Number of actions drawn of each kind.
        gradient_actions: Number of actions that the gradient goes through; None: all.
    """
    with torch.no_grad():
        actions, logp = _drawn(soft, policies, num_actions)
    count = actions.shape[1]
    if gradient_actions is None:
        all_values = soft.critic.many(obs, torch.cat((actions, recorded.unsqueeze(1)), 1))
        return (all_values[..., :count] - logp).logsumexp(-1) - math.log(count), all_values[..., count]
    with torch.no_grad():
        values = soft.critic.many(obs, actions) - logp
        chosen = _resampled(values, actions, gradient_actions)
        chosen = torch.cat((chosen, recorded.unsqueeze(1).expand(2, -1, -1, -1)), 2)
    some = soft.critic.many(obs, chosen)
    through = some[..., :gradient_actions].mean(-1)
    return values.logsumexp(-1) - math.log(count) + (through - through.detach()), some[..., gradient_actions]


def _drawn(soft: SoftModule, policies: tuple[Tensor, Tensor], num: int) -> tuple[Tensor, Tensor]:
    """Sample actions ``[B, 3 * num, action_size]``, and return them with the logarithms of their densities."""
    both = torch.stack(policies, 1).unsqueeze(2)
    actions, logp = soft.draw(both.expand(-1, -1, num, -1))
    size = len(both)
    uniform = torch.rand(size, num, soft.action_size, device=both.device) * 2.0 - 1.0
    density = torch.full((size, num), -soft.action_size * math.log(2.0), device=both.device)
    return torch.cat((actions.flatten(1, 2), uniform), 1), torch.cat((logp.flatten(1, 2), density), 1)


def _resampled(values: Tensor, actions: Tensor, num: int) -> Tensor:
    """Actions drawn in proportion to exp of ``values`` ``[2, B, n]`` by systematic resampling: ``[2, B, num,
    action_size]``."""
    shares = values.softmax(-1).cumsum(-1)
    at = (torch.rand(*shares.shape[:-1], 1, device=shares.device) + torch.arange(num, device=shares.device)) / num
    index = torch.searchsorted(shares, at).clamp(max=shares.shape[-1] - 1).unsqueeze(-1)
    return actions.expand(len(values), -1, -1, -1).gather(2, index.expand(-1, -1, -1, actions.shape[-1]))


@settings
class PenaltyConfig:
    """The penalty on critics' values of actions that were not recorded."""

    alpha: FloatAbove0 | None = None
    """Weight of the penalty, above 0: larger stays closer to the recorded actions. None: 5 for Box actions, as in
    the published code of Kumar et al. 2020, whose squared errors have no factor 1/2; 1 for Discrete ones, whose errors
    have DQN's Huber loss, half the square up to 1."""

    threshold: float | None = None
    """For Box actions: target of the penalty, in units of values, for which `alpha` is learned, starting from its
    setting. The penalty is how far the soft maximum over all actions exceeds the recorded action's value. None: `alpha`
    is fixed. Source: Kumar et al. 2020, eq. 30."""

    alpha_lr: Schedule | None = None
    """Learning rate of `alpha` if it is learned (see `threshold`), or a schedule; None: `lr`."""

    num_actions: IntFrom1 = 10
    """For Box actions: number of actions drawn for the penalty from each of three distributions, at least 1. These are
    the uniform one, the policy at the observation, and the policy at the next observation. Default: Kumar et al. 2020,
    appendix F."""

    gradient_actions: IntFrom1 | None = 4
    """For Box actions: number of these actions that the penalty's gradient goes through, at least 1. They are resampled
    by their share, which leaves its mean unchanged. None: all, which takes twice as long. Default: for speed; on
    Pendulum, one seed got -660 with 4 and -810 with all (`alpha` 10)."""


@settings
class CQLConfig(OfflineCriticConfig):
    """Settings of CQL. The recording needs rewards and next observations."""

    penalty: PenaltyConfig = PenaltyConfig()
    """The penalty on critics' values of actions that were not recorded."""

    temperature: FloatAbove0 | None = None
    """For Box actions: weight of the policy's entropy, above 0; None: learned, as in SAC."""

    target_entropy: float | None = None
    """Target entropy if the temperature is learned, in nats, with actions scaled to [-1, 1]. None: minus the number of
    action dimensions."""

    dueling: bool = False
    """For Discrete actions: learn state values and action advantages separately (Wang et al. 2016)."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for all parameters, or a schedule. Default: Kumar et al. 2020 for critics; their published
    code gives policies less, `actor_lr=1e-4`."""

    temperature_lr: Schedule | None = None
    """Learning rate of the temperature, or a schedule; None: `lr`."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu", separate=False)
    """The shape of policy and critics. Default: Haarnoja et al. 2018."""

    unused: ClassVar[Mapping[str, str]] = {
        "network.state_dependent_std": "standard deviations always depend on the observation",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target_entropy(self)
        check_rules(
            self.network, "network", squash=(self.network.squash is not False, "true: actions are always squashed")
        )


_OF_BOXES = (
    "temperature",
    "temperature_lr",
    "target_entropy",
    *(f"penalty.{name}" for name in ("threshold", "alpha_lr", "num_actions", "gradient_actions")),
)
"""Settings that have an effect only for Box actions."""


class ConservativeModule(SoftModule):
    """SAC's module with the weight of CQL's penalty, for Box actions (Kumar et al. 2020, arXiv 2006.04779).

    Args:
        net: The policy network: ``dist_inputs`` are means, then log standard deviations.
        obs_space: The observation space.
        action_space: The action space, a Box with finite bounds.
        dist: The action distribution.
        config: The shape of the critics.
        temperature: Initial temperature, above 0.
        alpha: Initial weight of the penalty, above 0.
    """

    def __init__(
        self,
        net: nn.Module,
        obs_space: Space,
        action_space: Space,
        dist: SquashedGaussian,
        config: NetworkConfig,
        temperature: float,
        alpha: float,
    ) -> None:
        super().__init__(net, obs_space, action_space, dist, config, temperature)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(alpha)]))


class CQL(OfflineCriticAlgorithm[CQLConfig]):
    """Conservative Q-learning: critics that underestimate actions that were not recorded rather than overestimate them.

    It is CQL(H), eq. 4: on soft actor-critic for Box actions, on double DQN for Discrete ones.
    """

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a module as SAC does for Box actions, see `ConservativeModule`; as DQN for Discrete ones, see
        `QModule`."""
        config = self.config
        if isinstance(action_space, spaces.Discrete):
            self._refuse(_OF_BOXES, "Discrete")
            made = make_module(given, obs_space, action_space, config.network, value=config.dueling)
            not_recurrent(made, self.name)
            return made if isinstance(made, QModule) else QModule(made.net, obs_space, action_space)
        check_box(action_space, "CQL", "IQL, which learns any actions")
        self._refuse(("dueling",), "Box")
        network = dataclasses.replace(config.network, state_dependent_std=True)
        made = make_module(given, obs_space, action_space, network, squash=True, value=False)
        not_recurrent(made, self.name)
        if isinstance(made, ConservativeModule):
            return made
        assert isinstance(made.dist, SquashedGaussian)
        start = 1.0 if config.temperature is None else config.temperature
        module = ConservativeModule(made.net, obs_space, action_space, made.dist, network, start, self._alpha)
        module.log_temperature.requires_grad_(config.temperature is None)
        module.log_alpha.requires_grad_(config.penalty.threshold is not None)
        return module

    def _refuse(self, paths: Sequence[str], actions: str) -> None:
        """Raise a SettingsError if a setting is given that has no effect with these actions."""
        for path in filter(self.config.is_changed, paths):
            raise SettingsError(
                f"`{path}` is {self.config.at(path)!r}, but has no effect for {actions} actions. Leave it out."
            )

    @property
    def _alpha(self) -> float:
        """The weight of the penalty for Box actions; if it is learned, that at the start."""
        given = self.config.penalty.alpha
        return 5.0 if given is None else given

    def after_load(self, module: Module) -> None:
        """Set a temperature and an `alpha` that are not learned to those of the settings."""
        if isinstance(module, ConservativeModule):
            fix(module.log_temperature, self.config.temperature)
            fix(module.log_alpha, self._alpha)

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]] | None:
        """For Box actions, parameters of ``actor``, ``critic`` and, if they are learned, ``temperature`` and
        ``alpha``."""
        if isinstance(module, QModule):
            return None
        soft = of_kind(module, ConservativeModule)
        return groups_of(soft) | ({"alpha": [soft.log_alpha]} if soft.log_alpha.requires_grad else {})

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of Kumar et al. 2020, eq. 4; for Box actions also those of SAC's policy and temperature."""
        if isinstance(module, QModule):
            return self._of_values(module, batch)
        return self._of_box(of_kind(module, ConservativeModule), batch)

    def _of_values(self, net: QModule, batch: Batch) -> Loss:
        """Double DQN with Huber loss; the penalty is the logsumexp over actions minus the recorded action's value."""
        config = self.config
        with torch.no_grad():
            following = batch.next_obs
            best = net.best_of(net.target_values(following), net.values(following))
            target = target_of(batch, config.gamma, best)
        values = net.values(batch.obs)
        recorded = net.values_of(values, batch.action)
        gap = (values.logsumexp(-1) - recorded).mean()
        alpha = 1.0 if config.penalty.alpha is None else config.penalty.alpha
        return Loss(td=F.smooth_l1_loss(recorded, target), conservative=alpha * gap).log(q=recorded.mean(), gap=gap)

    def _of_box(self, soft: ConservativeModule, batch: Batch) -> Loss:
        """The loss of the published code of Kumar et al., which differs from eq. 4.

        The critics' squared errors have no factor 1/2, which matters for `alpha`, and the target has no entropy term
        (``deterministic_backup``).
        """
        config = self.config
        temperature, alpha = soft.log_temperature.detach().exp(), soft.log_alpha.detach().exp()
        obs, following = soft.columns_of(batch.obs), soft.columns_of(batch.next_obs)
        _, inputs = soft(batch.obs).bound()
        recorded = soft.scaled(batch.action).clamp(-1.0, 1.0)
        with torch.no_grad():
            _, next_inputs = soft(batch.next_obs).bound()
            next_action, _ = soft.draw(next_inputs)
            target = target_of(batch, config.gamma, soft.target_critic(following, next_action).amin(0))
        policies = (inputs.detach(), next_inputs)
        maximum, values = soft_maximum(
            soft, obs, policies, recorded, config.penalty.num_actions, config.penalty.gradient_actions
        )
        gap = (maximum - values).mean(1)
        action, logp = soft.draw(inputs)
        worth = soft.critic(obs, action, frozen=True).amin(0)
        excess = gap if config.penalty.threshold is None else gap - config.penalty.threshold
        parts = {
            "actor": (temperature * logp - worth).mean(),
            "critic": (values - target).square().mean(1).sum(),
            "conservative": (alpha * excess).sum(),
        }
        if soft.log_temperature.requires_grad:
            parts["temperature"] = soft.temperature_loss(logp, config.target_entropy)
        if soft.log_alpha.requires_grad:
            parts["alpha"] = -(soft.log_alpha.exp() * excess.detach().mean()).sum()
        figures = {"temperature": temperature.squeeze(0), "alpha": alpha.squeeze(0), "entropy": -logp.mean()}
        return Loss(**parts).log(q=values.mean(), gap=gap.mean(), **figures)
