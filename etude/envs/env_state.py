# SPDX-License-Identifier: Apache-2.0
"""The state of running envs as plain data: arrays, numbers, strings and random generators, never a pickle.

If an env or wrapper has ``get_state()`` and ``set_state(state)``, its state comes from these. Any other is captured
attribute by attribute, including its wrappers, and restored in place. An object that is in two places stays one object,
and arrays that share memory still do. Restoring fills objects of an env that was made and reset anew; from the stored
data it creates nothing but numbers, strings, arrays, random generators, their containers, and objects of classes of
which that env holds some already, or which are defined beside it. Of objects implemented in C, only those of
`etude.envs.simulators` are supported. An env that holds anything else (an open socket, a Box2D world), or that raises
an error meanwhile, can't be captured, and the reason is given. What the whole program holds, such as a constant, is
found again by its name, and never changed. An env for which it has changed can't be restored.
"""

import contextlib
import copy
import ctypes
import dataclasses
import enum
import functools
import inspect
import pathlib
import random
import sys
import types
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from etude.envs.shared import (
    ANY,
    DICTS,
    OWNER,
    Program,
    class_name,
    code_of,
    is_bare,
    is_env,
    is_programs,
    memory_of,
    own_attribute,
    parts_of,
    static_name,
)
from etude.envs.simulators import arrays_of, simulator
from etude.errors import described

Node = dict[str, Any]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_KEYS = frozenset((type(None), bool, int, float, str, bytes))
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_CHANGING = (*DICTS, list, set, deque, bytearray, np.ndarray)
_IMAGE = "PIL.Image:Image"
_PYGAME = {
    f"pygame.{name}": name.partition(":")[2]
    for name in ("rect:Rect", "rect:FRect", "math:Vector2", "math:Vector3", "color:Color")
}
"""Positions and colors, which are made of numbers: their names in pygame, by class name."""
_LARGEST_POOL = 1024
"""The most numbers in the pool of a random generator's seeds; NumPy's default is 4."""
_DETAILS = frozenset(
    "id class maxlen shape rng below order dtype offset strides memory code is_pure seeds info".split()  # noqa: SIM905
)
"""The keys of a node besides its kind."""
_DEEPEST = 80  # levels of nesting; a checkpoint can't hold many more
_ALIGNED = 16


class CannotCaptureError(Exception):
    """A part of an env is not plain data; the message says where it is."""


class CannotRestoreError(Exception):
    """A stored state does not fit the env that it is put into; the message says where."""


def capture_env(env: Any) -> dict[str, Any]:
    """Capture an env's state: ``{"how": "get_state" | "snapshot" | "new episodes", ...}``; the last has a ``why``.

    Raises:
        KeyboardInterrupt: Ctrl-C. All other errors are reported in ``why``.
    """
    capture = _Capture()
    capture.path = type(env).__name__
    try:
        capture.program = Program(env)
        tree = capture.tree(env, capture.path)
    except CannotCaptureError as error:
        return {"how": "new episodes", "why": str(error)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  an env's own code, which may raise anything
        return {"how": "new episodes", "why": f"{_short(capture.path)} can't be captured ({described(error)[:500]})"}
    how = "get_state" if capture.used_get_state else "snapshot"
    return {"how": how, "env": tree, "classes": capture.checksums}


def restore_env(env: Any, state: dict[str, Any]) -> None:
    """Restore a state from `capture_env` in an env that was made the same way, after its reset.

    Raises:
        CannotRestoreError: the env differs, it holds objects that a new one does not have, or its ``set_state`` fails.
            It must then be reset, or made again.
    """
    try:
        if "classes" not in state:
            raise CannotRestoreError("an older version of Etude saved the state")
        restore = _Restore(env, state)
        restore.value(env, state["env"], type(env).__name__)
        restore.put_simulators()
    except (CannotRestoreError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise CannotRestoreError(f"the state can't be restored ({described(error)[:500]})") from error


def _short(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:120]}..."


def order_of(array: NDArray[Any]) -> Literal["C", "F"]:
    """The memory order of an array, which a checkpoint does not keep; matrix products round differently by it."""
    return "F" if array.flags.fnc else "C"


def _own_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """The ``get_state()`` and ``set_state(state)`` of an env or a wrapper that has both."""
    if not is_env(value):
        return None
    get, put = own_attribute(value, "get_state"), own_attribute(value, "set_state")
    return (get, put) if _takes(get, 0) and _takes(put, 1) else None


def _takes(function: Any, count: int) -> bool:
    """Whether ``function`` accepts ``count`` arguments: the ``set_state(qpos, qvel)`` of MuJoCo's envs needs two."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:  # it takes another number of them, or can't be called
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _is_in_pybullet(kind: type) -> bool:
    """Whether a class is defined in a file that imports PyBullet, whose objects are known by a number."""
    pybullet = sys.modules.get("pybullet")
    homes = [vars(sys.modules[base.__module__]) for base in kind.__mro__ if base.__module__ in sys.modules]
    return pybullet is not None and any(one is pybullet for home in homes for one in home.values())


# -- what the program holds -------------------------------------------------------------------------------------------


def _static(value: Any) -> str | None:
    """A name for a value without state of its own, and for a function of the program, with a checksum of what it
    refers to; None for all others."""
    if isinstance(value, types.FunctionType) and (parts := parts_of(value)) and is_programs(value):
        return f"{code_of(value)}#{_digest(parts, code_of(value)):08x}"
    return static_name(value)


def _digest(value: Any, path: str, *, plain: bool = False) -> int:
    """A checksum of all that is in a value, the same in each process.

    Raises:
        CannotCaptureError: it holds something that can't be captured; with ``plain``, any object.
    """
    return _checksum(_Capture().tree(value, path, plain=plain))


def _checksum(node: Any) -> int:
    if isinstance(node, np.ndarray):
        content: Any = node.dtype.str, node.shape, zlib.crc32(node.tobytes())
    elif isinstance(node, dict):
        content = []
        for key, part in sorted(node.items()):
            if key in ("set", "frozenset") and isinstance(part, list):  # whose order may differ
                content.append((key, sorted(map(_checksum, part))))
            elif not (key in ("id", "ref", "view") and isinstance(part, int)):
                content.append((key, _checksum(part)))
    elif isinstance(node, list | tuple):
        content = [*map(_checksum, node)]
    else:
        content = f"{type(node).__name__} {node!r}"
    return zlib.crc32(repr(content).encode("utf-8", "backslashreplace"))


def checksums_of(kind: type) -> dict[str, int]:
    """Checksums of the lists, dicts, arrays and so on of plain data in a class and those above it, by name.

    Those that are caches by their name are left out, and those that Python itself makes (``__slotnames__``).
    """
    found: dict[str, int] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            is_left_out = "cache" in name.lower() or (name.startswith("__") and name.endswith("__"))
            if type(value) in _CHANGING and not is_left_out:
                with contextlib.suppress(CannotCaptureError):
                    found[name] = _digest(value, name, plain=True)
    return found


# -- capturing --------------------------------------------------------------------------------------------------------


class _Capture:
    """Converts an env to nodes, ``{kind: content}``; a node that can be referred to has a number ``id``."""

    def __init__(self) -> None:
        self.program: Program | None = None
        """What is not the env's own; None: everything is captured."""
        self.used_get_state = False
        self.checksums: dict[str, dict[str, int]] = {}
        """By class."""
        self.path = ""
        """The path of the last value."""
        self._depth = 0
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        """The number of each bit generator's generator."""
        self._met: list[Any] = []  # keeps the values alive, so that no id is used twice
        self._arrays: list[tuple[Node, NDArray[Any]]] = []
        self._simulated: list[tuple[int, int]] = []  # memory ranges of simulators' arrays
        self._digests: dict[int, int] = {}

    def tree(self, value: Any, path: str, *, plain: bool = False) -> Node:
        """The node of a value, complete; with ``plain``, it must not hold objects."""
        node = self.node(value, path, plain=plain)
        self._place_arrays()
        return node

    def node(self, value: Any, path: str, *, plain: bool = False) -> Node:
        """The node of a value; with ``plain``, objects are refused, because restoring has no objects to fill there."""
        self.path = path
        if type(value) in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind not in "OV"):
            return {"value": value}
        if isinstance(value, enum.Enum) and not plain:
            name = value.name if value.name in type(value).__members__ else value.value  # one flag, or several
            return {"enum": name, "class": class_name(type(value))}
        if not plain and (static := static_name(value) if self.program is None else _static(value)) is not None:
            return {"static": static}
        # What get_state returns is never what all envs share; and dm_control has a variable for the last model of all.
        if self.program is not None and not plain:
            owner = self.program.owner(value)
            if owner is not None and simulator(value) is None:
                return self._shared(value, owner, path)
        if id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        if self._depth == _DEEPEST:
            raise CannotCaptureError(f"{_short(path)} is nested more than {_DEEPEST} levels deep")
        number = self._numbers[id(value)] = len(self._met)
        node: Node = {"id": number}
        self._met.append(value)
        self._depth += 1
        node |= self._content(value, path, plain)
        self._depth -= 1
        if type(value) is np.ndarray and "objects" not in node:
            self._arrays.append((node, value))
        return node

    def _shared(self, value: Any, owner: Any, path: str) -> Node:
        """The node of what the program holds, or of a view of an array ``owner`` that it holds."""
        assert self.program is not None
        if (name := self.program.name(owner)) is None:
            raise CannotCaptureError(
                f"{_short(path)} is something which all envs share, and which has no name by which it could be found "
                "again"
            )
        compared = owner if owner is value else memory_of(owner)
        if id(compared) not in self._digests:
            self._digests[id(compared)] = _digest(compared, path)
        node = {"shared": name, "sum": self._digests[id(compared)]}
        return node if owner is value else {**node, **_place_of(value, memory_of(owner).ctypes.data)}

    def _content(self, value: Any, path: str, plain: bool) -> Node:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind not in "OV":
            return {}  # see `_place_arrays`
        if kind is np.random.Generator:
            source = value.bit_generator
            if self._sources.setdefault(id(source), self._numbers[id(value)]) != self._numbers[id(value)]:
                raise CannotCaptureError(f"{_short(path)} has the bit generator of another generator")
            return {"generator": source.state, "seeds": getattr(source.seed_seq, "state", None)}
        if kind is np.random.RandomState:
            return {"random_state": value.get_state(legacy=False)}
        if kind is random.Random:
            return {"python_random": value.getstate()}
        if isinstance(value, np.dtype) and np.dtype(value.str) == value:
            return {"numpy_dtype": value.str}
        if kind is weakref.ref and value.__callback__ is None:
            return {"weakref": self.node(value(), f"{path}()")}
        if class_name(kind) == _IMAGE and value.mode not in ("P", "PA"):  # whose colors are elsewhere
            info = self.node(value.info, f"{path}.info", plain=True)
            return {"image": value.tobytes(), "shape": [value.mode, *value.size], "info": info}
        if class_name(kind) in _PYGAME:
            return {"pygame": list(value), "class": class_name(kind)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value), "is_pure": not isinstance(value, pathlib.Path)}
        if kind in (range, slice):
            bounds = (value.start, value.stop, value.step)
            return {kind.__name__: [self.node(bound, path, plain=True) for bound in bounds]}
        is_named = isinstance(value, tuple) and hasattr(value, "_fields") and not plain
        if kind in _SEQUENCES or is_named:
            items = [self.node(item, f"{path}[{i}]", plain=plain) for i, item in enumerate(value)]
            if kind is deque:
                return {"deque": items, "maxlen": value.maxlen}
            return {_SEQUENCES[kind]: items} if kind in _SEQUENCES else {"named": items, "class": class_name(kind)}
        if kind is np.ndarray and value.dtype.kind == "O":
            items = [self.node(item, f"{path}.flat[{i}]", plain=plain) for i, item in enumerate(value.flat)]
            return {"objects": items, "shape": list(value.shape)}
        if kind in DICTS and not (plain and kind is defaultdict):
            return {"dict": self._items(value, path, plain), "class": class_name(kind)}
        if plain and not dataclasses.is_dataclass(value):
            raise CannotCaptureError(f"{_short(path)} is a {class_name(kind).lstrip(':')}, not plain data")
        if parts := {} if plain else parts_of(value):
            nodes = {name: self.node(part, f"{path}.{name}") for name, part in parts.items()}
            return {"function": nodes, "code": code_of(value)}
        if not plain and (own := _own_state(value)) is not None:
            self.used_get_state = True
            below = self._below(value, path)
            rng = self.node(getattr(value, "_np_random", None), f"{path}._np_random")
            return {"own": self.node(own[0](), f"{path}.get_state()", plain=True), "rng": rng, "below": below}
        return self._attributes(value, path, plain)

    def _items(self, value: dict[Any, Any], path: str, plain: bool) -> list[Any]:
        for key in value:
            if not _is_plain_key(key):
                raise CannotCaptureError(f"{_short(path)} has the key {key!r}, which is not plain data")
        return [[key, self.node(item, f"{path}[{key!r}]", plain=plain)] for key, item in value.items()]

    def _below(self, wrapper: Any, path: str) -> Node | None:
        """The node of the env inside a wrapper with get_state. None: it can't be captured; get_state must cover it."""
        inside = vars(wrapper).get("env")
        if not is_env(inside):
            return None
        before = {name: copy.copy(part) for name, part in vars(self).items()}
        try:
            return self.node(inside, f"{path}.env")
        except Exception:  # noqa: BLE001  see `capture_env`
            vars(self).update(before)
            return None

    def _attributes(self, value: Any, path: str, plain: bool) -> Node:
        kind = type(value)
        known = simulator(value)
        if known is not None:
            try:
                state = known.get(value)
            except ValueError as error:
                raise CannotCaptureError(f"{_short(path)}: {error}") from error
            # A view of an array in its memory is right once the state was restored.
            self._simulated += [np.lib.array_utils.byte_bounds(array) for array in arrays_of(value).values()]
            return {"simulator": state, "class": class_name(kind)}
        if _is_in_pybullet(kind):
            raise CannotCaptureError(f"{_short(path)} is a {class_name(kind).lstrip(':')}, whose state is in pybullet")
        if self.program is None and kind is object:  # which all envs share, and of which only the identity counts
            return {}
        if not is_bare(kind):
            raise CannotCaptureError(f"{_short(path)} is a {class_name(kind).lstrip(':')}, not plain data")
        parts = vars(value)
        if isinstance(value, gym.Space):  # a space does not change, except for its random generator
            parts = {n: v for n, v in parts.items() if n in ("_np_random", "spaces") or isinstance(v, gym.Space)}
        elif self.program is not None and class_name(kind) not in self.checksums:
            self.checksums[class_name(kind)] = checksums_of(kind)
        content = {name: self.node(item, f"{path}.{name}", plain=plain) for name, item in parts.items()}
        return {"object": content, "class": class_name(kind)}

    def _place_arrays(self) -> None:
        """Fill the nodes of arrays, once it is known which of them share memory."""
        sharing: dict[int, list[tuple[Node, NDArray[Any]]]] = {}
        for node, array in self._arrays:
            sharing.setdefault(id(memory_of(array)), []).append((node, array))
        for group in sharing.values():
            first, array = group[0]
            if self._is_simulated(array):
                for node, array in group:
                    node |= {"kept": array.dtype.str, "shape": list(array.shape)}
            elif len(group) == 1:
                first |= {"array": array.copy(), "order": order_of(array)}
            else:
                bounds = [np.lib.array_utils.byte_bounds(array) for _, array in group]
                begin = min(low for low, _ in bounds)
                begin -= (begin - memory_of(array).ctypes.data) % _ALIGNED
                memory = ctypes.string_at(begin, max(high for _, high in bounds) - begin)
                first["memory"] = np.frombuffer(memory, np.uint8)
                for node, array in group:
                    node |= {"view": first["id"], **_place_of(array, begin)}

    def _is_simulated(self, array: NDArray[Any]) -> bool:
        if not self._simulated or memory_of(array).base is None:
            return False
        begin, end = np.lib.array_utils.byte_bounds(array)
        return any(first <= begin and end <= last for first, last in self._simulated)


def _place_of(array: NDArray[Any], begin: int) -> Node:
    """Where an array is in the memory from the address ``begin`` on."""
    place = {"dtype": array.dtype.str, "shape": list(array.shape), "strides": list(array.strides)}
    return {**place, "offset": array.ctypes.data - begin}


def _placed(memory: NDArray[Any], node: Node, path: str) -> NDArray[Any]:
    """The inverse of `_place_of`; the new array shares ``memory``."""
    dtype, flat = np.dtype(node["dtype"]), memory.ravel("K").view(np.uint8)
    if dtype.hasobject or not np.shares_memory(flat, memory):
        raise CannotRestoreError(f"{path} holds objects, or parts of an array only")
    return np.ndarray(tuple(node["shape"]), dtype, flat.data, node["offset"], tuple(node["strides"]))


def _is_ordered_by_value(item: Any) -> bool:
    """Whether an item of a set has the same hash in each process."""
    if type(item) is tuple:
        return all(map(_is_ordered_by_value, item))
    return isinstance(item, int | float | complex | np.number | np.bool_) and not isinstance(item, enum.Enum)


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain_key, key))
    return type(key) in _KEYS or isinstance(key, np.number | np.bool_)


# -- restoring --------------------------------------------------------------------------------------------------------


class _Restore:
    """Converts nodes back to values, filling the objects of a new env."""

    def __init__(self, env: Any, state: Mapping[str, Any]) -> None:
        self._program = Program(env)
        self._checksums = dict(state["classes"])  # of the classes that were not compared yet
        self._in_new = 0  # how many new objects this value is inside of
        self._made: dict[int, Any] = {}
        self._filled: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is used twice
        self._memories: dict[int, NDArray[np.uint8]] = {}
        self._simulators: list[tuple[Any, dict[str, Any], str]] = []
        self._digests: dict[int, int] = {}  # of what the program holds

    def value(self, current: Any, node: Node, path: str) -> Any:
        if "value" in node:
            return node["value"]
        if "ref" in node:
            if node["ref"] not in self._made:
                raise CannotRestoreError(f"{path} is in a tuple that contains itself")
            return self._made[node["ref"]]
        if "static" in node:
            if node["static"] not in (ANY, _static(current)) or (self._in_new and _static(current) is None):
                was = "no plain data" if node["static"] == ANY else node["static"]
                raise CannotRestoreError(f"{path} was {was}, but is something else in a new env")
            return current
        if "enum" in node:
            own = self._kind_of(current, node, path, enum.Enum)
            return own[node["enum"]] if isinstance(node["enum"], str) else own(node["enum"])
        if "shared" in node:
            return self._of_program(node, path)
        if "simulator" not in node and self._program.owner(current) is not None:
            current = None  # which is never changed
        if "object" in node:
            return self._fill(current, node, path)
        made = self._make(current, node, path)
        self._made[node["id"]] = made
        return made

    def _of_program(self, node: Node, path: str) -> Any:
        """What the program holds by a node's name, if it is as it was."""
        found = self._program.find(node["shared"])
        if found is not None:
            compared = memory_of(found) if "offset" in node else found
            if id(compared) not in self._digests:
                self._digests[id(compared)] = _digest(compared, path)
            if self._digests[id(compared)] == node.get("sum"):
                return _placed(compared, node, path) if "offset" in node else found
        name, *keys = node["shared"]
        raise CannotRestoreError(
            f"{path} was {name}{''.join(f'[{key}]' for key in keys)}, which all envs share: it has changed, or is not "
            "there"
        )

    def _check_class(self, current: Any, node: Node, path: str) -> None:
        if class_name(type(current)) != node["class"]:
            raise CannotRestoreError(f"{path} was a {node['class']}, but a new env has none there")

    def _kind_of(self, current: Any, node: Node, path: str, above: type) -> Any:
        """The class of a node, a subclass of ``above``, of which the new env has objects, here or elsewhere."""
        kind = type(current) if class_name(type(current)) == node["class"] else self._program.kind(node["class"])
        if kind is None or not issubclass(kind, above):
            raise CannotRestoreError(f"{path} was a {node['class']}, but a new env has none")
        return kind

    def _fill(self, current: Any, node: Node, path: str) -> Any:
        kind = self._kind_of(current, node, path, object)
        self._check_variables(kind, node, path)
        is_new = type(current) is not kind
        if is_new:
            # Something could run when the new one is thrown away, or its attributes could be less than all that it is.
            if not is_bare(kind) or hasattr(kind, "__del__") or issubclass(kind, gym.Space):
                raise CannotRestoreError(f"{path} was a {node['class']}, of which no other can be made")
            current = object.__new__(kind)
        elif id(current) in self._filled:  # one object in a new env, but two when captured
            one = current
            current = object.__new__(kind)
            vars(current).update(vars(one))
        if _static(current) is not None:  # such as a module, which the whole program uses
            raise CannotRestoreError(f"{path} is not an object that can hold an env's state")
        self._filled[id(current)] = self._made[node["id"]] = current
        self._in_new += is_new
        attributes = vars(current)
        for name, item in node["object"].items():
            attributes[name] = self.value(attributes.get(name), item, f"{path}.{name}")
        if not isinstance(current, gym.Space):
            for name in attributes.keys() - node["object"].keys():
                del attributes[name]
        self._in_new -= is_new
        return current

    def _check_variables(self, kind: type, node: Node, path: str) -> None:
        """Check that what all objects of a class share is as it was."""
        if (stored := self._checksums.pop(node["class"], None)) is None:
            return
        own = checksums_of(kind)
        if changed := [name for name in {**own, **stored} if own.get(name) != stored.get(name)]:
            raise CannotRestoreError(
                f"{path} has `{changed[0]}` from its class, {node['class'].lstrip(':')}, where it has changed: all "
                f"envs share it. Make it in __init__ or reset, as self.{changed[0]}"
            )

    def _make(self, current: Any, node: Node, path: str) -> Any:
        kind, stored = next((k, v) for k, v in node.items() if k not in _DETAILS)
        match kind:
            case "array":
                return np.array(stored, order=node["order"])
            case "view":
                if "memory" in node:
                    self._memories[node["id"]] = np.array(node["memory"], np.uint8)
                return _placed(self._memories[stored], node, path)
            case "kept":
                is_array = isinstance(current, np.ndarray)
                if not is_array or [current.dtype.str, *current.shape] != [stored, *node["shape"]]:
                    raise CannotRestoreError(f"{path} was a view of a simulator's memory, but a new env has none there")
                return current
            case "simulator":
                self._check_class(current, node, path)
                self._simulators.append((current, stored, path))
                return current
            case "generator":
                return np.random.Generator(_bit_generator(stored, node.get("seeds")))
            case "random_state":
                made = np.random.RandomState()
                _check_position(stored)
                made.set_state(stored)
                return made
            case "python_random":
                python_random = random.Random()
                python_random.setstate(stored)
                return python_random
            case "numpy_dtype":
                return np.dtype(str(stored))
            case "weakref":
                one = self.value(current() if isinstance(current, weakref.ref) else None, stored, f"{path}()")
                return weakref.ref(set() if one is None else one)  # to what is gone at once, as it was
            case "image":
                mode, *size = node["shape"]
                image = sys.modules["PIL.Image"].new(mode, size)
                image.frombytes(stored)
                image.info = self.value(None, node["info"], f"{path}.info")
                return image
            case "pygame":
                return getattr(sys.modules["pygame"], _PYGAME[node["class"]])(stored)
            case "path":
                return pathlib.PurePath(stored) if node["is_pure"] else pathlib.Path(stored)
            case "range" | "slice":
                parts = [self.value(None, part, path) for part in stored]
                return range(*parts) if kind == "range" else slice(*parts)
            case "dict":
                return self._dict(current, node, path)
            case "function":
                return self._function(current, node, path)
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
        """Restore the states of the simulators in the env, models before the data that belong to them."""
        for current, state, path in sorted(self._simulators, key=lambda met: "integration" in met[1]):
            known = simulator(current)
            if known is None:
                raise CannotRestoreError(f"{path} is not a simulator")
            try:
                known.put(current, state)
            except ValueError as error:
                raise CannotRestoreError(f"{path}: {error}") from error
        self._simulators.clear()

    def _function(self, current: Any, node: Node, path: str) -> Any:
        held, stored = parts_of(current), node["function"]
        if not held or code_of(current) != node["code"] or not stored.keys() <= held.keys():
            raise CannotRestoreError(f"{path} was a function {node['code']}, but a new env has none there")
        for name, part in stored.items():
            if callable(held[name]) and not part.keys() & {"static", "function", "object", "ref", "own"}:
                raise CannotRestoreError(f"{path}.{name} can be called in a new env, but was something else")
        if isinstance(current, functools.partial):
            parts = {name: self.value(held[name], part, f"{path}.{name}") for name, part in stored.items()}
            made = functools.partial(parts["func"], *parts["args"], **parts["keywords"])
            vars(made).update(parts.get("__dict__", {}))
            return made
        if OWNER in held:
            own = self.value(held[OWNER], stored[OWNER], f"{path}.{OWNER}")
            if type(own) is not type(held[OWNER]):
                raise CannotRestoreError(f"{path} was a method of another class")
            return current if own is held[OWNER] else getattr(own, current.__name__)
        if id(current) in self._filled:
            raise CannotRestoreError(f"{path} is one function with another in a new env, but they were two")
        self._filled[id(current)] = current
        self._made[node["id"]] = current  # it may refer to itself
        cells = dict(zip(current.__code__.co_freevars, current.__closure__ or (), strict=True))
        for name, part in stored.items():
            value = self.value(held[name], part, f"{path}.{name}")
            if name in cells:
                cells[name].cell_contents = value
            elif name == "__dict__":
                vars(current).update(value)
            else:
                setattr(current, name, value)
        return current

    def _dict(self, current: Any, node: Node, path: str) -> Any:
        old = current if isinstance(current, dict) else {}
        kind = next((kind for kind in DICTS if class_name(kind) == node["class"]), dict)
        made: dict[Any, Any] = kind()
        if isinstance(made, defaultdict):
            self._check_class(current, node, path)
            made.default_factory = current.default_factory
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
            if i >= len(old) and item.get("static") == ANY:
                raise CannotRestoreError(f"{path}[{i}] was no plain data, but a new env has none there")
            made.append(self.value(old[i] if i < len(old) else None, item, f"{path}[{i}]"))
        match kind:
            case "tuple" | "set" | "frozenset":
                items = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)
                if kind != "tuple" and type(current) is type(items) and list(current) == made:
                    items = current.copy() if list(current.copy()) == made else current
                if list(items) != made and all(map(_is_ordered_by_value, made)):
                    raise CannotRestoreError(
                        f"{path} has its items in another order than they had: if the env goes over them, keep them in "
                        "a dict, whose order is kept"
                    )
                return items
            case "named":
                kind_of_tuple = self._kind_of(current, node, path, tuple)
                if not hasattr(kind_of_tuple, "_fields"):
                    raise CannotRestoreError(f"{path} was a {node['class']}, of which no other can be made")
                return kind_of_tuple(*made)
            case "objects":
                array = np.empty(len(made), object)
                array[:] = made
                return array.reshape(node["shape"])
        return made


def _bit_generator(state: dict[str, Any], seeds: dict[str, Any] | None) -> np.random.BitGenerator:
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    by_name = {kind.__name__: kind for kind in kinds}
    name = state["bit_generator"]
    if name not in by_name or (seeds is not None and seeds["pool_size"] > _LARGEST_POOL):
        raise CannotRestoreError(f"there is no random generator {name!r} with such seeds")
    _check_position(state)
    made: np.random.BitGenerator = by_name[name](None if seeds is None else np.random.SeedSequence(**seeds))
    made.state = state
    return made


def _check_position(state: dict[str, Any]) -> None:
    """Refuse the state of a random generator whose next number would lie outside of its memory. NumPy takes it."""
    name = state["bit_generator"]
    places = {"MT19937": (state["state"].get("pos", 0), 624), "Philox": (state.get("buffer_pos", 0), 4)}
    position, size = places.get(name, (0, 0))
    if not 0 <= position <= size:
        raise CannotRestoreError(f"the random generator {name} has the position {position} among {size} numbers")
