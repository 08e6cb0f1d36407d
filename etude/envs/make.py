# SPDX-License-Identifier: Apache-2.0
"""make_arena: chooses the arena for an env."""

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
from etude.envs.vector import VectorArena, check_count, holds_tensors, vector_spec
from etude.envs.workers import Workers
from etude.errors import EnvError, SettingsError
from etude.settings import foreign_env

VECTOR_FROM = 5
"""The smallest number of CartPole copies for which its vectorised version is used. With 1, 2, 4, 5 and 8 copies, that
version makes 0.57, 0.69, 0.92, 0.97 and 1.24 times as many steps a second as plain copies, acting included."""


def make_arena(
    env: EnvLike,
    num_envs: int,
    workers: Workers | None = None,
    *,
    exact: bool = True,
    drop: Sequence[str] = (),
) -> Arena:
    """Make an arena of copies of an env.

    Without workers, a ``VectorEnv`` steps all its copies at once. So does CartPole with `VECTOR_FROM` or more copies,
    because Gymnasium has a vectorised version of it. All other envs step copy by copy, here or in workers. Limits and
    checks apply in all cases and do not affect this choice.

    Args:
        env: A registered id; ``module:factory`` or ``module:EnvId``; a function or class that makes an env; one env
            object (for a single copy only); a ``VectorEnv`` object; or an `Arena`.
        num_envs: The number of copies if there are no workers, at least 1.
        workers: Where the copies run, and their limits. If ``num_workers`` is not 0, there are ``num_workers *
            envs_per_worker`` copies.
        exact: Whether a given ``VectorEnv`` or `Arena` must have exactly ``num_envs`` copies.
        drop: Parts of the observation, such as ``mission`` or ``info/text``, to leave out if Etude can't handle their
            spaces.

    Raises:
        EnvError: the env can't be made.
        SpaceError: Etude can't handle a space.
        SettingsError: ``workers`` is not a `Workers` object.
    """
    workers = Workers() if workers is None else workers
    if not isinstance(workers, Workers):
        raise SettingsError(f"`workers` is {workers!r}, expected Workers. Write Workers(num_workers=...).")
    if not isinstance(num_envs, int):
        raise EnvError(f"num_envs must be a whole number, not {num_envs!r}.")
    if foreign := foreign_env(env):
        raise EnvError(foreign)
    if isinstance(env, Arena):
        if workers.num_workers or workers.max_steps is not None:
            raise EnvError(
                f"{type(env).__name__} steps its envs itself: it can't have workers (workers.num_workers), and its "
                "episodes can't be truncated here (workers.max_steps, trajectories.at_max_length)."
            )
        if exact:
            check_count(env, num_envs)
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
    """An arena for a vector env of NumPy arrays or of tensors. The arena closes an env that was not given."""
    arena: type[VectorArena] = VectorArena
    if getattr(env, "device", None) is not None:  # otherwise torch need not be imported
        from etude.envs.tensors import TensorArena

        # many envs with a device return NumPy arrays: only their observations tell
        arena = TensorArena if holds_tensors(env.reset()[0]) else VectorArena
    return arena(env if is_given else lambda: env, num_envs, **limits)


def _then(first: list[Any], make: Callable[[], Any]) -> Callable[[], Any]:
    """A function that makes envs, of which the first exists already."""

    @functools.wraps(make, updated=())
    def make_next() -> Any:
        return first.pop() if first else make()

    return make_next
