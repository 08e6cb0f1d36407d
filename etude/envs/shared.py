# SPDX-License-Identifier: Apache-2.0
"""What an env shares with the whole program: constants, functions, and classes of which new objects may be made."""

import contextlib
import enum
import functools
import gc
import inspect
import logging
import pathlib
import sys
import types
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES: Final = (list, tuple, set, frozenset, deque)
ANY: Final = "any"
"""The name of each object that never changes, or is for drawing only."""
OWNER: Final = "__self__"
"""The name of a method's object among its parts."""

_PLAIN: Final = frozenset((int, float, complex, str, bool, bytes, type(None), range, slice))
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_METHODS: Final = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_CACHE: Final = type(functools.cache(len))
_MOST_VALUES: Final = 500_000
_STATELESS: Final = tuple(
    f"{module}."
    for module in (  # noqa: SIM905
        "pygame.surface pygame.font pygame.freetype pygame.time pygame.mixer pygame.display pygame.event "
        "pygame.joystick pygame.pixelarray matplotlib PIL.ImageFont moviepy _thread "
        "gymnasium.envs.mujoco.mujoco_rendering "
        "dm_control.mujoco.index"  # names of parts of a simulator's memory
    ).split()
)
"""Modules whose objects are for drawing only, or have no state of their own."""


class _Bare:
    pass


def class_name(thing: type) -> str:
    """``module:name`` of a class."""
    return f"{getattr(thing, '__module__', '')}:{thing.__qualname__}"  # SWIG's classes may have no module


def is_bare(kind: type) -> bool:
    """Whether objects of a class have attributes only: a larger one than a bare one has data in C or in slots."""
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


def is_env(value: Any) -> bool:
    """Whether ``value`` is an env or a wrapper, of one agent or several."""
    many = all(own_attribute(value, name) is not None for name in ("possible_agents", "reset", "step"))
    return isinstance(value, gym.Env | VectorEnv) or many


def own_attribute(value: Any, name: str) -> Any:
    """An object's own attribute, or None; some wrappers also show the attributes of the env inside."""
    return getattr(value, name, None) if inspect.getattr_static(value, name, None) is not None else None


def _is_constant(value: Any) -> bool:
    """Whether a value never changes, and may be there twice."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(_is_constant, value))
    return kind in _PLAIN or issubclass(kind, np.generic | np.dtype | pathlib.PurePath)


def _is_data(value: Any) -> bool:
    """Whether a value is a constant, an array without objects, or a table of such."""
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind in DICTS or kind in SEQUENCES:
        return all(map(_is_data, value.values() if kind in DICTS else value))
    return _is_constant(value)


# -- functions --------------------------------------------------------------------------------------------------------


def parts_of(function: Any) -> dict[str, Any]:
    """What a function refers to and may change, by name: the variables of an enclosing function that it uses, its
    defaults and attributes; the object of a method; the arguments of a partial. Empty for all else."""
    if isinstance(function, functools.partial):
        return {"func": function.func, "args": function.args, "keywords": function.keywords} | _attributes(function)
    if isinstance(function, _METHODS):
        own = getattr(function, "__self__", None)
        return {} if own is None or isinstance(own, types.ModuleType | type) else {OWNER: own}
    if not isinstance(function, types.FunctionType):
        return {}
    parts = _attributes(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            parts[name] = cell.cell_contents
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return parts | {name: given for name, given in defaults.items() if given}


def _attributes(function: Any) -> dict[str, Any]:
    given = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return {"__dict__": given} if given else {}


def is_programs(function: types.FunctionType) -> bool:
    """Whether a function is in a variable of its module, or of a class there."""
    if any(function is own for own in function.__globals__.values()):
        return True
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def code_of(function: Any) -> str:
    """The name of a function's code, which is the same in each new env; of one that is defined in a function, with a
    checksum, since several may have one name."""
    if isinstance(function, functools.partial):
        return "partial"
    name = f"{getattr(function, '__module__', '')}:{function.__qualname__}"
    code = getattr(function, "__code__", None)
    return name if code is None or "<" not in name else f"{name}#{_checksum_of(code):08x}"


def _checksum_of(code: types.CodeType) -> int:
    def shown(part: Any) -> Any:
        if isinstance(part, types.CodeType):
            return _checksum_of(part)
        if isinstance(part, frozenset):  # of texts, in another order in each process
            return sorted(map(repr, part))
        return repr(part)

    parts = [shown(part) for part in code.co_consts]
    return zlib.crc32(code.co_code + repr((code.co_names, code.co_freevars, parts)).encode())


def static_name(value: Any) -> str | None:
    """A name for a value without state of its own; None for all others."""
    if parts_of(value):
        return None
    if isinstance(value, _FUNCTIONS):
        return code_of(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    kind = type(value)
    is_stateless = f"{getattr(kind, '__module__', '')}.".startswith(_STATELESS)
    if is_stateless or kind is weakref.finalize or isinstance(value, EnvSpec | logging.Logger):
        return ANY
    if isinstance(value, np.ufunc):
        return f"numpy:{value.__name__}"
    is_in_c = callable(value) and not hasattr(value, "__dict__") and not isinstance(value, weakref.ref)
    if is_in_c and not isinstance(kind.__call__, types.FunctionType):  # such as operator.itemgetter(0)
        return ANY if " at 0x" in repr(value) else repr(value)
    return None


# -- the program ------------------------------------------------------------------------------------------------------


class Program:
    """What the program holds apart from an env: in variables of the classes of the env's objects, of their files and of
    the modules that the envs' files import (or import something from), and in tables, objects, functions and caches
    there. Each of it has a name, the way to it from a module.

    Raises:
        ValueError: there is too much to look at.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._kinds: defaultdict[str, set[type]] = defaultdict(set)
        """The classes of the objects, named tuples and enums of the env, and those that are defined beside the env or
        its wrappers: an episode may have objects that do not exist when it begins."""
        self._files: set[str] = set()
        self._env_files: set[str] = set()
        self._own: set[int] = set()
        """The ids of what the env holds."""
        self._find_classes()
        self._roots = self._find_roots()
        self._places: dict[int, tuple[Any, int | None, Any]] = {}
        """By id: what the program holds, the id of what that is in (0: nothing; None: it has no name) and its place
        there."""
        self._memories: dict[int, NDArray[Any]] = {}
        """By the id of the memory of an array that the program holds: the array."""
        self._find_places()

    def _find_classes(self) -> None:
        met: dict[int, Any] = {}
        rest = [self._env]
        while rest:
            value = rest.pop()
            try:
                if isinstance(value, enum.Enum):
                    self._add(type(value))
                elif not (_is_constant(value) or id(value) in met or static_name(value) is not None):
                    met[id(value)] = value
                    rest += self._met_in(value)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001  capturing it raises the same error, and says where it is
                continue
        self._own = set(met)

    def _met_in(self, value: Any) -> list[Any]:
        """What is inside a value of the env, whose class is noted."""
        if hasattr(value, "__dict__") or hasattr(value, "_fields"):
            self._add(type(value))
            if is_env(value):
                self._add_file(getattr(type(value), "__module__", ""))
        return [value()] if isinstance(value, weakref.ref) else [part for _, part in self._inside(value)]

    def _add(self, kind: type) -> None:
        self._kinds[class_name(kind)].add(kind)
        self._files |= {getattr(base, "__module__", "") for base in kind.__mro__}

    def _add_file(self, name: str) -> None:
        """Add the classes of a file that defines an env."""
        self._env_files.add(name)
        for one in list(vars(sys.modules.get(name, types.SimpleNamespace())).values()):
            if isinstance(one, type) and getattr(one, "__module__", "") == name:
                self._add(one)

    def _find_roots(self) -> dict[str, Any]:
        """The modules, and the classes that are defined in functions, in which the program holds something."""
        for file in self._env_files & sys.modules.keys():
            for value in list(vars(sys.modules[file]).values()):
                is_made_there = isinstance(value, type | types.FunctionType)
                name = getattr(value, "__module__" if is_made_there else "__name__", None)
                is_module = is_made_there or isinstance(value, types.ModuleType)
                if is_module and isinstance(name, str) and self._may_hold(name):
                    self._files.add(name)
        modules = {name: sys.modules[name] for name in self._files & sys.modules.keys() if not _is_pythons(name)}
        return modules | {name: kind for name, (kind, *others) in self._kinds.items() if "<" in name and not others}

    def _may_hold(self, module: str) -> bool:
        """Whether a module that an env's file imports may hold objects of their classes: not Python's own, nor one of
        another package that is installed, which may be large."""
        if module not in sys.modules or _is_pythons(module):
            return False
        is_installed = "-packages" in (getattr(sys.modules[module], "__file__", None) or "")
        return not is_installed or module.split(".")[0] in {name.split(".")[0] for name in self._env_files}

    def _find_places(self) -> None:
        named: deque[tuple[Any, Any, Any]] = deque((value, 0, name) for name, value in sorted(self._roots.items()))
        unnamed: deque[tuple[Any, Any, Any]] = deque()  # such as what is in a set, if it is not elsewhere as well
        unnamed += [(kind, None, None) for kinds in self._kinds.values() if len(kinds) > 1 for kind in kinds]
        while named or unnamed:
            value, parent, key = (named or unnamed).popleft()
            with contextlib.suppress(Exception):  # what can't be looked into
                if id(value) in self._places or self._is_left_out(value):
                    continue
                self._places[id(value)] = (value, parent, key)
                if type(value) is np.ndarray:
                    self._memories.setdefault(id(memory_of(value)), value)
                for part_key, part in self._inside(value):
                    if id(part) not in self._places and not self._is_passed_over(part):
                        has_name = parent is not None and part_key is not None and _is_constant(part_key)
                        place = (part, id(value), part_key) if has_name else (part, None, None)
                        (named if has_name else unnamed).append(place)
            if len(self._places) > _MOST_VALUES:
                raise ValueError(
                    f"its file and those that it imports hold more than {_MOST_VALUES:,} objects, lists and so on in "
                    "their variables, too many to tell which of them the env has"
                )

    def _is_passed_over(self, value: Any) -> bool:
        """Whether a value is a number or text, or a table of such that the env does not hold: there may be many."""
        kind = type(value)
        is_table = (kind in DICTS or kind in SEQUENCES) and id(value) not in self._own
        return kind in _PLAIN or (is_table and _PLAIN.issuperset(map(type, gc.get_referents(value))))

    def _is_left_out(self, value: Any) -> bool:
        if isinstance(value, type | types.FunctionType | types.ModuleType) or not hasattr(value, "__dict__"):
            return _is_constant(value)
        return isinstance(value, gym.Space) or is_env(value) or _is_constant(value)

    def _inside(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """What a table, a function or a cache refers to, or a module, class or object of these files, each with its
        place there; None if that may be another one elsewhere."""
        if isinstance(value, DICTS):
            return list(value.items())  # which may change meanwhile, as modules do that import something
        if isinstance(value, set | frozenset):
            return [(None, part) for part in value]
        if isinstance(value, list | tuple | deque):
            return enumerate(value)
        if isinstance(value, np.ndarray):
            return enumerate(value.flat if value.dtype == object else ())
        if isinstance(value, _CACHE):
            return [*vars(value).items(), *_kept_objects(value)]
        if parts := parts_of(value):
            return parts.items()
        if isinstance(value, staticmethod | classmethod | property):
            return enumerate(gc.get_referents(value))
        home = value.__name__ if isinstance(value, types.ModuleType) else None
        home = home or getattr(value if isinstance(value, type) else type(value), "__module__", "")
        return list(getattr(value, "__dict__", {}).items()) if home in self._files else ()

    def kind(self, name: str) -> type | None:
        """The class with this name of which the env has objects; None if there is none, or several."""
        kinds = self._kinds.get(name, set())
        return next(iter(kinds)) if len(kinds) == 1 else None

    def owner(self, value: Any) -> Any:
        """What the program holds of a value: itself, or the array that it is a view of. None for what is the env's."""
        if value is self._env or type(value) is tuple:  # one tuple is as good as another
            return None
        if id(value) in self._places:
            return value
        return self._memories.get(id(memory_of(value))) if type(value) is np.ndarray else None

    def name(self, owner: Any) -> list[str] | None:
        """The name of something that the program holds; None if it has none."""
        number: int | None = id(owner)
        names: list[str] = []
        while number:
            _, number, key = self._places[number]
            names.append(key if number == 0 else repr(key))
        return None if number is None else names[::-1]

    def find(self, name: Sequence[str]) -> Any:
        """What the program holds by a name from `name`, maybe of another process; None if there is nothing."""
        value = self._roots.get(name[0])
        for key in name[1:]:
            value = next((part for own, part in self._inside(value) if _is_constant(own) and repr(own) == key), None)
        return None if static_name(value) is not None else value


def _is_pythons(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def _kept_objects(cache: Any) -> list[tuple[Any, Any]]:
    """What a cache without a limit keeps, except plain data, each with its key. No program can rely on having the same
    thing again of one that has a limit."""
    if cache.cache_info().maxsize is not None:
        return []
    tables = [part for part in gc.get_referents(cache) if type(part) is dict and part is not vars(cache)]
    return [(key, part) for table in tables for key, part in table.items() if not _is_data(part)]
