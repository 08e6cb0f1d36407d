# SPDX-License-Identifier: Apache-2.0
"""The state of running envs as plain data: arrays, numbers, strings and random generators, never a pickle.

An env with ``get_state`` and ``set_state`` is asked for its state. Any other is walked attribute by attribute, its
wrappers included, and put back in place: nothing is ever constructed from what was stored but numbers, strings, arrays
and their containers. An env that holds anything else (a C++ simulator, an open socket) can't be captured, and says so.
"""

import enum
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

_PLAIN = (bool, int, float, str, bytes, np.bool_, np.number)
# Fixed once an env is made, or only for drawing: neither is part of an episode's state.
_STATIC = (gym.Space, EnvSpec, types.ModuleType, type, enum.Enum)
_SEQUENCES = {"list": list, "tuple": tuple, "deque": deque, "array": np.ndarray}
_DRAWING = ("pygame", "matplotlib", "PIL", "moviepy")


class _CannotCapture(Exception):
    """An attribute is not plain data; the message is its path."""


def capture_env(env: Any) -> dict[str, Any]:
    """The env's state: ``{"how": "get_state" | "snapshot" | "new episodes", ...}``."""
    used_get_state = [False]
    try:
        tree = _capture(env, type(env).__name__, set(), used_get_state)
    except _CannotCapture as error:
        return {"how": "new episodes", "why": f"{error} is not plain data"}
    return {"how": "get_state" if used_get_state[0] else "snapshot", "env": tree}


def restore_env(env: Any, state: dict[str, Any]) -> None:
    """Put a state from `capture_env` into an env of the same making."""
    _restore(env, state["env"])


def _is_static(value: Any) -> bool:
    if isinstance(value, _STATIC) or type(value).__module__.split(".")[0] in _DRAWING:
        return True
    return (callable(value) and not hasattr(value, "__dict__")) or isinstance(
        value, types.FunctionType | types.MethodType
    )


def _capture(value: Any, path: str, seen: set[int], used_get_state: list[bool]) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return {"value": value}
    if _is_static(value) or id(value) in seen:
        return {"skip": None}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"value": value.copy()}
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, np.random.RandomState):
        return {"random_state": value.get_state(legacy=False)}
    seen = seen | {id(value)}
    if isinstance(value, list | tuple | deque | np.ndarray):
        kind = next(k for k, t in _SEQUENCES.items() if isinstance(value, t))
        items = value.reshape(-1) if isinstance(value, np.ndarray) else value
        return {kind: [_capture(item, f"{path}[{i}]", seen, used_get_state) for i, item in enumerate(items)]}
    if isinstance(value, set | frozenset) and all(isinstance(item, _PLAIN) for item in value):
        return {"set": list(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, _PLAIN) or _is_plain_tuple(key) for key in value):
            raise _CannotCapture(path)
        return {
            "dict": [[key, _capture(item, f"{path}[{key!r}]", seen, used_get_state)] for key, item in value.items()]
        }
    own = _own_state(value)
    if own is not None:
        used_get_state[0] = True
        return {"own": _capture(own[0](), f"{path}.get_state()", seen, used_get_state)}
    if not hasattr(value, "__dict__") or any(getattr(base, "__slots__", ()) for base in type(value).__mro__):
        raise _CannotCapture(path)
    return {
        "object": {name: _capture(item, f"{path}.{name}", seen, used_get_state) for name, item in vars(value).items()}
    }


def _is_plain_tuple(key: Any) -> bool:
    return isinstance(key, tuple) and all(isinstance(part, _PLAIN) for part in key)


def _own_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    if isinstance(value, gym.Env) and not isinstance(value, gym.Wrapper):
        get, put = getattr(value, "get_state", None), getattr(value, "set_state", None)
        if callable(get) and callable(put):
            return get, put
    return None


def _restore(current: Any, node: dict[str, Any]) -> Any:
    """The value that ``node`` describes; objects are changed in place and returned."""
    ((kind, stored),) = node.items()
    match kind:
        case "value":
            return stored.copy() if isinstance(stored, np.ndarray) else stored
        case "skip":
            return current
        case "generator":
            bits = getattr(np.random, stored["bit_generator"])()
            bits.state = stored
            if isinstance(current, np.random.Generator) and type(current.bit_generator) is type(bits):
                current.bit_generator.state = stored
                return current
            return np.random.Generator(bits)
        case "random_state":
            current.set_state(stored)
            return current
        case "set":
            return type(current)(stored) if isinstance(current, set | frozenset) else set(stored)
        case "dict":
            old = current if isinstance(current, dict) else {}
            items = {_key(key): _restore(old.get(_key(key)), item) for key, item in stored}
            if not isinstance(current, dict):
                return items
            current.clear()
            current.update(items)
            return current
        case "own":
            own = _own_state(current)
            assert own is not None
            own[1](_restore(None, stored))
            return current
        case "object":
            for name, item in stored.items():
                if "skip" not in item:
                    setattr(current, name, _restore(getattr(current, name, None), item))
            return current
    return _restore_sequence(current, kind, stored)


def _restore_sequence(current: Any, kind: str, stored: list[Any]) -> Any:
    if kind == "array":
        flat = current.reshape(-1)
        for i, item in enumerate(stored):
            flat[i] = _restore(flat[i], item)
        return current
    old = list(current) if isinstance(current, list | tuple | deque) else []
    items = [_restore(old[i] if i < len(old) else None, item) for i, item in enumerate(stored)]
    if isinstance(current, deque):
        current.clear()
        current.extend(items)
        return current
    if isinstance(current, list):
        current[:] = items
        return current
    if isinstance(current, tuple) and hasattr(current, "_fields"):
        return type(current)(*items)
    return items if kind == "list" else tuple(items)


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
