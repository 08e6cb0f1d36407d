# SPDX-License-Identifier: Apache-2.0
"""From figures of episodes to estimates with intervals, and to what is to be said of them."""

import math
from collections.abc import Sequence

import numpy as np

from etude.evaluation.figures import Figures
from etude.evaluation.result import Estimate
from etude.evaluation.statistics import Ratio, Statistic, Stepwise, effective, intervals, student_t

PLAYED = "as played"
FEW = 10
"""Effective episodes below which estimates are not to be relied on."""


def estimates_of(
    figures: Figures, methods: Sequence[str], *, confidence: float, resamples: int, seed: int
) -> dict[str, Estimate]:
    """The estimate by each of ``methods``, and `PLAYED`: the mean return as it was."""
    cluster = np.unique(figures.episode_id.astype(str), return_inverse=True)[1]
    statistics: dict[str, Statistic] = {PLAYED: Ratio(figures.returns)}
    statistics |= {name: _statistic(name, figures) for name in methods if name not in ("dm", "fqe")}
    found = intervals(statistics, cluster, confidence=confidence, resamples=resamples, seed=seed)
    out = {PLAYED: Estimate(*found[PLAYED])}
    for name in methods:
        if name in found:
            out[name] = Estimate(*found[name], _effective(name, figures))
        else:
            out[name] = _by_members(name, figures, confidence)
    return out


def _statistic(name: str, figures: Figures) -> Statistic:
    assert figures.log_weight is not None and figures.per_decision is not None  # noqa: PT018  asked for by `name`
    if name == "is":
        return Ratio(np.exp(np.minimum(figures.log_weight, 690.0)) * figures.returns)
    if name == "wis":
        weight = _scaled(figures)
        return Ratio(weight * figures.returns, weight)
    if name == "pdis":
        return Ratio(figures.per_decision)
    if name == "dr":
        assert figures.doubly_robust is not None
        return Ratio(figures.doubly_robust)
    offsets = np.concatenate([[0], np.cumsum(figures.lengths)])
    assert figures.log_ratio is not None and figures.reward is not None  # noqa: PT018
    if name == "wpdis":
        return Stepwise(np.zeros(len(figures.lengths)), figures.log_ratio, figures.reward, offsets)
    assert figures.start is not None and figures.advantage is not None  # noqa: PT018
    return Stepwise(figures.start, figures.log_ratio, figures.advantage, offsets)


def _scaled(figures: Figures) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Weights of whole episodes, the greatest of which is 1."""
    assert figures.log_weight is not None
    most = figures.log_weight.max(initial=-np.inf)
    return np.exp(figures.log_weight - (most if np.isfinite(most) else 0.0))


def _effective(name: str, figures: Figures) -> float:
    return effective(_scaled(figures)) if name in ("is", "wis") else figures.effective_by_step


def _by_members(name: str, figures: Figures, confidence: float) -> Estimate:
    """By fitted values, with an interval by the spread of the members: that of so many bootstrap samples."""
    assert figures.start is not None and figures.member_values is not None  # noqa: PT018
    mean = float(figures.start.mean()) if name == "dm" else figures.mean_value
    members = figures.member_values[np.isfinite(figures.member_values)]
    if len(members) < 2 or len(set(figures.episode_id.tolist())) < 2:
        return Estimate(mean, math.nan, math.nan)
    reach = student_t(confidence, len(members) - 1) * float(members.std(ddof=1))
    return Estimate(mean, mean - reach, mean + reach)


def mean_weight(figures: Figures) -> float | None:
    """Of whole episodes; None where there are no weights."""
    if figures.log_weight is None:
        return None
    return float(np.exp(np.minimum(figures.log_weight, 690.0)).mean())


def _notes_on_distance(figures: Figures, methods: Sequence[str]) -> list[str]:
    """Which estimates are not to be relied on, as the policy is far from the one that played."""
    num, whole, by_step = len(figures.lengths), _effective("wis", figures), figures.effective_by_step
    notes = []

    def warn(size: float, where: str, names: list[str], what: str) -> None:
        if size < FEW and names:
            notes.append(f"of {num:,} episodes, {size:.1f} count{where}: {what.format(' and '.join(names))}")

    stepwise = [name for name in methods if name in ("pdis", "wpdis", "dr", "wdr")]
    warn(whole, "", [name for name in methods if name in ("is", "wis")], "don't rely on {}")
    warn(by_step, " at a step", stepwise, "don't rely on {}")
    rest = [name for name in methods if name in ("dm", "fqe") or (name in stepwise and by_step >= FEW)]
    far = "the policy is far from the data, so don't rely on the intervals of {}, which may leave out the truth"
    warn(whole, "", rest, far)
    return notes


def notes_on(figures: Figures, methods: Sequence[str], gamma: float, *, explore: bool = True) -> list[str]:
    """What to mind; ``explore`` says whether the policy draws its actions."""
    notes = []
    if len(set(figures.episode_id.tolist())) < 2:
        notes.append("one episode has no interval")
    if figures.log_weight is not None:
        notes += _notes_on_distance(figures, methods)
    weight = mean_weight(figures)
    if weight is not None and weight < 0.5 and not explore:
        notes.append(
            f"the mean weight of whole episodes is {weight:.3g} rather than 1: evaluated is the policy that always "
            "takes its most likely action (greedy), and an episode in which another was played counts for nothing. "
            "Let it draw its actions, or rely on dm and fqe"
        )
    elif weight is not None and not 0.5 <= weight <= 2:
        notes.append(
            f"the mean weight of whole episodes is {weight:.3g} rather than 1: the policy does what was hardly ever "
            "played, or the episodes are too few for their length"
        )
    cut = figures.truncated & (gamma**figures.lengths > 0.01)
    if cut.any() and set(methods) & {"dm", "dr", "wdr", "fqe"}:
        notes.append(
            f"{int(cut.sum()):,} episodes were truncated: dm, dr, wdr and fqe value what would have followed, other "
            "estimates end there"
        )
    return notes
