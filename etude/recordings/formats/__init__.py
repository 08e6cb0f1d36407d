# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings: only this folder knows their formats, one file each."""

from collections.abc import Callable, Sequence
from pathlib import Path

from etude.recordings.formats import hdf5, minari, npz, rllib_episodes, rllib_json, rllib_table
from etude.recordings.formats.parts import Parts

_OF_FILES: tuple[tuple[Callable[[Path], bool], Callable[[Sequence[Path]], Parts]], ...] = (
    (rllib_episodes.detect, rllib_episodes.open_parts),
    (rllib_table.detect, rllib_table.open_parts),
    (rllib_json.detect, rllib_json.open_parts),
    (hdf5.detect, hdf5.open_parts),
    (npz.detect, npz.open_parts),
)
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
    alike = [file for file in files if file.suffix == files[0].suffix]
    for detect, open_parts in _OF_FILES:
        if detect(files[0]):
            return open_parts(alike)
    return None


def _is_data(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not any(part[0] in "._" for part in path.parts)
