# SPDX-License-Identifier: Apache-2.0
"""What a step led to, as a column."""

from typing import TYPE_CHECKING

from etude import columns as col
from etude.connectors.base import Connector
from etude.experience import Experience

if TYPE_CHECKING:
    from etude.modules.module import Module


class NextObs(Connector):
    """Adds ``next_obs`` for losses that look at it: the observation after each step."""

    needs = (col.OBS,)

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """The columns ``next_obs...``."""
        return exp.with_steps(**{col.NEXT_OBS + name[len(col.OBS) :]: c for name, c in exp.next_obs().items()})
