# SPDX-License-Identifier: Apache-2.0
"""From what a user calls an env (a name, an object, a function) to a Gymnasium vector env."""

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from etude.envs.copies import Reduced
from etude.envs.screen import no_screen_needed
from etude.errors import EnvError, described
from etude.settings import foreign_env, nearest

EnvLike: TypeAlias = str | gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | Callable[[], Any]


class _Package(NamedTuple):
    """A package with envs that it registers when it is imported."""

    ids: str
    """A pattern of their ids."""
    module: str
    """What to import."""
    needs: str
    """What else must be there."""
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
"""How to install what envs need, by the module that they are defined in."""

_EQUAL: Final = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
}
"""Envs with a vectorised version that is known (and tested) to act by the same rules.

Of others nobody can tell: the rules are code. Training would act in one env, and evaluation, recordings and clips in
another (the one of ALE stacks, skips and shrinks frames), so that no other vectorised version is used by itself.
"""

_log = logging.getLogger("etude.envs")
_told: set[str] = set()  # the ids of vectorised versions that were passed over


def make_vector_env(
    env: EnvLike, num_envs: int, *, exact: bool = True, max_steps: int | None = None
) -> VectorEnv[Any, Any, Any]:
    """A vector env of ``num_envs`` copies.

    Args:
        env: A registered id; ``module:factory`` or ``module:EnvId``; a function or class that makes an ``Env`` or a
            ``VectorEnv``; one ``Env`` (then ``num_envs`` must be 1); or a ready ``VectorEnv``, used as it is.
        num_envs: How many copies, at least 1. From two on, CartPole's own vectorised version is used.
        exact: A ready ``VectorEnv`` must have ``num_envs`` copies; else it is taken with as many as it has.
        max_steps: Steps after which an env's own vectorised version truncates an episode, if it knows such a limit.

    Raises:
        EnvError: the id is not registered (the nearest one is named), the module or its factory can't be found, an env
            fails while it is made, or a single ``Env`` is asked to be several.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs must be at least 1, not {num_envs}.")
    if isinstance(env, VectorEnv):
        if exact and env.num_envs != num_envs:
            raise EnvError(f"the vector env has {env.num_envs} envs, but num_envs is {num_envs}: make them equal.")
        return env
    if isinstance(env, gym.Env):
        if num_envs != 1:
            raise EnvError(
                f"one {type(env).__name__} object can't be {num_envs} envs: give a function that makes one, or ask "
                "for num_envs=1."
            )
        single = env
        return _sync([lambda: single])
    if isinstance(env, str):
        return _from_name(env, num_envs, exact, max_steps)
    if callable(env):
        return _from_factory(env, num_envs, exact)
    raise EnvError(
        foreign_env(env) or f"an env is an id, a function, an Env or a VectorEnv, not a {type(env).__name__}."
    )


def env_maker(env: EnvLike, drop: Sequence[str] = ()) -> tuple[Callable[[], Any], bool]:
    """A function that makes one env, of whatever kind; True: it is good for one only, which is ``env`` itself.

    What can be pickled is pickled: an id or ``module:factory`` always, a function where it is defined in a module.
    Where there is something to ``drop``, it makes `Reduced` envs.

    Raises:
        EnvError: the id is not registered (the nearest one is named), or ``env`` is a vector env. What is in a module
            is only looked for when the function is called.
    """
    if drop:
        make, is_one = env_maker(env)
        return _MakeReduced(make, tuple(drop)), is_one
    if isinstance(env, str):
        spec = None if ":" in env else _spec(env)
        # What a package registers can be found again elsewhere, and may not be fit to be pickled.
        return functools.partial(_make_named, env if spec is None or _package_of(env) else spec), False
    if isinstance(env, VectorEnv):
        raise EnvError(f"a {type(env).__name__} steps its envs itself, without workers: give what makes one env.")
    if callable(env):
        return env, False
    return lambda: env, True


@dataclasses.dataclass
class _MakeReduced:
    make: Callable[[], Any]
    drop: tuple[str, ...]

    def __call__(self) -> Reduced:
        return Reduced(self.make(), self.drop)


def _make_named(name: str | EnvSpec) -> Any:
    found = named(name) if isinstance(name, str) else name
    return make_spec(found) if isinstance(found, EnvSpec) else found()


def make_spec(spec: EnvSpec, **arguments: Any) -> gym.Env[Any, Any]:
    """Make one registered env.

    Raises:
        EnvError: a package that it needs is missing; the message says how to install it.
    """
    try:
        # The checker warns of what the arena checks itself.
        return gym.make(spec, disable_env_checker=True, **arguments)
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        module = re.match(r"gymnasium\.envs\.\w+|\w+", spec.entry_point) if isinstance(spec.entry_point, str) else None
        install = _INSTALL.get(module[0]) if module else None
        raise EnvError(
            f"env {spec.id!r} needs a package that can't be imported here ({described(error)})"
            + (f". Install it: {install}" if install else ".")
        ) from error


def env_name(env: EnvLike) -> str:
    """What to call an env in results and recordings: its id, or ``module:name`` of what makes it."""
    if isinstance(env, str):
        return env
    spec = getattr(env, "spec", None)  # of a class it may be a property
    if isinstance(spec, EnvSpec):
        return str(spec.id)
    named = env if hasattr(env, "__qualname__") else type(env)
    return f"{named.__module__}:{named.__qualname__}"


def _sync(factories: list[Callable[[], gym.Env[Any, Any]]]) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv(factories, autoreset_mode=AutoresetMode.NEXT_STEP)


def named(name: str) -> EnvSpec | Callable[[], Any]:
    """What ``id``, ``module:id`` or ``module:factory`` names.

    Raises:
        EnvError: there is no such thing; the nearest id is named.
    """
    if ":" not in name:
        return _spec(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        install = _INSTALL.get(module_name)
        raise EnvError(
            f"env {name!r}: can't import the module `{module_name}` ({described(error)}). "
            + (
                f"Install it: {install}"
                if install
                else "It must be importable from here: run in its folder, install it, or put its folder on PYTHONPATH."
            )
        ) from error
    if hasattr(module, attribute):
        factory: Callable[[], Any] = getattr(module, attribute)
        return factory
    if attribute not in gym.registry:
        raise EnvError(
            f"env '{module_name}:{attribute}': the module has no `{attribute}`, nor registers an env of that name."
        )
    return _spec(attribute)


def _spec(name: str) -> EnvSpec:
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        package = _package_of(name)
        if package is not None:
            _register(package, name)
            if name in gym.registry:
                return gym.spec(name)
        near = nearest(name, gym.registry)
        hint = (
            f"Nearest: {near!r}."
            if near
            else f"If a package registers it, name the package too: 'package:{name}'. A function that makes an env is "
            "named 'module:function'."
        )
        raise EnvError(f"no env {name!r} is registered ({error}). {hint}") from None


def _package_of(name: str) -> _Package | None:
    return next((package for package in _PACKAGES if re.fullmatch(package.ids, name)), None)


def _register(package: _Package, name: str) -> None:
    """Let a package register its envs; ``name`` is the one that is wanted."""
    try:
        with no_screen_needed():  # dm_control chooses how to draw when it is imported
            for module in (package.needs, package.module):
                importlib.import_module(module)
    except Exception as error:
        raise EnvError(
            f"env {name!r} needs the package `{module}`, which can't be imported here "
            f"({described(error)}). Install it: {package.install}"
        ) from error


def vector_spec(name: str, num_envs: int) -> EnvSpec | None:
    """What makes a vectorised version of the env that ``id`` or ``module:id`` names; None if there is none that acts by
    the same rules, or no benefit.

    Raises:
        EnvError: there is no such env.
    """
    spec = named(name)
    # One copy alone steps more than twice as fast as a plain env than as a vector of length one (CartPole).
    if num_envs == 1 or not isinstance(spec, EnvSpec) or not spec.vector_entry_point:
        return None
    if isinstance(spec.entry_point, str) and _EQUAL.get(spec.entry_point) == spec.vector_entry_point:
        return None if spec.additional_wrappers else spec
    if spec.id not in _told:
        _told.add(spec.id)
        _log.warning(
            "%s has a vectorised version of its own (%s), which may differ from the single env that is evaluated, "
            "recorded and watched: copies of the single env are stepped. To act in the vectorised one everywhere, give "
            "what makes it: env=lambda: gymnasium.make_vec(%r, %d, 'vector_entry_point').",
            spec.id,
            spec.vector_entry_point,
            spec.id,
            num_envs,
        )
    return None


def _from_name(name: str, num_envs: int, exact: bool, max_steps: int | None) -> VectorEnv[Any, Any, Any]:
    spec = named(name)
    if not isinstance(spec, EnvSpec):
        return _from_factory(spec, num_envs, exact)
    try:
        if vector_spec(name, num_envs) is not None:
            limits: dict[str, Any] = {}
            if max_steps is not None and spec.max_episode_steps is not None:
                limits["max_episode_steps"] = min(max_steps, spec.max_episode_steps)
            return gym.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **limits)
        return _sync([lambda: make_spec(spec)] * num_envs)
    except (KeyboardInterrupt, EnvError):
        raise
    except BaseException as error:
        raise EnvError(f"env {name!r} can't be made: {described(error)}") from error


def _from_factory(factory: Callable[[], Any], num_envs: int, exact: bool) -> VectorEnv[Any, Any, Any]:
    name = env_name(factory)
    first = make_one(factory, name)
    if isinstance(first, VectorEnv):
        return make_vector_env(first, num_envs, exact=exact)
    if not isinstance(first, gym.Env):
        raise EnvError(f"{name} made a {type(first).__name__}, not a gymnasium.Env or VectorEnv.")
    copies = [first, *(make_one(factory, name) for _ in range(num_envs - 1))]
    if len({id(copy) for copy in copies}) < num_envs:
        raise EnvError(f"{name} gives the same {type(first).__name__} object each time: let it make a new one.")
    made = iter(copies)
    return _sync([lambda: next(made)] * num_envs)


def make_one(factory: Callable[[], Any], name: str | None = None) -> Any:
    """What a factory makes.

    Raises:
        EnvError: it fails; ``name`` is what to call it.
    """
    name = env_name(factory) if name is None else name
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise EnvError(f"{name} fails to make an env: {described(error)}") from error
