# SPDX-License-Identifier: Apache-2.0
"""Advantages and value targets, on the learner's side only."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors.connector import Connector, array_column, column
from etude.errors import DataError, ModuleError
from etude.experience import Experience, arrays, returns
from etude.experience.arrays import Array, cast
from etude.modules.module import Module
from etude.settings import check_range


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
    takes_tensors = True
    uses_module = True

    def __init__(self, gamma: float = 0.99, lambda_: float = 0.95) -> None:
        for name, value in (("gamma", gamma), ("lambda_", lambda_)):
            check_range("GAE", **{name: (0 <= value <= 1, f"from 0 to 1, not {value}")})
        self.gamma, self.lambda_ = gamma, lambda_

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Computes them for all steps, lookback included.

        Raises:
            DataError: values are needed, and there is no module to give them.
        """
        reward = cast(array_column(exp, col.REWARD, "GAE"), np.float32)
        if col.VALUE in exp.steps:
            value = cast(exp.steps[col.VALUE], np.float32)
        else:
            value = _values(module, exp, None, "GAE")
        bootstrap = bootstraps(module, exp, value, "GAE")
        advantage, target = returns.gae(reward, value, bootstrap, exp.offsets, self.gamma, self.lambda_)
        return exp.with_steps(value=value, advantage=advantage, value_target=target)


def bootstraps(module: Module | None, exp: Experience, value: Array, who: str) -> Array:
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
    bootstrap = arrays.zeros(exp.num_segments, value)
    goes_on = ~exp.segments.terminated
    bootstrap[goes_on] = value[exp.offsets[1:][goes_on] - 1]
    known = np.flatnonzero(goes_on & exp.segments.has_final_obs)
    if len(known):
        bootstrap[known] = _values(module, exp, known, who)
    return bootstrap


def _values(module: Module | None, exp: Experience, ends: NDArray[np.int64] | None, who: str) -> Array:
    """The values of what follows the segments ``ends``; None: of all steps."""
    if module is None:
        of = "the observations that segments were cut or truncated at"
        of = "the steps, which have no column `value`" if ends is None else of
        raise DataError(f"{who} needs a module for the values of {of}: call offline(exp, module).")
    if ends is not None:
        final_obs = {name: arrays.take(final, ends) for name, final in exp.final_obs.items()}
        if not module.recurrent:
            return module.value_of(final_obs)
    rows = slice(None) if ends is None else exp.offsets[1:][ends] - 1
    obs, state = (
        {name: column[rows] for name, column in col.subtree(exp.steps, root).items()}
        for root in (col.OBS, col.STATE_IN)
    )
    return module.value_of(obs, state) if ends is None else module.value_after(obs, state, final_obs)


class NormalizeAdvantages(Connector):
    """Brings the column ``advantage`` to mean 0 and deviation 1 over all steps that are trained on; float32."""

    needs = ()
    takes_tensors = True

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Normalises; statistics are over all of ``exp`` but lookback, and of all learners' shares, in float64."""
        advantage = array_column(exp, col.ADVANTAGE, "NormalizeAdvantages")
        trained = cast(advantage[exp.trained()], np.float64)
        mean, num = _mean_over(trained, self.sum_over_learners)
        if not num:
            return exp
        variance, _ = _mean_over((trained - mean) ** 2, self.sum_over_learners)
        scaled = (advantage - mean) / (math.sqrt(variance) + 1e-8)
        return exp.with_steps(advantage=cast(scaled, np.float32))


class LiftAdvantages(Connector):
    """Brings the column ``advantage`` to mean 0 over all steps that are trained on where its mean is negative; float32.

    Before values are learned, rewards below 0 make all advantages negative. Each action that is tried is then made less
    likely, whatever it was, until the policy is deterministic.
    """

    needs = ()
    takes_tensors = True

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Lifts; the mean is over all of ``exp`` but lookback, and of all learners' shares, in float64."""
        advantage = array_column(exp, col.ADVANTAGE, "LiftAdvantages")
        mean, _ = _mean_over(cast(advantage[exp.trained()], np.float64), self.sum_over_learners)
        return exp.with_steps(advantage=cast(advantage - min(mean, 0.0), np.float32))


def _mean_over(values: Array, sum_over_learners: Callable[[NDArray[np.float64]], None] | None) -> tuple[float, int]:
    """The mean of all learners' values, 0 of none, and how many these are."""
    sums = np.array([float(values.sum()), len(values)], np.float64)
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

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
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


class VTrace(Connector):
    """Adds the columns ``advantage``, ``value_target`` and ``target_logp``; all float32. The learner's side only.

    V-trace (Espeholt et al. 2018, "IMPALA", eq. 1 and 4.2), see `etude.experience.returns.vtrace`: the steps were made
    by a behaviour policy, whose log-probabilities are the recorded column ``logp``; what is estimated is for the target
    policy, which is the module as it is now. ``target_logp`` is its log-probability of each recorded action, and
    ``advantage`` holds the truncated importance weight already. Values are the module's as it is now, whatever was
    recorded; what follows a segment is worth what `GAE` says. With the weights that acted, ``value_target`` and
    ``advantage`` are those of ``GAE(gamma, 1.0)`` where ``lambda_`` is 1, too.

    A recurrent module is asked about each step in the state that was recorded for it: one that the older weights made.

    Args:
        gamma: Discount a step, 0 to 1.
        rho_bar: Cap of the importance weights of rewards and of the policy gradient, above 0: it says whose values are
            learned, those of the target policy where it is infinite, else of one that is nearer to the behaviour
            policy.
        c_bar: Cap of the weights by which later rewards come back, above 0: lower is slower and has less variance. At
            most ``rho_bar``, as the paper has it.
        lambda_: Extra decay of these, 0 to 1 (the paper's remark 2).
        by_target: The target policy is that of the module's target network, ``module.target``; values are the module's
            still.
    """

    needs = (col.OBS, col.ACTION, col.REWARD, col.LOGP)
    takes_tensors = True
    uses_module = True

    def __init__(
        self,
        gamma: float = 0.99,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        lambda_: float = 1.0,
        by_target: bool = False,
    ) -> None:
        check_range(
            "VTrace",
            gamma=(0 <= gamma <= 1, f"from 0 to 1, not {gamma}"),
            rho_bar=(rho_bar > 0, f"above 0, not {rho_bar}"),
            c_bar=(0 < c_bar <= rho_bar, f"above 0 and at most rho_bar, which is {rho_bar}, not {c_bar}"),
            lambda_=(0 <= lambda_ <= 1, f"from 0 to 1, not {lambda_}"),
        )
        self.gamma, self.rho_bar, self.c_bar, self.lambda_, self.by_target = gamma, rho_bar, c_bar, lambda_, by_target

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Computes them for all steps, lookback included.

        Raises:
            DataError: there is no module, or a column that is needed.
            ModuleError: it has no target network, and ``by_target`` asks for it.
        """
        if module is None:
            raise DataError("VTrace needs the module whose values and probabilities count: call offline(exp, module).")
        reward = cast(array_column(exp, col.REWARD, "VTrace"), np.float32)
        behaviour = cast(array_column(exp, col.LOGP, "VTrace"), np.float32)
        obs, action, state = (col.subtree(exp.steps, root) for root in (col.OBS, col.ACTION, col.STATE_IN))
        logp, value = module.logp_and_value(obs, action, state)
        if self.by_target:
            logp, _ = _target_of(module).logp_and_value(obs, action, state)
        target, advantage = returns.vtrace(
            reward,
            value,
            bootstraps(module, exp, value, "VTrace"),
            logp - behaviour,
            exp.offsets,
            self.gamma,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
            lambda_=self.lambda_,
        )
        return exp.with_steps(**{col.ADVANTAGE: advantage, col.VALUE_TARGET: target, col.TARGET_LOGP: logp})


def _target_of(module: Module) -> Module:
    target: Module | None = getattr(module, "target", None)
    if target is None:
        raise ModuleError(
            f"VTrace(by_target=True) asks the target network of the module, but a {type(module).__name__} has none: "
            "make a FollowedModule of its net."
        )
    return target
