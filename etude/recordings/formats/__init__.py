# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings: only this folder knows their formats, one file each."""

from pathlib import Path

import pyarrow as pa

from etude.recordings.formats import hdf5, minari, npz, rllib_episodes, rllib_json, rllib_table
from etude.recordings.formats.parts import Parts

_OF_FILES = (rllib_episodes, rllib_table, rllib_json, hdf5, npz)
_SUFFIXES = (".parquet", ".json", ".jsonl", ".hdf5", ".h5", ".npz")


def open_foreign(path: Path) -> Parts | None:
    """Another tool's recording at ``path``, told by what is in it; None where it is none that is known.

    Raises:
        DataError: it can't be opened.
    """
    if minari.detect(path):
        return minari.open_parts(path)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_data(p.relative_to(path)))
    if not files:
        return None
    for module in _OF_FILES:
        if module.detect(files[0]):
            alike = [file for file in files if file.suffix == files[0].suffix]
            return module.open_parts(alike if module in (hdf5, npz) else path)
    return None


def _is_data(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not any(part[0] in "._" for part in path.parts)


def recognise_table(schema: pa.Schema) -> str | None:
    """What a Parquet file with this schema looks like, in words; None where it looks like nothing known."""
    names = set(schema.names)
    if names == {"item"} and pa.types.is_binary(schema.field("item").type):
        return "an RLlib episode recording (one msgpack document a row)"
    if {"eps_id", "obs"} <= names:
        return "an RLlib tabular recording"
    if {"observations", "actions", "rewards", "terminations", "truncations"} <= names:
        return "a Minari dataset"
    return None


def recognise_path(path: Path) -> str | None:
    """What a file or folder without Parquet files looks like, in words; None where it looks like nothing known."""
    if path.is_file():
        names, suffixes = {path.name}, {path.suffix}
    else:
        inside = [p for p in path.rglob("*") if p.is_file()]
        names, suffixes = {p.name for p in inside}, {p.suffix for p in inside}
    if "main_data.hdf5" in names or ({"metadata.json"} <= names and suffixes & {".arrow", ".hdf5"}):
        return "a Minari dataset"
    if suffixes & {".json", ".jsonl"} and "recording.json" not in names:
        return "an RLlib JSON recording"
    return None
