# SPDX-License-Identifier: Apache-2.0
"""Recordings that are long arrays, a row a step, in D4RL's names (Fu et al. 2020, https://arxiv.org/abs/2004.07219).

``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts``, and where they are there ``next_observations``
and ``infos/...``. Episodes stand one after the other and end where a flag is set. Without ``next_observations``, what
was observed after the last step of an episode is not known. Rewards, flags and whole-number actions may be of shape
``[N, 1]``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings.formats.grouping import cut_long, grouped
from etude.recordings.formats.inferring import Range, inferred_space, needs_range, reserved, widen
from etude.recordings.formats.parts import Place, Problem, UnreadableError, chosen
from etude.recordings.layout import Header
from etude.spaces import Space, leaf_dtype, leaves

ROOTS: Final = {
    "observations": col.OBS,
    "actions": col.ACTION,
    "rewards": col.REWARD,
    "next_observations": col.NEXT_OBS,
    "infos": col.INFO,
}
TERMINATED: Final = ("terminals", "terminations", "terminated")
TRUNCATED: Final = ("timeouts", "truncations", "truncated")
DONE: Final = ("dones", "done")


class ArrayFile(Protocol):
    """A file of named arrays."""

    path: AnyPath

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
        """Shape and dtype by name (groups with a slash); None for what is not plain numbers."""

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Some rows of an array."""


class _Column(NamedTuple):
    stored: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class FlatParts:
    """Files of arrays, opened; see `etude.recordings.formats.parts.Parts`."""

    def __init__(self, format: str, files: Sequence[ArrayFile]) -> None:
        self.format = format
        self.files = [file.path for file in files]
        self._files = files
        self._dropped: dict[str, str] = {}
        self._columns = self._found(files[0], self._dropped)
        self._num_rows = [self._check(file) for file in files]
        self.columns = [name for name in self._columns if not col.is_under(name, col.NEXT_OBS)]
        self._flags = [self._flags_of(file, n) for file, n in zip(files, self._num_rows, strict=True)]
        self._index()
        self.header = self._header()

    # -- what there is ----------------------------------------------------------------------------------------

    def _found(self, file: ArrayFile, dropped: dict[str, str]) -> dict[str, _Column]:
        arrays = file.arrays()
        for name in ("observations", "actions"):
            if not any(col.is_under(stored, name) for stored in arrays):
                raise DataError(f"{file.path}: there is no array `{name}`; there are {', '.join(arrays) or 'none'}.")
        lengths = [f[0][0] for stored, f in arrays.items() if col.is_under(stored, "actions") and f and f[0]]
        out: dict[str, _Column] = {}
        for stored, found in arrays.items():
            root, _, rest = stored.partition(SEPARATOR)
            name = SEPARATOR.join(filter(None, (ROOTS.get(root, root), rest)))
            if stored in (*TERMINATED, *TRUNCATED, *DONE):
                continue
            needed = root in ROOTS and root != "infos"
            if found is None or not found[0] or not lengths or found[0][0] != lengths[0] or 0 in found[0][1:]:
                if needed:
                    self._refuse(file, stored, found, lengths)
                dropped[name] = "not plain numbers, one row a step"
            elif not needed and reserved(name):
                dropped[name] = "a recording keeps something of its own under this name"
            else:
                # d3rlpy and Stable-Baselines3 keep one choice a step as [N, 1].
                is_choice = name == col.ACTION and found[0][1:] == (1,) and found[1].kind in "iub"
                out[name] = _Column(stored, () if is_choice else found[0][1:], found[1].newbyteorder("="))
        if col.REWARD in out:
            reward = out[col.REWARD]
            if reward.shape not in ((), (1,)):
                raise DataError(f"{file.path}: `rewards` has rows of shape {list(reward.shape)}, not one number each.")
            dtype = reward.dtype if reward.dtype.kind == "f" else np.dtype(np.float64)
            out[col.REWARD] = _Column(reward.stored, (), dtype)
        self._check_next(file, out)
        return out

    def _refuse(self, file: ArrayFile, stored: str, found: Any, lengths: Sequence[int]) -> None:
        if found is None:
            raise DataError(f"{file.path}: `{stored}` does not hold plain numbers. Convert it.")
        if not found[0] or not lengths or 0 in found[0]:
            raise DataError(f"{file.path}: `{stored}` is of shape {list(found[0])}: there are no rows of numbers.")
        raise DataError(
            f"{file.path}: `{stored}` has {found[0][0]:,} rows, but `actions` has {lengths[0]:,}. All arrays have one "
            "row a step: cut the longer."
        )

    def _check_next(self, file: ArrayFile, found: Mapping[str, _Column]) -> None:
        own = {name[len(col.OBS) :]: column for name, column in found.items() if col.is_under(name, col.OBS)}
        after = {n[len(col.NEXT_OBS) :]: column for n, column in found.items() if col.is_under(n, col.NEXT_OBS)}
        same = {k: c[1:] for k, c in own.items()} == {k: c[1:] for k, c in after.items()}
        if after and not same:
            raise DataError(
                f"{file.path}: `next_observations` has other shapes or dtypes than `observations`: "
                f"{_listed(after)}; {_listed(own)}. Convert one of them."
            )

    def _check(self, file: ArrayFile) -> int:
        """The rows of a file, which must have the columns of the first."""
        columns = self._found(file, {})
        if columns != self._columns:
            names = sorted(n for n in {*columns, *self._columns} if columns.get(n) != self._columns.get(n))
            raise DataError(
                f"{file.path}: the arrays are not those of {self.files[0].name}: {', '.join(names)} differ. Read them "
                "as two recordings."
            )
        found = file.arrays()[self._columns[next(n for n in columns if col.is_under(n, col.ACTION))].stored]
        assert found is not None  # a column
        return found[0][0]

    def _flags_of(self, file: ArrayFile, rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        arrays = file.arrays()
        flags: dict[tuple[str, ...], NDArray[np.bool_] | None] = {}
        for names in (TERMINATED, TRUNCATED, DONE):
            stored = next((name for name in names if name in arrays), None)
            flags[names] = None if stored is None else self._flag(file, stored, arrays[stored], rows)
        terminated, truncated, done = flags[TERMINATED], flags[TRUNCATED], flags[DONE]
        none = np.zeros(rows, bool)
        truncated = none if truncated is None else truncated
        if terminated is None:
            terminated = none if done is None else done & ~truncated
        return terminated, truncated

    def _flag(self, file: ArrayFile, stored: str, found: Any, rows: int) -> NDArray[np.bool_]:
        if found is None or found[0] not in ((rows,), (rows, 1)):
            shape = "no numbers" if found is None else f"of shape {list(found[0])}"
            raise DataError(f"{file.path}: `{stored}` is {shape}, not one flag for each of {rows:,} rows.")
        values = file.read(stored, 0, rows).reshape(rows)
        bad = (values != 0) & (values != 1)
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"{file.path}, row {row}: `{stored}` is {values[row]}, not 0 or 1.")
        return values.astype(bool)

    def _index(self) -> None:
        """The segments of all files, cut where they are too long for a part, and the parts."""
        file_of, starts, stops, t_start, episode, last = [], [], [], [], [], []
        for f, (rows, (terminated, truncated)) in enumerate(zip(self._num_rows, self._flags, strict=True)):
            ends = np.flatnonzero(terminated | truncated) + 1
            offsets = np.unique(np.concatenate([[0], ends, [rows]])).astype(np.int64)
            parent, start, stop = cut_long(offsets)
            file_of.append(np.full(len(parent), f))
            starts.append(start)
            stops.append(stop)
            t_start.append(start - offsets[:-1][parent])
            episode.append(parent)
            last.append(stop == offsets[1:][parent])
        self._file_of, self._start, self._stop = map(np.concatenate, (file_of, starts, stops))
        self._t_start, self._episode, self._last = map(np.concatenate, (t_start, episode, last))
        lengths = self._stop - self._start
        borders = np.flatnonzero(np.diff(self._file_of)) + 1  # a part lies in one file
        bounds = [0]
        for first, stop in zip([0, *borders], [*borders, len(lengths)], strict=True):
            bounds += (grouped(lengths[first:stop])[1:] + first).tolist()
        self._parts = bounds

    def _header(self) -> Header:
        obs_space, action_space = (self._inferred(root) for root in (col.OBS, col.ACTION))
        dtypes = {
            n: leaf_dtype(s) for n, s in {**leaves(obs_space, col.OBS), **leaves(action_space, col.ACTION)}.items()
        }
        for name, dtype in {**dtypes, **col.renamed(dtypes, col.OBS, col.NEXT_OBS)}.items():
            if name in self._columns:
                self._columns[name] = self._columns[name]._replace(dtype=dtype)
        meta: dict[str, Any] = {"inferred": {"spaces": "from the numbers: bounds are not known"}}
        names = {name for file in self._files for name in file.arrays()}
        if names & set(DONE) and not names & set(TERMINATED):
            meta["inferred"]["done"] = "read as terminated, but where truncated: time limits can't be told apart"
        if not names & {*TERMINATED, *TRUNCATED, *DONE}:
            meta["inferred"]["ends"] = "no flag says where episodes end: each file is one piece of an episode"
        if self._dropped:
            meta["dropped"] = self._dropped
        return Header(obs_space, action_space, None, meta)

    def _inferred(self, root: str) -> Space:
        found = {name: self._columns[name] for name in col.under(self._columns, root)}
        ranges: dict[str, Range] = {}
        nexts = col.under(self._columns, col.NEXT_OBS) if root == col.OBS else []
        for name, column in {**found, **{name: self._columns[name] for name in nexts}}.items():
            if needs_range(name, column.dtype, column.shape):
                for file, rows in zip(self._files, self._num_rows, strict=True):
                    widen(ranges, {name: file.read(column.stored, 0, rows).reshape(rows, *column.shape)})
        return inferred_space({name: (c.dtype, c.shape) for name, c in found.items()}, root, ranges)

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """How many pieces are loaded one at a time."""
        return len(self._parts) - 1

    def rows(self, k: int) -> int:
        """The steps of part k."""
        return int(self._stop[self._parts[k + 1] - 1] - self._start[self._parts[k]])

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Whole episodes, or pieces of those that are longer than a part.

        Raises:
            DataError: an array can't be decoded, or a column does not exist.
        """
        names = chosen(self.columns, columns, str(self.files[0]))
        which = slice(self._parts[k], self._parts[k + 1])
        f = int(self._file_of[which.start])
        start, stop = int(self._start[which.start]), int(self._stop[which.stop - 1])
        steps = {name: self._read(f, name, start, stop) for name in names}
        offsets = offsets_of(self._stop[which] - self._start[which])
        final_obs, known = self._final_obs(f, which, [n for n in names if col.is_under(n, col.OBS)], steps, offsets)
        ends = self._stop[which] - 1
        terminated, truncated = self._flags[f]
        prefix = f"{f}-" if len(self.files) > 1 else ""
        segments = Segments.of(
            len(ends),
            episode_id=[f"{prefix}{i}" for i in self._episode[which].tolist()],
            t_start=self._t_start[which],
            terminated=terminated[ends],
            truncated=truncated[ends],
            has_final_obs=known,
        )
        return Experience(steps, offsets, segments, final_obs)

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Part ``k``, of which all or nothing can be read.

        Raises:
            UnreadableError: nothing.
        """
        try:
            return self.load(k, columns), []
        except DataError as error:
            place = self.place(k, 0)
            problem = Problem("unreadable", str(error), place.file, place.row, count=self.rows(k), repairable=True)
            raise UnreadableError(problem) from error

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is."""
        file, row = self.files[int(self._file_of[self._parts[k]])], int(self._start[self._parts[k]]) + row
        return Place(f"{file}, row {row}", str(file), row)

    def _read(self, f: int, name: str, start: int, stop: int) -> NDArray[Any]:
        column = self._columns[name]
        values = self._files[f].read(column.stored, start, stop)
        return values.astype(column.dtype, copy=False).reshape(stop - start, *column.shape)

    def _final_obs(
        self, f: int, which: slice, names: Sequence[str], steps: Mapping[str, Any], offsets: NDArray[np.int64]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """What was observed after each segment: from the next observations, or the next row of the same episode."""
        start, stop = int(self._start[which.start]), int(self._stop[which.stop - 1])
        given = bool(col.under(self._columns, col.NEXT_OBS))
        known = np.full(which.stop - which.start, True) if given else ~self._last[which]
        out = {}
        for name in names:
            if given:
                after = self._read(f, col.NEXT_OBS + name[len(col.OBS) :], start, stop)
                out[name] = after[offsets[1:] - 1]
            else:
                out[name] = np.zeros((len(known), *steps[name].shape[1:]), steps[name].dtype)
                inside = np.flatnonzero(known[:-1])
                out[name][inside] = steps[name][offsets[inside + 1]]
                if known[-1]:
                    out[name][-1] = self._read(f, name, stop, stop + 1)[0]
        return out, known

    # -- looking ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """None: all that is wrong is seen in the steps."""
        return iter(())


def _listed(columns: Mapping[str, _Column]) -> str:
    return ", ".join(f"{c.stored} {c.dtype}{list(c.shape)}" for c in columns.values())
