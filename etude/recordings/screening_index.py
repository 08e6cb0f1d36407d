# SPDX-License-Identifier: Apache-2.0
"""What screening knows of a whole recording: where each agent's episode stands, and what to do where it is ill."""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.recordings.formats.parts import Parts
from etude.recordings.spans import (
    Key,
    Plan,
    Prints,
    Span,
    clash_of,
    clashes,
    overlapping,
    prints_of,
    settled,
    spans_of,
)
from etude.recordings.tolerance import keys_of, load_rest, where_is


class Index:
    """Made by one pass over the key columns: for each part, what is to be left out, linked and put in order.

    Args:
        parts: The recording.
        keep_order: Segments out of order are left out, and ends that are not known stay so.
    """

    def __init__(self, parts: Parts, *, keep_order: bool) -> None:
        self._parts = parts
        self._roots = [root for root in (col.OBS, col.ACTION, col.REWARD) if col.under(parts.columns, root)]
        self._obs: dict[tuple[int, int], dict[str, NDArray[Any]] | None] = {}
        self.rows: list[int] = []
        """The rows of each part; 0 where nothing of it can be read."""
        self.plans: dict[int, Plan] = defaultdict(Plan)
        """Of the parts that have anything to be done."""
        self.left_out: Counter[str] = Counter()
        """Rows, by kind of fault."""
        self.met: Counter[str] = Counter()
        """Segments, by kind of fault; and what the reader of the format has left out already."""
        copies = int(parts.header.meta.get("duplicates") or 0) if parts.format.startswith("rllib") else 0
        self.met["duplicate"] += copies
        ill = [spans for spans in self._read().values() if len(spans) > 1 and clashes(spans)]
        prints = self._prints([span for spans in ill if overlapping(spans) for span in spans])
        for spans in ill:
            self._settle(spans, prints, keep_order)
        self.plans = dict(self.plans)

    def _read(self) -> Mapping[Key, list[Span]]:
        found: dict[Key, list[Span]] = {}
        for k in range(self._parts.num_parts):
            try:
                exp = keys_of(self._parts, k)
            except DataError:  # met again when it is loaded, and counted then
                self.rows.append(0)
                continue
            self.rows.append(exp.num_steps)
            for key, span in spans_of(k, exp):
                found.setdefault(key, []).append(span)
        return found

    def _prints(self, spans: Sequence[Span]) -> dict[Span, Prints]:
        """Numbers for the contents of steps, of each part once."""
        by_part: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_part[span.part].append(span)
        out: dict[Span, Prints] = {}
        for k, here in sorted(by_part.items()):
            try:
                exp = load_rest(self._parts, k, self._roots)[0]
            except DataError:
                exp = None
            for span in here:
                start, stop = span.row + span.lookback, span.row + span.lookback + span.stop - span.start
                if exp is None or exp.num_steps != self.rows[k]:
                    out[span] = np.arange(stop - start) + hash((span, "unread"))  # like nothing else
                else:
                    out[span] = prints_of(exp, start, stop)
        return out

    def _settle(self, spans: Sequence[Span], prints: Mapping[Span, Prints], keep_order: bool) -> None:
        found = settled(spans, prints.__getitem__, keep_order=keep_order)
        for span, steps, kind in found.left_out:
            first = span.row if steps else span.row + span.lookback
            stop = span.row + span.lookback + steps
            self.plans[span.part].left_out.append((first, stop, kind))
            self.left_out[kind] += stop - first
            self.met[kind] += 1
        for span, following, skipped in found.links:
            last = span.row + span.lookback + span.stop - span.start - 1
            place = (last, following.part, following.row + following.lookback + skipped)
            self.plans[span.part].links.append(place)
        if not keep_order:
            self.met["out_of_order"] += len(found.moved)
            for span in found.moved:
                self.plans[span.part].in_order = True

    # -- asked for at loading ---------------------------------------------------------------------------------

    def places(self, k: int, exp: Experience) -> NDArray[np.int64]:
        """int64 ``[num_steps]``: the row of part ``k``, as it was when it was indexed, that each row of ``exp`` is.

        They differ only where less could be read with these columns; -1 is a row that was not there.
        """
        if exp.num_steps == self.rows[k]:
            return np.arange(exp.num_steps)
        known = keys_of(self._parts, k)
        first: dict[Any, deque[int]] = defaultdict(deque)
        for key, row in zip(_heads(known), known.offsets.tolist(), strict=False):
            first[key].append(row)
        rows = [first[key].popleft() if first[key] else -exp.num_steps for key in _heads(exp)]
        at = np.arange(exp.num_steps) + np.repeat(np.array(rows, np.int64) - exp.offsets[:-1], exp.lengths)
        return np.maximum(at, -1)

    def obs_at(self, k: int, row: int, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
        """The observation in a row of part ``k``; None where it can't be read."""
        if (k, row) not in self._obs or not set(names) <= set(self._obs[k, row] or names):
            try:
                exp = load_rest(self._parts, k, names)[0]
                whole = exp.num_steps == self.rows[k]
                self._obs[k, row] = {n: np.array(exp.steps[n][row]) for n in names} if whole else None
            except DataError:
                self._obs[k, row] = None
        return self._obs[k, row]


def _heads(exp: Experience) -> list[tuple[Any, ...]]:
    s = exp.segments
    return list(zip(s.episode_id.tolist(), s.agent_id.tolist(), s.t_start.tolist(), strict=True))


class StrictIndex:
    """Where the episodes of the parts loaded so far stand; the first clash is kept."""

    def __init__(self) -> None:
        self._spans: dict[Key, list[Span]] = {}
        self._added: set[int] = set()
        self._told: str | None = None

    def add(self, parts: Parts, k: int, exp: Experience) -> None:
        """Take in part ``k``, loaded, where it was not before.

        Raises:
            DataError: a segment of it does not go with another one, now or in a part before.
        """
        if k not in self._added:
            self._added.add(k)
            for key, span in spans_of(k, exp):
                told = self._clash(parts, key, span)
                self._told = self._told or told
        if self._told is not None:
            raise DataError(self._told)

    def add_all(self, parts: Parts) -> None:
        """Take in the parts that were not loaded yet, by their keys; a clash is raised when a part is loaded."""
        for k in range(parts.num_parts):
            if k not in self._added and self._told is None:
                try:
                    self.add(parts, k, keys_of(parts, k))
                except DataError as error:
                    self._told = self._told or str(error)

    def _clash(self, parts: Parts, key: Key, span: Span) -> str | None:
        known = self._spans.setdefault(key, [])
        at = bisect.bisect(known, span)
        known.insert(at, span)
        for a, b in zip(known[max(0, at - 1) : at + 1], known[max(0, at - 1) + 1 : at + 2], strict=False):
            kind = clash_of(a, b)
            if kind is not None:
                return _told(parts, key, kind, a, b)
        return None


def _told(parts: Parts, key: Key, kind: str, a: Span, b: Span) -> str:
    first, second = (where_is(parts, span.part, span.row + span.lookback) for span in (a, b))
    who = f"episode {key[0]!r}" + (f", agent {key[1]!r}" if key[1] is not None else "")
    if kind == "duplicate":
        return f"{second}: {who} has step t {b.start} a second time; it is in {first} already."
    if kind == "after_end":
        return f"{second}: {who} goes on at t {b.start}, after its end in {first}."
    return f"{second}: {who} goes on at t {b.start} before its beginning, which is in {first}: it is out of order."
