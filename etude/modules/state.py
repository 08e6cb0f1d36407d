# SPDX-License-Identifier: Apache-2.0
"""The state of recurrent nets: what a net declares, and whether it keeps to it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.columns import SEPARATOR
from etude.errors import ModuleError

Shapes = dict[str, tuple[int, ...]]


def declared_state(net: nn.Module) -> Shapes:
    """The shape of each part of one row's state, from the net's method `initial_state`; {} where it has none.

    Raises:
        ModuleError: what it gives are not float32 zeros by name, or the net's forward takes no `state`.
    """
    name, declare = type(net).__name__, getattr(net, "initial_state", None)
    if declare is None:
        return {}
    parts = declare() if callable(declare) else declare
    rule = 'such as {"h": torch.zeros(64)}: the state of one row at the start of an episode, by name.'
    if not isinstance(parts, Mapping):
        raise ModuleError(f"initial_state of {name} gave a {type(parts).__name__}: it must give tensors, {rule}")
    for part, value in parts.items():
        if not isinstance(part, str) or not part or SEPARATOR in part:
            raise ModuleError(f"initial_state of {name} has the key {part!r}: names are words without {SEPARATOR!r}.")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or bool(value.any()):
            raise ModuleError(
                f"initial_state of {name} gave `{part}` = {str(value)[:80]}, but must give zeros of float32, {rule} "
                "What is to start otherwise (a learned start, say) can be added to the zeros in forward."
            )
    if parts and "state" not in inspect.signature(net.forward).parameters:
        raise ModuleError(f"{name} has an initial_state, but its forward takes none: write forward(self, obs, state).")
    return {part: tuple(value.shape) for part, value in parts.items()}


def check_state(name: str, state: Any, wanted: Shapes) -> None:
    """Raise a ModuleError where the state that the net ``name`` returned is not of the shapes ``wanted``."""
    found = None
    if isinstance(state, Mapping):
        found = {part: tuple(getattr(value, "shape", ())) for part, value in state.items()}
    if found != wanted:
        raise ModuleError(
            f"the forward of {name} gave a `state` of shapes {found}, but its initial_state and this batch need "
            f"{wanted}: return Output(..., state=...) with the state after the last step."
        )
