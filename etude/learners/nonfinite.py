# SPDX-License-Identifier: Apache-2.0
"""What to say where a loss or its gradients are not finite."""

from collections.abc import Mapping

import torch

from etude.learners.batch import Batch
from etude.learners.team import Team


def what_was_not_finite(module_id: str, steps: int, parts: Mapping[str, torch.Tensor], batch: Batch) -> str:
    """The message for ``steps`` skipped steps in a row: the module, the parts of the loss, and the column to blame."""
    values = {name: float(part) for name, part in parts.items()}
    bad = [f"`{name}` = {value}" for name, value in values.items() if not torch.tensor(value).isfinite()]
    where = f"the loss part {', '.join(bad)}" if bad else "a gradient, though the loss itself is finite"
    return (
        f"module {module_id!r}: {steps} gradient steps in a row were skipped, because of {where}. {_suspect(batch)} "
        "The weights are as they were before. Look at the scale of observations and rewards (normalize_obs helps), "
        "lower `lr` or `grad_clip`, or allow more with `max_skipped`."
    )


def blamed(team: Team, message: str, parts: Mapping[str, torch.Tensor]) -> str:
    """Of the messages of a team's learners, the same for all: that of the first whose own loss is not finite."""
    is_to_blame = any(not part.isfinite().all() for part in parts.values())
    found = team.gathered((is_to_blame, bool(parts), message))
    return max(found, key=lambda one: one[:2])[2]


def _suspect(batch: Batch) -> str:
    """The column that holds what is not finite; else the one with the largest numbers."""
    columns = {name: c.detach().double() for name, c in batch.used.items() if c.is_floating_point() and c.numel()}
    if not columns:
        return ""
    for name, column in columns.items():
        count = int((~column.isfinite()).sum())
        if count:
            which = f"{count} numbers of {column.numel()} that are not finite"
            return f"In the last batch `{name}` holds {which} ({_of(column)})."
    name = max(columns, key=lambda name: float(columns[name].abs().max()))
    return f"In the last batch all columns are finite; the largest numbers are in `{name}` ({_of(columns[name])})."


def _of(column: torch.Tensor) -> str:
    finite = column[column.isfinite()]
    if not len(finite):
        return "none is finite"
    return f"of the others: least {finite.min():.4g}, mean {finite.mean():.4g}, greatest {finite.max():.4g}"
