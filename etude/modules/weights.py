# SPDX-License-Identifier: Apache-2.0
"""Weights that come from elsewhere: a checkpoint, or another process."""

from collections.abc import Mapping

import torch
from torch import nn

from etude.errors import CheckpointError


def load_weights(module: nn.Module, weights: Mapping[str, torch.Tensor], *, shared: bool = False) -> None:
    """Copy weights into a module, in place.

    Args:
        module: Takes them.
        weights: As in its ``state_dict()``.
        shared: Let parameters have the memory that is given, where it is like theirs, rather than a copy. Nobody may
            write to it then. Buffers, which a module may write to, are copied.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    own = module.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights or name not in own:
            where = "the checkpoint" if name not in weights else "the module"
            raise CheckpointError(f"{where} has no weight `{name}`: the checkpoint is of another module.")
        if own[name].shape != weights[name].shape:
            raise CheckpointError(
                f"weight `{name}` has shape {tuple(weights[name].shape)} in the checkpoint, but "
                f"{tuple(own[name].shape)} in the module: the checkpoint is of another module."
            )
    parameters = dict(module.named_parameters(remove_duplicate=False)) if shared else {}
    with torch.no_grad():
        for name, value in own.items():
            given = weights[name]
            if name in parameters and _is_alike(given, value):
                parameters[name].data = given
            else:
                value.copy_(given)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and a.stride() == b.stride()
