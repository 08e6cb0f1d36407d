# SPDX-License-Identifier: Apache-2.0
"""Loss: named parts that are summed, and figures that are only logged."""

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from etude.display import short
from etude.errors import ModuleError

Figures: TypeAlias = dict[str, Any]
"""Scalars by name: tensors or numbers."""

APART = ("value", "critic")
"""Parts of a loss whose gradients are clipped separately, and whose parameters can have a separate learning rate. All
other parts together are the policy's."""


_OF_LEARNERS = ("lr", "grad_norm", "skipped_steps", "threads")
"""Names of the figures that a learner logs in addition to those of the loss."""

_HAS_GRADIENT = attrgetter("requires_grad")


class Loss:
    """The parts of a loss by name; their sum is what is minimised, and each is logged.

    Squared errors of values can be thousands of times as large as the loss of a policy. So the gradient of a part
    called ``value`` or ``critic`` is clipped separately (see the setting `grad_clip`).

    Each part is a mean over the rows of the batch: if several learners share a step, their losses are averaged in
    proportion to their rows (see `ModuleLearner.team`).

    >>> Loss(policy=policy_loss, value=0.5 * value_loss).log(kl=kl)

    Args:
        parts: Scalar tensors, already weighted.

    Raises:
        ModuleError: a part has no name, or there is no part.
    """

    def __init__(self, *unnamed: Any, **parts: torch.Tensor) -> None:
        if unnamed:
            raise ModuleError("the parts of a Loss have names: write Loss(policy=...), or another name.")
        if not parts:
            raise ModuleError("a Loss needs at least one part, such as Loss(policy=...).")
        self.parts = parts
        self.logged: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.resting: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return short(self, *self.parts)

    def log(self, **figures: torch.Tensor | float) -> "Loss":
        """Add numbers and scalar tensors that are logged with the parts and do not affect the gradient.

        Raises:
            ModuleError: a figure is not a single number, or has a name that a learner logs, such as ``grad_norm``.
        """
        on = next((part.device for part in self.parts.values() if isinstance(part, torch.Tensor)), None)
        for name, figure in figures.items():
            if name.partition("/")[0] in _OF_LEARNERS:
                raise ModuleError(f"Loss.log got `{name}`, which the learner logs itself: give it another name.")
            try:
                logged = torch.as_tensor(figure, device=on).detach()
            except (TypeError, ValueError, RuntimeError):
                raise ModuleError(
                    f"Loss.log got a {type(figure).__name__} as `{name}`: it logs numbers and scalar tensors."
                ) from None
            if logged.numel() != 1:
                raise ModuleError(
                    f"Loss.log got a tensor of shape {tuple(logged.shape)} as `{name}`: it logs numbers and scalar "
                    "tensors, such as its mean."
                )
            self.logged[name] = logged
        return self

    def keep(self, **rows: torch.Tensor) -> "Loss":
        """Keep tensors ``[B, ...]``, one result per row, without gradients, for the caller of the update
        (`ModuleLearner.kept`)."""
        self.kept.update({name: row.detach() for name, row in rows.items()})
        return self

    def rest(self, *optimizers: str) -> "Loss":
        """Name optimizers that make no step this time, such as that of a policy that is trained every other step."""
        self.resting = self.resting.union(optimizers)
        return self

    @property
    def total(self) -> torch.Tensor:
        """The sum of the parts."""
        first, *rest = self.parts.values()
        for part in rest:
            first = first + part
        return first

    @property
    def sides(self) -> dict[str, torch.Tensor]:
        """The parts ``value`` and ``critic``, if there are any, and ``policy``: the sum of all others."""
        policy: torch.Tensor | None = None
        sides: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            if name in APART:
                sides[name] = part
            else:
                policy = part if policy is None else policy + part
        return sides if policy is None else {"policy": policy, **sides}


def numbers_of(scalars: Sequence[torch.Tensor | float]) -> list[float]:
    """Scalars as Python numbers, with at most one synchronisation with a device."""
    found: list[Any] = list(scalars)
    elsewhere = []
    for i, scalar in enumerate(scalars):
        if not isinstance(scalar, torch.Tensor):
            continue
        if scalar.device.type == "cpu":
            found[i] = scalar.item()
        else:
            elsewhere.append(i)
    if elsewhere:
        moved = torch.stack([found[i].float() for i in elsewhere]).tolist()
        for i, number in zip(elsewhere, moved, strict=True):
            found[i] = number
    return found


def loss_from(made: Any, name: str, mean: str = "its rows") -> Loss:
    """The `Loss` that a loss function returned; a scalar tensor becomes its only part, ``loss``.

    Args:
        made: The returned value.
        name: The function's name in messages.
        mean: What the mean should be taken over, for messages.

    Raises:
        ModuleError: it is neither, or a part is not a scalar tensor.
    """
    if isinstance(made, torch.Tensor):
        made = Loss(loss=made)
    if not isinstance(made, Loss):
        hint = "Return Loss(**parts) to have them summed and logged." if isinstance(made, dict) else ""
        hint = "Does it lack a `return`?" if made is None else hint
        raise ModuleError(
            f"{name} returned a {type(made).__name__}: it must return a scalar tensor or a Loss, such as "
            f"etude.Loss(policy=policy_loss, value=value_loss). {hint}".rstrip()
        )
    parts: dict[str, Any] = dict(made.parts)
    for part, value in parts.items():
        if isinstance(value, int | float):
            made.parts[part] = torch.as_tensor(float(value))
        elif not isinstance(value, torch.Tensor):
            raise ModuleError(f"{name} gave a {type(value).__name__} as `{part}`: it must be a scalar tensor.")
        elif value.dim():
            raise ModuleError(f"{name} gave `{part}` of shape {tuple(value.shape)}: take its mean, over {mean}.")
    return made


def checked(loss: Callable[..., Any]) -> Callable[..., Loss]:
    """Wrap ``loss`` as ``(module, batch) -> Loss``, with its result checked by `loss_from`.

    Raises:
        ModuleError: it can't be called with a module and a batch.
    """
    name = getattr(loss, "__qualname__", type(loss).__name__)
    if not callable(loss):
        raise ModuleError(f"the loss is {loss!r}: it must be a function, loss(module, batch) -> Loss.")
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError as error:
        raise ModuleError(f"{name} can't be called with (module, batch): {error}. Let it take both.") from error
    except ValueError:
        pass  # Python doesn't know the signature

    @functools.wraps(loss)
    def checked_loss(module: Any, batch: Any) -> Loss:
        made = loss_from(loss(module, batch), name)
        needs_gradient = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if needs_gradient and not any(map(_HAS_GRADIENT, made.parts.values())):
            raise ModuleError(
                f"no part of what {name} returned has a gradient: compute it from the module's output for the batch, "
                "without detach(), item(), numpy() or torch.no_grad()."
            )
        return made

    return checked_loss
