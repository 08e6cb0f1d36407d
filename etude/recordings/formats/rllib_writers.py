# SPDX-License-Identifier: Apache-2.0
"""Write Parquet files that RLlib reads, with a msgpack document per episode, or with a row per step.

Module outputs get RLlib's names (``logp`` is ``action_logp``), and infos go where RLlib has them. Documents
(``input_read_episodes=True``) are like those of RLlib's own recorder: a list with an entry for each step. In tables,
arrays are tensors as Ray Data stores them, so that Ray is not needed; the parts of a Dict form an Arrow struct. The
column ``t``, which RLlib does not record but understands, is the index of a row's step in its episode.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.ids import Ids
from etude.recordings.formats.msgpack_numpy import entries, list_header, list_of, map_header, packed
from etude.recordings.formats.parquet_files import ParquetFolder
from etude.recordings.formats.rllib_columns import NAMES, map_of
from etude.recordings.layout import Header
from etude.spaces import Nester, Space

# -- RLlib's names for Etude's columns -------------------------------------------------------------------------------


_EXTRA: Final = "extra"
_OWN: Final = {own: name for name, own in NAMES.items()}


def extras(names: Iterable[str], header: Header) -> list[str]:
    """Return the columns that are not observation, action, reward or info: mainly module outputs."""
    own = header.leaves()
    return [n for n in names if n not in own and n != col.REWARD and not col.is_under(n, col.INFO)]


def nested(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Nest columns by path: ``{"state_out/h": h}`` becomes ``{"state_out": {"h": h}}``."""
    out: dict[str, Any] = {}
    for name, column in columns.items():
        *path, last = name.split(col.SEPARATOR)
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise DataError(f"column `{name}` is a part of a column that has numbers itself. Rename one of them.")
        if last in inner:
            raise DataError(f"column `{name}` has numbers itself, but others are parts of it. Rename one of them.")
        inner[last] = column
    return out


def infos_of(columns: Columns) -> dict[str, Any]:
    """Return the infos as nested maps of arrays, without the prefix ``info``; empty if there are none."""
    found = nested(col.subtree(columns, col.INFO)).get(col.INFO, {})
    return found if isinstance(found, dict) else {col.INFO: found}


def rllib_names(columns: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Return RLlib's path of each column; the inverse of `rllib_columns.own_name`.

    A root that is ``taken``, or is also that of another column, gets the prefix ``extra_``.
    """
    roots: dict[str, str] = {}
    out = {}
    for name in sorted(columns, key=lambda name: name.split(col.SEPARATOR)[0] not in _OWN):  # RLlib's own names first
        root, *rest = name.split(col.SEPARATOR)
        new = _OWN.get(root, root)
        if root == _EXTRA and rest:
            new, root, rest = rest[0], f"{_EXTRA}{col.SEPARATOR}{rest[0]}", rest[1:]
        while root not in roots and new in {*taken, *roots.values()}:
            new = f"{_EXTRA}_{new}"
        out[name] = col.SEPARATOR.join([roots.setdefault(root, new), *rest])
    return {name: out[name] for name in columns}


def outputs(exp: Experience, names: Mapping[str, str]) -> dict[str, Any]:
    """RLlib's extra model outputs by its names: arrays, or nested maps of them."""
    return nested({new: exp.steps[name] for name, new in names.items()})


def _notes(names: Mapping[str, str]) -> list[str]:
    """Notes about the columns that are renamed because their names are taken."""
    changed = {name: new for name, new in names.items() if new.startswith(f"{_EXTRA}_") and new != name}
    return [f"column `{name}` is called `{new}`: RLlib has another of its name" for name, new in changed.items()]


MAX_BYTES: Final = 64 << 20
"""A file is closed once it has this many bytes before compression, because Ray Data reads files in parallel."""


def _files(folder: Path) -> ParquetFolder:
    return ParquetFolder(
        lambda number: folder / f"part-{number:05d}.parquet", MAX_BYTES, compression="zstd", compression_level=1,
        use_dictionary=["eps_id"], write_page_checksum=True,
    )  # fmt: skip


# -- episodes --------------------------------------------------------------------------------------------------------


ITEM: Final = "item"
GROUP_BYTES: Final = 8 << 20
"""The approximate size of the documents in a row group, which Ray reads as a whole."""


class RLlibEpisodesWriter:
    """Writes whole, finished episodes, one per segment: RLlib refuses others.

    Args:
        folder: An existing folder.
        header: The header of the recording.
        columns: The step columns, all numeric.
    """

    whole_episodes = True
    keeps_time = True
    needs_final_obs = True

    def __init__(self, folder: Path, header: Header, columns: list[str]) -> None:
        self._files = _files(folder)
        self._nesters = {root: Nester(space, root) for root, space in header.spaces.items()}
        self._names = rllib_names(extras(columns, header))
        self.notes = _notes(self._names)
        self._spaces = {root: packed(map_of(space)) for root, space in header.spaces.items()}
        self._reward_space = packed(map_of(_REWARDS))
        self._documents: list[bytes] = []
        self._size = 0

    def write(self, exp: Experience) -> None:
        """Write these episodes."""
        for document in self._documents_of(exp):
            self._documents.append(document)
            self._size += len(document)
            if self._size >= GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        """Write everything to disk."""
        self._flush()
        self._files.close()

    def _flush(self) -> None:
        if self._documents:
            self._files.add(pa.table({ITEM: pa.array(self._documents, pa.binary())}))
            self._documents, self._size = [], 0

    def _documents_of(self, exp: Experience) -> Iterator[bytes]:
        obs = entries(self._nesters[col.OBS](_with_finals(exp)))
        actions = entries(self._nesters[col.ACTION](exp.steps))
        rewards = entries(exp.steps[col.REWARD], plain=True)
        infos, segments = infos_of(exp.steps), exp.segments
        after = entries(infos) if infos else np.full((exp.num_steps, 1), _NO_INFO[0], np.uint8)
        more = {name: entries(tree) for name, tree in outputs(exp, self._names).items()}
        for i in range(exp.num_segments):
            start, stop = exp.offsets[i : i + 2].tolist()
            own, t_start = slice(start, stop), int(segments.t_start[i])
            extra = {name: _buffer(list_of(rows[own])) for name, rows in more.items()}
            yield _map_of(
                {
                    "id_": packed(segments.episode_id[i]),
                    "agent_id": packed(segments.agent_id[i]),
                    "module_id": packed(segments.module_id[i]),
                    "multi_agent_episode_id": _NOTHING,
                    "observations": _buffer(list_of(obs[start + i : stop + i + 1]), self._spaces[col.OBS]),
                    "actions": _buffer(list_of(actions[own]), self._spaces[col.ACTION]),
                    "rewards": _buffer(list_of(rewards[own]), self._reward_space),
                    "infos": _buffer(list_header(stop - start + 1) + _NO_INFO + after[own].tobytes()),
                    "extra_model_outputs": _map_of(extra) if extra else _NOTHING,
                    "is_terminated": packed(segments.terminated[i]),
                    "is_truncated": packed(segments.truncated[i]),
                    "t_started": packed(t_start),
                    "t": packed(t_start + stop - start),
                    "_observation_space": self._spaces[col.OBS],
                    "_action_space": self._spaces[col.ACTION],
                    "_start_time": packed(0.0),
                    "_last_step_time": packed(0.0),
                    "custom_data": packed({}),
                }
            )


_NOTHING: Final = packed(None)
_NO_INFO: Final = packed({})
_REWARDS: Final = spaces.Box(-np.inf, np.inf, (), np.float32)
"""RLlib's space of rewards."""


def _map_of(values: Mapping[str, bytes]) -> bytes:
    """A map; the values are already in msgpack."""
    return map_header(len(values)) + b"".join(packed(key) + value for key, value in values.items())


def _buffer(data: bytes, space: bytes = _NOTHING) -> bytes:
    """A list of an episode in RLlib's layout; ``data`` and ``space`` are already in msgpack."""
    return _map_of({"data": data, "lookback": packed(0), "finalized": packed(False), "space": space})


def _with_finals(exp: Experience) -> Columns:
    """The observations of each episode, including the final one: ``[num_steps + num_segments, ...]``."""
    ends = exp.offsets[1:]
    return {name: np.insert(exp.steps[name], ends, final, axis=0) for name, final in exp.final_obs.items()}


# -- tables ----------------------------------------------------------------------------------------------------------


_TAKEN: Final = (
    *("eps_id", "agent_id", "module_id", "t", "obs", "actions", "rewards", "new_obs"),
    *("terminateds", "truncateds", "dones", "infos"),
)
"""The names of a table's columns that RLlib reads itself."""


class RLlibTableWriter:
    """Writes steps, in any order of their episodes.

    Args:
        folder: An existing folder.
        header: The header of the recording.
        columns: The step columns, all numeric.

    Raises:
        DataError: a space contains a Tuple, or a Dict with arrays of several axes.
    """

    whole_episodes = False
    keeps_time = True
    needs_final_obs = True

    def __init__(self, folder: Path, header: Header, columns: list[str]) -> None:
        for root, space in header.spaces.items():
            _check(space, root)
        self._files = _files(folder)
        self._nesters = {root: Nester(space, root) for root, space in header.spaces.items()}
        self._names = rllib_names(extras(columns, header), _TAKEN)
        self.notes = _notes(self._names)

    def write(self, exp: Experience) -> None:
        """Write these steps."""
        segments, nest_obs = exp.segments, self._nesters[col.OBS]
        trees: dict[str, Any] = {
            "eps_id": _texts(segments.episode_id, exp.lengths),
            "agent_id": _texts(segments.agent_id, exp.lengths),
            "module_id": _texts(segments.module_id, exp.lengths),
            "t": exp.t(),
            "obs": nest_obs(exp.steps),
            "actions": self._nesters[col.ACTION](exp.steps),
            "rewards": exp.steps[col.REWARD],
            "new_obs": nest_obs(exp.next_obs()),
            "terminateds": exp.at_ends(segments.terminated),
            "truncateds": exp.at_ends(segments.truncated),
        }
        for name, tree in {"infos": infos_of(exp.steps), **outputs(exp, self._names)}.items():
            kept = tree if isinstance(tree, np.ndarray) else self._flat(tree, name)
            trees |= {name: kept} if len(kept) else {}
        pairs = [_column(name, tree) for name, tree in trees.items()]
        schema = pa.schema([field for field, _ in pairs])
        self._files.add(pa.Table.from_arrays([array for _, array in pairs], schema=schema))

    def _flat(self, tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Leave out arrays of several axes, whose shape would be lost."""
        out: dict[str, Any] = {}
        for key, value in tree.items():
            name = f"{path}/{key}"
            if isinstance(value, np.ndarray) and value.ndim > 2:
                note = f"`{name}` has several axes and is a part of another column, where Ray loses its shape: left out"
                self.notes += [note] if note not in self.notes else []
                continue
            kept = value if isinstance(value, np.ndarray) else self._flat(value, name)
            out |= {key: kept} if len(kept) else {}
        return out

    def close(self) -> None:
        """Write everything to disk."""
        self._files.close()


_REMEDY: Final = "Write `rllib-episodes` instead."


def _check(space: Space, root: str, *, inside: bool = False) -> None:
    """Raise a DataError if RLlib would read something other than what is written."""
    if isinstance(space, spaces.Tuple):
        raise DataError(f"`{root}` has a Tuple space, which Ray does not read in tables. {_REMEDY}")
    if inside and len(space.shape or ()) > 1:
        what = f"has the shape {list(space.shape or ())} inside of a Dict, where Ray does not keep it in tables"
        raise DataError(f"`{root}` {what}. {_REMEDY}")
    for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else ():
        _check(part, f"{root}/{key}", inside=True)


def _texts(values: Ids, lengths: NDArray[np.int64]) -> pa.Array:
    return pa.array(values.repeat(lengths), pa.string())


def _column(name: str, tree: NDArray[Any] | Mapping[str, Any] | pa.Array) -> tuple[pa.Field, pa.Array]:
    if not isinstance(tree, np.ndarray) or tree.ndim == 1:
        array = tree if isinstance(tree, pa.Array) else _nested(tree)
        return pa.field(name, array.type), array
    flat = np.ascontiguousarray(tree).reshape(-1)
    array = pa.LargeListArray.from_arrays(np.arange(len(tree) + 1) * (flat.size // max(1, len(tree))), pa.array(flat))
    metadata = {
        b"ARROW:extension:name": b"ray.data.arrow_tensor_v2",
        b"ARROW:extension:metadata": json.dumps(list(tree.shape[1:])).encode(),
    }
    return pa.field(name, array.type, metadata=metadata), array


def _nested(tree: NDArray[Any] | Mapping[str, Any]) -> pa.Array:
    """Structs of plain numbers and lists: RLlib does not write tensors inside structs."""
    if isinstance(tree, Mapping):
        parts = {str(key): _nested(value) for key, value in tree.items()}
        return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    array = pa.array(np.ascontiguousarray(tree).reshape(-1))
    if tree.ndim == 1:
        return array
    offsets = pa.array(np.arange(len(tree) + 1) * tree.shape[1], pa.int32())
    return pa.ListArray.from_arrays(offsets, array)
