# SPDX-License-Identifier: Apache-2.0
"""Sources of the user's own: files of any kind, turned into Experience by a function."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

from etude import columns as col
from etude.errors import DataError, EtudeError, SettingsError
from etude.experience import Experience
from etude.recordings.formats.custom_columns import Fitter, Given
from etude.recordings.formats.custom_rows import (
    LineCounts,
    Paths,
    RawRow,
    Span,
    Together,
    binary_rows,
    common,
    decoded,
    files_of,
    names_of,
    parts_of,
    spans_of,
    text_rows,
)
from etude.recordings.formats.parts import MAX_ROWS, Place, Problem, chosen
from etude.recordings.layout import Header
from etude.recordings.pieces import row_bytes
from etude.spaces import Space

Unit = Sequence[RawRow[bytes]]
PART_BYTES: Final = 64 * 2**20
"""What the Experience of a part takes in memory, about."""
_LEAST_BYTES: Final = 64 * 2**10
_MOST_FAILED: Final = 16
"""After so many rows without one that can be read, the function is taken to be at fault."""


@dataclasses.dataclass(frozen=True)
class CustomSource:
    """Files, and a function that makes Experience of them; made by `read_binary` and `read_text`."""

    paths: Paths
    to_experience: Callable[..., Any]
    obs_space: Space
    action_space: Space
    env: str | None
    kind: Literal["binary", "text"]
    together: Together
    filesystem: Any


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
    """Files of any kind (images, audio, XML, protobuf), each given as bytes to a function that makes Experience of it.

    Nothing is read before `Recording.open`, which reads the first file; the others are read when their steps are asked
    for, in parts of about 64 MiB or 65,536 steps (a part holds one file, or one folder, at least).

    Args:
        paths: A file, a folder (all files in it, however deep, but hidden ones), a glob, or a list of these; a path or
            a URL. Files of a folder or glob are taken in the order of their full paths.
        to_experience: Gets a `RawRow` (``path``, ``data``), and gives an `Experience`; or a dict of the columns of one
            episode: ``obs`` (``[T, ...]``, or ``[T + 1, ...]`` with what was observed at the end), ``action``,
            ``reward`` and any others, and, where they are known, ``terminated``, ``truncated``, ``final_obs``,
            ``episode_id``, ``agent_id``, ``module_id`` and ``t_start``; or a list of these; or None, where there is
            nothing in it. An episode without an id is named after its file.
        obs_space: What one observation is.
        action_space: What one action is.
        env: The id of the env, where there is one.
        together: ``"folder"``: the function gets a list of all files of one folder at once (an episode whose steps are
            images). ``"file"``: one at a time.
        filesystem: A file system of pyarrow's or fsspec's that ``paths`` are in; None: as they say.

    Returns:
        What `Recording.open` takes.

    Raises:
        SettingsError: an argument is not what it should be.
    """
    _check(to_experience, together, ("file", "folder"))
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
    """Text in UTF-8, each line given to a function that makes Experience of it; see `read_binary`.

    Args:
        paths: As of `read_binary`.
        to_experience: Gets a `RawRow`: ``path``, ``data`` (the line without its end) and ``number`` (from 0).
        obs_space: What one observation is.
        action_space: What one action is.
        env: The id of the env, where there is one.
        together: ``"line"``: the function gets one line at a time, and a large file is read in parts. ``"file"``: it
            gets a list of all lines of one file at once.
        filesystem: As of `read_binary`.

    Returns:
        What `Recording.open` takes.

    Raises:
        SettingsError: an argument is not what it should be.
    """
    _check(to_experience, together, ("line", "file"))
    return CustomSource(paths, to_experience, obs_space, action_space, env, "text", together, filesystem)


def _check(to_experience: Any, together: str, known: Sequence[str]) -> None:
    if not callable(to_experience):
        raise SettingsError(f"to_experience is {to_experience!r}: give a function that makes Experience of a row.")
    if together not in known:
        raise SettingsError(f"together is {together!r}; known are {' and '.join(map(repr, known))}.")


def open_parts(source: CustomSource) -> "CustomParts":
    """Open the files of ``source``: the first rows are read, until there are steps.

    Raises:
        DataError: there are no files, or no steps in them; or the first ones can't be read.
    """
    return CustomParts(source)


class CustomParts:
    """Files behind a function; see `etude.recordings.formats.parts.Parts`."""

    def __init__(self, source: CustomSource) -> None:
        self._source = source
        self.format = f"custom-{source.kind}"
        self.files = files_of(source.paths, source.filesystem)
        self._fitter = Fitter(source.obs_space, source.action_space)
        self._rows: dict[int, int] = {}
        self._counts = LineCounts()
        self._depth = common([names_of(file)[:-1] for file in self.files])
        units = spans_of(self.files, source.together)
        self._parts = parts_of(units, self._budget(units), cut=source.together == "line")
        self.columns = list(self._fitter.schema)
        function = getattr(source.to_experience, "__qualname__", type(source.to_experience).__name__)
        self.header = Header(source.obs_space, source.action_space, source.env, {"to_experience": function})

    def _budget(self, units: Sequence[Sequence[Span]]) -> int:
        """How many bytes of files make a part, by what the first ones with steps become."""
        size, failed = 0, list[DataError]()
        for spans in units:
            for unit in self._units(spans):
                size += sum(len(row.data) for row in unit)
                try:
                    found = self._made(unit)
                except DataError as error:
                    failed.append(error)
                    if len(failed) == _MOST_FAILED:
                        raise failed[0] from failed[0].__cause__
                    continue
                if found:
                    steps = sum(exp.num_steps for exp in found)
                    share = max(steps / MAX_ROWS, steps * row_bytes(found[0]) / PART_BYTES, size / PART_BYTES)
                    return max(_LEAST_BYTES, int(size / share))
        if failed:
            raise failed[0] from failed[0].__cause__
        where = ", ".join(str(path) for path in self.files[:3])
        raise DataError(f"{where}: to_experience gave no steps for any row of {len(self.files):,} files.")

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """The pieces; each is about 65,536 steps or 64 MiB, and one file (or folder, or line) at least."""
        return len(self._parts)

    def rows(self, k: int) -> int:
        """The steps of part ``k``; calls the function for all its rows the first time."""
        if k not in self._rows:
            self.load(k, ())
        return self._rows[k]

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``; see `etude.recordings.formats.parts.Parts`."""
        exp = self._loaded(k, columns, None)
        self._rows[k] = exp.num_steps
        return exp

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """What can be read of part ``k``, and the rows that can't; see `etude.recordings.tolerance`."""
        problems: list[Problem] = []
        return self._loaded(k, columns, problems), problems

    def _loaded(self, k: int, columns: Sequence[str] | None, problems: list[Problem] | None) -> Experience:
        """Part ``k``; with ``problems``, rows that can't be read are left out and told there, and what is odd, too."""
        names = chosen(self.columns, columns, str(self.files[0]))
        found: list[Experience] = []
        for spans in self._parts[k]:
            for unit in self._units(spans):
                try:
                    made = self._made(unit)
                except DataError as error:
                    if problems is None:
                        raise
                    problems.append(_unreadable(unit, error))
                    continue
                found += (_only(exp, names) for exp in made)
                if problems is not None:
                    problems += (problem for exp in made for problem in self._not_done(unit, exp))
        return Experience.concat(found) if found else _only(self._fitter.nothing(), names)

    def _units(self, spans: Sequence[Span]) -> Iterator[Unit]:
        return (
            binary_rows(spans)
            if self._source.kind == "binary"
            else text_rows(spans, self._source.together, self._counts)
        )

    def _made(self, unit: Unit) -> list[Experience]:
        """The Experience that the function makes of some rows, checked."""
        source, place = self._source, self._place(unit)
        rows = [decoded(row) for row in unit] if source.kind == "text" else list(unit)
        alone = source.together == "line" or (source.kind, source.together) == ("binary", "file")
        try:
            given = source.to_experience(rows[0] if alone else rows)
        except EtudeError as error:
            raise DataError(f"{place}: {error}") from error
        except Exception as error:
            name = type(error).__name__
            raise DataError(
                f"{place}: to_experience raised {name}: {error}. Mend the function, or leave the row out (give None)."
            ) from error
        try:
            return self._fitter.fitted(given, self._name(unit))
        except DataError as error:
            raise DataError(f"{place}: to_experience {str(error).rstrip('.')}.") from error

    def _not_done(self, unit: Unit, exp: Experience) -> Iterator[Problem]:
        for i in np.flatnonzero(~exp.segments.done).tolist():
            what = f"episode {exp.segments.episode_id[i]!r} is neither terminated nor truncated"
            text = f"{self._place(unit)}: {what}; say which, where it ends here."
            yield Problem("not_done", text, unit[0].path, unit[0].number, col.TERMINATED, 1, True, harmless=True)

    def _place(self, unit: Unit) -> str:
        if self._source.together == "folder":
            return f"{'/'.join(names_of(unit[0].path)[:-1])} ({len(unit):,} files)"
        lines = f", row {unit[0].number}" if self._source.together == "line" else ""
        return f"{unit[0].path}{lines}"

    def _name(self, unit: Unit) -> str:
        """The id of an episode that has none: where it lies, as far as files differ in it."""
        names = names_of(unit[0].path)
        name = "/".join(names[self._depth - 1 : -1] if self._source.together == "folder" else names[self._depth :])
        return f"{name}:{unit[0].number}" if self._source.together == "line" else name

    # -- problems ----------------------------------------------------------------------------------------------

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is: in which row of a file, and which step of what was made of it."""
        for spans in self._parts[k]:
            for unit in self._units(spans):
                try:
                    num = sum(exp.num_steps for exp in self._made(unit))
                except DataError:
                    continue  # its steps are not counted
                if row < num:
                    return Place(f"{self._place(unit)}, step {row}", unit[0].path, unit[0].number)
                row -= num
        return Place(str(self.files[0]), str(self.files[0]))

    def problems(self) -> Iterator[Problem]:
        """None: all that is wrong is seen in the steps."""
        return iter(())


def _unreadable(unit: Unit, error: DataError) -> Problem:
    return Problem("unreadable", str(error), unit[0].path, unit[0].number, repairable=True)


def _only(exp: Experience, names: Sequence[str]) -> Experience:
    steps = {name: exp.steps[name] for name in names}
    return Experience(steps, exp.offsets, exp.segments, {n: c for n, c in exp.final_obs.items() if n in steps})
