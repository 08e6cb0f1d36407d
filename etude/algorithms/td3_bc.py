# SPDX-License-Identifier: Apache-2.0
"""TD3+BC (Fujimoto & Gu 2021, "A minimalist approach to offline reinforcement learning", arXiv 2106.06860)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from etude.algorithms.config import NO_STD, NO_VALUE, SINGLE_STEPS, OfflineConfig
from etude.algorithms.critics import TRANSITION, check_box, looking_ahead, not_recurrent
from etude.algorithms.nested import ModuleLike, OptimizerConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.td3 import TwinDelayed, TwinDelayedSettings
from etude.learners import Loss, Schedule
from etude.modules import Module, NetworkConfig
from etude.settings import check_rules, settings
from etude.spaces import Space


@settings
class TD3BCConfig(OfflineConfig, TwinDelayedSettings):
    """Settings of TD3+BC. The recording needs rewards and next observations.

    The paper also normalises observations: ``connectors=("normalize_obs",)``.
    """

    alpha: float = 2.5
    """Weight of the critic's value against the squared distance to the recorded actions, at least 0. 0 imitates; larger
    trusts the critic more. Values are divided by their mean magnitude, so that the scale of rewards does not matter.
    Default: Fujimoto & Gu 2021."""

    gamma: float = 0.99
    """Discount factor, 0 to 1. Default: Fujimoto & Gu 2021."""

    n_step: int = 1
    """Recorded rewards that a target sums before it bootstraps, at least 1. More propagate rewards faster, but are
    those of the behaviour policy. Default: as in the paper."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule. Default: Fujimoto & Gu 2021."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """Settings of the optimizer. Default: gradients are not clipped, as in Fujimoto & Gu 2021."""

    batch_size: int = 256
    """Steps in a gradient step, at least 1. Default: Fujimoto & Gu 2021."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy and critics. Default: Fujimoto & Gu 2021."""

    unused: ClassVar[Mapping[str, str]] = NO_STD | NO_VALUE | SINGLE_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            alpha=(self.alpha >= 0, "at least 0"),
            **self.twin_delayed_rules(),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            n_step=(self.n_step >= 1, "at least 1"),
        )
        check_rules(self.network, "network", squash=(self.network.squash is not False, "true: the policy is a tanh"))


class TD3BC(TwinDelayed, OfflineAlgorithm[TD3BCConfig]):
    """TD3 with a policy that stays near the recorded actions; for Box actions.

    When it explores (recording, `evaluate(explore=True)`), it adds normal noise with a standard deviation of 0.1 of
    half the action range.
    """

    name = "td3_bc"
    Config = TD3BCConfig
    columns = TRANSITION

    def learner_connectors(self) -> list[Any]:
        """The connector that sums the rewards of `n_step` steps, if there are several."""
        return looking_ahead(self.config.n_step, self.config.gamma)

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy and critics with their targets; see `DeterministicModule`."""
        check_box(action_space, "TD3+BC", "IQL, which learns any actions, or CQL or DQN for Discrete ones")
        return super().make_module(given, obs_space, action_space)

    def check_policy(self, policy: Module) -> None:
        """Check that the policy is not recurrent."""
        not_recurrent(policy, self.name)

    def policy_loss(self, worth: Tensor, chosen: Tensor, action: Tensor) -> Loss:
        """The policy's loss of Fujimoto & Gu 2021, eq. 5."""
        scale = self.config.alpha / worth.detach().abs().mean()
        distance = (chosen - action).square().mean()
        return Loss(actor=distance - scale * worth.mean()).log(distance=distance)
