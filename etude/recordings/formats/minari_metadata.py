# SPDX-License-Identifier: Apache-2.0
"""Minari's ``metadata.json``: spaces (JSON inside of JSON), the env's id."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from etude.columns import SEPARATOR
from etude.errors import DataError, SpaceError
from etude.files import AnyPath
from etude.recordings.layout import loads
from etude.spaces import Space, leaves

METADATA: Final = "metadata.json"


def read_metadata(path: AnyPath) -> dict[str, Any]:
    """The object in ``metadata.json``."""
    try:
        data = loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: can't be read as JSON ({error}). Restore it from a copy.") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: this is a {type(data).__name__}, not the object that Minari writes. Restore it.")
    return data


def env_id(metadata: Mapping[str, Any]) -> str | None:
    """The id of the env, where the metadata hold one."""
    try:
        spec = json.loads(metadata.get("env_spec") or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    env = spec.get("id") if isinstance(spec, dict) else None
    return env if isinstance(env, str) else None


def is_image(leaf: Space) -> bool:
    """Whether Minari packs values of this space as JPEG where ``jpeg_encoding`` is on."""
    if not isinstance(leaf, spaces.Box) or leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return False
    return bool(min(leaf.shape[:2]) >= 32 and (leaf.low == 0).all() and (leaf.high == 255).all())


def leaves_of(
    space: Space, name: str, path: tuple[str, ...], tuple_member: Callable[[int], str]
) -> Iterator[tuple[str, tuple[str, ...], Space]]:
    """The simple spaces inside ``space``: their columns here and their paths there."""
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from leaves_of(sub, f"{name}{SEPARATOR}{key}", (*path, str(key)), tuple_member)
    elif isinstance(space, spaces.Tuple):
        for i, sub in enumerate(space.spaces):
            yield from leaves_of(sub, f"{name}{SEPARATOR}{i}", (*path, tuple_member(i)), tuple_member)
    else:
        yield name, path, space


def space_of(text: Any, where: str) -> Space:
    """A space from Minari's JSON.

    Raises:
        DataError: it does not describe a space, or one that Etude does not know.
    """
    try:
        space = _made(json.loads(text) if isinstance(text, str) else text)
        leaves(space, "space")
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, RecursionError, IndexError) as error:
        raise DataError(f"{where} does not describe a space: {str(text)[:200]} ({error!r}).") from error
    except SpaceError as error:
        raise DataError(f"{where}: {error}") from error
    return space


def _made(data: Any) -> Space:
    kind = data["type"]
    if kind == "Box":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        low, high = (np.asarray(data[side], dtype).reshape(shape) for side in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data.get("start", 0), dtype=np.dtype(data.get("dtype", "int64")).type)
    if kind == "MultiDiscrete":
        dtype = np.dtype(data.get("dtype", "int64"))
        start = np.asarray(data["start"], dtype) if "start" in data else None
        return spaces.MultiDiscrete(np.asarray(data["nvec"], dtype), dtype.type, start=start)
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind == "Dict":
        return spaces.Dict([(key, _made(sub)) for key, sub in data["subspaces"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_made(sub) for sub in data["subspaces"]])
    raise SpaceError(f"a {kind} space. Etude handles Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple.")


def json_of(space: Space) -> dict[str, Any]:
    """A space as Minari describes it, to be written as JSON: the inverse of `space_of`."""
    if isinstance(space, spaces.Box):
        bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        own = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), **own}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": list(space.shape) if len(space.shape) > 1 else int(space.shape[0])}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {str(key): json_of(sub) for key, sub in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [json_of(sub) for sub in space.spaces]}
    raise SpaceError(f"a {type(space).__name__} space can't be written for Minari.")
