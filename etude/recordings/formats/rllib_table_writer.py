# SPDX-License-Identifier: Apache-2.0
"""Writes what RLlib reads as a table of steps: Parquet files with a row a step, in the columns that it records.

Arrays are tensors as Ray Data stores them, so that Ray is not needed; the parts of a Dict are an Arrow struct. The
column ``t``, which RLlib does not record but knows, says which step of its episode a row is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.ids import Ids
from etude.recordings.formats.parquet_files import ParquetFolder
from etude.recordings.formats.rllib_names import extras, infos_of, outputs
from etude.recordings.layout import Header
from etude.spaces import Nester, Space

Fields = dict[str, tuple[pa.Field, pa.Array]]


class RLlibTableWriter:
    """Writes steps, in any order of their episodes.

    Args:
        folder: Where to; it is there.
        header: What is written.
        columns: The step columns; all of numbers.

    Raises:
        DataError: a space has a Tuple in it, or a Dict with arrays of several axes.
    """

    whole_episodes = False
    keeps_time = True
    needs_final_obs = True

    def __init__(self, folder: Path, header: Header, columns: list[str]) -> None:
        by_root = {col.OBS: header.obs_space, col.ACTION: header.action_space}
        for root, space in by_root.items():
            _check(space, root)
        self.notes: list[str] = []
        self._files = ParquetFolder(folder)
        self._nesters = {root: Nester(space, root) for root, space in by_root.items()}
        self._extras = extras(columns, by_root)

    def write(self, exp: Experience) -> None:
        """Take these steps."""
        segments = exp.segments
        fields: Fields = {
            "eps_id": _text("eps_id", segments.episode_id, exp.lengths),
            "agent_id": _text("agent_id", segments.agent_id, exp.lengths),
            "module_id": _text("module_id", segments.module_id, exp.lengths),
            "t": _column("t", exp.t()),
            "obs": _column("obs", self._nesters[col.OBS](exp.steps)),
            "actions": _column("actions", self._nesters[col.ACTION](exp.steps)),
            "rewards": _column("rewards", exp.steps[col.REWARD]),
            "new_obs": _column("new_obs", self._nesters[col.OBS](exp.next_obs())),
            "terminateds": _column("terminateds", exp.at_ends(segments.terminated)),
            "truncateds": _column("truncateds", exp.at_ends(segments.truncated)),
        }
        infos = self._flat(infos_of(exp.steps), "infos")
        fields |= {"infos": _column("infos", infos)} if infos else {}
        for name, tree in outputs({name: exp.steps[name] for name in self._extras}).items():
            kept = tree if isinstance(tree, np.ndarray) else self._flat(tree, name)
            fields |= {name: _column(name, kept)} if len(kept) else {}
        pairs = list(fields.values())
        schema = pa.schema([field for field, _ in pairs])
        self._files.add(pa.Table.from_arrays([array for _, array in pairs], schema=schema))

    def _flat(self, tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The same without arrays of several axes, whose shape would be lost."""
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
        """Put everything on the disk."""
        self._files.close()


def _check(space: Space, root: str, *, inside: bool = False) -> None:
    """Raise a DataError where RLlib would read something else than is written."""
    if isinstance(space, spaces.Tuple):
        raise DataError(
            f"`{root}` has a Tuple space, {space}: RLlib's tables hold those as pickles, which Ray does not read. "
            "Write `rllib-episodes` instead."
        )
    if inside and len(space.shape or ()) > 1:
        raise DataError(
            f"`{root}` has the shape {list(space.shape or ())} inside of a Dict: Ray does not keep the shape of arrays "
            "of several axes there. Write `rllib-episodes` instead."
        )
    for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else ():
        _check(part, f"{root}/{key}", inside=True)


def _text(name: str, values: Ids, lengths: NDArray[np.int64]) -> tuple[pa.Field, pa.Array]:
    array = pa.array(values.repeat(lengths), pa.string())
    return pa.field(name, array.type), array


def _column(name: str, tree: NDArray[Any] | Mapping[str, Any]) -> tuple[pa.Field, pa.Array]:
    if isinstance(tree, Mapping):
        array = _nested(tree)
        return pa.field(name, array.type), array
    if tree.ndim == 1:
        array = pa.array(tree)
        return pa.field(name, array.type), array
    flat = np.ascontiguousarray(tree).reshape(-1)
    width = int(np.prod(tree.shape[1:]))
    array = pa.LargeListArray.from_arrays(np.arange(len(tree) + 1) * width, pa.array(flat))
    metadata = {
        b"ARROW:extension:name": b"ray.data.arrow_tensor_v2",
        b"ARROW:extension:metadata": json.dumps(list(tree.shape[1:])).encode(),
    }
    return pa.field(name, array.type, metadata=metadata), array


def _nested(tree: NDArray[Any] | Mapping[str, Any]) -> pa.Array:
    """Structs of plain numbers and lists: RLlib writes no tensors inside of a struct."""
    if isinstance(tree, Mapping):
        parts = {str(key): _nested(value) for key, value in tree.items()}
        return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    array = pa.array(np.ascontiguousarray(tree).reshape(-1))
    if tree.ndim == 1:
        return array
    offsets = pa.array(np.arange(len(tree) + 1) * tree.shape[1], pa.int32())
    return pa.ListArray.from_arrays(offsets, array)
