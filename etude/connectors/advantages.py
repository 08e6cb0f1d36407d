# SPDX-License-Identifier: Apache-2.0
"""Connectors on the learner's side only: advantages and value targets."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors.base import Connector, column
from etude.errors import DataError
from etude.experience import Experience, returns
from etude.settings import check_range

if TYPE_CHECKING:
    from etude.modules.module import Module


class GAE(Connector):
    """Adds the columns ``advantage`` and ``value_target``, and ``value`` if there is none; all float32.

    Generalised advantage estimation (Schulman et al. 2016), see `etude.experience.returns.gae`. Values are the recorded
    column ``value`` where there is one, else the module's. What follows a segment is worth nothing where it terminated,
    else the module's value of ``final_obs``; where that is not known, the value of the last step's own observation.
    A recurrent module's values are those in the state that was recorded for the step.

    Args:
        gamma: Discount a step, 0 to 1.
        lambda_: 0 (one step, biased) to 1 (Monte Carlo); 0.95 as in Schulman et al. 2017, "Proximal
            policy optimization algorithms".
    """

    needs = (col.OBS, col.REWARD)
    uses_module = True

    def __init__(self, gamma: float = 0.99, lambda_: float = 0.95) -> None:
        for name, value in (("gamma", gamma), ("lambda_", lambda_)):
            check_range("GAE", **{name: (0 <= value <= 1, f"from 0 to 1, not {value}")})
        self.gamma, self.lambda_ = gamma, lambda_

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Computes them for all steps, lookback included.

        Raises:
            DataError: values are needed, and there is no module to give them.
        """
        reward = column(exp, col.REWARD, "GAE").astype(np.float32)
        if col.VALUE in exp.steps:
            value = np.asarray(exp.steps[col.VALUE]).astype(np.float32, copy=False)
        else:
            value = _values(module, exp, None, "GAE")
        bootstrap = bootstraps(module, exp, value, "GAE")
        advantage, target = returns.gae(reward, value, bootstrap, exp.offsets, self.gamma, self.lambda_)
        return exp.with_steps(value=value, advantage=advantage, value_target=target)


def bootstraps(module: "Module | None", exp: Experience, value: NDArray[np.float32], who: str) -> NDArray[np.float32]:
    """float32 ``[num_segments]``: what follows each segment is worth.

    Nothing where it terminated, else the module's value of ``final_obs``; where that is not known, the value of the
    last step's own observation.

    Args:
        module: Asked only where something follows.
        exp: The segments.
        value: ``[num_steps]``, of the steps' observations.
        who: Needs it; for messages.

    Raises:
        DataError: there is no module to be asked.
    """
    bootstrap = np.zeros(exp.num_segments, np.float32)
    goes_on = ~exp.segments.terminated
    bootstrap[goes_on] = value[exp.offsets[1:][goes_on] - 1]
    known = np.flatnonzero(goes_on & exp.segments.has_final_obs)
    if len(known):
        bootstrap[known] = _values(module, exp, known, who)
    return bootstrap


def _values(module: "Module | None", exp: Experience, ends: NDArray[np.int64] | None, who: str) -> NDArray[np.float32]:
    """The values of what follows the segments ``ends``; None: of all steps."""
    if module is None:
        of = "the observations that segments were cut or truncated at"
        of = "the steps, which have no column `value`" if ends is None else of
        raise DataError(f"{who} needs a module for the values of {of}: call offline(exp, module).")
    if ends is not None:
        final_obs = {name: np.asarray(final).take(ends, axis=0) for name, final in exp.final_obs.items()}
        if not module.recurrent:
            return module.value_of(final_obs)
    rows = slice(None) if ends is None else exp.offsets[1:][ends] - 1
    obs, state = (
        {name: np.asarray(column)[rows] for name, column in col.subtree(exp.steps, root).items()}
        for root in (col.OBS, col.STATE_IN)
    )
    return module.value_of(obs, state) if ends is None else module.value_after(obs, state, final_obs)


class NormalizeAdvantages(Connector):
    """Brings the column ``advantage`` to mean 0 and deviation 1 over all steps that are trained on; float32."""

    needs = ()

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Normalises; statistics are over all of ``exp`` but lookback, and of all learners' shares, in float64."""
        advantage = column(exp, col.ADVANTAGE, "NormalizeAdvantages")
        trained = advantage[exp.trained()].astype(np.float64)
        mean, num = _mean_over(trained, self.sum_over_learners)
        if not num:
            return exp
        variance, _ = _mean_over(np.square(trained - mean), self.sum_over_learners)
        scaled = (advantage - mean) / (math.sqrt(variance) + 1e-8)
        return exp.with_steps(advantage=scaled.astype(np.float32))


class LiftAdvantages(Connector):
    """Brings the column ``advantage`` to mean 0 over all steps that are trained on where its mean is negative; float32.

    Before values are learned, rewards below 0 make all advantages negative. Each action that is tried is then made less
    likely, whatever it was, until the policy is deterministic.
    """

    needs = ()

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Lifts; the mean is over all of ``exp`` but lookback, and of all learners' shares, in float64."""
        advantage = column(exp, col.ADVANTAGE, "LiftAdvantages")
        mean, _ = _mean_over(advantage[exp.trained()].astype(np.float64), self.sum_over_learners)
        return exp.with_steps(advantage=(advantage - min(mean, 0.0)).astype(np.float32))


def _mean_over(
    values: NDArray[np.float64], sum_over_learners: Callable[[NDArray[np.float64]], None] | None
) -> tuple[float, int]:
    """The mean of all learners' values, 0 of none, and how many these are."""
    sums = np.array([values.sum(), len(values)], np.float64)
    if sum_over_learners is not None:
        sum_over_learners(sums)
    return float(sums[0] / max(1.0, sums[1])), int(sums[1])


class AdvantageWeights(Connector):
    """Adds the column ``weight``: how much each step is imitated, ``exp(beta * advantage / c)``; float32.

    ``c ** 2`` is a moving average of squared advantages, so that the scale of rewards does not matter (Wang et al.
    2018, "Exponentially weighted imitation learning for batched historical data", algorithm 1). Goes behind `GAE`.

    Args:
        beta: How much more a step weighs that turned out better, at least 0.
        rate: How far the average goes to the squared advantages of each batch, above 0, at most 1.
        max_weight: The most that a step can weigh, at least 1.
    """

    needs = ()

    def __init__(self, beta: float = 1.0, rate: float = 0.01, max_weight: float = 20.0) -> None:
        check_range(
            "AdvantageWeights",
            beta=(beta >= 0, f"at least 0, not {beta}"),
            rate=(0 < rate <= 1, f"greater than 0, at most 1, not {rate}"),
            max_weight=(max_weight >= 1, f"at least 1, not {max_weight}"),
        )
        self.beta, self.rate, self.max_weight = beta, rate, max_weight
        self.mean_square: float | None = None
        """The moving average of squared advantages; None before the first `update`."""

    def update(self, exp: Experience) -> None:
        """Takes the squared advantages of a batch, lookback left out, into the average.

        A batch without steps, or with advantages that are not finite, leaves the average as it is.
        """
        squares = np.square(column(exp, col.ADVANTAGE, "AdvantageWeights"), dtype=np.float64)
        square, num = _mean_over(squares[exp.trained()], self.sum_over_learners)
        before = square if self.mean_square is None else self.mean_square
        mean_square = before + self.rate * (square - before)
        if num and math.isfinite(mean_square):  # not finite: the learner skips this batch
            self.mean_square = mean_square

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Weighs all steps, lookback included."""
        advantage = column(exp, col.ADVANTAGE, "AdvantageWeights")
        exponent = advantage * (self.beta / (math.sqrt(self.mean_square or 0.0) + 1e-8))
        weight = np.exp(np.minimum(exponent, math.log(self.max_weight)))
        return exp.with_steps(**{col.WEIGHT: weight})

    def state_dict(self) -> dict[str, Any]:
        """``mean_square``."""
        return {"mean_square": self.mean_square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from that average."""
        self.mean_square = state["mean_square"]
