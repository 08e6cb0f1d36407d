# SPDX-License-Identifier: Apache-2.0
"""From Experience as recorded to what one module learns from."""

import numpy as np

from etude.connectors import Connect, Pipeline, PreLearnerLike
from etude.errors import DataError, EtudeError
from etude.experience import Experience
from etude.recordings.where import RowFilter


class Preparation:
    """Chooses a module's segments, and lets the connectors see them. Where a module is needed, it is too early here.

    Args:
        connectors: Those between env and module.
        to_learner: Those of the learner that need no module.
        select: Gives the segments that a module learns from; None: all.
        where: A condition on steps; others are left out.
        own: The user's own, which stands around the connectors.
    """

    def __init__(
        self,
        connectors: Pipeline,
        to_learner: Pipeline,
        *,
        select: Connect | None = None,
        where: RowFilter | None = None,
        own: PreLearnerLike | None = None,
    ) -> None:
        self.connectors, self.to_learner = connectors, to_learner
        self.select, self.where, self.own = select, where, own

    def chosen(self, exp: Experience) -> Experience:
        """The segments that the module learns from, and of these the steps."""
        exp = exp if self.select is None else self.select(exp)
        return exp if self.where is None else self.where.chosen(exp)

    def __call__(self, exp: Experience) -> Experience:
        """What is trained on of the segments `chosen`; what must not be is lookback.

        Raises:
            DataError: the user's own step fails, or gives something else.
        """
        if self.own is None:
            return self.connect(exp)
        name = getattr(self.own, "__qualname__", repr(self.own))
        where = f"episode {exp.segments.episode_id[0]!r} and others" if exp.num_segments else "no segments"
        try:
            made = self.own(exp, self.connect)
        except EtudeError:
            raise
        except Exception as error:
            raise DataError(f"the prelearner {name} fails on {where}: {type(error).__name__}: {error}") from error
        if not isinstance(made, Experience):
            raise DataError(f"the prelearner {name} gives {type(made).__name__} for {where}: it must give Experience.")
        return made

    def connect(self, exp: Experience) -> Experience:
        """Through all connectors."""
        return self.to_learner.offline(self.connectors.offline(with_context(exp, self.connectors.context)))

    def learn(self, exp: Experience) -> None:
        """Let the connectors learn from the recording: what an observation filter knows comes from here."""
        exp = with_context(self.chosen(exp), self.connectors.context)
        self.connectors.update(exp)
        self.to_learner.update(self.connectors.offline(exp))


def with_context(exp: Experience, context: int) -> Experience:
    """Where a segment begins in the middle of its episode, its first ``context`` steps become lookback.

    Connectors that remember can't know what was before these; so they are seen, but not trained on.
    """
    segments = exp.segments
    lookback = np.where(segments.t_start > 0, np.minimum(context, exp.lengths), 0)
    if (segments.lookback >= lookback).all():
        return exp
    lookback = np.maximum(segments.lookback, lookback)
    return Experience(exp.steps, exp.offsets, segments.replace(lookback=lookback), exp.final_obs)
