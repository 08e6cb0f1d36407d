# SPDX-License-Identifier: Apache-2.0
"""RLlib's tabular recordings: Parquet files with a row a step (``output_write_episodes=False``).

Rows of one ``eps_id`` become an episode, in order of ``t`` where that column is there, else as their observations
chain: what was observed after one row is what the next one begins with. Files are taken in the order of their full
paths, which is RLlib's order of time. Without ``eps_id`` every row is a segment of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.experience.experience import offsets_of
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.parts import MAX_ROWS, Problem, chosen
from etude.recordings.formats.rllib_arrow import RowError, columns_of, largest
from etude.recordings.formats.rllib_files import ParquetFiles, found_files
from etude.recordings.formats.rllib_rows import Run, hashes_of, rounds_of, runs_of, without_copies
from etude.recordings.formats.rllib_segments import Rows, in_time, not_finite, segments_of
from etude.recordings.manifest import Header

_REQUIRED: Final = ("obs", "actions", "rewards")
_ENDS: Final = ("terminateds", "truncateds", "dones")
_KEYS: Final = ("eps_id", "agent_id", "module_id", "t")
_OWN: Final = {"obs": col.OBS, "actions": col.ACTION, "rewards": col.REWARD}
_REMEDY: Final = "Leave this row out, or write the recording again"


def detect(path: Path) -> bool:
    """Whether a Parquet file is of this format, by its schema."""
    try:
        return is_table(pq.read_schema(path))
    except (pa.ArrowException, OSError):
        return False


def is_table(schema: pa.Schema) -> bool:
    """Whether a Parquet file with this schema is of this format."""
    names = set(schema.names)
    return {"eps_id", "obs"} <= names or ({"obs", "actions", "rewards"} <= names and bool(names & {*_ENDS, "new_obs"}))


def open_parts(paths: Path | Sequence[Path]) -> "RLlibTable":
    """Open a recording: a folder, a file or several of them.

    Raises:
        DataError: there is none, a file is broken or has other columns than the rest, or lacks one that is needed.
    """
    return RLlibTable(found_files(paths, (".parquet",)))


class RLlibTable:
    """See `etude.recordings.formats.parts.Parts`."""

    format = "rllib-table"

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._parquet = ParquetFiles(files)
        self._fields = self._checked_fields()
        self._modules: dict[int, str | None] = {}
        self._names: list[tuple[str, str | None]] = []  # episode and agent, by code
        self._parts: list[list[tuple[int, Run]]] = [[]]
        self._copies: list[tuple[int, Run]] = []
        self._suspect: set[int] = set()  # episodes of which rows may still be there twice
        self._plan(self._scan())
        if not self._parts[0]:
            raise DataError(f"{files[0]}: holds no rows. Record some, or give another folder.")
        self._describe()

    # -- opening -----------------------------------------------------------------------------------------------

    def _checked_fields(self) -> dict[str, pa.Field]:
        first = self._parquet.schema(0)
        for i, path in enumerate(self.files):
            names = self._parquet.schema(i).names
            missing = [name for name in _REQUIRED if name not in names]
            if missing:
                listed = ", ".join(names[:20])
                raise DataError(
                    f"{path}: has no column `{missing[0]}`, which a table of steps needs; it has {listed}. If another "
                    "column holds it, read the file as a table with a schema of your own."
                )
            lost = [name for name in first.names if name not in names]
            if lost:
                raise DataError(
                    f"{path}: has no column `{lost[0]}`, but {self.files[0]} has. A recording has the same columns "
                    "everywhere: move one of them to a folder of its own."
                )
        return {name: first.field(name) for name in first.names}

    @property
    def _has_t(self) -> bool:
        return "t" in self._fields and pa.types.is_integer(self._fields["t"].type)

    def _scan(self) -> dict[int, list[Run]]:
        """The runs of every episode, in the order in which the episodes come first."""
        episodes: dict[int, list[Run]] = {}
        if "eps_id" not in self._fields:
            return episodes
        codes: dict[tuple[str, str | None], int] = {}
        wanted = [n for n in (*_KEYS, *_ENDS) if n in self._fields and not pa.types.is_null(self._fields[n].type)]
        for group in range(len(self._parquet.groups)):
            table = self._parquet.read(group, wanted, text_codes=[n for n in _KEYS[:3] if n in wanted])
            try:
                own = self._codes(table, codes, group)
            except (pa.ArrowException, UnicodeDecodeError) as error:
                where = self._parquet.place(group, 0)
                raise DataError(f"{where} or a later one: its `eps_id` can't be decoded ({error}). {_REMEDY}.") from error
            done = np.zeros(table.num_rows, bool)
            for name in _ENDS:
                if name in wanted:
                    done |= self._column(table, name, group, 0)[name].astype(bool)
            t = self._column(table, "t", group, 0)["t"].astype(np.int64) if self._has_t else None
            for code, run in runs_of(group, own, done, t):
                episodes.setdefault(code, []).append(run)
        self._names = list(codes)
        return episodes

    def _codes(self, table: pa.Table, codes: dict[tuple[str, str | None], int], group: int) -> NDArray[np.int64]:
        """int64 ``[rows]``: the episode and agent of each row, as a number."""
        texts: list[tuple[NDArray[np.int64], list[str | None]]] = []
        for name in _KEYS[:3]:
            if name not in table.schema.names:
                texts.append((np.zeros(table.num_rows, np.int64), [None]))
                continue
            coded = table[name].combine_chunks()
            coded = pa.concat_arrays(coded.chunks) if isinstance(coded, pa.ChunkedArray) else coded
            coded = coded if pa.types.is_dictionary(coded.type) else coded.dictionary_encode()
            if coded.null_count and name == "eps_id":
                row = int(np.flatnonzero(coded.is_null().to_numpy(zero_copy_only=False))[0])
                raise DataError(f"{self._parquet.place(group, row)}: column `eps_id` is empty. {_REMEDY}.")
            coded.validate(full=True)
            index = coded.indices.fill_null(-1).to_numpy().astype(np.int64)
            texts.append((index, [*(str(v) for v in coded.dictionary.to_pylist()), None]))
        (eps, eps_names), (agent, agent_names), (module, module_names) = texts
        both = eps * len(agent_names) + agent % len(agent_names)
        distinct, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        own = np.empty(len(distinct), np.int64)
        for i in np.argsort(first):
            row = first[i]
            own[i] = codes.setdefault((str(eps_names[eps[row]]), agent_names[agent[row]]), len(codes))
            self._modules.setdefault(int(own[i]), module_names[module[row]])
        return np.asarray(own[inverse.reshape(-1)], np.int64)

    def _plan(self, episodes: dict[int, list[Run]]) -> None:
        """Cut the rows into parts of whole episodes; rows without episodes into ranges of rows."""
        size = 0
        found = {code: without_copies(runs, self._has_t) for code, runs in episodes.items()}
        if not self._has_t:
            mixed = self._not_the_same({code: episodes[code] for code, (_, copies, _) in found.items() if copies})
            found |= {code: (episodes[code], [], True) for code in mixed}
        for code, (kept, copies, suspect) in found.items():
            self._copies += [(code, copy) for copy in copies]
            if suspect:
                self._suspect.add(code)
            rows = sum(run.stop - run.start for run in kept)
            if size and size + rows > MAX_ROWS:
                self._parts.append([])
                size = 0
            self._parts[-1] += [(code, run) for run in kept]
            size += rows
        if "eps_id" not in self._fields:
            ranges_ = [Run(g, a, min(a + MAX_ROWS, n), False, 0)
                       for g, n in enumerate(self._parquet.group_rows) for a in range(0, n, MAX_ROWS)]  # fmt: skip
            self._parts = [[(-1, run)] for run in ranges_] or [[]]

    def _not_the_same(self, episodes: dict[int, list[Run]]) -> list[int]:
        """Those of these episodes, which end several times, whose rows up to each end are not the same rows again."""
        rows: dict[Run, NDArray[np.uint64]] = {}
        by_group: dict[int, list[Run]] = {}
        for runs in episodes.values():
            for run in runs:
                by_group.setdefault(run.group, []).append(run)
        names = [name for name in ("obs", "new_obs", "actions", "rewards") if name in self._fields]
        for group, runs in sorted(by_group.items()):
            table = self._parquet.read(group, names)
            hashes = hashes_of({k: c for name in names for k, c in self._column(table, name, group, 0).items()})
            rows |= {run: hashes[run.start : run.stop] for run in runs}
        out = []
        for code, runs in episodes.items():
            first, *others = [np.concatenate([rows[run] for run in part]) for part in rounds_of(runs)]
            if not all(np.array_equal(first, other) for other in others):
                out.append(code)
        return out

    def _describe(self) -> None:
        sample = self._sample()
        flat: Columns = {}
        self._sources: dict[str, str] = {}  # our column to the file's
        dropped = []
        for name in self._fields:
            if name in (*_KEYS, *_ENDS, "new_obs"):
                continue
            try:
                columns = self._column(sample, name, 0, self._parts[0][0][1].start)
            except DataError:
                if name in _OWN:
                    raise
                dropped.append(name)
                continue
            flat |= columns
            self._sources |= dict.fromkeys(columns, name)
        spaces = {root: self._inferred(col.subtree(flat, root), name, root)
                  for name, root in (("obs", col.OBS), ("actions", col.ACTION))}  # fmt: skip
        meta: dict[str, Any] = {
            "format": self.format,
            "actions": words.ACTIONS_NOTE,
            "duplicates": self._num_copies(),
            "inferred": [col.OBS, col.ACTION],
        }
        meta |= {"dropped": dropped} if dropped else {}
        self.header = Header(spaces[col.OBS], spaces[col.ACTION], None, meta)
        leaves = {**self.header.obs_leaves(), **self.header.action_leaves()}
        self._schema = {
            name: (words.schema_dtype(name, column.dtype, leaves.get(name)), column.shape[1:])
            for name, column in flat.items()
        }
        self.columns = list(self._schema)

    def _sample(self) -> pa.Table:
        run = self._parts[0][0][1]
        return self._parquet.read(run.group, list(self._fields)).slice(run.start, min(1000, run.stop - run.start))

    def _inferred(self, columns: Columns, name: str, root: str) -> Any:
        """A space from what the column holds: where it holds integers, from all rows."""
        found: dict[str, tuple[Any, Any]] = {}
        if any(c.dtype.kind in "iu" and (root == col.ACTION or c.ndim == 1) for c in columns.values()):
            for group in range(len(self._parquet.groups)):
                if not self._from_statistics(group, name, root, found):
                    largest(self._column(self._parquet.read(group, [name]), name, group, 0), root, found)
        return words.inferred_space(columns, root, found)

    def _from_statistics(self, group: int, name: str, root: str, found: dict[str, tuple[Any, Any]]) -> bool:
        """Widen ``found`` by the footer's minimum and maximum; False where it does not tell."""
        kind = self._fields[name].type
        if not (pa.types.is_integer(kind) or pa.types.is_struct(kind)):
            return False
        file, own = self._parquet.groups[group]
        row_group = self._parquet.metadata[file].row_group(own)
        for i in range(row_group.num_columns):
            column = row_group.column(i)
            try:
                path = column.path_in_schema.replace(".", col.SEPARATOR)
            except UnicodeDecodeError:
                return False
            leaf = root + path[len(name) :]
            if not col.is_under(path, name) or column.physical_type not in ("INT32", "INT64"):
                continue
            if not column.is_stats_set or not column.statistics.has_min_max:
                return False
            low, high = np.int64(column.statistics.min), np.int64(column.statistics.max)
            if leaf in found:
                low, high = min(low, found[leaf][0]), max(high, found[leaf][1])
            found[leaf] = (low, high)
        return True

    def _num_copies(self) -> int:
        """How many episodes stand there again: copies that end, or one for each that has rows twice without an end."""
        ended = sum(run.done for _, run in self._copies)
        return ended + len({code for code, _ in self._copies} - {code for code, run in self._copies if run.done})

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """The pieces: whole episodes of 65,536 rows at most together, unless one is longer."""
        return len(self._parts)

    def rows(self, k: int) -> int:
        """The steps of part ``k``; reads it where rows of it may be there twice."""
        if any(code in self._suspect for code, _ in self._parts[k]):
            return self.load(k, [col.REWARD]).num_steps
        return sum(run.stop - run.start for _, run in self._parts[k])

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``: a segment for each episode, or for each piece of it where rows are lost; see `Parts.load`."""
        return self._loaded(k, chosen(self.columns, columns, str(self.files[0])))[0]

    def _loaded(self, k: int, names: list[str]) -> tuple[Experience, Rows]:
        part = self._parts[k]
        order_needs_obs = not self._has_t and "eps_id" in self._fields and "new_obs" in self._fields
        obs = [name for name in self.columns if col.is_under(name, col.OBS)]
        wants_obs = any(name in obs for name in names)
        sources = {self._sources[name] for name in names}
        if order_needs_obs or wants_obs:
            sources |= {"obs", "new_obs"} & set(self._fields)
        steps, ends = self._gathered(part, [*sources, *(n for n in _ENDS if n in self._fields)])
        next_obs = col.renamed(steps, col.NEXT_OBS, col.OBS)
        rows = Rows(
            code=np.repeat([code for code, _ in part], [run.stop - run.start for _, run in part]),
            t=np.concatenate([np.arange(run.t, run.t + run.stop - run.start) for _, run in part]),
            **ends,
        )
        if "eps_id" not in self._fields:
            rows.one_step_each(int(part[0][1].start), self._parquet.file_row(part[0][1].group, 0))
        elif self._has_t:
            rows.cut_where_time_jumps()
        elif order_needs_obs:
            in_time(rows, col.subtree(steps, col.OBS), next_obs, self._suspect)
        segments = segments_of(rows, self._naming(part), bool(next_obs))
        last = rows.order[rows.offsets[1:] - 1]
        finals = {n: next_obs[n][last] if next_obs else np.zeros_like(steps[n][last]) for n in obs if n in names}
        kept = {name: steps[name] if rows.in_order else steps[name][rows.order] for name in names}
        return Experience(kept, rows.offsets, segments, finals), rows

    def _naming(self, part: Sequence[tuple[int, Run]]) -> Any:
        if "eps_id" in self._fields:
            return lambda code: (*self._names[code], self._modules.get(code))
        path = self.files[self._parquet.groups[part[0][1].group][0]]
        return lambda row: (f"{path.stem}-{row}", None, None)

    def _gathered(self, part: Sequence[tuple[int, Run]], sources: list[str]) -> tuple[Columns, dict[str, Any]]:
        """The columns of a part's rows, in the order of its runs, and the flags."""
        by_group: dict[int, list[int]] = {}
        for i, (_, run) in enumerate(part):
            by_group.setdefault(run.group, []).append(i)
        pieces: list[Columns] = []
        for group, which in by_group.items():
            pieces.append(self._rows_of(group, [part[i][1] for i in which], sources))
        whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        order = [i for which in by_group.values() for i in which]
        if order != sorted(order):
            lengths = np.array([part[i][1].stop - part[i][1].start for i in order])
            starts = offsets_of(lengths)[:-1]
            back = np.argsort(order)
            whole = {name: column[ranges(starts[back], lengths[back])] for name, column in whole.items()}
        nothing = np.zeros(sum(run.stop - run.start for _, run in part), bool)
        flags = {name: whole.pop(name, nothing).astype(bool) for name in _ENDS}
        return whole, {"terminated": flags["terminateds"] | flags["dones"], "truncated": flags["truncateds"]}

    def _rows_of(self, group: int, runs: list[Run], sources: list[str]) -> Columns:
        table = self._parquet.read(group, sorted(sources))
        starts, lengths = np.array([run.start for run in runs]), np.array([run.stop - run.start for run in runs])
        first = int(starts[0])
        if (starts[1:] == starts[:-1] + lengths[:-1]).all():
            table, index = table.slice(first, int(lengths.sum())), None
        else:
            index = ranges(starts, lengths)
            table = table.take(pa.array(index))
        out: Columns = {}
        for name in sources:
            columns = self._column(table, name, group, first, index)
            own = name if name in _ENDS else None
            for key, column in columns.items():
                out[key] = column if own else self._as_elsewhere(key, column, group)
        return out

    def _as_elsewhere(self, name: str, column: NDArray[Any], group: int) -> NDArray[Any]:
        like = col.OBS + name[len(col.NEXT_OBS) :] if col.is_under(name, col.NEXT_OBS) else name
        try:
            if like not in self._schema:
                raise DataError(f"`{name}` has another structure than in the first rows")
            return words.cast(column, *self._schema[like], name)
        except DataError as error:
            where = self.files[self._parquet.groups[group][0]]
            raise DataError(f"{where}: {error}. Write the recording again, or move this file away.") from error

    def _column(
        self, table: pa.Table, name: str, group: int, first: int, index: NDArray[np.int64] | None = None
    ) -> Columns:
        """One column of the file, flat and under our name."""
        root = _OWN.get(name) or (col.NEXT_OBS if name == "new_obs" else name if name in (*_KEYS, *_ENDS) else None)
        try:
            return columns_of(table[name], table.schema.field(name), root or words.own_name(name))
        except DataError as error:
            row = error.row if isinstance(error, RowError) else 0
            place = self._parquet.place(group, int(index[row]) if index is not None else first + row)
            raise DataError(f"{place}, column `{name}`: {error}. {_REMEDY}.") from error
        except (pa.ArrowException, ValueError, TypeError, OverflowError, MemoryError) as error:
            file = self.files[self._parquet.groups[group][0]]
            raise DataError(f"{file}: column `{name}` can't be decoded ({str(error)[:200]}).") from error

    # -- problems ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Rows there twice, rows that can't be read, ends that are missing, and numbers that are not finite."""
        for code, run in self._copies:
            if run.done or run.stop - run.start > 0:
                what = f"{run.stop - run.start} rows of episode {self._names[code][0]!r} are there already; read once"
                yield self._problem("duplicate", what, run, "eps_id", run.stop - run.start)
        for k, part in enumerate(self._parts):
            try:
                exp, rows = self._loaded(k, self.columns)
            except DataError as error:
                run = part[0][1]
                yield Problem("unreadable", str(error), str(self._file(run)), None, None, run.stop - run.start, True)
                continue
            yield from self._problems_of(exp, rows, part)

    def _problems_of(self, exp: Experience, rows: Rows, part: Sequence[tuple[int, Run]]) -> Iterator[Problem]:
        starts = offsets_of(np.array([run.stop - run.start for _, run in part]))

        def run_of(row: int) -> Run:
            i = int(np.searchsorted(starts, rows.order[row], side="right")) - 1
            run = part[i][1]
            return run._replace(start=run.start + int(rows.order[row] - starts[i]))

        if rows.repeated:
            run = part[0][1]
            yield self._problem("duplicate", f"{rows.repeated} rows are there twice; they are read once", run, "eps_id")
        for i in np.flatnonzero(~exp.segments.done):
            last = int(exp.offsets[i + 1]) - 1
            if "eps_id" in self._fields:
                what = (f"episode {exp.segments.episode_id[i]!r} is cut after this row: it is neither terminated nor "
                        "truncated, and no row continues it")  # fmt: skip
                yield self._problem("not_done", what, run_of(last), "terminateds")
        for name, row, value, count in not_finite(exp):
            source: Mapping[str, str] = self._sources
            what = f"`{name}` holds {value} ({count} numbers like it)"
            yield self._problem("nan", what, run_of(row), source.get(name, "new_obs"), count)

    def _problem(self, kind: str, what: str, run: Run, column: str, count: int = 1) -> Problem:
        row = self._parquet.file_row(run.group, run.start)
        place = self._parquet.place(run.group, run.start)
        return Problem(kind, f"{place}: {what}.", str(self._file(run)), row, column, count, True)

    def _file(self, run: Run) -> Path:
        return self.files[self._parquet.groups[run.group][0]]
