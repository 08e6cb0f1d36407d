# SPDX-License-Identifier: Apache-2.0
"""RLlib's tabular recordings: Parquet files with a row a step (``output_write_episodes=False``).

Rows of one ``eps_id`` become an episode, in order of ``t`` where that column is there, else as their observations
chain: what was observed after one row is what the next one begins with. Files are taken in the order of their full
paths, which is RLlib's order of time. Without ``eps_id`` every row is a segment of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import described, inferred_space, needs_range
from etude.recordings.formats.parts import MAX_ROWS, Place, Problem, chosen
from etude.recordings.formats.rllib_files import found_files
from etude.recordings.formats.rllib_rows import Run, without_copies
from etude.recordings.formats.rllib_segments import Rows, in_time, segments_of
from etude.recordings.formats.rllib_table_files import ENDS, KEYS, OWN, TableFiles
from etude.recordings.layout import Header
from etude.spaces import Space


def detect(path: AnyPath) -> bool:
    """Whether a Parquet file is of this format, by its schema."""
    try:
        return is_table(footers.schema_of(path))
    except DataError:
        return False


def is_table(schema: pa.Schema) -> bool:
    """Whether a Parquet file with this schema is of this format."""
    names = set(schema.names)
    return {"eps_id", "obs"} <= names or ({"obs", "actions", "rewards"} <= names and bool(names & {*ENDS, "new_obs"}))


def open_parts(paths: AnyPath | Sequence[AnyPath]) -> "RLlibTable":
    """Open a recording: a folder, a file or several of them.

    Raises:
        DataError: there is none, a file is broken or has other columns than the rest, or lacks one that is needed.
    """
    return RLlibTable(found_files(paths, (".parquet",)))


class RLlibTable:
    """See `etude.recordings.formats.parts.Parts`."""

    format = "rllib-table"

    def __init__(self, files: Sequence[AnyPath]) -> None:
        self.files = list(files)
        self._table = TableFiles(files)
        self._parquet = self._table.parquet
        self._parts: list[list[tuple[int, Run]]] = [[]]
        self._copies: list[tuple[int, Run]] = []
        self._suspect: set[int] = set()  # episodes of which rows may still be there twice
        self._plan(self._table.scan())
        if not self._parts[0]:
            raise DataError(f"{files[0]}: holds no rows. Record some, or give another folder.")
        self._describe()

    # -- opening -----------------------------------------------------------------------------------------------

    def _plan(self, episodes: dict[int, list[Run]]) -> None:
        """Cut the rows into parts of whole episodes; rows without episodes into ranges of rows."""
        size = 0
        found = {code: without_copies(runs, self._table.has_t) for code, runs in episodes.items()}
        mixed = self._table.not_the_same({code: episodes[code] for code, (_, copies, _) in found.items() if copies})
        has_t = self._table.has_t
        in_order = {code: sorted(episodes[code], key=lambda run: run.t) if has_t else episodes[code] for code in mixed}
        found |= {code: (runs, [], not has_t) for code, runs in in_order.items()}
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
        if "eps_id" not in self._table.fields:
            starts = [(g, a, n) for g, n in enumerate(self._parquet.group_rows) for a in range(0, n, MAX_ROWS)]
            self._parts = [[(-1, Run(g, a, min(a + MAX_ROWS, n), False, 0))] for g, a, n in starts] or [[]]

    def _describe(self) -> None:
        sample = self._sample()
        flat: Columns = {}
        self._sources: dict[str, str] = {}  # our column to the file's
        dropped = []
        for name in self._table.fields:
            if name in (*KEYS, *ENDS, "new_obs"):
                continue
            try:
                columns = self._table.column(sample, name, 0, self._parts[0][0][1].start)
            except DataError:
                if name in OWN:
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
        names = sorted(name for name in self._table.fields if name not in KEYS)  # as `load` reads them: they are kept
        return self._parquet.read(run.group, names).slice(run.start, min(1000, run.stop - run.start))

    def _num_copies(self) -> int:
        """How many episodes stand there again: copies that end, or one for each that has rows twice without an end."""
        ended = sum(run.done for _, run in self._copies)
        return ended + len({code for code, _ in self._copies} - {code for code, run in self._copies if run.done})

    def _inferred(self, columns: Columns, name: str, root: str) -> Space:
        """A space from what the column holds: where it holds integers, from all rows."""
        found = described(columns)
        ranges = self._table.ranges(name, root) if any(needs_range(n, *own) for n, own in found.items()) else {}
        return inferred_space(found, root, ranges)

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

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Part ``k``, and what is odd about it, but does no harm."""
        exp, rows = self._loaded(k, chosen(self.columns, columns, str(self.files[0])))
        return exp, list(self._notes(exp, rows, self._parts[k]))

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is."""
        run = self._run_of(self._loaded(k, [])[1], self._parts[k], row)
        file_row = self._parquet.file_row(run.group, run.start)
        return Place(self._parquet.place(run.group, run.start), str(self._file(run)), file_row)

    def _loaded(self, k: int, names: list[str]) -> tuple[Experience, Rows]:
        part = self._parts[k]
        order_needs_obs = not self._table.has_t and "eps_id" in self._table.fields and "new_obs" in self._table.fields
        obs = [name for name in self.columns if col.is_under(name, col.OBS)]
        wants_obs = any(name in obs for name in names)
        sources = {self._sources[name] for name in names}
        if order_needs_obs or wants_obs:
            sources |= {"obs", "new_obs"} & set(self._table.fields)
        steps, ends = self._gathered(part, [*sources, *(n for n in ENDS if n in self._table.fields)])
        next_obs = col.renamed(steps, col.NEXT_OBS, col.OBS)
        lengths = np.array([run.stop - run.start for _, run in part])
        rows = Rows(
            code=np.repeat([code for code, _ in part], lengths),
            t=ranges(np.array([run.t for _, run in part], np.int64), lengths),
            **ends,
        )
        if "eps_id" not in self._table.fields:
            rows.one_step_each(int(part[0][1].start), self._parquet.file_row(part[0][1].group, 0))
        elif self._table.has_t:
            rows.cut_where_time_jumps()
        elif order_needs_obs:
            in_time(rows, col.subtree(steps, col.OBS), next_obs, self._suspect)
        segments = segments_of(rows, self._naming(part), "new_obs" in self._table.fields)
        last = rows.order[rows.offsets[1:] - 1]
        finals = {n: next_obs[n][last] if next_obs else np.zeros_like(steps[n][last]) for n in obs if n in names}
        in_order = rows.in_order
        kept = {name: steps[name] if in_order else steps[name][rows.order] for name in names}
        return Experience(kept, rows.offsets, segments, finals), rows

    def _naming(self, part: Sequence[tuple[int, Run]]) -> Any:
        if "eps_id" in self._table.fields:
            return lambda code: (*self._table.names[code], self._table.modules.get(code))
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
        whole = pieces[0]
        if len(pieces) > 1:
            whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in whole}
        order = [i for which in by_group.values() for i in which]
        if order != sorted(order):
            lengths = np.array([part[i][1].stop - part[i][1].start for i in order])
            starts = offsets_of(lengths)[:-1]
            back = np.argsort(order)
            whole = {name: column[ranges(starts[back], lengths[back])] for name, column in whole.items()}
        nothing = np.zeros(sum(run.stop - run.start for _, run in part), bool)
        flags = {name: whole.pop(name, nothing).astype(bool) for name in ENDS}
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
            columns = self._table.column(table, name, group, first, index)
            own = name if name in ENDS else None
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

    # -- problems ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Rows that are there twice."""
        for code, run in self._copies:
            count, episode = run.stop - run.start, self._table.names[code][0]
            what = f"{count} rows of episode {episode!r} are there already; they are read once"
            yield self._note("duplicate", what, run, "eps_id", count)

    def _notes(self, exp: Experience, rows: Rows, part: Sequence[tuple[int, Run]]) -> Iterator[Problem]:
        if rows.repeated:
            run = part[0][1]
            yield self._note("duplicate", f"{rows.repeated} rows are there twice; they are read once", run, "eps_id")
        for i in np.flatnonzero(~exp.segments.done):
            if "eps_id" in self._table.fields:
                run = self._run_of(rows, part, int(exp.offsets[i + 1]) - 1)
                what = (f"episode {exp.segments.episode_id[i]!r} is cut after this row: it is neither terminated nor "
                        "truncated, and no row continues it")  # fmt: skip
                yield self._note("not_done", what, run, "terminateds")

    def _run_of(self, rows: Rows, part: Sequence[tuple[int, Run]], row: int) -> Run:
        """The rows from one of a part on, as they stand in their row group."""
        starts = offsets_of(np.array([run.stop - run.start for _, run in part]))
        at = int(rows.order[row])
        i = int(np.searchsorted(starts, at, side="right")) - 1
        run = part[i][1]
        return run._replace(start=run.start + at - int(starts[i]))

    def _note(self, kind: str, what: str, run: Run, column: str, count: int = 1) -> Problem:
        row = self._parquet.file_row(run.group, run.start)
        place = self._parquet.place(run.group, run.start)
        return Problem(kind, f"{place}: {what}.", str(self._file(run)), row, column, count, True, harmless=True)

    def _file(self, run: Run) -> AnyPath:
        return self.files[self._parquet.groups[run.group][0]]
