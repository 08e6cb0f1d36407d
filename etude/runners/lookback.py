# SPDX-License-Identifier: Apache-2.0
"""Lookback: the steps just before a segment that goes on, put in front of it for connectors that look back."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.experience import Experience, Segments, arrays
from etude.experience.experience import offsets_of


class Lookback:
    """Keeps the last ``context`` steps of each slot's running episode."""

    def __init__(self, context: int, num_slots: int) -> None:
        self.context = context
        self._tails: list[Experience | None] = [None] * num_slots

    def clear(self) -> None:
        """Forget all: every slot begins a new episode."""
        self._tails = [None] * len(self._tails)

    def lead(self, exp: Experience, slot: NDArray[np.int64]) -> Experience:
        """``exp`` with context rows in front of the segments that go on, given each segment's slot.

        Segments are grouped by slot, in order of time in each.
        """
        if not exp.num_segments:
            return exp
        first = np.flatnonzero(np.append(True, slot[1:] != slot[:-1]))
        tails = {int(i): self._tails[slot[i]] for i in first if exp.segments.t_start[i] > 0}
        parts = {i: tail for i, tail in tails.items() if tail is not None}
        led = _put_in_front(exp, parts) if parts else exp
        for i in np.append(first[1:], exp.num_segments) - 1:
            ended = bool(led.segments.done[i])
            self._tails[slot[i]] = None if ended else _last_rows(led[int(i)], self.context)
        return led

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays; goes into `load_state_dict`."""
        return {"tails": [None if tail is None else tail.steps for tail in self._tails]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; ValueError where it holds anything but numbers."""
        if any(column.dtype.kind not in "biuf" for steps in state["tails"] for column in (steps or {}).values()):
            raise ValueError("the steps before a segment are not numbers")
        self._tails = [None if steps is None else _bare(steps) for steps in state["tails"]]


def _put_in_front(exp: Experience, parts: dict[int, Experience]) -> Experience:
    context = np.zeros(exp.num_segments, np.int64)
    begins = np.zeros(exp.num_segments, np.int64)
    at = exp.num_steps
    for i, tail in parts.items():
        context[i], begins[i] = tail.num_steps, at
        at += tail.num_steps
    rows = arrays.ranges(
        np.stack([begins, exp.offsets[:-1]], 1).reshape(-1), np.stack([context, exp.lengths], 1).reshape(-1)
    )
    steps = {
        name: np.concatenate([column, *(_context(tail, name, column) for tail in parts.values())]).take(rows, axis=0)
        for name, column in exp.steps.items()
    }
    segments = exp.segments.replace(t_start=exp.segments.t_start - context, lookback=context)
    return Experience(steps, offsets_of(exp.lengths + context), segments, exp.final_obs)


def _context(tail: Experience, name: str, like: NDArray[Any]) -> NDArray[Any]:
    """A column of context; zeros where it was collected without it, as by other ways of acting."""
    return tail.steps[name] if name in tail.steps else np.zeros((tail.num_steps, *like.shape[1:]), like.dtype)


def _last_rows(segment: Experience, count: int) -> Experience:
    return _bare({name: np.array(column[-count:]) for name, column in segment.steps.items()})


def _bare(steps: dict[str, NDArray[Any]]) -> Experience:
    (rows,) = {len(column) for column in steps.values()}
    return Experience(steps, np.array([0, rows]), Segments.of(1, episode_id=[""]), {})
