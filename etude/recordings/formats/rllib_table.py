# SPDX-License-Identifier: Apache-2.0
"""RLlib's tabular recordings: Parquet files with a row a step (``output_write_episodes=False``).

Rows of one ``eps_id`` become an episode, in order of ``t`` where that column is there, else as their observations
chain: what was observed after one row is what the next one begins with. Files are taken in the order of their full
paths, which is RLlib's order of time. Without ``eps_id`` every row is a segment of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from etude.recordings.format import MAX_ROWS, Contents, FileFormat, Place, Problem, Unit
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import described, inferred_space, needs_range
from etude.recordings.formats.rllib_rows import Run, without_copies
from etude.recordings.formats.rllib_segments import Rows, in_time, segments_of
from etude.recordings.formats.rllib_table_files import ENDS, KEYS, OWN, Naming, TableFiles
from etude.recordings.layout import Header
from etude.spaces import Space

Schema = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


def is_table(schema: pa.Schema) -> bool:
    """Whether a Parquet file with this schema is of this format."""
    names = set(schema.names)
    return {"eps_id", "obs"} <= names or ({"obs", "actions", "rewards"} <= names and bool(names & {*ENDS, "new_obs"}))


class _Plan(NamedTuple):
    """What holds for all units."""

    table: TableFiles
    sources: Mapping[str, str]
    """For each of our columns, the file's."""
    schema: Schema


class _Unit(NamedTuple):
    runs: Sequence[tuple[int, Run]]
    """Each with the code of its episode."""
    names: Mapping[int, Naming]
    """By code."""
    suspect: set[int]
    """Episodes of which rows may still be there twice."""
    plan: _Plan


class RLlibTable(FileFormat):
    """A recording of RLlib's tables."""

    name = "rllib-table"

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Whether a Parquet file is of this format, by its schema."""
        try:
            return path.suffix == ".parquet" and is_table(footers.schema_of(path))
        except DataError:
            return False

    def describe(self) -> Contents:
        """What is there; the columns that tell of episodes are read.

        Raises:
            DataError: a file is broken or has other columns than the rest, or lacks one that is needed.
        """
        table = TableFiles(self.files)
        scanned, names = table.scan()
        copies: list[tuple[int, Run]] = []
        suspect: set[int] = set()
        parts = _parts_of(table, scanned, copies, suspect)
        if not parts[0]:
            raise DataError(f"{self.files[0]}: holds no rows. Record some, or give another folder.")
        plan, header = _described(table, parts[0][0][1], _num_copies(copies))
        units = []
        for k, runs in enumerate(parts):
            named = {code: names[code] for code, _ in runs if code >= 0}
            own = suspect & set(named)
            rows = None if own else sum(run.stop - run.start for _, run in runs)
            first = runs[0][1]
            file, row = table.parquet.file_of(first.group), table.parquet.file_row(first.group, first.start)
            units.append(Unit(k, rows, file, row, _Unit(runs, named, own, plan)))
        problems = []
        for code, run in copies:
            count = run.stop - run.start
            what = f"{count} rows of episode {names[code][0]!r} are there already; they are read once"
            problems.append(_note(table, "duplicate", what, run, "eps_id", count))
        return Contents(header, list(plan.schema), units, self.files, problems)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """A segment for each episode, or for each piece of it where rows are lost."""
        exp, rows = _loaded(unit.data, columns)
        if problems is not None:
            problems += _notes(unit.data, exp, rows)
        return exp

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Where a row is, as its file counts."""
        parquet = unit.data.plan.table.parquet
        run = _run_of(_loaded(unit.data, ())[1], unit.data.runs, row)
        place, file_row = parquet.place(run.group, run.start), parquet.file_row(run.group, run.start)
        return Place(place, str(parquet.file_of(run.group)), file_row)


# -- describing ------------------------------------------------------------------------------------------------


def _parts_of(
    table: TableFiles, episodes: Mapping[int, list[Run]], copies: list[tuple[int, Run]], suspect: set[int]
) -> list[list[tuple[int, Run]]]:
    """The rows in parts of whole episodes; rows without episodes in ranges of rows."""
    if "eps_id" not in table.fields:
        starts = [(g, a, n) for g, n in enumerate(table.parquet.group_rows) for a in range(0, n, MAX_ROWS)]
        return [[(-1, Run(g, a, min(a + MAX_ROWS, n), False, 0))] for g, a, n in starts] or [[]]
    parts: list[list[tuple[int, Run]]] = [[]]
    size, has_t = 0, table.has_t
    found = {code: without_copies(runs, has_t) for code, runs in episodes.items()}
    mixed = table.not_the_same({code: episodes[code] for code, (_, again, _) in found.items() if again})
    in_order = {code: sorted(episodes[code], key=lambda run: run.t) if has_t else episodes[code] for code in mixed}
    found |= {code: (runs, [], not has_t) for code, runs in in_order.items()}
    for code, (kept, again, is_suspect) in found.items():
        copies += [(code, copy) for copy in again]
        if is_suspect:
            suspect.add(code)
        rows = sum(run.stop - run.start for run in kept)
        if size and size + rows > MAX_ROWS:
            parts.append([])
            size = 0
        parts[-1] += [(code, run) for run in kept]
        size += rows
    return parts


def _described(table: TableFiles, first: Run, num_copies: int) -> tuple[_Plan, Header]:
    names = sorted(name for name in table.fields if name not in KEYS)  # as `read` reads them: they are kept
    sample = table.parquet.read(first.group, names).slice(first.start, min(1000, first.stop - first.start))
    flat: Columns = {}
    sources: dict[str, str] = {}
    dropped = []
    for name in table.fields:
        if name in (*KEYS, *ENDS, "new_obs"):
            continue
        try:
            columns = table.column(sample, name, 0, first.start)
        except DataError:
            if name in OWN:
                raise
            dropped.append(name)
            continue
        flat |= columns
        sources |= dict.fromkeys(columns, name)
    obs, action = (_inferred(table, flat, name, root) for name, root in (("obs", col.OBS), ("actions", col.ACTION)))
    meta: dict[str, Any] = {
        "format": RLlibTable.name,
        "actions": words.ACTIONS_NOTE,
        "duplicates": num_copies,
        "inferred": [col.OBS, col.ACTION],
    }
    header = Header(obs, action, None, meta | ({"dropped": dropped} if dropped else {}))
    leaves = {**header.obs_leaves(), **header.action_leaves()}
    schema = {n: (words.schema_dtype(n, column.dtype, leaves.get(n)), column.shape[1:]) for n, column in flat.items()}
    return _Plan(table, sources, schema), header


def _num_copies(copies: Sequence[tuple[int, Run]]) -> int:
    """How many episodes stand there again: copies that end, or one for each that has rows twice without an end."""
    ended = [code for code, run in copies if run.done]
    return len(ended) + len({code for code, _ in copies} - set(ended))


def _inferred(table: TableFiles, flat: Columns, name: str, root: str) -> Space:
    """A space from what the column holds: where it holds integers, from all rows."""
    found = described(col.subtree(flat, root))
    ranges = table.ranges(name, root) if any(needs_range(n, *own) for n, own in found.items()) else {}
    return inferred_space(found, root, ranges)


# -- reading ---------------------------------------------------------------------------------------------------


def _loaded(unit: _Unit, names: Sequence[str]) -> tuple[Experience, Rows]:
    runs, plan, fields = unit.runs, unit.plan, unit.plan.table.fields
    order_needs_obs = not plan.table.has_t and "eps_id" in fields and "new_obs" in fields
    obs = [name for name in plan.schema if col.is_under(name, col.OBS)]
    wants_obs = any(name in obs for name in names)
    sources = {plan.sources[name] for name in names}
    if order_needs_obs or wants_obs:
        sources |= {"obs", "new_obs"} & set(fields)
    steps, ends = _gathered(plan, runs, [*sources, *(n for n in ENDS if n in fields)])
    next_obs = col.renamed(steps, col.NEXT_OBS, col.OBS)
    lengths = np.array([run.stop - run.start for _, run in runs])
    rows = Rows(
        code=np.repeat([code for code, _ in runs], lengths),
        t=ranges(np.array([run.t for _, run in runs], np.int64), lengths),
        **ends,
    )
    if "eps_id" not in fields:
        rows.one_step_each(int(runs[0][1].start), plan.table.parquet.file_row(runs[0][1].group, 0))
    elif plan.table.has_t:
        rows.cut_where_time_jumps()
    elif order_needs_obs:
        in_time(rows, col.subtree(steps, col.OBS), next_obs, unit.suspect)
    segments = segments_of(rows, _naming(unit), "new_obs" in fields)
    last = rows.order[rows.offsets[1:] - 1]
    finals = {n: next_obs[n][last] if next_obs else np.zeros_like(steps[n][last]) for n in obs if n in names}
    in_order = rows.in_order
    kept = {name: steps[name] if in_order else steps[name][rows.order] for name in names}
    return Experience(kept, rows.offsets, segments, finals), rows


def _naming(unit: _Unit) -> Any:
    if unit.names:
        return unit.names.__getitem__
    path = unit.plan.table.parquet.file_of(unit.runs[0][1].group)
    return lambda row: (f"{path.stem}-{row}", None, None)


def _gathered(plan: _Plan, part: Sequence[tuple[int, Run]], sources: list[str]) -> tuple[Columns, dict[str, Any]]:
    """The columns of a unit's rows, in the order of its runs, and the flags."""
    by_group: dict[int, list[int]] = {}
    for i, (_, run) in enumerate(part):
        by_group.setdefault(run.group, []).append(i)
    pieces: list[Columns] = []
    for group, which in by_group.items():
        pieces.append(_rows_of(plan, group, [part[i][1] for i in which], sources))
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


def _rows_of(plan: _Plan, group: int, runs: list[Run], sources: list[str]) -> Columns:
    table = plan.table.parquet.read(group, sorted(sources))
    starts, lengths = np.array([run.start for run in runs]), np.array([run.stop - run.start for run in runs])
    first = int(starts[0])
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        table, index = table.slice(first, int(lengths.sum())), None
    else:
        index = ranges(starts, lengths)
        table = table.take(pa.array(index))
    out: Columns = {}
    for name in sources:
        columns = plan.table.column(table, name, group, first, index)
        own = name if name in ENDS else None
        for key, column in columns.items():
            out[key] = column if own else _as_elsewhere(plan, key, column, group)
    return out


def _as_elsewhere(plan: _Plan, name: str, column: NDArray[Any], group: int) -> NDArray[Any]:
    like = col.OBS + name[len(col.NEXT_OBS) :] if col.is_under(name, col.NEXT_OBS) else name
    try:
        if like not in plan.schema:
            raise DataError(f"`{name}` has another structure than in the first rows")
        return words.cast(column, *plan.schema[like], name)
    except DataError as error:
        where = plan.table.parquet.file_of(group)
        raise DataError(f"{where}: {error}. Write the recording again, or move this file away.") from error


# -- problems --------------------------------------------------------------------------------------------------


def _notes(unit: _Unit, exp: Experience, rows: Rows) -> Iterator[Problem]:
    table = unit.plan.table
    if rows.repeated:
        what = f"{rows.repeated} rows are there twice; they are read once"
        yield _note(table, "duplicate", what, unit.runs[0][1], "eps_id")
    for i in np.flatnonzero(~exp.segments.done) if "eps_id" in table.fields else ():
        run = _run_of(rows, unit.runs, int(exp.offsets[i + 1]) - 1)
        what = (
            f"episode {exp.segments.episode_id[i]!r} is cut after this row: it is neither terminated nor truncated, "
            "and no row continues it"
        )
        yield _note(table, "not_done", what, run, "terminateds")


def _run_of(rows: Rows, runs: Sequence[tuple[int, Run]], row: int) -> Run:
    """The rows from one of a unit on, as they stand in their row group."""
    starts = offsets_of(np.array([run.stop - run.start for _, run in runs]))
    at = int(rows.order[row])
    i = int(np.searchsorted(starts, at, side="right")) - 1
    run = runs[i][1]
    return run._replace(start=run.start + at - int(starts[i]))


def _note(table: TableFiles, kind: str, what: str, run: Run, column: str, count: int = 1) -> Problem:
    row, place = table.parquet.file_row(run.group, run.start), table.parquet.place(run.group, run.start)
    file = str(table.parquet.file_of(run.group))
    return Problem(kind, f"{place}: {what}.", file, row, column, count, True, harmless=True)
