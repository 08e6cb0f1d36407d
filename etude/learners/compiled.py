# SPDX-License-Identifier: Apache-2.0
"""The whole gradient step as one compiled graph: loss, gradient, clipping and Adam."""

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from etude.errors import EtudeError
from etude.learners.batch import Batch
from etude.learners.clipping import clip

if TYPE_CHECKING:
    from etude.learners.learner import Figures, Learner, LossFn
    from etude.modules import Module


class _LossModule(nn.Module):
    """A loss as a module, so that its parameters can be given from outside."""

    def __init__(self, module: "Module", loss: "LossFn") -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, tuple["Figures", "Figures"]]:
        loss = self.loss(self.module, Batch(columns, self.module))
        return loss.total, (loss.parts, loss.logged)


class CompiledStep:
    """Steps of a learner, compiled when the first batch shows which columns the loss uses.

    Batches of another size than the first (the last of an epoch) are left to the plain step.
    """

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner
        self._lossed = _LossModule(learner.module, learner.loss)
        names = {id(p): name for name, p in self._lossed.named_parameters()}
        self._groups = [optimizer.parameters for optimizer in learner.optimizers.values()]
        self._names = [[names[id(p)] for p in group.parameters] for group in self._groups]
        self._columns: list[str] | None = None
        self._size = 0
        self._graph = _compiled(self._traced)

    def step(self, batch: Batch) -> tuple["Figures", "Figures"] | None:
        """One step; None where this batch is to be stepped plainly."""
        if self._columns is None:
            with torch.no_grad():
                self._learner.loss(self._learner.module, batch)
            self._columns = list(batch.used)
            self._size = len(batch[self._columns[0]])
        if len(batch[self._columns[0]]) != self._size:
            return None
        rates = torch.tensor([self._learner.lr[name] for name in self._learner.optimizers])
        columns = {name: batch[name] for name in self._columns}
        try:
            with torch.no_grad():
                losses, figures = self._graph(columns, rates.to(self._groups[0].flat.device))
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise EtudeError(
                "compile=True: the loss reads a Python number that keeps changing, and each value is compiled anew. "
                "Keep it in a tensor (a buffer of the module) or a column of the batch, or train without compile."
            ) from error
        return losses, figures

    def _traced(self, columns: dict[str, torch.Tensor], rates: torch.Tensor) -> tuple["Figures", "Figures"]:
        def loss_of(flats: list[torch.Tensor]) -> tuple[torch.Tensor, tuple["Figures", "Figures"]]:
            weights: dict[str, torch.Tensor] = {}
            for group, names, flat in zip(self._groups, self._names, flats, strict=True):
                weights.update(zip(names, group.split(flat), strict=True))
            total, figures = functional_call(self._lossed, weights, (columns,))
            return total, figures

        flats = [group.flat.data for group in self._groups]
        grads, (_, (losses, figures)) = grad_and_value(loss_of, has_aux=True)(flats)
        learner, figures = self._learner, dict(figures)
        if learner.grad_clip is not None:
            figures["grad_norm"] = clip(self._groups, grads, learner.grad_clip, learner.grad_clip_by)
        for i, (optimizer, grad) in enumerate(zip(learner.optimizers.values(), grads, strict=True)):
            optimizer.traced_step(grad, rates[i])
        return {name: part.detach() for name, part in losses.items()}, figures


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
