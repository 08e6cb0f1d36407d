# SPDX-License-Identifier: Apache-2.0
"""Connectors on the learner's side only: advantages and value targets."""

from typing import TYPE_CHECKING

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
    """Adds the columns ``advantage`` and ``value_target``, and ``value`` where there is none; all float32.

    Generalised advantage estimation (Schulman et al. 2016), see `etude.experience.returns.gae`. Values are the recorded
    column ``value`` where there is one, else the module's. What follows a segment is worth nothing where it terminated,
    else the module's value of ``final_obs``; where that is not known, the value of the last step's own observation.
    A recurrent module's values are those in the state that was recorded for the step.

    Args:
        gamma: Discount a step, 0 to 1.
        lambda_: 0 (one step, biased) to 1 (Monte Carlo); 0.95 as in Schulman et al. 2017, "Proximal
            policy optimization algorithms".
    """

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
            value = _values(module, exp, None)
        bootstrap = np.zeros(exp.num_segments, np.float32)
        goes_on = ~exp.segments.terminated
        bootstrap[goes_on] = value[exp.offsets[1:][goes_on] - 1]
        known = np.flatnonzero(goes_on & exp.segments.has_final_obs)
        if len(known):
            bootstrap[known] = _values(module, exp, known)
        advantage, target = returns.gae(reward, value, bootstrap, exp.offsets, self.gamma, self.lambda_)
        return exp.with_steps(value=value, advantage=advantage, value_target=target)


def _values(module: "Module | None", exp: Experience, ends: NDArray[np.int64] | None) -> NDArray[np.float32]:
    """The values of what follows the segments ``ends``; None: of all steps."""
    if module is None:
        of = "the observations that segments were cut or truncated at"
        of = "the steps, which have no column `value`" if ends is None else of
        raise DataError(f"GAE needs a module for the values of {of}: call offline(exp, module).")
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

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Normalises; statistics are over all of ``exp`` but lookback, in float64."""
        advantage = column(exp, col.ADVANTAGE, "NormalizeAdvantages")
        trained = advantage[exp.trained()].astype(np.float64)
        if not len(trained):
            return exp
        scaled = (advantage - trained.mean()) / (trained.std() + 1e-8)
        return exp.with_steps(advantage=scaled.astype(np.float32))
