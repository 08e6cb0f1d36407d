# SPDX-License-Identifier: Apache-2.0
"""What an off-policy evaluation found."""

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The discounted return of an episode, estimated."""

    mean: float
    """The estimate; NaN where it is not defined, as no recorded episode is one that the policy could have played."""
    low: float
    """The lower bound of the confidence interval; NaN if there is none."""
    high: float
    """The upper bound."""
    effective_sample_size: float | None = None
    """So many episodes of the policy itself would say as much (Kish): all of them where it is the policy that played,
    about 1 where one episode outweighs all others. For estimates by steps, the mean over steps. None for those that
    weigh nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyEvaluation:
    """What a policy is worth by each estimator; ``print`` it, or see `estimates`."""

    estimates: dict[str, Estimate]
    """By method."""
    behaviour: Estimate
    """The mean discounted return of the episodes as they were played."""
    episodes: int
    """Whole episodes that it is estimated from; of many agents, their parts in episodes."""
    steps: int
    """Steps of these."""
    gamma: float
    """Discount."""
    confidence: float
    """Of the intervals."""
    seed: int
    """Of the bootstrap and of fits."""
    module: str
    """Whose policy it is."""
    explore: bool
    """The policy draws its actions; else it takes the most likely ones."""
    behaviour_policy: str | None
    """Where the probabilities of the policy that played are from: ``recorded``, ``fitted``, or None: not needed."""
    mean_weight: float | None
    """Mean importance weight of whole episodes, None where no probabilities are known: 1 on average, where the policy
    that played could do all that is done by the one evaluated, and its probabilities are right. Far from 1, neither is
    sure."""
    trusted: bool | None
    """False where no estimate can be trusted, those by fitted values included; `distrust` says why. None where no
    probabilities are known, so that nothing says whether they can."""
    distrust: str | None
    """Why no estimate can be trusted; None unless `trusted` is False."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """Agents' parts in episodes that are not whole, and so left out, by reason."""
    notes: tuple[str, ...] = ()
    """What to mind about these estimates."""

    def noted(self, *notes: str) -> "OffPolicyEvaluation":
        """The same with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The fields as one JSON object; null stands for NaN."""
        return json.dumps(_plain(self.to_dict()), allow_nan=False)

    def __str__(self) -> str:
        """A table of the estimates, with what they are from above it and the notes below it."""
        acts = "drawing its actions" if self.explore else "taking its most likely actions"
        head = [
            f"module {self.module!r}, {acts}, over {self.episodes:,} episodes, {self.steps:,} steps",
            f"return discounted by {self.gamma:g}; intervals of {self.confidence:.0%}"
            + (f"; probabilities of the policy that played: {self.behaviour_policy}" if self.behaviour_policy else "")
            + (f"; mean weight {self.mean_weight:.3g}" if self.mean_weight is not None else ""),
            *([f"no estimate can be trusted: {self.distrust}"] if self.distrust else []),
        ]
        rows = [("", "estimate", "low", "high", "effective episodes")]
        for name, estimate in {"as played": self.behaviour, **self.estimates}.items():
            size = estimate.effective_sample_size
            figures = [_shown(x) for x in (estimate.mean, estimate.low, estimate.high)]
            rows.append((name, *figures, "" if size is None else f"{size:,.1f}"))  # type: ignore[arg-type]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        left = [f"left out: {count:,} {reason}" for reason, count in self.left_out.items()]
        return "\n".join([*head, *table, *left, *(f"note: {note}" for note in self.notes)])


def _shown(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:,.4g}" if abs(x) < 10_000 else f"{x:,.0f}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
