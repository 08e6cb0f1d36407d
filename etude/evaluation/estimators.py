# SPDX-License-Identifier: Apache-2.0
"""Collect figures of episodes in one pass over the data, and compute estimates, intervals and a verdict from them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.display import json_line, short
from etude.evaluation.fqe import FQE, Values
from etude.evaluation.policies import Chunks, Floats
from etude.experience import Experience


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of the discounted return of an episode."""

    mean: float
    """The estimate; NaN if it is undefined, because the policy could not have played any of the recorded episodes."""
    low: float
    """The lower bound of the confidence interval; NaN if there is none."""
    high: float
    """The upper bound; NaN if there is none."""
    effective_sample_size: float | None = None
    """Kish's effective sample size: the number of the policy's own episodes that would be as informative. It is the
    number of recorded episodes if the policy itself played them, and about 1 if one episode outweighs all others. For
    stepwise estimators, the mean over steps. None for estimators without weights."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OffPolicyEvaluation:
    """The estimated return of a policy by each estimator; ``print`` it, or see `estimates`."""

    estimates: dict[str, Estimate]
    """The estimates, by method."""
    behaviour: Estimate
    """The mean discounted return of the episodes as they were played."""
    episodes: int
    """The number of whole episodes used; with several agents, each agent's part in an episode counts as one."""
    steps: int
    """The number of steps in these episodes."""
    gamma: float
    """Discount factor."""
    confidence: float
    """Confidence level of the intervals."""
    seed: int
    """Seed of the bootstrap and the fits."""
    module: str
    """Id of the module whose policy was evaluated."""
    explore: bool
    """Whether the policy samples its actions; if False, it takes the most likely ones."""
    behaviour_policy: str | None
    """The source of the behaviour policy's probabilities: ``recorded``, ``fitted``, or None if not needed."""
    mean_weight: float | None
    """The mean importance weight of whole episodes; None if no probabilities are known. Its expected value is 1 if the
    behaviour policy could take every action that the evaluated policy takes, and its probabilities are right. If the
    mean is far from 1, one of these may not hold."""
    trusted: bool | None
    """False if no estimate can be trusted, including those by fitted values; `distrust` says why. None if this can't be
    decided, because no probabilities are known."""
    distrust: str | None
    """Why no estimate can be trusted; None unless `trusted` is False."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """The number of agents' parts in episodes that were left out because they are not whole, by reason."""
    notes: tuple[str, ...] = ()
    """Caveats about these estimates."""

    def __repr__(self) -> str:
        found = {method: estimate.mean for method, estimate in self.estimates.items()}
        return short(self, f"{self.episodes:,} episodes", behaviour=self.behaviour.mean, **found)

    def noted(self, *notes: str) -> "OffPolicyEvaluation":
        """Return a copy with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return the fields as a JSON object; NaN becomes null."""
        return json_line(self.to_dict())

    def __str__(self) -> str:
        """A table of the estimates, with a description of the data above and the notes below it."""
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


Ints: TypeAlias = NDArray[np.int64]
Singles: TypeAlias = NDArray[np.float32]
Statistic: TypeAlias = Callable[[Floats], Floats]
"""Computes estimates ``[B]`` from ``[B, episodes]``, how often each resample has each episode; NaN if all weights are
0."""

PLAYED: Final = "as played"
NEED_WEIGHTS: Final = ("is", "wis", "pdis", "wpdis", "dr", "wdr")
"""Estimators that need probabilities of actions."""
NEED_VALUES: Final = ("dm", "dr", "wdr", "fqe")
"""Estimators that need fitted values."""
_KNOWN_FROM: Final = 100
"""The least number of effective episodes for which the standard error of the mean weight is reliable."""
_UNLIKELY: Final = 6
"""A difference of more standard errors is more than chance, even for weights with a long tail."""
TRUSTED_FROM: Final = 10
"""The least number of effective episodes for estimates to be trusted."""

NEVER: Final = -1e4
"""Replaces the logarithm of a ratio of 0 in sums."""
MOST: Final = 690.0
"""Upper limit of the logarithms of weights, to prevent overflow."""
BLOCK: Final = 4_000_000
"""The most numbers in a table of weights or counts; larger tables are processed in parts."""


@dataclasses.dataclass
class EpisodeFigures:
    """Figures with a row for each agent's part in a whole episode. Figures that were not requested are empty."""

    episode_id: NDArray[np.object_]
    lengths: Ints
    truncated: NDArray[np.bool_]
    """Whether it was truncated and not terminated, so that the steps that would have followed have a value."""
    blind: NDArray[np.bool_]
    """Whether it was truncated and not terminated, and the observation after its last step is unknown."""
    returns: Floats
    """Returns, discounted from each episode's first step on."""
    log_weight: Floats
    """Logarithms of the weights of whole episodes; -inf if the policy would never have played one."""
    per_decision: Floats
    """Sums of discounted rewards, each weighted by the ratio up to its step (Precup, Sutton & Singh 2000, eq. 5)."""
    log_ratio: Singles
    """``[steps]``: logarithms of the cumulative ratios up to each step."""
    reward: Singles
    """``[steps]``: discounted rewards."""
    advantage: Singles
    """``[steps]``: ``gamma^t * (r + gamma * V(s') - Q(s, a))``."""
    start: Floats
    """The value of the first observation, by the members of the fit that have not learned from the episode."""
    doubly_robust: Floats
    """The terms whose mean is ``dr``; see `etude.evaluation.evaluate`."""
    member_starts: Singles
    """``[rows, members]``: the value of the first observation by each member of the fit."""
    member_times: NDArray[np.uint8]
    """``[rows, members]``: how often the row is in each member's bootstrap sample."""
    effective_by_step: float = 0.0
    """See `EffectiveByStep`."""

    @property
    def weight(self) -> Floats:
        """Weights of whole episodes."""
        return np.exp(np.minimum(self.log_weight, MOST))

    @property
    def scaled_weight(self) -> Floats:
        """Weights of whole episodes, scaled so that the largest is 1."""
        most = self.log_weight.max(initial=-np.inf)
        return np.exp(self.log_weight - (most if np.isfinite(most) else 0.0))


def collect(
    chunks: Chunks, log_ratio: Callable[[Experience], Floats] | None, fqe: FQE | None, gamma: float, *, by_step: bool
) -> EpisodeFigures:
    """Collect figures in one pass over at least one episode.

    Args:
        chunks: Starts the pass.
        log_ratio: Returns ``[steps]``: log-probabilities under the target policy minus those under the behaviour
            policy; None if no weights are needed.
        fqe: The fitted action values; None if no values are needed.
        gamma: Discount factor, 0 to 1.
        by_step: Whether to keep figures of steps.
    """
    rows: list[dict[str, Any]] = []
    by_steps = EffectiveByStep()
    for episodes in chunks():
        summed = None if log_ratio is None else _summed(log_ratio(episodes), episodes)
        if summed is not None:
            by_steps.add(summed, episodes)
        rows.append(_figures(episodes, summed, None if fqe is None else fqe.values(episodes), gamma, by_step))
    columns: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    figures = EpisodeFigures(**columns)
    if log_ratio is not None:
        figures.effective_by_step = by_steps.mean(gamma)
    return figures


def _figures(
    episodes: Experience, summed: Floats | None, values: Values | None, gamma: float, by_step: bool
) -> dict[str, Any]:
    first, segments = episodes.offsets[:-1], episodes.segments
    discount = gamma ** episodes.t().astype(np.float64)
    reward = discount * episodes.steps[col.REWARD].astype(np.float64)
    out: dict[str, Any] = {
        field.name: np.zeros(0) for field in dataclasses.fields(EpisodeFigures) if field.default is dataclasses.MISSING
    }
    out |= {
        "episode_id": np.asarray(segments.episode_id),
        "lengths": episodes.lengths,
        "truncated": segments.truncated & ~segments.terminated,
        "blind": segments.truncated & ~segments.terminated & ~segments.has_final_obs,
        "returns": np.add.reduceat(reward, first),
    }
    advantage = np.zeros(0)
    if values is not None:
        advantage = reward + discount * (gamma * values.after - values.taken)
        out["start"] = values.at[first]
        out |= {"member_starts": values.start.T.astype(np.float32), "member_times": values.times}
    if summed is None:
        return out
    weight = np.exp(np.minimum(summed, MOST))
    out |= {"log_weight": summed[episodes.offsets[1:] - 1], "per_decision": np.add.reduceat(weight * reward, first)}
    if values is not None:
        out["doubly_robust"] = out["start"] + np.add.reduceat(weight * advantage, first)
    if by_step:
        steps = {"log_ratio": summed, "reward": reward, "advantage": advantage}
        out |= {name: column.astype(np.float32) for name, column in steps.items()}
    return out


def _summed(log_ratio: Floats, episodes: Experience) -> Floats:
    """``[steps]``: the cumulative sum of log ratios from each episode's first step; -inf from the first -inf on."""
    finite = np.maximum(log_ratio, NEVER)
    total = np.cumsum(finite)
    before = total[episodes.offsets[:-1]] - finite[episodes.offsets[:-1]]
    summed = total - np.repeat(before, episodes.lengths)
    return np.where(summed <= 0.5 * NEVER, -np.inf, summed)


class EffectiveByStep:
    """Accumulates the effective sample size of the weights at each step, chunk by chunk.

    An episode that has ended keeps its last weight.
    """

    def __init__(self) -> None:
        self._running = np.zeros((3, 0))
        self._ended = np.zeros((3, 0))

    def add(self, summed: Floats, episodes: Experience) -> None:
        """Add a chunk of episodes with the logarithms of its weights, ``[steps]``."""
        weight = np.exp(np.minimum(summed, MOST / 2))
        t, lengths, last = episodes.t(), episodes.lengths, weight[episodes.offsets[1:] - 1]
        longest = max(self._running.shape[1], int(lengths.max()) + 1)
        self._running, self._ended = (
            np.pad(table, ((0, 0), (0, longest - table.shape[1]))) for table in (self._running, self._ended)
        )
        for power in range(3):
            self._running[power] += np.bincount(t, weight**power, longest)
            self._ended[power] += np.bincount(lengths, last**power, longest)

    def mean(self, gamma: float) -> float:
        """Return the mean over all recorded steps, each weighted by its discount."""
        _, sums, squares = self._running + self._ended.cumsum(1)
        sizes = np.divide(sums**2, squares, out=np.zeros_like(sums), where=squares > 0)
        share = self._running[0] * gamma ** np.arange(len(sums), dtype=np.float64)
        return float((sizes * share).sum() / share.sum())


def effective(weights: Floats) -> float:
    """Kish's effective sample size, ``sum(w)^2 / sum(w^2)``; 0 if all weights are 0."""
    most = weights.max(initial=0.0)
    if most <= 0:
        return 0.0
    scaled = weights / most
    return float(scaled.sum() ** 2 / np.square(scaled).sum())


# -- estimates -------------------------------------------------------------------------------------------------------


def estimates_of(
    figures: EpisodeFigures, methods: Sequence[str], *, confidence: float, resamples: int, seed: int
) -> dict[str, Estimate]:
    """Return the estimate by each of ``methods``, and as `PLAYED` the mean recorded return."""
    statistics = {PLAYED: ratio(figures.returns)}
    statistics |= {name: _statistic(name, figures) for name in methods if name in NEED_WEIGHTS}
    cluster = np.unique(figures.episode_id.astype(str), return_inverse=True)[1]
    found = intervals(statistics, cluster, confidence=confidence, resamples=resamples, seed=seed)
    out = {PLAYED: Estimate(*found[PLAYED])}
    for name in methods:
        if name in found:
            size = effective(figures.scaled_weight) if name in ("is", "wis") else figures.effective_by_step
            out[name] = Estimate(*found[name], size)
        else:
            out[name] = _by_members(name, figures, confidence, has_interval=bool(cluster.any()))
    return out


def _statistic(name: str, figures: EpisodeFigures) -> Statistic:
    if name == "is":
        return ratio(figures.weight * figures.returns)
    if name == "wis":
        return ratio(figures.scaled_weight * figures.returns, figures.scaled_weight)
    if name == "pdis":
        return ratio(figures.per_decision)
    if name == "dr":
        return ratio(figures.doubly_robust)
    if name == "wpdis":
        return stepwise(np.zeros(len(figures.lengths)), figures.log_ratio, figures.reward, figures.lengths)
    return stepwise(figures.start, figures.log_ratio, figures.advantage, figures.lengths)


def _by_members(name: str, figures: EpisodeFigures, confidence: float, *, has_interval: bool) -> Estimate:
    """Estimate by fitted values, with an interval from the spread of the members over their bootstrap samples."""
    starts, times = figures.member_starts.astype(np.float64), figures.member_times
    mean = float(figures.start.mean() if name == "dm" else starts.mean())
    members = _divided((starts * times).sum(0), times.sum(0, dtype=np.float64))
    members = members[np.isfinite(members)]
    if len(members) < 2 or not has_interval:
        return Estimate(mean, math.nan, math.nan)
    reach = student_t(confidence, len(members) - 1) * float(members.std(ddof=1))
    return Estimate(mean, mean - reach, mean + reach)


def ratio(top: Floats, bottom: Floats | None = None) -> Statistic:
    """``sum(count * top) / sum(count * bottom)``; a mean, if ``bottom`` is 1."""
    below = np.ones_like(top) if bottom is None else bottom
    return lambda counts: _divided(counts @ top, counts @ below)


def stepwise(base: Floats, log_w: Singles, x: Singles, lengths: Ints) -> Statistic:
    """``mean(base) + sum over t of sum(count * w[t] * x[t]) / sum(count * w[t])``.

    An episode that has ended keeps its last weight, and adds nothing more (Thomas & Brunskill 2016, section 5).

    Args:
        base: float64 ``[episodes]``.
        log_w: float32 ``[steps]``: logarithms of the weights of all episodes, concatenated; -inf for a weight of 0.
        x: float32 ``[steps]``.
        lengths: int64 ``[episodes]``.
    """
    first = np.cumsum(lengths) - lengths
    longest, width = int(lengths.max(initial=0)), max(1, BLOCK // max(1, len(lengths)))

    def tables() -> Iterator[tuple[Floats, Floats]]:
        """Weights and weighted ``x``, ``[episodes, steps of a block]``; the largest weight of a step is 1."""
        for begin in range(0, longest, width):
            t = np.arange(begin, min(begin + width, longest))
            rows = first[:, None] + np.minimum(t, lengths[:, None] - 1)
            log_weight = log_w[rows].astype(np.float64)
            most = log_weight.max(0)
            weight = np.exp(log_weight - np.where(np.isfinite(most), most, 0.0))
            yield weight, np.where(t < lengths[:, None], weight * x[rows], 0.0)

    def statistic(counts: Floats) -> Floats:
        total = ratio(base)(counts)
        for weight, weighted in tables():
            total = total + _divided(counts @ weighted, counts @ weight).sum(1)
        return total

    return statistic


def _divided(top: Floats, bottom: Floats) -> Floats:
    """Divide; NaN where ``bottom`` is 0, because nothing has any weight."""
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def intervals(
    statistics: Mapping[str, Statistic], cluster: Ints, *, confidence: float, resamples: int, seed: int
) -> dict[str, tuple[float, float, float]]:
    """Return each estimate with the bounds of its interval, by bootstrap over clusters of rows (whole episodes).

    The bounds are percentiles of the estimates from resamples (Efron & Tibshirani 1993, "An introduction to the
    bootstrap", 13.3). All estimates use the same resamples. Those in which an estimate is undefined, because all
    weights are 0, are left out of its interval. The bounds are NaN if there is only one cluster or no estimate.

    Args:
        statistics: The estimators, by name.
        cluster: int64 ``[rows]``: the cluster of each row, from 0; the rows of a cluster are drawn together.
        confidence: Confidence level of the intervals, between 0 and 1.
        resamples: The number of bootstrap samples.
        seed: Seed of the draws.
    """
    num = int(cluster.max()) + 1
    rng = np.random.default_rng(seed)
    draws: dict[str, list[Floats]] = {name: [] for name in statistics}
    step = max(1, BLOCK // num)
    for begin in range(0, resamples, step):
        size = min(step, resamples - begin)
        index = rng.integers(0, num, (size, num)) + np.arange(size)[:, None] * num
        counts = np.bincount(index.reshape(-1), minlength=size * num).reshape(size, num)[:, cluster].astype(np.float64)
        for name, statistic in statistics.items():
            draws[name].append(statistic(counts))
    found = {}
    for name, statistic in statistics.items():
        estimate = float(statistic(np.ones((1, len(cluster))))[0])
        drawn = np.concatenate(draws[name])
        drawn = drawn[np.isfinite(drawn)]
        low = high = math.nan
        if num > 1 and math.isfinite(estimate) and len(drawn):
            low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
        found[name] = (estimate, low, high)
    return found


def student_t(confidence: float, freedom: int) -> float:
    """Return how many standard errors a two-sided interval reaches, by Student's t with ``freedom`` degrees of freedom.

    It is computed by an expansion (Abramowitz & Stegun 1964, 26.7.5), with an error below 1 % from 5 degrees of freedom
    at confidence 0.95.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms: Sequence[float] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**i for i, term in enumerate(terms)))


# -- verdict and notes -----------------------------------------------------------------------------------------------


def why_distrusted(figures: EpisodeFigures) -> str | None:
    """Return why no estimate can be trusted; None if there is no reason against it.

    The reasons are fewer than `TRUSTED_FROM` whole or effective episodes, and a mean weight that is far from 1.
    """
    num = len(set(figures.episode_id.tolist()))
    if num < TRUSTED_FROM:
        return f"there are {num} whole episodes, but at least {TRUSTED_FROM} are needed."
    if not len(figures.log_weight):
        return None
    whole = effective(figures.scaled_weight)
    if not whole:
        return (
            f"the weights of all {len(figures.lengths):,} episodes are 0: none is one that the policy could have "
            "played. Fitted values (dm, dr, wdr, fqe) are then of actions that were not taken."
        )
    size = min(whole, figures.effective_by_step)
    weight = float(figures.weight.mean())
    if not 0.5 <= weight <= 2 and whole >= _KNOWN_FROM and abs(weight - 1) > _UNLIKELY * _error_of_weight(figures):
        return (
            f"the mean weight of whole episodes is {weight:.3g} rather than 1, which is more than chance: the policy "
            "takes actions that were never played, or the recorded probabilities are wrong."
        )
    if size >= TRUSTED_FROM:
        return None
    return (
        f"the effective sample size is {size:.1f} of {len(figures.lengths):,} episodes, but must be at least "
        f"{TRUSTED_FROM}. The policy is far from the one that played, so intervals miss the true value, and fitted "
        "values (dm, dr, wdr, fqe) are of actions that were hardly ever taken."
    )


def _error_of_weight(figures: EpisodeFigures) -> float:
    """The standard error of the mean weight of whole episodes; 0 if too few episodes count to know it."""
    if not len(figures.log_weight) or effective(figures.scaled_weight) < _KNOWN_FROM:
        return 0.0
    _, episode = np.unique(figures.episode_id.astype(str), return_inverse=True)
    mean = np.bincount(episode, figures.weight) / np.bincount(episode)  # over the agents of an episode
    return float(mean.std() / np.sqrt(len(mean)))


def notes_on(figures: EpisodeFigures, methods: Sequence[str], gamma: float, *, explore: bool) -> list[str]:
    """Return caveats; ``explore`` says whether the policy samples its actions."""
    notes = []
    if len(set(figures.episode_id.tolist())) < 2:
        notes.append("one episode has no interval")
    weight = float(figures.weight.mean()) if len(figures.log_weight) else 1.0
    if weight < 0.5 and not explore:
        notes.append(
            f"the mean weight of whole episodes is {weight:.3g} rather than 1: the evaluated policy always takes its "
            "most likely action, and an episode with any other action counts for nothing. Let it sample its actions "
            "(explore=True; on the command line without --greedy)"
        )
    elif (error := _error_of_weight(figures)) and abs(weight - 1) > max(_UNLIKELY * error, 0.02):
        why = (
            "the recorded probabilities are too small, or the policy learned from these episodes"
            if weight > 1
            else "the policy takes actions that were never played, or the recorded probabilities are too large"
        )
        notes.append(
            f"the mean weight of whole episodes is {weight:.3g} ± {error:.2g} rather than 1, which is more than "
            f"chance: {why}"
        )
    elif not 0.5 <= weight <= 2:
        notes.append(
            f"the mean weight of whole episodes is {weight:.3g} rather than 1: the policy takes actions that were "
            "hardly ever played, or the episodes are too few for their length"
        )
    if figures.blind.any() and set(methods) & set(NEED_VALUES):
        notes.append(
            f"the observation after the last step of {int(figures.blind.sum()):,} truncated episodes was not recorded: "
            "dm, dr, wdr and fqe take the last one in its place"
        )
    cut = figures.truncated & (gamma**figures.lengths > 0.01)
    if cut.any() and set(methods) & set(NEED_VALUES):
        notes.append(
            f"{int(cut.sum()):,} episodes were truncated: dm, dr, wdr and fqe include the value of what would have "
            "followed, other estimates end there"
        )
    return notes
