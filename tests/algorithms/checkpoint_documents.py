# SPDX-License-Identifier: Apache-2.0
"""The JSON document of a checkpoint, read and written by hand: what somebody else may have made of it."""

import copy
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Place = tuple[str | int, ...]
"""The keys and indices that lead to a node."""


def read(folder: Path) -> dict[str, Any]:
    """The document of the checkpoint in ``folder``."""
    found: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    return found


def write(folder: Path, document: Any, *, checksum: bool = True) -> None:
    """Put a document in place of another; with the checksum that it should have, as a forger would, or as it is."""
    if checksum and isinstance(document, dict) and "crc32" in document:
        content = {name: value for name, value in document.items() if name != "crc32"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        document = {**content, "crc32": zlib.crc32(text.encode())}
    (folder / "checkpoint.json").write_text(json.dumps(document))


def places(node: Any, at: Place = ()) -> Iterator[Place]:
    """Where the nodes of a document are, itself left out."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def at(document: Any, place: Place) -> Any:
    """The node there."""
    for key in place:
        document = document[key]
    return document


def replaced(document: Any, place: Place, value: Any) -> Any:
    """A copy with another node there."""
    made = copy.deepcopy(document)
    at(made, place[:-1])[place[-1]] = value
    return made


def removed(document: Any, place: Place) -> Any:
    """A copy without that node."""
    made = copy.deepcopy(document)
    del at(made, place[:-1])[place[-1]]
    return made
