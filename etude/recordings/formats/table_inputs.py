# SPDX-License-Identifier: Apache-2.0
"""Tables in files and in memory, as groups of rows that are read one at a time."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, Systems, expanded, glob_base, input_file, relative, shown, visible_files
from etude.recordings import cache, footers
from etude.recordings.format import Problem, most_rows
from etude.recordings.formats import text_tables
from etude.recordings.formats.arrow import check_names, is_text, kind_without_views, list_array, without_views
from etude.recordings.formats.source import described, is_paths
from etude.urls import first_line

SUFFIXES: Final = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".arrow", ".ipc", ".feather"), "ipc"),
}
MAGIC: Final = {b"PAR1": "parquet", b"ARROW1": "ipc"}
_IN_LISTS: Final = re.compile(r"(\.list\.(element|item))+$")
"""What Parquet appends to the name of a column of lists."""
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_COMPRESSED: Final = (".gz", ".bz2", ".zst")
_BESIDE_ARROW: Final = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files without rows that Hugging Face's ``save_to_disk`` writes beside its Arrow files."""
BROKEN: Final = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are read together: a row group, a record batch, a slice of a table in memory. Can be pickled."""

    schema: pa.Schema
    num_rows: int
    file: AnyPath | None
    first: int
    """The index of its first row in the file, or in the table."""
    load: Callable[[Sequence[str]], pa.Table] | None = None
    """Reads some of the columns; None if the rows can only be located."""
    origin_of: "Callable[[int], tuple[Group, int]] | None" = None
    """If the rows are sorted: returns the same as `origin`."""
    complete: Callable[[], Collection[str]] | None = None
    """Returns the columns without missing values, also inside lists, by the file's statistics; None if it has none."""
    values: Mapping[str, str | int | None] = dataclasses.field(default_factory=dict)
    """Columns with one value for all rows, from names of folders such as ``agent_id=a``."""
    members: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Columns that are members of structs: the path of each, from the struct's column to the member."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """Read some of the columns."""
        assert self.load is not None
        paths = [self.members.get(name, [name]) for name in names]
        own = list(dict.fromkeys(first for first, *_ in paths if first not in self.values))
        table = without_views(self.load(own))
        if table.num_rows != self.num_rows:
            raise ValueError(f"there are {table.num_rows} rows where {self.num_rows} should be")
        if own == list(names):
            return table
        columns = []
        for first, *rest in paths:
            if first in self.values:
                value = pa.scalar(self.values[first], self.schema.field(first).type)
                columns.append(pa.repeat(value, self.num_rows))
            else:
                columns.append(pc.struct_field(table[first], rest) if rest else table[first])
        return pa.table(columns, names=list(names))

    def origin(self, row: int) -> "tuple[Group, int]":
        """Return the group that a row originally came from, before sorting, and its index there."""
        return self.origin_of(row) if self.origin_of else (self, row)

    def place(self, row: int) -> str:
        """Describe the location of a row of the group."""
        group, inside = self.origin(row)
        return f"{group.file or 'the table'}, row {group.first + inside}" if group is self else group.place(inside)


def _read_row_group(path: AnyPath, metadata: pq.FileMetaData, index: int, names: Sequence[str]) -> pa.Table:
    with footers.opened(path, metadata) as opened:
        return opened.read_row_group(index, columns=names)


def read_batch(
    opened: Callable[[], pa.NativeFile], all_names: Sequence[str], index: int, rows: slice, names: Sequence[str]
) -> pa.Table:
    """Read columns of some rows of a record batch in an Arrow file.

    If ``all_names`` has the names of all columns in the file, Arrow loads only ``names``, but copies them. If it is
    empty, nothing is copied from a memory-mapped file that is not compressed.
    """
    fields = [all_names.index(name) for name in names] if all_names else []
    with opened() as source:
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        batch = pa.ipc.open_file(source, options=options).get_batch(index)[rows].select(names)
        batch.validate(full=True)
        return pa.Table.from_batches([batch])


def _completed(group: Group, values: Mapping[str, str | int | None]) -> Group:
    """The group with plain text and bytes in place of views, and a column for each of ``values`` that it lacks."""
    values = {name: value for name, value in values.items() if name not in group.schema.names}
    fields = [field.with_type(kind_without_views(field.type)) for field in group.schema]
    kinds = [(name, pa.int64() if isinstance(value, int) else pa.string()) for name, value in values.items()]
    return dataclasses.replace(group, schema=pa.schema([*fields, *kinds], group.schema.metadata), values=values)


def with_members(group: Group, names: Iterable[str]) -> Group:
    """The group with a column for each of ``names`` that is a member of a struct, such as ``state.speed``."""
    paths: dict[str, list[str]] = {}
    schema = group.schema
    for name in names:
        first, *rest = re.split(r"[./]", name)
        if name in schema.names or first not in schema.names:
            continue
        kind = schema.field(first).type
        for member in rest:
            is_there = kind is not None and pa.types.is_struct(kind) and kind.get_field_index(member) >= 0
            kind = kind.field(member).type if is_there else None
        if kind is not None:
            paths[name] = [first, *rest]
            schema = schema.append(pa.field(name, kind))
    return dataclasses.replace(group, schema=schema, members=paths)


class InFolders(tuple[AnyPath, ...]):
    """Files below a folder. Names of folders in between, such as ``agent_id=a``, are columns.

    Args:
        folder: The folder.
        files: The files.
    """

    folder: AnyPath

    def __new__(cls, folder: AnyPath, files: Iterable[AnyPath]) -> "InFolders":
        """The files, as a tuple that knows the folder."""
        made = super().__new__(cls, files)
        made.folder = folder
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.folder, tuple(self)


def groups_of(
    data: Any, filesystem: Any = None, ids: Collection[Any] = (), unread: list[Problem] | None = None
) -> Sequence[Group]:
    """Return the rows of ``data``: a path, URL, glob, folder, or list of them, in ``filesystem``; or a table in memory.

    Below a folder, or the fixed part of a glob, names of folders such as ``date=2026-03-01`` are columns too. A column
    of ``ids`` that is text in one CSV file is text in all of them, so that 007 is never read as 7.

    A table is a pyarrow table, one of any library that exports Arrow data (``__arrow_c_stream__`` as in pandas and
    polars, ``to_arrow()``, or ``iter_batches(batch_format="pyarrow")`` as in a Ray dataset, whose rows are all loaded
    into memory), or a dict of arrays ``[rows, ...]``.

    If ``unread`` is given, files that can't be read are skipped, and a `Problem` is added there for each.

    Raises:
        DataError: there is no data, or it can't be read.
    """
    if not is_paths(data):
        table = _table(data)
        most = most_rows(table.nbytes / max(1, table.num_rows))
        slices = [(first, table.slice(first, most)) for first in range(0, max(1, table.num_rows), most)]
        return [_completed(Group(table.schema, part.num_rows, None, first, part.select), {}) for first, part in slices]
    known: Systems = {}
    several = data if isinstance(data, list | tuple) else [data]
    found = [each for place in several for each in _files(place, filesystem, known)]
    if isinstance(data, InFolders):
        found = [(file, kind, in_names(data.folder, file)) for file, kind, _ in found]
    names = [file.resolve() if isinstance(file, Path) else file for file, *_ in found]
    if len(set(names)) < len(names):
        raise given_twice(next(name for name in names if names.count(name) > 1))
    in_folders = _with_types([values for *_, values in found])
    list(footers.footers([file for file, kind, _ in found if isinstance(file, RemotePath) and kind == "parquet"]))
    texts = [file for file, kind, _ in found if kind in text_tables.CONVERTERS]
    size = sum(file.stat().st_size * (8 if file.suffix in _COMPRESSED else 1) for file in texts)
    in_memory = size < cache.LEAST_BYTES
    groups: list[list[Group]] = []
    for file, kind, _ in found:
        try:
            groups.append(list(_file_groups(file, kind, in_memory=in_memory)))
        except DataError as error:
            if unread is None or len(found) == 1:
                raise
            groups.append([])
            unread.append(Problem("unreadable", str(error), str(file), count=0, repairable=True))
    if unread and len(unread) == len(found):
        raise DataError(unread[0].message)
    csvs = {k: groups[k][0].schema for k, (_, kind, _) in enumerate(found) if kind == "csv" and groups[k]}
    as_text = {f.name for schema in csvs.values() for f in schema if f.name in ids and pa.types.is_string(f.type)}
    for k, schema in csvs.items():
        # Ids are not read as times, because different texts could become the same time.
        others = [
            f.name
            for f in schema
            if (f.name in as_text and not (pa.types.is_string(f.type) or f.type == pa.null()))
            or (f.name in ids and pa.types.is_temporal(f.type))
        ]
        if others:
            groups[k] = list(_file_groups(*found[k][:2], in_memory=in_memory, texts=others))
    return [_completed(group, values) for own, values in zip(groups, in_folders, strict=True) for group in own]


def _with_types(found: Sequence[Mapping[str, str]]) -> list[dict[str, str | int | None]]:
    """The values in names of folders, for each file; whole numbers if all of a column are."""
    texts: dict[str, set[str]] = {}
    for values in found:
        for name, text in values.items():
            texts.setdefault(name, set()).add(text)
    is_whole = {name: all(map(re.compile(r"0|-?[1-9]\d{0,17}").fullmatch, own)) for name, own in texts.items()}
    return [
        {name: None if text == NO_VALUE else int(text) if is_whole[name] else text for name, text in values.items()}
        for values in found
    ]


def in_names(folder: AnyPath, file: AnyPath) -> dict[str, str]:
    """Parse the names of the folders between ``folder`` and a file: ``key=value``, as in Hive, Spark and DuckDB."""
    parts = [part.partition("=") for part in relative(file, folder).parts[:-1]]
    return {name: unquote(text) for name, is_equal, text in parts if name and is_equal}


def _files(given: Any, filesystem: Any, known: Systems) -> list[tuple[AnyPath, str, dict[str, str]]]:
    """Each file with its kind, and the values in the names of its folders."""
    found: list[tuple[AnyPath, str, dict[str, str]]] = []
    top = glob_base(given, filesystem, known)
    for place in expanded(given, filesystem, known):
        path: Any = place.listed() if isinstance(place, RemotePath) and place.listing is None else place
        inside = visible_files(path) if path.is_dir() else [path] if path.is_file() else []
        of_dataset = _BESIDE_ARROW if any(file.suffix == ".arrow" for file in inside) else ()
        folder = top or (path if path.is_dir() else path.parent)
        for file in [file for file in inside if file.name not in of_dataset]:
            if kind := _kind(file):
                found.append((file, kind, in_names(folder, file)))
            elif file is path:
                raise DataError(
                    f"{path}: is a table of an unknown kind. Known are {', '.join(SUFFIXES)}. Other formats need no "
                    "Source: Recording.open(path) detects them, and takes `obs_space` and `action_space` too."
                )
    if not found:
        is_there = any(place.exists() for place in expanded(given, filesystem, known))
        what = f"table file here. Known are {', '.join(SUFFIXES)}" if is_there else "such file or folder"
        raise DataError(f"{shown(given)}: there is no {what}.")
    return found


def is_table_by_name(path: AnyPath) -> bool:
    """Whether a path is a CSV or Arrow file, or a folder in which all table files are, by their suffixes.

    Parquet and JSON files may be recordings of other formats, rather than tables.
    """
    files = visible_files(path) if path.is_dir() else [path]
    kinds = {kind for file in files if (kind := _kind_by_name(file)) is not None}
    return bool(kinds) and kinds <= {"csv", "ipc"}


def _kind_by_name(path: AnyPath) -> str | None:
    suffixes = [s for s in map(str.lower, path.suffixes) if s not in _COMPRESSED]
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _kind(path: AnyPath) -> str | None:
    """The kind by name, or else by the first bytes; an Arrow file without a footer is a stream."""
    kind = _kind_by_name(path)
    if kind not in (None, "ipc"):
        return kind
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except BROKEN as error:
        raise unreadable(path, error) from error
    return next((known for magic, known in MAGIC.items() if head.startswith(magic)), kind and "stream")


def _file_groups(path: AnyPath, kind: str, *, in_memory: bool, texts: Sequence[str] = ()) -> Iterator[Group]:
    """The rows of a file. The columns ``texts`` of a CSV file are read as text, whatever is in them."""
    try:
        if kind == "parquet":
            yield from _parquet_groups(path)
        elif kind == "ipc":
            yield from _batches(path, partial(input_file, path, mapped=True))
        else:
            yield from _batches(path, text_tables.converted(path, kind, texts, in_memory=in_memory), is_converted=True)
    except BROKEN as error:
        raise unreadable(path, error) from error


def unreadable(path: AnyPath | None, error: BaseException) -> DataError:
    """Return the error for bytes that can't be decoded."""
    remedy = "Repair it, restore it from a copy, or leave it out." if path else "Repair it, or leave it out."
    if isinstance(error, UnicodeDecodeError):
        remedy = "Save it as UTF-8."
    return DataError(f"{path or 'the table'}: can't be read ({first_line(error, None)}). {remedy}")


def _parquet_groups(path: AnyPath) -> Iterator[Group]:
    metadata = footers.footer(path)
    schema = metadata.schema.to_arrow_schema()
    check_names(schema)
    first = 0
    for k in range(metadata.num_row_groups):
        rows = metadata.row_group(k).num_rows
        read, complete = partial(_read_row_group, path, metadata, k), partial(_complete, metadata, k)
        yield Group(schema, rows, path, first, read, complete=complete)
        first += rows


def _complete(metadata: pq.FileMetaData, index: int) -> set[str]:
    group = metadata.row_group(index)
    columns = [group.column(i) for i in range(group.num_columns)]
    known = {c.path_in_schema for c in columns if (found := c.statistics) is not None and found.null_count == 0}
    return {_IN_LISTS.sub("", path) for path in known}


def _batches(path: AnyPath, opened: Callable[[], pa.NativeFile], *, is_converted: bool = False) -> Iterator[Group]:
    """The record batches of ``path``, or of the Arrow file it was converted to, in pieces of bounded size."""
    with opened() as source:
        reader = pa.ipc.open_file(source)
        schema, num = reader.schema, reader.num_record_batches
        check_names(schema)
        sizes = [(batch.num_rows, batch.nbytes) for batch in map(reader.get_batch, range(num))]
    first = 0
    for k, (rows, size) in enumerate(sizes or [(0, 0)]):
        most = most_rows(size / max(1, rows))
        for start in range(0, max(1, rows), most):
            part = slice(start, min(start + most, rows))
            load = partial(read_batch, opened, () if is_converted else schema.names, k, part)
            yield Group(schema, part.stop - start, path, first + start, load)
        first += rows


def joint_schema(
    groups: Sequence[Group], ids: Sequence[str], needed: Collection[str] | None = None
) -> tuple[pa.Schema, list[str]]:
    """Return column types that fit all groups.

    If types differ, dictionaries become plain values, times with a time zone become UTC, and ``ids`` that are text in
    some groups and numbers in others become text.

    Args:
        groups: The groups.
        ids: The columns of ids.
        needed: The columns whose types must be compatible; None is all.

    Returns:
        The schema, and the columns that are not in it because their types are incompatible.

    Raises:
        DataError: a needed column has incompatible types (the message names a file), or two columns have one name.
    """
    schemas = [group.schema for group in groups]
    for schema in schemas:
        names = schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            which = f"columns `{twice}`" if twice else "columns without a name"
            raise DataError(f"there are two {which}. Rename or remove one of them.")
    try:
        return pa.unify_schemas(schemas, promote_options="permissive"), []
    except pa.ArrowTypeError:
        texts = {name for schema in schemas for name in {*ids} & {*schema.names} if is_text(schema.field(name).type)}
    joint, clashing = pa.schema([]), list[str]()
    for group in groups:
        for field in group.schema:
            if field.name in clashing:
                continue
            plain = pa.schema([(field.name, pa.string() if field.name in texts else _plain(field.type))])
            try:
                joint = pa.unify_schemas([joint, plain], promote_options="permissive")
            except pa.ArrowTypeError as error:
                if needed is None or field.name in needed:
                    raise DataError(
                        f"{group.file} has other types than files before it ({error}). Convert them."
                    ) from error
                clashing.append(field.name)
    return pa.schema([field for field in joint if field.name not in clashing]), clashing


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind


def given_twice(file: AnyPath) -> DataError:
    """Return the error for a file that occurs twice among the given files and folders."""
    return DataError(
        f"{file} was given twice, so its steps would count twice: give each folder and file once, and none that is in "
        "a folder that is given, too."
    )


def no_rows(data: Any, groups: Sequence[Group]) -> DataError:
    """Return the error for a table without rows."""
    names = list(dict.fromkeys(name for group in groups for name in group.schema.names))
    only = f"only the names of its columns ({', '.join(names)})" if names else "and no columns"
    return DataError(f"{described(data)}: has no rows, {only}. Was it written to its end? Give a table with rows.")


def _array_of(name: str, values: Any) -> pa.Array:
    if isinstance(values, Mapping):
        flat = [f"{name}/{key}" for key in values]
        raise DataError(f"the table: `{name}` is a dict, but a column is an array: give a column for each key, {flat}.")
    try:
        if np.ma.is_masked(values):
            raise ValueError("some values are masked: fill them, or leave these rows out")
        array = np.asarray(values)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        return list_array(array) if array.ndim > 1 else pa.array(array)
    except (*BROKEN, RuntimeError) as error:
        raise DataError(f"the table: column `{name}` can't be read as an array: {first_line(error)}") from error


def _table(data: Any) -> pa.Table:
    try:
        if isinstance(data, pa.Table):
            table = data
        elif isinstance(data, Mapping):
            table = pa.table({str(name): _array_of(str(name), values) for name, values in data.items()})
        elif hasattr(data, "__arrow_c_stream__"):
            table = pa.RecordBatchReader.from_stream(data).read_all()
        elif callable(getattr(data, "iter_batches", None)):
            batches = list(data.iter_batches(batch_size=None, batch_format="pyarrow"))
            table = pa.concat_tables(batches, promote_options="default")
        elif callable(getattr(data, "to_arrow", None)):
            table = data.to_arrow()
        else:
            raise DataError(
                f"a {type(data).__name__} is neither a path nor a table that Arrow can convert. Give a table of "
                "pandas, polars or pyarrow (of a lazy one, what its collect() returns), or a dict of arrays."
            )
        table.validate(full=True)
    except BROKEN as error:
        raise unreadable(None, error) from error
    return table
