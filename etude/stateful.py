# SPDX-License-Identifier: Apache-2.0
"""Stateful: what resumes where it stood, by a list of its attributes."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


class Stateful:
    """Saves the attributes that ``_state`` names: plain data, arrays of numbers, and other such objects."""

    _state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays, copied; goes into `load_state_dict`."""
        return {name: _saved(getattr(self, name)) for name in self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is not such a state.
        """
        for name in self._state:
            own, stored = getattr(self, name), state[name]
            if isinstance(own, Stateful):
                own.load_state_dict(stored)
            elif isinstance(own, np.ndarray):
                own[...] = np.asarray(stored, own.dtype).reshape(own.shape)
            else:
                setattr(self, name, type(own)(stored) if isinstance(own, int | float | str) else stored)


def _saved(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else copy.deepcopy(value)
