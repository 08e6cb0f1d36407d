# SPDX-License-Identifier: Apache-2.0
"""Pieces of episodes that are held back until the episodes are whole."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, Final

import numpy as np

from etude.experience import Experience, Segments
from etude.recordings.pieces import copied, in_order

HELD_BYTES: Final = 256 * 2**20
"""The most memory that unfinished episodes take: beyond it, those that were added to longest ago are given out cut."""

_NAMES: Final = ("episode_id", "agent_id", "module_id")


@dataclasses.dataclass
class Pieces:
    """What has come of an episode."""

    total: int | None
    """The steps of the whole episode; None while its end has not come."""
    parts: list[Experience] = dataclasses.field(default_factory=list)
    num_steps: int = 0


class Assembler:
    """Joins the pieces of episodes, in whatever order they come. They wait, copied, until none is missing.

    Args:
        lengths: The steps of whole episodes, by key. Of others, the end says how many there are.
    """

    def __init__(self, lengths: Mapping[Any, int] | None = None) -> None:
        self._lengths = lengths or {}
        self.waiting: dict[Hashable, Pieces] = {}
        """Episodes that are not whole yet, by key."""

    def add(self, key: Hashable, piece: Experience) -> Experience | None:
        """Take a segment without lookback; gives the episode that it is the last missing piece of.

        The episode is one segment, unless steps are there twice or several modules acted in it.
        """
        held = self.waiting.setdefault(key, Pieces(self._lengths.get(key)))
        held.parts.append(copied(piece))
        held.num_steps += piece.num_steps
        if held.total is None and piece.segments.done[0]:
            held.total = int(piece.segments.t_start[0]) + piece.num_steps
        if held.num_steps != held.total:
            return None
        del self.waiting[key]
        return Experience.concat(sorted(held.parts, key=lambda part: int(part.segments.t_start[0]))).join()


@dataclasses.dataclass
class _Chunk:
    """Pieces that came together."""

    exp: Experience
    left: int
    """How many of its segments are still held."""

    @property
    def size(self) -> int:
        """Bytes of its columns."""
        return sum(int(column.nbytes) for column in (*self.exp.steps.values(), *self.exp.final_obs.values()))


@dataclasses.dataclass
class _Episode:
    """What is held of one episode."""

    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Of its pieces: the chunk, and which of the chunk's segments."""
    running: set[tuple[str | None, str | None]] = dataclasses.field(default_factory=set)
    """The agents, each with its module, of which an end has not come yet."""


class HeldEpisodes:
    """Takes pieces of running episodes in order of time, and gives episodes out when all their agents that were seen
    have ended.

    Args:
        max_bytes: The most memory held.
    """

    def __init__(self, max_bytes: int = HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._chunks: dict[int, _Chunk] = {}
        self._next_chunk = 0
        self._episodes: dict[str, _Episode] = {}  # those added to last are at the end

    def add(self, exp: Experience) -> list[Experience]:
        """Take ``exp``, which has no lookback; gives what can be written now. Views, and what was held.

        Segments of an episode come joined, each agent's behind another's.
        """
        segments = exp.segments
        whole = (segments.agent_id == None) & segments.done & (segments.t_start == 0)  # noqa: E711 - an array
        out = [exp.select(whole)] if whole.any() else []
        touched = self._put(copied(exp.select(~whole)))
        ended = [name for name in touched if not self._episodes[name].running]
        out += self._released(ended)
        while self._size > self._max_bytes:
            out += self._released([next(iter(self._episodes))])
        return out

    def rest(self) -> list[Experience]:
        """All that is held, which is held no more."""
        return self._released(list(self._episodes))

    def _put(self, exp: Experience) -> list[str]:
        """Hold all of ``exp``; gives the episodes in it."""
        if not exp.num_segments:
            return []
        chunk = self._chunks[self._next_chunk] = _Chunk(exp, exp.num_segments)
        self._size += chunk.size
        rows = zip(*(getattr(exp.segments, name).tolist() for name in (*_NAMES, "done")), strict=True)
        touched: dict[str, None] = {}
        for i, (name, agent, module, done) in enumerate(rows):
            if name not in touched:
                touched[name] = None
                self._episodes[name] = self._episodes.pop(name) if name in self._episodes else _Episode()
            episode = self._episodes[name]
            episode.places.append((self._next_chunk, i))
            (episode.running.discard if done else episode.running.add)((agent, module))
        self._next_chunk += 1
        return list(touched)

    def _released(self, names: list[str]) -> list[Experience]:
        """These episodes, one behind another, which are held no more; nothing where there are none."""
        out = self._joined(names)
        for name in names:
            for k, _ in self._episodes.pop(name).places:
                self._chunks[k].left -= 1
                if not self._chunks[k].left:
                    self._size -= self._chunks.pop(k).size
        return out

    def _joined(self, names: list[str]) -> list[Experience]:
        by_chunk: dict[int, list[int]] = {}
        for name in names:
            for k, i in self._episodes[name].places:
                by_chunk.setdefault(k, []).append(i)
        parts = [self._chunks[k].exp.select(some) for k, some in by_chunk.items()]
        return [in_order(Experience.concat(parts), by_episode=True).join()] if parts else []

    def state_dict(self) -> dict[str, Any] | None:
        """What is held, as plain data and arrays; None where that is nothing."""
        if not self._episodes:
            return None
        (exp,) = self._joined(list(self._episodes))
        segments = {name: getattr(exp.segments, name) for name in exp.segments.__slots__}
        return {
            "steps": dict(exp.steps),
            "offsets": exp.offsets,
            "segments": {name: v.tolist() if name in _NAMES else v for name, v in segments.items()},
            "final_obs": dict(exp.final_obs),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`."""
        self._size, self._chunks, self._episodes = 0, {}, {}
        if state is not None:
            segments = Segments.of(len(state["offsets"]) - 1, **state["segments"])
            exp = Experience(dict(state["steps"]), np.asarray(state["offsets"]), segments, dict(state["final_obs"]))
            self._put(copied(exp))
