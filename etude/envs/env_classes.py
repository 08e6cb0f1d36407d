# SPDX-License-Identifier: Apache-2.0
"""The classes of an env's objects, of which restoring may make new objects; and global objects that it refers to."""

import contextlib
import enum
import functools
import gc
import marshal
import operator
import pathlib
import re
import sys
import types
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_TABLES: Final = frozenset((*DICTS, *SEQUENCES, bytearray))
_CHANGING: Final = (_TABLES - {tuple, frozenset}) | {np.ndarray}
_NUMBERS: Final = frozenset((int, float, complex, bool, type(None)))
_PLAIN: Final = _NUMBERS | {str, bytes, range, slice}
_CACHE: Final = type(functools.cache(len))
_MOST_VALUES: Final = 200_000
_MOST_BYTES: Final = 2**28


class _Bare:
    pass


def class_name(thing: type) -> str:
    """``module:name`` of a class."""
    return f"{getattr(thing, '__module__', '')}:{thing.__qualname__}"  # SWIG's classes may have no module


def is_bare(kind: type) -> bool:
    """Whether a class's objects have attributes only; one that is larger than a bare object has data in C or slots."""
    has_dict = hasattr(kind, "__dict__") and kind.__dictoffset__ != 0
    return has_dict and kind.__basicsize__ <= _Bare.__basicsize__ and not any(map(_slots_of, kind.__mro__))


def _slots_of(kind: type) -> set[str]:
    slots = vars(kind).get("__slots__", ())
    return {slots} if isinstance(slots, str) else {*slots} - {"__dict__", "__weakref__"}


def memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose memory this array is a view of, or the array itself."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def _is_pythons(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def is_constant(value: Any) -> bool:
    """Whether a value is immutable, so that a copy can take its place."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(is_constant, value))
    return kind in _PLAIN or issubclass(kind, np.generic | np.dtype | pathlib.PurePath)


def _is_data(value: Any) -> bool:
    """Whether a value is a constant, an array without objects, or a container of these."""
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind in DICTS or kind in SEQUENCES:
        return all(map(_is_data, value.values() if kind in DICTS else value))
    return is_constant(value) or kind is bytearray


def _kept_objects(cache: Any) -> list[tuple[Any, Any]]:
    """The values in a cache without a limit, except plain data, each with its key. A cache with a limit may drop any
    value, so no program can rely on getting the same object from it again."""
    if cache.cache_info().maxsize is not None:
        return []
    tables = [part for part in gc.get_referents(cache) if type(part) is dict and part is not vars(cache)]
    return [(key, part) for table in tables for key, part in table.items() if not _is_data(part)]


class Classes:
    """The classes of the objects, named tuples and enums in an env, and those that are defined in the files of the env
    and its wrappers, because an episode may have objects that do not exist when it begins.

    It also finds global objects: those that modules and classes hold in variables, and everything inside them.

    Args:
        env: The env.
        is_env: Returns whether an object is an env or a wrapper.
        static: Returns a name for a value without state of its own; None for all others.
    """

    def __init__(self, env: Any, is_env: Callable[[Any], bool], static: Callable[[Any], str | None]) -> None:
        self._env = env
        self._is_env = is_env
        self._shared: dict[int, tuple[Any, int | None, Any]] = {}
        """By id: a global object, the id of the object that holds it (0: it is a module or class; None: it has no
        name), and its key there."""
        self._memories: dict[int, int] = {}
        """By the id of the memory of a global array: the id of the array."""
        self._roots: list[tuple[str, Any]] = []
        self._kinds: defaultdict[str, set[type]] = defaultdict(set)
        self._files: set[str] = set()
        self._env_files: set[str] = set()
        met: dict[int, Any] = {}
        rest = [env]
        while rest:
            value = rest.pop()
            if isinstance(value, enum.Enum):
                self._add(type(value))
            elif not (is_constant(value) or id(value) in met or static(value) is not None):
                met[id(value)] = value
                if hasattr(value, "__dict__") or hasattr(value, "_fields"):
                    self._add(type(value))
                    if is_env(value):
                        self._add_file(type(value))
                rest += [part for _, part in self._inside(value)]
                if isinstance(value, weakref.ref):
                    rest.append(value())
                elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
                    rest.append(value.__self__)
        self._own = met.keys()
        self._find_shared()

    def _add(self, kind: type) -> None:
        self._kinds[class_name(kind)].add(kind)
        self._files |= {getattr(base, "__module__", "") for base in kind.__mro__}

    def _add_file(self, kind: type) -> None:
        """Add the classes that are defined in the same file as a class."""
        name = getattr(kind, "__module__", "")
        self._env_files.add(name)
        for one in list(vars(sys.modules.get(name, types.SimpleNamespace())).values()):
            if isinstance(one, type) and getattr(one, "__module__", "") == name:
                self._add(one)

    def _find_shared(self) -> None:
        """Find the global objects: in variables of the classes, of their files and of the modules that the envs' files
        import (or import something from), and in the containers, objects, functions and caches there."""
        modules = {name: sys.modules[name] for name in self._files & sys.modules.keys() if not _is_pythons(name)}
        for module in [modules[name] for name in self._env_files & modules.keys()]:
            for value in list(vars(module).values()):
                is_made_there = isinstance(value, type | types.FunctionType)
                name = getattr(value, "__module__" if is_made_there else "__name__", None)
                if (is_made_there or isinstance(value, types.ModuleType)) and isinstance(name, str):
                    modules |= {name: sys.modules[name]} if self._may_hold(name) else {}
        self._files |= modules.keys()
        local = [(name, kind) for name, kinds in self._kinds.items() if "<" in name for kind in kinds]
        self._roots = sorted([*modules.items(), *local], key=operator.itemgetter(0))
        self._shared = {id(value): (value, 0, name) for name, value in self._roots}
        rest = deque(value for _, value in self._roots)
        while rest:
            with contextlib.suppress(Exception):  # it can't be inspected
                self._meet(rest.popleft(), rest)
            if len(self._shared) > _MOST_VALUES:
                raise ValueError(
                    f"its file and those that it imports hold more than {_MOST_VALUES:,} objects, lists and so on in "
                    "their variables, too many to tell which of them the env has"
                )

    def _meet(self, value: Any, rest: deque[Any]) -> None:
        """Register the parts of a global object, and add to ``rest`` those that may have parts themselves."""
        is_named = self._shared[id(value)][1] is not None
        for key, part in self._inside(value):
            kind = type(part)
            if kind in _PLAIN:
                continue
            is_other = kind in _TABLES and id(part) not in self._own
            if is_other and _PLAIN.issuperset(map(type, gc.get_referents(part))):
                continue  # there may be very many
            has_name = is_named and key is not None and is_constant(key)
            known = self._shared.get(id(part))
            if (known is not None and (known[1] is not None or not has_name)) or self._is_left_out(part):
                continue
            self._shared[id(part)] = (part, id(value) if has_name else None, key)
            if kind is np.ndarray:
                array = self._memories.get(id(memory_of(part)))
                if array is None or self._shared[array][1] is None:
                    self._memories[id(memory_of(part))] = id(part)
            if kind not in _TABLES or not self._is_apart(part):
                rest.append(part)

    def _is_apart(self, table: Any) -> bool:
        """Whether a container holds only plain data and containers, none of which belong to the env."""
        level, met = [table], {id(table)}
        while level := [part for part in gc.get_referents(*level) if type(part) not in _PLAIN and id(part) not in met]:
            if not (_TABLES.issuperset(map(type, level)) and self._own.isdisjoint(map(id, level))):
                return False
            met.update(map(id, level))
        return True

    def _is_left_out(self, value: Any) -> bool:
        with contextlib.suppress(Exception):  # such as a placeholder for a missing module, which refuses any access
            if isinstance(value, type | types.FunctionType | types.ModuleType) or not hasattr(value, "__dict__"):
                return is_constant(value)
            return isinstance(value, gym.Space) or self._is_env(value) or is_constant(value)
        return True

    def _may_hold(self, module: str) -> bool:
        """Whether to search a module that an env's file imports: neither Python's own modules nor those of other
        installed packages, which may be large."""
        if module not in sys.modules or _is_pythons(module):
            return False
        is_installed = "-packages" in (getattr(sys.modules[module], "__file__", None) or "")
        return not is_installed or module.split(".")[0] in {name.split(".")[0] for name in self._env_files}

    def _inside(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """The parts of a container, function or cache, or of a module, class or object of these files, each with its
        key; the key is None if it may be another one in another process."""
        if isinstance(value, DICTS):
            return list(value.items())  # a copy, as a module that imports something changes meanwhile
        if isinstance(value, set | frozenset):
            return [(None, part) for part in value]
        if isinstance(value, list | tuple | deque):
            return enumerate(value)
        if isinstance(value, np.ndarray):
            return enumerate(value.flat if value.dtype == object else ())
        if isinstance(value, types.FunctionType):
            cells = gc.get_referents(*value.__closure__ or ())
            return enumerate([value.__defaults__, value.__kwdefaults__, *filter(None, [vars(value)]), *cells])
        if isinstance(value, _CACHE):
            return [*vars(value).items(), *_kept_objects(value)]
        if isinstance(value, functools.partial | types.MethodType | staticmethod | classmethod | property):
            return enumerate(gc.get_referents(value))
        home = value.__name__ if isinstance(value, types.ModuleType) else None
        home = home or getattr(value if isinstance(value, type) else type(value), "__module__", "")
        return list(getattr(value, "__dict__", {}).items()) if home in self._files else ()

    def named(self, name: str) -> type | None:
        """The class with this name; None if there is none, or if several have the name."""
        kinds = self._kinds.get(name, set())
        return next(iter(kinds)) if len(kinds) == 1 else None

    def can_be_made(self, kind: type) -> bool:
        """Whether an object of this class may be made without ``__init__`` and filled.

        Not if the class has a destructor, or if its attributes are not the whole object.
        """
        return is_bare(kind) and not (hasattr(kind, "__del__") or issubclass(kind, gym.Space))

    def shared_name(self, value: Any) -> str | None:
        """The name of a global object, such as a list in a variable, or of the global memory that an array views. Empty
        if it has no name; None if the value is not global."""
        if value is self._env or type(value) is tuple:  # a tuple can be replaced by an equal one
            return None
        if id(value) in self._shared:
            return self._name_of(id(value))
        array = self._memories.get(id(memory_of(value))) if type(value) is np.ndarray else None
        return None if array is None else (name := self._name_of(array)) and f"{name}.base"

    def _name_of(self, number: int | None) -> str:
        keys = []
        while number:
            _, number, key = self._shared[number]
            keys.append(key)
        return "" if number is None else keys.pop() + "".join(f"[{key!r}]" for key in reversed(keys))

    def shared(self, names: set[str]) -> dict[str, Any]:
        """Find global objects by names from `shared_name`, possibly of another process; some more are also returned.
        None for names that are ambiguous."""
        ways = {name[: place.start()] for name in names for place in re.finditer(r"\[|\.base$|$", name)}
        found: dict[str, Any] = {}
        rest = [*self._roots]
        while rest:
            name, value = rest.pop()
            with contextlib.suppress(Exception):  # see `_find_shared`
                if self._is_left_out(value):
                    continue
                memory = {f"{name}.base": memory_of(value)} if type(value) is np.ndarray else {}
                for text, one in {name: value, **memory}.items():
                    found[text] = one if found.get(text, one) is one else None
                parts = ((f"{name}[{key!r}]", part) for key, part in self._inside(value) if is_constant(key))
                rest += [(text, part) for text, part in parts if text in ways]
        return found


# -- what envs share in their classes -------------------------------------------------------------------------------


class _NoPlainDataError(Exception):
    pass


def checksums_of(kind: type) -> dict[str, int]:
    """Checksums of the lists, dicts, arrays and so on of plain data in a class and those above it, by name.

    Attributes whose names contain "cache" are left out, and those that Python itself makes (``__slotnames__``).

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
    """A number that is equal for equal values, whatever the order in dicts and sets."""
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
    elif kind in DICTS:
        content = sorted(tuple(_checksum_of(part, budget) for part in item) for item in value.items())
    elif kind in SEQUENCES:
        content = [_checksum_of(part, budget) for part in value]
        content = sorted(content) if kind in (set, frozenset) else content
    else:
        raise _NoPlainDataError
    return zlib.crc32(f"{kind.__name__} {content!r}".encode("utf-8", "backslashreplace"))
