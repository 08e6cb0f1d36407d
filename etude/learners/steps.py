# SPDX-License-Identifier: Apache-2.0
"""Gradient steps: of one learner, or of a team that makes each of them together."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from etude.errors import EtudeError
from etude.learners.averaging import Averaging
from etude.learners.batch import Batch
from etude.learners.clipping import Clipping, norms_by_name
from etude.learners.compiled import CompiledStep
from etude.learners.loss import Loss
from etude.learners.nonfinite import blamed, what_was_not_finite
from etude.learners.optimizers import Optimizer
from etude.learners.sides import Sides, reached_by
from etude.learners.updates import Figures

if TYPE_CHECKING:
    from etude.learners.module_learner import ModuleLearner


class Stepped(NamedTuple):
    """What became of a batch."""

    rows: int
    """Those that this learner had of it."""
    parts: Figures
    """Of the loss; none without rows."""
    figures: Figures
    """What was logged; without rows, nothing of the loss."""
    is_fine: bool | None
    """All was finite, and a step was made. None: the step was left to a later batch."""


class Steps:
    """Makes the steps of a `ModuleLearner`, whose settings, optimizers and counts it uses."""

    def __init__(self, learner: "ModuleLearner") -> None:
        self._learner = learner
        self._gathered = self._skipped_in_a_row = 0
        self._resting: frozenset[str] = frozenset()
        self._compiled: CompiledStep | None = None
        self._averaging: Averaging | None = None
        self._known: dict[str, list[Clipping]] | None = None  # as long as gradients lie where they lay
        self.sides: Sides | None = None
        """Of the loss, where there is one optimizer; None before the first batch, or where nothing asks for them."""

    @property
    def has_rest(self) -> bool:
        """Gradients were gathered that were not enough for a step."""
        return self._gathered > 0

    def forget_optimizers(self) -> None:
        """There are others now, or another team."""
        self._compiled = self._averaging = self._known = self.sides = None

    def make(self, batch: Batch) -> Stepped:
        """The gradients of a batch, and a step where they are enough for one.

        Raises:
            EtudeError: too many steps in a row had to be skipped.
            SettingsError: steps are to be compiled, which they can't be.
        """
        learner = self._learner
        if not self._gathered:
            learner.follow_updates()
        if learner.compile and self._compiled is None and (learner.threads is None or learner.threads.is_settled):
            self._compiled = CompiledStep(learner, self)
        if self._compiled is not None and (done := self._compiled.step(batch)) is not None:
            parts, figures, learner.kept, is_fine = done
            learner.steps_trained += batch.size
            return Stepped(batch.size, parts, figures, self._noted(is_fine, parts, batch))
        if not self._gathered:
            self._begin()
        loss = self._gather(batch)
        self._gathered += 1
        parts = {} if loss is None else {name: part.detach() for name, part in loss.parts.items()}
        figures = {} if loss is None else dict(loss.logged)
        if self._gathered < learner.accumulate:
            return Stepped(batch.size, parts, figures, None)
        learner.updates += 1
        total = self._averaged() if loss is None or self._averaging is not None else loss.total.detach()
        clippings = self._clippings()
        found, *norms = _numbers([total, *(clipping.norm for clipping in clippings)])
        if learner.grad_clip is not None or learner.log_grad_norms:
            figures |= norms_by_name(clippings, norms)
        is_fine = self._noted(math.isfinite(found + sum(norms)), parts, batch)
        if is_fine:
            self._apply(clippings, norms)
        self._gathered = 0
        return Stepped(batch.size, parts, figures, is_fine)

    def make_rest(self) -> bool:
        """Make a step of what was gathered, but was not enough for one; says if it was finite."""
        learner = self._learner
        learner.updates += 1
        if self._averaging is not None:
            self._averaged()
        else:
            for optimizer in learner.optimizers.values():
                for grad in optimizer.parameters.grads:
                    grad.mul_(learner.accumulate / self._gathered)
        self._gathered = 0
        clippings = self._clippings()
        norms = _numbers([clipping.norm for clipping in clippings])
        is_fine = math.isfinite(sum(norms))
        if is_fine:
            self._apply(clippings, norms)
        else:
            learner.skipped += 1
        return is_fine

    # -- parts of a step ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        learner = self._learner
        if learner.team is not None:
            if self._averaging is None:
                self._averaging, self._known = Averaging(learner.team, learner.optimizers, learner.device), None
            self._averaging.begin()
        for optimizer in learner.optimizers.values():
            optimizer.parameters.attach_grads()

    def _gather(self, batch: Batch) -> Loss | None:
        """Add the gradients of a batch; None where others of the team have it, and this learner has no row of it."""
        learner, rows = self._learner, batch.size
        weight = self._weight(rows)
        loss = None
        if rows or self._averaging is None:
            with learner.autocast():
                loss = learner.loss(learner.module, batch)
        if self.sides is None and learner.wants_sides:
            self.find_sides(loss)
        if loss is None:
            learner.kept = {}
            assert self._averaging is not None
            self._averaging.add_none()
            return None
        total = loss.total
        weighed = total if weight == 1.0 else total * weight
        if self.sides is not None and self.sides.backs_apart:
            self.sides.backward(loss, weight)
        else:
            weighed.backward()  # type: ignore[no-untyped-call]
        learner.kept = loss.kept
        self._resting = loss.resting
        if self._averaging is not None:
            self._averaging.add(weight, weighed.detach(), loss.resting)
        return loss

    def _weight(self, rows: int) -> float:
        """What the loss of a batch is multiplied by before its gradient is added."""
        learner = self._learner
        if learner.team is None:
            learner.steps_trained += rows
            return 1.0 / learner.accumulate
        if learner.accumulate == 1:
            return float(rows)  # how many all have is known when gradients are averaged
        together = learner.team.total(rows)
        learner.steps_trained += together
        return rows / together if together else math.nan

    def _averaged(self) -> torch.Tensor:
        """Average the gradients over the team; gives the mean loss."""
        assert self._averaging is not None
        weight, loss, self._resting = self._averaging.average()
        if self._learner.accumulate == 1:
            self._learner.steps_trained += round(weight) if math.isfinite(weight) else 0
        return torch.tensor(loss, device=self._learner.device)

    def find_sides(self, loss: Loss | None) -> None:
        """Find out what the sides of the loss reach, from a batch's; all of a team agree on what the first one found.

        Raises:
            SettingsError: a side is to have a learning rate of its own, and reaches no parameter alone.
        """
        learner = self._learner
        (optimizer,) = learner.optimizers.values()
        reached = None if loss is None else reached_by(loss, optimizer.parameters)
        if learner.team is not None:
            reached = next((found for found in learner.team.gathered(reached) if found is not None), None)
        if reached is None:
            return
        limited = learner.grad_clip_by == "loss_norm" and learner.limit("all") is not None
        self.sides = Sides(optimizer.parameters, reached, limited=limited)
        learner.check_rates(self.sides)
        self._known = None
        if learner.team is not None and self.sides.backs_apart:
            self._averaging = Averaging(learner.team, learner.optimizers, learner.device)
            self._averaging.begin()

    def _clippings(self) -> list[Clipping]:
        """The gradients that have been gathered, each with its limit."""
        if not self._backs_apart:
            self._let_change()
        if self._known is None:
            self._known = {
                name: self.clippings(name, optimizer.parameters.grads)
                for name, optimizer in self._learner.optimizers.items()
            }
        return [clipping for name in self._moving() for clipping in self._known[name]]

    def clippings(self, name: str, grads: Sequence[torch.Tensor]) -> list[Clipping]:
        """The flat gradients of an optimizer, in the parts that are limited each by itself."""
        group, limit, sides = self._learner.optimizers[name].parameters, self._learner.limit(name), self.sides
        if sides is None or not sides.limited:
            return [Clipping("grad_norm" if name == "all" else f"grad_norm/{name}", group, [grads[0]], limit)]
        return [Clipping(f"grad_norm/{side}", group, parts, limit) for side, parts in sides.parts(grads).items()]

    @property
    def _backs_apart(self) -> bool:
        return self.sides is not None and self.sides.backs_apart

    def _let_change(self) -> None:
        """Let the algorithm read and change gradients."""
        learner = self._learner
        if learner.on_gradients is not None:
            with torch.no_grad():
                learner.on_gradients(learner.module)

    def _moving(self) -> dict[str, Optimizer]:
        """The optimizers that the latest loss lets make a step."""
        optimizers = self._learner.optimizers
        if not self._resting:
            return optimizers
        return {name: optimizer for name, optimizer in optimizers.items() if name not in self._resting}

    def _apply(self, clippings: Sequence[Clipping], norms: Sequence[float]) -> None:
        learner = self._learner
        for clipping, norm in zip(clippings, norms, strict=True):
            clipping.clip(norm, learner.grad_clip_by)
        if self._backs_apart:
            for optimizer in learner.optimizers.values():
                optimizer.parameters.join_grads()
            self._let_change()
        for name, optimizer in self._moving().items():
            optimizer.step(learner.rates(name))
        if learner.after_step is not None:
            with torch.no_grad():
                learner.after_step(learner.module)

    def _noted(self, is_fine: bool, parts: Figures, batch: Batch) -> bool:
        """Count a step that is skipped, and raise an error where too many are."""
        if is_fine:
            self._skipped_in_a_row = 0
            return True
        learner = self._learner
        learner.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= learner.max_skipped:
            message = what_was_not_finite(learner.name, self._skipped_in_a_row, parts, batch)
            raise EtudeError(message if learner.team is None else blamed(learner.team, message, parts))
        return False


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Scalars as numbers; a device is waited for once."""
    if scalars[0].device.type == "cpu":
        return [scalar.item() for scalar in scalars]
    return torch.stack([scalar.float() for scalar in scalars]).tolist()
