# SPDX-License-Identifier: Apache-2.0
"""Numbers that nothing can be learned from, and whose fault they are."""

import numpy as np

from etude import columns as col
from etude.errors import DataError, EnvError, EtudeError, ModuleError
from etude.experience import Experience
from etude.experience.experience import check_finite
from etude.runners.log import Log


def check_chosen(log: Log, error: EtudeError) -> None:
    """Raise an error that names the module, where an env failed after it was given what the module made of NaN.

    Raises:
        ModuleError: the latest ``dist_inputs`` of the module are not finite.
    """
    inputs = log.columns.get(col.DIST_INPUTS)
    if inputs is not None and not np.isfinite(inputs[: log.size]).all():
        raise ModuleError(
            f"the module gave `{col.DIST_INPUTS}` that is not finite, and the env failed on what came of it: the "
            f"module's weights may have grown beyond bounds ({error})"
        ) from error


def check_numbers(exp: Experience) -> None:
    """Raise an error that names the culprit, env or module, where what was collected is not finite.

    Raises:
        EnvError: an observation or a reward is not finite.
        ModuleError: observations are, but what the module made of them is not.
    """
    try:
        check_finite(exp, (col.OBS, col.REWARD, col.DIST_INPUTS, col.VALUE))
    except DataError as error:
        seen = np.ones(exp.num_steps, bool)
        for column in col.subtree(exp.steps, col.OBS).values():
            if column.dtype.kind == "f":
                seen &= np.isfinite(column).reshape(len(column), -1).all(axis=1)
        for name in (col.DIST_INPUTS, col.VALUE):
            given = exp.steps.get(name, np.zeros(exp.num_steps))
            if (seen & ~np.isfinite(given).reshape(len(given), -1).all(axis=1)).any():
                raise ModuleError(
                    f"the module gave `{name}` that is not finite for observations that are: its weights may have "
                    f"grown beyond bounds ({error})"
                ) from error
        raise EnvError(f"the env gave numbers that nothing can be learned from: {error}") from error
