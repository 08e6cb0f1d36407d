# SPDX-License-Identifier: Apache-2.0
"""HDF5 without h5py."""

import sys
from pathlib import Path

import pytest

from etude.errors import DataError
from etude.recordings.formats.d4rl import D4RLHdf5


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "a.hdf5").write_bytes(b"\x89HDF")
    with pytest.raises(DataError, match="HDF5 files are read with h5py, which is not installed: pip install h5py"):
        D4RLHdf5([tmp_path / "a.hdf5"]).describe()


def test_what_is_no_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"nothing of the kind")
    assert not D4RLHdf5.detect(tmp_path / "a.hdf5")
    with pytest.raises(DataError, match=r"a\.hdf5: can't be read as HDF5 \(.*Restore it from a copy"):
        D4RLHdf5([tmp_path / "a.hdf5"]).describe()
