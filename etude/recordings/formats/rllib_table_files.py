# SPDX-License-Identifier: Apache-2.0
"""The files of one of RLlib's tables: their columns by our names, and which rows belong to which episode."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import Range, widen
from etude.recordings.formats.rllib_arrow import RowError, columns_of, one_array
from etude.recordings.formats.rllib_files import ParquetFiles
from etude.recordings.formats.rllib_rows import Run, hashes_of, rounds_of, runs_of

ENDS: Final = ("terminateds", "truncateds", "dones")
KEYS: Final = ("eps_id", "agent_id", "module_id", "t")
REQUIRED: Final = ("obs", "actions", "rewards")
OWN: Final = {"obs": col.OBS, "actions": col.ACTION, "rewards": col.REWARD}
_OTHERS: Final = {"new_obs": col.NEXT_OBS, "infos": col.INFO}
Naming: TypeAlias = tuple[str, str | None, str | None]
"""Episode, agent and module."""
REMEDY: Final = "Leave this row out, or write the recording again"


class TableFiles:
    """The files of one recording.

    Raises:
        DataError: a file is not whole, lacks a column that is needed, or one that the first file has.
    """

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        self.paths = list(paths)
        self.parquet = ParquetFiles(paths)
        self.fields = self._checked_fields()
        """The columns of the first file, by their names in it."""

    def _checked_fields(self) -> dict[str, pa.Field]:
        first = self.parquet.schema(0)
        for i, path in enumerate(self.paths):
            names = self.parquet.schema(i).names
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                listed = ", ".join(names[:20])
                raise DataError(
                    f"{path}: has no column `{missing[0]}`, which a table of steps needs; it has {listed}. If another "
                    "column holds it, read the file as a table with a schema of your own."
                )
            lost = [name for name in first.names if name not in names]
            if lost:
                raise DataError(
                    f"{path}: has no column `{lost[0]}`, but {self.paths[0]} has. A recording has the same columns "
                    "everywhere: move one of them to a folder of its own."
                )
        twice = [name for name in first.names if first.names.count(name) > 1]
        if twice:
            raise DataError(f"{self.paths[0]}: has the column `{twice[0]}` more than once. Leave one of them out.")
        return {name: first.field(name) for name in first.names}

    @property
    def has_t(self) -> bool:
        """Rows say which step of their episode they are."""
        return "t" in self.fields and pa.types.is_integer(self.fields["t"].type)

    def scan(self) -> tuple[dict[int, list[Run]], list[Naming]]:
        """The runs of every episode, in the order in which the episodes come first; and what each of them is called."""
        episodes: dict[int, list[Run]] = {}
        if "eps_id" not in self.fields:
            return episodes, []
        codes: dict[tuple[str, str | None], int] = {}
        modules: dict[int, str | None] = {}
        wanted = [n for n in (*KEYS, *ENDS) if n in self.fields and not pa.types.is_null(self.fields[n].type)]
        for group in range(len(self.parquet.groups)):
            table = self.parquet.read(group, wanted, text_codes=[n for n in KEYS[:3] if n in wanted])
            try:
                own = self._codes(table, codes, modules, group)
            except (pa.ArrowException, UnicodeDecodeError) as error:
                where = self.parquet.place(group, 0)
                raise DataError(
                    f"{where} or a later one: its `eps_id` can't be decoded ({error}). {REMEDY}."
                ) from error
            done = np.zeros(table.num_rows, bool)
            for name in ENDS:
                if name in wanted:
                    done |= self.column(table, name, group, 0)[name].astype(bool)
            t = self.column(table, "t", group, 0)["t"].astype(np.int64) if self.has_t else None
            for code, run in runs_of(group, own, done, t):
                episodes.setdefault(code, []).append(run)
        return episodes, [(*name, modules[code]) for name, code in codes.items()]

    def _codes(
        self, table: pa.Table, codes: dict[tuple[str, str | None], int], modules: dict[int, str | None], group: int
    ) -> NDArray[np.int64]:
        """int64 ``[rows]``: the episode and agent of each row, as a number."""
        texts: list[tuple[NDArray[np.int32], list[str | None]]] = []
        for name in KEYS[:3]:
            if name not in table.schema.names or (name != "eps_id" and table[name].null_count == table.num_rows):
                texts.append((np.zeros(table.num_rows, np.int32), [None]))
                continue
            coded = one_array(table[name], table[name].type)
            coded = coded if pa.types.is_dictionary(coded.type) else coded.dictionary_encode()
            if coded.null_count and name == "eps_id":
                row = int(np.flatnonzero(coded.is_null().to_numpy(zero_copy_only=False))[0])
                raise DataError(f"{self.parquet.place(group, row)}: column `eps_id` is empty. {REMEDY}.")
            coded.validate(full=True)
            index = coded.indices.fill_null(-1) if coded.null_count else coded.indices
            texts.append(
                (index.to_numpy().astype(np.int32, copy=False), [*(str(v) for v in coded.dictionary.to_pylist()), None])
            )
        (eps, eps_names), (agent, agent_names), (module, module_names) = texts
        if not len(eps):
            return np.zeros(0, np.int64)
        new = eps[1:] != eps[:-1]
        if len(agent_names) > 1:
            new |= agent[1:] != agent[:-1]
        heads = np.append(0, np.flatnonzero(new) + 1)
        both = eps[heads].astype(np.int64) * len(agent_names) + agent[heads] % len(agent_names)
        distinct, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        own = np.empty(len(distinct), np.int64)
        for i in np.argsort(first):
            row = heads[first[i]]
            own[i] = codes.setdefault((str(eps_names[eps[row]]), agent_names[agent[row]]), len(codes))
            modules.setdefault(int(own[i]), module_names[module[row]])
        return np.repeat(own[inverse.reshape(-1)], np.diff(heads, append=len(eps)))

    def not_the_same(self, episodes: dict[int, list[Run]]) -> list[int]:
        """Those of these episodes, of which rows are there twice, in which these are not the same rows again.

        With steps, rows of one step are compared; without, the rows up to each end.
        """
        rows = self._hashes([run for runs in episodes.values() for run in runs])
        is_alike = _alike_by_t if self.has_t else _alike_by_end
        return [code for code, runs in episodes.items() if not is_alike(runs, rows)]

    def _hashes(self, runs: Iterable[Run]) -> dict[Run, NDArray[np.uint64]]:
        """A number for the content of each row of some runs."""
        rows: dict[Run, NDArray[np.uint64]] = {}
        by_group: dict[int, list[Run]] = {}
        for run in runs:
            by_group.setdefault(run.group, []).append(run)
        names = [name for name in ("obs", "new_obs", "actions", "rewards") if name in self.fields]
        for group, own in sorted(by_group.items()):
            table = self.parquet.read(group, names)
            hashes = hashes_of({k: c for name in names for k, c in self.column(table, name, group, 0).items()})
            rows |= {run: hashes[run.start : run.stop] for run in own}
        return rows

    def column(
        self, table: pa.Table, name: str, group: int, first: int, index: NDArray[np.int64] | None = None
    ) -> Columns:
        """One column of some rows of a row group, flat and under our name.

        Args:
            table: The rows.
            name: The column's name in the file.
            group: The row group, for errors.
            first: The first row of ``table`` in it, for errors.
            index: The rows of ``table`` in it, where they do not stand next to each other.

        Raises:
            DataError: it can't be read as numbers; the file and row are named.
        """
        root = OWN.get(name) or _OTHERS.get(name) or (name if name in (*KEYS, *ENDS) else None)
        try:
            return columns_of(table[name], table.schema.field(name), root or words.own_name(name))
        except DataError as error:
            row = error.row if isinstance(error, RowError) else 0
            place = self.parquet.place(group, int(index[row]) if index is not None else first + row)
            raise DataError(f"{place}, column `{name}`: {error}. {REMEDY}.") from error
        except (pa.ArrowException, ValueError, TypeError, OverflowError, MemoryError) as error:
            file = self.paths[self.parquet.groups[group][0]]
            raise DataError(f"{file}: column `{name}` can't be decoded ({str(error)[:200]}).") from error

    def ranges(self, name: str, root: str) -> dict[str, Range]:
        """The smallest and largest numbers of the integers in a column, over all rows, by our names under ``root``."""
        found: dict[str, Range] = {}
        for own in (name, "new_obs") if name == "obs" and "new_obs" in self.fields else (name,):
            for group in range(len(self.parquet.groups)):
                if not self._from_statistics(group, own, root, found):
                    widen(found, self.column(self.parquet.read(group, [own]), own, group, 0))
        return found

    def _from_statistics(self, group: int, name: str, root: str, found: dict[str, Range]) -> bool:
        """Widen ``found`` by the footer's minimum and maximum; False where it does not tell."""
        kind = self.fields[name].type
        if not (pa.types.is_integer(kind) or pa.types.is_struct(kind)):
            return False
        file, own = self.parquet.groups[group]
        metadata = self.parquet.metadata[file]
        self.parquet.check(group, name)
        for i in range(metadata.num_columns):
            try:
                path = metadata.schema.column(i).path.replace(".", col.SEPARATOR)
            except UnicodeDecodeError:
                return False
            if not col.is_under(path, name):
                continue
            leaf, column = root + path[len(name) :], metadata.row_group(own).column(i)
            if column.physical_type not in ("INT32", "INT64"):
                continue
            if metadata.schema.column(i).max_repetition_level:  # lists: what is at each place, it does not tell
                if root == col.ACTION:
                    return False
                continue
            if not column.is_stats_set or not column.statistics.has_min_max:
                return False
            low, high = np.int64(column.statistics.min), np.int64(column.statistics.max)
            if leaf in found:
                low, high = min(low, found[leaf][0]), max(high, found[leaf][1])
            found[leaf] = (low, high)
        return True


def _alike_by_t(runs: Sequence[Run], rows: Mapping[Run, NDArray[np.uint64]]) -> bool:
    t = np.concatenate([np.arange(run.t, run.t + run.stop - run.start) for run in runs])
    content = np.stack([np.concatenate([rows[run] for run in runs]), np.zeros(len(t), np.uint64)], axis=1)
    content[np.cumsum([run.stop - run.start for run in runs]) - 1, 1] = [run.done for run in runs]
    order = np.argsort(t, kind="stable")
    twice = t[order][1:] == t[order][:-1]
    return bool((content[order][1:] == content[order][:-1])[twice].all())


def _alike_by_end(runs: Sequence[Run], rows: Mapping[Run, NDArray[np.uint64]]) -> bool:
    first, *others = [np.concatenate([rows[run] for run in part]) for part in rounds_of(list(runs))]
    return all(np.array_equal(first, other) for other in others)
