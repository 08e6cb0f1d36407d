# SPDX-License-Identifier: Apache-2.0
"""Sources of the user's own: files of any kind, turned into Experience by a function."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from etude import columns as col
from etude.errors import DataError, EtudeError, SettingsError
from etude.experience import Experience
from etude.files import AnyPath, absolute
from etude.recordings.format import MAX_ROWS, Contents, Format, Place, Problem, Unit
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
from etude.recordings.layout import Header
from etude.recordings.pieces import row_bytes
from etude.spaces import Space

Raws = Sequence[RawRow[bytes]]
"""What the function is called with once."""
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


class _Plan(NamedTuple):
    """What holds for all units."""

    fitter: Fitter
    counts: LineCounts
    depth: int
    """How many names the paths of all files begin with."""


class _Unit(NamedTuple):
    spans: Sequence[Sequence[Span]]
    plan: _Plan


class CustomFormat(Format):
    """Files behind a function."""

    def __init__(self, source: CustomSource) -> None:
        self._source = source
        self.name = f"custom-{source.kind}"

    def describe(self) -> Contents:
        """What is there: the first rows are read, until there are steps.

        Raises:
            DataError: there are no files, or no steps in them; or the first ones can't be read.
        """
        source = self._source
        files = files_of(source.paths, source.filesystem)
        depth = common([names_of(absolute(str(file)))[:-1] for file in files])
        plan = _Plan(Fitter(source.obs_space, source.action_space), LineCounts(), depth)
        whole = spans_of(files, source.together)
        parts = parts_of(whole, self._budget(whole, plan, files), cut=source.together == "line")
        function = getattr(source.to_experience, "__qualname__", type(source.to_experience).__name__)
        header = Header(source.obs_space, source.action_space, source.env, {"to_experience": function})
        units = [Unit(k, data=_Unit(spans, plan)) for k, spans in enumerate(parts)]
        return Contents(header, list(plan.fitter.schema), units, files)

    def _budget(self, units: Sequence[Sequence[Span]], plan: _Plan, files: Sequence[AnyPath]) -> int:
        """How many bytes of files make a unit, by what the first ones with steps become."""
        size, failed = 0, list[DataError]()
        for spans in units:
            for raws in self._raws(spans, plan):
                size += sum(len(row.data) for row in raws)
                try:
                    found = self._made(raws, plan)
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
        where = ", ".join(str(path) for path in files[:3])
        raise DataError(f"{where}: to_experience gave no steps for any row of {len(files):,} files.")

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """What the function makes of the unit's rows."""
        found: list[Experience] = []
        own: _Unit = unit.data
        for spans in own.spans:
            for raws in self._raws(spans, own.plan):
                try:
                    made = self._made(raws, own.plan)
                except DataError as error:
                    if problems is None:
                        raise
                    problems.append(Problem("unreadable", str(error), raws[0].path, raws[0].number, repairable=True))
                    continue
                found += (_only(exp, columns) for exp in made)
                if problems is not None:
                    problems += (problem for exp in made for problem in self._not_done(raws, exp))
        return Experience.concat(found) if found else _only(own.plan.fitter.nothing(), columns)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Where a row is: in which row of a file, and which step of what was made of it."""
        own: _Unit = unit.data
        for raws in (raws for spans in own.spans for raws in self._raws(spans, own.plan)):
            try:
                num = sum(exp.num_steps for exp in self._made(raws, own.plan))
            except DataError:
                continue  # its steps are not counted
            if row < num:
                return Place(f"{self._place(raws)}, step {row}", raws[0].path, raws[0].number)
            row -= num
        return super().place(unit, row, exp)

    def _raws(self, spans: Sequence[Span], plan: _Plan) -> Iterator[Raws]:
        if self._source.kind == "binary":
            return binary_rows(spans)
        return text_rows(spans, self._source.together, plan.counts)

    def _made(self, raws: Raws, plan: _Plan) -> list[Experience]:
        """The Experience that the function makes of some rows, checked."""
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
                f"{place}: to_experience raised {name}: {error}. Mend the function, or leave the row out (give None)."
            ) from error
        try:
            return plan.fitter.fitted(given, self._name(raws, plan.depth))
        except DataError as error:
            raise DataError(f"{place}: to_experience {str(error).rstrip('.')}.") from error

    def _not_done(self, raws: Raws, exp: Experience) -> Iterator[Problem]:
        for i in np.flatnonzero(~exp.segments.done).tolist():
            what = f"episode {exp.segments.episode_id[i]!r} is neither terminated nor truncated"
            text = f"{self._place(raws)}: {what}; say which, where it ends here."
            yield Problem("not_done", text, raws[0].path, raws[0].number, col.TERMINATED, 1, True, harmless=True)

    def _place(self, raws: Raws) -> str:
        if self._source.together == "folder":
            return f"{'/'.join(names_of(raws[0].path)[:-1])} ({len(raws):,} files)"
        lines = f", row {raws[0].number}" if self._source.together == "line" else ""
        return f"{raws[0].path}{lines}"

    def _name(self, raws: Raws, depth: int) -> str:
        """The id of an episode that has none: where it lies, as far as files differ in it."""
        names = names_of(absolute(raws[0].path))  # the same in any process, whatever its folder
        name = "/".join(names[depth - 1 : -1] if self._source.together == "folder" else names[depth:])
        return f"{name}:{raws[0].number}" if self._source.together == "line" else name


def _only(exp: Experience, names: Sequence[str]) -> Experience:
    steps = {name: exp.steps[name] for name in names}
    return Experience(steps, exp.offsets, exp.segments, {n: c for n, c in exp.final_obs.items() if n in steps})
