# SPDX-License-Identifier: Apache-2.0
"""Results: what an iteration brought, put together from what an algorithm has counted and logged."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etude.algorithms.figures import Counts, log_trained, parameter_counts
from etude.algorithms.result import Result
from etude.learners import ModuleLearner, Update

if TYPE_CHECKING:
    from etude.algorithms.base import Algorithm

TIMES = "times/"
"""What stands before the names of phases among the metrics."""


def counts_of(algorithm: "Algorithm[Any]") -> Counts:
    """The steps of an algorithm until now."""
    trained = {name: learner.steps_trained for name, learner in algorithm.learner.modules.items()}
    return Counts(algorithm.env_steps, algorithm.agent_steps, trained)


def result_of(
    algorithm: "Algorithm[Any]", update: Update, before: Counts | None = None, *, resumed: str | None = None
) -> Result:
    """What an iteration brought since ``before``; None: how things stand without one."""
    metrics, learners = algorithm.metrics, algorithm.learner.modules
    if before is not None:
        log_trained(metrics, before, counts_of(algorithm))
    logged = metrics.peek() if before is None else metrics.reduce()
    times = {name.removeprefix(TIMES): logged.pop(name) for name in list(logged) if name.startswith(TIMES)}
    sampling = times.get("sample", 0.0)
    sampled = 0 if before is None else algorithm.env_steps - before.env_steps
    parameters = parameter_counts({name: policy.module for name, policy in algorithm.policies.items()})
    rates = {
        name: _rates(learner) | algorithm.policies[name].connectors.metrics() | learner.connectors.metrics()
        for name, learner in learners.items()
    }
    return Result(
        iteration=algorithm.iteration,
        env_steps=algorithm.env_steps,
        agent_steps=algorithm.agent_steps,
        updates=algorithm.updates,
        seconds=algorithm.seconds,
        episodes=algorithm.episodes,
        **algorithm.figures.fields(),
        losses=update.losses,
        metrics=update.metrics | together(rates, several=len(rates) > 1) | parameters | logged,
        times=times,
        sample_steps_per_s=sampled / sampling if sampling else 0.0,
        faulty_episodes=algorithm.faulty_episodes,
        resumed=resumed,
        evaluation=algorithm.evaluation,
        data=algorithm.data_flow,
        bottleneck=algorithm.bottleneck,
    )


def together(parts: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """Figures by module as one mapping, with the module's id before each name where there are several modules."""
    if not several:
        return {name: value for figures in parts.values() for name, value in figures.items()}
    return {f"{module}/{name}": value for module, figures in parts.items() for name, value in figures.items()}


def _rates(learner: ModuleLearner) -> dict[str, float]:
    rates = {"lr" if name == "all" else f"lr/{name}": rate for name, rate in learner.lr.items()}
    return {name: float(learner.module.scheduled[name]) for name in learner.scheduled} | rates
