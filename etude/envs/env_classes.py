# SPDX-License-Identifier: Apache-2.0
"""The classes of the objects of an env: those of which restoring may make new objects, and what all envs share in
them."""

import contextlib
import enum
import functools
import gc
import marshal
import operator
import pathlib
import sys
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

_CHANGING: Final = (list, dict, OrderedDict, defaultdict, Counter, set, deque, bytearray, np.ndarray)
_CACHE: Final = type(functools.cache(len))
_PLAIN: Final = frozenset((int, float, complex, str, bool, bytes, type(None), range, slice))
_NUMBERS: Final = frozenset((int, float, complex, bool, type(None)))
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MOST_VALUES: Final = 200_000
_MOST_BYTES: Final = 2**28


class _Bare:
    pass


def class_name(thing: type) -> str:
    """``module:name`` of a class."""
    return f"{getattr(thing, '__module__', '')}:{thing.__qualname__}"  # SWIG's classes may have no module


def is_bare(kind: type) -> bool:
    """Whether objects of a class have attributes only: a larger one than a bare one has data in C or in slots."""
    return hasattr(kind, "__dict__") and kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Bare.__basicsize__


def memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose memory this array is a view of, or the array itself."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def _is_pythons(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def _is_constant(value: Any) -> bool:
    """Whether a value never changes, and may be there twice."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(_is_constant, value))
    return kind in _PLAIN or issubclass(kind, np.generic | np.dtype | pathlib.PurePath)


class Classes:
    """The classes of the objects, named tuples and enums that an env holds, and those that are defined in the files of
    the env and its wrappers: an episode may have objects that do not exist when it begins.

    Args:
        env: The env.
        is_env: Whether an object is an env or a wrapper.
        static: A name for a value without state of its own; None for all others.
    """

    def __init__(self, env: Any, is_env: Callable[[Any], bool], static: Callable[[Any], str | None]) -> None:
        self._is_env = is_env
        self._shared: dict[int, tuple[Any, str]] = {}
        """By id: what the program holds, and its name."""
        self._memories: dict[int, tuple[Any, str]] = {}
        """The same for the memory of arrays."""
        self._named: dict[str, Any] = {}
        self._kinds: defaultdict[str, set[type]] = defaultdict(set)
        self._files: set[str] = set()
        self._env_files: set[str] = set()
        met: dict[int, Any] = {}
        rest = [env]
        while rest:
            value = rest.pop()
            if isinstance(value, enum.Enum):
                self._add(type(value))
            elif not (_is_constant(value) or id(value) in met or static(value) is not None):
                met[id(value)] = value
                if hasattr(value, "__dict__") or hasattr(value, "_fields"):
                    self._add(type(value))
                    if is_env(value):
                        self._add_file(type(value))
                rest += [part for _, part in self._inside(value)]
        self._find_shared()
        self._shared.pop(id(env), None)

    def _add(self, kind: type) -> None:
        self._kinds[class_name(kind)].add(kind)
        self._files |= {getattr(base, "__module__", "") for base in kind.__mro__}

    def _add_file(self, kind: type) -> None:
        """Add the classes that are defined beside a class."""
        name = getattr(kind, "__module__", "")
        self._env_files.add(name)
        for one in list(vars(sys.modules.get(name, types.SimpleNamespace())).values()):
            if isinstance(one, type) and getattr(one, "__module__", "") == name:
                self._add(one)

    def _find_shared(self) -> None:
        """Find what the program holds: in variables of the classes, of their files and of the modules that the envs'
        files import (or import something from), and in tables, objects, functions and caches there."""
        modules = {name: sys.modules[name] for name in self._files & sys.modules.keys() if not _is_pythons(name)}
        for module in [modules[name] for name in self._env_files & modules.keys()]:
            for value in list(vars(module).values()):
                is_made_there = isinstance(value, type | types.FunctionType)
                name = getattr(value, "__module__" if is_made_there else "__name__", None)
                if (is_made_there or isinstance(value, types.ModuleType)) and isinstance(name, str):
                    modules |= {name: sys.modules[name]} if self._may_hold(name) else {}
        self._files |= modules.keys()
        local = [(name, kind) for name, kinds in self._kinds.items() if "<" in name for kind in kinds]
        rest: deque[tuple[str, Any]] = deque(sorted([*modules.items(), *local], key=operator.itemgetter(0)))
        while rest:
            with contextlib.suppress(Exception):  # what can't be looked at, such as a stand-in for what is not there
                rest += self._meet(*rest.popleft())
            if len(self._shared) > _MOST_VALUES:
                raise ValueError(
                    f"its file and those that it imports hold more than {_MOST_VALUES:,} objects, lists and so on in "
                    "their variables, too many to tell which of them the env has"
                )

    def _meet(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Note what the program holds by a name; return what is in it, with names."""
        is_object = not isinstance(value, type | types.FunctionType | types.ModuleType) and hasattr(value, "__dict__")
        if is_object and (isinstance(value, gym.Space) or self._is_env(value)):
            return []
        if type(value) is np.ndarray:
            self._share(self._memories, memory_of(value), name and f"{name}.base")
        if not self._share(self._shared, value, name):
            return []
        return [
            (f"{name}[{key!r}]" if name and key is not None and _is_constant(key) else "", part)
            for key, part in self._inside(value)
            if not _is_constant(part)
        ]

    def _share(self, known: dict[int, tuple[Any, str]], value: Any, name: str) -> bool:
        """Note a value and its name; return whether the value, or that it has a name, is new."""
        if name:
            self._named[name] = value if self._named.get(name, value) is value else None
        if id(value) in known and (known[id(value)][1] or not name):
            return False
        known[id(value)] = (value, name)
        return True

    def _may_hold(self, module: str) -> bool:
        """Whether a module that an env's file imports may hold objects of their classes: not Python's own, nor one of
        another package that is installed, which may be large."""
        if module not in sys.modules or _is_pythons(module):
            return False
        is_installed = "-packages" in (getattr(sys.modules[module], "__file__", None) or "")
        return not is_installed or module.split(".")[0] in {name.split(".")[0] for name in self._env_files}

    def _inside(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """What a table, a function or a cache refers to, or a module, class or object of these files, each with its
        place there; None if that may be another one elsewhere."""
        if isinstance(value, _DICTS):
            return value.items()
        if isinstance(value, set | frozenset):
            return [(None, part) for part in value]
        if isinstance(value, list | tuple | deque):
            return enumerate(value)
        if isinstance(value, np.ndarray):
            return enumerate(value.flat if value.dtype == object else ())
        if isinstance(value, types.FunctionType):
            cells = gc.get_referents(*value.__closure__ or ())
            return enumerate([value.__defaults__, value.__kwdefaults__, *filter(None, [vars(value)]), *cells])
        if isinstance(value, _CACHE):  # one without a limit is a dict, whose place is always the same
            parts = enumerate(gc.get_referents(value))
            return [(i if i == 1 and type(part) is dict else None, part) for i, part in parts]
        if isinstance(value, functools.partial | types.MethodType | staticmethod | classmethod | property):
            return enumerate(gc.get_referents(value))
        home = value.__name__ if isinstance(value, types.ModuleType) else None
        home = home or getattr(value if isinstance(value, type) else type(value), "__module__", "")
        return getattr(value, "__dict__", {}).items() if home in self._files else ()

    def named(self, name: str) -> type | None:
        """The class with this name; None if there is none, or if several have the name."""
        kinds = self._kinds.get(name, set())
        return next(iter(kinds)) if len(kinds) == 1 else None

    def can_be_made(self, kind: type) -> bool:
        """Whether a new object of this class may be made and filled.

        Not if something would run when it is thrown away, or if its attributes are not all that it is.
        """
        return is_bare(kind) and not (hasattr(kind, "__del__") or issubclass(kind, gym.Space))

    def shared_name(self, value: Any) -> str | None:
        """The name of what belongs to the program and not to the env, or of the memory that it is a view of: such as
        one of the states that an agent may have, or a list in a variable. Empty if it has none; None for all else."""
        found = None if type(value) is tuple else self._shared.get(id(value))  # a tuple is as good as another
        if found is None and type(value) is np.ndarray:
            found = self._memories.get(id(memory_of(value)))
        return None if found is None else found[1]

    def shared(self, name: str) -> Any:
        """What the program holds by a name from `shared_name`, maybe in another process; None if there is none."""
        return self._named.get(name)


# -- what envs share in their classes -------------------------------------------------------------------------------


class _NoPlainDataError(Exception):
    pass


def checksums_of(kind: type) -> dict[str, int]:
    """Checksums of the lists, dicts, arrays and so on of plain data in a class and those above it, by name.

    Those that are caches by their name are left out, and those that Python itself makes (``__slotnames__``).

    Raises:
        ValueError: they are too large to compare.
    """
    found: dict[str, int] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            is_left_out = "cache" in name.lower() or (name.startswith("__") and name.endswith("__"))
            if type(value) in _CHANGING and not is_left_out:
                with contextlib.suppress(_NoPlainDataError):
                    found[name] = _checksum_of(value, [_MOST_VALUES])
    return found


def _checksum_of(value: Any, budget: list[int]) -> int:
    """A number that is the same for equal values, whatever the order in dicts and sets."""
    kind = type(value)
    budget[0] -= 1
    size = value.nbytes if kind is np.ndarray else sys.getsizeof(value)
    if budget[0] < 0 or size > _MOST_BYTES:
        raise ValueError("what its class holds is too large to compare: make it in __init__")
    if isinstance(value, type(None) | bool | int | float | complex | str | bytes | bytearray | np.generic):
        content: Any = repr(value)
    elif kind in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
        content = zlib.crc32(marshal.dumps(value, 2))
    elif kind is np.ndarray and not value.dtype.hasobject:
        content = value.dtype.str, value.shape, zlib.crc32(value.tobytes())
    elif kind in _DICTS:
        content = sorted(tuple(_checksum_of(part, budget) for part in item) for item in value.items())
    elif kind in _SEQUENCES:
        content = [_checksum_of(part, budget) for part in value]
        content = sorted(content) if kind in (set, frozenset) else content
    else:
        raise _NoPlainDataError
    return zlib.crc32(f"{kind.__name__} {content!r}".encode("utf-8", "backslashreplace"))
