# SPDX-License-Identifier: Apache-2.0
"""RLlib's JSON recordings: lines of ``SampleBatch`` or ``MultiAgentBatch``, or of one step each.

Lines are fragments that start and end anywhere in an episode. The rows of one agent in one episode are joined, in order
of ``t`` if it exists: they are decoded and sorted, and then read as a table. Those of large recordings are sorted once,
into the cache. Rows of an agent that are repeated on a later line are read once and counted in
``header.meta["duplicates"]``.
"""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings import cache
from etude.recordings.format import Contents, FileFormat, Problem, UnreadableError
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats import sorting
from etude.recordings.formats.arrow import list_array
from etude.recordings.formats.inferring import Range, widen
from etude.recordings.formats.packed import PACKED, unpack
from etude.recordings.formats.rllib_columns import (
    ENDS,
    Ints,
    Schema,
    first_copies,
    flat_columns,
    numbers,
    own_name,
)
from etude.recordings.formats.source import ETUDE, FLAGS, Source
from etude.recordings.formats.source import KEYS as TABLE_KEYS
from etude.recordings.formats.table import TableRows, contents_of
from etude.recordings.formats.table_index import ends_by
from etude.recordings.formats.table_inputs import Group
from etude.recordings.layout import Header, loads

# -- one line --------------------------------------------------------------------------------------------------------


KEYS: Final = ("eps_id", "agent_index", "t")
SEQUENCES: Final = "seq_lens"
_OWN: Final = {"obs": col.OBS, "new_obs": col.NEXT_OBS, "actions": col.ACTION, "rewards": col.REWARD}
_KNOWN: Final = ("type", "count", *KEYS, *ENDS)
"""Keys that are not step columns."""


class LineBatch(NamedTuple):
    """Rows of one policy on one line."""

    policy: str | None
    columns: dict[str, Any]
    """The columns, undecoded."""
    num: int
    terminated: NDArray[np.bool_]
    """From the flags of the batch; see `ends_by` for ``dones``."""
    truncated: NDArray[np.bool_]
    episodes: NDArray[np.object_] | None
    """The names in ``eps_id``, if it exists."""
    agents: NDArray[Any]
    t: NDArray[Any] | None
    """The steps, if the rows have them and belong to named episodes."""


def batches_of(line: bytes) -> list[LineBatch]:
    """Parse the batches on one line.

    Raises:
        DataError: it is not JSON, or not in one of RLlib's layouts.
    """
    try:
        data = loads(line, parse_constant=float)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not whole JSON ({str(error)[:100]}): the line was cut off or overwritten") from error
    if not isinstance(data, dict):
        raise DataError("is not a JSON object, as RLlib's batches and steps are")
    if data.get("type") == "MultiAgentBatch" or "policy_batches" in data:
        policies = data.get("policy_batches")
        if not isinstance(policies, dict):
            raise DataError("is a MultiAgentBatch without `policy_batches`")
        return [_batch(None if name == "default_policy" else str(name), batch) for name, batch in policies.items()]
    if data.get("type") not in (None, "SampleBatch"):
        raise DataError(f"is of the type {str(data['type'])[:40]!r}, not SampleBatch or MultiAgentBatch")
    if data.get("type") is None and not isinstance(data.get("rewards"), list | str):
        return [_batch(None, {name: [value] for name, value in data.items()})]
    return [_batch(None, data)]


def _batch(policy: str | None, columns: Any) -> LineBatch:
    if not isinstance(columns, dict):
        raise DataError("holds a batch that is not an object of columns")
    for needed in (("obs",), ("actions",), ("rewards",), ENDS):
        if not columns.keys() & {*needed}:
            raise DataError(f"has no column `{'` or `'.join(needed)}`; it has {', '.join(list(columns)[:20])}")
    rewards = column(columns["rewards"], col.REWARD).get(col.REWARD, np.zeros(()))
    if rewards.ndim != 1:
        raise DataError(f"`rewards` has the shape {list(rewards.shape)}, not one number a step")
    num = len(rewards)
    keys = {name: _vector(columns[name], name, num) for name in (*ENDS, *KEYS) if name in columns}
    flags = {flag: keys[name].astype(bool) for flag, name in zip(FLAGS, ENDS, strict=True) if name in keys}
    terminated, truncated = ends_by(flags, num)
    episodes, t = keys.get("eps_id"), keys.get("t") if "eps_id" in keys else None
    if t is not None and num and not 0 <= int(t.min()) <= int(t.max()) < 2**62:
        raise DataError(f"`t` is {int(t.min()) if t.min() < 0 else int(t.max())} in one row; steps count from 0")
    agents = keys.get("agent_index", np.zeros(num, int))
    return LineBatch(policy, columns, num, terminated, truncated, episodes, agents, t)


def _vector(value: Any, name: str, num: int) -> NDArray[Any]:
    """A flag or key of each row: the integers of ``t`` or ``agent_index``, or the names in ``eps_id``."""
    if isinstance(value, list) and name == "eps_id":
        values = np.array([str(v) for v in value], object)
    else:
        values = numbers(column(value, name).get(name, []), name)
    if values.shape != (num,):
        raise DataError(f"`{name}` has the shape {list(values.shape)} for {num} rewards")
    if name in KEYS and values.dtype.kind not in "iuO":
        raise DataError(f"`{name}` holds {values.dtype}, not integers")
    return values


def roots(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a batch that become step columns, with Etude's names."""
    out = {name: _OWN.get(name) or own_name(name) for name in columns if name not in (*_KNOWN, "infos")}
    if SEQUENCES in columns:  # then these have a row for each sequence, and not for each step
        out = {name: root for name, root in out.items() if name != SEQUENCES and not name.startswith("state_in_")}
    return out


def column(value: Any, root: str) -> Columns:
    """Decode a column of a batch, plain or packed, to flat columns ``[rows, ...]`` under ``root``.

    Raises:
        DataError: it does not hold numbers, or has rows of different shapes.
    """
    if isinstance(value, str):
        if not value.startswith(PACKED):
            raise DataError(f"`{root}` is the text {value[:24]!r}, neither a list nor a packed array")
        return flat_columns([unpack(value)], None, root, whole=True)
    if not isinstance(value, list):
        raise DataError(f"`{root}` is neither a list nor a packed array")
    try:
        is_packed = bool(value) and isinstance(value[0], str)
        return flat_columns([_unpacked(v) for v in value] if is_packed else value, None, root)
    except DataError:
        parts = value[0] if value and isinstance(value[0], list) else []
        if not parts or not all(isinstance(v, list) and len(v) == len(parts) for v in value):
            raise
        tuples = [column([v[i] for v in value], f"{root}/{i}") for i in range(len(parts))]
        return {name: part for columns in tuples for name, part in columns.items()}


def _unpacked(value: Any) -> Any:
    return unpack(value) if isinstance(value, str) and value.startswith(PACKED) else value


def is_float32(values: NDArray[Any]) -> bool:
    """Whether all numbers read from text are exact in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(((values.astype(np.float32) == values) | np.isnan(values)).all())


# -- grouping rows ---------------------------------------------------------------------------------------------------


class Trajectories:
    """The trajectories found so far, each with a code (its index), and the number of its steps seen."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str | None, str | None]] = []
        """The episode, agent and module of each code."""
        self._codes: dict[tuple[str, int, str | None], int] = {}
        self._next = Counter[int]()  # by code, the step after the last rows
        self._lives = Counter[tuple[str, int, str | None]]()  # how often an id without ``t`` has ended

    def rows_of(self, batch: LineBatch, place: str) -> tuple[Ints, Ints]:
        """Return the code and step of each row of a batch.

        Args:
            batch: The rows.
            place: Prefix of names for rows without an episode id: each stretch up to a flag is then an episode.
        """
        done, episodes, agents, t = batch.terminated | batch.truncated, batch.episodes, batch.agents, batch.t
        if episodes is None:
            number: Ints = np.cumsum(done) - done
            episodes = np.array([f"{place}-{batch.policy or 0}-{n}" for n in number.tolist()], object)
        new = np.ones(batch.num, bool)
        new[1:] = (episodes[1:] != episodes[:-1]) | (agents[1:] != agents[:-1]) | done[:-1]
        if t is not None:
            new[1:] |= t[1:] != t[:-1] + 1
        code, steps = np.zeros(batch.num, np.int64), np.zeros(batch.num, np.int64)
        starts = np.flatnonzero(new)
        for start, stop in itertools.pairwise([*starts.tolist(), batch.num]):
            key = (str(episodes[start]), int(agents[start]), batch.policy)
            own = self._code_of(*key, life=0 if t is not None else self._lives[key])
            first = int(t[start]) if t is not None else self._next[own]
            code[start:stop] = own
            self._next[own] = first + stop - start
            steps[start:stop] = np.arange(first, self._next[own])
            if t is None and done[stop - 1]:
                self._lives[key] += 1
        return code, steps

    def _code_of(self, episode: str, agent: int, policy: str | None, life: int) -> int:
        named = f"{episode}-{life}" if life else episode
        code = self._codes.setdefault((named, agent, policy), len(self._codes))
        if code == len(self.names):
            is_many = policy is not None or agent != 0
            self.names.append((named, str(agent) if is_many else None, policy))
        return code


# -- the recording ---------------------------------------------------------------------------------------------------


_HEAD: Final = 1 << 16
_REMEDY: Final = "Leave this line out, or restore the file from a copy"


class RLlibJson(TableRows, FileFormat):
    """A recording of RLlib's JSON lines."""

    name = "rllib-json"
    suffixes = (".json", ".jsonl")

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether a file is of this format, by the start of its first line."""
        try:
            with path.open("rb") as file:
                head = file.readline(_HEAD)
        except OSError:
            return False
        return b'"SampleBatch"' in head or b'"MultiAgentBatch"' in head or (b'"obs"' in head and b'"rewards"' in head)

    def describe(self) -> Contents:
        """Return the contents, reading every line once; lines that can't be read are left out, as problems.

        Raises:
            DataError: nothing can be read; the message names the file and the line.
        """
        origin = cache.SourceFiles(self.files, self.name, _VERSION, sorting.VERSION)
        made = cache.CachedFiles(origin, partial(_convert, self.files), in_memory=origin.size < cache.LEAST_BYTES)
        with made.opened(_CONTENTS) as file:
            found = json.loads(file.read())
        header = Header.from_json(found["header"], self.files[0])
        lines = [_FileLines(pa.schema([]), n, file, 0) for file, n in zip(self.files, found["lines"], strict=True)]
        groups = sorting.groups_in(made, lines)
        spaces = header.obs_space, header.action_space
        source = Source([str(file) for file in self.files], {}, ETUDE, *spaces)
        contents = contents_of(source, groups, is_sorted=True)
        problems = [Problem(**problem) for problem in found["problems"]]
        return dataclasses.replace(contents, header=header, files=self.files, problems=problems)


@dataclasses.dataclass(frozen=True)
class _FileLines(Group):
    """The lines of a file, where rows came from; the rows themselves are read from the sorted table."""

    def place(self, row: int) -> str:
        return f"{self.file}: line {row + 1}"


# -- describing ------------------------------------------------------------------------------------------------


class _Scan:
    """One pass over all lines of a recording."""

    def __init__(self, files: Sequence[AnyPath]) -> None:
        self.files = files
        self.trajectories = Trajectories()
        self.num_lines: list[int] = []
        """The number of lines in each file read so far."""
        self.problems: list[Problem] = []
        self._shapes: Columns = {}  # an array of the right dtype for each column, by Etude's names
        self._ranges: dict[str, Range] = {}
        self.dropped: set[str] = set()
        """RLlib's names of columns that can't be read."""
        self._counts: Counter[str] = Counter()  # in how many batches each column is, and "" for all of them

    def looked_through(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield the trajectory and the step of each row, line by line over all files."""
        for path in self.files:
            at = 0
            for at, line in _lines_of(path):
                try:
                    yield from self._look_at(line, f"{path.stem}-{at}")
                except DataError as error:
                    text = f"{path}: line {at}: {error}. {_REMEDY}."
                    self.problems.append(Problem("unreadable", text, str(path), at - 1, repairable=True))
            self.num_lines.append(at)

    def check(self) -> None:
        """Raise a DataError if no line has rows."""
        if not self._counts[""] and self.problems:
            raise UnreadableError(self.problems[0])
        if not self._counts[""]:
            raise DataError(f"{self.files[0]}: holds no batches: it is empty. Record some, or give another folder.")

    def _look_at(self, line: bytes, place: str) -> Iterator[tuple[Ints, Ints]]:
        batches = batches_of(line)
        is_first = not self._counts[""]
        columns = [step_columns(batch, self.dropped, may_drop=is_first) for batch in batches]
        self._check_spaces(columns)  # before the rest, so that a line that fails has no effect
        for own in columns:
            self._widen(own)
        yield from [self.trajectories.rows_of(batch, place) for batch in batches]

    def _check_spaces(self, columns: Sequence[Columns]) -> None:
        """Raise a DataError if observations or actions differ from those of earlier batches in names or shapes."""
        for root in (col.OBS, col.ACTION):
            known = col.subtree(self._shapes, root)
            for own in (col.subtree(batch, root) for batch in columns if len(batch[col.REWARD])):
                known = known or own
                here, there = ({name: list(c.shape[1:]) for name, c in some.items()} for some in (own, known))
                for name in [*here, *there]:
                    if here.get(name) != there.get(name):
                        now = f"the shape {here[name]}" if name in here else "no shape"
                        before = there.get(name, "none")
                        raise DataError(f"`{name}` has {now} at each step, but {before} on lines before: spaces differ")

    def _widen(self, columns: Columns) -> None:
        """Widen the dtype and range of each column to those of a batch."""
        if not len(columns[col.REWARD]):
            return
        self._counts.update(["", *columns])
        for name, values in columns.items():
            known = self._shapes.setdefault(name, values[:0])
            if known.shape == values[:0].shape:
                self._shapes[name] = known.astype(np.promote_types(known.dtype, values.dtype))
            else:
                self._counts[name] -= 1  # as if it were not there
        for root in (col.OBS, col.NEXT_OBS, col.ACTION):
            widen(self._ranges, col.subtree(columns, root))

    def described(self, num_repeated: int) -> tuple[Schema, Header]:
        """Return the step columns and next observations of all lines, and the header; others are dropped."""
        found = {n: c for n, c in self._shapes.items() if self._counts[n] == self._counts[""] and 0 not in c.shape[1:]}
        nexts = col.subtree(found, col.NEXT_OBS)
        steps = {name: c for name, c in found.items() if name not in nexts}
        if col.renamed(nexts, col.NEXT_OBS, col.OBS).keys() != col.subtree(steps, col.OBS).keys():
            nexts = {}
        dropped = sorted(self.dropped | self._shapes.keys() - steps.keys() - nexts.keys())
        header, schema = words.described(RLlibJson.name, steps, self._ranges, dropped, num_repeated)
        return {**schema, **{name: schema[col.as_obs(name)] for name in nexts}}, header


def _lines_of(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines of a file with their numbers."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error}).") from error


def step_columns(batch: LineBatch, dropped: set[str], *, may_drop: bool = False) -> Columns:
    """The step columns and ``next_obs`` of a batch.

    Args:
        batch: The rows.
        dropped: RLlib's names of columns to leave out; columns that never become step columns are added.
        may_drop: Also add columns that do not hold numbers, unless they are observations, actions or rewards.

    Raises:
        DataError: a column does not hold numbers, or has other rows than the rewards.
    """
    out: Columns = {}
    names = roots(batch.columns)
    dropped |= batch.columns.keys() - names.keys() - set(_KNOWN)
    for name, root in names.items():
        if name in dropped:
            continue
        try:
            found = column(batch.columns[name], root)
        except DataError:
            if not may_drop or root in (col.OBS, col.ACTION, col.REWARD):
                raise
            dropped.add(name)
            continue
        for key, values in found.items():
            if values.ndim == 0 or len(values) != batch.num:
                raise DataError(f"`{name}` has {len(values) if values.ndim else 'no'} entries for {batch.num} rewards")
            plain = values.dtype == np.float64 and not isinstance(batch.columns[name], str)
            out[key] = values.astype(np.float32) if plain and root != col.REWARD and is_float32(values) else values
    return out


# -- sorting --------------------------------------------------------------------------------------------------------


_VERSION: Final = 2
"""Version of the sorted files; changing it invalidates cache entries."""
_CONTENTS: Final = "contents.json"
_BATCH_BYTES: Final = 2 * 2**20
"""The approximate size of rows that are passed to sorting together."""


def _convert(files: Sequence[AnyPath], folder: Path) -> None:
    scan, tracks = _Scan(files), sorting.TrackTable()
    for code, t in scan.looked_through():
        tracks.add(code, t)
    scan.check()
    schema, _ = scan.described(0)
    first = np.append(0, np.cumsum(scan.num_lines))
    copies = Counter[int]()  # by line of all files

    def kept(rows: sorting.KeyedRows) -> sorting.KeyedRows:
        keep = first_copies(rows)
        copies.update(np.asarray(rows.table[sorting.ROW])[~keep].tolist())
        return rows if keep.all() else rows.filtered(keep)

    sorting.write_sorted(tracks, _decoded_rows(scan, schema, first), folder / sorting.TABLE, kept)
    _, header = scan.described(copies.total())
    for line, count in sorted(copies.items()):
        file = int(np.searchsorted(first, line, side="right")) - 1
        row = line - int(first[file])
        text = f"{files[file]}: line {row + 1}: {count} rows are copies of rows on an earlier line; they are read once."
        scan.problems.append(Problem("duplicate", text, str(files[file]), row, "eps_id", count, True, harmless=True))
    problems = [dataclasses.asdict(problem) for problem in scan.problems]
    found = {"header": header.to_json(), "lines": scan.num_lines, "problems": problems}
    (folder / _CONTENTS).write_bytes(json.dumps(found).encode())


def _decoded_rows(scan: _Scan, schema: Schema, first: Ints) -> Iterator[sorting.KeyedRows]:
    """Yield the rows of all readable lines, with their columns."""
    trajectories, bad = Trajectories(), {(problem.file, problem.row) for problem in scan.problems}
    waiting: list[sorting.KeyedRows] = []
    size = 0
    for file, path in enumerate(scan.files):
        for number, line in _lines_of(path):
            if number > scan.num_lines[file]:
                break  # it has grown meanwhile
            for batch in batches_of(line) if (str(path), number - 1) not in bad else ():
                if not batch.num:
                    continue
                own = step_columns(batch, scan.dropped)
                code, t = trajectories.rows_of(batch, f"{path.stem}-{number}")
                try:
                    arrays = {n: list_array(words.cast(own[n], *form, n)) for n, form in schema.items()}
                except DataError as error:  # next observations that are unlike the observations
                    raise DataError(f"{path}: line {number}: {error}. {_REMEDY}.") from error
                arrays |= {col.TERMINATED: pa.array(batch.terminated), col.TRUNCATED: pa.array(batch.truncated)}
                line_index = np.full(batch.num, first[file] + number - 1)
                table = pa.table({**arrays, col.T_INDEX: t, sorting.ROW: line_index})
                waiting.append(sorting.KeyedRows(code, t, table))
                size += table.nbytes
            if size >= _BATCH_BYTES:
                yield _together(waiting, trajectories)
                waiting, size = [], 0
    if waiting:
        yield _together(waiting, trajectories)


def _together(parts: Sequence[sorting.KeyedRows], trajectories: Trajectories) -> sorting.KeyedRows:
    """Concatenate the rows of some batches, and add the names of their trajectories."""
    track, when = (np.concatenate(keys) for keys in list(zip(*parts, strict=True))[:2])
    table = pa.concat_tables([own.table for own in parts]).combine_chunks()
    codes, inverse = np.unique(track, return_inverse=True)
    named = list(zip(*(trajectories.names[i] for i in codes.tolist()), strict=True)) or [()] * len(TABLE_KEYS)
    for name, own in zip(TABLE_KEYS, named, strict=True):
        table = table.append_column(name, pa.array(own, pa.string()).take(pa.array(inverse)))
    return sorting.KeyedRows(track, when, table)
