# SPDX-License-Identifier: Apache-2.0
"""Connectors that compute advantages and value targets, on the learner's side only."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors.connector import Connector, array_column, column
from etude.errors import DataError, ModuleError
from etude.experience import Experience, arrays, returns
from etude.experience.arrays import Array, cast
from etude.settings import FloatAbove0, FloatFrom0, FloatFrom1, Rate, UnitInterval, check_arguments, check_range

if TYPE_CHECKING:
    from etude.modules.module import Module


class GAE(Connector):
    """Adds the columns ``advantage`` and ``value_target``, and ``value`` if there is none; all float32.

    Generalised advantage estimation (Schulman et al. 2016), see `etude.experience.returns.gae`. Values are the column
    ``value`` if there is one, else the module's; on-policy algorithms leave out a recorded column, because it may come
    from older weights or another module. The value after a segment is 0 if it terminated, else the module's value of
    ``final_obs``; if that is unknown, the value of the last step's own observation. A recurrent module computes the
    value of a step from its recorded state.

    Args:
        gamma: Discount factor, 0 to 1.
        lambda_: 0 (one step, biased) to 1 (Monte Carlo). The default is that of Schulman et al. 2017, "Proximal policy
            optimization algorithms".
    """

    needs = (col.OBS, col.REWARD)
    takes_tensors = True
    uses_module = True

    def __init__(self, gamma: float = 0.99, lambda_: float = 0.95) -> None:
        check_arguments("GAE", gamma=(UnitInterval, gamma), lambda_=(UnitInterval, lambda_))
        self.gamma, self.lambda_ = gamma, lambda_

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Compute the columns for all steps, lookback included.

        Raises:
            DataError: values are needed, but no module is given to compute them; or there is no column ``reward``.
        """
        reward = cast(array_column(exp, col.REWARD, "GAE"), np.float32)
        if col.VALUE in exp.steps:
            value = cast(exp.steps[col.VALUE], np.float32)
        else:
            if module is None:
                raise DataError(
                    "GAE needs a module for the values of the steps, which have no column `value`: call "
                    "offline(exp, module)."
                )
            value = module.value_of(col.subtree(exp.steps, col.OBS), col.subtree(exp.steps, col.STATE_IN))
        bootstrap = bootstraps(module, exp, value, "GAE")
        advantage, target = returns.gae(reward, value, bootstrap, exp.offsets, self.gamma, self.lambda_)
        return exp.with_steps(value=value, advantage=advantage, value_target=target)


def bootstraps(module: "Module | None", exp: Experience, value: Array, who: str) -> Array:
    """The value after each segment, float32 ``[num_segments]``.

    It is 0 if the segment terminated, else the module's value of ``final_obs``; if that is unknown, the value of the
    last step's own observation.

    Args:
        module: Used only for segments that did not terminate.
        exp: The segments.
        value: Values of the steps' observations, ``[num_steps]``.
        who: The name of the connector, for messages.

    Raises:
        DataError: a module is needed, but none is given.
    """
    bootstrap = arrays.zeros(exp.num_segments, value)
    goes_on = ~exp.segments.terminated
    bootstrap[goes_on] = value[exp.offsets[1:][goes_on] - 1]
    known = np.flatnonzero(goes_on & exp.segments.has_final_obs)
    if len(known):
        bootstrap[known] = _final_values(module, exp, known, who)
    return bootstrap


def _final_values(module: "Module | None", exp: Experience, segments: NDArray[np.int64], who: str) -> Array:
    """The module's values of the final observations of ``segments``."""
    if module is None:
        raise DataError(
            f"{who} needs a module for the values of the observations that segments were cut or truncated at: call "
            "offline(exp, module)."
        )
    final_obs = {name: arrays.take(final, segments) for name, final in exp.final_obs.items()}
    if not module.recurrent:
        return module.value_of(final_obs)
    last = exp.offsets[1:][segments] - 1
    obs, state = ({n: c[last] for n, c in col.subtree(exp.steps, root).items()} for root in (col.OBS, col.STATE_IN))
    return module.value_after(obs, state, final_obs)


class NormalizeAdvantages(Connector):
    """Normalises the column ``advantage`` to mean 0 and standard deviation 1 over all trained steps; float32."""

    needs = ()
    takes_tensors = True

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Normalise with statistics over all steps except lookback, of all learners together, in float64."""
        advantage = array_column(exp, col.ADVANTAGE, "NormalizeAdvantages")
        trained = cast(advantage[exp.trained()], np.float64)
        mean, num = _mean_over(trained, self.sum_over_learners)
        if not num:
            return exp
        variance, _ = _mean_over((trained - mean) ** 2, self.sum_over_learners)
        scaled = (advantage - mean) / (math.sqrt(variance) + 1e-8)
        return exp.with_steps(advantage=cast(scaled, np.float32))


class LiftAdvantages(Connector):
    """Shifts the column ``advantage`` to mean 0 over all trained steps if its mean is negative; float32.

    Before the value function is learned, negative rewards make all advantages negative. Every sampled action would then
    become less likely, until the policy is deterministic.
    """

    needs = ()
    takes_tensors = True

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Shift by the mean over all steps except lookback, of all learners together, computed in float64."""
        advantage = array_column(exp, col.ADVANTAGE, "LiftAdvantages")
        mean, _ = _mean_over(cast(advantage[exp.trained()], np.float64), self.sum_over_learners)
        return exp.with_steps(advantage=cast(advantage - min(mean, 0.0), np.float32))


def _mean_over(values: Array, sum_over_learners: Callable[[NDArray[np.float64]], None] | None) -> tuple[float, int]:
    """The mean of all learners' values, 0 if there are none, and their number."""
    sums = np.array([float(values.sum()), len(values)], np.float64)
    if sum_over_learners is not None:
        sum_over_learners(sums)
    return float(sums[0] / max(1.0, sums[1])), int(sums[1])


class AdvantageWeights(Connector):
    """Adds the column ``weight``, the weight of each step in imitation, ``exp(beta * advantage / c)``; float32.

    ``c ** 2`` is a moving average of squared advantages, so that the scale of rewards does not matter (Wang et al.
    2018, "Exponentially weighted imitation learning for batched historical data", algorithm 1). Put it after `GAE`.

    Args:
        beta: How strongly better steps are favoured, at least 0.
        rate: Step size of the moving average, per batch, above 0 and at most 1.
        max_weight: Upper limit of a weight, at least 1.
    """

    needs = ()

    def __init__(self, beta: float = 1.0, rate: float = 0.01, max_weight: float = 20.0) -> None:
        check_arguments(
            "AdvantageWeights", beta=(FloatFrom0, beta), rate=(Rate, rate), max_weight=(FloatFrom1, max_weight)
        )
        self.beta, self.rate, self.max_weight = beta, rate, max_weight
        self.mean_square: float | None = None
        """The moving average of squared advantages; None before the first `update`."""

    def update(self, exp: Experience) -> None:
        """Add the squared advantages of a batch, without lookback, to the average.

        A batch without steps, or with advantages that are not finite, leaves the average unchanged.
        """
        squares = np.square(column(exp, col.ADVANTAGE, "AdvantageWeights"), dtype=np.float64)
        square, num = _mean_over(squares[exp.trained()], self.sum_over_learners)
        before = square if self.mean_square is None else self.mean_square
        mean_square = before + self.rate * (square - before)
        if num and math.isfinite(mean_square):  # not finite: the learner skips this batch
            self.mean_square = mean_square

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Compute the weights of all steps, lookback included."""
        advantage = column(exp, col.ADVANTAGE, "AdvantageWeights")
        exponent = advantage * (self.beta / (math.sqrt(self.mean_square or 0.0) + 1e-8))
        weight = np.exp(np.minimum(exponent, math.log(self.max_weight)))
        return exp.with_steps(**{col.WEIGHT: weight})

    def state_dict(self) -> dict[str, Any]:
        """``mean_square``."""
        return {"mean_square": self.mean_square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.mean_square = state["mean_square"]


class VTrace(Connector):
    """Adds the columns ``advantage``, ``value_target`` and ``target_logp``, all float32; on the learner's side only.

    V-trace (Espeholt et al. 2018, "IMPALA", eq. 1 and 4.2), see `etude.experience.returns.vtrace`. The behaviour policy
    is the one that acted; its log-probabilities are the recorded column ``logp``. The target policy, whose values are
    estimated, is the current module. ``target_logp`` is its log-probability of each recorded action, and ``advantage``
    includes the truncated importance weight. Values are always the current module's; the value after a segment is as in
    `GAE`. If the weights have not changed since acting, and ``lambda_``, ``rho_bar`` and ``c_bar`` are 1,
    ``value_target`` and ``advantage`` equal those of ``GAE(gamma, 1.0)``.

    A recurrent module processes each step from its recorded state, which was computed with older weights.

    Args:
        gamma: Discount factor, 0 to 1.
        rho_bar: Cap of the importance weights of rewards and of the policy gradient, above 0. It determines whose
            values are learned: those of the target policy if it is infinite, else those of a policy between target and
            behaviour policy.
        c_bar: Cap of the importance weights with which later rewards are propagated back, above 0, at most ``rho_bar``,
            as in the paper. Smaller values reduce variance, but slow down learning.
        lambda_: Extra decay of these weights, 0 to 1 (the paper's remark 2).
        by_target: Use the policy of the module's target network, ``module.target``, as the target policy; values are
            still the module's.
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
        check_arguments(
            "VTrace",
            gamma=(UnitInterval, gamma),
            rho_bar=(FloatAbove0, rho_bar),
            c_bar=(FloatAbove0, c_bar),
            lambda_=(UnitInterval, lambda_),
            by_target=(bool, by_target),
        )
        check_range("VTrace", c_bar=(c_bar <= rho_bar, f"at most rho_bar, which is {rho_bar}, not {c_bar}"))
        self.gamma, self.rho_bar, self.c_bar, self.lambda_, self.by_target = gamma, rho_bar, c_bar, lambda_, by_target

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Compute the columns for all steps, lookback included.

        Raises:
            DataError: the module, or a column that is needed, is missing.
            ModuleError: ``by_target`` is set, and the module has no target network.
        """
        if module is None:
            raise DataError("VTrace needs the module, for values and probabilities: call offline(exp, module).")
        reward = cast(array_column(exp, col.REWARD, "VTrace"), np.float32)
        behaviour = cast(array_column(exp, col.LOGP, "VTrace"), np.float32)
        obs, action, state = (col.subtree(exp.steps, root) for root in (col.OBS, col.ACTION, col.STATE_IN))
        logp, value = module.logp_and_value(obs, action, state)
        if self.by_target:
            target_module: Module | None = getattr(module, "target", None)
            if target_module is None:
                raise ModuleError(
                    f"VTrace(by_target=True) needs the target network of the module, but a {type(module).__name__} has "
                    "none: make a FollowedModule of its net."
                )
            logp, _ = target_module.logp_and_value(obs, action, state)
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
