# SPDX-License-Identifier: Apache-2.0
"""Random streams as plain data. (Torch's are tensors already: ``torch.get_rng_state()``, ``Generator.get_state()``.)"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import CheckpointError

_KINDS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def get_rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """The whole state of a NumPy generator: a dict of strings, ints and arrays, fit for `save_tree`."""
    return dict(rng.bit_generator.state)


def rng_from_state(state: Mapping[str, Any]) -> np.random.Generator:
    """A generator that goes on exactly where the one that `get_rng_state` was called on stood.

    Raises:
        CheckpointError: ``state`` is not the state of one of NumPy's bit generators.
    """
    kind = state.get("bit_generator")
    if kind not in _KINDS:
        raise CheckpointError(f"the state of a random generator is of kind {kind!r}; known are {', '.join(_KINDS)}.")
    bits = getattr(np.random, kind)()
    try:
        bits.state = dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a {kind} random generator is broken: {error!r}.") from error
    return np.random.Generator(bits)
