# SPDX-License-Identifier: Apache-2.0
"""CQL: conservative Q-learning (Kumar et al. 2020, "Conservative Q-learning for offline reinforcement learning", arXiv
2006.04779)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from etude.algorithms.config import SINGLE_STEPS, ActorCriticRates, ModuleLike, OfflineConfig
from etude.algorithms.critics import TRANSITION, check_box, looking_ahead, not_recurrent, of_kind, target_of
from etude.algorithms.dqn import QModule
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.sac import SoftModule, groups_of
from etude.errors import SettingsError
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.distributions import SquashedGaussian
from etude.settings import settings
from etude.spaces import Space


def soft_maximum(
    soft: SoftModule,
    obs: Mapping[str, Tensor],
    policies: tuple[Tensor, Tensor],
    recorded: Tensor,
    num_actions: int,
    gradient_actions: int | None,
) -> tuple[Tensor, Tensor]:
    """``[2, B]``: log of the integral of exp Q(obs, a) over actions a in [-1, 1], by each critic; and Q(obs, recorded).

    Estimated from actions drawn uniformly and by the policy at ``obs`` and after it, each weighed by its density (Kumar
    et al. 2020, appendix F). The gradient goes through all of them; or through ``gradient_actions``, drawn by their
    shares in the sum: its mean is the same.

    Args:
        soft: The policy and its critics.
        obs: Columns of observations ``[B, *shape]``.
        policies: What the policy's ``dist_inputs`` are for them and for what was observed next, without gradients.
        recorded: The actions that were recorded, ``[B, action_size]``, as critics see them.
        num_actions: How many actions are drawn, of each kind.
        gradient_actions: See above; None is all.
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
    """Actions ``[B, 3 * num, action_size]``, and the logarithms of the densities that they were drawn by."""
    both = torch.stack(policies, 1).unsqueeze(2)
    actions, logp = soft.draw(both.expand(-1, -1, num, -1))
    size = len(both)
    uniform = torch.rand(size, num, soft.action_size, device=both.device) * 2.0 - 1.0
    density = torch.full((size, num), -soft.action_size * math.log(2.0), device=both.device)
    return torch.cat((actions.flatten(1, 2), uniform), 1), torch.cat((logp.flatten(1, 2), density), 1)


def _resampled(values: Tensor, actions: Tensor, num: int) -> Tensor:
    """``[2, B, num, action_size]``: actions drawn in proportion to exp of ``values`` ``[2, B, n]``, evenly spaced."""
    shares = values.softmax(-1).cumsum(-1)
    at = (torch.rand(*shares.shape[:-1], 1, device=shares.device) + torch.arange(num, device=shares.device)) / num
    index = torch.searchsorted(shares, at).clamp(max=shares.shape[-1] - 1).unsqueeze(-1)
    return actions.expand(len(values), -1, -1, -1).gather(2, index.expand(-1, -1, -1, actions.shape[-1]))


@settings
class CQLConfig(OfflineConfig, ActorCriticRates):
    """Settings of CQL. The recording needs rewards, and what was observed after each step."""

    alpha: float | None = None
    """Weight of the penalty, above 0: more trusts the recorded actions more. None: 5 for Box actions, 1 for Discrete
    ones, as in Kumar et al. 2020, their published code, whose squared errors have no factor 1/2."""

    threshold: float | None = None
    """For Box actions: `alpha` is learned from there on, so that the penalty, which is how much more all actions
    together are worth than the recorded one, becomes this much, as values go (Kumar et al. 2020, eq. 30). None: it
    stays."""

    num_actions: int = 10
    """For Box actions: how many are drawn for the penalty uniformly, and as many by the policy for what was observed
    and for what was observed next, at least 1. Default: Kumar et al. 2020, appendix F."""

    gradient_actions: int | None = 4
    """For Box actions: through how many of these the penalty's gradient goes, drawn by their share in it, so that the
    mean is the same; at least 1. None: through all, which takes twice as long. Default: for speed; on Pendulum, one
    seed got -660 with 4 and -810 with all (`alpha` 10)."""

    temperature: float | None = None
    """For Box actions: weight of the policy's entropy, above 0; None: it is learned, as in SAC."""

    target_entropy: float | None = None
    """What the entropy is to be then, in nats, with actions scaled to [-1, 1]; None: minus the numbers in an action."""

    dueling: bool = False
    """For Discrete actions: values of states and advantages of actions apart (Wang et al. 2016)."""

    gamma: float = 0.99
    """Discount of future rewards, 0 to 1. Default: Kumar et al. 2020."""

    n_step: int = 1
    """Rewards that a target sums, as they were recorded, before a value stands for the rest, at least 1: more carry
    rewards back faster, but are of those who acted. Default: as in the paper."""

    tau: float = 0.005
    """How far target networks move after each gradient step, above 0, at most 1. Default: Haarnoja et al. 2018."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for all that is learned, or a schedule of it. Default: Kumar et al. 2020 for critics; their
    policies had less, `actor_lr=1e-4` in the published code."""

    temperature_lr: Schedule | None = None
    """Learning rate of the temperature of its own, or a schedule of it; None: `lr`."""

    alpha_lr: Schedule | None = None
    """Learning rate of `alpha` of its own, where that is learned (see `threshold`), or a schedule of it; None: `lr`."""

    grad_clip: float | None = None
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are, as in Kumar et al."""

    batch_size: int = 256
    """Steps in a gradient step, at least 1. Default: Kumar et al. 2020."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    squash: bool = True
    """Hold actions inside their bounds by tanh; it can't be left out here, where actions are drawn between them."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu", separate=False)
    """The shape of policy and critics. Default: Haarnoja et al. 2018."""

    unused: ClassVar[Mapping[str, str]] = {
        "network.state_dependent_std": "standard deviations always depend on the observation",
        **SINGLE_STEPS,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            alpha=(self.alpha is None or self.alpha > 0, "greater than 0, or none"),
            num_actions=(self.num_actions >= 1, "at least 1"),
            gradient_actions=(self.gradient_actions is None or self.gradient_actions >= 1, "at least 1, or none"),
            temperature=(self.temperature is None or self.temperature > 0, "greater than 0, or none"),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            n_step=(self.n_step >= 1, "at least 1"),
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
            squash=(self.squash, "true: actions are drawn between their bounds"),
        )


class ConservativeModule(SoftModule):
    """What CQL learns of Box actions (Kumar et al. 2020, arXiv 2006.04779).

    Args:
        net: The policy: ``dist_inputs`` are means, then log standard deviations.
        obs_space: What it sees.
        action_space: A Box with finite bounds.
        dist: Of the actions.
        config: The shape of the critics.
        temperature: At the start, above 0.
        alpha: The weight of the penalty at the start, above 0.
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


class CQL(OfflineAlgorithm[CQLConfig]):
    """Critics that say too little rather than too much of actions that were not recorded: CQL(H), eq. 4.

    For Box actions on soft actor-critic, for Discrete ones on double DQN.
    """

    name = "cql"
    Config = CQLConfig
    columns = TRANSITION

    def learner_connectors(self) -> list[Any]:
        """What sums the rewards of `n_step` steps, where these are several."""
        return looking_ahead(self.config.n_step, self.config.gamma)

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """As SAC's for Box actions, see `ConservativeModule`; as DQN's for Discrete ones, see `QModule`."""
        config = self.config
        if isinstance(action_space, spaces.Discrete):
            if config.threshold is not None:
                raise SettingsError(
                    "`threshold` is set, but for Discrete actions `alpha` is not learned: leave it out."
                )
            made = make_module(given, obs_space, action_space, config.network, value=config.dueling)
            not_recurrent(made, self.name)
            return made if isinstance(made, QModule) else QModule(made.net, obs_space, action_space)
        check_box(action_space, "CQL", "IQL, which learns any actions")
        network = dataclasses.replace(config.network, state_dependent_std=True)
        made = make_module(given, obs_space, action_space, network, squash=True, value=False)
        not_recurrent(made, self.name)
        if isinstance(made, ConservativeModule):
            return made
        assert isinstance(made.dist, SquashedGaussian)
        start = 1.0 if config.temperature is None else config.temperature
        alpha = 5.0 if config.alpha is None else config.alpha
        module = ConservativeModule(made.net, obs_space, action_space, made.dist, network, start, alpha)
        module.log_temperature.requires_grad_(config.temperature is None)
        module.log_alpha.requires_grad_(config.threshold is not None)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]] | None:
        """For Box actions ``actor``, ``critic`` and, where they are learned, ``temperature`` and ``alpha``."""
        if isinstance(module, QModule):
            return None
        soft = of_kind(module, ConservativeModule)
        return groups_of(soft) | ({"alpha": [soft.log_alpha]} if soft.log_alpha.requires_grad else {})

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Eq. 4 of Kumar et al. 2020, and for Box actions the losses of SAC's policy and temperature."""
        if isinstance(module, QModule):
            return self._of_values(module, batch)
        return self._of_box(of_kind(module, ConservativeModule), batch)

    def _of_values(self, net: QModule, batch: Batch) -> Loss:
        """Double DQN with Huber's loss; the penalty is the logarithm of the sum over actions, less the recorded one."""
        config = self.config
        with torch.no_grad():
            following = batch.next_obs
            best = net.best_of(net.target_values(following), net.values(following))
            target = target_of(batch, config.gamma, best)
        values = net.values(batch.obs)
        recorded = net.values_of(values, batch.action)
        gap = (values.logsumexp(-1) - recorded).mean()
        alpha = 1.0 if config.alpha is None else config.alpha
        return Loss(td=F.smooth_l1_loss(recorded, target), conservative=alpha * gap).log(q=recorded.mean(), gap=gap)

    def _of_box(self, soft: ConservativeModule, batch: Batch) -> Loss:
        """As in the published code of Kumar et al., not as in eq. 4.

        The squared errors of the critics have no factor 1/2, which `alpha` is relative to, and the target is without
        entropy (``deterministic_backup``).
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
        maximum, values = soft_maximum(soft, obs, policies, recorded, config.num_actions, config.gradient_actions)
        gap = (maximum - values).mean(1)
        action, logp = soft.draw(inputs)
        worth = soft.critic(obs, action, frozen=True).amin(0)
        excess = gap if config.threshold is None else gap - config.threshold
        parts = {
            "actor": (temperature * logp - worth).mean(),
            "critic": (values - target).square().mean(1).sum(),
            "conservative": (alpha * excess).sum(),
        }
        if soft.log_temperature.requires_grad:
            entropy = -float(soft.action_size) if config.target_entropy is None else config.target_entropy
            parts["temperature"] = -(soft.log_temperature * (logp.detach().mean() + entropy)).sum()
        if soft.log_alpha.requires_grad:
            parts["alpha"] = -(soft.log_alpha.exp() * excess.detach().mean()).sum()
        figures = {"temperature": temperature.squeeze(0), "alpha": alpha.squeeze(0), "entropy": -logp.mean()}
        return Loss(**parts).log(q=values.mean(), gap=gap.mean(), **figures)

    def after_step(self, module: Module) -> None:
        """Moves the target networks."""
        follower = module.follower if isinstance(module, QModule) else of_kind(module, ConservativeModule).follower
        follower.follow(self.config.tau)
