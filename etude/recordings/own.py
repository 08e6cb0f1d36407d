# SPDX-License-Identifier: Apache-2.0
"""Etude's own format: units are the row groups of Parquet files."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.experience.table import KEYS, shape_of
from etude.files import AnyPath
from etude.recordings.files import REQUIRED, DataFile, find_files, has_own_columns, open_files
from etude.recordings.format import Contents, Format, Place, Problem, Unit, UnreadableError
from etude.recordings.formats.arrow import innermost, is_bytes, is_list
from etude.recordings.layout import FORMAT, MANIFEST, FileFacts, Header, Manifest, read_manifest
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
    by_path = dict(zip(paths, open_files(paths), strict=True))
    files = [file for file in by_path.values() if isinstance(file, DataFile)]
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
    for name, file in by_path.items():
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
    segment must not be in row groups that are not adjacent.
    """
    groups: list[tuple[NDArray[np.int64], int, int]] = []
    like = _example(files)
    for file in files:
        found = file.rewritten_segments() if not file.is_rewritten or (like and _has_own_types(file, like)) else None
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


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


_KEY_TYPES = {
    **dict.fromkeys((col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID), _is_text),
    **dict.fromkeys((col.SEGMENT, col.T_INDEX, col.LOOKBACK), pa.types.is_signed_integer),
    **dict.fromkeys((col.TERMINATED, col.TRUNCATED), pa.types.is_boolean),
}


_REMEDY: Final = "or read the rest with on_bad='skip'."


def _example(files: Sequence[DataFile]) -> DataFile | None:
    """The first file, if possible one that Etude wrote, or at least one with a header."""
    return min(files, key=lambda file: (file.is_rewritten, file.header is None), default=None)


def _has_own_types(file: DataFile, first: DataFile) -> bool:
    """Whether the columns of a file that another tool has rewritten have the types that Etude writes."""
    try:
        Experience.from_table(file.schema.empty_table())
    except DataError:
        return False
    return _column_fault(file, first) is None and (file.header is None or _space_fault(file, file.header) is None)


def fault_of(file: DataFile, first: DataFile, wanted: Header | None) -> Problem | None:
    """Check a file against the recording's header and first file; None if nothing is wrong."""
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
    if file.is_rewritten:  # it is read as a table, whose types may differ
        return _column_fault(file, first, loosely=True) or _kind_fault(file, file.header)
    return _column_fault(file, first) or _space_fault(file, file.header)


def _kind_fault(file: DataFile, header: Header) -> Problem | None:
    """Find a column of a file that another tool has rewritten whose values can't be those of its space."""
    for name, leaf in header.leaves().items():
        for own in (name, col.moved(name, col.OBS, col.FINAL_OBS)):
            if own not in file.schema.names:
                continue
            kind, size = file.schema.field(own).type, math.prod(leaf_shape(leaf))
            wanted = "i" if leaf_dtype(leaf).kind in "iu" else leaf_dtype(leaf).kind
            fits = is_list(kind) == bool(leaf_shape(leaf)) and _kind_of(innermost(kind)) == wanted
            fits = fits and not (pa.types.is_fixed_size_list(kind) and kind.list_size != size)
            is_image = leaf_dtype(leaf) == np.uint8 and len(leaf_shape(leaf)) > 1  # stored as bytes
            if not fits and not (is_image and _kind_of(kind) == "V"):
                what = f"column `{own}` is of type {kind}, but its space is {leaf}. Convert it, or restore the file."
                return _problem("wrong_type", file, what, own)
    return None


def _kind_of(kind: pa.DataType) -> str:
    """The kind of a type, as NumPy names it, where all integers are ``i`` and bytes ``V``; else its name."""
    if pa.types.is_integer(kind):
        return "i"
    if pa.types.is_boolean(kind):
        return "b"
    return "f" if pa.types.is_floating(kind) else "V" if is_bytes(kind) else str(kind)


def _space_fault(file: DataFile, header: Header) -> Problem | None:
    """Find a column whose dtype or shape differs from its space's, as other tools may write it."""
    try:
        empty = Experience.from_table(file.schema.empty_table())
    except DataError:
        return None  # reported when rows are read
    for name, leaf in header.leaves().items():
        wanted = describe(np.empty((0, *leaf_shape(leaf)), leaf_dtype(leaf)))
        for own, columns in ((name, empty.steps), (col.moved(name, col.OBS, col.FINAL_OBS), empty.final_obs)):
            if name in columns and describe(columns[name]) != wanted:
                what = f"column `{own}` is {describe(columns[name])}, but its space {leaf} is {wanted}. Convert it, or"
                return _problem("wrong_type", file, f"{what} restore the file from a copy.", own)
    return None


def _column_fault(file: DataFile, first: DataFile, *, loosely: bool = False) -> Problem | None:
    """Find a column that occurs twice, is missing, or differs from the first file's. ``loosely`` allows numbers of
    another width."""
    names = file.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        what = f"has the column `{twice}` more than once. Leave one of them out."
        return _problem("wrong_type", file, what, twice)
    for name, is_kind in _KEY_TYPES.items():
        kind = file.schema.field(name).type if name in names else pa.null()
        is_number = loosely and is_kind is pa.types.is_signed_integer and _kind_of(kind) in ("i", "f")
        if name in names and not is_kind(kind) and not is_number:
            what = f"column `{name}` is of type {file.schema.field(name).type}, which is not possible. Restore it."
            return _problem("wrong_type", file, what, name)
    if file.version == 1 and col.SEGMENT in names:
        what = f"column `{col.SEGMENT}` can't be told from the one of format 2. Rename it, or read it as a table."
        return _problem("wrong_type", file, what)
    finals = [col.moved(name, col.OBS, col.FINAL_OBS) for name in col.under(names, col.OBS)]
    seen = [col.as_obs(name) for name in col.under(names, col.FINAL_OBS)]
    missing = [name for name in (*REQUIRED, *finals, *seen) if name not in names]
    difference = (missing[0], None, None) if missing else first_difference(file.schema, first.schema, loosely=loosely)
    if difference is None:
        return None
    name, own, wanted = difference
    remedy = "A recording has the same columns everywhere: move this file to a folder of its own."
    if own is None:
        kind, what = "missing_column", f"has no column `{name}`; it has {', '.join(file.schema.names)}. Restore it."
    elif wanted is None:
        kind, what = "extra_column", f"has a column `{name}` ({own}), which {first.path.name} lacks. {remedy}"
    else:
        kind, what = "wrong_type", f"column `{name}` is of type {own}, but {wanted} in {first.path.name}. {remedy}"
    return _problem(kind, file, what, name)


def _problem(kind: str, file: DataFile, what: str, column: str | None = None) -> Problem:
    text = f"{file.path}: {what}"
    return Problem(kind, text, str(file.path), column=column, count=file.metadata.num_rows, repairable=True)


def first_difference(
    schema: pa.Schema, other: pa.Schema, *, loosely: bool = False
) -> tuple[str, str | None, str | None] | None:
    """Return the first column that differs: its name, and its type in each schema, None where it is absent.

    None if there is none. The order of columns and whether they are nullable do not matter. With ``loosely``, neither
    do the width of numbers and the column ``segment``.
    """
    for name in dict.fromkeys([*other.names, *schema.names]):
        fields = [s.field(s.names.index(name)) if name in s.names else None for s in (schema, other)]
        own, wanted = (None if field is None else _type_of(field) for field in fields)
        if own != wanted and not (loosely and (name == col.SEGMENT or _are_close(name, *fields))):
            return name, own, wanted
    return None


def _are_close(name: str, a: pa.Field | None, b: pa.Field | None) -> bool:
    """Whether two columns hold numbers of one kind, of any width, or texts, in lists or not."""
    if a is None or b is None:
        return False
    one, other = a.type, b.type
    if name in (col.T_INDEX, col.REWARD):
        return {_kind_of(one), _kind_of(other)} <= {"i", "f"}
    if _is_text(one) or _is_text(other):
        return _is_text(one) and _is_text(other)
    sizes = {kind.list_size for kind in (one, other) if pa.types.is_fixed_size_list(kind)}
    return is_list(one) == is_list(other) and _kind_of(innermost(one)) == _kind_of(innermost(other)) and len(sizes) < 2


def _type_of(field: pa.Field) -> str:
    """Describe the type of a column, with the shape of its rows if they have several axes.

    Lists whose shape is known have a fixed size, whether their type says so or not.
    """
    shape, kind = shape_of(field), field.type
    if shape is not None and pa.types.is_list(kind):
        kind = pa.list_(kind.value_field, math.prod(shape))
    return str(kind) if shape is None or len(shape) < 2 else f"{kind} of shape {shape}"


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
