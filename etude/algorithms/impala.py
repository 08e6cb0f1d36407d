# SPDX-License-Identifier: Apache-2.0
"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, "IMPALA: scalable distributed deep-RL
with importance weighted actor-learner architectures")."""

import math
from typing import Any, ClassVar

from torch.nn import functional as F

from etude.algorithms.config import OnPolicyConfig, VTraceConfig
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.connectors import LiftAdvantages, VTrace
from etude.experience import Experience
from etude.learners import Batch, Loss, ModuleLearner, OptimizerConfig, Schedule, Update, mean_of
from etude.modules import Module
from etude.settings import FloatFrom0, settings


@settings
class IMPALAConfig(OnPolicyConfig):
    """Settings of IMPALA."""

    num_envs: int = 4
    """Copies of the env that step together, at least 1. Default: with `num_steps` the best of a dozen settings tried
    together on CartPole, with the newest weights and with weights 4 iterations old: segments of 64 steps."""

    num_steps: int = 256
    """Steps collected for each iteration, over all envs, at least 1. Default: as for `num_envs`."""

    epochs: int = 1
    """Passes over each iteration's steps, at least 1. V-trace is recomputed before each. Default: Espeholt et al. 2018,
    who learn from each step once."""

    num_minibatches: int | None = 1
    """Minibatches of each module in an epoch, at least 1. None: as many as `minibatch_size` gives. V-trace is computed
    before the first of them only. Default: Espeholt et al. 2018; with 4, nothing was learned on CartPole from steps
    that were 4 iterations old."""

    minibatch_size: int = 256
    """Steps in a minibatch if `num_minibatches` is None, at least 1; may not be set otherwise."""

    lambda_: float = 0.95
    """Extra decay of the trace, 0 to 1 (Espeholt et al. 2018, remark 2). Default: measured with `lr` on Acrobot and
    CartPole; 1 in the paper."""

    vtrace: VTraceConfig = VTraceConfig()
    """Caps of V-trace's importance weights, which correct for steps collected with older weights."""

    value_weight: FloatFrom0 = 0.5
    """Weight of the value loss, the mean squared error, at least 0. Default: PPO's; this is twice that of Espeholt et
    al. 2018, whose loss has a factor 1/2."""

    entropy_weight: Schedule = 0.01
    """Weight of the entropy bonus, at least 0, or a schedule: points of (env_steps, weight). Default: Espeholt et al.
    2018, for Atari."""

    lift_advantages: bool = True
    """Subtract the mean advantage of an iteration's steps if it is negative. Until values are learned, negative rewards
    make all advantages negative, which makes the policy deterministic before it has found anything."""

    lr: Schedule = 2e-3
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between. Default: measured
    on Acrobot and CartPole; larger networks need less."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=40.0)
    """Settings of the optimizer. Default of `grad_clip`: Espeholt et al. 2018, for Atari. Their loss is a sum over
    steps and this one a mean, so it seldom clips here."""


class IMPALA(OnPolicyAlgorithm[IMPALAConfig]):
    """Policy gradient with V-trace, which also learns from steps collected with older weights."""

    collects_in_background: ClassVar[bool] = True

    def learner_connectors(self) -> list[Any]:
        """The connectors that add V-trace advantages and value targets, for the module's current weights."""
        config = self.config
        connectors: list[Any] = [VTrace(config.gamma, config.vtrace.rho_bar, config.vtrace.c_bar, config.lambda_)]
        return [*connectors, LiftAdvantages()] if config.lift_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss whose gradients are the three of Espeholt et al. 2018, 4.2: of values, policy and entropy."""
        config = self.config
        out = batch.forward(module)
        assert out.value is not None  # VTrace has checked it
        logp, entropy = out.logp(batch.action), out.entropy().mean()
        parts = {
            "policy": -(batch.advantage * logp).mean(),
            "value": config.value_weight * F.mse_loss(out.value, batch["value_target"]),
        }
        if config.entropy_weight:
            parts["entropy"] = -self.scheduled("entropy_weight", module) * entropy
        log_ratio = logp.detach() - batch.logp
        rho = log_ratio.clamp(max=math.log(config.vtrace.rho_bar)).exp()
        return Loss(**parts).log(kl=-log_ratio.mean(), rho=rho.mean(), entropy=entropy)

    def setup(self) -> None:
        """Also make the store of what each module saw, from which further epochs recompute V-trace."""
        super().setup()
        self._seen: dict[str, tuple[Experience, Experience]] = {}  # by module: what it learns from, and what it saw

    def prepared(self, name: str, seen: Experience) -> Experience:
        """What a module learns from: the output of the learner's connectors on what it saw."""
        exp = super().prepared(name, seen)
        self._seen[name] = exp, seen
        return exp

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        """Update one module as every on-policy algorithm does; the learner's connectors run again before each further
        epoch, on what the module saw."""
        prepared, seen = self._seen.pop(learner.name, (exp, exp))
        if prepared is not exp:  # the user prepared other experience
            seen = exp
        updates = [self.update_epochs(learner, exp, epochs=1)]
        for _ in range(self.config.epochs - 1):
            exp = self.learner.modules[learner.name].connectors.offline(seen, learner.module)
            updates.append(self.update_epochs(learner, exp, epochs=1))
        return mean_of(updates)
