# SPDX-License-Identifier: Apache-2.0
"""The state of running envs as plain data: arrays, numbers, strings and random generators, never a pickle.

If an env or wrapper has ``get_state()`` and ``set_state(state)``, its state comes from these. Any other is captured
attribute by attribute, including its wrappers, and restored in place. An object with two references stays one object,
and arrays that share memory still do. Restoring fills the objects of an env that was made and reset anew. From the
stored data it creates only numbers, strings, arrays, random generators, their containers, and objects of classes that
the new env already uses or that are defined in its files. Of objects implemented in C, only those of
`etude.envs.simulators` are supported. An env that holds anything else (an open socket, a Box2D world), or that raises
an error meanwhile, can't be captured, and the reason is given. Global objects, such as constants, are found by their
names and never changed. If one of them has changed since the capture, the env can't be restored.
"""

import contextlib
import ctypes
import dataclasses
import enum
import functools
import inspect
import logging
import pathlib
import random
import sys
import types
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from etude.envs.env_classes import DICTS, SEQUENCES, Classes, checksums_of, class_name, is_bare, is_constant, memory_of
from etude.envs.simulators import arrays_of, simulator
from etude.errors import described

Node = dict[str, Any]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_HANDLED = ("pybullet",)
"""Modules of simulators that keep the state themselves: their objects hold only a number."""
_KEYS = frozenset((type(None), bool, int, float, str, bytes))
_STATELESS = tuple(
    f"{module}."
    for module in (  # noqa: SIM905
        "pygame.surface pygame.font pygame.freetype pygame.time pygame.mixer pygame.display pygame.event "
        "pygame.joystick pygame.pixelarray matplotlib PIL.ImageFont moviepy _thread "
        "gymnasium.envs.mujoco.mujoco_rendering "
        "dm_control.mujoco.index"  # names of parts of a simulator's memory
    ).split()
)
"""Modules whose objects are for drawing only, or have no state of their own."""
_IMAGE = "PIL.Image:Image"
_PYGAME = frozenset(
    "pygame.rect:Rect pygame.rect:FRect pygame.math:Vector2 pygame.math:Vector3 pygame.color:Color".split()  # noqa: SIM905
)
"""Positions and colors, which are made of numbers, by class name."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_LARGEST_POOL = 1024
"""Maximum size of the pool of a random generator's seeds; NumPy's default is 4."""
_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_SELF = "__self__"
_DETAILS = frozenset(
    "id class maxlen shape rng below order dtype offset strides memory code is_pure seeds shared info".split()  # noqa: SIM905
)
"""The keys of a node besides its kind."""
_ANY = "any"  # stands for an object that never changes, or is for drawing only
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
    try:
        tree = capture.node(env, type(env).__name__)
        capture.path = type(env).__name__
        capture.place(Classes(env, _is_env, _static))
    except CannotCaptureError as error:
        return {"how": "new episodes", "why": str(error)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  an env's own code, which may raise anything
        return {"how": "new episodes", "why": f"{_short(capture.path)} can't be captured ({described(error)[:500]})"}
    how = "get_state" if capture.used_get_state else "snapshot"
    return {"how": how, "env": tree, "sums": capture.checksums}


def restore_env(env: Any, state: dict[str, Any]) -> None:
    """Restore a state from `capture_env` in an env that was made the same way, after its reset.

    Raises:
        CannotRestoreError: the env differs, it holds objects that a new one does not have, or its ``set_state`` fails.
            It must then be reset, or made again.
    """
    try:
        if "sums" not in state:
            raise CannotRestoreError("an older version of Etude saved the state, without what all envs share")
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
    """The memory order of an array, which checkpoints do not store; the rounding of matrix products depends on it."""
    return "F" if array.flags.fnc else "C"


def _held(value: Any) -> dict[str, Any] | None:
    """The objects that a callable refers to and may change: closure variables, defaults and attributes, a method's
    object, or a partial's arguments. None for anything else, and for global functions that refer to nothing that may
    change."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords} | _attributes_of(value)
    if isinstance(value, _METHODS):
        own = getattr(value, "__self__", None)
        return None if own is None or isinstance(own, types.ModuleType | type) else {_SELF: own}
    if not isinstance(value, types.FunctionType):
        return None
    return None if _is_programs(value) and not _may_change(value) else _parts_of(value)


def _is_programs(function: Any) -> bool:
    """Whether a function is global: in a variable of its module, or of a class there."""
    if any(function is own for own in function.__globals__.values()):
        return True
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _may_change(function: Any) -> bool:
    """Whether a function refers to anything but constants, values without state, and functions of the same kind."""
    met: set[types.FunctionType] = set()
    rest = [function]
    while rest:
        value = rest.pop()
        is_fixed = is_constant(value) or isinstance(value, enum.Enum) or type(value) is object
        if isinstance(value, types.FunctionType):
            if value not in met:
                met.add(value)
                parts = _parts_of(value)
                attributes, by_name = parts.pop("__dict__", {}), parts.pop("__kwdefaults__", {})
                rest += [*parts.pop("__defaults__", ()), *parts.values(), *attributes.values(), *by_name.values()]
        elif not is_fixed and _static(value) is None:
            return True
    return False


def _parts_of(function: Any) -> dict[str, Any]:
    held = _attributes_of(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            held[name] = cell.cell_contents
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return held | {name: given for name, given in defaults.items() if given}


def _attributes_of(function: Any) -> dict[str, Any]:
    given = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return {"__dict__": given} if given else {}


def _static(value: Any) -> str | None:
    """A name for a value without state of its own; None for all others."""
    if _held(value):
        return None
    if isinstance(value, _FUNCTIONS):
        if isinstance(value, types.FunctionType):
            return _code_of(value)
        return f"{getattr(value, '__module__', '')}:{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    kind = type(value)
    if kind is weakref.finalize:
        return _ANY
    if isinstance(value, EnvSpec | logging.Logger) or f"{getattr(kind, '__module__', '')}.".startswith(_STATELESS):
        return _ANY
    if isinstance(value, np.ufunc):
        return f"numpy:{value.__name__}"
    if callable(value) and not hasattr(value, "__dict__") and not isinstance(value, weakref.ref):
        is_in_c = not isinstance(kind.__call__, types.FunctionType)  # such as a ufunc, or operator.itemgetter(0)
        return (_ANY if " at 0x" in repr(value) else repr(value)) if is_in_c else None
    return None


def _code_of(function: Any) -> str:
    """The name of a function's code, which is the same in each new env. That of a function defined inside another has a
    checksum, because several may have the same name."""
    if isinstance(function, functools.partial):
        return "partial"
    name = f"{getattr(function, '__module__', '')}:{function.__qualname__}"
    code = getattr(function, "__code__", None)
    return name if code is None or "<" not in name else f"{name}#{_checksum_of(code):08x}"


def _checksum_of(code: types.CodeType) -> int:
    def shown(part: Any) -> Any:
        if isinstance(part, types.CodeType):
            return _checksum_of(part)
        if isinstance(part, frozenset):  # strings in it have another order in each process
            return sorted(map(repr, part))
        return repr(part)

    parts = [shown(part) for part in code.co_consts]
    return zlib.crc32(code.co_code + repr((code.co_names, code.co_freevars, parts)).encode())


def _is_env(value: Any) -> bool:
    """Whether ``value`` is an env or a wrapper, of one agent or several."""
    many = all(_own_attribute(value, name) is not None for name in ("possible_agents", "reset", "step"))
    return isinstance(value, gym.Env | VectorEnv) or many


def _own_attribute(value: Any, name: str) -> Any:
    """An object's own attribute, or None; some wrappers also show the attributes of the env inside."""
    return getattr(value, name, None) if inspect.getattr_static(value, name, None) is not None else None


def _own_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """The ``get_state()`` and ``set_state(state)`` of an env or a wrapper that has both."""
    if not _is_env(value):
        return None
    get, put = _own_attribute(value, "get_state"), _own_attribute(value, "set_state")
    return (get, put) if _takes(get, 0) and _takes(put, 1) else None


def _elsewhere(kind: type) -> str | None:
    """The simulator that keeps the state of a class's instances, which hold only a number; None if there is none."""
    for name in _HANDLED:
        if (simulated := sys.modules.get(name)) is not None:
            homes = [sys.modules.get(base.__module__) for base in kind.__mro__]
            if any(one is simulated for home in homes if home is not None for one in vars(home).values()):
                return name
    return None


def _takes(function: Any, count: int) -> bool:
    """Whether ``function`` accepts ``count`` arguments: the ``set_state(qpos, qvel)`` of MuJoCo's envs needs two."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


class _Capture:
    """Converts an env to nodes, ``{kind: content}``; a node that can be referred to has a number ``id``."""

    def __init__(self) -> None:
        self.used_get_state = False
        self.checksums: dict[str, dict[str, int]] = {}
        """The checksums of each class's variables, by class; see `checksums_of`."""
        self.path = ""
        """The path of the last value."""
        self._depth = 0
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        """By the id of a bit generator: the number of its generator."""
        self._met: list[tuple[Any, Node]] = []  # keeps the values alive, so that no id is used twice
        self._arrays: list[tuple[Node, NDArray[Any]]] = []
        self._simulated: list[tuple[int, int]] = []  # memory ranges of simulators' arrays

    def node(self, value: Any, path: str, *, plain: bool = False) -> Node:
        """The node of a value; with ``plain``, objects are refused, because restoring has no objects to fill there."""
        self.path = path
        if type(value) in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind not in "OV"):
            return {"value": value}
        if isinstance(value, enum.Enum) and not plain:
            name = value.name if value.name in type(value).__members__ else value.value  # one flag, or several
            return {"enum": name, "class": class_name(type(value))}
        if not plain and (static := _static(value)) is not None:
            return {"static": static}
        if id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        if self._depth == _DEEPEST:
            raise CannotCaptureError(f"{_short(path)} is nested more than {_DEEPEST} levels deep")
        number = self._numbers[id(value)] = len(self._met)
        node: Node = {"id": number}
        self._met.append((value, {} if plain else node))  # what get_state returns is never global
        self._depth += 1
        node |= self._content(value, path, plain)
        self._depth -= 1
        if type(value) is np.ndarray and "objects" not in node:
            self._arrays.append((node, value))
        return node

    def _content(self, value: Any, path: str, plain: bool) -> Node:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind not in "OV":
            return {}  # see `place`
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
        if class_name(kind) == _IMAGE and value.mode not in ("P", "PA"):  # these have their colors in a palette
            info = self.node(value.info, f"{path}.info", plain=True)
            return {"image": value.tobytes(), "shape": [value.mode, *value.size], "info": info}
        if class_name(kind) in _PYGAME:
            return {"pygame": list(value), "class": class_name(kind)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value), "is_pure": not isinstance(value, pathlib.Path)}
        if kind in (range, slice):
            bounds = (value.start, value.stop, value.step)
            return {kind.__name__: [self.node(bound, path, plain=True) for bound in bounds]}
        if kind in SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields") and not plain):
            items = [self.node(item, f"{path}[{i}]", plain=plain) for i, item in enumerate(value)]
            if kind not in SEQUENCES:
                return {"named": items, "class": class_name(kind)}
            return {kind.__name__: items} | ({"maxlen": value.maxlen} if kind is deque else {})
        if kind is np.ndarray and value.dtype.kind == "O":
            items = [self.node(item, f"{path}.flat[{i}]", plain=plain) for i, item in enumerate(value.flat)]
            return {"objects": items, "shape": list(value.shape)}
        if kind in DICTS and not (plain and kind is defaultdict):
            return {"dict": self._items(value, path, plain), "class": class_name(kind)}
        if plain and not dataclasses.is_dataclass(value):
            raise CannotCaptureError(f"{_short(path)} is a {class_name(kind).lstrip(':')}, not plain data")
        if plain:
            return self._attributes(value, path, plain=True)
        if held := _held(value):
            parts = {name: self.node(part, f"{path}.{name}") for name, part in held.items()}
            return {"function": parts, "code": _code_of(value)}
        return self._object(value, path)

    def _items(self, value: dict[Any, Any], path: str, plain: bool) -> list[Any]:
        for key in value:
            if not _is_plain_key(key):
                raise CannotCaptureError(f"{_short(path)} has the key {key!r}, which is not plain data")
        return [[key, self.node(item, f"{path}[{key!r}]", plain=plain)] for key, item in value.items()]

    def _object(self, value: Any, path: str) -> Node:
        own = _own_state(value)
        if own is None:
            return self._attributes(value, path)
        self.used_get_state = True
        below = self._below(value, path)
        rng = self.node(getattr(value, "_np_random", None), f"{path}._np_random")
        return {"own": self.node(own[0](), f"{path}.get_state()", plain=True), "rng": rng, "below": below}

    def _attributes(self, value: Any, path: str, *, plain: bool = False) -> Node:
        kind = type(value)
        known = simulator(value)
        if known is not None:
            try:
                state = known.get(value)
            except ValueError as error:
                raise CannotCaptureError(f"{_short(path)}: {error}") from error
            # Views of its memory are correct as soon as its state is restored.
            self._simulated += [np.lib.array_utils.byte_bounds(array) for array in arrays_of(value).values()]
            return {"simulator": state, "class": class_name(kind)}
        if (elsewhere := _elsewhere(kind)) or not is_bare(kind):
            why = f"whose state is in {elsewhere}" if elsewhere else "not plain data"
            raise CannotCaptureError(f"{_short(path)} is a {class_name(kind).lstrip(':')}, {why}")
        parts = vars(value)
        if isinstance(value, gym.Space):  # a space does not change, except for its random generator
            parts = {n: v for n, v in parts.items() if n in ("_np_random", "spaces") or isinstance(v, gym.Space)}
        elif class_name(kind) not in self.checksums:
            self.checksums[class_name(kind)] = checksums_of(kind)
        content = {name: self.node(item, f"{path}.{name}", plain=plain) for name, item in parts.items()}
        return {"object": content, "class": class_name(kind)}

    def _below(self, wrapper: Any, path: str) -> Node | None:
        """The node of the env inside a wrapper with get_state. None: it can't be captured; get_state must cover it."""
        inside = vars(wrapper).get("env")
        if not _is_env(inside):
            return None
        depth, arrays, simulated, met = self._depth, len(self._arrays), len(self._simulated), len(self._met)
        try:
            return self.node(inside, f"{path}.env")
        except Exception:  # noqa: BLE001  see `capture_env`
            self._depth = depth  # forget the parts that were captured
            del self._arrays[arrays:], self._simulated[simulated:], self._met[met:]
            for numbers in (self._numbers, self._sources):
                for key in [key for key, number in numbers.items() if number >= met]:
                    del numbers[key]
            return None

    def place(self, program: Classes) -> None:
        """Name global objects, and fill the nodes of arrays, now that it is known which of them share memory."""
        for value, node in self._met:
            if "simulator" not in node and (name := program.shared_name(value)) is not None:
                node["shared"] = name  # never of a simulator: dm_control keeps its latest model in a variable
            elif "function" in node and isinstance(value, types.FunctionType) and _is_programs(value):
                node["shared"] = node["code"]
        sharing: dict[int, list[tuple[Node, NDArray[Any]]]] = {}
        for node, array in self._arrays:
            sharing.setdefault(id(memory_of(array)), []).append((node, array))
        for group in sharing.values():
            node, array = group[0]
            if self._is_simulated(array):
                for node, array in group:
                    node |= {"kept": array.dtype.str, "shape": list(array.shape)}
            elif "shared" in node:
                for node, array in group:
                    node |= {"array": array.copy(), "order": order_of(array), **_place_of(array)}
            elif len(group) == 1:
                node |= {"array": array.copy(), "order": order_of(array)}
            else:
                _place_together(group)

    def _is_simulated(self, array: NDArray[Any]) -> bool:
        if not self._simulated or memory_of(array).base is None:
            return False
        begin, end = np.lib.array_utils.byte_bounds(array)
        return any(first <= begin and end <= last for first, last in self._simulated)


def _place_of(array: NDArray[Any]) -> Node:
    """The offset and the strides of an array in its memory."""
    return {"offset": array.ctypes.data - memory_of(array).ctypes.data, "strides": list(array.strides)}


def _placed(array: Any, node: Node) -> Any:
    """The array of a node, as a view of the memory of a global array; None if this is impossible."""
    stored = node["array"]
    if type(array) is not np.ndarray or (_place_of(array).items() <= node.items() and array.shape == stored.shape):
        return array
    memory = memory_of(array)
    flat = memory.ravel("K").view(np.uint8)
    if not np.shares_memory(flat, memory):
        return None
    return np.ndarray(stored.shape, stored.dtype, flat.data, node["offset"], tuple(node["strides"]))


def _nodes_in(tree: Any) -> Iterator[Node]:
    """Yield the nodes of global objects in a tree of nodes."""
    if isinstance(tree, dict) and isinstance(tree.get("shared"), str):
        yield tree
    if isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes_in(part)


def _place_together(group: list[tuple[Node, NDArray[Any]]]) -> None:
    """Fill the nodes of arrays that are views of the same memory."""
    bounds = [np.lib.array_utils.byte_bounds(array) for _, array in group]
    origin = memory_of(group[0][1]).ctypes.data
    begin = min(first for first, _ in bounds)
    begin -= (begin - origin) % _ALIGNED
    holder, size = group[0][0], max(end for _, end in bounds) - begin
    for node, array in group:
        node |= {"view": holder["id"], "dtype": array.dtype.str, "shape": list(array.shape)}
        node |= {"strides": list(array.strides), "offset": array.ctypes.data - begin}
    holder["memory"] = np.frombuffer(ctypes.string_at(begin, size), np.uint8)


def _is_ordered_by_value(item: Any) -> bool:
    """Whether an item of a set has the same hash in each process."""
    if type(item) is tuple:
        return all(map(_is_ordered_by_value, item))
    return isinstance(item, int | float | complex | np.number | np.bool_) and not isinstance(item, enum.Enum)


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain_key, key))
    return type(key) in _KEYS or isinstance(key, np.number | np.bool_)


def _is_like(value: Any, node: Node, program: Classes) -> bool:
    """Whether an object is unchanged since it was captured as ``node``."""

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            if "ref" in a or "ref" in b:  # captured where it was met first
                return True
            names = a.keys() - {"id", "view", "shared"}
            return names == b.keys() - {"id", "view", "shared"} and all(alike(a[name], b[name]) for name in names)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            return len(a) == len(b) and all(map(alike, a, b))
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        return bool(type(a) is type(b) and (a == b or (a != a and b != b)))

    capture = _Capture()
    try:
        own = capture.node(value, "")
        capture.place(program)
    except CannotCaptureError:
        return False
    return alike(own, node)


class _Restore:
    """Converts nodes back to values, filling the objects of a new env."""

    def __init__(self, env: Any, state: Mapping[str, Any]) -> None:
        self._classes = Classes(env, _is_env, _static)
        self._program = self._classes.shared({node["shared"] for node in _nodes_in(state["env"])})
        self._checksums = dict(state["sums"])  # of the classes that were not compared yet
        self._in_new = 0  # the number of new objects that the current value is inside of
        self._made: dict[int, Any] = {}
        self._filled: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is used twice
        self._memories: dict[int, NDArray[np.uint8]] = {}
        self._simulators: list[tuple[Any, dict[str, Any], str]] = []

    def value(self, current: Any, node: Node, path: str) -> Any:
        """The value of a node; ``current`` is what a new env has in its place, and may be filled."""
        if "value" in node:
            return node["value"]
        if "ref" in node:
            if node["ref"] not in self._made:
                raise CannotRestoreError(f"{path} is in a tuple that contains itself, or in what all envs share")
            return self._made[node["ref"]]
        if "static" in node:
            if node["static"] not in (_ANY, _static(current)) or (self._in_new and _static(current) is None):
                was = "no plain data" if node["static"] == _ANY else node["static"]
                raise CannotRestoreError(f"{path} was {was}, but is something else in a new env")
            return current
        if "enum" in node:
            own = self._kind_of(current, node, path, enum.Enum)
            return own[node["enum"]] if isinstance(node["enum"], str) else own(node["enum"])
        if "shared" in node:
            return self._of_program(current, node, path)
        if "simulator" not in node and self._classes.shared_name(current) is not None:
            current = None  # global objects are never changed
        if "object" in node:
            return self._fill(current, node, path)
        made = self._make(current, node, path)
        self._made[node["id"]] = made
        return made

    def _of_program(self, current: Any, node: Node, path: str) -> Any:
        """The global object of a node, if it is unchanged."""
        for part in reversed(list(_nodes_in(node))):  # its parts, to which others may refer, and last the node itself
            found = self._program.get(part["shared"])
            found = _placed(found, part) if "array" in part else found
            if found is not None:
                self._made[part["id"]] = found
                if "object" in part:
                    self._check_variables(type(found), part, path)
        if node["shared"] == node.get("code"):  # a function of a package in which no names are looked for
            found = self._made[node["id"]] = current
        if found is None or not _is_like(found, node, self._classes):
            raise CannotRestoreError(
                f"{path} was {node['shared'] or 'something'}, which all envs share: it has changed, or is not there"
            )
        return found

    def _check_class(self, current: Any, node: Node, path: str) -> None:
        if class_name(type(current)) != node["class"]:
            raise CannotRestoreError(f"{path} was a {node['class']}, but a new env has none there")

    def _kind_of(self, current: Any, node: Node, path: str, above: type) -> Any:
        """The class of a node, a subclass of ``above``, which the new env must use here or elsewhere."""
        kind = type(current) if class_name(type(current)) == node["class"] else self._classes.named(node["class"])
        if kind is None or not issubclass(kind, above):
            raise CannotRestoreError(f"{path} was a {node['class']}, but a new env has none")
        return kind

    def _fill(self, current: Any, node: Node, path: str) -> Any:
        kind = self._kind_of(current, node, path, object)
        self._check_variables(kind, node, path)
        is_new = type(current) is not kind
        if is_new:
            if not self._classes.can_be_made(kind):
                raise CannotRestoreError(f"{path} was a {node['class']}, of which no other can be made")
            current = object.__new__(kind)
        self._in_new += is_new
        filled = self._filled_with(current, node, path)
        self._in_new -= is_new
        return filled

    def _check_variables(self, kind: type, node: Node, path: str) -> None:
        """Check that a class's variables, which all its objects share, are unchanged."""
        stored = self._checksums.pop(node["class"], None)
        if stored is None:
            return
        own = checksums_of(kind)
        if changed := [name for name in own | stored if own.get(name) != stored.get(name)]:
            raise CannotRestoreError(
                f"{path} has `{changed[0]}` from its class, {node['class'].lstrip(':')}, where it has changed: all "
                f"envs share it. Make it in __init__ or reset, as self.{changed[0]}"
            )

    def _filled_with(self, current: Any, node: Node, path: str) -> Any:
        if _static(current) is not None:  # such as a module, which the whole program uses
            raise CannotRestoreError(f"{path} is not an object that can hold an env's state")
        if id(current) in self._filled:  # one object in a new env, but two when captured
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
                own_form = (current.dtype.str, list(current.shape)) if isinstance(current, np.ndarray) else None
                if own_form != (stored, node["shape"]):
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
                return weakref.ref(set() if one is None else one)  # a dead one stays dead: the set is freed at once
            case "image":
                mode, *size = node["shape"]
                image = sys.modules["PIL.Image"].new(mode, size)
                image.frombytes(stored)
                image.info = self.value(None, node["info"], f"{path}.info")
                return image
            case "pygame":
                return getattr(sys.modules["pygame"], sorted({node["class"]} & _PYGAME)[0].partition(":")[2])(stored)
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

    def _view(self, node: Node, path: str) -> NDArray[Any]:
        if "memory" in node:
            self._memories[node["id"]] = np.array(node["memory"], np.uint8)
        dtype = np.dtype(node["dtype"])
        if dtype.hasobject:
            raise CannotRestoreError(f"{path} holds objects")
        memory = self._memories[node["view"]]
        return np.ndarray(tuple(node["shape"]), dtype, memory.data, node["offset"], tuple(node["strides"]))

    def _function(self, current: Any, node: Node, path: str) -> Any:
        held, stored = _held(current), node["function"]
        if held is None or _code_of(current) != node["code"] or not stored.keys() <= held.keys():
            raise CannotRestoreError(f"{path} was a function {node['code']}, but a new env has none there")
        for name, part in stored.items():
            if callable(held[name]) and not part.keys() & {"static", "function", "object", "ref", "own"}:
                raise CannotRestoreError(f"{path}.{name} can be called in a new env, but was something else")
        if isinstance(current, functools.partial):
            parts = {name: self.value(held[name], part, f"{path}.{name}") for name, part in stored.items()}
            made = functools.partial(parts["func"], *parts["args"], **parts["keywords"])
            vars(made).update(parts.get("__dict__", {}))
            return made
        if _SELF in held:
            own = self.value(held[_SELF], stored[_SELF], f"{path}.{_SELF}")
            if type(own) is not type(held[_SELF]):
                raise CannotRestoreError(f"{path} was a method of another class")
            return current if own is held[_SELF] else getattr(own, current.__name__)
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
        made: dict[Any, Any] = next((kind for kind in DICTS if class_name(kind) == node["class"]), dict)()
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
            if i >= len(old) and item.get("static") == _ANY:
                raise CannotRestoreError(f"{path}[{i}] was no plain data, but a new env has none there")
            made.append(self.value(old[i] if i < len(old) else None, item, f"{path}[{i}]"))
        match kind:
            case "tuple" | "set" | "frozenset":
                items = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)
                # A set that is made anew may have another order than the new env's own set, or a copy of that.
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
    if seeds is not None and seeds["pool_size"] > _LARGEST_POOL:
        raise CannotRestoreError(f"a random generator has a pool of {seeds['pool_size']} seeds")
    _check_position(state)
    sequence = None if seeds is None else np.random.SeedSequence(**seeds)
    made: np.random.BitGenerator | None = next(
        (kind(sequence) for kind in kinds if kind.__name__ == state["bit_generator"]), None
    )
    if made is None:
        raise CannotRestoreError(f"there is no random generator {state['bit_generator']!r}")
    made.state = state
    return made


def _check_position(state: dict[str, Any]) -> None:
    """Refuse a random generator's state whose position is outside its buffer, which NumPy would accept."""
    name = state["bit_generator"]
    places = {"MT19937": (state["state"].get("pos", 0), 624), "Philox": (state.get("buffer_pos", 0), 4)}
    position, size = places.get(name, (0, 0))
    if not 0 <= position <= size:
        raise CannotRestoreError(f"the random generator {name} has the position {position} among {size} numbers")
