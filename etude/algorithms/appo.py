# SPDX-License-Identifier: Apache-2.0
"""APPO: asynchronous PPO (Petrenko et al. 2020, "Sample Factory"; Luo et al. 2020, "IMPACT")."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from etude.algorithms.config import ClipRange, ModuleLike, OnPolicyConfig, TargetConfig, VTraceConfig
from etude.algorithms.critics import update_when_due
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.columns import LOGP, TARGET_LOGP
from etude.connectors import NormalizeAdvantages, VTrace
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module
from etude.modules.critics import FollowedModule
from etude.settings import FloatFrom0, settings
from etude.spaces import Space


@settings
class APPOConfig(OnPolicyConfig):
    """Settings of APPO."""

    num_envs: int = 8
    """Copies of the env that step together, at least 1. Default: measured on Acrobot with `lambda_` and
    `entropy_weight`, see there; each iteration has segments of 128 steps."""

    num_steps: int = 1024
    """Steps collected for each iteration, over all envs, at least 1. Default: the best of 512 to 2048 on CartPole with
    steps collected by weights 4 iterations old."""

    clip: ClipRange = 0.2
    """Clipping range of the probability ratio, above 0, or a schedule: points of (env_steps, range). Default: Schulman
    et al. 2017, table 3; on CartPole 0.3 is as good or better, 0.1 slower."""

    target: TargetConfig = TargetConfig()
    """Policy in the denominator of the ratio. With an `interval` of None: the policy that collected the steps, as in
    Petrenko et al. 2020. This bounds how far the policy moves from it, however old it is. Otherwise a target network,
    as in Luo et al. 2020, which is updated every `interval` gradient steps; these should span several iterations."""

    lambda_: float = 0.9
    """Extra decay of the trace, 0 to 1 (Espeholt et al. 2018, remark 2). Default: measured on Acrobot and CartPole,
    where 0.95 was slower."""

    vtrace: VTraceConfig = VTraceConfig()
    """Caps of V-trace's importance weights, which correct for steps collected with older weights."""

    value_weight: FloatFrom0 = 0.5
    """Weight of the value loss, at least 0. Default: as PPO's."""

    entropy_weight: Schedule = 0.02
    """Weight of the entropy bonus, at least 0, or a schedule: points of (env_steps, weight). Default: measured on
    Acrobot. Until the goal is first reached, normalised advantages are noise there, which makes the policy
    deterministic: with 0 or 0.01 about one seed in ten never reached it."""

    normalize_advantages: bool = True
    """Normalise advantages over each iteration's steps to mean 0 and standard deviation 1, as in Petrenko et al.
    2020."""

    needs: ClassVar[Mapping[str, str]] = {"target.tau": "target.interval"}


class APPO(OnPolicyAlgorithm[APPOConfig]):
    """PPO's clipped objective with V-trace advantages, which also learns from steps collected with older weights.

    V-trace is computed once an iteration, before its first gradient step. During the epochs and minibatches that
    follow, clipping keeps the policy close, as in PPO.
    """

    collects_in_background: ClassVar[bool] = True

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a module, with a target network if `target.interval` is set."""
        module = super().make_module(given, obs_space, action_space)
        if self.config.target.interval is None:
            return module
        return FollowedModule(module.net, obs_space, action_space, module.dist)

    def learner_connectors(self) -> list[Any]:
        """The connectors that add V-trace advantages and value targets, for the module's policy or, if it has a target
        network, for the target's policy."""
        config = self.config
        by_target = config.target.interval is not None
        connectors: list[Any] = [
            VTrace(config.gamma, config.vtrace.rho_bar, config.vtrace.c_bar, config.lambda_, by_target)
        ]
        return [*connectors, NormalizeAdvantages()] if config.normalize_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of Schulman et al. 2017, eq. 9, with the ratio of Petrenko et al. 2020 or of Luo et al. 2020.

        Luo et al. also truncate the ratio of target to behaviour policy; here V-trace's weights in the advantages do
        that.
        """
        config = self.config
        out = batch.forward(module)
        assert out.value is not None  # VTrace has checked it
        logp, entropy = out.logp(batch.action), out.entropy().mean()
        ratio = (logp - batch[LOGP if config.target.interval is None else TARGET_LOGP]).exp()
        clip = self.scheduled("clip", module)
        clipped = ratio.clamp(1 - clip, 1 + clip)
        parts = {
            "policy": -torch.min(ratio * batch.advantage, clipped * batch.advantage).mean(),
            "value": config.value_weight * F.mse_loss(out.value, batch["value_target"]),
        }
        if config.entropy_weight:
            parts["entropy"] = -self.scheduled("entropy_weight", module) * entropy
        log_rho = (batch[TARGET_LOGP] - batch[LOGP]).clamp(max=math.log(config.vtrace.rho_bar))
        clip_fraction = ((ratio - 1).abs() > clip).float().mean()
        kl = (batch[LOGP] - logp).mean()
        return Loss(**parts).log(kl=kl, rho=log_rho.exp().mean(), clip_fraction=clip_fraction, entropy=entropy)

    def after_step(self, module: Module) -> None:
        """Update the target network when it is due."""
        update_when_due(self.learner, module, self.config.target)
