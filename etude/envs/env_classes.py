# SPDX-License-Identifier: Apache-2.0
"""The classes of the objects of an env: those of which restoring may make new objects, and what all envs share in
them."""

import enum
import random
import sys
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, Final

import gymnasium as gym
import numpy as np

_CHANGING: Final = (list, dict, OrderedDict, defaultdict, Counter, set, deque, bytearray, np.ndarray)
_GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random)
_PLAIN: Final = frozenset((int, float, str, bool, bytes, type(None)))
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MOST_VALUES: Final = 10_000
"""Larger tables in a class are taken for constants."""
_MOST_BYTES: Final = 2**24
_DEEPEST: Final = 50


class _Bare:
    pass


def class_name(thing: type) -> str:
    """``module:name`` of a class."""
    return f"{getattr(thing, '__module__', '')}:{thing.__qualname__}"  # SWIG's classes may have no module


def is_bare(kind: type) -> bool:
    """Whether objects of a class have attributes only: a larger one than a bare one has data in C or in slots."""
    return hasattr(kind, "__dict__") and kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Bare.__basicsize__


class Classes:
    """The classes of the objects, named tuples and enums that an env holds, and those that are defined in the files of
    the env and its wrappers: an episode may have objects that do not exist when it begins.

    Args:
        env: The env.
        held: What a function holds; None for values that are no functions.
        is_env: Whether an object is an env or a wrapper.
        is_static: Whether a value has no state of its own.
    """

    def __init__(
        self,
        env: Any,
        held: Callable[[Any], dict[str, Any] | None],
        is_env: Callable[[Any], bool],
        is_static: Callable[[Any], bool],
    ) -> None:
        self._is_env = is_env
        self._shared: dict[int, Any] = {}
        self._shared_kinds: set[type] = set()
        self._data: dict[int, Any] = {}
        """Lists, arrays, generators and so on that a variable refers to."""
        self._kinds: dict[str, type | None] = {}
        self._files: set[str] = set()
        self._env_files: set[str] = set()
        met: dict[int, Any] = {}
        rest = [env]
        while rest:
            value = rest.pop()
            if isinstance(value, enum.Enum):
                self._add(type(value))
                continue
            if id(value) in met or isinstance(value, np.generic | str | bytes | int | float):
                continue
            met[id(value)] = value
            if isinstance(value, dict):
                rest += value.values()
            elif isinstance(value, _SEQUENCES):
                rest += value
                if hasattr(value, "_fields"):
                    self._add(type(value))
            elif isinstance(value, np.ndarray):
                rest += list(value.flat) if value.dtype == object else []
            elif inside := held(value):
                rest += inside.values()
            elif not is_static(value) and hasattr(value, "__dict__"):
                self._add(type(value))
                rest += vars(value).values()
                if is_env(value):
                    self._add_file(type(value))
        self._find_shared()

    def _add(self, kind: type) -> None:
        name = class_name(kind)
        self._kinds[name] = kind if self._kinds.get(name, kind) is kind else None  # None: several have this name
        self._files.add(getattr(kind, "__module__", ""))

    def _add_file(self, kind: type) -> None:
        """Add the classes that are defined beside a class."""
        name = getattr(kind, "__module__", "")
        self._env_files.add(name)
        for one in list(vars(sys.modules.get(name, types.SimpleNamespace())).values()):
            if isinstance(one, type) and getattr(one, "__module__", "") == name:
                self._add(one)

    def _find_shared(self) -> None:
        """Find what the program holds: in variables of the classes, of their files and of the modules that the envs'
        files import (or import something from), and in tables and objects there."""
        kinds = {kind for kind in self._kinds.values() if kind is not None and not issubclass(kind, gym.Space)}
        modules = {name: sys.modules[name] for name in self._files & sys.modules.keys()}
        for module in [modules[name] for name in self._env_files & modules.keys()]:
            for value in list(vars(module).values()):
                is_made_there = isinstance(value, type | types.FunctionType)
                name = getattr(value, "__module__" if is_made_there else "__name__", None)
                if (is_made_there or isinstance(value, types.ModuleType)) and isinstance(name, str):
                    modules |= {name: sys.modules[name]} if self._may_hold(name) else {}
        variables = [value for thing in (*kinds, *modules.values()) for value in list(vars(thing).values())]
        self._data = {id(value): value for value in variables if type(value) in (*_CHANGING, *_GENERATORS)}
        rest, met = [(value, False) for value in variables if type(value) not in _PLAIN], set[int]()
        while rest:
            value, is_in_object = rest.pop()
            kind = type(value)
            if kind in kinds and not self._is_env(value):
                self._shared[id(value)] = value
                if not is_in_object:
                    self._shared_kinds.add(kind)
            inside = self._inside(value)
            if len(inside) and id(value) not in met:
                met.add(id(value))
                is_in_object |= kind not in (*_DICTS, *_SEQUENCES, np.ndarray)
                rest += [(part, is_in_object) for part in inside]

    def _may_hold(self, module: str) -> bool:
        """Whether a module that an env's file imports may hold objects of their classes: not Python's own, nor one of
        another package that is installed, which may be large."""
        package = module.split(".")[0]
        if module not in sys.modules or package in sys.stdlib_module_names:
            return False
        is_installed = "-packages" in (getattr(sys.modules[module], "__file__", None) or "")
        return not is_installed or package in {name.split(".")[0] for name in self._env_files}

    def _inside(self, value: Any) -> Collection[Any]:
        """What a table, or an object of a class of these files that is no env, refers to."""
        if isinstance(value, _DICTS):
            inside: Collection[Any] = value.values()
        elif isinstance(value, _SEQUENCES):
            inside = value
        elif isinstance(value, np.ndarray) and value.dtype == object:
            inside = value.ravel()
        elif (
            isinstance(value, type) or getattr(type(value), "__module__", "") not in self._files or self._is_env(value)
        ):
            return ()
        else:
            inside = getattr(value, "__dict__", {}).values()
        return () if len(inside) > _MOST_VALUES or _PLAIN.issuperset(map(type, inside)) else inside

    def named(self, name: str) -> type | None:
        """The class with this name; None if there is none, or if several have the name."""
        return self._kinds.get(name)

    def can_be_made(self, kind: type) -> bool:
        """Whether a new object of this class may be made and filled.

        Not if it would be taken for one that the program compares it with (``state is IDLE``), if something would run
        when it is thrown away, or if its attributes are not all that it is.
        """
        return is_bare(kind) and not (
            kind in self._shared_kinds or hasattr(kind, "__del__") or issubclass(kind, gym.Space)
        )

    def is_shared(self, value: Any) -> bool:
        """Whether an object belongs to the program, such as one of the states that an agent may have, and not to the
        env."""
        return id(value) in self._shared

    def is_only(self, value: Any) -> bool:
        """Whether a shared object is the only one of its class."""
        return sum(type(one) is type(value) for one in self._shared.values()) == 1

    def is_shared_data(self, value: Any) -> bool:
        """Whether a variable of the program refers to this list, dict, array, generator and so on."""
        return id(value) in self._data


# -- what envs share in their classes -------------------------------------------------------------------------------


class _NoPlainDataError(Exception):
    pass


def checksums_of(kind: type) -> dict[str, int]:
    """Checksums of the lists, dicts, arrays and so on of plain data in a class and those above it, by name.

    Large ones are left out, and those that are caches by their name.
    """
    found: dict[str, int] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            if type(value) in _CHANGING and "cache" not in name.lower():
                try:
                    found[name] = _checksum_of(value, [_MOST_VALUES], 0)
                except _NoPlainDataError:
                    continue
    return found


def _checksum_of(value: Any, budget: list[int], depth: int) -> int:
    """A number that is the same for equal values, whatever the order in dicts and sets."""
    kind = type(value)
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEEPEST:
        raise _NoPlainDataError
    if isinstance(value, type(None) | bool | int | float | complex | str | bytes | bytearray | np.generic):
        content: Any = repr(value)
    elif kind is np.ndarray and not value.dtype.hasobject and value.nbytes <= _MOST_BYTES:
        content = value.dtype.str, value.shape, zlib.crc32(value.tobytes())
    elif kind in _DICTS:
        content = sorted(tuple(_checksum_of(part, budget, depth + 1) for part in item) for item in value.items())
    elif kind in _SEQUENCES:
        content = [_checksum_of(part, budget, depth + 1) for part in value]
        content = sorted(content) if kind in (set, frozenset) else content
    else:
        raise _NoPlainDataError
    return zlib.crc32(f"{kind.__name__} {content!r}".encode("utf-8", "backslashreplace"))
