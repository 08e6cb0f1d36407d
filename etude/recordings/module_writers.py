# SPDX-License-Identifier: Apache-2.0
"""Write the experience of several modules to one recording, or to one per module if their spaces differ."""

import contextlib
import dataclasses
import secrets
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import numpy as np

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.experience import without_lookback
from etude.files import AnyPath, RemotePath, located
from etude.recordings.action_units import of_modules
from etude.recordings.episodes import Assembler
from etude.recordings.files import data_files
from etude.recordings.layout import PREFIX, number_of
from etude.recordings.recording import Recording
from etude.recordings.writer import ROW_GROUP_ROWS, RecordingWriter, recorded
from etude.spaces import Space, leaf_shape, leaves

Layout: TypeAlias = Literal["episodes", "table"]
Kind: TypeAlias = tuple[Space, Space]
"""The observation and action spaces as recorded."""
Ends: TypeAlias = dict[tuple[str, str | None], int]
"""By episode and agent: one more than the last step."""


@dataclasses.dataclass
class _Series:
    """The recording in one folder."""

    kind: Kind
    writer: RecordingWriter
    held: Assembler | None
    """The unfinished episodes; None if steps are written as they come."""
    there: Ends
    """The first step that is not yet in the files, for a resumed run whose state is older than the files."""

    def take(self, exp: Experience) -> None:
        parts = [exp]
        if self.held is not None:
            segments = exp.segments
            whole = (segments.agent_id == None) & segments.done & (segments.t_start == 0)  # noqa: E711 - an array
            parts = [exp.select(whole)] if whole.any() else []
            parts += self.held.add(exp.select(~whole))
        for part in parts:
            self._write(part)

    def _write(self, exp: Experience) -> None:
        if self.there:
            keys = [*zip(exp.segments.episode_id.tolist(), exp.segments.agent_id.tolist(), strict=True)]
            ends = np.array([self.there.get(key, 0) for key in keys], np.int64)
            for key, is_past in zip(keys, exp.segments.t_start + exp.lengths >= ends, strict=True):
                if is_past:
                    self.there.pop(key, None)
            exp = exp.without_first(ends - exp.segments.t_start)
        self.writer.write(exp)

    @property
    def has_later_steps(self) -> bool:
        """Whether the files have steps that come after those held.

        Steps that are held may also be in the files: closing a run writes what it holds.
        """
        ends: Ends = {}
        for exp in self.held.held() if self.held is not None else []:
            _extend(ends, exp)
        return any(end > ends.get(key, 0) for key, end in self.there.items())

    def rename_held(self, suffix: str) -> None:
        """Put a suffix on the ids of the episodes that are held, and from now on write all steps."""
        self.there = {}
        if self.held is not None:
            self.held.rename(suffix)

    def write_rest(self) -> None:
        """Write the unfinished episodes that are held, and hold them no longer."""
        for part in self.held.rest() if self.held is not None else []:
            self._write(part)

    def close(self) -> None:
        try:
            self.write_rest()
        finally:
            self.writer.close()


class ModuleWriters:
    """Writes the raw experience of modules below one path.

    If all modules have equal spaces, they share the recording at the path. Otherwise, each module has its own one, in a
    subfolder with its name; an episode has the same id in all of them.

    Behind a URL, where there are no locks, the names of files and episodes contain a random part, so that two runs that
    write to one place at the same time do not lose data.

    Args:
        path: The folder.
        below: The folder that a relative path starts from; None: the current folder.
        kinds: The spaces of each module, by its id.
        columns: The step columns to keep, by name or root; ``env_t`` is kept if it exists. None: all.
        layout: ``episodes`` holds unfinished episodes back until they end (see `Assembler`); ``table`` writes steps as
            they come.
        append: Add to an existing recording; if False, an existing recording is an error.
        state: From `state_dict`, to resume a run: steps that are already in the files are not written again.
        is_run: Whether episodes come from training runs, several of which may use the same ids. The ids then get a
            suffix, which is random behind a URL. If False, the ids must be unique already.
        meta: Metadata of the recordings; see `recording_meta` of an algorithm.
        options: Other arguments of each `RecordingWriter`.

    Raises:
        DataError: there is a recording already, or one with other spaces.
    """

    def __init__(
        self,
        path: str,
        kinds: Mapping[str, Kind],
        *,
        columns: Sequence[str] | None,
        below: Path | None = None,
        layout: Layout = "episodes",
        append: bool = False,
        state: Mapping[str, Any] | None = None,
        is_run: bool = True,
        meta: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._root = located(path)
        self._there = self._root if below is None or isinstance(self._root, RemotePath) else below / self._root
        self._columns = columns
        self._folders = folders_of(kinds)
        """The subfolder of each module; empty is the root itself."""
        if state is not None and state["path"] != str(self._root):
            state = None  # the run resumes, but records to another place
        self._tag, self._prefix = "", PREFIX
        if state is not None:
            self._tag, self._prefix = str(state["tag"]), str(state.get("prefix", PREFIX))
        elif isinstance(self._root, RemotePath):
            run = secrets.token_hex(4)
            self._tag, self._prefix = f"+{run}" if is_run else "", f"{self._prefix}-{run}"
        self._series: dict[str, _Series] = {}
        options |= {"prefix": self._prefix, "append": append or state is not None}
        with contextlib.ExitStack() as opened:
            for name, folder in self._folders.items():
                if folder not in self._series:
                    options["meta"] = self._meta_of(folder, meta, kinds[name])
                    before = None if state is None else state["folders"].get(folder)
                    self._series[folder] = self._open(folder, kinds[name], layout, before, options)
                    opened.callback(self._series[folder].close)
                    if layout == "table":
                        self._series[folder].write_rest()  # of a run that held them with the other layout
                        self._series[folder].held = None
            # Also called on garbage collection and interpreter exit; what was created last is finished first.
            self._finish = weakref.finalize(self, opened.pop_all().close)
        if is_run and state is None and self._newest and not self._tag:
            self._tag = f"+{self._newest}"  # runs with the same seed give their episodes the same ids
        self._rows = 0
        """The number of rows since the metadata was set."""

    @property
    def _newest(self) -> int:
        return max(series.writer.next_file for series in self._series.values())

    @property
    def has_later_steps(self) -> bool:
        """Whether the files have steps that were made after the state of a run that resumes was saved."""
        return any(series.has_later_steps for series in self._series.values())

    def go_on(self, *, new_episodes: bool, other_ids: bool) -> None:
        """Set how a resumed run continues. Call it before the run writes its first steps.

        Args:
            new_episodes: Whether the run begins new episodes. The unfinished ones that are held are then written now.
            other_ids: Whether episodes get other ids from now on. This is needed if the files already have other steps
                under the ids that follow. What is held is also written under the new ids, so that episodes are whole,
                although its steps may be in the files already.

        Raises:
            DataError: a write failed.
        """
        for series in self._series.values() if new_episodes else ():
            series.write_rest()
        if other_ids:
            suffix = f"+{self._newest}"
            self._tag += suffix
            for series in self._series.values():
                series.rename_held(suffix)

    def _open(self, folder: str, kind: Kind, layout: Layout, before: Any, options: Mapping[str, Any]) -> _Series:
        """Open the recording in a subfolder; ``before`` is its part of the state of a run that resumes."""
        for name, leaf in leaves(kind[0], col.OBS).items():
            is_kept = self._columns is None or any(col.is_under(name, root) for root in self._columns)
            if is_kept and 0 in leaf_shape(leaf):
                raise DataError(
                    f"`{name}` has the shape {list(leaf_shape(leaf))}: it holds no numbers, so it can't be recorded. "
                    "Leave it out in the env, such as with gymnasium.wrappers.FilterObservation. The connector `drop` "
                    "does not help, because a recording has the env's observations."
                )
        where = self._there / folder if folder else self._there
        if before is not None and int(before["next_file"]) and not (where.exists() and data_files(where)):
            raise DataError(
                f"{where}: the recording that this run writes is not there. A relative path begins at the folder in "
                "which the run is resumed: resume it where it was begun, or set `record.path` to where the recording "
                "is, or to a new folder."
            )
        writer = RecordingWriter(where, obs_space=kind[0], action_space=kind[1], **options)
        held = Assembler(together=True)
        series = _Series(kind, writer, held, {})
        if before is not None:
            series.there = {(episode, agent): end for episode, agent, end in before.get("there", ())}
            series.there |= written_since(where, int(before["next_file"]), writer.next_file, self._prefix)
            held.load_state_dict(before["held"])
        return series

    def take(self, parts: Mapping[str, Experience], kinds: Mapping[str, Kind], tag: str = "") -> None:
        """Write raw experience, by module id.

        Args:
            parts: The experience of each module; lookback is left out, because those steps were written before.
            kinds: The spaces of each module.
            tag: A suffix for the ids of episodes.

        Raises:
            DataError: a write failed.
            SettingsError: a new module has spaces that no earlier module had.
        """
        by_folder: dict[str, list[Experience]] = {}
        for name, exp in parts.items():
            if exp.num_segments:
                folder = self._folder_of(name, kinds[name])
                by_folder.setdefault(folder, []).append(self._prepared(exp.numpy(), self._tag + tag))
        for folder, exps in by_folder.items():
            self._series[folder].take(Experience.concat(exps))
            self._rows += sum(exp.num_steps for exp in exps)

    def _folder_of(self, name: str, kind: Kind) -> str:
        if name not in self._folders:
            alike = [folder for folder, series in self._series.items() if repr(series.kind) == repr(kind)]
            if not alike:
                raise SettingsError(
                    f"module {name!r} has the spaces {kind[0]} and {kind[1]}, which no module had when the recording "
                    f"{self._root} was started: let `record.path` name another folder."
                )
            self._folders[name] = alike[0]
        return self._folders[name]

    def _prepared(self, exp: Experience, tag: str) -> Experience:
        exp = without_lookback(exp)
        if self._columns is not None:
            exp = recorded(exp, (*self._columns, *[name for name in (col.ENV_T,) if name in exp.steps]))
        return exp.with_segments(episode_id=[f"{name}{tag}" for name in exp.segments.episode_id]) if tag else exp

    @property
    def meta_is_due(self) -> bool:
        """Whether enough was written since the last `set_meta` to call it again."""
        return self._rows >= ROW_GROUP_ROWS

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Set the metadata of all recordings; see `RecordingWriter.set_meta`."""
        self._rows = 0
        for folder, series in self._series.items():
            series.writer.set_meta(self._meta_of(folder, meta, series.kind))

    def _meta_of(self, folder: str, meta: Mapping[str, Any] | None, kind: Kind) -> dict[str, Any]:
        return of_modules([name for name, own in self._folders.items() if own == folder], meta or {}, kind[1])

    def state_dict(self) -> dict[str, Any]:
        """Flush all writers; returns their position and the unfinished episodes that are held."""
        with contextlib.ExitStack() as all_of_them:  # which are flushed also if one fails
            for series in self._series.values():
                all_of_them.callback(series.writer.flush)
        return self._state()

    def close(self) -> dict[str, Any]:
        """Write everything to disk, including unfinished episodes, and return the state for resuming.

        Raises:
            DataError: a write failed.
        """
        self._finish()
        return self._state()

    def _state(self) -> dict[str, Any]:
        folders = {
            folder: {
                "next_file": series.writer.next_file,
                "there": [[*key, end] for key, end in series.there.items()],
                "held": None if series.held is None else series.held.state_dict(),
            }
            for folder, series in self._series.items()
        }
        return {"path": str(self._root), "tag": self._tag, "prefix": self._prefix, "folders": folders}


def folders_of(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """The subfolder of each module, by its id: its own if spaces differ, else empty."""
    if len({repr(kind) for kind in kinds.values()}) == 1:
        return dict.fromkeys(kinds, "")
    # Readers take folders that begin with a dot or an underscore for hidden.
    return {name: "%" * (name[:1] in ("", ".", "_")) + quote(name, safe="") for name in kinds}


def written_since(folder: AnyPath, first: int, stop: int, prefix: str = PREFIX) -> Ends:
    """Where the episodes end in the files with numbers from ``first`` up to, but not including, ``stop``."""
    ends: Ends = {}
    if first >= stop:
        return ends
    for file in Recording.open(folder).files:
        number = number_of(file.name, prefix)
        if number is not None and first <= number < stop and file.parent == folder:
            for exp in Recording.open(file, on_bad=None).stream(columns=()):
                _extend(ends, exp)
    return ends


def _extend(ends: Ends, exp: Experience) -> None:
    """Add the ends of the segments of ``exp``."""
    s = exp.segments
    stops = (s.t_start + exp.lengths).tolist()
    for name, agent, stop in zip(s.episode_id.tolist(), s.agent_id.tolist(), stops, strict=True):
        ends[name, agent] = max(stop, ends.get((name, agent), 0))
