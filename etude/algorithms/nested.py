# SPDX-License-Identifier: Apache-2.0
"""Settings that are nested in those of algorithms."""

from collections.abc import Mapping
from typing import ClassVar

from etude.learners import ClipBy, Schedule
from etude.settings import check_rules, settings


@settings
class OptimizerConfig:
    """How gradients become steps, besides `lr`."""

    own_names: ClassVar[Mapping[str, str]] = {"eps": "adam_eps", "betas": "adam_betas"}

    actor_lr: Schedule | None = None
    """Learning rate of the parameters that only the policy's loss reaches, or a schedule of it; None: `lr`."""

    critic_lr: Schedule | None = None
    """Learning rate of the parameters that only the loss of values reaches, or a schedule of it; None: `lr`."""

    eps: float = 1e-8
    """What Adam adds to the root of the second moment, at least 0. Default: Kingma & Ba 2015."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments, each at least 0 and below 1. Default: Kingma & Ba 2015."""

    grad_clip: float | None = 0.5
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are. Default: Huang et al.
    2022, detail 11."""

    grad_clip_by: ClipBy = "loss_norm"
    """What `grad_clip` limits. `loss_norm`: the norm of the gradient of the policy's loss, and that of the value's,
    each by itself; else the larger one, the value's where returns are large, would leave the other next to nothing. Of
    algorithms with several optimizers, the norm of each. `global_norm`: that of all gradients of an optimizer together.
    `norm`: that of each tensor. `value`: each element."""

    log_grad_norms: bool = False
    """Log the norm of the gradients, `grad_norm`, also where nothing is clipped."""

    accumulate: int = 1
    """Minibatches whose mean gradient makes a gradient step, at least 1: for batches that memory has no room for. Where
    settings say how many gradient steps are made, each takes so many batches."""

    max_skipped: int = 10
    """A gradient step whose loss or gradients are not finite is skipped, and counted as `skipped_steps`; so many in a
    row are an error. At least 1."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "optimizer",
            eps=(self.eps >= 0, "at least 0"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "two numbers, each at least 0 and below 1"),
            grad_clip=(self.grad_clip is None or self.grad_clip > 0, "greater than 0, or none"),
            accumulate=(self.accumulate >= 1, "at least 1"),
            max_skipped=(self.max_skipped >= 1, "at least 1"),
        )
