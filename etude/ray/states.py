# SPDX-License-Identifier: Apache-2.0
"""What learners know, as it goes through the object store: arrays, which are read there in place."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from etude.learners import ModuleLearner


def known_by(learner: ModuleLearner, *, module: bool = False, connectors: bool = False) -> dict[str, Any]:
    """What the learner of a module knows, with arrays for tensors; see `ModuleLearner.state_dict`.

    Args:
        learner: The module's.
        module: With the weights.
        connectors: Also what its connectors have learned.
    """
    state = {name: value for name, value in learner.state_dict().items() if module or name != "module"}
    own = {"connectors": learner.connectors.state_dict()} if connectors else {}
    return as_arrays(state) | own  # type: ignore[no-any-return]


def set_known(learner: ModuleLearner, known: Mapping[str, Any]) -> None:
    """Go on from what `known_by` gave, weights included."""
    learner.load_state_dict(from_arrays({n: value for n, value in known.items() if n != "connectors"}))
    if "connectors" in known:
        learner.connectors.load_state_dict(copy.deepcopy(known["connectors"]))  # which may be written to


def as_arrays(state: Any) -> Any:
    """Plain data with arrays for tensors; those of a dtype that NumPy lacks stay tensors."""
    return _mapped(state, torch.Tensor, _array)


def from_arrays(state: Any) -> Any:
    """The inverse: tensors on the CPU, to be copied from and not written to, as they share the arrays' memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what lies in the store is read-only
        return _mapped(state, np.ndarray, torch.from_numpy)


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _mapped(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(state, kind):
        return change(state)
    if isinstance(state, Mapping):
        return {name: _mapped(value, kind, change) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_mapped(value, kind, change) for value in state]
    return state
