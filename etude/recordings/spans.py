# SPDX-License-Identifier: Apache-2.0
"""Where the steps of each agent's episode stand among the parts of a recording: copies, contradictions, order."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience

Key: TypeAlias = tuple[str, str | None]
"""An episode and an agent."""
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


class Clash(NamedTuple):
    """Two segments of an episode that do not go together."""

    kind: str
    """``duplicate``, ``after_end`` or ``out_of_order``."""
    earlier: Span
    """By time."""
    later: Span


def spans_of(k: int, exp: Experience) -> Iterator[tuple[Key, Span]]:
    """The segments of part ``k`` that have steps of their own."""
    s = exp.segments
    stop = s.t_start + exp.lengths
    columns = (s.t_start + s.lookback, stop, exp.offsets[:-1], s.lookback, s.terminated, s.truncated)
    known = s.has_final_obs | s.terminated
    keys = zip(s.episode_id.tolist(), s.agent_id.tolist(), strict=True)
    rows = zip(keys, *(column.tolist() for column in columns), known.tolist(), strict=True)
    for key, start, end, row, lookback, terminated, truncated, is_known in rows:
        if start < end:
            yield key, Span(start, end, k, row, lookback, terminated, truncated, is_known)


def clash_of(a: Span, b: Span) -> str | None:
    """How two spans of one episode, ``a`` the earlier by time, do not go together; None where they do."""
    if b.start < a.stop:
        return "duplicate"
    if a.done:
        return "after_end"
    return "out_of_order" if b.place < a.place else None


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


def clashes(spans: Sequence[Span]) -> bool:
    """Whether any two of them do not go together, or the end of one is known only from another."""
    ordered = sorted(spans)
    return any(clash_of(a, b) or not a.known for a, b in itertools.pairwise(ordered))


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
