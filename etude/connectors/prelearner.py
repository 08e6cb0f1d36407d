# SPDX-License-Identifier: Apache-2.0
"""A user's own step between a recording and the learner."""

from collections.abc import Callable
from typing import TypeAlias

from etude.experience import Experience

Connect: TypeAlias = Callable[[Experience], Experience]
"""What the connectors would do."""


class PreLearner:
    """A step of your own between the recording and the learner, with settings of its own. Does nothing itself.

    Called with each part of the recording, in workers where there are some; so it keeps nothing from call to call.
    ``__init__`` keeps its arguments as attributes of the same names, so that checkpoints can have them.
    """

    def __call__(self, exp: Experience, connect: Connect) -> Experience:
        """What is trained on.

        Args:
            exp: As recorded: whole segments.
            connect: Lets the connectors see what it is given, as they would have without this step.
        """
        return connect(exp)


PreLearnerLike: TypeAlias = PreLearner | Callable[[Experience, Connect], Experience]
"""A `PreLearner`, or a function that is called as one."""
