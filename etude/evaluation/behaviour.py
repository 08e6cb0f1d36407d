# SPDX-License-Identifier: Apache-2.0
"""The policy that played: its log-probabilities as recorded, or by a fit to what it did."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors import Pipeline
from etude.errors import DataError
from etude.evaluation.pool import shuffled
from etude.evaluation.target import Target
from etude.experience import Experience
from etude.learners import Loss, ModuleLearner, seeded
from etude.modules import make_module
from etude.spaces import leaves

STEPS, BATCH_SIZE, LR = 2_000, 256, 1e-3

NO_LOGP = (
    "{where}: there is no column `logp`, the log-probability of each action under the policy that played, which the "
    "importance weights need. Record with Etude or with what else keeps it; or let the policy be estimated "
    "(behaviour='fit'); or evaluate by dm and fqe alone."
)


class Recorded:
    """What the recording says."""

    name = "recorded"

    def __init__(self, where: str) -> None:
        self._where = where

    def logp(self, seen: Experience) -> NDArray[np.float64]:
        """``[num_steps]``.

        Raises:
            DataError: it is not finite, or positive where actions are counted, not measured.
        """
        logp: NDArray[np.float64] = seen.steps[col.LOGP].astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(logp))
        if len(bad):
            segment = int(np.searchsorted(seen.offsets, bad[0], side="right")) - 1
            raise DataError(
                f"{self._where}: `logp` is {logp[bad[0]]} at t {bad[0] - seen.offsets[segment]} of episode "
                f"{seen.segments.episode_id[segment]!r}: an action that was taken has a finite log-probability. Mend "
                "it, leave the episode out, or let the policy be estimated (behaviour='fit')."
            )
        return logp


class Fitted:
    """A network of the built-in kind, fitted to the actions by maximum likelihood.

    To fit it to the very data that is weighed is no fault, but makes the weights better (Hanna, Niekum & Stone 2019,
    "Importance sampling policy evaluation with an estimated behavior policy").

    Args:
        target: Whose observations and actions it sees.
        chunks: The episodes, as `Target.seen` gives them.
        seed: Of weights and order.
    """

    name = "fitted"

    def __init__(self, target: Target, chunks: Callable[[], Iterator[Experience]], seed: int) -> None:
        given = target.module
        with seeded(seed, "cpu"):
            module = make_module(None, given.obs_space, given.action_space, value=False).to(given.device)
        learner = ModuleLearner(
            module,
            lambda module, batch: Loss(imitation=-module(batch.obs).logp(batch.action).mean()),
            name="behaviour",
            lr=LR,
            device=given.device,
            seed=seed,
        )
        roots = [*leaves(given.obs_space, col.OBS), *leaves(given.action_space, col.ACTION)]
        batches = shuffled(lambda: ({name: exp.steps[name] for name in roots} for exp in chunks()), BATCH_SIZE, seed)
        learner.update_from(islice(batches, STEPS))
        module.eval()
        self._policy = Target(module, Pipeline(), explore=True)

    def logp(self, seen: Experience) -> NDArray[np.float64]:
        """``[num_steps]``, by the fit."""
        return self._policy.logp(seen)
