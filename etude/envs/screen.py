# SPDX-License-Identifier: Apache-2.0
"""Drawing where there is no screen."""

import contextlib
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterator

from etude.errors import SettingsError


def check_screen() -> None:
    """Raise a SettingsError where no window can be opened, as nobody has a screen."""
    if not _has_screen():
        raise SettingsError(
            "there is no screen here for the env's own window (neither DISPLAY nor WAYLAND_DISPLAY is set): make a "
            "clip instead, with --to clip.mp4."
        )


def _has_screen() -> bool:
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


@contextlib.contextmanager
def no_screen_needed() -> Iterator[None]:
    """Let pygame and MuJoCo draw without a screen and a loudspeaker where there are none, and pygame be silent."""
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
    """The library by which MuJoCo draws without a screen, as it wants to be told; {} if there is none."""
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    found = [name for name, library in libraries.items() if ctypes.util.find_library(library)]
    return {"MUJOCO_GL": found[0]} if found else {}
