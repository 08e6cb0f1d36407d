# SPDX-License-Identifier: Apache-2.0
"""Wrapped envs: tasks with names of their own (Atari games, envs that hide velocities), and action masks from infos."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import gymnasium as gym
import numpy as np

from etude.columns import ACTION, ACTION_MASK
from etude.errors import EnvError, described
from etude.settings import nearest
from etude.spaces import leaves

_POSITIONS: Final = {
    "CartPole": (0, 2),
    "MountainCar": (0,),
    "MountainCarContinuous": (0,),
    "Pendulum": (0, 1),
    "Acrobot": (0, 1, 2, 3),
    "LunarLander": (0, 1, 4, 6, 7),
    "LunarLanderContinuous": (0, 1, 4, 6, 7),
}
"""The indices of the observation's entries that are not velocities, by the env's name without its version."""


def is_task(name: str) -> bool:
    """Whether an env's name is a task: ``atari:Pong``, ``no_velocity:CartPole-v1``."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and kind in _KINDS


def task(name: str) -> Callable[[], gym.Env[Any, Any]]:
    """A function that makes the env of a task (see `is_task`); it can be pickled."""
    kind, _, inner = name.partition(":")
    return partial(_KINDS[kind], inner)


def atari(game: str, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """An Atari game with the standard wrappers (Mnih et al. 2015, "Human-level control through deep reinforcement
    learning", methods).

    A step lasts four frames; the observation is the pixelwise maximum of the last two, grey, uint8 ``[84, 84]``. An
    episode begins with up to 30 frames of no-ops, and then the fire button if the game has one. Frames are not stacked
    (use the connector ``frame_stack:4``), rewards are not clipped (use ``clip_reward:sign=True``), actions are never
    repeated at random, and losing a life does not end the episode.

    Args:
        game: The name as in ``ALE/Pong-v5``: ``Pong``, ``SpaceInvaders``.
        render_mode: As in `gymnasium.make`; frames have the game's own size and colours.

    Raises:
        EnvError: there is no such game, or a package is missing.
    """
    try:
        import ale_py
        import cv2  # noqa: F401  # needed by AtariPreprocessing
    except ImportError as error:
        raise EnvError(
            f"env 'atari:{game}' needs packages that can't be imported here ({described(error)}). Install them: "
            "pip install ale-py opencv-python-headless"
        ) from error
    gym.register_envs(ale_py)
    games = {spec.id[len("ALE/") : -len("-v5")] for spec in gym.registry.values() if spec.id.startswith("ALE/")}
    if game not in games:
        near = nearest(game, games)
        hint = f"Nearest: 'atari:{near}'." if near else "Games are named as in 'atari:Pong' and 'atari:SpaceInvaders'."
        raise EnvError(f"there is no Atari game {game!r}. {hint}")
    env = gym.make(
        f"ALE/{game}-v5",
        render_mode=render_mode,
        frameskip=1,
        repeat_action_probability=0.0,
        disable_env_checker=True,
    )
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True)
    return FireFirst(env) if "FIRE" in env.unwrapped.get_action_meanings() else env  # type: ignore[attr-defined]


class FireFirst(gym.Wrapper[Any, Any, Any, Any]):
    """Presses the fire button at the start of each episode, because some games wait for it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env and press the fire button once."""
        self.env.reset(seed=seed, options=options)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        obs, _, terminated, truncated, info = self.env.step(fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


def no_velocity(env_id: str, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """An env whose observations lack velocities, so that an agent needs memory.

    Args:
        env_id: A registered id, such as ``CartPole-v1``.
        render_mode: As in `gymnasium.make`.

    Raises:
        EnvError: there is no such env, or Etude does not know which entries of its observations are velocities.
    """
    name = env_id.rpartition("-v")[0]
    if name not in _POSITIONS:
        known = ", ".join(_POSITIONS)
        raise EnvError(
            f"env 'no_velocity:{env_id}': it is not known which entries of its observations are velocities. They are "
            f"known for {known}; wrap another env in gymnasium.ObservationWrapper yourself."
        )
    try:
        env = gym.make(env_id, render_mode=render_mode, disable_env_checker=True)
    except gym.error.UnregisteredEnv as error:
        raise EnvError(f"env 'no_velocity:{env_id}': {error}") from error
    kept = np.array(_POSITIONS[name])
    box = env.observation_space
    assert isinstance(box, gym.spaces.Box)
    space = gym.spaces.Box(box.low[kept], box.high[kept], dtype=box.dtype.type)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[kept], space)


_KINDS: Final[dict[str, Callable[[str], gym.Env[Any, Any]]]] = {"atari": atari, "no_velocity": no_velocity}


class InfoActionMask(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Moves ``info["action_mask"]``, as Taxi has it, into the observation, so that modules apply it.

    The observation becomes ``Dict(observation=..., action_mask=...)``, as in PettingZoo. The mask is MultiBinary, int8,
    with one number for each choice of the discrete parts of the action space, in their order: 1 if it is allowed.

    Args:
        env: Its ``info`` must contain the mask after each reset and step.

    Raises:
        EnvError: the action space has no discrete part; or the mask is missing, or does not fit the action space.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        parts = leaves(env.action_space, ACTION).values()
        self._size = sum(gym.spaces.flatdim(leaf) for leaf in parts if not isinstance(leaf, gym.spaces.Box))
        if not self._size:
            raise EnvError(f"the action space {env.action_space} has no choices that a mask could forbid.")
        mask = gym.spaces.MultiBinary(self._size)
        self.observation_space = gym.spaces.Dict({"observation": env.observation_space, ACTION_MASK: mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; the observation includes the mask."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._masked(obs, info, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env; the observation includes the mask."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(obs, info, "step"), reward, terminated, truncated, info

    def _masked(self, obs: Any, info: dict[str, Any], method: str) -> dict[str, Any]:
        name = type(self.env.unwrapped).__name__
        if ACTION_MASK not in info:
            raise EnvError(
                f"the info that {method} of {name} returns has no {ACTION_MASK!r} (it has {sorted(info)}): "
                "InfoActionMask is for envs that return one after each reset and step."
            )
        mask = np.asarray(info[ACTION_MASK])
        if mask.size != self._size or not ((mask == 0) | (mask == 1)).all():
            raise EnvError(
                f"info[{ACTION_MASK!r}] that {method} of {name} returns is {mask}: it needs {self._size} numbers, 0 or "
                f"1, one for each choice of {self.env.action_space}."
            )
        return {"observation": obs, ACTION_MASK: mask.reshape(-1).astype(np.int8)}
