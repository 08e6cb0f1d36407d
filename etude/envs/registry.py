# SPDX-License-Identifier: Apache-2.0
"""Env names: registered ids, ``module:factory`` and functions; packages that envs need; rendering without a screen."""

import contextlib
import ctypes.util
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from etude.envs.adapters import ReducedEnv, make_error, not_one_env
from etude.envs.arena import Arena
from etude.envs.tasks import is_task, task
from etude.errors import EnvError, SettingsError, described
from etude.settings import nearest, suggestion


@runtime_checkable
class SteppedEnv(Protocol):
    """One env of several agents, such as a `MultiAgentEnv`, or a ``ParallelEnv`` or ``AECEnv`` of PettingZoo."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Begin an episode."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step."""


EnvLike: TypeAlias = str | gym.Env[Any, Any] | SteppedEnv | VectorEnv[Any, Any, Any] | Arena | Callable[[], Any]


class _Package(NamedTuple):
    """A package that registers its envs when it is imported."""

    ids: str
    """A regular expression for their ids."""
    module: str
    """The module to import."""
    needs: str
    """Another module that must be importable."""
    install: str


_PACKAGES: Final = (
    _Package(r"ALE/.+|.+(NoFrameskip|Deterministic)-v[04]", "ale_py", "ale_py", "pip install ale-py"),
    _Package(r"(MiniGrid|BabyAI)-.+", "minigrid", "minigrid", "pip install minigrid"),
    _Package(r"dm_control/.+", "shimmy", "dm_control", 'pip install "shimmy[dm-control]"'),
)

_INSTALL: Final = {
    "gymnasium.envs.box2d": 'pip install "gymnasium[box2d]"',
    "gymnasium.envs.classic_control": 'pip install "gymnasium[classic-control]"',
    "gymnasium.envs.mujoco": 'pip install "gymnasium[mujoco]"',
    "gymnasium.envs.phys2d": 'pip install "gymnasium[jax]"',
    "gymnasium.envs.tabular": 'pip install "gymnasium[jax]"',
    "gymnasium.envs.toy_text": 'pip install "gymnasium[toy-text]"',
    **{package.module: package.install for package in _PACKAGES},
}
"""How to install the dependencies of envs, by the module that defines them."""


def env_maker(env: EnvLike, drop: Sequence[str] = ()) -> tuple[Callable[[], Any], bool]:
    """Return a function that makes one env, and whether it can only return one object, ``env`` itself.

    The function can be pickled for an id or ``module:factory``, and for a function that is defined in a module. With
    ``drop``, it makes a `ReducedEnv`.

    Raises:
        EnvError: the id is not registered (the nearest one is named), or ``env`` is a vector env. The contents of a
            module are looked up only when the function is called.
    """
    if drop:
        make, is_one = env_maker(env)
        return functools.partial(_make_reduced, make, tuple(drop)), is_one
    if isinstance(env, str):
        spec = None if ":" in env else _spec(env)
        # Envs that a package registers are found by their id in another process too; their specs may not be picklable.
        return functools.partial(_make_named, env if spec is None or _package_of(env) else spec), False
    if isinstance(env, VectorEnv):
        raise not_one_env(env)
    if callable(env):
        return env, False
    return lambda: env, True


def single_env_error(env: object, num_envs: int) -> EnvError:
    """The error for an env object where a function that makes envs is wanted."""
    return EnvError(
        f"one {type(env).__name__} object can't be {num_envs} envs, nor in a worker: give a function that makes one, "
        "or ask for one env and no workers."
    )


def _make_reduced(make: Callable[[], Any], drop: tuple[str, ...]) -> ReducedEnv:
    return ReducedEnv(make(), drop)


def _make_named(name: str | EnvSpec) -> Any:
    found = named(name) if isinstance(name, str) else name
    return make_spec(found) if isinstance(found, EnvSpec) else found()


def make_spec(spec: EnvSpec, **arguments: Any) -> gym.Env[Any, Any]:
    """Make one registered env.

    Raises:
        EnvError: a package that it needs is missing, and the message says how to install it; or it is vectorised only.
    """
    if spec.entry_point is None:
        raise EnvError(
            f"env {spec.id!r} has only a vectorised version: give a function that makes it, such as lambda: "
            f"gymnasium.make_vec({spec.id!r}, num_envs=16, vectorization_mode='vector_entry_point')."
        )
    try:
        # The arena makes the checks of Gymnasium's checker itself.
        return gym.make(spec, disable_env_checker=True, **arguments)
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        module = re.match(r"gymnasium\.envs\.\w+|\w+", spec.entry_point) if isinstance(spec.entry_point, str) else None
        install = _INSTALL.get(module[0]) if module else None
        raise EnvError(
            f"env {spec.id!r} needs a package that can't be imported here ({described(error)})"
            + (f". Install it: {install}" if install else ".")
        ) from error


def names_module(name: str) -> bool:
    """Whether making the env of this name imports a module that is part of the name."""
    return ":" in name and not is_task(name)


def env_name(env: EnvLike) -> str:
    """The name of an env in results and recordings: its id, or ``module:name`` of the function that makes it."""
    if isinstance(env, str):
        return env
    spec = getattr(env, "spec", None)  # may be a property if `env` is a class
    if isinstance(spec, EnvSpec):
        return str(spec.id)
    named = env if hasattr(env, "__qualname__") else type(env)
    return f"{named.__module__}:{named.__qualname__}"


def named(name: str) -> EnvSpec | Callable[[], Any]:
    """Look up the env named by ``id``, ``module:id``, ``module:factory`` or a task such as ``atari:Pong``.

    Raises:
        EnvError: there is no such env; the message names the nearest id.
    """
    if ":" not in name:
        return _spec(name)
    if is_task(name):
        return task(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        what = f"env {name!r}: can't import the module `{module_name}` ({described(error)})."
        raise EnvError(what + _way_out(module_name, error)) from error
    if hasattr(module, attribute):
        factory: Callable[[], Any] = getattr(module, attribute)
        if isinstance(factory, ModuleType):
            raise EnvError(f"env {name!r} is a module: name what makes an env in it, as '{factory.__name__}:function'.")
        return factory
    if attribute not in gym.registry:
        raise EnvError(
            f"env '{module_name}:{attribute}': the module has no `{attribute}`, and registers no env of that name."
            f"{suggestion(attribute, [*gym.registry, *(key for key in vars(module) if not key.startswith('_'))])}"
        )
    return _spec(attribute)


def _way_out(module_name: str, error: BaseException) -> str:
    """Advice for a module of an env that can't be imported, after a space; empty if the error itself says enough."""
    if module_name in _INSTALL:
        return f" Install it: {_INSTALL[module_name]}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    if not f"{module_name}.".startswith(f"{error.name}."):
        return f" It needs `{error.name}`, which is not installed."
    advice = " It must be importable from here: run in its folder, install it, or put its folder on PYTHONPATH."
    package_name, _, _ = module_name.rpartition(".")
    if error.name != module_name or not package_name:
        return advice
    package = importlib.import_module(package_name)  # was imported on the way to the missing module
    beside = [f"{package_name}.{found.name}" for found in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    return advice + suggestion(module_name, beside)


def _spec(name: str) -> EnvSpec:
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        package = _package_of(name)
        if package is not None:
            _register(package, name)
            if name in gym.registry:
                return gym.spec(name)
        near, theirs = nearest(name, gym.registry), _in_pettingzoo(name)
        raise EnvError(
            f"no env {name!r} is registered ({error}). {f'Nearest: {near!r}. ' if near else ''}"
            f"{f'PettingZoo has {theirs!r}. ' if theirs else ''}If a package registers it, name the package too: "
            f"'package:{name}'. A function that makes an env is named 'module:function'."
        ) from None


def _in_pettingzoo(name: str) -> str | None:
    """The full name of PettingZoo's env ``name``, such as ``pursuit_v5`` or ``sisl/pursuit-v5``, in the version that is
    installed; None if there is none."""
    own = re.fullmatch(r"(?:[\w.]+[/.])?(\w+)[-_]v\d+", name)
    found = None
    with contextlib.suppress(ValueError):  # a module of that name was made by hand
        found = importlib.util.find_spec("pettingzoo") if own else None
    if own is None or found is None:
        return None
    for folder in found.submodule_search_locations or ():
        for path in Path(folder).glob(f"*/{own[1]}_v*.py"):
            factory = "parallel_env" if "parallel_env" in path.read_text(encoding="utf-8") else "env"
            return f"pettingzoo.{path.parent.name}.{path.stem}:{factory}"
    return None


def _package_of(name: str) -> _Package | None:
    return next((package for package in _PACKAGES if re.fullmatch(package.ids, name)), None)


def _register(package: _Package, name: str) -> None:
    """Import a package that registers the env ``name``."""
    try:
        with no_screen_needed():  # dm_control chooses its renderer when it is imported
            for module in (package.needs, package.module):
                importlib.import_module(module)
    except Exception as error:
        raise EnvError(
            f"env {name!r} needs the package `{module}`, which can't be imported here "
            f"({described(error)}). Install it: {package.install}"
        ) from error


def make_one(factory: Callable[[], Any], name: str | None = None) -> Any:
    """Make an env with a factory.

    Raises:
        EnvError: the factory fails; the message calls it ``name``.
    """
    name = env_name(factory) if name is None else name
    try:
        return factory()
    except (KeyboardInterrupt, EnvError):
        raise
    except BaseException as error:
        raise make_error(name, error) from error


# -- envs that draw, where there is no screen -----------------------------------------------------------------------


def check_screen() -> None:
    """Raise a SettingsError if no window can be opened because there is no screen."""
    if not _has_screen():
        raise SettingsError(
            "there is no screen here for the env's window (neither DISPLAY nor WAYLAND_DISPLAY is set): make a "
            "clip instead, with --to clip.mp4."
        )


def _has_screen() -> bool:
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


@contextlib.contextmanager
def no_screen_needed() -> Iterator[None]:
    """A context in which pygame and MuJoCo render without a screen or sound device if there is none, and pygame prints
    no greeting."""
    wanted = {"PYGAME_HIDE_SUPPORT_PROMPT": "1"}
    if not _has_screen():
        wanted |= {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"} | _mujoco_drawer()
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.cache
def _mujoco_drawer() -> dict[str, str]:
    """The environment variables that let MuJoCo render without a screen; {} if there is no library for that."""
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    found = [name for name, library in libraries.items() if ctypes.util.find_library(library)]
    return {"MUJOCO_GL": found[0]} if found else {}
