# SPDX-License-Identifier: Apache-2.0
"""D4RL-style HDF5 and NPZ, against a loop over rows."""

import io
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording
from etude.recordings.formats.d4rl import D4RLHdf5, D4RLNpz
from etude.recordings.formats.source import Source

Arrays = dict[str, NDArray[Any]]


def some(rows: int = 40, *, nexts: bool = True, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(rows, 3)).astype(np.float32)
    out = {
        "observations": obs,
        "actions": rng.normal(size=(rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": rng.random(rows) < 0.1,
        "timeouts": rng.random(rows) < 0.1,
        "infos/qpos": rng.normal(size=(rows, 4)),
        "metadata/weights": rng.normal(size=(5, 5)),
    }
    return out | ({"next_observations": rng.normal(size=(rows, 3)).astype(np.float32)} if nexts else {})


def write_hdf5(path: Path, arrays: Arrays) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip" if values.ndim else None)
    return path


def write_npz(path: Path, arrays: Arrays) -> Path:
    np.savez_compressed(path, **arrays)
    return path


KINDS = {"d4rl-hdf5": (D4RLHdf5, write_hdf5, "a.hdf5"), "npz": (D4RLNpz, write_npz, "a.npz")}


def opened(tmp_path: Path, kind: str, *files: Arrays) -> Recording:
    _, write, name = KINDS[kind]
    tmp_path.mkdir(exist_ok=True)
    paths = [write(tmp_path / f"{i}{name}", arrays) for i, arrays in enumerate(files)]
    recording = Recording.open(paths, on_bad=None)
    assert recording.format == kind
    return recording


def everything(recording: Recording) -> Experience:
    exps = [recording.part(k) for k in range(recording.num_parts)]
    exp = Experience.concat(exps)
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return exp


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_replay_buffer_of_stable_baselines3(kind: str, tmp_path: Path) -> None:
    plain = some(40) | {"actions": np.arange(40) % 3}
    beside = {name: values[:, None] for name, values in plain.items() if "/" not in name} | {
        "actions": plain["actions"].reshape(40, 1, 1)
    }
    (whole, buffer) = (everything(opened(tmp_path / name, kind, own)) for name, own in (("a", plain), ("b", beside)))
    assert buffer.segments.terminated.tolist() == whole.segments.terminated.tolist()
    for name in ("obs", "action", "reward"):
        np.testing.assert_array_equal(buffer.steps[name], whole.steps[name])
    np.testing.assert_array_equal(buffer.final_obs["obs"], whole.final_obs["obs"])
    two = {name: np.concatenate([values, values], 1) for name, values in beside.items()}
    with pytest.raises(
        DataError, match=r"`rewards` has rows of shape \[2\].* one column for each parallel env: save a file for each"
    ):
        opened(tmp_path / "c", kind, two)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("nexts", [True, False])
def test_rows_become_episodes(tmp_path: Path, kind: str, nexts: bool) -> None:
    files = [some(40, nexts=nexts), some(25, nexts=nexts, seed=1)]
    exp = everything(opened(tmp_path, kind, *files))
    at, segment = 0, 0
    for f, arrays in enumerate(files):
        begun, number, rows = 0, 0, len(arrays["rewards"])
        for row in range(rows):
            for name, own in {"obs": "observations", "action": "actions", "reward": "rewards"}.items():
                np.testing.assert_array_equal(exp.steps[name][at + row], arrays[own][row])
            np.testing.assert_array_equal(exp.steps["info/qpos"][at + row], arrays["infos/qpos"][row])
            if arrays["terminals"][row] or arrays["timeouts"][row] or row == rows - 1:
                own = exp[segment]
                assert own.lengths.tolist() == [row + 1 - begun]
                assert own.segments.episode_id[0] == f"{f}-{number}"
                assert own.segments.terminated[0] == arrays["terminals"][row]
                assert own.segments.truncated[0] == arrays["timeouts"][row]
                assert own.segments.has_final_obs[0] == nexts
                if nexts:
                    np.testing.assert_array_equal(own.final_obs["obs"][0], arrays["next_observations"][row])
                begun, number, segment = row + 1, number + 1, segment + 1
        at += rows
    assert segment == exp.num_segments


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_it_says_about_itself(tmp_path: Path, kind: str) -> None:
    arrays = some()
    arrays["actions"] = np.arange(40) % 7
    arrays["rewards"] = np.arange(40)[:, None]
    recording = opened(tmp_path, kind, arrays)
    assert recording.columns == ["action", "info/qpos", "obs", "reward"] if kind == "d4rl-hdf5" else True
    assert recording.header.action_space == gym.spaces.Discrete(7)
    assert recording.header.obs_space == gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert recording.meta["dropped"] == {"metadata/weights": "not plain numbers, one row a step"}
    exp = recording.part(0, ["reward"])
    assert list(exp.steps) == ["reward"]
    assert exp.final_obs == {}
    np.testing.assert_array_equal(exp.steps["reward"], np.arange(40.0))
    assert recording.validate().ok


@pytest.mark.parametrize("nexts", [True, False])
def test_long_episodes_come_in_pieces_that_know_what_follows(tmp_path: Path, nexts: bool) -> None:
    rows = 150_000
    obs = np.arange(rows, dtype=np.float32)[:, None]
    arrays = {"observations": obs, "actions": obs, "rewards": obs[:, 0], "terminals": np.zeros(rows, bool)}
    arrays["timeouts"] = np.arange(rows) == 99_999
    if nexts:
        arrays["next_observations"] = obs + 1
    recording = opened(tmp_path, "npz", arrays)
    assert [recording.part(k).num_steps for k in range(recording.num_parts)] == [65_536, 34_464, 50_000]
    exp = everything(recording)
    assert exp.segments.t_start.tolist() == [0, 65_536, 0]
    assert exp.segments.truncated.tolist() == [False, True, False]
    assert exp.segments.has_final_obs.tolist() == [True, nexts, nexts]
    assert exp.final_obs["obs"][0] == 65_536
    assert exp.join().lengths.tolist() == [100_000, 50_000]


def test_dones_alone_and_no_flags_at_all_are_told(tmp_path: Path) -> None:
    arrays = some(10)
    done = arrays.pop("terminals") | (np.arange(10) == 4)
    del arrays["timeouts"]
    recording = opened(tmp_path, "npz", {**arrays, "dones": done})
    assert "time limits can't be told apart" in recording.meta["inferred"]["done"]
    assert recording.part(0).segments.terminated.sum() == done.sum()
    (tmp_path / "more").mkdir()
    recording = opened(tmp_path / "more", "npz", arrays)
    assert "no flag says where episodes end" in recording.meta["inferred"]["ends"]
    assert recording.part(0).num_segments == 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_dones_stand_for_the_flag_that_is_missing(kind: str, tmp_path: Path) -> None:
    arrays = some(nexts=False)
    timeouts = arrays.pop("timeouts")
    dones = arrays["terminals"] | timeouts
    segments = opened(tmp_path, kind, {**arrays, "dones": dones}).part(0).segments
    ends = np.flatnonzero(dones)
    np.testing.assert_array_equal(segments.terminated[: len(ends)], arrays["terminals"][ends])
    np.testing.assert_array_equal(segments.truncated[: len(ends)], ~arrays["terminals"][ends])
    table = {name: values for name, values in arrays.items() if "/" not in name} | {"dones": dones}
    found = Recording.open(Source(table, preset="d4rl"), on_bad=None).part(0).segments
    np.testing.assert_array_equal(found.truncated, segments.truncated)


def changed(**changes: Any) -> Arrays:
    arrays = some(10) | {name.replace("__", "/"): value for name, value in changes.items()}
    return {name: value for name, value in arrays.items() if value is not None}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(actions=None), "there is no array `actions`; there are"),
        (
            changed(rewards=np.zeros(9)),
            r"`rewards` is of shape .*, but must have 10 rows of numbers, as `actions` has.*cut the longer",
        ),
        (changed(rewards=np.zeros((10, 2))), r"`rewards` has rows of shape \[2\], not one number each"),
        (changed(terminals=np.full(10, 2)), "row 0: the column of `terminated` is '2', not true or false"),
        (changed(timeouts=np.zeros(3, bool)), r"`timeouts` is of shape \[3\], but must have 10 rows of numbers"),
        (changed(next_observations=np.zeros((10, 2))), "`next_observations` has other shapes or dtypes"),
        (changed(observations=np.zeros((10, 0))), r"`observations` is of shape \[10, 0\], but must have 10 rows"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: str, arrays: Arrays, message: str) -> None:
    kind_of, write, name = KINDS[kind]
    with pytest.raises(DataError, match=message):
        kind_of([write(tmp_path / name, arrays)]).describe()


def test_other_files_must_be_alike(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1a.npz: the arrays are not those of 0a.npz: next_obs, obs differ"):
        opened(tmp_path, "npz", some(), changed(observations=np.zeros((10, 3)), next_observations=np.zeros((10, 3))))


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **changed(observations=np.array([{"a": 1}] * 10, object)))
    with pytest.raises(DataError, match="`observations` does not hold plain numbers"):
        Recording.open([path], on_bad=None)
    np.savez(path, **changed(notes=np.array([{"a": 1}] * 10, object)))
    assert Recording.open([path], on_bad=None).meta["dropped"]["notes"] == "not plain numbers, one row a step"


def test_of_actions_that_are_no_numbers_the_actions_are_named(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", some() | {"actions": np.array([1, 2] * 20, object)})
    with pytest.raises(DataError, match="`actions` does not hold plain numbers"):
        Recording.open(path)


@pytest.mark.parametrize("kind", list(KINDS))
def test_arrays_beside_those_that_are_read_are_named(kind: str, tmp_path: Path) -> None:
    arrays = some()
    beside = {name: np.arange(40) for name in ("obs", "action", "reward", "next_obs", "dones", "terminated")}
    recording = opened(tmp_path, kind, {"reward": beside["reward"], **arrays, **beside})
    reserved, flag = "the name is reserved for recordings", "episodes end where terminals or timeouts says so"
    why = dict.fromkeys(("obs", "action", "reward", "next_obs"), reserved) | dict.fromkeys(
        ("dones", "terminated"), flag
    )
    assert recording.meta["dropped"] == {"metadata/weights": "not plain numbers, one row a step", **why}
    np.testing.assert_array_equal(recording.read().steps["reward"], arrays["rewards"])


def test_an_array_that_claims_too_much_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 3)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("observations.npy", head.getvalue())
        archive.writestr("actions.npy", head.getvalue())
    with pytest.raises(DataError, match="an array claims"):
        Recording.open([path], on_bad=None)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in ("observations", "actions"):
            file.create_dataset(name, (2**40, 3), np.float32, chunks=(1024, 3), compression="gzip")
    with pytest.raises(DataError, match=r"`actions` claims 13,194,139,533,312 bytes"):
        Recording.open([tmp_path / "a.hdf5"], on_bad=None)


@pytest.mark.parametrize("name", ["observations", "next_observations"])
def test_an_array_in_another_file_is_refused_as_such(tmp_path: Path, name: str) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for own, values in some(20).items():
            if own != name:
                file[own] = values
        file[name] = h5py.ExternalLink("other.hdf5", f"/{name}")
    with pytest.raises(DataError, match=rf"`{name}` .*link"):
        Recording.open([tmp_path / "a.hdf5"], on_bad=None)


def test_nan_is_found_where_it_is(tmp_path: Path) -> None:
    arrays = some(20)
    arrays["actions"][13, 1] = np.nan
    (found,) = opened(tmp_path, "npz", arrays).validate().errors
    assert "row 13: column `action` holds NaN in component 1" in found.message
    assert (found.kind, found.row, found.column) == ("nan", 13, "action")


@pytest.mark.parametrize("kind", list(KINDS))
def test_mutated_bytes_end_in_data_errors(tmp_path: Path, kind: str) -> None:
    _, write, name = KINDS[kind]
    path = write(tmp_path / name, some(30))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            everything(Recording.open([path], on_bad=None))
        except DataError:
            refused += 1
    assert refused > 20
