# SPDX-License-Identifier: Apache-2.0
"""Callbacks: code of one's own that is called while episodes run."""

import importlib
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.errors import EnvError, SettingsError
from etude.experience import Experience

if TYPE_CHECKING:
    from etude.runners.running import RunningEpisode

EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end", "on_segment")


class Callback:
    """Code of one's own that is called while episodes run. Does nothing itself; what is not overridden costs nothing.

    For an episode the calls come in this order: `on_episode_created`, `on_episode_start`, `on_episode_step` after each
    step of its env, the last one included, `on_episode_end`; and `on_segment` whenever steps of it are collected, which
    happens after those steps, and may be after its end. Of several callbacks, the first one given is called first, each
    time.

    For an episode that is cut because its env failed, only `on_segment` is still called, with the steps before; for one
    that is abandoned because whole episodes are collected next, nothing more. What was logged in it counts for nothing.
    Where whole episodes are collected, episodes beyond those asked for are not followed.

    ``__init__`` keeps its arguments as attributes of the same names: so a checkpoint can make the callback again. An
    error goes through, with a note of where it came from.
    """

    def on_episode_created(self, episode: "RunningEpisode") -> None:
        """An episode begins. No agent is in it yet: nobody knows which modules act in it, nor what is seen first.

        The env has been reset by then.
        """

    def on_episode_start(self, episode: "RunningEpisode") -> None:
        """The first observations are there, and it is known which modules act."""

    def on_episode_step(self, episode: "RunningEpisode") -> None:
        """The env made a step, and what it brought is there."""

    def on_episode_end(self, episode: "RunningEpisode") -> None:
        """The episode has ended for all its agents. The env may have been reset by then, and is not in its last state.

        For what the env knows of the end, look at ``episode.info``, or into the env in `on_episode_step`.
        """

    def on_segment(self, segment: Experience, episode: "RunningEpisode") -> None:
        """Steps of one agent were collected.

        Args:
            segment: One segment, a view: as it is learned from and recorded.
            episode: The episode that it is of, which may have ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must not be lost when the run is saved and goes on later: plain data and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


CallbackLike: TypeAlias = str | type[Callback] | Callback
"""``module:Class``, a class, which is made without arguments, or an object, which is used as it is."""


def callback_from(spec: CallbackLike) -> Callback:
    """Make a callback.

    Raises:
        SettingsError: it can't be found or made, or is no callback.
    """
    found: Any = _find(spec) if isinstance(spec, str) else spec
    if isinstance(found, type) and issubclass(found, Callback):
        try:
            return found()
        except TypeError as error:
            raise SettingsError(
                f"the callback {found.__name__} can't be made without arguments: {error}. Give an object of it."
            ) from error
    if not isinstance(found, Callback):
        raise SettingsError(
            f"{spec!r} is no callback: give an object or a class that inherits from etude.Callback, or `module:Class`."
        )
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"the callback {name!r} can't be imported ({error}): write `module:Class`, with the module's folder on "
            "PYTHONPATH."
        ) from error
    return found


def overrides(callback: Callback, method: str) -> bool:
    """Whether a callback does anything in a method of `Callback`."""
    return getattr(type(callback), method) is not getattr(Callback, method)


class GameReturns(Callback):
    """Logs ``game_return`` where an episode is one life of a game, as with the lives-based wrappers of Atari games.

    The env says in its infos, as ``lives``, how many are left. The return of a game is the sum of those of its lives;
    the episode's own return stays that of a life. A game ends with its last life, or when it is truncated. One that is
    not played to its end, as after a resume in new episodes, counts for nothing.
    """

    def __init__(self) -> None:
        self._games: dict[int, tuple[float, int]] = {}  # by env: the return of the lives lost, and the lives left

    def on_episode_start(self, episode: "RunningEpisode") -> None:
        """Forgets the lives before, where this one is not of the same game."""
        _, left = self._games.get(episode.env_index, (0.0, 0))
        if (episode.info or {}).get("lives", left) > left:
            self._games.pop(episode.env_index, None)

    def on_episode_end(self, episode: "RunningEpisode") -> None:
        """Adds up, and logs at the end of the game."""
        total, _ = self._games.pop(episode.env_index, (0.0, 0))
        total, left = total + episode.return_so_far, _lives(episode)
        if left and not episode.truncated:
            self._games[episode.env_index] = (total, left)
        else:
            episode.log("game_return", total)

    def state_dict(self) -> dict[str, Any]:
        """The games that are being played."""
        return {"games": [[env, total, left] for env, (total, left) in self._games.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._games = {env: (total, left) for env, total, left in state["games"]}


def _lives(episode: "RunningEpisode") -> int:
    info = episode.info
    if not isinstance(info, dict) or "lives" not in info:
        said = "which worker processes keep to themselves" if info is None else f"which were {sorted(info)}"
        raise EnvError(f"GameReturns needs `lives` in the infos of the env, {said}. Leave it out for this env.")
    return int(info["lives"])
