# SPDX-License-Identifier: Apache-2.0
"""Figures (statistics) of episodes, computed in one pass; and joining pieces of episodes to whole ones."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience, Segments
from etude.experience.arrays import Index
from etude.experience.experience import without_lookback
from etude.experience.ids import Ids
from etude.experience.table import IDS
from etude.recordings.pieces import copied, in_order
from etude.recordings.where import Expression, Reduction, step_values

RETURN: Final = "return"
LENGTH: Final = "length"
STEPS: Final = "steps"
FIGURES: Final = (RETURN, LENGTH, STEPS, "agents", col.TERMINATED, col.TRUNCATED, "done", col.EPISODE_ID)
"""The figures of each episode: the sum of all agents' rewards; the steps of the longest-acting agent; the steps of all
agents; the number of agents; whether any agent was terminated, truncated, or either; and the episode's id."""


_STARTS: Final = {"sum": 0.0, "mean": 0.0, "min": np.inf, "max": -np.inf, "any": 0.0, "all": 1.0}
_MERGES: Final = {
    **{"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum},
    **{"any": np.maximum, "all": np.minimum},
}


class EpisodeTable:
    """The episodes in a stream of experience, in order of first appearance, with a row of figures for each.

    Args:
        where: An expression whose reductions are computed as additional figures.
    """

    def __init__(self, where: Expression | None = None) -> None:
        self._codes: dict[str, int] = {}
        self._agents: dict[str | None, int] = {}
        self._where = where
        self._reductions = {} if where is None else where.reductions
        self._parts: list[dict[str, NDArray[Any]]] = []  # by `add` call: arrays [segments]

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def ids(self) -> list[str]:
        """The id of each episode."""
        return list(self._codes)

    @property
    def agents(self) -> list[str | None]:
        """The names of all agents."""
        return list(self._agents)

    @property
    def num_steps(self) -> int:
        """The number of steps of all agents, without lookback."""
        return int(self.figures[STEPS].sum())

    def codes(self, exp: Experience) -> Index:
        """Return the index of the episode of each segment, shape ``[segments]``."""
        return _coded(exp.segments.episode_id, self._codes)

    def add(self, exp: Experience) -> Index:
        """Add experience and return its `codes`. Must not be called after `figures` were read."""
        codes = self.codes(exp)
        part: dict[str, NDArray[Any]] = {"code": codes[exp.segments.lookback < exp.lengths]}
        exp = without_lookback(exp)
        part |= {"agent": _coded(exp.segments.agent_id, self._agents), STEPS: exp.lengths}
        part |= {name: getattr(exp.segments, name) for name in (col.TERMINATED, col.TRUNCATED)}
        if col.REWARD in exp.steps:
            part[RETURN] = exp.returns()
        if exp.num_segments:
            if self._where is not None:
                columns = step_values(exp, [col.T_INDEX, *self._where.columns])
                for text, reduction in self._reductions.items():
                    values = np.asarray(self._where.of_steps(text, columns))
                    if reduction.how in ("any", "all"):
                        values = values.astype(bool)
                    with np.errstate(invalid="ignore"):  # NaN stays NaN
                        part[text] = _MERGES[reduction.how].reduceat(values, exp.offsets[:-1])
            self._parts.append(part)
        return codes

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        """The columns of all parts, ``[segments]`` each."""
        names = ("code", "agent", STEPS, col.TERMINATED, col.TRUNCATED, RETURN, *self._reductions)
        parts = self._parts or [dict.fromkeys(names, np.zeros(0, np.int64))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _merged(self, name: str, how: str) -> NDArray[np.float64]:
        """A column reduced to one value per episode, ``[episodes]``."""
        out = np.full(len(self._codes), _STARTS[how])
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            _MERGES[how].at(out, self._columns["code"], self._columns[name])
        return out

    @cached_property
    def figures(self) -> dict[str, NDArray[Any]]:
        """The figures by name, shape ``[episodes]`` each; ``return`` only if there are rewards."""
        count, every = len(self._codes), self._columns
        pairs, of_pair = np.unique(every["code"] << 32 | every["agent"], return_inverse=True)
        of_pairs, owners = np.bincount(of_pair, every[STEPS], len(pairs)).astype(np.int64), pairs >> 32
        steps, lengths = (np.zeros(count, np.int64) for _ in range(2))
        np.add.at(steps, owners, of_pairs)
        np.maximum.at(lengths, owners, of_pairs)
        flags = {name: self._merged(name, "any").astype(bool) for name in (col.TERMINATED, col.TRUNCATED)}
        reduced = {text: _ended(r, self._merged(text, r.how), steps) for text, r in self._reductions.items()}
        return {
            **({RETURN: self._merged(RETURN, "sum")} if RETURN in every else {}),
            LENGTH: lengths,
            STEPS: steps,
            "agents": np.bincount(owners, minlength=count),
            **flags,
            "done": flags[col.TERMINATED] | flags[col.TRUNCATED],
            col.EPISODE_ID: np.array(self.ids, object),
            **reduced,
        }


def _coded(ids: Ids, known: dict[Any, int]) -> Index:
    """The code of each id in ``known``, ``[n]``. New ids are added to ``known`` in order of appearance."""
    used, first, inverse = np.unique(ids.codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    codes = np.empty(len(used), np.int64)
    codes[order] = [known.setdefault(name, len(known)) for name in ids.names[used[order]].tolist()]
    return codes[inverse]


def _ended(reduction: Reduction, values: NDArray[Any], steps: NDArray[np.int64]) -> NDArray[Any]:
    if reduction.how in ("any", "all"):
        return values.astype(bool)
    return values / np.maximum(steps, 1) if reduction.how == "mean" else values


def counts_of(pieces: Iterable[Experience]) -> dict[str, Any]:
    """Return counts and sums of episodes, agents, steps and returns of ``pieces``, as JSON data.

    Counts and sums are over steps that are not lookback. ``env_steps`` is the number of env steps in which an agent
    acted; a recording has no rows of the others. ``final_obs_sum`` is over the final observations of episodes that
    ended. ``return_*`` are over all episodes, including unfinished ones; agents' rewards are summed for each episode.
    The sums of observations and actions are float64, over all numbers as recorded.
    """
    table = EpisodeTable()
    clock = [np.zeros((0, 3), np.int64)]  # several agents that act at the same time take one env step
    sums = {col.OBS: 0.0, col.FINAL_OBS: 0.0, col.ACTION: 0.0}
    for exp in pieces:
        trained, segments = exp.trained(), exp.segments
        clock.append(_clock_spans(exp, table.add(exp), trained))
        if len(clock) > 256:
            clock = [_united(np.concatenate(clock))]
        for root in (col.OBS, col.ACTION):
            for values in col.subtree(exp.steps, root).values():
                sums[root] += _sum(values if trained.all() else values[trained])
        ends = segments.done & segments.has_final_obs
        for values in exp.final_obs.values():
            sums[col.FINAL_OBS] += _sum(values[ends])
    figures, num, clock = table.figures, len(table), [_united(np.concatenate(clock))]
    returns = figures.get(RETURN, np.full(num, np.nan)) if num else np.array([np.nan])
    return {
        "episodes": num,
        "agents": sorted(agent for agent in table.agents if agent is not None),
        "env_steps": int((clock[0][:, 2] - clock[0][:, 1]).sum()),
        "agent_steps": int(figures[STEPS].sum()),
        "terminated": int(figures[col.TERMINATED].sum()),
        "truncated": int(figures[col.TRUNCATED].sum()),
        "unfinished": num - int(figures["done"].sum()),
        "return_total": float(np.nansum(returns)),
        "return_mean": _or_none(returns.mean()),
        "return_min": _or_none(returns.min()),
        "return_max": _or_none(returns.max()),
        "obs_sum": sums[col.OBS],
        "final_obs_sum": sums[col.FINAL_OBS],
        "action_sum": sums[col.ACTION],
    }


def _clock_spans(exp: Experience, codes: Index, trained: NDArray[np.bool_]) -> Index:
    """The ranges of env steps in ``exp``, int64 ``[n, 3]``: episode, first step, last step + 1.

    Args:
        exp: The experience.
        codes: The episode of each segment.
        trained: Which steps are not lookback.
    """
    if col.ENV_T in exp.steps:
        clock = np.asarray(exp.steps[col.ENV_T])[trained]
        return np.stack([codes[exp.segment_of_step()][trained], clock, clock + 1], axis=1).astype(np.int64)
    first = exp.segments.t_start + exp.segments.lookback
    stop = exp.segments.t_start + exp.lengths
    return np.stack([codes, first, stop], axis=1)[stop > first]


def _sum(values: Any) -> float:
    if values.dtype == object:
        return 0.0
    return float(np.asarray(values).sum(dtype=np.float64))


def _united(spans: Index) -> Index:
    """Merge the spans of each episode that touch or overlap."""
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    if not len(spans):
        return spans
    # Episodes are laid one after another on a single line, so that one running maximum serves all of them.
    width = int(spans[:, 2].max()) + 2
    starts, stops = spans[:, 0] * width + spans[:, 1], spans[:, 0] * width + spans[:, 2]
    reach = np.maximum.accumulate(stops)
    heads = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    tails = np.append(heads[1:], len(spans)) - 1
    episode = spans[heads, 0]
    return np.stack([episode, starts[heads] - episode * width, reach[tails] - episode * width], axis=1)


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


# -- whole episodes out of pieces ------------------------------------------------------------------------------------

HELD_BYTES: Final = 256 * 2**20
"""The most memory for unfinished episodes, in bytes. Beyond it, those updated longest ago are returned incomplete."""


@dataclasses.dataclass
class Waiting:
    """The pieces so far of an episode that is not whole yet."""

    total: int | None
    """The number of steps of the whole episode; None until its end has come."""
    num_steps: int = 0
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """For each piece: the index of the `add` call that brought it, and of its segment there."""
    running: set[tuple[str | None, str | None]] = dataclasses.field(default_factory=set)
    """The (agent, module) pairs that have not ended yet."""


@dataclasses.dataclass
class _Chunk:
    """The segments of one `Assembler.add` call that are still held, and some that are not."""

    exp: Experience
    indices: NDArray[np.int64]
    """int64 ``[segments]``: the index in the call of each segment of ``exp``; increasing."""
    is_held: NDArray[np.bool_]
    """bool ``[segments]``."""


class Assembler:
    """Joins the pieces of episodes, holding copies until no piece is missing.

    Args:
        together: An episode is whole when all its agents seen so far have ended; their pieces must come in order of
            time. If False, each agent's part is an episode of its own, and pieces may come in any order.
        lengths: The number of steps of whole episodes, by the hash of their id. For other episodes, it is known once
            their end has come.
        max_bytes: The most memory held, in bytes, with ``together``.
    """

    def __init__(
        self, *, together: bool = False, lengths: Mapping[int, int] | None = None, max_bytes: int = HELD_BYTES
    ) -> None:
        self._together, self._lengths, self._max_bytes = together, lengths or {}, max_bytes
        self._num_adds = 0
        self._chunks: dict[int, _Chunk] = {}  # by `add` call
        self.waiting: dict[Any, Waiting] = {}
        """By episode, or by episode and agent; the most recently updated last."""

    def add(self, exp: Experience) -> list[Experience]:
        """Add segments, which must not have lookback; returns the episodes that are whole now.

        An agent's segments in an episode are joined to one, unless steps are duplicated or several modules acted. The
        agents of an episode are next to each other.
        """
        touched, out = self._put(copied(exp))
        if self._together:
            out = self._released([key for key in touched if not self.waiting[key].running])
            while sum(_bytes_of(chunk.exp) for chunk in self._chunks.values()) > self._max_bytes:
                out += self._released([next(iter(self.waiting))])
        return out

    def held(self) -> list[Experience]:
        """Everything held, joined; an empty list if nothing is."""
        return self._joined(list(self.waiting))

    def rest(self) -> list[Experience]:
        """Return everything held, and hold it no longer."""
        return self._released(list(self.waiting))

    def rename(self, suffix: str) -> None:
        """Add a suffix to the ids of the episodes that are held."""
        for exp in self.rest():
            self._put(exp.with_segments(episode_id=[name + suffix for name in exp.segments.episode_id]))

    def _put(self, exp: Experience) -> tuple[list[Any], list[Experience]]:
        """Hold ``exp``; returns the keys in it and, unless agents wait for each other, the whole episodes."""
        if not exp.num_segments:
            return [], []
        self._chunks[self._num_adds] = _Chunk(exp, np.arange(len(exp)), np.ones(len(exp), bool))
        self._num_adds += 1
        s, out = exp.segments, []
        names, agents = s.episode_id.tolist(), s.agent_id.tolist()
        keys = names if self._together else list(zip(names, agents, strict=True))
        touched = dict(zip(keys, names, strict=True))
        for key, name in touched.items():
            held = self.waiting.pop(key) if key in self.waiting else Waiting(self._lengths.get(hash(name)))
            self.waiting[key] = held
        facts = (s.module_id.tolist(), s.done.tolist(), s.t_start.tolist(), exp.lengths.tolist())
        for i, (key, agent, module, done, first, length) in enumerate(zip(keys, agents, *facts, strict=True)):
            if key not in self.waiting:  # an earlier segment made it whole, so it was returned; this is more of it
                self.waiting[key] = Waiting(self._lengths.get(hash(names[i])))
            one = self.waiting[key]
            one.places.append((self._num_adds - 1, i))
            one.num_steps += length
            one.total = first + length if done and one.total is None else one.total
            (one.running.discard if done else one.running.add)((agent, module))
            if not self._together and one.num_steps == one.total:
                out += self._released([key])
        return list(touched), out

    def _released(self, keys: list[Any]) -> list[Experience]:
        """Return these episodes, and hold them no longer; an empty list if there are none."""
        out = self._joined(keys)
        for key in keys:
            for k, i in self.waiting.pop(key).places:
                self._chunks[k].is_held[np.searchsorted(self._chunks[k].indices, i)] = False
        for k, chunk in list(self._chunks.items()):
            held = chunk.is_held
            if not held.any():
                del self._chunks[k]
            elif 2 * int(chunk.exp.lengths[held].sum()) < chunk.exp.num_steps:
                self._chunks[k] = _Chunk(copied(chunk.exp.select(held)), chunk.indices[held], held[held])
        return out

    def _joined(self, keys: list[Any]) -> list[Experience]:
        by_chunk: dict[int, list[int]] = {}
        for key in keys:
            for k, i in self.waiting[key].places:
                by_chunk.setdefault(k, []).append(i)
        parts = [self._chunks[k].exp.select(np.searchsorted(self._chunks[k].indices, i)) for k, i in by_chunk.items()]
        return [in_order(Experience.concat(parts), by_episode=True).join()] if parts else []

    def state_dict(self) -> dict[str, Any] | None:
        """The pieces held, as plain data and arrays; None if there are none."""
        if not self.waiting:
            return None
        (exp,) = self.held()
        segments = exp.segments.columns().items()
        return {
            "steps": dict(exp.steps),
            "offsets": exp.offsets,
            "segments": {name: v.tolist() if name in IDS else v for name, v in segments},
            "final_obs": dict(exp.final_obs),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a `state_dict`."""
        self._chunks, self.waiting = {}, {}
        if state is not None:
            segments = Segments.of(len(state["offsets"]) - 1, **state["segments"])
            exp = Experience(dict(state["steps"]), np.asarray(state["offsets"]), segments, dict(state["final_obs"]))
            self._put(copied(exp))


def _bytes_of(exp: Experience) -> int:
    return sum(int(column.nbytes) for column in (*exp.steps.values(), *exp.final_obs.values()))
