# SPDX-License-Identifier: Apache-2.0
"""APPO: asynchronous PPO, after Petrenko et al. 2020, "Sample Factory", and Luo et al. 2020, "IMPACT"."""

import math
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from etude.algorithms.config import ModuleLike, OnPolicyConfig
from etude.algorithms.critics import of_kind
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.columns import TARGET_LOGP
from etude.connectors import NormalizeAdvantages, VTrace
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module
from etude.modules.followed_module import FollowedModule
from etude.settings import settings
from etude.spaces import Space


@settings
class APPOConfig(OnPolicyConfig):
    """Settings of APPO."""

    clip: float = 0.2
    target_interval: int | None = None
    tau: float = 1.0
    lambda_: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    normalize_advantages: bool = True
    num_steps: int = 1024
    epochs: int = 4
    minibatch_size: int = 256
    lr: Schedule = 1e-3

class APPO(OnPolicyAlgorithm[APPOConfig]):
    name = "appo"
    collects_beside: ClassVar[bool] = True

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        module = super().make_module(given, obs_space, action_space)
        if self.config.target_interval is None:
            return module
        return FollowedModule(module.net, obs_space, action_space, module.dist)

    def learner_connectors(self) -> list[Any]:
        config = self.config
        followed = config.target_interval is not None
        connectors: list[Any] = [VTrace(config.gamma, config.rho_bar, config.c_bar, config.lambda_, followed)]
        return [*connectors, NormalizeAdvantages()] if config.normalize_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        config = self.config
        out = batch.forward(module)
        assert out.value is not None  # VTrace has seen to that
        logp, entropy = out.logp(batch.action), out.entropy().mean()
        ratio = (logp - batch['logp' if getattr(self,'B',0) else TARGET_LOGP]).exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        parts = {
            "policy": -torch.min(ratio * batch.advantage, clipped * batch.advantage).mean(),
            "value": config.value_weight * F.mse_loss(out.value, batch["value_target"]),
        }
        if config.entropy_weight:
            parts["entropy"] = -config.entropy_weight * entropy
        log_rho = (batch[TARGET_LOGP] - batch.logp).clamp(max=math.log(config.rho_bar))
        return Loss(**parts).log(
            kl=(batch.logp - logp).mean(),
            rho=log_rho.exp().mean(),
            clip_fraction=((ratio - 1).abs() > config.clip).float().mean(),
            entropy=entropy,
        )

    def after_step(self, module: Module) -> None:
        every = self.config.target_interval
        if every is None:
            return
        learner = next(student.learner for student in self.students.values() if student.module is module)
        if learner.updates % every == 0:
            of_kind(module, FollowedModule).follower.follow(self.config.tau)
