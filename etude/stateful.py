# SPDX-License-Identifier: Apache-2.0
"""Stateful: base class of objects whose state is a list of attributes."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


class Stateful:
    """Saves and restores the attributes named in ``_state``: plain data, numeric arrays, and other Stateful objects."""

    _state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state for `load_state_dict`: plain data and arrays."""
        own = {name: getattr(self, name) for name in self._state}
        return {n: v.state_dict() if isinstance(v, Stateful) else copy.deepcopy(v) for n, v in own.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``state`` does not come from `state_dict`.
        """
        for name in self._state:
            own, stored = getattr(self, name), state[name]
            if isinstance(own, Stateful):
                own.load_state_dict(stored)
            elif isinstance(own, np.ndarray):  # a copy, as the stored array may be read-only
                setattr(self, name, np.array(stored, own.dtype).reshape(own.shape))
            else:
                setattr(self, name, type(own)(stored) if isinstance(own, int | float | str) else stored)
