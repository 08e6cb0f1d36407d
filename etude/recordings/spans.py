# SPDX-License-Identifier: Apache-2.0
"""Where the steps of each agent's episode stand among the parts of a recording: the one rule for their order.

Steps of one agent in one episode must not be there twice (``duplicate``), not come after its end (``after_end``), and
not stand before earlier ones (``out_of_order``). Steps that are missing in its middle (``gap``) do no harm.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience, Segments

Prints: TypeAlias = NDArray[np.int64]


class Span(NamedTuple):
    """The steps of one segment, lookback left out."""

    start: int
    """The first ``t``."""
    stop: int
    """The ``t`` after the last."""
    part: int
    row: int
    """The row, in its part, of the segment's first row, lookback included."""
    lookback: int
    terminated: bool
    truncated: bool
    known: bool
    """What follows the last step is known, or nothing does."""

    @property
    def done(self) -> bool:
        """The episode ended here."""
        return self.terminated or self.truncated

    @property
    def place(self) -> tuple[int, int]:
        """Its part and row."""
        return self.part, self.row


Spans: TypeAlias = NDArray[Any]
"""Many spans: a structured array with the fields of `Span`, and ``key`` and ``episode``, as `hashes_of` gives them."""

DTYPE: Final = np.dtype(
    [
        *(("key", "i8"), ("episode", "i8"), ("start", "i8"), ("stop", "i8"), ("part", "i4"), ("row", "i8")),
        *(("lookback", "i4"), ("terminated", "?"), ("truncated", "?"), ("known", "?")),
    ]
)
KINDS: Final = ("duplicate", "after_end", "out_of_order", "gap")


_ODD: Final = 0x5851F42D4C957F2D
"""Any large odd number: sums of hashes times it are as seldom equal as hashes are."""


def hashes_of(segments: Segments) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hashes of the episode and agent, and of the episode, of each segment: equal for equal ones in one process.

    They take a fifth of the memory of the names. Who acts on equal hashes compares the names as well.
    """
    episodes, agents = segments.episode_id.mapped(hash, np.int64), segments.agent_id.mapped(hash, np.int64)
    return episodes * _ODD + agents, episodes


def spans_of(k: int, exp: Experience) -> Spans:
    """The segments of part ``k`` that have steps of their own."""
    s = exp.segments
    spans = np.zeros(len(s), DTYPE)
    spans["key"], spans["episode"] = hashes_of(s)
    spans["start"], spans["stop"] = s.t_start + s.lookback, s.t_start + exp.lengths
    spans["part"], spans["row"], spans["lookback"] = k, exp.offsets[:-1], s.lookback
    spans["terminated"], spans["truncated"], spans["known"] = s.terminated, s.truncated, s.has_final_obs | s.terminated
    return spans.take(np.flatnonzero(s.lookback < exp.lengths))


def in_time(spans: Spans) -> Spans:
    """The spans of each key behind each other, in order of time."""
    order = np.argsort(np.ascontiguousarray(spans["key"]), kind="stable")  # fast where runs are sorted already
    found = spans.take(order)  # fifty times as fast as an index is for such arrays
    a, b = found[:-1], found[1:]
    same = np.flatnonzero(a["key"] == b["key"])
    if len(same):
        a, b = a.take(same), b.take(same)
        rises = (a["start"] < b["start"]) | ((a["start"] == b["start"]) & (_places(a) < _places(b)))
        if not rises.all():
            return spans.take(np.lexsort((spans["row"], spans["part"], spans["start"], spans["key"])))
    return found


def all_of(runs: Iterable[Spans]) -> Spans:
    """Several of them behind each other."""
    raw = np.dtype((np.void, DTYPE.itemsize))  # as plain bytes they are copied at once
    return np.concatenate([np.zeros(0, raw), *(run.view(raw) for run in runs)]).view(DTYPE)


def _places(spans: Spans) -> NDArray[np.int64]:
    """Numbers that rise with the part and the row in it."""
    places: NDArray[np.int64] = (spans["part"].astype(np.int64) << 40) + spans["row"]
    return places


def clashes(spans: Spans) -> dict[str, NDArray[np.int64]]:
    """For each of `KINDS`, the spans that do not go with the one behind them, in the order in which those stand.

    Args:
        spans: As `in_time` gives them.
    """
    a, b = spans[:-1], spans[1:]
    same = a["key"] == b["key"]
    twice = same & (b["start"] < a["stop"])
    ended = same & (a["terminated"] | a["truncated"]) & ~twice
    before = (b["part"] < a["part"]) | ((b["part"] == a["part"]) & (b["row"] < a["row"]))
    misplaced = same & before & ~twice & ~ended
    gap = same & (b["start"] > a["stop"]) & ~ended
    found = {}
    for kind, bad in zip(KINDS, (twice, ended, misplaced, gap), strict=True):
        at = np.flatnonzero(bad)
        found[kind] = at[np.lexsort((b["row"][at], b["part"][at]))]
    return found


def span_at(spans: Spans, i: int) -> Span:
    """One of them."""
    return Span(*(spans[name][i].item() for name in Span._fields))


@dataclasses.dataclass
class Plan:
    """What is to be done with the segments of a part."""

    left_out: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    """The first row, the row after the last one, and why."""
    links: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """A segment's last row, what is observed after which is in this part at this row."""
    in_order: bool = False
    """Its segments have to be put in order."""

    def rows(self) -> int:
        """How many rows are left out."""
        return sum(stop - start for start, stop, _ in self.left_out)


class Settled(NamedTuple):
    """One agent's episode with its clashes settled."""

    left_out: list[tuple[Span, int, str]]
    """A span, how many of its leading steps go, and why."""
    links: list[tuple[Span, Span, int]]
    """A span, the one that goes on after it, and how many leading steps of that were left out."""
    moved: list[Span]
    """Those that stand behind later ones."""


def overlapping(spans: Sequence[Span]) -> bool:
    """Whether any step is there twice."""
    ordered = sorted(spans)
    return any(b.start < a.stop for a, b in itertools.pairwise(ordered))


def settled(spans: Sequence[Span], prints: Callable[[Span], Prints], *, keep_order: bool) -> Settled:
    """What goes and what stays of one agent's episode.

    Of steps that are there twice and alike, the first stay. Where they contradict each other, none can be believed:
    both segments go. So do segments that go on after the end of the episode.

    Args:
        spans: All of the episode and agent.
        prints: int64 ``[steps]``: a number for the content of each step; asked for only where steps are there twice.
        keep_order: Segments that stand behind later ones go, too; else they are put in order.
    """
    out = Settled([], [], [])
    kept: list[tuple[Span, int]] = []
    refused: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, not s.known, s.part, s.row)):
        kind, cut = _verdict(span, kept, refused, prints)
        if kind == "contradiction":
            for other in [s for s, _ in kept if s.stop > span.start]:
                refused.append(other)
                out.left_out.append((other, other.stop - other.start, kind))
            kept = [(s, n) for s, n in kept if s not in refused]
            refused.append(span)
        length = span.stop - span.start
        if kind:
            out.left_out.append((span, length if keep_order else cut, kind))
        if not kind or (cut < length and not keep_order):
            kept.append((span, cut))
    latest = -1
    for span, _ in sorted(kept, key=lambda entry: entry[0].place):
        if span.start < latest:
            out.moved.append(span)
        latest = max(latest, span.start)
    if keep_order:
        out.left_out.extend((span, span.stop - span.start, "out_of_order") for span in out.moved)
        return out
    heads = {span.start + cut: (span, cut) for span, cut in kept}
    out.links.extend((s, *heads[s.stop]) for s, _ in kept if not s.known and s.stop in heads)
    return out


def _verdict(
    span: Span, kept: Sequence[tuple[Span, int]], refused: Sequence[Span], prints: Callable[[Span], Prints]
) -> tuple[str, int]:
    """Why some of a span goes, and how many of its leading steps; nothing goes where the first is empty."""
    length = span.stop - span.start
    if any(other.stop > span.start for other in refused):
        return "contradiction", length
    if any(other.done and other.stop <= span.start for other, _ in kept):
        return "after_end", length
    twice = [other for other, _ in kept if other.stop > span.start]
    for other in twice:
        stop = min(other.stop, span.stop)
        same = np.array_equal(
            prints(other)[span.start - other.start : stop - other.start], prints(span)[: stop - span.start]
        )
        ends_twice = other.stop == span.stop and other.done and span.done
        ends = ends_twice and (other.terminated, other.truncated) != (span.terminated, span.truncated)
        ended = (other.done and span.stop > other.stop) or (span.done and other.stop > span.stop)
        if not same or ends or ended:
            return "contradiction", length
    if not twice:
        return "", 0
    return "duplicate", min(length, max(other.stop for other in twice) - span.start)


def prints_of(exp: Experience, start: int, stop: int) -> Prints:
    """int64 ``[steps]``: a number for the content of each of some rows; the same for the same bytes in one process."""
    parts = []
    for name, column in exp.steps.items():
        if col.is_under(name, col.OBS) or col.is_under(name, col.ACTION) or name == col.REWARD:
            values = np.asarray(column)[start:stop].reshape(stop - start, -1)
            parts.append(_bytes_of(values))
    if not parts:
        return np.zeros(stop - start, np.int64)
    return np.array([hash(row.tobytes()) for row in np.concatenate(parts, axis=1)], np.int64)


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    if values.dtype == object:
        values = np.array([[hash(x) for x in row] for row in values.tolist()], np.int64)
    return np.ascontiguousarray(values).view(np.uint8)
