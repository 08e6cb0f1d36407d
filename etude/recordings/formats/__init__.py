# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings: only this folder knows their formats. So far they are recognised, not read."""

from pathlib import Path

import pyarrow as pa


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
