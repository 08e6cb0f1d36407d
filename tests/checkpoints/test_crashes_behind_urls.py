# SPDX-License-Identifier: Apache-2.0
"""Stores that show every byte as it is written: whenever a process dies while it saves, a whole checkpoint is there."""

from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractFileSystem

from etude.checkpoints import folder_at, load_meta, load_tree, remove_tree, save_tree
from etude.errors import CheckpointError
from etude.files import names_in

PIECE = 11
"""Bytes that are written at once."""


class KilledError(BaseException):
    """The process is dead: nothing it does from now on is done."""


class Store(AbstractFileSystem):
    """As sftp: files are truncated when they are opened, and show what was written until then."""

    protocol = "asitgoes"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    left: ClassVar[float] = np.inf
    """The changes that are made before the process dies."""

    def changed(self) -> None:
        Store.left -= 1
        if Store.left < 0:
            raise KilledError

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "wb":
            return Writing(self, path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return Reading(self.files[path])

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        found = [self.info(name) for name in sorted(self.files) if name.rpartition("/")[0] == path]
        return found if detail else [one["name"] for one in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def _rm(self, path: str) -> None:
        self.changed()
        if self.files.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    rm_file = _rm

    def mv(self, path1: str, path2: str) -> None:  # type: ignore[override]  # sftp's takes no more, either
        self.changed()
        self.files[path2] = self.files.pop(path1)


class Copies(Store):
    """Moves by copying, piece by piece, and deleting."""

    protocol = "copies"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        file = Writing(self, path2)
        file.write(self.files[path1])
        self._rm(path1)


class Refuses(Store):
    """Does not rename to a name that is taken."""

    protocol = "refuses"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if path2 in self.files:
            raise FileExistsError(path2)
        super().mv(path1, path2)


class Silent(Store):
    """Neither, and says nothing, as webhdfs."""

    protocol = "silent"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if path2 not in self.files:
            super().mv(path1, path2)


class Can_not(Store):
    """Can't move at all."""

    protocol = "cannot"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError


class Reading:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.closed = data, 0, False

    def read(self, size: int = -1) -> bytes:
        end = len(self.data) if size < 0 else self.at + size
        found = self.data[self.at : end]
        self.at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, len(self.data))[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def close(self) -> None:
        self.closed = True


class Writing:
    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path, self.closed = store, path, False
        store.changed()
        store.files[path] = b""

    def write(self, data: Any) -> int:
        data = bytes(data)
        for start in range(0, len(data), PIECE):
            self.store.changed()
            self.store.files[self.path] += data[start : start + PIECE]
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


STORES = (Store, Copies, Refuses, Silent, Can_not)
for _kind in STORES:
    fsspec.register_implementation(str(_kind.protocol), _kind, clobber=True)


@pytest.fixture(params=STORES, ids=lambda kind: kind.protocol)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    Store.files.clear()
    yield f"{request.param.protocol}://host/run"
    Store.files.clear()
    Store.left = np.inf


def save(where: str, number: int, dies_after: float = np.inf) -> bool:
    """Whether the process lived."""
    Store.left = dies_after
    try:
        save_tree(where, {"i": number, "w": np.full(40, number)}, meta=number)
        return True
    except KilledError:
        return False
    finally:
        Store.left = np.inf


def number_there(where: str) -> int:
    tree, meta = load_tree(where)
    assert (tree["w"] == tree["i"]).all()
    assert tree["i"] == meta == load_meta(where)
    return int(meta)


def number_or_error(where: str) -> Any:
    try:
        return number_there(where)
    except CheckpointError as error:
        return str(error)


def test_a_save_that_dies_at_any_change_leaves_the_old_checkpoint_or_the_new_one(where: str) -> None:
    save(where, 1)
    files = dict(Store.files)
    found = []
    for i in range(2000):
        Store.files.clear()
        Store.files.update(files)
        lived = save(where, 2, dies_after=i)
        found.append(number_there(where))
        save(where, 3, dies_after=(7 * i) % 50)  # what comes next may die as well
        assert number_there(where) in (found[-1], 3)
        if lived:
            break
    assert lived, "a save makes more changes than were tried"
    assert found == sorted(found)
    assert {*found} == {1, 2}
    assert save(where, 4)
    assert number_there(where) == 4
    assert len(names_in(folder_at(where))) == 2, "what dead processes left was not cleared away"


def test_the_first_save_that_dies_leaves_nothing_or_a_checkpoint(where: str) -> None:
    for i in range(2000):
        Store.files.clear()
        lived = save(where, 1, dies_after=i)
        found = number_or_error(where)
        assert found == 1 if lived else found == 1 or "is not a checkpoint" in found or "is broken" in found
        if lived:
            return
    pytest.fail("a save makes more changes than were tried")


def test_removing_that_dies_leaves_a_checkpoint_or_none(where: str) -> None:
    for i in range(10):
        Store.files.clear()
        save(where, 1)
        save(where, 2, dies_after=12)
        Store.left = i
        try:
            remove_tree(where)
            lived = True
        except KilledError:
            lived = False
        Store.left = np.inf
        found = number_or_error(where)
        assert found in (1, 2) or "is not a checkpoint" in str(found)
        if lived:
            assert not Store.files
            return
    pytest.fail("removing makes more changes than were tried")
