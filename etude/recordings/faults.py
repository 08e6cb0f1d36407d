# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with whole files of a recording, as their footers tell it."""

import json
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.experience.table import SHAPE_KEY
from etude.files import AnyPath
from etude.recordings.files import REQUIRED, DataFile
from etude.recordings.format import Problem
from etude.recordings.layout import FileFacts, Header
from etude.recordings.manifest import MANIFEST, Manifest
from etude.spaces import leaf_dtype, leaf_shape


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


_KEY_TYPES = {
    **dict.fromkeys((col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID), (_is_text,)),
    **dict.fromkeys((col.SEGMENT, col.T_INDEX, col.LOOKBACK), (pa.types.is_signed_integer,)),
    **dict.fromkeys((col.TERMINATED, col.TRUNCATED), (pa.types.is_boolean,)),
}


_REMEDY: Final = "or read the rest with on_bad='skip'."


def fault_of(file: DataFile, first: DataFile, wanted: Header | None) -> Problem | None:
    """What is wrong with a file beside the recording's header and first file; None where nothing is."""
    if file.header is None and file.has_own_columns:
        return None  # another tool has written it anew: it is read as a table
    if file.header is None or wanted is None:
        names = ", ".join(file.schema.names[:12])
        what = (
            f"is no part of a recording: it carries no Etude header; its columns are {names}. Move it away; or read it "
            "as a table, with a Source that says which column is what."
        )
        return _problem("foreign_file", file, what)
    own, other = file.header.to_json()["spaces"], wanted.to_json()["spaces"]
    for root in (col.OBS, col.ACTION):
        if own[root] != other[root]:
            mine, theirs = (h.obs_space if root == col.OBS else h.action_space for h in (file.header, wanted))
            what = (
                f"its `{root}` space is {mine}, but the recording's is {theirs}. Recordings of different envs can't "
                "stand in one folder: move this file to its own."
            )
            return _problem("mismatched_spaces", file, what)
    return _column_fault(file, first) or _space_fault(file, file.header)


def _space_fault(file: DataFile, header: Header) -> Problem | None:
    """A column that has another dtype or shape than its space; the writer makes none, but other tools do."""
    try:
        empty = Experience.from_table(file.schema.empty_table())
    except DataError:
        return None  # it is said where rows are read
    for name, leaf in {**header.obs_leaves(), **header.action_leaves()}.items():
        wanted = describe(np.empty((0, *leaf_shape(leaf)), leaf_dtype(leaf)))
        for own, columns in ((name, empty.steps), (col.FINAL_OBS + name[len(col.OBS) :], empty.final_obs)):
            if name in columns and describe(columns[name]) != wanted:
                what = f"column `{own}` is {describe(columns[name])}, but its space {leaf} is {wanted}. Convert it, or"
                return _problem("wrong_type", file, f"{what} restore the file from a copy.")
    return None


def _column_fault(file: DataFile, first: DataFile) -> Problem | None:
    names = file.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        what = f"has the column `{twice}` more than once. Leave one of them out."
        return _problem("wrong_type", file, what)
    for name, kinds in _KEY_TYPES.items():
        if name in names and not any(is_kind(file.schema.field(name).type) for is_kind in kinds):
            what = f"column `{name}` is of type {file.schema.field(name).type}, which it can't be. Restore it."
            return _problem("wrong_type", file, what)
    if file.version == 1 and col.SEGMENT in names:
        what = f"column `{col.SEGMENT}` can't be told from the one of format 2. Rename it, or read it as a table."
        return _problem("wrong_type", file, what)
    finals = [col.FINAL_OBS + name[len(col.OBS) :] for name in col.under(names, col.OBS)]
    seen = [col.OBS + name[len(col.FINAL_OBS) :] for name in col.under(names, col.FINAL_OBS)]
    missing = [name for name in (*REQUIRED, *finals, *seen) if name not in names]
    difference = (missing[0], None, None) if missing else first_difference(file.schema, first.schema)
    if difference is None:
        return None
    name, own, wanted = difference
    remedy = "A recording has the same columns everywhere: move this file to a folder of its own."
    if own is None:
        kind, what = "missing_column", f"has no column `{name}`; it has {', '.join(file.schema.names)}. Restore it."
    elif wanted is None:
        kind, what = "extra_column", f"has a column `{name}` ({own}), which {first.path.name} has not. {remedy}"
    else:
        kind, what = "wrong_type", f"column `{name}` is of type {own}, but {wanted} in {first.path.name}. {remedy}"
    return _problem(kind, file, what)


def _problem(kind: str, file: DataFile, what: str) -> Problem:
    return Problem(kind, f"{file.path}: {what}", str(file.path), count=file.num_rows, repairable=True)


def first_difference(schema: pa.Schema, other: pa.Schema) -> tuple[str, str | None, str | None] | None:
    """The first column that is not the same in both: its name, and its type in each, None where it is absent.

    None where all are the same. Neither their order matters nor whether they may be null.
    """
    for name in dict.fromkeys([*other.names, *schema.names]):
        own, wanted = (_type_of(s.field(s.names.index(name))) if name in s.names else None for s in (schema, other))
        if own != wanted:
            return name, own, wanted
    return None


def _type_of(field: pa.Field) -> str:
    """The type of a column in words, with the shape of its rows where they have several axes."""
    said = (field.metadata or {}).get(SHAPE_KEY, b"[]")
    try:
        shape = json.loads(said)
    except (ValueError, RecursionError):
        shape = repr(said)
    is_plain = isinstance(shape, list) and len(shape) < 2
    return str(field.type) if is_plain else f"{field.type} of shape {shape}"


def lost_files(folder: AnyPath, files: Sequence[DataFile], names: Sequence[str]) -> Iterator[Problem]:
    """Files that later ones of their series tell of, and that are not there, or have fewer rows.

    Nothing is told where another tool has written some of the files anew. Of a file that is there, but can't be read,
    it is told how many rows it had: ``lost_rows``.

    Args:
        folder: Where they lie.
        files: Those that can be read.
        names: Those of all files there.
    """
    series: dict[str, list[tuple[FileFacts, str]]] = {}
    for file in files:
        if file.facts is not None:
            series.setdefault(file.facts.series, []).append((file.facts, file.path.name))
        elif file.has_own_columns:
            return
    for prefix, members in series.items():
        rows, number, previous = 0, 0, ""
        for facts, name in sorted(members, key=lambda member: (member[0].number, member[1])):
            # More rows than that are no fault: where there are no locks, two writers may have had one prefix.
            short = facts.rows_before - rows
            if short > 0:
                said = f"when {name} was written, {facts.rows_before:,} rows were in the files before it"
                between = [f"{prefix}-{k:05d}.parquet" for k in range(number, facts.number)]
                missing = [one for one in between if one not in names]
                if missing:
                    yield from _missing(folder, missing, short, said)
                elif between or previous:
                    path = folder / (between[0] if between else previous)
                    text = f"{path}: was replaced: {said}, {short:,} more than now. Restore it from a copy, {_REMEDY}"
                    kind = "lost_rows" if between else "other_rows"
                    yield Problem(kind, text, str(path), count=short, repairable=True)
            rows, number, previous = max(rows, facts.rows_before) + facts.rows, facts.number + 1, name


def _missing(folder: AnyPath, names: Sequence[str], rows: int, said: str) -> Iterator[Problem]:
    """Files that are not there, and had so many rows together."""
    for name in names:
        text = f"{folder / name}: is not there, but {said}. Put it back, {_REMEDY}"
        count = rows if name == names[0] else 0
        yield Problem("missing_file", text, str(folder / name), count=count, repairable=True)


def unlisted(folder: AnyPath, manifest: Manifest, files: Sequence[DataFile]) -> Iterator[Problem]:
    """Files of format 1 that ``recording.json`` lists and that are not there, or have other rows."""
    rows = {file.path: file.num_rows for file in files}
    for name, listed in manifest.rows.items():
        path = folder / name
        head = f"{path}: {MANIFEST} lists this file with {listed:,} rows, but it"
        if not path.is_file():
            tail = f"is not there. Put it back, or take its entry out of {MANIFEST} to read the rest."
            yield Problem("missing_file", f"{head} {tail}", str(path), count=listed, repairable=True)
        elif rows.get(path, listed) != listed:
            tail = (
                f"holds {rows[path]:,}: it was replaced or written anew. Restore it from a copy; or, where these rows "
                f"are the ones you want, take its entry out of {MANIFEST}."
            )
            yield Problem("other_rows", f"{head} {tail}", str(path), count=listed, repairable=True)
