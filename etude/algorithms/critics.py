# SPDX-License-Identifier: Apache-2.0
"""Shared parts of algorithms with critics: settings, critic targets, modules, checks."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude import columns as col
from etude.algorithms.config import SINGLE_STEPS, EvaluationConfig, ModuleLike, OfflineConfig, TargetConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.connectors import NStep
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch, Learner, OptimizerConfig
from etude.modules import Module
from etude.modules.critics import ActionEncoder, FollowedModule, TargetedModule, TargetNetwork, TwinCritic, frozen_copy
from etude.modules.distributions import Distribution, check_no_integers
from etude.modules.network import NetworkConfig, RecurrentLayer
from etude.settings import IntFrom1, Rate, UnitInterval, settings
from etude.spaces import Space, in_words

M = TypeVar("M", bound=Module)
C = TypeVar("C", bound="OfflineCriticConfig")

TRANSITION = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.TERMINATED)
"""The columns of single steps from which critics learn."""


def of_kind(module: Module, kind: type[M]) -> M:
    """Return the module, which must be of the kind that an algorithm needs.

    Raises:
        ModuleError: it is of another kind.
    """
    if not isinstance(module, kind):
        raise ModuleError(f"{type(module).__name__} is not a {kind.__name__}: return one from make_module().")
    return module


def check_box(
    action_space: Space, name: str = "SAC", others: str = "DQN or PPO for Discrete actions, PPO for others"
) -> None:
    """Check that actions are a Box of floats, as the algorithm ``name`` needs.

    Raises:
        SettingsError: they are not a Box; the message suggests ``others``.
        SpaceError: they are a Box of integers.
    """
    check_no_integers(action_space)
    if not isinstance(action_space, spaces.Box):
        raise SettingsError(
            f"the action space is {in_words(action_space)}, but {name} needs a Box of floats. Use {others}."
        )


def not_recurrent(module: Module, name: str) -> Module:
    """Return the module.

    Raises:
        SettingsError: it is recurrent, which critics of single steps don't support.
    """
    if module.recurrent:
        raise SettingsError(
            f"{type(module.net).__name__} is recurrent, but {name} learns from single steps, which have no order in "
            "time: use a network without a memory, or BC."
        )
    return module


def check_memories(policy: Module, config: NetworkConfig, name: str) -> None:
    """Raise a SettingsError if only one of the policy and the critics, which ``config`` shapes, is recurrent."""
    if policy.recurrent != (config.recurrent is not None):
        has, lacks = ("policy", "critics") if policy.recurrent else ("critics", "policy")
        raise SettingsError(
            f"the {has} of {name} would be recurrent, but not the {lacks}: give a recurrent `module` and set "
            "`network.recurrent`, which shapes the critics, or neither."
        )


def draw_by_gate(net: nn.Module) -> None:
    """Initialise each gate of a built-in network's recurrent layers separately; see `RecurrentLayer.draw_by_gate`."""
    for part in net.modules():
        if isinstance(part, RecurrentLayer):
            part.draw_by_gate()


def trained(**parts: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of named parts of a module that are trained, for optimizers of these names."""
    return {name: [p for p in part.parameters() if p.requires_grad] for name, part in parts.items()}


def update_when_due(learner: Learner, module: Module, target: TargetConfig) -> None:
    """Update the module's target network every ``target.interval`` gradient steps. If that step was skipped, the next
    step that is not skipped updates it."""
    if target.interval is None:
        return
    updates = next(own for own in learner.modules.values() if own.module is module).updates
    followed = of_kind(module, FollowedModule)
    before = updates - 1 if followed.seen_updates is None else followed.seen_updates
    followed.seen_updates = updates
    if updates // target.interval > before // target.interval:
        followed.follower.follow(target.tau)


def target_of(batch: Batch, gamma: float, value: Tensor) -> Tensor:
    """Bootstrapped targets: reward + gamma * ``value`` ``[B]`` of the next observation, or just the reward if
    terminated.

    If `NStep` has run, ``reward`` is a sum, and ``discount`` replaces gamma. Returns ``[B]``.
    """
    if col.DISCOUNT in batch:
        return torch.addcmul(batch.reward, batch.discount, value)
    return torch.add(batch.reward, torch.where(batch[col.TERMINATED], 0.0, value), alpha=gamma)


@settings
class OfflineCriticConfig(OfflineConfig):
    """Settings of algorithms with critics that learn from a recording, which needs rewards and next observations."""

    gamma: UnitInterval = 0.99
    """Discount factor, 0 to 1. Default: as in the papers of all these algorithms."""

    n_step: IntFrom1 = 1
    """Recorded rewards that a target sums before it bootstraps, at least 1. More propagate rewards faster, but are
    those of the behaviour policy. Default: as in the papers."""

    tau: Rate = 0.005
    """How far an update moves the target networks towards the trained ones, above 0, at most 1. Default: as in the
    papers."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """Settings of the optimizer. Default: gradients are not clipped, as in the papers."""

    batch_size: int = 256
    """Steps in each batch, at least 1. Default: Kostrikov et al. 2021 (IQL), Kumar et al. 2020 (CQL), and Fujimoto & Gu
    2021 (TD3+BC)."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    evaluation: EvaluationConfig = EvaluationConfig(interval=1)
    """Evaluations during training, if an `env` is given."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy and critics, and of the value function where there is one. Default: as in the papers."""

    unused: ClassVar[Mapping[str, str]] = SINGLE_STEPS


class OfflineCriticAlgorithm(OfflineAlgorithm[C]):
    """Base class of algorithms whose critics learn from single steps of a recording."""

    Config = OfflineCriticConfig
    columns = TRANSITION

    def learner_connectors(self) -> list[Any]:
        """The connector that sums the rewards of `n_step` steps, if there are several."""
        config = self.config
        return [NStep(config.n_step, config.gamma)] if config.n_step > 1 else []

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy with critics and target critics, and a value function if one is needed; see `CriticModule`."""
        made = not_recurrent(super().make_module(given, obs_space, action_space), self.name)
        if isinstance(made, CriticModule):
            return made
        return CriticModule(made.net, obs_space, action_space, made.dist, self.config.network)

    def after_step(self, module: Module) -> None:
        """Update the target networks."""
        of_kind(module, TargetedModule).follower.follow(self.config.tau)


class CriticModule(TargetedModule):
    """A policy with twin critics of its actions and target critics; its network may also give state values.

    Args:
        net: The network of the policy, and of state values if there are any.
        obs_space: The observation space.
        action_space: The action space, of any kind.
        dist: The action distribution.
        config: The shape of the critics.
    """

    def __init__(
        self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution, config: NetworkConfig
    ) -> None:
        super().__init__(net, obs_space, action_space, dist)
        self.encoded = ActionEncoder(action_space)
        """Encodes actions as critics see them, ``[B, width]``."""
        self.critic = TwinCritic(obs_space, self.encoded.width, config)
        self.target_critic = frozen_copy(self.critic)
        self.follower = TargetNetwork(self.target_critic, self.critic)
