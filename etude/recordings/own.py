# SPDX-License-Identifier: Apache-2.0
"""Etude's own format: units are the row groups of Parquet files."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.arrays import describe
from etude.experience.table import KEYS, to_numpy
from etude.files import AnyPath
from etude.recordings.files import REQUIRED, DataFile, find_files, has_own_columns, open_files
from etude.recordings.format import Contents, Format, Place, Problem, Unit, UnreadableError
from etude.recordings.formats.arrow import innermost, is_bytes, is_list
from etude.recordings.layout import FORMAT, MANIFEST, FileFacts, Header, Manifest, disk_schema, read_manifest
from etude.recordings.pieces import continues
from etude.spaces import leaf_dtype, leaf_shape

_TOLD: Final = {"truncated_file": 0, "missing_file": 1, "other_rows": 3}
"""The order in which problems of files are reported; all others come between."""


class GroupOfFile(NamedTuple):
    """What is needed to read a unit."""

    file: DataFile
    group: int
    following: tuple[DataFile, int] | None
    """The next row group."""


class OwnFormat(Format):
    """A recording in Etude's format.

    Args:
        files: Its files, from `usable_files`.
        header: Its header.
    """

    name = FORMAT

    def __init__(self, files: Sequence[DataFile], header: Header) -> None:
        self._files, self._header = files, header

    def describe(self) -> Contents:
        """Return the contents, reading nothing."""
        files = self._files
        groups = [(file, group) for file in files for group in range(file.metadata.num_row_groups)]
        units, first = [], {file.path: 0 for file in files}
        for k, (file, group) in enumerate(groups):
            rows = int(file.metadata.row_group(group).num_rows)
            data = GroupOfFile(file, group, groups[k + 1] if k + 1 < len(groups) else None)
            units.append(Unit(k, rows, file.path, first[file.path], data))
            first[file.path] += rows
        names = files[0].schema.names
        columns = [name for name in names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]
        return Contents(self._header, columns, units, [file.path for file in files])

    def read(
        self,
        unit: Unit,
        columns: Sequence[str],
        problems: list[Problem] | None = None,
        *,
        where: pc.Expression | None = None,
        finals: bool = True,
    ) -> Experience:
        """Read a row group as views. Its last segment's final observation may come from the next row group.

        Args:
            unit: The unit, which is read as a whole or not at all.
            columns: Full names of step columns.
            problems: If given, the error is an UnreadableError, else a plain DataError.
            where: Keep only rows for which this holds.
            finals: If False, final observations are left out.

        Raises:
            DataError: it can't be read.
        """
        try:
            return self._read(unit.data, columns, where, finals)
        except DataError as error:
            if problems is None:
                raise
            file, group, _ = unit.data
            text = str(error) if str(file.path) in str(error) else f"{file.path}: row group {group}: {error}"
            problem = Problem("undecodable", text, str(file.path), None, None, unit.rows or 0, True, group)
            raise UnreadableError(_empty(unit) or problem) from error

    def _read(self, at: GroupOfFile, columns: Sequence[str], where: pc.Expression | None, finals: bool) -> Experience:
        file, group, following = at
        names = file.names_for(columns)
        if not finals:
            names = [name for name in names if not col.is_under(name, col.FINAL_OBS)]
        elif not columns:  # the segments must be the same as with columns
            names = [*names, *col.under(file.schema.names, col.FINAL_OBS)[:1]]
        exp = file.load(group, names, where)
        segments = exp.segments
        if not columns:
            return exp.only(())
        if not exp.num_segments or segments.has_final_obs[-1] or segments.done[-1] or not exp.final_obs:
            return exp
        if following is not None:
            try:
                after = following[0].first_row(following[1], names)
            except DataError:  # reported when that row group is loaded
                return exp
            if after.num_segments and continues(exp, after):
                segments.has_final_obs[-1] = True
                for name, values in exp.final_obs.items():
                    values[-1] = after.steps[name][0]
        return exp

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row; rows are counted from 0 in their file."""
        file, group, _ = unit.data
        row += unit.row or 0
        return Place(f"{file.path}, row group {group}, row {row}", str(file.path), row, group)


def usable_files(
    path: AnyPath, given: Sequence[AnyPath] | None, faults: list[Problem] | None
) -> tuple[list[DataFile], Header | None]:
    """Return the usable files and the recording's header, which is None if another tool has rewritten all files.

    Args:
        path: The folder, or one file.
        given: The files, if they were given one by one; None is all under ``path``.
        faults: If given, files that can't be used are left out and named here.

    Raises:
        DataError: a file is broken or missing, or the files do not belong together.
    """
    paths = find_files(path) if given is None else [file for one in given for file in find_files(one)]
    opened = dict(zip(paths, open_files(paths), strict=True))
    files = [file for file in opened.values() if isinstance(file, DataFile)]
    manifest: Manifest | None = None
    if path.is_dir() and not any(file.version > 1 for file in files):
        try:
            manifest = read_manifest(path)
        except DataError as error:
            _refuse(Problem("manifest", str(error), str(path), count=0, repairable=True), faults)
    like = _example(files)
    wanted = manifest.header if manifest else like.header if like else None
    found: list[Problem] = []
    if manifest:
        found += unlisted(path, manifest, files)
    elif given is None and path.is_dir():
        found += lost_files(path, files, [file.name for file in paths])
    lost = {problem.file: problem.count for problem in found if problem.kind == "lost_rows"}
    lost |= {str(path / name): rows for name, rows in manifest.rows.items()} if manifest else {}
    faulty = {file.path: fault_of(file, like or file, wanted) for file in files}
    for name, file in opened.items():
        is_part = len(paths) > 1  # without a single file, nothing would be left
        if isinstance(file, DataError):
            count = lost.get(str(name), 0)
            found.append(Problem("truncated_file", str(file), str(name), count=count, repairable=is_part))
        elif fault := faulty[name]:
            found.append(dataclasses.replace(fault, repairable=is_part))
    for problem in sorted(found, key=lambda problem: _TOLD.get(problem.kind, 2)):
        if problem.kind != "lost_rows":
            _refuse(problem, faults)
    files = [file for file in files if not faulty[file.path]]
    if not files:
        assert faults  # there are files, but all have faults
        raise DataError(faults[0].message)
    return files, manifest.header if manifest else _newest(files)


def is_in_order(files: Sequence[DataFile]) -> bool:
    """Whether rows are in the order of Etude's writer, and columns of its types.

    For files that another tool has rewritten, this reads two columns: each row group must be sorted, and the rows of a
    segment must not be in row groups that are apart.
    """
    groups: list[tuple[NDArray[np.int64], int, int]] = []
    like = _example(files)
    for file in files:
        found = file.segments_anew() if not file.is_rewritten or (like and _has_own_types(file, like)) else None
        if found is None:
            return False
        groups += found
    every = np.concatenate([np.zeros(0, np.int64), *(segments for segments, _, _ in groups)])
    pairs = itertools.pairwise(groups)
    continued = sum(int(a[-1]) == int(b[0]) and last < first for (a, _, last), (b, first, _) in pairs)
    return bool(len(every) - len(np.unique(every)) == continued)


def _empty(unit: Unit) -> Problem | None:
    """Find the first column of a row group with nulls where there must be values."""
    file, group, _ = unit.data
    free = (col.AGENT_ID, col.MODULE_ID, col.LOOKBACK)
    for field in file.schema:
        name = field.name
        if name in free or col.is_under(name, col.FINAL_OBS) or pa.types.is_string(field.type):
            continue
        try:
            rows = np.flatnonzero(np.asarray(file.read_group(group, [name], None)[name].is_null()))
        except DataError:
            continue
        if len(rows):
            row, more = int(rows[0]) + (unit.row or 0), f" ({len(rows):,} rows like it)" if len(rows) > 1 else ""
            text = (
                f"{file.path}, row group {group}, row {row}: column `{name}` is empty{more}. Fill it, or leave these "
                "rows out with a filter."
            )
            return Problem("empty", text, str(file.path), row, name, len(rows), True, group)
    return None


def _newest(files: Sequence[DataFile]) -> Header | None:
    """The header of the file that was finished last, as far as known; else of the first file."""
    known = [file for file in files if file.header]
    newest = max(known, key=lambda file: file.facts.closed if file.facts else "", default=None)
    return newest.header if newest else None


def _refuse(problem: Problem, faults: list[Problem] | None) -> None:
    if faults is None:
        raise DataError(problem.message)
    faults.append(problem)


# -- faults of whole files, from their footers -----------------------------------------------------------------------


_REMEDY: Final = "or read the rest with on_bad='skip'."


def _example(files: Sequence[DataFile]) -> DataFile | None:
    """The first file, if possible one that Etude wrote, or at least one with a header."""
    return min(files, key=lambda file: (file.is_rewritten, file.header is None), default=None)


def _has_own_types(file: DataFile, like: DataFile) -> bool:
    """Whether the columns of a file that another tool has rewritten have the types that Etude writes."""
    try:
        Experience.from_table(file.schema.empty_table())
    except DataError:
        return False
    return _column_fault(file, like, loosely=False) is None


def fault_of(file: DataFile, like: DataFile, wanted: Header | None) -> Problem | None:
    """Check a file against the recording's header and the file ``like``; None if nothing is wrong."""
    if file.header is None and has_own_columns(file.schema.names):
        return None  # another tool has rewritten it: it is read as a table
    if file.header is None or wanted is None:
        names = ", ".join(file.schema.names[:12])
        what = (
            f"is not part of a recording: it carries no Etude header; its columns are {names}. Move it away, or read "
            "it as a table, with a Source that says which column is what."
        )
        return _problem("foreign_file", file, what)
    for root in (col.OBS, col.ACTION):
        if file.header.spaces[root] != wanted.spaces[root]:
            what = (
                f"its `{root}` space is {file.header.spaces[root]}, but the recording's is {wanted.spaces[root]}. "
                "Recordings of different envs can't be in one folder: move this file to its own."
            )
            return _problem("mismatched_spaces", file, what)
    return _column_fault(file, like, loosely=file.is_rewritten)


def _column_fault(file: DataFile, like: DataFile, *, loosely: bool) -> Problem | None:
    """Find a column that is there twice, is missing, is not in the file ``like``, or has another type than there, or
    than its space says. ``loosely`` is for a file that is read as a table: the width of numbers does not matter."""
    names, header = file.schema.names, file.header or like.header
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        what = f"has the column `{twice}` more than once. Leave one of them out."
        return _problem("wrong_type", file, what, twice)
    if file.version == 1 and col.SEGMENT in names:
        what = f"column `{col.SEGMENT}` can't be told from the one of format 2. Rename it, or read it as a table."
        return _problem("wrong_type", file, what)
    finals = [col.moved(name, col.OBS, col.FINAL_OBS) for name in col.under(names, col.OBS)]
    seen = [col.as_obs(name) for name in col.under(names, col.FINAL_OBS)]
    for name in (*REQUIRED, *finals, *seen, *like.schema.names):
        if name not in names and not (loosely and name == col.SEGMENT):
            what = f"has no column `{name}`; it has {', '.join(names)}. Restore it."
            return _problem("missing_column", file, what, name)
    remedy = "A recording has the same columns everywhere: move this file to a folder of its own."
    of_spaces = pa.schema([]) if header is None else _schema_of(header, names)
    for field in file.schema:
        name = field.name
        if name not in like.schema.names and not (loosely and name == col.SEGMENT):
            what = f"has a column `{name}` ({form(field)}), which {like.path.name} lacks. {remedy}"
            return _problem("extra_column", file, what, name)
        for other, where in ((of_spaces, "what Etude writes"), (like.schema, like.path.name)):
            wanted = other.field(other.names.index(name)) if name in other.names else field
            if not _are_alike(field, wanted, loosely=loosely):
                what = f"column `{name}` is {form(field)}, but {form(wanted)} in {where}. {remedy}"
                return _problem("wrong_type", file, what, name)
    return None


def _schema_of(header: Header, names: Sequence[str]) -> pa.Schema:
    """Those columns among ``names`` that are written for these spaces, and the keys."""
    parts = {name: leaf for name, leaf in header.leaves().items() if name in names}
    steps = {name: np.empty((0, *leaf_shape(leaf)), leaf_dtype(leaf)) for name, leaf in parts.items()}
    empty = Experience(steps, np.zeros(1, np.int64), Segments.of(0, episode_id=""), col.subtree(steps, col.OBS))
    return disk_schema(empty.to_table().schema)


def form(field: pa.Field) -> str:
    """Describe the values of a column: their dtype and shape, or their Arrow type if experience can't hold it."""
    try:
        return describe(to_numpy(pa.schema([field]).empty_table(), field.name)).replace("object", "text")
    except DataError:
        return str(field.type)


def _are_alike(field: pa.Field, other: pa.Field, *, loosely: bool) -> bool:
    """Whether two columns of one name hold the same; if ``loosely``, numbers of one kind, or texts, in lists or not."""
    if field.equals(other, check_metadata=True):
        return True
    if not loosely and field.name not in KEYS:
        return form(field) == form(other)
    kinds = {_kind_of(innermost(one.type)) for one in (field, other)}
    if loosely and field.name in (col.T_INDEX, col.SEGMENT, col.REWARD):
        return kinds <= {"i", "f"}
    if "bytes" in kinds:  # of an image, which may also be a list of numbers
        return kinds <= {"bytes", "i"} and all(is_list(one.type) or is_bytes(one.type) for one in (field, other))
    sizes = {one.type.list_size for one in (field, other) if pa.types.is_fixed_size_list(one.type)}
    return is_list(field.type) == is_list(other.type) and len(kinds) == 1 and len(sizes) < 2


def _kind_of(kind: pa.DataType) -> str:
    """The kind of a type: all integers are ``i``, all texts ``text``, and byte strings ``bytes``."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(kind):
        return "i"
    if pa.types.is_floating(kind):
        return "f"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return "text"
    return "bytes" if is_bytes(kind) else str(kind)


def _problem(kind: str, file: DataFile, what: str, column: str | None = None) -> Problem:
    text = f"{file.path}: {what}"
    return Problem(kind, text, str(file.path), column=column, count=file.metadata.num_rows, repairable=True)


def lost_files(folder: AnyPath, files: Sequence[DataFile], names: Sequence[str]) -> Iterator[Problem]:
    """Find files that are missing or have too few rows, according to later files of their series.

    Nothing is found if another tool has rewritten some of the files. For files that exist but can't be read, the
    problem ``lost_rows`` says how many rows they had.

    Args:
        folder: Their folder.
        files: The readable files.
        names: The names of all files there.
    """
    series: dict[str, list[tuple[FileFacts, str]]] = {}
    for file in files:
        if file.facts is not None:
            series.setdefault(file.facts.series, []).append((file.facts, file.path.name))
        elif has_own_columns(file.schema.names):
            return
    for prefix, members in series.items():
        rows, number, previous = 0, 0, ""
        for facts, name in sorted(members, key=lambda member: (member[0].number, member[1])):
            # More rows are not a fault: where there are no locks, two writers may have had the same prefix.
            short = facts.rows_before - rows
            if short > 0:
                said = f"when {name} was written, {facts.rows_before:,} rows were in the files before it"
                between = [f"{prefix}-{k:05d}.parquet" for k in range(number, facts.number)]
                missing = [one for one in between if one not in names]
                for lost in missing:  # these rows were in all of them together
                    text = f"{folder / lost}: is not there, but {said}. Put it back, {_REMEDY}"
                    count = short if lost == missing[0] else 0
                    yield Problem("missing_file", text, str(folder / lost), count=count, repairable=True)
                if not missing and (between or previous):
                    path = folder / (between[0] if between else previous)
                    text = f"{path}: was replaced: {said}, {short:,} more than now. Restore it from a copy, {_REMEDY}"
                    kind = "lost_rows" if between else "other_rows"
                    yield Problem(kind, text, str(path), count=short, repairable=True)
            rows, number, previous = max(rows, facts.rows_before) + facts.rows, facts.number + 1, name


def unlisted(folder: AnyPath, manifest: Manifest, files: Sequence[DataFile]) -> Iterator[Problem]:
    """Find files of format 1 that ``recording.json`` lists, but that are missing or have other rows."""
    rows = {file.path: file.metadata.num_rows for file in files}
    for name, listed in manifest.rows.items():
        path = folder / name
        head = f"{path}: {MANIFEST} lists this file with {listed:,} rows, but it"
        if not path.is_file():
            tail = f"is not there. Put it back, or take its entry out of {MANIFEST} to read the rest."
            yield Problem("missing_file", f"{head} {tail}", str(path), count=listed, repairable=True)
        elif rows.get(path, listed) != listed:
            tail = (
                f"holds {rows[path]:,}: it was replaced or rewritten. Restore it from a copy; or, where these rows "
                f"are the ones you want, take its entry out of {MANIFEST}."
            )
            yield Problem("other_rows", f"{head} {tail}", str(path), count=listed, repairable=True)
