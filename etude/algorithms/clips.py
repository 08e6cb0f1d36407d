# SPDX-License-Identifier: Apache-2.0
"""Clips: play whole episodes and show them, as frames, as a file, or in the env's own window."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.algorithm import Algorithm
from etude.connectors import ClipAction, Pipeline
from etude.display import short
from etude.envs import Arena, EnvLike, Workers, env_name, make_arena
from etude.envs.registry import check_screen, no_screen_needed
from etude.envs.render import (
    ClipFile,
    Frame,
    RenderMode,
    Size,
    check_fps,
    close_env,
    filmed,
    fps_of,
    open_window,
    parse_size,
    rendering_env,
)
from etude.errors import ModuleError, SettingsError
from etude.experience import Experience
from etude.modules import Module
from etude.modules.actors import RandomModule
from etude.policies import Policy, PolicyLike
from etude.policies.policy import check_same_actions
from etude.runners import Episode, Runner

Playable: TypeAlias = Algorithm[Any] | PolicyLike | None
"""Chooses the actions: an algorithm, a policy, a module without connectors, or None for random actions."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Clip:
    """Episodes that were played and filmed."""

    frames: list[NDArray[np.uint8]]
    """uint8 ``[steps + 1, H, W, 3]`` for each episode: a frame after its reset and one after each env step. Empty if
    they went to a file."""
    fps: float
    """Frames per second."""
    num_frames: int
    """Number of frames of all episodes."""
    returns: NDArray[np.float64]
    """Return of each episode, summed over all agents: float64 ``[episodes]``."""
    experience: Experience | None
    """The same episodes as Experience, if asked for."""
    path: Path | None
    """The file, if one was asked for."""

    def __repr__(self) -> str:
        path = {} if self.path is None else {"path": str(self.path)}
        return short(self, f"{len(self.returns)} episodes", num_frames=self.num_frames, fps=self.fps, **path)


def clip(
    policy: Playable,
    env: EnvLike | os.PathLike[str] | None = None,
    to: str | os.PathLike[str] | None = None,
    *,
    episodes: int = 1,
    explore: bool = False,
    seed: int | None = None,
    max_steps: int | None = None,
    fps: float | None = None,
    size: Size | None = None,
    experience: bool = False,
) -> Clip:
    """Play whole episodes and film them: ``clip(ppo, "clip.mp4")``, ``clip(module, "CartPole-v1").frames``.

    Args:
        policy: The algorithm, policy or module that chooses the actions; None: random actions.
        env: The env, as for training; a function that makes it must take ``render_mode``, or make it with
            ``rgb_array``. None: the algorithm's own. A file name here is taken as ``to``.
        to: File to write: .gif, whose frames are kept in memory until it is written, with a byte for each pixel; or
            .mp4 or .webm, which need ``etude[video]`` and no such memory. An existing file is replaced once everything
            is written.
        episodes: Number of episodes, at least 1.
        explore: Sample actions; otherwise take the most likely ones.
        seed: Seed of the env and of action sampling.
        max_steps: Steps after which an episode is truncated, at least 1. None: as in training, or as the env says. Give
            it for an env whose episodes may never end.
        fps: Frames per second, 0.01 to 1000; None: the env's natural speed.
        size: Width and height in pixels, such as ``"480x320"``. Frames are scaled to fit, undistorted, on black; None:
            as rendered.
        experience: Also return the steps. One Experience holds only agents with equal spaces.

    Raises:
        EnvError: the env can't be made or rendered.
        SettingsError: a setting is wrong, there is no env, or the encoder is not installed.
        ModuleError: ``policy`` is of another type.
        DataError: the file can't be written.
    """
    is_file_name = isinstance(env, str) and re.search(r"^[^:]*\.[a-zA-Z0-9]{2,4}$|\.(mp4|webm|gif)$", env)
    if to is None and (is_file_name or isinstance(env, os.PathLike)):
        env, to = None, env
    at = None if to is None else Path(to).absolute()  # an env may change the current folder
    frame_size = parse_size(size)
    if fps is not None:
        check_fps(fps)
    with _seen(policy, env, "rgb_array") as shown, contextlib.ExitStack() as stack:
        rate = fps_of(shown) if fps is None else fps
        file = None if at is None else stack.enter_context(ClipFile(at, rate))
        num_frames, kept = 0, list[list[Frame]]()

        def take(frame: Frame, begins: bool) -> None:
            nonlocal num_frames
            num_frames += 1
            if file is not None:
                file.write(frame)
                return
            if begins:  # the first one of an episode
                kept.append([])
            kept[-1].append(frame)

        stack.enter_context(filmed(shown, take, frame_size))  # before a runner binds the env's methods
        parts, returns = _play(policy, shown, episodes, explore, seed, max_steps, keep=experience)
    stacked = []
    while kept:  # single frames are freed as they are stacked
        stacked.append(np.stack(kept.pop(0)))
    return Clip(
        frames=stacked,
        fps=rate if file is None else file.fps,
        num_frames=num_frames,
        returns=returns,
        experience=Experience.concat(parts) if experience else None,
        path=None if to is None else Path(to),
    )


def show(
    policy: Playable,
    env: EnvLike | None = None,
    *,
    episodes: int = 1,
    explore: bool = False,
    seed: int | None = None,
    max_steps: int | None = None,
) -> NDArray[np.float64]:
    """Play whole episodes in the env's own window, and return their returns, float64 ``[episodes]``.

    The arguments are those of `clip`.

    Raises:
        EnvError: the env can't be made, or has no window.
        SettingsError: there is no screen.
    """
    check_screen()
    with _seen(policy, env, "human") as shown:
        open_window(shown)
        return _play(policy, shown, episodes, explore, seed, max_steps, keep=False)[1]


def _play(
    policy: Playable, env: Any, episodes: int, explore: bool, seed: int | None, max_steps: int | None, *, keep: bool
) -> tuple[list[Experience], NDArray[np.float64]]:
    """Play episodes; return the Experience of each, if it is kept, and their returns."""
    if episodes < 1:
        raise SettingsError(f"`episodes` is {episodes}, but must be at least 1.")
    with contextlib.closing(_runner(policy, env, seed, max_steps)) as runner:
        if not keep:
            runner.collect_each(num_episodes=episodes, explore=explore)
            return [], runner.take_finished().returns
        exp = runner.collect(num_episodes=episodes, explore=explore)
        parts = sorted(exp.episodes(), key=lambda part: Episode.recorded(part.segments.episode_id[0]).number)
        return parts, runner.take_finished().returns


def check_clips(algorithm: Algorithm[Any]) -> None:
    """Render one frame of the algorithm's own env, to find errors before a clip is made.

    Raises:
        EnvError: see `clip`.
        SettingsError: there is no env, or it is one object that training is using.
    """
    with _seen(algorithm, None, "rgb_array") as shown, filmed(shown, lambda frame, begins: None):
        shown.reset()


@contextlib.contextmanager
def _seen(policy: Playable, env: Any, mode: RenderMode) -> Iterator[Any]:
    """Context with the env to play in. It is closed afterwards, unless the caller gave it as an object."""
    where = policy.env_to_play(env) if isinstance(policy, Algorithm) else env
    if where is None:
        raise SettingsError("there is no env to act in: give one, as env=....")
    with no_screen_needed():
        shown = rendering_env(where, mode)
        try:
            yield shown
        finally:
            if shown is not where:
                close_env(shown)


def _runner(policy: Playable, env: Any, seed: int | None, max_steps: int | None) -> Runner:
    if isinstance(policy, Algorithm):
        return policy.new_runner(env, 1, seed, max_steps=max_steps)
    if policy is not None and not isinstance(policy, Policy | Module):
        raise ModuleError(
            "a clip needs an Algorithm, an etude.Policy, an etude.Module, or None for random actions, "
            f"not a {type(policy).__name__}."
        )
    arena = make_arena(env, 1, Workers(max_steps=max_steps))
    try:
        if policy is None:
            return _random_runner(arena, seed)
        if isinstance(policy, Module):
            policy = Policy(policy, Pipeline([ClipAction()]))
        kind = arena.kinds[0]
        fitted = policy.fitted(kind.obs_space, kind.action_space, env_name(env))
        check_same_actions(policy, kind.action_space, env_name(env))
        return Runner(arena, fitted, seed=seed)
    except BaseException:
        arena.close()
        raise


def _random_runner(arena: Arena, seed: int | None) -> Runner:
    modules = [RandomModule(kind.obs_space, kind.action_space) for kind in arena.kinds]
    if len(modules) == 1:
        return Runner(arena, modules[0], seed=seed)
    kind_of = {arena.agents[slot]: str(i) for i, kind in enumerate(arena.kinds) for slot in kind.slots}
    by_id = {str(i): module for i, module in enumerate(modules)}
    return Runner(arena, by_id, module_of=lambda agent, episode: kind_of[agent], seed=seed)
