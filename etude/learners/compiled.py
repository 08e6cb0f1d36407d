# SPDX-License-Identifier: Apache-2.0
"""The whole gradient step as one compiled graph: loss, gradient, clipping and Adam."""

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from etude.errors import EtudeError, SettingsError
from etude.learners.adam import Adam
from etude.learners.batch import Batch
from etude.learners.clipping import norms_by_name

if TYPE_CHECKING:
    from etude.learners.module_learner import LossFn, ModuleLearner
    from etude.learners.steps import Steps
    from etude.learners.updates import Figures


class _LossModule(nn.Module):
    """A loss as a module, so that its parameters can be given from outside."""

    def __init__(self, learner: "ModuleLearner") -> None:
        super().__init__()
        self.module = learner.module
        self.loss: LossFn = learner.loss
        self.autocast = learner.autocast

    def forward(self, columns: dict[str, torch.Tensor], side: str | None) -> tuple[torch.Tensor, tuple["Figures", ...]]:
        with self.autocast():
            loss = self.loss(self.module, Batch(columns, self.module))
            resting = dict.fromkeys(loss.resting, loss.total.detach())  # only tensors come out of a traced loss
            total = loss.total if side is None else loss.sides[side]
            return total, (loss.parts, loss.logged, loss.kept, resting, {"total": loss.total})


class CompiledStep:
    """Steps of a learner, compiled when the first batch shows which columns the loss uses.

    Batches of another size than the first (the last of an epoch) are left to the plain step.

    Raises:
        SettingsError: the learner does what a compiled step can't.
    """

    def __init__(self, learner: "ModuleLearner", steps: "Steps") -> None:
        self._learner, self._steps = learner, steps
        self._optimizers = [_compilable(learner, name) for name in learner.optimizers]
        self._lossed = _LossModule(learner)
        names = {id(p): name for name, p in self._lossed.named_parameters()}
        self._groups = [optimizer.parameters for optimizer in self._optimizers]
        self._names = [[names[id(p)] for p in group.parameters] for group in self._groups]
        self._columns: list[str] | None = None
        self._size = 0
        self._rate_of: torch.Tensor | None = None
        self._masks: list[torch.Tensor] = []
        self._lr: dict[str, float] = {}
        self._rates = torch.zeros(0)  # of `_lr`
        self._graph = _compiled(self._traced)

    def step(self, batch: Batch) -> tuple["Figures", "Figures", "Figures", bool] | None:
        """One step: loss parts, what was logged and what was kept, and if all was finite; else nothing has changed.

        None where this batch is to be stepped plainly.
        """
        learner = self._learner
        if self._columns is None:
            with torch.set_grad_enabled(learner.wants_sides):
                loss = learner.loss(learner.module, batch)
            if learner.wants_sides:
                self._steps.find_sides(loss)
            self._rate_of, self._masks = self._rates_by_element(), self._masks_of_sides()
            self._columns = list(batch.used)
            self._size = len(batch[self._columns[0]])
        if len(batch[self._columns[0]]) != self._size:
            return None
        learner.updates += 1
        if self._lr != learner.lr:
            self._lr, self._rates = dict(learner.lr), torch.tensor(self._rates_now(), device=learner.device)
        columns = {name: batch[name] for name in self._columns}
        try:
            with torch.no_grad():
                losses, figures, kept, is_fine = self._graph(columns, self._rates)
                fine = bool(is_fine.item())
                if fine and learner.after_step is not None:
                    learner.after_step(learner.module)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise EtudeError(
                "compile=True: the loss reads a Python number that keeps changing, and each value is compiled anew. "
                "Keep it in a tensor (a buffer of the module) or a column of the batch, or train without compile."
            ) from error
        return losses, figures, kept, fine

    def _rates_now(self) -> list[float]:
        """The learning rate of each optimizer; where the only one has several, these."""
        rates = self._learner.rates("all") if self._rate_of is not None else 0.0
        if isinstance(rates, int | float):
            return [self._learner.lr[name] for name in self._learner.optimizers]
        return [rate for _, rate in rates]

    def _rates_by_element(self) -> torch.Tensor | None:
        """For each parameter, which of `_rates_now` is its own; None: all of an optimizer have one."""
        rates = self._learner.rates("all") if "all" in self._learner.optimizers else 0.0
        if isinstance(rates, int | float):
            return None
        rate_of = torch.zeros_like(self._groups[0].flat.data, dtype=torch.int32)
        for i, (own, _) in enumerate(rates):
            rate_of[own] = i
        return rate_of

    def _masks_of_sides(self) -> list[torch.Tensor]:
        """Where in the flat gradient each side of the loss has its own part, without the first; none where apart."""
        sides = self._steps.sides
        if sides is None or not sides.limited or sides.backs_apart:
            return []
        masks = []
        for name in sides.names[1:]:
            mask = torch.zeros_like(self._groups[0].flat.data, dtype=torch.float32)
            for own in sides.slices[name]:
                mask[own] = 1.0
            masks.append(mask)
        return masks

    def _traced(
        self, columns: dict[str, torch.Tensor], rates: torch.Tensor
    ) -> tuple["Figures", "Figures", "Figures", torch.Tensor]:
        def loss_of(flats: list[torch.Tensor], side: str | None) -> tuple[torch.Tensor, tuple["Figures", ...]]:
            weights: dict[str, torch.Tensor] = {}
            for group, names, flat in zip(self._groups, self._names, flats, strict=True):
                weights.update(zip(names, group.split(flat), strict=True))
            total, figures = functional_call(self._lossed, weights, (columns, side))
            return total, figures

        flats, sides = [group.flat.data for group in self._groups], self._steps.sides
        passes = sides.names if sides is not None and sides.backs_apart else [None]
        found = [grad_and_value(loss_of, has_aux=True)(flats, side) for side in passes]
        grads = [[grads[i] for grads, _ in found] for i in range(len(flats))]
        losses, figures, kept, resting, totals = found[0][1][1]
        learner, figures = self._learner, dict(figures)
        check = totals["total"]
        for name, own in zip(learner.optimizers, grads, strict=True):
            if name in resting:
                continue
            clippings = self._steps.clippings(name, own)
            norms = [clipping.norm for clipping in clippings]
            if learner.grad_clip is not None or learner.log_grad_norms:
                figures.update(norms_by_name(clippings, norms))
            check = sum(norms, check)
            if self._masks:  # to scale slices in place would be twice as slow
                norm = norms[0]
                for mask, other in zip(self._masks, norms[1:], strict=True):
                    norm = torch.lerp(norm, other, mask)
                own[0] = own[0] * clippings[0].scale(norm)
                continue
            for clipping, norm in zip(clippings, norms, strict=True):
                clipping.clip(norm, learner.grad_clip_by)
        is_fine = check.isfinite()
        for i, (name, optimizer, own) in enumerate(zip(learner.optimizers, self._optimizers, grads, strict=True)):
            if name not in resting:
                optimizer.traced_step(
                    sum(own[1:], own[0]), rates[i] if self._rate_of is None else rates[self._rate_of], is_fine
                )
        return {name: part.detach() for name, part in losses.items()}, figures, kept, is_fine


def _compilable(learner: "ModuleLearner", name: str) -> Adam:
    optimizer = learner.optimizers[name]
    for is_fine, what in (
        (isinstance(optimizer, Adam), f"optimizer `{name}` is not Adam"),
        (learner.accumulate == 1, f"`accumulate` is {learner.accumulate}"),
        (learner.on_gradients is None, "on_gradients() is defined"),
    ):
        if not is_fine:
            raise SettingsError(f"`compile` is True, but {what}, which can't be compiled into a step: leave one out.")
    assert isinstance(optimizer, Adam)
    return optimizer


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method, compiled with few guards.

    What the graph depends on does not change but for the batch, whose size is checked here, and numbers that a loss or
    a module keeps; checking everything else again would cost a fifth of a step. Compiled graphs are kept by code
    object, so that without those guards each learner needs a code object of its own, or it would be given another's.
    """
    function = step.__func__  # type: ignore[attr-defined]
    own = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    bound = types.MethodType(own, step.__self__)  # type: ignore[attr-defined]
    return torch.compile(bound, dynamic=False, fullgraph=True, options={"guard_filter_fn": _numbers_only})


def _numbers_only(guards: Sequence[Any]) -> list[bool]:
    return [
        isinstance(guard.value, int | float | str)
        and (guard.name.startswith("self._lossed") or guard.name.startswith("G["))
        and "__import_torch" not in guard.name
        for guard in guards
    ]
