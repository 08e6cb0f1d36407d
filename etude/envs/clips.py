# SPDX-License-Identifier: Apache-2.0
"""Envs that can be seen: made so that they draw frames, or open their window."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from etude.envs.make import EnvLike, env_name, make_spec, named
from etude.errors import EnvError, described

RenderMode = Literal["rgb_array", "human"]

DEFAULT_FPS = 30.0


def seen_env(env: EnvLike, mode: RenderMode) -> Any:
    """One env object that draws itself in ``mode``; a new one, unless ``env`` is an object.

    Args:
        env: As for training. What makes envs is called with ``render_mode=mode`` where it takes that.
        mode: ``rgb_array``: its render() gives frames. ``human``: it shows its own window.

    Raises:
        EnvError: it can't be made so; the message says what to do.
    """
    name = env_name(env)
    if isinstance(env, VectorEnv):
        raise _vector(name)
    made = env if not callable(env) and not isinstance(env, str) else _made(env, name, mode)
    if isinstance(made, VectorEnv):
        raise _vector(name)
    if not all(callable(getattr(made, method, None)) for method in ("reset", "step", "render")):
        raise EnvError(f"{name} is a {type(made).__name__}, which has no reset, step and render: it can't be seen.")
    has = getattr(made, "render_mode", None)
    if has != mode:
        if made is not env:
            made.close()
        modes = (getattr(made, "metadata", None) or {}).get("render_modes") or []
        raise EnvError(
            f"{name} has render_mode {has!r}, but {mode!r} is needed here (it knows {', '.join(modes) or 'none'}). "
            + (
                f"Make the env with render_mode={mode!r}."
                if made is env
                else f"Let what makes it take an argument `render_mode`, or make it with render_mode={mode!r}."
            )
        )
    return made


def _vector(name: str) -> EnvError:
    return EnvError(
        f"{name} is a VectorEnv, of which no single copy can be seen: give one env, or what makes one, as env=."
    )


def _made(env: str | Callable[..., Any], name: str, mode: RenderMode) -> Any:
    make = _maker(env) if isinstance(env, str) else env
    takes = _takes_mode(make)
    try:
        return make(render_mode=mode) if takes else make()
    except EnvError:
        raise
    except Exception as error:
        how = f" with render_mode={mode!r}" if takes else ""
        raise EnvError(f"{name} can't be made{how}: {described(error)}") from error


def _maker(name: str) -> Callable[..., Any]:
    """What makes the env of that name."""
    found = named(name)
    if not isinstance(found, EnvSpec):
        return found

    def make(render_mode: str) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="gymnasium")  # of other render modes, of which we say more
            return make_spec(found, render_mode=render_mode)

    return make


def _takes_mode(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # built in
        return False
    return any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)


def open_window(env: Any) -> None:
    """Let an env made with ``render_mode='human'`` open its window, by a reset.

    Raises:
        EnvError: it can't.
    """
    try:
        env.reset()
    except Exception as error:
        raise EnvError(f"the env's window can't be opened: {described(error)}") from error


def fps_of(env: Any) -> float:
    """The frames a second at which an env moves at its natural speed; 30 where it does not say."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps")
    return float(fps) if fps else DEFAULT_FPS
