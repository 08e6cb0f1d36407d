# SPDX-License-Identifier: Apache-2.0
"""The state of running envs as plain data: arrays, numbers, strings and random generators, never a pickle.

An env or wrapper with ``get_state()`` and ``set_state(state)`` is asked for its state. Any other is walked attribute by
attribute, its wrappers included, and put back in place. What is in two places stays one thing, and arrays that share
memory still do. Objects are only ever filled, in an env that was made and reset anew; none is constructed from what was
stored but numbers, strings, arrays, random generators and their containers. Of what is written in C, only the
simulators in `simulators` are known. An env that holds anything else (an open socket, a Box2D world), or that fails
while it is looked through, can't be captured, and the reason is given.
"""

import ctypes
import enum
import functools
import inspect
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

from etude.envs.simulators import simulator

Node = dict[str, Any]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_KEYS = frozenset((type(None), bool, int, float, str, bytes))
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_DICTS = (dict, OrderedDict, defaultdict)
_STATELESS = tuple(
    f"{module}."
    for module in (
        "pygame",
        "matplotlib",
        "PIL",
        "moviepy",
        "_thread",
        "gymnasium.envs.mujoco.mujoco_rendering",
        "dm_control.mujoco.index",  # names for the parts of a simulator's memory
    )
)
"""Modules of things that draw, or that have no state of their own."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_DETAILS = frozenset(
    ("id", "class", "maxlen", "shape", "rng", "below", "order", "dtype", "offset", "strides", "memory")
)
"""What stands beside the kind of a node."""
_ANY = "any"  # stands for what is fixed once an env is made, or for drawing only
_DEEPEST = 80  # things inside one another: a checkpoint can't hold many more
_ALIGNED = 16


class CannotCaptureError(Exception):
    """Something in an env is not plain data; the message says where it is."""


class CannotRestoreError(Exception):
    """A stored state does not fit the env that it is put into; the message says where."""


class _Bare:
    pass


def capture_env(env: Any) -> dict[str, Any]:
    """The env's state: ``{"how": "get_state" | "snapshot" | "new episodes", ...}``. Whatever fails is a reason why not.

    Raises:
        KeyboardInterrupt: Ctrl-C; nothing else.
    """
    capture = _Capture()
    try:
        tree = capture.node(env, type(env).__name__)
        capture.place_arrays()
    except CannotCaptureError as error:
        return {"how": "new episodes", "why": str(error)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  an env's own code, which may raise anything
        return {"how": "new episodes", "why": f"{_short(capture.path)} can't be looked through ({_text(error)})"}
    return {"how": "get_state" if capture.used_get_state else "snapshot", "env": tree}


def restore_env(env: Any, state: dict[str, Any]) -> None:
    """Put a state from `capture_env` into an env of the same making, after its reset.

    Raises:
        CannotRestoreError: the env is another, or holds objects that a new one does not, or its ``set_state`` fails; it
            must be made anew then, or reset at least.
    """
    try:
        restore = _Restore()
        restore.value(env, state["env"], type(env).__name__)
        restore.put_simulators()
    except (CannotRestoreError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise CannotRestoreError(f"the state can't be put back ({_text(error)})") from error


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # noqa: BLE001  of an error that can't be shown
        return type(error).__name__


def _short(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:120]}..."


def order_of(array: NDArray[Any]) -> Literal["C", "F"]:
    """How an array lies in memory, which a checkpoint does not keep: products of matrices round differently by it."""
    return "F" if array.flags.fnc else "C"


def _class_name(thing: type) -> str:
    return f"{getattr(thing, '__module__', '')}:{thing.__qualname__}"  # classes that SWIG makes may have no module


def _static(value: Any) -> str | None:
    """A name for what has no state of its own; None for all else."""
    if isinstance(value, _FUNCTIONS):
        name = value.__qualname__
        return _ANY if "<" in name else f"{getattr(value, '__module__', '')}:{name}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    fixed = isinstance(value, EnvSpec | functools.partial | logging.Logger | pathlib.PurePath)
    if fixed or f"{getattr(type(value), '__module__', '')}.".startswith(_STATELESS):
        return _ANY
    return _ANY if callable(value) and not hasattr(value, "__dict__") else None


def _is_env(value: Any) -> bool:
    """Whether it is an env or a wrapper, of one agent or several."""
    many = all(_own_attribute(value, name) is not None for name in ("possible_agents", "reset", "step"))
    return isinstance(value, gym.Env | VectorEnv) or many


def _own_attribute(value: Any, name: str) -> Any:
    """What an object has by itself: some wrappers hand on what the env in them has."""
    return getattr(value, name, None) if inspect.getattr_static(value, name, None) is not None else None


def _own_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """The ``get_state()`` and ``set_state(state)`` of an env or a wrapper that has both."""
    if not _is_env(value):
        return None
    get, put = _own_attribute(value, "get_state"), _own_attribute(value, "set_state")
    return (get, put) if _takes(get, 0) and _takes(put, 1) else None


def _takes(function: Any, count: int) -> bool:
    """Whether it can be called with so many arguments: the ``set_state(qpos, qvel)`` of MuJoCo's envs needs two."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def _memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose memory this one is a view of; itself, where it is no view."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


class _Capture:
    """From an env to nodes: ``{kind: content}``, with a number ``id`` where it can be met twice."""

    def __init__(self) -> None:
        self.used_get_state = False
        self.path = ""
        """What was looked at last."""
        self._depth = 0
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # keeps them alive, so that no id is used twice
        self._arrays: list[tuple[Node, NDArray[Any]]] = []
        self._simulated: list[tuple[int, int]] = []  # where the arrays of simulators lie in memory

    def node(self, value: Any, path: str, *, plain: bool = False) -> Node:
        """``plain``: objects are not allowed, since nothing will be there for them to be put into."""
        self.path = path
        if type(value) in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind not in "OV"):
            return {"value": value}
        if isinstance(value, enum.Enum) and value.name in type(value).__members__ and not plain:
            return {"enum": value.name, "class": _class_name(type(value))}
        if not plain and (static := _static(value)) is not None:
            return {"static": static}
        if id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        if self._depth == _DEEPEST:
            raise CannotCaptureError(f"{_short(path)} lies deeper than {_DEEPEST} things inside one another")
        number = self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        self._depth += 1
        node = {"id": number, **self._content(value, path, plain)}
        self._depth -= 1
        if type(value) is np.ndarray and "objects" not in node:
            self._arrays.append((node, value))
        return node

    def _content(self, value: Any, path: str, plain: bool) -> Node:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind not in "OV":
            return {}  # see `place_arrays`
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
            raise CannotCaptureError(f"{_short(path)} is a {_class_name(kind).lstrip(':')}, not plain data")
        return self._object(value, path)

    def _items(self, value: dict[Any, Any], path: str, plain: bool) -> list[Any]:
        for key in value:
            parts = key if type(key) is tuple else (key,)
            if not all(type(part) in _KEYS or isinstance(part, np.number | np.bool_) for part in parts):
                raise CannotCaptureError(f"{_short(path)} has the key {key!r}, which is not plain data")
        return [[key, self.node(item, f"{path}[{key!r}]", plain=plain)] for key, item in value.items()]

    def _object(self, value: Any, path: str) -> Node:
        kind = type(value)
        own = _own_state(value)
        if own is not None:
            self.used_get_state = True
            below = self._below(value, path)
            rng = self.node(getattr(value, "_np_random", None), f"{path}._np_random")
            return {"own": self.node(own[0](), f"{path}.get_state()", plain=True), "rng": rng, "below": below}
        known = simulator(value)
        if known is not None:
            try:
                state = known.get(value)
            except ValueError as error:
                raise CannotCaptureError(f"{_short(path)}: {error}") from error
            self._simulated += [np.lib.array_utils.byte_bounds(array) for array in known.arrays(value)]
            return {"simulator": state, "class": _class_name(kind)}
        # An instance that is larger than a bare one keeps something in C or in slots, where it is not seen.
        if not hasattr(value, "__dict__") or kind.__basicsize__ > _Bare.__basicsize__:
            raise CannotCaptureError(f"{_short(path)} is a {_class_name(kind).lstrip(':')}, not plain data")
        parts = vars(value)
        if isinstance(value, gym.Space):  # what it is does not change, but it can be sampled from
            parts = {n: v for n, v in parts.items() if n in ("_np_random", "spaces") or isinstance(v, gym.Space)}
        content = {name: self.node(item, f"{path}.{name}") for name, item in parts.items()}
        return {"object": content, "class": _class_name(kind)}

    def _below(self, wrapper: Any, path: str) -> Node | None:
        """What is in a wrapper with a state of its own. None: it can't be captured, and the wrapper answers for it."""
        inside = vars(wrapper).get("env")
        if not _is_env(inside):
            return None
        depth, arrays, simulated = self._depth, len(self._arrays), len(self._simulated)
        met = len(self._met)
        try:
            return self.node(inside, f"{path}.env")
        except Exception:  # noqa: BLE001  see `capture_env`
            self._depth = depth
            del self._arrays[arrays:], self._simulated[simulated:], self._met[met:]
            self._numbers = {key: number for key, number in self._numbers.items() if number < met}
            return None

    def place_arrays(self) -> None:
        """Fill the nodes of arrays, now that it is known which of them share memory."""
        sharing: dict[int, list[tuple[Node, NDArray[Any]]]] = {}
        for node, array in self._arrays:
            sharing.setdefault(id(_memory_of(array)), []).append((node, array))
        for group in sharing.values():
            node, array = group[0]
            if self._is_simulated(array):
                for node, array in group:
                    node |= {"kept": array.dtype.str, "shape": list(array.shape)}
            elif len(group) == 1:
                node |= {"array": array.copy(), "order": order_of(array)}
            else:
                _place_together(group)

    def _is_simulated(self, array: NDArray[Any]) -> bool:
        if not self._simulated or _memory_of(array).base is None:
            return False
        begin, end = np.lib.array_utils.byte_bounds(array)
        return any(first <= begin and end <= last for first, last in self._simulated)


def _place_together(group: list[tuple[Node, NDArray[Any]]]) -> None:
    """Fill the nodes of arrays that are views of the same memory."""
    bounds = [np.lib.array_utils.byte_bounds(array) for _, array in group]
    origin = _memory_of(group[0][1]).ctypes.data
    begin = min(first for first, _ in bounds)
    begin -= (begin - origin) % _ALIGNED
    memory = ctypes.string_at(begin, max(end for _, end in bounds) - begin)
    for node, array in group:
        node["view"] = node["id"] if node is group[0][0] else group[0][0]["id"]
        node |= {"dtype": array.dtype.str, "shape": list(array.shape), "strides": list(array.strides)}
        node["offset"] = array.ctypes.data - begin
    group[0][0]["memory"] = np.frombuffer(memory, np.uint8)


class _Restore:
    """From nodes to values, with what is in the env now to be filled."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._filled: dict[int, Any] = {}  # by id, which are not used again while they are here
        self._memories: dict[int, NDArray[np.uint8]] = {}
        self._simulators: list[tuple[Any, dict[str, Any], str]] = []

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
            self._check_class(current, node, path, enum.Enum)
            return type(current)[node["enum"]]
        if "object" in node:
            return self._fill(current, node, path)
        made = self._make(current, node, path)
        self._made[node["id"]] = made
        return made

    def _check_class(self, current: Any, node: Node, path: str, kind: type = object) -> None:
        if _class_name(type(current)) != node["class"] or not isinstance(current, kind):
            raise CannotRestoreError(f"{path} was a {node['class']}, and a new env has none there to be filled")

    def _fill(self, current: Any, node: Node, path: str) -> Any:
        self._check_class(current, node, path)
        if _static(current) is not None:  # such as a module, whose names all of the program uses
            raise CannotRestoreError(f"{path} is nothing that an env's state could be put into")
        if id(current) in self._filled:  # one thing in a new env, but two when captured
            twin = object.__new__(type(current))
            vars(twin).update(vars(current))
            current = twin
        self._filled[id(current)] = current
        self._made[node["id"]] = current
        attributes = vars(current)
        for name, item in node["object"].items():
            attributes[name] = self.value(attributes.get(name), item, f"{path}.{name}")
        if not isinstance(current, gym.Space):
            for name in attributes.keys() - node["object"].keys():
                del attributes[name]
        return current

    def _make(self, current: Any, node: Node, path: str) -> Any:
        kind, stored = next((k, v) for k, v in node.items() if k not in _DETAILS)
        match kind:
            case "array":
                return np.array(stored, order=node["order"])
            case "view":
                return self._view(node, path)
            case "kept":
                if not isinstance(current, np.ndarray) or (current.dtype.str, list(current.shape)) != (
                    stored,
                    node["shape"],
                ):
                    raise CannotRestoreError(f"{path} was a view of a simulator's memory, and a new env has none there")
                return current
            case "simulator":
                self._check_class(current, node, path)
                self._simulators.append((current, stored, path))
                return current
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
                    raise CannotRestoreError(f"{path} has no get_state and set_state")
                if node.get("below") is not None:
                    self.value(current.env, node["below"], f"{path}.env")
                    self.put_simulators()
                own[1](self.value(None, stored, f"{path}.get_state()"))
                if (rng := self.value(None, node["rng"], f"{path}._np_random")) is not None:
                    current._np_random = rng
                return current
        return self._sequence(current, kind, node, path)

    def put_simulators(self) -> None:
        """Put back the states of the simulators that were met, models before the states that belong to them."""
        for current, state, path in sorted(self._simulators, key=lambda met: "integration" in met[1]):
            known = simulator(current)
            if known is None:
                raise CannotRestoreError(f"{path} is no simulator")
            try:
                known.put(current, state)
            except ValueError as error:
                raise CannotRestoreError(f"{path}: {error}") from error
        self._simulators.clear()

    def _view(self, node: Node, path: str) -> NDArray[Any]:
        if "memory" in node:
            self._memories[node["id"]] = np.array(node["memory"], np.uint8)
        dtype = np.dtype(node["dtype"])
        if dtype.hasobject:
            raise CannotRestoreError(f"{path} holds objects")
        memory = self._memories[node["view"]]
        return np.ndarray(tuple(node["shape"]), dtype, memory.data, node["offset"], tuple(node["strides"]))

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
                self._check_class(current, node, path, tuple)  # of any other class, this would make a new object
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
