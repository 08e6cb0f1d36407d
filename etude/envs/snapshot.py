# SPDX-License-Identifier: Apache-2.0
"""The state of running envs as plain data: arrays, numbers, strings and random generators, never a pickle.

An env with ``get_state`` and ``set_state`` is asked for its state. Any other is walked attribute by attribute, its
wrappers included, and put back in place. What is in two places stays one thing. Objects are only ever filled, in an env
that was made and reset anew; none is constructed from what was stored but numbers, strings, arrays, random generators
and their containers. An env that holds anything else (a C++ simulator, an open socket) can't be captured, and says so.
"""

import enum
import functools
import logging
import pathlib
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

Node = dict[str, Any]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_KEYS = frozenset((type(None), bool, int, float, str, bytes))
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_DICTS = (dict, OrderedDict, defaultdict)
_DRAWING = frozenset(("pygame", "matplotlib", "PIL", "moviepy", "_thread"))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_DETAILS = frozenset(("id", "class", "maxlen", "shape", "rng", "order"))  # beside the kind of a node
_ANY = "any"  # stands for what is fixed once an env is made, or for drawing only


class CannotCaptureError(Exception):
    """Something in an env is not plain data; the message says where it is."""


class CannotRestoreError(Exception):
    """A stored state does not fit the env that it is put into; the message says where."""


class _Bare:
    pass


def capture_env(env: Any) -> dict[str, Any]:
    """The env's state: ``{"how": "get_state" | "snapshot" | "new episodes", ...}``."""
    capture = _Capture()
    try:
        tree = capture.node(env, type(env).__name__)
    except (CannotCaptureError, RecursionError) as error:
        return {"how": "new episodes", "why": str(error)}
    return {"how": "get_state" if capture.used_get_state else "snapshot", "env": tree}


def restore_env(env: Any, state: dict[str, Any]) -> None:
    """Put a state from `capture_env` into an env of the same making, after its reset.

    Raises:
        CannotRestoreError: the env is another, or holds objects that a new one does not; it must be reset then.
    """
    _Restore().value(env, state["env"], type(env).__name__)


def order_of(array: NDArray[Any]) -> Literal["C", "F"]:
    """How an array lies in memory, which a checkpoint does not keep: products of matrices round differently by it."""
    return "F" if array.flags.fnc else "C"


def _class_name(thing: type) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _static(value: Any) -> str | None:
    """A name for what has no state of its own; None for all else."""
    if isinstance(value, _FUNCTIONS):
        name = value.__qualname__
        return _ANY if "<" in name else f"{getattr(value, '__module__', '')}:{name}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    fixed = isinstance(value, EnvSpec | functools.partial | logging.Logger | pathlib.PurePath)
    if fixed or type(value).__module__.split(".")[0] in _DRAWING:
        return _ANY
    return _ANY if callable(value) and not hasattr(value, "__dict__") else None


def _own_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    if isinstance(value, gym.Env | VectorEnv) and not isinstance(value, gym.Wrapper):
        get, put = getattr(value, "get_state", None), getattr(value, "set_state", None)
        if callable(get) and callable(put):
            return get, put
    return None


class _Capture:
    """From an env to nodes: ``{kind: content}``, with a number ``id`` where it can be met twice."""

    def __init__(self) -> None:
        self.used_get_state = False
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # keeps them alive, so that no id is used twice

    def node(self, value: Any, path: str, *, plain: bool = False) -> Node:
        """``plain``: objects are not allowed, since nothing will be there for them to be put into."""
        if type(value) in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind not in "OV"):
            return {"value": value}
        if isinstance(value, enum.Enum) and value.name in type(value).__members__ and not plain:
            return {"enum": value.name, "class": _class_name(type(value))}
        if not plain and (static := _static(value)) is not None:
            return {"static": static}
        if id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        return {"id": number, **self._content(value, path, plain)}

    def _content(self, value: Any, path: str, plain: bool) -> Node:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind not in "OV":
            return {"array": value.copy(), "order": order_of(value)}
        if kind is np.random.Generator:
            return {"generator": value.bit_generator.state}
        if kind is np.random.RandomState:
            return {"random_state": value.get_state(legacy=False)}
        if kind is random.Random:
            return {"python_random": value.getstate()}
        if kind in _SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields") and not plain):
            items = [self.node(item, f"{path}[{i}]", plain=plain) for i, item in enumerate(value)]
            return {_SEQUENCES[kind]: items} if kind in _SEQUENCES else {"named": items, "class": _class_name(kind)}
        if kind is deque:
            items = [self.node(item, f"{path}[{i}]", plain=plain) for i, item in enumerate(value)]
            return {"deque": items, "maxlen": value.maxlen}
        if kind is np.ndarray and value.dtype.kind == "O":
            items = [self.node(item, f"{path}.flat[{i}]", plain=plain) for i, item in enumerate(value.flat)]
            return {"objects": items, "shape": list(value.shape)}
        if kind in _DICTS and not (plain and kind is defaultdict):
            return {"dict": self._items(value, path, plain), "class": _class_name(kind)}
        if plain:
            raise CannotCaptureError(f"{path} is a {_class_name(kind)}, not plain data")
        return self._object(value, path)

    def _items(self, value: dict[Any, Any], path: str, plain: bool) -> list[Any]:
        for key in value:
            parts = key if type(key) is tuple else (key,)
            if not all(type(part) in _KEYS or isinstance(part, np.number | np.bool_) for part in parts):
                raise CannotCaptureError(f"{path} has the key {key!r}, which is not plain data")
        return [[key, self.node(item, f"{path}[{key!r}]", plain=plain)] for key, item in value.items()]

    def _object(self, value: Any, path: str) -> Node:
        kind = type(value)
        own = _own_state(value)
        if own is not None:
            self.used_get_state = True
            rng = self.node(getattr(value, "_np_random", None), f"{path}._np_random")
            return {"own": self.node(own[0](), f"{path}.get_state()", plain=True), "rng": rng}
        # An instance that is larger than a bare one keeps something in C or in slots, where it is not seen.
        if not hasattr(value, "__dict__") or kind.__basicsize__ > _Bare.__basicsize__:
            raise CannotCaptureError(f"{path} is a {_class_name(kind)}, not plain data")
        parts = vars(value)
        if isinstance(value, gym.Space):  # what it is does not change, but it can be sampled from
            parts = {n: v for n, v in parts.items() if n in ("_np_random", "spaces") or isinstance(v, gym.Space)}
        content = {name: self.node(item, f"{path}.{name}") for name, item in parts.items()}
        return {"object": content, "class": _class_name(kind)}


class _Restore:
    """From nodes to values, with what is in the env now to be filled."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._filled: list[Any] = []

    def value(self, current: Any, node: Node, path: str) -> Any:
        if "value" in node:
            return node["value"]
        if "ref" in node:
            if node["ref"] not in self._made:
                raise CannotRestoreError(f"{path} is in a tuple that holds itself")
            return self._made[node["ref"]]
        if "static" in node:
            if node["static"] not in (_ANY, _static(current)):
                raise CannotRestoreError(f"{path} was {node['static']}, and is another thing in a new env")
            return current
        if "enum" in node:
            self._check_class(current, node, path)
            return type(current)[node["enum"]]
        if "object" in node:
            return self._fill(current, node, path)
        made = self._make(current, node, path)
        self._made[node["id"]] = made
        return made

    def _check_class(self, current: Any, node: Node, path: str) -> None:
        if _class_name(type(current)) != node["class"]:
            raise CannotRestoreError(f"{path} was a {node['class']}, and a new env has none there to be filled")

    def _fill(self, current: Any, node: Node, path: str) -> Any:
        self._check_class(current, node, path)
        if any(current is filled for filled in self._filled):  # one thing in a new env, but two when captured
            twin = object.__new__(type(current))
            vars(twin).update(vars(current))
            current = twin
        self._filled.append(current)
        self._made[node["id"]] = current
        attributes = vars(current)
        for name, item in node["object"].items():
            attributes[name] = self.value(attributes.get(name), item, f"{path}.{name}")
        if not isinstance(current, gym.Space):
            for name in attributes.keys() - node["object"].keys():
                del attributes[name]
        return current

    def _make(self, current: Any, node: Node, path: str) -> Any:
        kind, stored = next(
            (k, v) for k, v in node.items() if k not in ("id", "class", "maxlen", "shape", "rng", "order")
        )
        match kind:
            case "array":
                return np.array(stored, order=node["order"])
            case "generator":
                return np.random.Generator(_bit_generator(stored))
            case "random_state":
                made = np.random.RandomState()
                made.set_state(stored)
                return made
            case "python_random":
                python_random = random.Random()
                python_random.setstate(stored)
                return python_random
            case "dict":
                return self._dict(current, node, path)
            case "own":
                own = _own_state(current)
                if own is None:
                    raise CannotRestoreError(f"{path} has no set_state")
                own[1](self.value(None, stored, f"{path}.get_state()"))
                if (rng := self.value(None, node["rng"], f"{path}._np_random")) is not None:
                    current._np_random = rng
                return current
        return self._sequence(current, kind, node, path)

    def _dict(self, current: Any, node: Node, path: str) -> Any:
        old = current if isinstance(current, dict) else {}
        made: dict[Any, Any] = {}
        if node["class"] == _class_name(OrderedDict):
            made = OrderedDict()
        elif node["class"] == _class_name(defaultdict):
            self._check_class(current, node, path)
            made = defaultdict(current.default_factory)
        self._made[node["id"]] = made
        for key, item in node["dict"]:
            made[key] = self.value(old.get(key), item, f"{path}[{key!r}]")
        return made

    def _sequence(self, current: Any, kind: str, node: Node, path: str) -> Any:
        stored, old = node[kind], []
        if isinstance(current, np.ndarray) and current.dtype == object:
            old = list(current.flat)
        elif isinstance(current, list | tuple | deque):
            old = list(current)
        made: Any = deque(maxlen=node["maxlen"]) if kind == "deque" else []
        if kind in ("list", "deque"):
            self._made[node["id"]] = made
        for i, item in enumerate(stored):
            made.append(self.value(old[i] if i < len(old) else None, item, f"{path}[{i}]"))
        match kind:
            case "tuple" | "set" | "frozenset":
                return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)
            case "named":
                self._check_class(current, node, path)
                return type(current)(*made)
            case "objects":
                array = np.empty(len(made), object)
                array[:] = made
                return array.reshape(node["shape"])
        return made


def _bit_generator(state: dict[str, Any]) -> np.random.BitGenerator:
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    for kind in kinds:
        if kind.__name__ == state["bit_generator"]:
            made: np.random.BitGenerator = kind()
            made.state = state
            return made
    raise CannotRestoreError(f"there is no random generator {state['bit_generator']!r}")
