# SPDX-License-Identifier: Apache-2.0
"""User-defined sources: files of any kind, converted to experience by a function."""

import contextlib
import dataclasses
import itertools
import operator
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.display import counted, short
from etude.errors import DataError, EtudeError, SettingsError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath, RemotePath, Systems, absolute, expanded, visible_files
from etude.recordings.format import MAX_ROWS, Contents, Format, Place, Problem, Unit, grouped
from etude.recordings.formats.inferring import reserved
from etude.recordings.layout import Header
from etude.recordings.pieces import row_bytes
from etude.spaces import Flattener, Space, are_choices, leaf_dtype, leaf_shape, leaves

# -- raw rows: whole files as bytes, or lines of text ----------------------------------------------------------------


Raw = TypeVar("Raw", bytes, str)
Together = Literal["file", "folder", "line"]
Location = str | os.PathLike[str] | RemotePath
Paths = Location | Sequence[Location]


_BLOCK: Final = 2**20


class RawRow(NamedTuple, Generic[Raw]):
    """The input of a user's function: a file, or a line of one."""

    path: str
    """The path of the file."""
    data: Raw
    """The bytes of the file; or the line, as text without its line ending."""
    number: int
    """The index of the line in its file, from 0; 0 if the row is a file."""

    def __repr__(self) -> str:  # type: ignore[misc]  # mypy takes a generic NamedTuple for another type
        return short(self, path=self.path, data=self.data, number=self.number)


class ByteSpan(NamedTuple):
    """Bytes ``start:stop`` of a file; for text, the lines that begin there."""

    file: AnyPath
    start: int
    stop: int


def parts_of(units: Sequence[Sequence[ByteSpan]], budget: int, *, cut: bool) -> list[list[Sequence[ByteSpan]]]:
    """Group units into parts of about ``budget`` bytes, at least one unit each; with ``cut``, units may be divided."""
    pieces = [piece for unit in units for piece in (_cut(unit, budget) if cut else [unit])]
    sizes = np.array([sum(span.stop - span.start for span in piece) for piece in pieces], np.int64)
    return [pieces[a:b] for a, b in itertools.pairwise(grouped(sizes, budget).tolist())]


def _cut(unit: Sequence[ByteSpan], budget: int) -> Iterator[Sequence[ByteSpan]]:
    for span in unit:
        for start in range(span.start, max(span.stop, span.start + 1), budget):
            yield [ByteSpan(span.file, start, min(start + budget, span.stop))]


def spans_of(files: Sequence[AnyPath], together: Together) -> list[list[ByteSpan]]:
    """Group files into units: each on its own, or those of one folder, in the order given."""
    units: dict[AnyPath, list[ByteSpan]] = {}
    for file in files:
        with _reading(file):
            span = ByteSpan(file, 0, file.stat().st_size)
        units.setdefault(file.parent if together == "folder" else file, []).append(span)
    return list(units.values())


@contextlib.contextmanager
def _reading(file: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error}). Restore it, or leave it out.") from error


class LineCounts:
    """Counts the lines that begin before a byte of a text file; counts are cached."""

    def __init__(self) -> None:
        self._ends: dict[AnyPath, dict[int, int]] = {}  # by file: the number of line ends in the first n bytes, by n

    def before(self, span: ByteSpan) -> int:
        """The number of lines that begin before ``span``."""
        if not span.start:
            return 0
        known, stop = self._ends.setdefault(span.file, {0: 0}), span.start - 1
        counted = max(size for size in list(known) if size <= stop)
        with span.file.open("rb") as file:
            file.seek(counted)
            blocks = iter(lambda: file.read(min(_BLOCK, stop - file.tell())), b"")
            known[stop] = known[counted] + sum(block.count(b"\n") for block in blocks)
        return known[stop] + 1


def text_rows(unit: Sequence[ByteSpan], together: Together, counts: LineCounts) -> Iterator[Sequence[RawRow[bytes]]]:
    """Yield the undecoded lines of a unit: each on its own, or all of a file at once; empty files are left out."""
    for span in unit:
        if together == "line":
            yield from ([row] for row in _lines(span, counts))
        elif span.stop:
            yield list(_lines(span, counts))


def _lines(span: ByteSpan, counts: LineCounts) -> Iterator[RawRow[bytes]]:
    """The lines that begin in a span; their numbers are counted from the start of the file."""
    with _reading(span.file), span.file.open("rb") as file:
        number = counts.before(span)
        if span.start:
            file.seek(span.start - 1)
            file.readline()  # the rest of a line that began earlier, or at least its end
        while file.tell() < span.stop and (line := file.readline()):
            yield RawRow(str(span.file), line.removesuffix(b"\n").removesuffix(b"\r"), number)
            number += 1


def decoded(row: RawRow[bytes]) -> RawRow[str]:
    """Decode a line as text.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return RawRow(row.path, row.data.decode("utf-8" if row.number else "utf-8-sig"), row.number)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{row.path}, row {row.number}: is not UTF-8 text (byte {error.start} of the line is "
            f"{row.data[error.start]:#04x}). Convert it to UTF-8; or read the file as bytes, with read_binary."
        ) from error


def names_of(path: Any) -> list[str]:
    """The components of a path."""
    return str(path).replace(os.sep, "/").split("/")


def files_of(paths: Paths, filesystem: Any) -> list[AnyPath]:
    """Find the files at ``paths``, in the order given; those of a folder are sorted by full path.

    Raises:
        DataError: there are none.
    """
    files: dict[AnyPath, None] = {}
    known: Systems = {}
    for given in [paths] if isinstance(paths, str | os.PathLike | RemotePath) else paths:
        for place in expanded(given, filesystem, known):
            found = [place] if place.is_file() else visible_files(place)
            if not found:
                raise DataError(f"{place}: there is no file here. Give a file, a folder, a glob, or a list of these.")
            files.update(dict.fromkeys(found))
    return list(files)


# -- the results of a function, as experience that fits the spaces ---------------------------------------------------


Given: TypeAlias = Experience | Mapping[str, Any] | None
Schema: TypeAlias = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and row shape of each column."""

_SEGMENT: Final = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, "t_start", col.TERMINATED, col.TRUNCATED, col.FINAL_OBS)


_CAST: Final = {"i": "biu", "u": "biu", "f": "biuf"}
"""The kinds of dtypes that are cast to each kind of dtype."""


class Fitter:
    """Converts the results of a function to experience with the same columns every time.

    Columns are cast to integers only if no number changes, and to floats only if none becomes infinite. The first
    result with steps determines which columns there are in addition to those of the spaces, and their dtypes and
    shapes.
    """

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        self._spaces = {col.OBS: obs_space, col.ACTION: action_space}
        self.leaves = {**leaves(obs_space, col.OBS), **leaves(action_space, col.ACTION)}
        self.schema: Schema = {name: (leaf_dtype(leaf), leaf_shape(leaf)) for name, leaf in self.leaves.items()}
        self._known = False

    def fitted(self, given: Any, name: str) -> list[Experience]:
        """Convert a result; returns one experience for each item that has steps.

        Args:
            given: An Experience, a dict of one episode's columns, None, or a list of these.
            name: The id for an episode without one.

        Raises:
            DataError: the result is something else, or does not fit; the message names the column, what was found, and
                what was expected.
        """
        many = given if isinstance(given, list | tuple) else [given]
        made = []
        for i, one in enumerate(many):
            if one is None:
                continue
            if isinstance(one, Mapping):
                one = self._episode(one, name if len(many) == 1 else f"{name}-{i}")
            if not isinstance(one, Experience):
                raise DataError(f"gave a {type(one).__name__}, not an Experience, a dict of columns, or a list of such")
            one.validate(finite=())
            if one.num_steps:
                made.append(self._checked(one))
        return made

    def nothing(self) -> Experience:
        """Return an experience of zero rows with all columns."""
        steps = {name: np.zeros((0, *shape), dtype) for name, (dtype, shape) in self.schema.items()}
        obs = col.subtree(steps, col.OBS)
        return Experience(steps, np.zeros(1, np.int64), Segments.of(0, episode_id=[]), obs)

    def _episode(self, given: Mapping[str, Any], name: str) -> Experience:
        """Convert a dict of columns to one segment."""
        columns: Columns = {}
        for key, value in given.items():
            if key not in _SEGMENT:
                columns |= self._flat(key, value)
        actions = col.subtree(columns, col.ACTION)
        if not actions or not col.subtree(columns, col.OBS):
            raise DataError(f"gave the columns {', '.join(columns) or 'none'}, but `obs` and `action` are needed")
        for key, column in columns.items():
            if not column.ndim:
                raise DataError(f"gave `{key}` as a single number, not one for each step")
            if key in self.leaves:
                columns[key] = self._cast(key, column, "column")
        if (rewards := columns.get(col.REWARD)) is not None:
            if rewards.size != len(rewards):
                shape = list(rewards.shape[1:])
                raise DataError(f"gave `{col.REWARD}` with rows of shape {shape}, not one number each")
            columns[col.REWARD] = rewards.reshape(-1)
        num = len(next(iter(actions.values())))
        final = self._final(given, columns, num)
        keys: dict[str, Any] = {key: _id(key, given) for key in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID)}
        keys |= {flag: _flag(flag, given.get(flag, False), num) for flag in (col.TERMINATED, col.TRUNCATED)}
        keys[col.EPISODE_ID] = [name if keys[col.EPISODE_ID] is None else keys[col.EPISODE_ID]]
        segments = Segments.of(1, t_start=_step(given.get("t_start", 0)), has_final_obs=bool(final), **keys)
        for key, column in columns.items():
            if len(column) != num:
                raise DataError(f"gave `{key}` with {len(column)} rows, but there are {num} actions")
        if not num:
            return Experience({}, np.zeros(1, np.int64), segments[:0], {})
        final = final or {key: np.zeros_like(column[:1]) for key, column in col.subtree(columns, col.OBS).items()}
        return Experience(columns, offsets_of(np.array([num])), segments, final)

    def _final(self, given: Mapping[str, Any], columns: Columns, num: int) -> Columns:
        """The final observation, ``[1, ...]``; {} if unknown. If it is the last row of ``columns``, it is removed."""
        obs = col.subtree(columns, col.OBS)
        if col.FINAL_OBS in given:
            flat = self._flat(col.OBS, given[col.FINAL_OBS])
            return {name: self._cast(name, column[None], col.FINAL_OBS) for name, column in flat.items()}
        if not all(len(column) == num + 1 for column in obs.values()):
            return {}
        columns |= {name: column[:-1] for name, column in obs.items()}
        return {name: column[-1:] for name, column in obs.items()}

    def _flat(self, key: str, value: Any) -> Columns:
        if reserved(key):
            hint = " Give `obs` one row more than `action`, or `final_obs`." if key == col.NEXT_OBS else ""
            raise DataError(f"gave the column `{key}`, a name that is reserved for recordings.{hint}")
        if key in self._spaces and (key not in self.leaves or not isinstance(value, np.ndarray)):
            space = self._spaces[key]
            try:
                if isinstance(space, spaces.Tuple) and len(value) != len(space):
                    raise DataError(f"gave `{key}` with {len(value)} parts, but its space has {len(space)}: {space}")
                parts = Flattener(space, key)(value)
            except (LookupError, TypeError) as error:
                wanted = ", ".join(leaves(space, key))
                raise DataError(f"gave `{key}` without the parts of its space: {wanted} ({error!r})") from error
        else:
            parts = {key: value}
        return {name: _array(name, part) for name, part in parts.items()}

    def _checked(self, exp: Experience) -> Experience:
        steps = {name: np.asarray(column) for name, column in exp.numpy().steps.items()}
        if not self._known:
            for name, column in steps.items():
                self.schema.setdefault(name, (column.dtype, column.shape[1:]))
        for name in [name for name in {**self.schema, **steps} if (name in self.schema) != (name in steps)]:
            kind = "no column" if name in self.schema else "the column"
            raise DataError(f"gave {kind} `{name}`; wanted are {', '.join(self.schema)}; found: {', '.join(steps)}")
        final_obs = {}
        for name, final in exp.numpy().final_obs.items():
            known = exp.segments.has_final_obs.reshape(-1, *(1,) * (np.ndim(final) - 1))
            if not known.all() and np.shape(final)[1:] == steps[name].shape[1:]:  # meaningless zeros need not fit
                final = np.where(known, final, steps[name][0].astype(final.dtype))
            final_obs[name] = self._cast(name, np.asarray(final), col.FINAL_OBS)
        fitted = {name: self._cast(name, steps[name], "column") for name in self.schema}
        self._known = True
        return Experience(fitted, exp.offsets, exp.segments, final_obs)

    def _cast(self, name: str, column: NDArray[Any], what: str) -> NDArray[Any]:
        dtype, shape = self.schema[name]
        leaf = self.leaves.get(name)
        wanted = f"{dtype} {list(shape)} a step" + (f" ({leaf})" if leaf is not None else ", as in the first rows")
        is_fit = column.dtype == dtype or column.dtype.kind in _CAST.get(dtype.kind, "")
        if column.shape[1:] != shape or not is_fit:
            found = f"{column.dtype} {list(column.shape[1:])}"
            raise DataError(f"gave the {what} `{name}` as {found} a step, not {wanted}")
        with np.errstate(over="ignore"):
            out = column.astype(dtype, copy=False)
        if not np.can_cast(column.dtype, dtype):
            lost = out != column if dtype.kind in "iu" else np.isinf(out) & np.isfinite(column)
            if lost.any():
                raise DataError(
                    f"gave the {what} `{name}` with {column[lost].flat[0]} in it, which does not fit {wanted}"
                )
        inside = None if leaf is None else are_choices(leaf, out)
        if inside is not None and not inside.all():
            raise DataError(f"gave the {what} `{name}` with {out[~inside][0]} in it, which is outside of {leaf}")
        return out


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"gave `{name}`, which is not an array of numbers of one shape ({error})") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"gave `{name}` as {array.dtype}, not numbers: turn it into numbers, or leave it out")
    return array


def _refused(name: str, value: Any, advice: str) -> DataError:
    return DataError(f"gave `{name}` as {str(value)[:60]!r}: give {advice}")


def _id(name: str, given: Mapping[str, Any]) -> str | None:
    value = given.get(name)
    if not isinstance(value, Hashable):
        raise _refused(name, value, "one text for the whole episode")
    return None if value is None else str(value)


def _step(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**62:
        raise _refused("t_start", value, "the number of the first step, from 0")
    return number


def _flag(name: str, value: Any, num: int) -> bool:
    flags = _array(name, value)
    if flags.dtype.kind == "f" or flags.shape not in ((), (num,)):
        raise _refused(name, value, f"true or false, or one for each of the {num} steps")
    if flags.ndim and flags[:-1].any():
        raise DataError(f"gave `{name}` true at step {int(flags.argmax())} of {num}: the episode continues after it")
    return bool(flags.any())


# -- the format ------------------------------------------------------------------------------------------------------


Raws = Sequence[RawRow[bytes]]
"""The rows for a single call of the function."""
PART_BYTES: Final = 64 * 2**20
"""The approximate size of a part's experience in memory."""
_LEAST_BYTES: Final = 64 * 2**10
_MOST_FAILED: Final = 16
"""After this many unreadable rows and no readable one, the function is assumed to be at fault."""


@dataclasses.dataclass(frozen=True)
class CustomSource:
    """Files, and a function that converts them to experience; created by `read_binary` and `read_text`."""

    paths: Paths
    to_experience: Callable[..., Any]
    obs_space: Space
    action_space: Space
    env: str | None
    kind: Literal["binary", "text"]
    together: Together
    filesystem: Any

    def __post_init__(self) -> None:
        if not callable(self.to_experience):
            raise SettingsError(f"to_experience is {self.to_experience!r}: give a function that returns Experience.")
        known = ("file", "folder") if self.kind == "binary" else ("line", "file")
        if self.together not in known:
            raise SettingsError(f"together is {self.together!r}; known are {known[0]!r} and {known[1]!r}.")


def read_binary(
    paths: Paths,
    to_experience: "Callable[[RawRow[bytes]], Given | list[Given]] | Callable[[list[RawRow[bytes]]], Any]",
    *,
    obs_space: Space,
    action_space: Space,
    env: str | None = None,
    together: Literal["file", "folder"] = "file",
    filesystem: Any = None,
) -> CustomSource:
    """Read files of any kind (images, audio, XML, protobuf) by a function that converts their bytes to experience.

    No file is read until `Recording.open`, which reads the first one. The others are read when their steps are
    requested, in parts of about 64 MiB or 65,536 steps (but at least one file, or one folder).

    Args:
        paths: A file, a folder (all files below it, except hidden ones), a glob, or a list of these; each a path or
            URL. The files of a folder or glob are sorted by full path.
        to_experience: Gets a `RawRow` (``path``, ``data``). Returns an `Experience`; or a dict of the columns of one
            episode: ``obs`` (``[T, ...]``, or ``[T + 1, ...]`` with the final observation), ``action``, ``reward`` and
            any others, and, where known, ``terminated`` and ``truncated`` (a bool, or one for each step),
            ``final_obs``, ``episode_id``, ``agent_id``, ``module_id`` and ``t_start``; or a list of these; or None if
            there is nothing in it. An episode without an id is named after its file.
        obs_space: The space of one observation.
        action_space: The space of one action.
        env: The id of the env, if there is one.
        together: ``"folder"`` passes a list of all files of a folder in one call (an episode whose steps are images),
            ``"file"`` one file at a time.
        filesystem: The pyarrow or fsspec file system of ``paths``; by default, the URL's, or the local one.

    Returns:
        A source for `Recording.open`.

    Raises:
        SettingsError: an argument is invalid.
    """
    return CustomSource(paths, to_experience, obs_space, action_space, env, "binary", together, filesystem)


def read_text(
    paths: Paths,
    to_experience: "Callable[[RawRow[str]], Given | list[Given]] | Callable[[list[RawRow[str]]], Any]",
    *,
    obs_space: Space,
    action_space: Space,
    env: str | None = None,
    together: Literal["line", "file"] = "line",
    filesystem: Any = None,
) -> CustomSource:
    """Read UTF-8 text by a function that converts lines to experience; see `read_binary`.

    Args:
        paths: As for `read_binary`.
        to_experience: Gets a `RawRow`: ``path``, ``data`` (the line without its end) and ``number`` (from 0).
        obs_space: The space of one observation.
        action_space: The space of one action.
        env: The id of the env, if there is one.
        together: ``"line"`` passes one line at a time, and reads large files in parts. ``"file"`` passes a list of all
            lines of a file in one call.
        filesystem: As for `read_binary`.

    Returns:
        A source for `Recording.open`.

    Raises:
        SettingsError: an argument is invalid.
    """
    return CustomSource(paths, to_experience, obs_space, action_space, env, "text", together, filesystem)


class _CustomPart(NamedTuple):
    """The data of a unit. Everything but the spans is shared by all units."""

    spans: Sequence[Sequence[ByteSpan]]
    fitter: Fitter
    counts: LineCounts
    depth: int
    """The number of leading path components that all files share."""


class CustomFormat(Format):
    """Files that a user's function converts."""

    def __init__(self, source: CustomSource) -> None:
        self._source = source
        self.name = f"custom-{source.kind}"

    def describe(self) -> Contents:
        """Return the contents; reads rows until the function returns steps.

        Raises:
            DataError: there are no files, or no steps in them; or the first ones can't be read.
        """
        source = self._source
        files = files_of(source.paths, source.filesystem)
        folders = zip(*(names_of(absolute(str(file)))[:-1] for file in files), strict=False)
        depth = sum(1 for _ in itertools.takewhile(lambda names: len({*names}) == 1, folders))
        spans = spans_of(files, source.together)
        whole = _CustomPart(spans, Fitter(source.obs_space, source.action_space), LineCounts(), depth)
        parts = parts_of(spans, self._budget(whole, files), cut=source.together == "line")
        function = getattr(source.to_experience, "__qualname__", type(source.to_experience).__name__)
        header = Header(source.obs_space, source.action_space, source.env, {"to_experience": function})
        units = [Unit(k, data=whole._replace(spans=own)) for k, own in enumerate(parts)]
        return Contents(header, list(whole.fitter.schema), units, files)

    def _budget(self, whole: _CustomPart, files: Sequence[AnyPath]) -> int:
        """The number of file bytes in a unit, estimated from the first rows with steps."""
        size, failed = 0, list[DataError]()
        for raws, made in self._results(whole):
            size += sum(len(row.data) for row in raws)
            if isinstance(made, DataError):
                failed.append(made)
                if len(failed) == _MOST_FAILED:
                    break
            elif made:
                steps = sum(exp.num_steps for exp in made)
                share = max(steps / MAX_ROWS, steps * row_bytes(made[0]) / PART_BYTES, size / PART_BYTES)
                return max(_LEAST_BYTES, int(size / share))
        if failed:
            raise failed[0]
        where = ", ".join(str(path) for path in files[:3])
        raise DataError(f"{where}: to_experience gave no steps for any row of {counted(len(files), 'file')}.")

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Convert the rows of a unit by the function."""
        found: list[Experience] = []
        for raws, made in self._results(unit.data):
            if not isinstance(made, DataError):
                found += (exp.only(columns) for exp in made)
            elif problems is None:
                raise made
            else:
                problems.append(Problem("unreadable", str(made), raws[0].path, raws[0].number, repairable=True))
        fitter: Fitter = unit.data.fitter
        return Experience.concat(found) if found else fitter.nothing().only(columns)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a step: the file or line that it came from, and its index in the function's result."""
        for raws, made in self._results(unit.data):
            num = 0 if isinstance(made, DataError) else sum(exp.num_steps for exp in made)
            if row < num:
                return Place(f"{self._place(raws)}, step {row}", raws[0].path, raws[0].number)
            row -= num
        return super().place(unit, row, exp)

    def _results(self, part: _CustomPart) -> Iterator[tuple[Raws, list[Experience] | DataError]]:
        """Yield the rows for each call of the function, with the checked result or the error."""
        for spans in part.spans:
            for raws in self._rows(spans, part.counts):
                try:
                    yield raws, self._made(raws, part)
                except DataError as error:
                    yield raws, error

    def _rows(self, spans: Sequence[ByteSpan], counts: LineCounts) -> Iterator[Raws]:
        if self._source.kind == "text":
            yield from text_rows(spans, self._source.together, counts)
            return
        rows = []
        for span in spans:
            with _reading(span.file):
                rows.append(RawRow(str(span.file), span.file.read_bytes(), 0))
        yield rows

    def _made(self, raws: Raws, part: _CustomPart) -> list[Experience]:
        source, place = self._source, self._place(raws)
        rows = [decoded(row) for row in raws] if source.kind == "text" else list(raws)
        alone = source.together == "line" or (source.kind, source.together) == ("binary", "file")
        try:
            given = source.to_experience(rows[0] if alone else rows)
        except EtudeError as error:
            raise DataError(f"{place}: {error}") from error
        except Exception as error:
            name = type(error).__name__
            raise DataError(
                f"{place}: to_experience raised {name}: {error}. Fix the function, or leave the row out (return None)."
            ) from error
        try:
            return part.fitter.fitted(given, self._name(raws, part.depth))
        except DataError as error:
            raise DataError(f"{place}: to_experience {str(error).rstrip('.')}.") from error

    def _place(self, raws: Raws) -> str:
        if self._source.together == "folder":
            return f"{'/'.join(names_of(raws[0].path)[:-1])} ({counted(len(raws), 'file')})"
        lines = f", row {raws[0].number}" if self._source.together == "line" else ""
        return f"{raws[0].path}{lines}"

    def _name(self, raws: Raws, depth: int) -> str:
        """The id for an episode without one: its path, as far as the files' paths differ."""
        names = names_of(absolute(raws[0].path))  # the same in any process, whatever its working folder
        name = "/".join(names[depth - 1 : -1] if self._source.together == "folder" else names[depth:])
        return f"{name}:{raws[0].number}" if self._source.together == "line" else name
