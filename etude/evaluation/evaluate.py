# SPDX-License-Identifier: Apache-2.0
"""Off-policy evaluation: estimate the return of a policy from episodes that another policy played.

``rho[t] = pi(a[t] | s[t]) / mu(a[t] | s[t])`` is the ratio of the evaluated policy pi to the behaviour policy mu,
``w[t]`` the product of the ratios up to step t, and ``w`` the product over the whole episode:

- ``is``: mean of ``w * G``, G being the discounted return (Precup, Sutton & Singh 2000, section 2).
- ``wis``: ``sum(w * G) / sum(w)`` (likewise).
- ``pdis``: mean of ``sum over t of gamma^t * w[t] * r[t]`` (likewise, section 3: per decision).
- ``wpdis``: the same, with ``w[t]`` divided by the mean of all episodes' ``w[t]`` (Thomas & Brunskill 2016, section 5).
- ``fqe``: mean of V(s[0]), fitted to all episodes (Le, Voloshin & Yue 2019).
- ``dm``: the same, but each V(s[0]) is by networks that have not learned from its episode.
- ``dr``: mean of ``V(s[0]) + sum over t of gamma^t * w[t] * (r[t] + gamma * V(s[t+1]) - Q(s[t], a[t]))``, V and Q as in
  ``dm`` (Jiang & Li 2016, eq. 10, written as a sum).
- ``wdr``: the same with weights as in ``wpdis`` (Thomas & Brunskill 2016, section 5).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal

import numpy as np

from etude import columns as col
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.progress import gauge
from etude.connectors import Pipeline, overrides
from etude.errors import DataError, SettingsError
from etude.evaluation.episodes import HeldOutLike, WholeEpisodes, are_of_env, opened, where, why_unfit
from etude.evaluation.estimators import (
    NEED_VALUES,
    NEED_WEIGHTS,
    PLAYED,
    OffPolicyEvaluation,
    collect,
    estimates_of,
    notes_on,
    why_distrusted,
)
from etude.evaluation.fqe import FQE, FQEConfig
from etude.evaluation.policies import Chunks, Floats, TargetPolicy, fitted_behaviour, recorded_logp
from etude.experience import Experience
from etude.modules.module import evaluating
from etude.recordings import Recording
from etude.recordings.screening import OnBad
from etude.settings import IntFrom0, IntFrom1, Rule, UnitInterval, settings, shown, suggestion
from etude.threads import held

METHODS: Final = ("is", "wis", "pdis", "wpdis", "dm", "dr", "wdr", "fqe")
"""The names of the estimators."""


@settings
class OffPolicyEvaluationConfig:
    """Settings of an off-policy evaluation."""

    methods: Annotated[tuple[str, ...], Rule(lambda names: len(names) > 0, f"some of {', '.join(METHODS)}")] = METHODS
    """Estimators to use, among `METHODS`. ``dm``, ``dr``, ``wdr`` and ``fqe`` fit action values, which takes most of
    the time."""

    gamma: UnitInterval = 0.99
    """Discount factor, 0 to 1. Rewards are discounted from each episode's first step on."""

    confidence: Annotated[float, Rule(lambda value: 0 < value < 1, "between 0 and 1, both left out")] = 0.95
    """Confidence level of the intervals, between 0 and 1."""

    seed: IntFrom0 = 0
    """Seed of the bootstrap and of all fits, at least 0."""

    explore: bool = True
    """Evaluate the policy that samples its actions; if False, the one that takes its most likely actions."""

    behaviour: Literal["recorded", "fit"] = "recorded"
    """Source of the behaviour policy's probabilities: ``recorded`` is the column ``logp``, ``fit`` a network that is
    fitted to the actions."""

    on_bad: OnBad = "strict"
    """What to do with bad data such as NaN: ``strict`` raises, ``repair`` repairs and ``skip`` leaves out, with a note
    (see `etude.recordings.screening`). A `Recording` keeps the mode that it was opened with, and `Experience` is used
    as it is."""

    progress: bool = False
    """Show what is being computed, and the time left: live in a terminal or a notebook, else as lines on standard
    error."""

    resamples: IntFrom1 = 1_000
    """Number of bootstrap samples, at least 1."""

    fqe: FQEConfig = FQEConfig()
    """Settings of the fit of action values."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                known = f"there are {', '.join(METHODS)}.{suggestion(method, METHODS)}"
                raise SettingsError(f"there is no method `{method}`; {known}")

    @property
    def weighs(self) -> bool:
        """Whether probabilities of actions are needed."""
        return not set(self.methods).isdisjoint(NEED_WEIGHTS)

    @property
    def values(self) -> bool:
        """Whether fitted values are needed."""
        return not set(self.methods).isdisjoint(NEED_VALUES)


def evaluate_on(
    algorithm: Algorithm[Any],
    data: HeldOutLike,
    config: OffPolicyEvaluationConfig = OffPolicyEvaluationConfig(),  # noqa: B008 - frozen
    **settings: Any,
) -> OffPolicyEvaluation:
    """Estimate the return of the policy of ``algorithm`` in an episode, from episodes that another policy played.

    The episodes should be held out: not those that the policy learned from. Look at `OffPolicyEvaluation.trusted`
    first: if the policy is far from the one that played, no estimate can be trusted. Data on disk is streamed, whole
    episodes at a time. Memory holds figures of episodes, and for ``wpdis`` and ``wdr`` 12 bytes per step.

    Args:
        algorithm: An algorithm with one module; for several, see `evaluate_each_on`.
        data: The episodes: a path, a `Recording`, a `Source`, or `Experience` in memory. With `rescale_action`, actions
            may be in [-1, 1] or in the env's units: the bounds of their space say which. Experience has no spaces, so
            its actions must be in the units in which the module acts; this can't be checked.
        config: Settings of the evaluation.
        settings: Fields of ``config`` to override, such as ``methods=("wis", "dr")``.

    Raises:
        DataError: the data can't be read, contains no whole episode, does not fit the module, or lacks ``logp`` where
            it is needed.
        SettingsError: a setting is out of range or unknown; or a method does not support the policy.
    """
    if isinstance(algorithm, Algorithm) and len(algorithm.policies) > 1:
        raise SettingsError(
            f"there are the modules {list(algorithm.policies)}: evaluate_each_on gives a result for each of them."
        )
    return next(iter(evaluate_each_on(algorithm, data, config, **settings).values()))


def evaluate_each_on(
    algorithm: Algorithm[Any],
    data: HeldOutLike,
    config: OffPolicyEvaluationConfig = OffPolicyEvaluationConfig(),  # noqa: B008 - frozen
    **settings: Any,
) -> dict[str, OffPolicyEvaluation]:
    """Like `evaluate_on`, for each module separately, from the actions and rewards of its own agents.

    An estimate is the return of a module's agent if the module acted for it, and all other agents acted as they did
    when the episodes were played. This includes other agents of the same module. Modules that have no whole episode or
    whose spaces do not match are left out, and named in the notes of the others.

    Returns:
        The evaluations by module id.

    Raises:
        DataError: as for `evaluate_on`; the data fits no module, or has no whole episode of any.
        SettingsError: as for `evaluate_on`; or ``algorithm`` is not an algorithm.
    """
    if not isinstance(algorithm, Algorithm):
        raise SettingsError(
            f"the first argument is an algorithm, which knows its modules and their agents, not {shown(algorithm)}: "
            "give the one that was trained, or etude.load(folder)."
        )
    config = dataclasses.replace(config, **settings)
    first, *others = algorithm.spaces.values()
    held = opened(data, config.on_bad, first if all(one == first for one in others) else (None, None))
    misfits = {name: why_unfit(algorithm, name, held) for name in algorithm.policies}
    if all(misfits.values()):
        raise DataError(next(filter(None, misfits.values())))
    found = {name: None if why else _evaluated(algorithm, name, held, config) for name, why in misfits.items()}
    unfit = [name for name, why in misfits.items() if why]
    absent = [name for name, result in found.items() if result is None and name not in unfit]
    notes = [f"there is no whole episode of the modules {absent}"] if absent else []
    notes += [f"the spaces of the modules {unfit} are not those of the recording"] if unfit else []
    if isinstance(held, Recording) and held.left_out_report():
        notes.append(held.left_out_report())
    results = {name: result.noted(*notes) for name, result in found.items() if result is not None}
    if not results:
        raise DataError(
            f"{where(held)}: there is no whole episode, from its first step to one that is done: nothing to estimate "
            "from. Rows without an episode, or of episodes cut off before their end, don't determine a return."
        )
    return results


def _evaluated(
    algorithm: Algorithm[Any], name: str, data: Recording | Experience, config: OffPolicyEvaluationConfig
) -> OffPolicyEvaluation | None:
    """The result for one module; None if it has no whole episode."""
    policy = algorithm.policies[name]
    of_env = are_of_env(policy, data)
    target = TargetPolicy(policy.module, policy.connectors, explore=config.explore, of_env=of_env)
    if config.weighs:
        target.check_density()
    if config.values and policy.module.recurrent:
        raise SettingsError(
            f"module {name!r} is recurrent, but dm, dr, wdr and fqe fit values of single observations: use other "
            "methods, such as wis and wpdis."
        )
    episodes = WholeEpisodes(data, _columns(data, policy.connectors, config), algorithm, name)
    with evaluating(policy.module), held(algorithm.num_threads):
        return _result(name, target, episodes, where(data), config)


def _columns(data: Recording | Experience, connectors: Pipeline, config: OffPolicyEvaluationConfig) -> list[str]:
    """The columns to read; all of them if a user's connector may use any.

    Raises:
        DataError: probabilities are needed, but not recorded.
    """
    names = data.columns if isinstance(data, Recording) else list(data.steps)
    if config.weighs and config.behaviour == "recorded" and col.LOGP not in names:
        raise DataError(
            f"{where(data)}: there is no column `logp`, the log-probability of each action under the policy that "
            "played, which the importance weights need. Record with Etude or another tool that stores it, or map the "
            "column of a table: `propensity` or `logp`; or let the policy be estimated (behaviour='fit', --behaviour "
            "fit); or evaluate by dm and fqe only."
        )
    if any(overrides(c, "offline") and not type(c).__module__.startswith("etude.") for c in connectors.connectors):
        return list(names)
    return [col.OBS, col.ACTION, col.REWARD, *([col.LOGP] if col.LOGP in names else [])]


def _result(
    name: str, target: TargetPolicy, episodes: WholeEpisodes, place: str, config: OffPolicyEvaluationConfig
) -> OffPolicyEvaluation | None:
    def chunks() -> Iterator[Experience]:
        return map(target.connected, episodes.chunks())

    first = next(chunks(), None)
    if first is None:
        return None
    if config.values and config.gamma == 1 and first.segments.truncated.any():
        raise SettingsError(
            "`gamma` is 1, and episodes were truncated: the value of what would have followed is unbounded, but dm, "
            "dr, wdr and fqe need it. Use a smaller gamma, or other methods."
        )
    log_ratio = _log_ratio(target, chunks, first, place, config)
    fqe = None
    if config.values:
        fqe = FQE(target, config.gamma, config.fqe, config.seed)
        fqe.fit(chunks, quiet=not config.progress)
    by_step = not {"wpdis", "wdr"}.isdisjoint(config.methods)
    with gauge("valuing the episodes", quiet=not config.progress) as show:

        def counted() -> Iterator[Experience]:
            for chunk in chunks():
                yield chunk
                if config.progress:
                    show(episodes.share_read())

        figures = collect(counted, log_ratio, fqe, config.gamma, by_step=by_step)
    estimates = estimates_of(
        figures, config.methods, confidence=config.confidence, resamples=config.resamples, seed=config.seed
    )
    notes = notes_on(figures, config.methods, config.gamma, explore=config.explore)
    if len(np.unique(first.segments.tracks())) < first.num_segments:
        notes.append(
            "several episodes have the same id and agent, as where recordings of equal seeds are joined, and the "
            "intervals take them for one: open recordings together, with Recording.open([a, b]), or give each episode "
            "an id"
        )
    elif len({*first.segments.episode_id.tolist()}) < first.num_segments:
        notes.append(
            "the policy acts for several agents in an episode: the part of each agent counts as an episode, in which "
            "the others act as they did when it was recorded"
        )
    distrust = why_distrusted(figures)
    trusted = None if log_ratio is None and distrust is None else distrust is None
    played_by = "fitted" if config.behaviour == "fit" else "recorded"
    return OffPolicyEvaluation(
        behaviour=estimates.pop(PLAYED),
        estimates=estimates,
        episodes=len(figures.lengths),
        steps=int(figures.lengths.sum()),
        gamma=config.gamma,
        confidence=config.confidence,
        seed=config.seed,
        module=name,
        explore=config.explore,
        behaviour_policy=played_by if config.weighs else None,
        mean_weight=None if log_ratio is None else float(figures.weight.mean()),
        trusted=trusted,
        distrust=distrust,
        left_out=dict(episodes.left_out),
        notes=tuple(notes),
    )


def _log_ratio(
    target: TargetPolicy, chunks: Chunks, first: Experience, place: str, config: OffPolicyEvaluationConfig
) -> Callable[[Experience], Floats] | None:
    """Return a function that computes log-probabilities under the target policy minus those under the behaviour policy.

    It returns ``[steps]``. If no method uses weights, they only show how far the policy is from the one that played.
    The result is then None if the recording does not contain the behaviour policy's log-probabilities.

    Raises:
        DataError: the actions were not sampled.
    """
    if not config.weighs:
        return _recorded_distance(target, first)
    if config.behaviour == "fit":
        fitted = fitted_behaviour(target, chunks, config.seed, quiet=not config.progress)
        return lambda episodes: target.logp(episodes) - fitted.logp(episodes)
    space = target.module.action_space
    if not recorded_logp(first, space, place).any():
        raise DataError(
            f"{place}: `logp` is 0 throughout: the actions were not sampled, but always the most likely ones. Other "
            "actions of the policy were never tried, so no weight can tell their effect. Record while "
            "exploring (explore=True; with a noisy network, also with an `epsilon` above 0), or evaluate by dm and fqe "
            "only."
        )
    return lambda episodes: target.logp(episodes) - recorded_logp(episodes, space, place)


def _recorded_distance(target: TargetPolicy, first: Experience) -> Callable[[Experience], Floats] | None:
    if col.LOGP not in first.steps or not first.steps[col.LOGP].any():
        return None
    try:
        target.check_density()
        target.logp(first)
    except SettingsError:
        return None

    def log_ratio(episodes: Experience) -> Floats:
        played = episodes.steps[col.LOGP].astype(np.float64)
        return np.where(np.isfinite(played), target.logp(episodes) - played, 0.0)

    return log_ratio
