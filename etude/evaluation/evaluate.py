# SPDX-License-Identifier: Apache-2.0
"""Off-policy evaluation: what a policy would earn, estimated from episodes that another one played.

With the ratio ``rho[t] = pi(a[t] | s[t]) / mu(a[t] | s[t])`` of the policy evaluated to the one that played, ``w[t]``
the product of the ratios up to step t, and ``w`` that of the whole episode:

- ``is``: mean of ``w * G``, G being the discounted return (Precup, Sutton & Singh 2000, section 2).
- ``wis``: ``sum(w * G) / sum(w)`` (likewise).
- ``pdis``: mean of ``sum over t of gamma^t * w[t] * r[t]`` (likewise, section 3: per decision).
- ``wpdis``: the same with ``w[t]`` divided by the mean of all episodes' ``w[t]`` (Thomas & Brunskill 2016, section 5).
- ``fqe``: mean of V(s[0]), fitted to all episodes (Le, Voloshin & Yue 2019).
- ``dm``: the same, by networks that have not learned from the episode whose first observation it is.
- ``dr``: mean of ``V(s[0]) + sum over t of gamma^t * w[t] * (r[t] + gamma * V(s[t+1]) - Q(s[t], a[t]))``, V and Q as in
  ``dm`` (Jiang & Li 2016, eq. 10, written as a sum).
- ``wdr``: the same with weights as in ``wpdis`` (Thomas & Brunskill 2016, section 5).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.base import Algorithm
from etude.connectors import Pipeline, overrides
from etude.errors import DataError, SettingsError
from etude.evaluation.agents import check_spaces, module_of_segments
from etude.evaluation.asked import METHODS, BehaviourLike, EvaluateOn
from etude.evaluation.behaviour import NO_LOGP, Fitted, Recorded
from etude.evaluation.estimates import PLAYED, estimates_of, mean_weight, notes_on
from etude.evaluation.figures import collect
from etude.evaluation.fqe import FQE, FQEConfig
from etude.evaluation.held_out import HeldOut, HeldOutLike, opened, where
from etude.evaluation.result import OffPolicyEvaluation
from etude.evaluation.target import Target
from etude.experience import Experience
from etude.modules import Module
from etude.recordings import Recording
from etude.recordings.screening import OnBad

LogRatio: TypeAlias = Callable[[Experience], NDArray[np.float64]]
"""Gives ``[steps]``: log-probabilities under the policy evaluated less those under the one that played."""


def evaluate_on(
    algorithm: Algorithm[Any],
    data: HeldOutLike,
    *,
    methods: Sequence[str] = METHODS,
    gamma: float = 0.99,
    confidence: float = 0.95,
    seed: int = 0,
    explore: bool = True,
    behaviour: BehaviourLike = "recorded",
    on_bad: OnBad = "strict",
    resamples: int = 1_000,
    fqe: FQEConfig | None = None,
) -> OffPolicyEvaluation:
    """What the policy of ``algorithm`` would earn in an episode, estimated from episodes that another one played.

    They should be held out: not those that the policy learned from. Data on the disk are streamed, whole episodes at a
    time; kept are figures of episodes, and for ``wpdis`` and ``wdr`` 12 bytes a step.

    Args:
        algorithm: With one module; for several, see `evaluate_each_on`.
        data: The episodes: a path, a `Recording`, a `Source`, or `Experience` in memory.
        methods: Which of `METHODS`. ``dm``, ``dr``, ``wdr`` and ``fqe`` fit action values, which takes the most time.
        gamma: Discount of rewards, from each episode's first step on, 0 to 1.
        confidence: Of the intervals, between 0 and 1.
        seed: Of the bootstrap and of all fits.
        explore: Evaluate the policy that draws its actions; else the one that takes the most likely ones.
        behaviour: Where the probabilities of the policy that played are from: the column ``logp``, or a network that is
            fitted to the actions.
        on_bad: What happens to bad data, such as NaN (`etude.recordings.screening`): ``strict`` raises, ``repair``
            mends and ``skip`` leaves out, and a note says what was. A `Recording` does as it was opened, and
            `Experience` is taken as it is.
        resamples: Bootstrap samples, at least 1.
        fqe: How action values are fitted; None is `FQEConfig()`.

    Raises:
        DataError: the data can't be read, have no whole episode, are not of the module's kind, or have no ``logp``
            where it is needed.
        SettingsError: an argument is out of range; or a method needs what the policy does not have.
    """
    if len(algorithm.policies) > 1:
        raise SettingsError(
            f"there are the modules {list(algorithm.policies)}: evaluate_each_on gives a result for each of them."
        )
    asked = _asked(methods, gamma, confidence, seed, explore, behaviour, resamples, fqe)
    held, name = opened(data, on_bad), next(iter(algorithm.policies))
    found = _evaluated(algorithm, name, held, asked)
    if found is None:
        raise _nothing(held)
    return _with_bad(found, held)


def evaluate_each_on(
    algorithm: Algorithm[Any],
    data: HeldOutLike,
    *,
    methods: Sequence[str] = METHODS,
    gamma: float = 0.99,
    confidence: float = 0.95,
    seed: int = 0,
    explore: bool = True,
    behaviour: BehaviourLike = "recorded",
    on_bad: OnBad = "strict",
    resamples: int = 1_000,
    fqe: FQEConfig | None = None,
) -> dict[str, OffPolicyEvaluation]:
    """As `evaluate_on`, for each module by itself, by its id: from what its own agents did and earned.

    An estimate says what its agents would earn if it acted for them, and all others acted as they did when the
    episodes were played. Modules without a whole episode are left out, and named in the others' notes.
    """
    asked = _asked(methods, gamma, confidence, seed, explore, behaviour, resamples, fqe)
    held = opened(data, on_bad)
    found = {name: _evaluated(algorithm, name, held, asked) for name in algorithm.policies}
    results = {name: result for name, result in found.items() if result is not None}
    if not results:
        raise _nothing(held)
    absent = [name for name, result in found.items() if result is None]
    if absent:
        note = f"there is no whole episode of the modules {absent}"
        results = {name: result.noted(note) for name, result in results.items()}
    return {name: _with_bad(result, held) for name, result in results.items()}


def _with_bad(result: OffPolicyEvaluation, held: Recording | Experience) -> OffPolicyEvaluation:
    """The same with a note on what was bad in the data, where it was looked for and found."""
    report = held.left_out_report() if isinstance(held, Recording) else ""
    return result.noted(report) if report else result


def _asked(
    methods: Sequence[str],
    gamma: float,
    confidence: float,
    seed: int,
    explore: bool,
    behaviour: BehaviourLike,
    resamples: int,
    fqe: FQEConfig | None,
) -> EvaluateOn:
    return EvaluateOn(
        methods=tuple(dict.fromkeys(methods)),
        gamma=gamma,
        confidence=confidence,
        seed=seed,
        explore=explore,
        behaviour=behaviour,
        resamples=resamples,
        fqe=fqe or FQEConfig(),
    )


def _nothing(held: Recording | Experience) -> DataError:
    return DataError(
        f"{where(held)}: there is no whole episode, from its first step to one that is done: nothing to estimate from. "
        "Rows without their episode, or cut off before it ended, don't say what an episode earns."
    )


def _evaluated(
    algorithm: Algorithm[Any], name: str, data: Recording | Experience, asked: EvaluateOn
) -> OffPolicyEvaluation | None:
    """The result of one module; None where it has no whole episode."""
    policy = algorithm.policies[name]
    target = Target(policy.module, policy.connectors, explore=asked.explore)
    check_spaces(algorithm, name, data)
    if asked.weighs:
        target.check_density()
    if asked.values and policy.module.recurrent:
        raise SettingsError(
            f"module {name!r} is recurrent, but dm, dr, wdr and fqe fit values of single observations: take other "
            "methods, such as wis and wpdis."
        )
    held = HeldOut(data, _columns(data, policy.connectors, asked), *_owners(algorithm, name))
    with _resting(policy.module), algorithm.threads_held():
        return _result(name, target, held, where(data), asked)


def _owners(algorithm: Algorithm[Any], name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What says of segments which are this module's, and which are nobody's."""
    named = module_of_segments(algorithm)
    return (lambda segments: named(segments) == name), (lambda segments: named(segments) == None)  # noqa: E711


def _columns(data: Recording | Experience, connectors: Pipeline, asked: EvaluateOn) -> list[str]:
    """What to read: all where a connector of the user's may look at anything.

    Raises:
        DataError: probabilities are needed, and not recorded.
    """
    names = data.columns if isinstance(data, Recording) else list(data.steps)
    if asked.weighs and asked.behaviour == "recorded" and col.LOGP not in names:
        raise DataError(NO_LOGP.format(where=where(data)))
    if any(overrides(c, "offline") and not type(c).__module__.startswith("etude.") for c in connectors.connectors):
        return list(names)
    return [col.OBS, col.ACTION, col.REWARD, *([col.LOGP] if col.LOGP in names else [])]


@contextmanager
def _resting(module: Module) -> Iterator[None]:
    """Within it, the module is in evaluation mode."""
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)


def _result(name: str, target: Target, held: HeldOut, place: str, asked: EvaluateOn) -> OffPolicyEvaluation | None:
    def chunks() -> Iterator[Experience]:
        return map(target.seen, held.chunks())

    first = next(chunks(), None)
    if first is None:
        return None
    if asked.values and asked.gamma == 1 and first.segments.truncated.any():
        raise SettingsError(
            "`gamma` is 1, and episodes were truncated: what would have followed has no bound, which dm, dr, wdr and "
            "fqe would value. Take a smaller gamma, or other methods."
        )
    ratio: LogRatio | None
    behaviour: str | None
    if asked.weighs:
        ratio, behaviour = _log_ratio(target, chunks, first, place, asked)
    else:
        ratio, behaviour = _distance(target, first), None
    fqe = None
    if asked.values:
        fqe = FQE(target, asked.gamma, asked.fqe, asked.seed)
        fqe.fit(chunks)
    by_step = bool({"wpdis", "wdr"} & set(asked.methods))
    figures = collect(chunks, ratio, fqe, asked.gamma, by_step=by_step)
    found = estimates_of(
        figures, asked.methods, confidence=asked.confidence, resamples=asked.resamples, seed=asked.seed
    )
    return OffPolicyEvaluation(
        behaviour=found.pop(PLAYED),
        estimates=found,
        episodes=len(figures.lengths),
        steps=int(figures.lengths.sum()),
        gamma=asked.gamma,
        confidence=asked.confidence,
        seed=asked.seed,
        module=name,
        explore=asked.explore,
        behaviour_policy=behaviour,
        mean_weight=mean_weight(figures),
        left_out=dict(held.left_out),
        notes=tuple(notes_on(figures, asked.methods, asked.gamma, explore=asked.explore)),
    )


def _distance(target: Target, first: Experience) -> LogRatio | None:
    """As `_log_ratio`, for notes alone: how far the policy is from the one that played; None where nothing says it."""
    if col.LOGP not in first.steps or not first.steps[col.LOGP].any():
        return None
    try:
        target.check_density()
        target.logp(first)
    except SettingsError:
        return None

    def log_ratio(seen: Experience) -> NDArray[np.float64]:
        played = seen.steps[col.LOGP].astype(np.float64)
        return np.where(np.isfinite(played), target.logp(seen) - played, 0.0)

    return log_ratio


def _log_ratio(
    target: Target, chunks: Callable[[], Iterator[Experience]], first: Experience, place: str, asked: EvaluateOn
) -> tuple[LogRatio, str]:
    """What gives the logarithms of ratios ``[steps]``, and where they are from.

    Raises:
        DataError: the actions were not drawn.
    """
    played: Recorded | Fitted
    if asked.behaviour == "fit":
        played = Fitted(target, chunks, asked.seed)
    else:
        played = Recorded(place)
        if not played.logp(first).any():
            raise DataError(
                f"{place}: `logp` is 0 throughout: the actions were not drawn, but always the most likely ones. What "
                "the policy would do otherwise was never tried, and no weight can say what it brings. Record while "
                "exploring (explore=True), or evaluate by dm and fqe alone."
            )
    return (lambda seen: target.logp(seen) - played.logp(seen)), played.name
