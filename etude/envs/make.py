# SPDX-License-Identifier: Apache-2.0
"""make_arena: which kind of arena an env gets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from etude.envs.arena import Arena
from etude.envs.inline import InlineArena
from etude.envs.pool import PoolArena
from etude.envs.registry import EnvLike, make_one, named
from etude.envs.vector import VectorArena, holds_tensors, vector_spec
from etude.envs.workers import Workers
from etude.errors import EnvError
from etude.settings import foreign_env

VECTOR_FROM = 5
"""Copies of CartPole from which its vectorised version is taken. With 1, 2, 4, 5 and 8 copies, it makes 0.57, 0.69,
0.92, 0.97 and 1.24 of the steps a second of plain copies, the built-in network included."""


def make_arena(
    env: EnvLike,
    num_envs: int,
    workers: Workers | None = None,
    *,
    exact: bool = True,
    drop: Sequence[str] = (),
) -> Arena:
    """An arena of copies of an env.

    Without workers, a ``VectorEnv`` steps all its copies at once, and so does CartPole from `VECTOR_FROM` copies on,
    since Gymnasium has a vectorised version of it. All others step copy by copy, here or in workers. Limits and checks
    are kept either way, and do not change which it is.

    Args:
        env: A registered id; ``module:factory`` or ``module:EnvId``; a function or class that makes an env; one env
            object (then there can be one copy only); or a ready ``VectorEnv``, or `Arena`.
        num_envs: How many copies where there are no workers.
        workers: Where the copies live, and their limits. With ``num_workers``, there are ``num_workers *
            envs_per_worker`` copies.
        exact: A ready ``VectorEnv`` or `Arena` must have ``num_envs`` copies; else it is taken with as many as it has.
        drop: Parts of the observation, such as ``mission`` or ``info/text``, that are left out if they are of a kind
            which Etude can't handle.

    Raises:
        EnvError: the env can't be made.
        SpaceError: a space is of a kind that Etude can't handle.
    """
    workers = Workers() if workers is None else workers
    if foreign := foreign_env(env):
        raise EnvError(foreign)
    if isinstance(env, Arena):
        if workers.num_workers or workers.max_steps is not None:
            raise EnvError(
                f"{type(env).__name__} runs its envs itself: it can have no workers (workers.num_workers), and its "
                "episodes can't be truncated here (workers.max_steps, trajectories.at_max_length)."
            )
        if exact and env.num_envs != num_envs:
            raise EnvError(
                f"the {type(env).__name__} has {env.num_envs} envs, but num_envs is {num_envs}: make them equal."
            )
        return env
    if workers.num_workers:
        return PoolArena(env, workers, drop=drop)
    limits: dict[str, Any] = {"exact": exact, "max_steps": workers.max_steps, "check": workers.check, "drop": drop}
    if isinstance(env, VectorEnv):
        return _vector_arena(env, num_envs, **limits)
    if isinstance(env, str) and num_envs >= VECTOR_FROM and vector_spec(env, num_envs) is not None:
        return VectorArena(env, num_envs, **limits)
    if isinstance(env, str) and not isinstance(found := named(env), EnvSpec):
        env = found
    if isinstance(env, str | gym.Env) or not callable(env):
        return InlineArena(env, num_envs, workers, drop=drop)
    first = [make_one(env)]
    if isinstance(first[0], Arena):
        return make_arena(first[0], num_envs, workers, exact=exact)
    if isinstance(first[0], VectorEnv):
        return _vector_arena(first[0], num_envs, is_given=False, **limits)
    return InlineArena(_then(first, env), num_envs, workers, drop=drop)


def _vector_arena(env: VectorEnv[Any, Any, Any], num_envs: int, *, is_given: bool = True, **limits: Any) -> VectorArena:
    """An arena for a vector env of NumPy arrays, or of tensors. One that was not given is closed with it."""
    arena: type[VectorArena] = VectorArena
    if getattr(env, "device", None) is not None:  # else torch need not be imported
        from etude.envs.tensors import TensorArena

        # many have a device, and turn what they give into NumPy arrays: only what comes tells
        arena = TensorArena if holds_tensors(env.reset()[0]) else VectorArena
    return arena(env if is_given else lambda: env, num_envs, **limits)


def _then(first: list[Any], make: Callable[[], Any]) -> Callable[[], Any]:
    """What makes envs, the first of which is there already."""

    @functools.wraps(make, updated=())
    def make_next() -> Any:
        return first.pop() if first else make()

    return make_next
