# SPDX-License-Identifier: Apache-2.0
"""Etude's own format, version 2, as specified in `docs/format.md`: metadata of files, and encodings.

All metadata is in the footers of the Parquet files: a header for the whole recording, and facts about the file, from
which lost files are detected. Format 1 also has a ``recording.json`` in the folder.
"""

import dataclasses
import errno
import json
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from etude import columns as col
from etude.errors import DataError, SettingsError, SpaceError
from etude.experience.table import IDS
from etude.files import AnyPath
from etude.recordings.action_units import env_action_space, units
from etude.settings import choice, suggestion
from etude.spaces import Space, leaves, space_from_json, space_to_json

FORMAT: Final = "etude-recording"
VERSION: Final = 2
VERSIONS: Final = (1, VERSION)
"""The versions that can be read."""
HEADER_KEY: Final = b"etude:recording"
FACTS_KEY: Final = b"etude:file"
PREFIX: Final = "part"
"""The default prefix of data file names."""
Encoding: TypeAlias = Literal["compact", "plain"]
"""Encoding of numbers: ``plain`` is larger and slower, but readable by older tools, such as Spark before 4.1."""


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata of a whole recording."""

    obs_space: Space
    """The space of one observation, as the env gave it."""
    action_space: Space
    """The space of one action, as the module chose it."""
    env: str | None = None
    """The id of the env; None if it has none."""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other metadata, as JSON data: connectors, the module's identity, the seed."""

    def to_json(self) -> dict[str, Any]:
        """Return the header as JSON data."""
        from etude import __version__

        return {
            "format": FORMAT,
            "version": VERSION,
            "written_by": f"etude {__version__}",
            "env": self.env,
            "spaces": {root: space_to_json(space) for root, space in self.spaces.items()},
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, data: Any, where: AnyPath) -> "Header":
        """The inverse of `to_json`.

        Raises:
            DataError: the data, found in the file ``where``, is not a valid header, or is of a later version.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise DataError(
                f"{where}: this does not describe an Etude recording (`format` is not {FORMAT!r}). "
                "Restore it from a copy."
            )
        if data.get("version") not in VERSIONS:
            raise DataError(
                f"{where}: the recording has format version {data.get('version')!r}, but this Etude reads versions "
                f"{' and '.join(map(str, VERSIONS))}. Install a newer Etude."
            )
        try:
            spaces, meta = data["spaces"], data.get("meta") or {}
            if not isinstance(meta, dict):
                raise TypeError(f"`meta` is {meta!r}, not an object")
            obs_space, action_space = space_from_json(spaces[col.OBS]), space_from_json(spaces[col.ACTION])
            return cls(obs_space, action_space, data.get("env"), meta)
        except (SpaceError, KeyError, TypeError) as error:
            raise DataError(
                f"{where}: the recording's description can't be read ({error}). Restore it from a copy."
            ) from error

    def dumps(self) -> bytes:
        """Return the header as JSON bytes.

        Raises:
            DataError: ``meta`` contains something that JSON can't store.
        """
        return _dumped(self.to_json())

    @property
    def units(self) -> str:
        """The units of the actions, in words. Recordings that are joined must have the same."""
        return units(self.action_space, self.meta)

    def check_alike(self, other: "Header", where: str, remedy: str) -> None:
        """Raise a DataError if ``other``, the header of the recording ``where``, has other spaces or action units."""
        facts = [(f"`{root}` space is", space, other.spaces[root]) for root, space in self.spaces.items()]
        for what, own, found in (*facts, ("actions are", self.units, other.units)):
            if own != found:
                raise DataError(f"{where}: its {what} {found}, rather than {own}. {remedy}")

    @property
    def spaces(self) -> dict[str, Space]:
        """The spaces by the root of their columns: ``obs`` and ``action``."""
        return {col.OBS: self.obs_space, col.ACTION: self.action_space}

    def leaves(self) -> dict[str, Space]:
        """The leaf spaces of observations and actions by column name."""
        return {name: leaf for root, space in self.spaces.items() for name, leaf in leaves(space, root).items()}


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Facts that a file states about itself and the earlier files of its series (same prefix and folder)."""

    series: str
    """The prefix of its name."""
    number: int
    """Its number in the series, from 0."""
    rows: int
    """The number of its rows."""
    rows_before: int
    """The number of rows in the earlier files of the series."""
    segments: int
    """The number of its segments."""
    closed: str
    """When it was finished, in UTC and ISO 8601 format."""

    @classmethod
    def of(cls, metadata: pq.FileMetaData) -> "FileFacts | None":
        """The facts in a footer; None if there are none, or if another tool has rewritten the file since."""
        try:
            facts = cls(**loads((metadata.metadata or {})[FACTS_KEY]))
        except (KeyError, TypeError, ValueError, RecursionError):
            return None
        numbers = (facts.number, facts.rows, facts.rows_before, facts.segments)
        is_sound = all(type(number) is int and number >= 0 for number in numbers)
        is_sound &= isinstance(facts.series, str) and isinstance(facts.closed, str)
        return facts if is_sound and facts.rows == metadata.num_rows else None

    def dumps(self) -> bytes:
        """Return the facts as JSON bytes."""
        return _dumped(dataclasses.asdict(self))


def loads(text: str | bytes, *, parse_constant: Callable[[str], Any] = str) -> Any:
    """Parse JSON text.

    Args:
        text: The text.
        parse_constant: Converts NaN and infinity, which are not JSON but which some writers produce.

    Raises:
        ValueError: it is not JSON, or holds half of a surrogate pair, which no file can hold as text.
        RecursionError: it is nested too deeply.
    """
    found = json.loads(text, parse_constant=parse_constant)
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if b"\\ud" in raw or b"\\uD" in raw:
        json.dumps(found, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return found


def read_json(path: AnyPath) -> Any:
    """Return the content of a JSON file; see `loads`.

    Raises:
        DataError: it can't be read, or is not JSON.
    """
    try:
        return loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: can't be read as JSON ({error}). Restore it from a copy.") from error


def shared_meta(metas: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split the metadata of several recordings: the entries that are the same in all, and the others of each."""
    metas = [_in_one_form(meta) for meta in metas]
    same = {key: value for key, value in metas[0].items() if all(key in m and m[key] == value for m in metas)}
    return same, [{key: value for key, value in meta.items() if key not in same} for meta in metas]


def _in_one_form(meta: Mapping[str, Any]) -> dict[str, Any]:
    outside = env_action_space(meta)
    return {**meta, **({} if outside is None else {col.ENV_ACTION_SPACE: outside})}


def _dumped(data: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the recording's `meta` must be plain JSON data: {error}.") from error


def number_of(name: str, prefix: str = PREFIX) -> int | None:
    """The number in a data file's name; None if it is not of this series."""
    digits = name.removeprefix(f"{prefix}-").removesuffix(".parquet")
    return int(digits) if name == f"{prefix}-{digits}.parquet" and digits.isdecimal() else None


def first_segment(prefix: str) -> int:
    """The number of the first segment of a series, such that different series very rarely use the same numbers."""
    return 0 if prefix == PREFIX else (zlib.crc32(prefix.encode()) & 0x7FFF_FFFF) << 32


def is_declared_in_order(metadata: pq.FileMetaData) -> bool:
    """Whether a file declares its rows to be sorted as Etude's writer sorts them; other tools' files don't."""
    wanted = [(col.SEGMENT, False), (col.T_INDEX, False)]
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    for k in range(metadata.num_row_groups):
        found = [(c.column_index, c.descending) for c in metadata.row_group(k).sorting_columns]
        if [(names[i] if i < len(names) else "", falls) for i, falls in found[:2]] != wanted:
            return False
    return True


def disk_schema(schema: pa.Schema) -> pa.Schema:
    """Replace dictionary types by strings: Parquet has its own dictionaries, and other readers prefer strings."""
    fields = [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in schema]
    return pa.schema(fields)


# -- compression and encoding ----------------------------------------------------------------------------------------

CompressionLike: TypeAlias = str | Mapping[str, str]
"""One codec for all columns, or codecs by column: a mapping (``{"obs/camera": "zstd:3", "obs": "lz4"}``) or text
(``"obs/camera=zstd:3,obs=lz4"``)."""

LEVELS: Final[Mapping[str, range]] = {
    **dict.fromkeys(("none", "snappy"), range(0)),
    **{"lz4": range(1, 13), "gzip": range(1, 10), "brotli": range(12), "zstd": range(1, 23)},
}
"""Parquet's codecs, with the levels of each."""


class Codec(NamedTuple):
    """The compression of a column."""

    name: str
    """A key of `LEVELS`."""
    level: int | None = None
    """None is the codec's own default."""


ALL: Final = ""
"""The key for all columns."""


def codecs(given: CompressionLike | None) -> dict[str, Codec]:
    """Parse codecs by column or root of columns, with the key `ALL` for all columns.

    Raises:
        SettingsError: a codec is unknown, or does not have such a level.
    """
    if isinstance(given, str):
        parts = [part.rpartition("=") for part in given.split(",")]
        given = {root.strip(): words.strip() for root, _, words in parts}
    return {root: _codec(root, words) for root, words in dict(given or {}).items()}


def _codec(root: str, words: str) -> Codec:
    name, colon, level = words.partition(":")
    if name not in LEVELS or (colon and not (level.isdecimal() and int(level) in LEVELS[name])):
        where = f"`compression` of `{root}`" if root else "`compression`"
        levels = ", ".join(f"{one} {known[0]} to {known[-1]}" for one, known in LEVELS.items() if known)
        raise SettingsError(
            f"{where} is {words!r}; known are {', '.join(LEVELS)}, some of them with a level, such as `zstd:3` "
            f"({levels}).{suggestion(name, LEVELS)}"
        )
    return Codec(name, int(level) if colon else None)


def codec_of(column: str, by_root: Mapping[str, Codec]) -> Codec | None:
    """Return the codec of a column: that of the longest root above it, or None.

    A codec for ``obs`` also applies to ``final_obs``.
    """
    name = column
    if col.is_under(column, col.FINAL_OBS) and not any(col.is_under(column, root) for root in by_root):
        name = col.as_obs(column)
    roots = [root for root in by_root if root == ALL or col.is_under(name, root)]
    return by_root[max(roots, key=len)] if roots else None


def check_roots(by_root: Mapping[str, Codec], columns: Iterable[str]) -> None:
    """Raise a DataError if a codec is for a column that is not among ``columns``."""
    there = list(columns)
    for root in by_root:
        if root != ALL and not col.under(there, root):
            listed = f"{', '.join(there)}.{suggestion(root, there)}"
            raise DataError(f"`compression` names `{root}`, but there is no such column: {listed}")


def check_encoding(encoding: str) -> None:
    """Raise a SettingsError if ``encoding`` is unknown."""
    if encoding not in get_args(Encoding):
        raise SettingsError(f"`encoding` is {encoding!r}. {choice(encoding, get_args(Encoding))}")


def parquet_options(schema: pa.Schema, codecs: Mapping[str, Codec], encoding: Encoding) -> dict[str, Any]:
    """Return the options of the Parquet writer for each column.

    Numbers are encoded as separate bytes or as differences, and compressed by LZ4; images and strings by Zstandard.
    ``codecs`` takes precedence. On CartPole, files are smaller than with Zstandard alone, and reading is 50 % faster.
    Dictionaries and statistics of numbers would more than halve the speed, so only keys have them. With ``plain``,
    numbers are stored as they are, and the default codec is Snappy.
    """
    encodings, compression, levels = {}, {}, {}
    for field in schema:
        is_list = pa.types.is_fixed_size_list(field.type) or pa.types.is_list(field.type)
        path = f"{field.name}.list.element" if is_list else field.name
        kind = field.type.value_type if is_list else field.type
        if encoding == "plain":
            usual = Codec("snappy")
        elif pa.types.is_floating(kind) and kind != pa.float16():
            encodings[path], usual = "BYTE_STREAM_SPLIT", Codec("lz4")
        elif kind in (pa.int32(), pa.int64()) and not is_list:
            encodings[path], usual = "DELTA_BINARY_PACKED", Codec("lz4")
        else:
            usual = Codec("zstd", 1)
        codec = codec_of(field.name, codecs) or usual
        compression[path] = codec.name
        if codec.level is not None:
            levels[path] = codec.level
    order = [(col.SEGMENT, "ascending"), (col.T_INDEX, "ascending")]
    return {
        "compression": compression,
        "compression_level": levels,
        "use_dictionary": [name for name in IDS if name in schema.names],
        "column_encoding": encodings,
        "write_statistics": [col.EPISODE_ID],  # lets a filter on episodes skip row groups
        "write_page_checksum": True,  # so that a flipped bit raises an error when it is read
        "sorting_columns": pq.SortingColumn.from_ordering(schema, order),
    }


# -- format 1 -------------------------------------------------------------------------------------------------------

MANIFEST: Final = "recording.json"
"""The file that recordings of format 1 have beside their data files. It is no longer written."""
_LONGEST_NAME: Final = 255


class Manifest(NamedTuple):
    """The contents of ``recording.json``."""

    header: Header
    rows: dict[str, int]
    """The number of rows of each data file, by its path relative to the folder."""


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read ``recording.json`` of ``folder``; None if it does not exist.

    Raises:
        DataError: it exists but is invalid.
    """
    path = folder / MANIFEST
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")  # such as a pipe, which has no end
        data = loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(
            f"{path}: can't be read as JSON ({error}). Each Parquet file carries the same header: move {MANIFEST} away "
            "to read the recording without it."
        ) from error
    header = Header.from_json(data, path)
    files = data.get("files", {})
    if not isinstance(files, dict) or not all(
        isinstance(f, dict) and type(f.get("rows")) is int for f in files.values()
    ):
        raise DataError(f"{path}: `files` is not a list of files with their rows. Move {MANIFEST} away to go on.")
    for name in files:
        parts = name.split("/")
        is_odd = not name or "\0" in name or "\\" in name or max(map(len, parts)) > _LONGEST_NAME
        if is_odd or PurePosixPath(name).is_absolute() or ".." in parts:
            raise DataError(
                f"{path}: `files` lists {reprlib.repr(name)}, which is no file below this folder. Restore it from a "
                f"copy, or move {MANIFEST} away to go on."
            )
    return Manifest(header, {name: facts["rows"] for name, facts in files.items()})
