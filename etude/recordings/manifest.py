# SPDX-License-Identifier: Apache-2.0
"""What a recording says about itself: in every Parquet file's footer, and once more in ``recording.json``.

The footers are the truth. ``recording.json`` repeats them for people and other tools, and lists the files, so that a
lost one is noticed. It is replaced after each file that appears; one killed in between is whole, but not yet listed.
"""

import dataclasses
import errno
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from etude import columns as col
from etude.errors import DataError, SpaceError
from etude.files import AnyPath, replace
from etude.spaces import Space, leaves, space_from_json, space_to_json

FORMAT: Final = "etude-recording"
VERSION: Final = 1
MANIFEST: Final = "recording.json"
HEADER_KEY: Final = b"etude:recording"
_LONGEST_NAME: Final = 255


@dataclasses.dataclass(frozen=True)
class Header:
    """What holds for a whole recording."""

    obs_space: Space
    """The space of one observation, as the env gave it."""
    action_space: Space
    """The space of one action, as the module chose it."""
    env: str | None = None
    """The id of the env, or None where it has none."""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Anything else worth keeping, as JSON data: connectors, the module's identity, the seed."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        from etude import __version__

        return {
            "format": FORMAT,
            "version": VERSION,
            "written_by": f"etude {__version__}",
            "env": self.env,
            "spaces": {col.OBS: space_to_json(self.obs_space), col.ACTION: space_to_json(self.action_space)},
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, data: Any, where: AnyPath) -> "Header":
        """The inverse of `to_json`.

        Raises:
            DataError: the data, found in the file ``where``, is not such a header or of a later version.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise DataError(
                f"{where}: this does not describe an Etude recording (`format` is not {FORMAT!r}). "
                "Restore it from a copy."
            )
        if data.get("version") != VERSION:
            raise DataError(
                f"{where}: the recording has format version {data.get('version')!r}, but this Etude reads version "
                f"{VERSION}. Install a newer Etude."
            )
        try:
            spaces, meta = data["spaces"], data.get("meta") or {}
            if not isinstance(meta, dict):
                raise TypeError(f"`meta` is {meta!r}, not an object")
            obs_space, action_space = space_from_json(spaces[col.OBS]), space_from_json(spaces[col.ACTION])
            return cls(obs_space, action_space, data.get("env"), meta)
        except SpaceError as error:
            raise DataError(f"{where}: the recording's description can't be used: {error}") from error
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{where}: the recording's description can't be read ({error}). Restore it from a copy."
            ) from error

    def dumps(self) -> bytes:
        """As JSON bytes.

        Raises:
            DataError: ``meta`` holds something that JSON can't.
        """
        return _dumped(self.to_json())

    def obs_leaves(self) -> dict[str, Space]:
        """The simple spaces of the observation by column name."""
        return leaves(self.obs_space, col.OBS)

    def action_leaves(self) -> dict[str, Space]:
        """The simple spaces of the action by column name."""
        return leaves(self.action_space, col.ACTION)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``recording.json``: the header and the files."""

    header: Header
    files: dict[str, dict[str, int]]
    """For each data file, by its path relative to the folder: ``rows`` and ``bytes``."""

    def write(self, folder: AnyPath) -> None:
        """Replace ``recording.json`` in ``folder``, whole or not at all."""
        totals = {"files": len(self.files), "rows": sum(f["rows"] for f in self.files.values())}
        data = {**self.header.to_json(), "totals": totals, "files": self.files}
        replace(folder / MANIFEST, _dumped(data, indent=2) + b"\n")

    @classmethod
    def read(cls, folder: AnyPath) -> "Manifest | None":
        """``recording.json`` of ``folder``, or None if there is none.

        Raises:
            DataError: it is there, but is not valid.
        """
        path = folder / MANIFEST
        try:
            if isinstance(path, Path) and path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file")  # a pipe or a device, which has no end
            data = loads(path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, OSError, RecursionError) as error:
            raise DataError(
                f"{path}: can't be read as JSON ({error}). Each Parquet file carries the same header: move "
                f"{MANIFEST} away to read the recording without it."
            ) from error
        header = Header.from_json(data, path)
        files = data.get("files", {})
        if not isinstance(files, dict) or not all(
            isinstance(f, dict) and type(f.get("rows")) is int for f in files.values()
        ):
            raise DataError(f"{path}: `files` is not a list of files with their rows. Move {MANIFEST} away to go on.")
        for name in files:
            parts = name.split("/")
            is_odd = not name or "\0" in name or "\\" in name or max(map(len, parts)) > _LONGEST_NAME
            if is_odd or PurePosixPath(name).is_absolute() or ".." in parts:
                raise DataError(
                    f"{path}: `files` lists {reprlib.repr(name)}, which is no file below this folder. Restore it from "
                    f"a copy, or move {MANIFEST} away to go on."
                )
        return cls(header, files)


def loads(text: str | bytes) -> Any:
    """The data in JSON text. NaN and infinity, which JSON has not but some writers put there, become text.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=str)


def _dumped(data: Mapping[str, Any], indent: int | None = None) -> bytes:
    try:
        return json.dumps(data, indent=indent, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the recording's `meta` must be plain JSON data: {error}.") from error
