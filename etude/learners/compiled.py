# SPDX-License-Identifier: Apache-2.0
"""The whole gradient step (loss, gradient, clipping and Adam) as one compiled graph."""

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from etude.errors import EtudeError, SettingsError
from etude.learners.batch import Batch
from etude.learners.loss import Figures, Loss
from etude.learners.optim import Adam, LossGroups, Optimizers, scale_to
from etude.modules import Module

_NEW_PARTS = "the loss has parts that it did not have in the first batch"

LossFn: TypeAlias = Callable[[Module, Batch], Loss]


class _LossModule(nn.Module):
    """A loss as a module, so that its parameters can be passed in by `functional_call`."""

    def __init__(self, module: Module, loss: LossFn, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self.loss, self.autocast = module, loss, autocast
        self.sides: LossGroups | None = None
        """The sides of the loss that are treated in different ways, once they are known."""

    def forward(self, columns: dict[str, torch.Tensor], side: str | None) -> tuple[torch.Tensor, tuple[Figures, ...]]:
        with self.autocast():
            loss = self.loss(self.module, Batch(columns, self.module))
            resting = dict.fromkeys(loss.resting, loss.total.detach())  # only tensors come out of a traced loss
            known = loss.sides if self.sides is None else self.sides.names
            if any(part.requires_grad and name not in known for name, part in loss.sides.items()):
                raise EtudeError(_NEW_PARTS)
            total = loss.total if side is None else loss.sides[side]
            return total, (loss.parts, loss.logged, loss.kept, resting, {"total": loss.total})


class CompiledStep:
    """Compiled gradient steps of one module; the first batch shows which columns the loss uses.

    Args:
        module: The module.
        loss: ``loss(module, batch) -> Loss``.
        optimizers: The module's optimizers; see `check_compilable`.
        autocast: Makes the context in which the loss is computed.
        device: The device of the batches.

    Raises:
        SettingsError: see `load_triton`.
    """

    def __init__(
        self,
        module: Module,
        loss: LossFn,
        optimizers: Optimizers,
        autocast: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        load_triton(device)
        self._module, self._loss, self._optim, self._device = module, loss, optimizers, device
        self._optimizers = {name: own for name, own in optimizers.by_name.items() if isinstance(own, Adam)}
        self._lossed = _LossModule(module, loss, autocast)
        names = {id(p): name for name, p in self._lossed.named_parameters()}
        self._groups = [optimizer.parameters for optimizer in self._optimizers.values()]
        self._names = [[names[id(p)] for p in group.parameters] for group in self._groups]
        self._columns: list[str] | None = None
        self._size = 0
        self._masks: list[torch.Tensor] = []
        self._lr: dict[str, float] = {}
        self._rates: list[torch.Tensor] = []  # of `_lr`
        self._graph = _compiled(self._traced)

    def step(self, batch: Batch) -> tuple[Figures, Figures, Figures, bool] | None:
        """Make one step, which changes nothing unless all numbers are finite.

        Returns:
            The parts of the loss, logged figures, what the loss kept for each row, and whether all was finite. None,
            with nothing done, for a batch of another size than the first (the last of an epoch).
        """
        if self._columns is None:
            self._columns = self._columns_used(batch)
            self._size = len(batch[self._columns[0]])
        if len(batch[self._columns[0]]) != self._size:
            return None
        if self._lr != self._optim.lr:
            self._lr, self._rates = dict(self._optim.lr), self._rates_now()
        columns = {name: batch[name] for name in self._columns}
        try:
            with torch.no_grad():
                parts, figures, kept, is_fine = self._graph(columns, self._rates)
                return parts, figures, kept, bool(is_fine.item())
        except Exception as error:
            if not type(error).__module__.startswith("torch._dynamo"):  # torch has no public name for its classes
                raise
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise EtudeError(
                    "compile=True: the loss or the network reads a Python number or object that keeps changing, and "
                    "each state is compiled anew. Keep it in a tensor (a buffer of the module, which `after_step` may "
                    "change) or a column of the batch, or train without compile."
                ) from error
            if _NEW_PARTS in str(error):
                raise EtudeError(
                    f"compile=True: {_NEW_PARTS}. Name all there, too: give those that are not learned yet as 0 times "
                    "themselves."
                ) from error
            raise EtudeError(
                f"compile=True: torch can't make one graph of the loss and the network ({str(error).splitlines()[0]}; "
                "the error above says more). Usual causes are a branch on the value of a tensor, float() or .item() "
                "of one, NumPy, batch norm, and a tensor that the loss changes in place or keeps in an object (do that "
                "in `after_step`). Write it with tensors alone, or train without compile."
            ) from error

    def _columns_used(self, batch: Batch) -> list[str]:
        """The columns that the loss uses; also finds which parameters its sides reach."""
        wants_sides = self._optim.needs_sides and self._optim.sides is None
        # This call must use no random numbers: a resumed run, which repeats it, would differ from one never stopped.
        drawn_on = [self._device] if self._device.type == "cuda" else []
        original = inspect.unwrap(self._loss, stop=lambda loss: hasattr(loss, "__self__"))
        things = [getattr(original, "__self__", original), *self._module.modules()]
        before = [dict(getattr(thing, "__dict__", {})) for thing in things]
        with torch.set_grad_enabled(wants_sides), torch.random.fork_rng(drawn_on):
            loss = self._loss(self._module, batch)
        for thing, known in zip(things, before, strict=True):
            _refuse_changes(thing, known)
        if wants_sides:
            self._optim.set_sides(self._optim.reached_by(loss))
        self._lossed.sides = self._optim.sides
        self._masks = self._masks_of_sides()
        return list(batch.used)

    def _rates_now(self) -> list[torch.Tensor]:
        """The learning rate of each optimizer: one number, or one for each parameter if its slices have several."""
        found = []
        for name, group in zip(self._optimizers, self._groups, strict=True):
            rates = self._optim.rates(name)
            given = torch.zeros(() if isinstance(rates, int | float) else group.flat.shape, device=self._device)
            for own, rate in [(..., rates)] if isinstance(rates, int | float) else rates:
                given[own] = rate
            found.append(given)
        return found

    def _masks_of_sides(self) -> list[torch.Tensor]:
        """For each side of the loss but the first, a mask: 1 where its gradient is in the flat gradient, otherwise 0;
        [] if they are separate."""
        sides = self._optim.sides
        if sides is None or not sides.limited or sides.separate_backward:
            return []
        masks = []
        for name in sides.names[1:]:
            mask = torch.zeros_like(self._groups[0].flat.data, dtype=torch.float32)
            for own in sides.slices[name]:
                mask[own] = 1.0
            masks.append(mask)
        return masks

    def _loss_of(
        self, flats: list[torch.Tensor], columns: dict[str, torch.Tensor], side: str | None
    ) -> tuple[torch.Tensor, tuple[Figures, ...]]:
        weights: dict[str, torch.Tensor] = {}
        for group, names, flat in zip(self._groups, self._names, flats, strict=True):
            weights.update(zip(names, group.split(flat), strict=True))
        total, figures = functional_call(self._lossed, weights, (columns, side))
        return total, figures

    def _traced(
        self, columns: dict[str, torch.Tensor], rates: list[torch.Tensor]
    ) -> tuple[Figures, Figures, Figures, torch.Tensor]:
        flats, sides = [group.flat.data for group in self._groups], self._optim.sides
        passes = sides.names if sides is not None and sides.separate_backward else [None]
        found = [grad_and_value(self._loss_of, has_aux=True)(flats, columns, side) for side in passes]
        grads = [[grads[i] for grads, _ in found] for i in range(len(flats))]
        losses, figures, kept, resting, totals = found[0][1][1]
        figures = dict(figures)
        check = totals["total"]
        for name, own in zip(self._optimizers, grads, strict=True):
            if name in resting:
                continue
            clippings = self._optim.clippings(name, own)
            norms = self._optim.norms(clippings)
            figures.update(self._optim.norms_by_name(clippings, norms))
            check = sum(norms, check)
            if self._masks:  # scaling slices in place would be twice as slow
                norm = norms[0]
                for mask, other in zip(self._masks, norms[1:], strict=True):
                    norm = torch.lerp(norm, other, mask)
                assert clippings[0].limit is not None  # sides have masks only where they are limited
                own[0] = own[0] * scale_to(norm, clippings[0].limit)
                continue
            self._optim.clip(clippings, norms)
        is_fine = check.isfinite()
        for (name, optimizer), own, rate in zip(self._optimizers.items(), grads, rates, strict=True):
            if name not in resting:
                optimizer.traced_step(sum(own[1:], own[0]), rate, is_fine)
        return {name: part.detach() for name, part in losses.items()}, figures, kept, is_fine


def _refuse_changes(thing: Any, before: Mapping[str, Any]) -> None:
    """Raise a SettingsError if a number, text or boolean among the attributes is not as ``before``."""
    for name, value in getattr(thing, "__dict__", {}).items():
        old = before.get(name, getattr(type(thing), name, None))  # of the class, until it is set on the object
        is_plain = isinstance(old, bool | int | float | str) and isinstance(value, bool | int | float | str)
        if is_plain and repr(old) != repr(value) and name != "_checked":  # which a `Module` sets itself
            raise SettingsError(
                f"`compile` is True, but the loss changes `{name}` of {type(thing).__name__} from {old!r} to "
                f"{value!r}. A compiled step may call the loss several times, or not at all: change it in "
                "`after_step`, or leave `compile` out."
            )


def load_triton(device: torch.device) -> None:
    """Load triton, which torch.compile imports, before another LLVM is in this process; or keep it from being imported.

    Triton has its own LLVM, and importing it ends the process with a segmentation fault if Mesa has loaded another one
    before, as MuJoCo does when it renders without a graphics card. On a CPU nothing needs triton.

    Raises:
        SettingsError: on a GPU, where triton is needed, and another LLVM is loaded.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        return
    if not _has_llvm():
        importlib.import_module("triton")
    elif device.type == "cpu":
        sys.modules["triton"] = None  # type: ignore[assignment]  # importing it now raises ModuleNotFoundError
    else:
        raise SettingsError(
            "`compile` is True, but Mesa has rendered in this process with an LLVM that can't share a process with "
            "the one of triton, which compiles for GPUs: train where nothing was rendered, or leave `compile` out."
        )


def _has_llvm() -> bool:
    """Whether an LLVM library is loaded, as far as the system tells."""
    try:
        return "libLLVM" in Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return False


def check_compilable(optimizers: Optimizers, *, accumulate: int, changes_gradients: bool) -> None:
    """Raise a SettingsError if steps do something that can't be compiled."""
    reasons = [f"optimizer `{n}` is not Adam" for n, one in optimizers.by_name.items() if not isinstance(one, Adam)]
    reasons += [f"`accumulate` is {accumulate}"] if accumulate != 1 else []
    reasons += ["on_gradients() is defined"] if changes_gradients else []
    for what in reasons:
        raise SettingsError(f"`compile` is True, but {what}, which can't be compiled into a step: leave one out.")


_KINDS_OF_GUARDS = frozenset(
    {
        *("CONSTANT_MATCH", "EQUALS_MATCH", "CLOSURE_MATCH", "SEQUENCE_LENGTH"),
        *("TYPE_MATCH", "ID_MATCH", "BUILTIN_MATCH", "TENSOR_MATCH"),
        *("NOT_PRESENT_IN_GENERIC_DICT", "DICT_CONTAINS", "DICT_NOT_CONTAINS"),
    }
)
"""Torch's names of checks of values, types and attributes, not of layers, hooks and whole modules."""
_NOT_KEPT = ("['__import_torch", "['__import_etude_dot", "['__builtins", "_hooks", "._parameters", "___unnamed_scope")
"""Parts of the guard names of what does not change."""
_READ_ANEW = "___from_numpy"
"""Part of the guard names of NumPy values, which are inputs of the graph."""


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a bound method with few guards.

    The graph depends only on the batch, whose size is checked here, and on what a loss or a module keeps and reads;
    checking everything else again would cost a fifth of a step. Torch keeps compiled graphs by code object. Without
    those guards each learner therefore needs its own code object, or it would get another's graph.
    """
    function = step.__func__  # type: ignore[attr-defined]
    own = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    bound = types.MethodType(own, step.__self__)  # type: ignore[attr-defined]
    return torch.compile(bound, dynamic=False, fullgraph=True, options={"guard_filter_fn": _of_what_is_kept})


def _of_what_is_kept(guards: Sequence[Any]) -> list[bool]:
    kept = []
    for guard in guards:
        name = guard.name
        is_of_loss = "self._lossed.loss" in name  # class attributes, too, as one of the object may hide them later
        is_ours = ("self._lossed" in name or "G[" in name) and not any(part in name for part in _NOT_KEPT)
        kept.append(_READ_ANEW not in name and (is_of_loss or (is_ours and guard.guard_type in _KINDS_OF_GUARDS)))
    return kept
