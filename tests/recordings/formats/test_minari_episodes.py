# SPDX-License-Identifier: Apache-2.0
"""Episodes of Minari's HDF5 files that are not as the others are: none is read as something else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from etude import DataError, Experience, Recording, RecordingWriter
from etude.experience import Segments
from etude.recordings import convert

h5py = pytest.importorskip("h5py")


def _as_int(group: Any) -> None:
    _replace(group, "rewards", group["rewards"][()].astype(np.int64))


def _transposed(group: Any) -> None:
    _replace(group, "observations", np.ascontiguousarray(group["observations"][()].T))


def _short(group: Any) -> None:
    _replace(group, "actions", group["actions"][:-1])


def _text(group: Any) -> None:
    _replace(group, "rewards", np.array([b"1.0"] * len(group["rewards"])))


def _elsewhere(group: Any) -> None:
    del group["actions"]
    group["actions"] = h5py.ExternalLink("other.hdf5", "/actions")


def _outside(group: Any) -> None:
    values = group["rewards"][()]
    del group["rewards"]
    beside = str(Path(group.file.filename).with_name("rewards.bin"))
    group.create_dataset("rewards", data=values, external=[(beside, 0, values.nbytes)])


def _replace(group: Any, name: str, values: np.ndarray) -> None:
    del group[name]
    group[name] = values


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with RecordingWriter(tmp_path / "own", obs_space=Box(-9, 9, (4,)), action_space=Discrete(4)) as writer:
        rng = np.random.default_rng(0)
        offsets = np.array([0, 6, 8, 15])
        steps = {
            "obs": rng.normal(size=(15, 4)).astype(np.float32),
            "action": rng.integers(0, 4, 15),
            "reward": rng.normal(size=15).astype(np.float32),
        }
        segments = Segments.of(3, episode_id=["a", "b", "c"], terminated=True, has_final_obs=True)
        writer.write(Experience(steps, offsets, segments, {"obs": rng.normal(size=(3, 4)).astype(np.float32)}))
    convert(Recording.open(tmp_path / "own"), tmp_path / "other-v0", format="minari")
    return tmp_path / "other-v0"


@pytest.mark.parametrize("change", [_as_int, _transposed, _short, _text, _elsewhere, _outside])
def test_an_episode_that_differs_is_refused(dataset: Path, change: Callable[[Any], None]) -> None:
    with h5py.File(next(dataset.rglob("*.hdf5")), "r+") as file:
        change(file["episode_1"])
    with pytest.raises(DataError, match="episode_1"):
        Recording.open(dataset).read()


@pytest.mark.parametrize("options", [{}, {"chunks": True}, {"compression": "gzip"}])
def test_layouts_and_widths_may_differ_between_episodes(dataset: Path, options: dict[str, Any]) -> None:
    before = Recording.open(dataset).read()
    with h5py.File(next(dataset.rglob("*.hdf5")), "r+") as file:
        values = file["episode_1"]["observations"][()]
        del file["episode_1"]["observations"]
        file["episode_1"].create_dataset("observations", data=values, **options)
    after = Recording.open(dataset).read()
    for name, column in before.steps.items():
        np.testing.assert_array_equal(column, after.steps[name])
    np.testing.assert_array_equal(before.final_obs["obs"], after.final_obs["obs"])


@pytest.mark.parametrize("kind", ["in another order of bytes", "of fewer bits", "shifted"])
def test_numbers_whose_bytes_are_not_numpys_are_converted(dataset: Path, kind: str) -> None:
    before = Recording.open(dataset).read()
    with h5py.File(next(dataset.rglob("*.hdf5")), "r+") as file:
        for episode in file.values():
            values = episode["actions"][()]
            del episode["actions"]
            stored = h5py.h5t.STD_I64BE.copy() if kind == "in another order of bytes" else h5py.h5t.STD_I64LE.copy()
            if kind != "in another order of bytes":
                stored.set_precision(56)
            if kind == "shifted":
                stored.set_offset(8)
            space = h5py.h5s.create_simple(values.shape)
            h5py.h5d.create(episode.id, b"actions", stored, space).write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    np.testing.assert_array_equal(Recording.open(dataset).read().steps["action"], before.steps["action"])


def test_a_file_may_begin_with_other_bytes(dataset: Path) -> None:
    before, path = Recording.open(dataset).read(), next(dataset.rglob("*.hdf5"))
    path.rename(path.with_name("old.hdf5"))
    with h5py.File(path.with_name("old.hdf5")) as old, h5py.File(path, "w", userblock_size=2048) as new:
        for name in old:
            old.copy(name, new)
    after = Recording.open(dataset).read()
    assert all(np.array_equal(column, after.steps[name]) for name, column in before.steps.items())


@pytest.mark.parametrize("odd", [np.array([7, 8]), np.array([1, 1], np.int8), "x", h5py.Empty("i8"), 3.0])
def test_attributes_that_are_no_number_are_as_if_absent(dataset: Path, odd: Any) -> None:
    """The rewards tell how many steps there are."""
    whole = Recording.open(dataset).read()
    with h5py.File(next(dataset.rglob("*.hdf5")), "r+") as file:
        file["episode_0"].attrs["total_steps"] = odd
        file["episode_0"].attrs["seed"] = odd
    found = Recording.open(dataset)
    assert "0" not in found.meta.get("seeds", {})
    np.testing.assert_array_equal(found.read().steps["obs"], whole.steps["obs"])


@pytest.mark.parametrize("name", [b"total_steps", b"seed"])
def test_a_damaged_attribute_is_no_absent_one(dataset: Path, name: bytes) -> None:
    path = next(dataset.rglob("*.hdf5"))
    with h5py.File(path, "r+") as file:
        file["episode_0"].attrs["seed"] = 7
    whole = bytearray(path.read_bytes())
    whole[whole.index(name + b"\0") + (len(name) + 8) // 8 * 8 + 4] ^= 0x3C  # its type, after its padded name
    path.write_bytes(whole)
    with pytest.raises(DataError, match="can't be read as HDF5 .* Restore it from a copy"):
        Recording.open(path)
