# SPDX-License-Identifier: Apache-2.0
"""What connectors have learned, as JSON data, exactly: to be kept with a recording and used again."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from etude.connectors.pipeline import Pipeline, overrides
from etude.errors import CheckpointError, DataError

_ARRAY: Final = "$array"
_FLOAT: Final = "$float"


def learns(pipeline: Pipeline) -> bool:
    """Whether any of the connectors learns from experience, so that there is something to keep."""
    return any(overrides(connector, "update") for connector in pipeline.connectors)


def state_to_json(pipeline: Pipeline) -> dict[str, Any]:
    """What the connectors have learned; the running state of slots is left out.

    Arrays are ``{"$array": [numbers in C order], "shape": [...], "dtype": "float64"}``; numbers that are not finite are
    ``{"$float": "inf"}``.

    Raises:
        DataError: a connector keeps something else than plain data and arrays.
    """
    learned = pipeline.copy()
    learned.start(0)
    found = _encoded(learned.state_dict(), "connectors")
    assert isinstance(found, dict)
    return found


def state_from_json(pipeline: Pipeline, data: Any) -> None:
    """Let the connectors know what `state_to_json` gave; to be called after `Pipeline.spaces`, before `start`.

    Raises:
        DataError: the data is of other connectors or shapes, or is no such data; nothing has changed then.
    """
    try:
        state = _decoded(data)
        pipeline.copy().load_state_dict(state)
    except CheckpointError as error:
        raise DataError(f"what the recording stores of its connectors does not fit: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"what the recording stores of its connectors can't be read ({type(error).__name__}: {error}). Let them "
            "learn from the data instead."
        ) from error
    pipeline.load_state_dict(state)


def _encoded(node: Any, path: str) -> Any:
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else {_FLOAT: str(node)}
    if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
        return {key: _encoded(value, f"{path}/{key}") for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_encoded(value, f"{path}/{i}") for i, value in enumerate(node)]
    if isinstance(node, np.ndarray) and node.dtype.kind in "biuf":
        numbers = [_encoded(value, path) for value in node.reshape(-1).tolist()]
        return {_ARRAY: numbers, "shape": list(node.shape), "dtype": node.dtype.name}
    raise DataError(
        f"`{path}` is {type(node).__name__}, which can't be kept with a recording: what state_dict() of a connector "
        "gives must be plain data and arrays of numbers."
    )


def _decoded(node: Any) -> Any:
    if isinstance(node, list):
        return [_decoded(value) for value in node]
    if not isinstance(node, dict):
        return node
    if _FLOAT in node:
        return float(node[_FLOAT])
    if _ARRAY in node:
        dtype = np.dtype(str(node["dtype"]))
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of {dtype}")
        return np.array([_decoded(value) for value in node[_ARRAY]], dtype).reshape(node["shape"])
    return {key: _decoded(value) for key, value in node.items()}
