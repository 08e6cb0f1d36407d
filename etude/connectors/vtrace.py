# SPDX-License-Identifier: Apache-2.0
"""Advantages and value targets of steps that an older policy made."""

from typing import TYPE_CHECKING

import numpy as np

from etude import columns as col
from etude.connectors.advantages import bootstraps
from etude.connectors.base import Connector, column
from etude.errors import DataError, ModuleError
from etude.experience import Experience, returns
from etude.settings import check_range

if TYPE_CHECKING:
    from etude.modules.module import Module


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

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Computes them for all steps, lookback included.

        Raises:
            DataError: there is no module, or a column that is needed.
            ModuleError: it has no target network, and ``by_target`` asks for it.
        """
        if module is None:
            raise DataError("VTrace needs the module whose values and probabilities count: call offline(exp, module).")
        reward = column(exp, col.REWARD, "VTrace").astype(np.float32)
        behaviour = column(exp, col.LOGP, "VTrace").astype(np.float32, copy=False)
        obs, action, state = (
            {name: np.asarray(part) for name, part in col.subtree(exp.steps, root).items()}
            for root in (col.OBS, col.ACTION, col.STATE_IN)
        )
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


def _target_of(module: "Module") -> "Module":
    target: Module | None = getattr(module, "target", None)
    if target is None:
        raise ModuleError(
            f"VTrace(by_target=True) asks the target network of the module, but a {type(module).__name__} has none: "
            "make a FollowedModule of its net."
        )
    return target
