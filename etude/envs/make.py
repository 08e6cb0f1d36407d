# SPDX-License-Identifier: Apache-2.0
"""From what a user calls an env (a name, an object, a function) to a Gymnasium vector env."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from etude.errors import EnvError
from etude.settings import nearest

EnvLike: TypeAlias = str | gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | Callable[[], Any]


def make_vector_env(env: EnvLike, num_envs: int, *, exact: bool = True) -> VectorEnv[Any, Any, Any]:
    """A vector env of ``num_envs`` copies.

    Args:
        env: A registered id; ``module:factory`` or ``module:EnvId``; a function or class that makes an ``Env`` or a
            ``VectorEnv``; one ``Env`` (then ``num_envs`` must be 1); or a ready ``VectorEnv``, used as it is.
        num_envs: How many copies, at least 1. From two on, an env's own vectorised
            version is used where it is registered.
        exact: A ready ``VectorEnv`` must have ``num_envs`` copies; else it is taken with as many as it has.

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
        return _from_name(env, num_envs, exact)
    if callable(env):
        return _from_factory(env, num_envs, exact)
    raise EnvError(f"an env is an id, a function, an Env or a VectorEnv, not a {type(env).__name__}.")


def env_maker(env: EnvLike) -> tuple[Callable[[], Any], bool]:
    """A function that makes one env, of whatever kind; True: it is good for one only, which is ``env`` itself.

    What can be pickled is pickled: an id or ``module:factory`` always, a function where it is defined in a module.

    Raises:
        EnvError: the id is not registered (the nearest one is named), or ``env`` is a vector env. What is in a module
            is only looked for when the function is called.
    """
    if isinstance(env, str):
        return functools.partial(_make_named, env if ":" in env else _spec(env)), False
    if isinstance(env, VectorEnv):
        raise EnvError(f"a {type(env).__name__} steps its envs itself, without workers: give what makes one env.")
    if callable(env):
        return env, False
    return lambda: env, True


def _make_named(name: str | EnvSpec) -> Any:
    found = named(name) if isinstance(name, str) else name
    # The checker warns of what the arena checks itself.
    return gym.make(found, disable_env_checker=True) if isinstance(found, EnvSpec) else found()


def env_name(env: EnvLike) -> str:
    """What to call an env in results and recordings: its id, or ``module:name`` of what makes it."""
    if isinstance(env, str):
        return env
    spec = getattr(env, "spec", None)
    if spec is not None:
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
    except Exception as error:
        raise EnvError(
            f"env {name!r}: can't import the module `{module_name}` ({type(error).__name__}: {error}). It must be "
            "importable from here: run in its folder, install it, or put its folder on PYTHONPATH."
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
        near = nearest(name, gym.registry)
        hint = f" Nearest: {near!r}." if near else ""
        raise EnvError(f"no env {name!r} is registered ({error}).{hint}") from None


def vector_spec(name: str, num_envs: int) -> EnvSpec | None:
    """What makes a vectorised version of the env that ``id`` or ``module:id`` names; None where that pays not.

    Raises:
        EnvError: there is no such env.
    """
    spec = named(name)
    # One copy alone steps more than twice as fast as a plain env than as a vector of length one (CartPole).
    if num_envs > 1 and isinstance(spec, EnvSpec) and spec.vector_entry_point and not spec.additional_wrappers:
        return spec
    return None


def _from_name(name: str, num_envs: int, exact: bool) -> VectorEnv[Any, Any, Any]:
    spec = named(name)
    if not isinstance(spec, EnvSpec):
        return _from_factory(spec, num_envs, exact)
    try:
        if vector_spec(name, num_envs) is not None:
            return gym.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point")
        return _sync([lambda: gym.make(spec)] * num_envs)
    except Exception as error:
        raise EnvError(f"env {name!r} can't be made: {type(error).__name__}: {error}") from error


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
    except Exception as error:
        raise EnvError(f"{name} fails to make an env: {type(error).__name__}: {error}") from error
