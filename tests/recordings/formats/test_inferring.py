# SPDX-License-Identifier: Apache-2.0
"""Spaces that are inferred from numbers: by one rule, whatever format the numbers come in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rllib import buffer, space_map, write_items, write_table

from etude.recordings import Recording, Source, convert

Columns = dict[str, np.ndarray]
ROWS = 6


def rllib_names(columns: Columns) -> dict[str, Any]:
    return {"obs": columns["obs"], "actions": columns["action"], "new_obs": columns["obs"]}


def as_rllib_table(folder: Path, columns: Columns) -> Any:
    arrays = {name: pa.array(values.tolist()) for name, values in rllib_names(columns).items()}
    keys = {"rewards": pa.array(np.ones(ROWS)), "eps_id": pa.array(["e"] * ROWS), "t": pa.array(np.arange(ROWS))}
    write_table(folder / "a.parquet", {**arrays, **keys, "terminateds": pa.array(np.arange(ROWS) == ROWS - 1)})
    return folder


def as_preset(folder: Path, columns: Columns) -> Any:
    return Source(as_rllib_table(folder, columns) / "a.parquet", preset="rllib")


def as_rllib_json(folder: Path, columns: Columns) -> Any:
    lists = {name: values.tolist() for name, values in rllib_names(columns).items()}
    ends = {"dones": [t == ROWS - 1 for t in range(ROWS)]}
    keys = {"rewards": [1.0] * ROWS, "eps_id": [7] * ROWS, "t": list(range(ROWS)), "type": "SampleBatch"}
    (folder / "a.json").write_text(json.dumps({**lists, **keys, **ends}) + "\n")
    return folder


def as_rllib_episodes(folder: Path, columns: Columns) -> Any:
    state = {
        "id_": "e", "t_started": 0, "t": ROWS, "is_terminated": True, "is_truncated": False,
        "observations": buffer(list(np.concatenate([columns["obs"], columns["obs"][:1]]))),
        "actions": buffer(list(columns["action"])), "rewards": buffer([1.0] * ROWS),
    }  # fmt: skip
    return write_items(folder / "a.parquet", [state])


def d4rl_names(columns: Columns) -> Columns:
    ends = {"terminals": np.arange(ROWS) == ROWS - 1, "rewards": np.ones(ROWS)}
    return {"observations": columns["obs"], "actions": columns["action"], **ends}


def as_npz(folder: Path, columns: Columns) -> Any:
    np.savez(folder / "a.npz", **d4rl_names(columns))
    return folder


def as_hdf5(folder: Path, columns: Columns) -> Any:
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, values in d4rl_names(columns).items():
            file[name] = values
    return folder


FORMATS: list[Callable[[Path, Columns], Any]] = [
    as_rllib_table, as_preset, as_rllib_json, as_rllib_episodes, as_npz, as_hdf5,
]  # fmt: skip
INTEGERS = gym.spaces.Box(-(2**63), 2**63 - 1, (), np.int64)
CASES: dict[str, tuple[Any, gym.Space, gym.Space]] = {
    # values, the space of such observations, and of such actions
    "choices": ([0, 3, 1, 2, 0, 1], gym.spaces.Discrete(4), gym.spaces.Discrete(4)),
    "most choices": ([0, 65_535] * 3, gym.spaces.Discrete(65_536), gym.spaces.Discrete(65_536)),
    "too many": ([0, 65_536] * 3, INTEGERS, INTEGERS),
    "the reported one": ([0, 100_000] * 3, INTEGERS, INTEGERS),
    "below zero": ([-1, 3] * 3, INTEGERS, INTEGERS),
    "vectors": (
        [[0, 4], [2, 1]] * 3, gym.spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), gym.spaces.MultiDiscrete([3, 5]),
    ),
    "large vectors": ([[0, 65_536], [2, 1]] * 3, *[gym.spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64)] * 2),
    "truth": ([True, False] * 3, gym.spaces.Discrete(2), gym.spaces.Discrete(2)),
    "flags": ([[True, False, True]] * 6, gym.spaces.MultiBinary(3), gym.spaces.MultiBinary(3)),
    "floats": ([[0.5, 2.0]] * 6, *[gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)] * 2),
}  # fmt: skip


def with_next_obs(name: str, columns: Columns) -> Columns:
    return {**d4rl_names(columns), name: np.append(columns["obs"][1:], 7)}


def as_flat_table(folder: Path, columns: Columns) -> Any:
    arrays = {n: pa.array(v.tolist()) for n, v in with_next_obs("next_observations", columns).items()}
    pq.write_table(pa.table(arrays), folder / "a.parquet")
    names = {"obs": "observations", "action": "actions", "reward": "rewards", "terminated": "terminals"}
    return Source(folder / "a.parquet", columns={**names, "next_obs": "next_observations"})


def as_npz_with_next(folder: Path, columns: Columns) -> Any:
    np.savez(folder / "a.npz", **with_next_obs("next_observations", columns))
    return folder


def as_json_with_new(folder: Path, columns: Columns) -> Any:
    as_rllib_json(folder, columns)
    line = json.loads((folder / "a.json").read_text())
    line["new_obs"] = [*line["new_obs"][1:], 7]
    (folder / "a.json").write_text(json.dumps(line) + "\n")
    return folder


def as_table_with_new(folder: Path, columns: Columns) -> Any:
    as_rllib_table(folder, columns)
    table = pq.read_table(folder / "a.parquet")
    nexts = pa.array([*table["new_obs"].to_pylist()[1:], 7])
    write_table(folder / "a.parquet", {**{n: table[n] for n in table.column_names}, "new_obs": nexts})
    return folder


@pytest.mark.parametrize("write", [as_flat_table, as_npz_with_next, as_json_with_new, as_table_with_new])
def test_states_that_only_end_episodes_are_observations(tmp_path: Path, write: Callable[[Path, Columns], Any]) -> None:
    # As in FrozenLake, whose goal is only seen after the last step.
    columns = {"obs": np.array([0, 1, 2, 3, 2, 3]), "action": np.zeros(ROWS, np.int64)}
    recording = Recording.open(write(tmp_path, columns))
    assert recording.obs_space == gym.spaces.Discrete(8)
    assert recording.read().final_obs["obs"][-1] == 7


@pytest.mark.parametrize("write", [as_npz, as_hdf5])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_one_choice_a_step_in_an_array_of_two_axes(
    tmp_path: Path, dtype: Any, write: Callable[[Path, Columns], Any]
) -> None:
    # As in the buffers of d3rlpy and Stable-Baselines3.
    choices = np.array([0, 1, 1, 0, 1, 0]).astype(dtype)
    columns = {"obs": np.zeros((ROWS, 1), np.float32), "action": choices.reshape(ROWS, 1)}
    recording = Recording.open(write(tmp_path, columns))
    assert recording.action_space == gym.spaces.Discrete(2)
    assert recording.obs_space.shape == (1,)
    np.testing.assert_array_equal(recording.read().steps["action"], choices)


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_all_formats_infer_the_same_spaces(tmp_path: Path, case: str, write: Callable[[Path, Columns], Any]) -> None:
    values, of_obs, of_actions = CASES[case]
    for name, wanted in (("obs", of_obs), ("action", of_actions)):
        (folder := tmp_path / name).mkdir()
        columns = {"obs": np.zeros((ROWS, 2), np.float32), "action": np.zeros(ROWS, np.int64), name: np.array(values)}
        recording = Recording.open(write(folder, columns))
        found = recording.obs_space if name == "obs" else recording.action_space
        assert type(found) is type(wanted)
        assert (found.shape, found.dtype.kind) == (wanted.shape, wanted.dtype.kind)
        for attribute in ("n", "nvec", "low", "high"):
            if hasattr(wanted, attribute) and found.dtype.kind != "f":
                np.testing.assert_array_equal(getattr(found, attribute), getattr(wanted, attribute))
        read = recording.read().steps[name]
        np.testing.assert_array_equal(read, np.array(values))
        assert read.dtype == found.dtype
        ours = convert(recording, tmp_path / f"{name}-ours")
        assert (ours.obs_space, ours.action_space) == (recording.obs_space, recording.action_space)
        assert ours.validate().ok


@pytest.mark.parametrize("write", [as_rllib_table, as_preset, as_rllib_json, as_npz, as_hdf5])
@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([0, 2, 1] * 2, [0, 4, 1] * 2, gym.spaces.Discrete(5)),
        ([0, 4, 1] * 2, [0, 2, 1] * 2, gym.spaces.Discrete(5)),
        ([[0, 3], [1, 1]] * 3, [[2, 0], [1, 1]] * 3, gym.spaces.MultiDiscrete([3, 4])),
        ([0, 2, 1] * 2, [0, -1, 1] * 2, INTEGERS),
        ([0, 65_536, 1] * 2, [0, 2, 1] * 2, INTEGERS),
    ],
)
def test_recordings_read_as_one_have_the_space_for_the_numbers_of_all(
    tmp_path: Path, write: Callable[[Path, Columns], Any], one: Any, other: Any, wanted: gym.Space
) -> None:
    where = []
    for name, values in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        columns = {"obs": np.zeros((ROWS, 2), np.float32), "action": np.array(values)}
        where.append(write(tmp_path / name, columns))
    recording = Recording.open(where)
    assert recording.action_space == wanted
    np.testing.assert_array_equal(recording.read().steps["action"], np.concatenate([one, other]))


@pytest.mark.parametrize(
    ("obs", "space", "wanted"),
    [
        (np.full((7, 2), 0.1), gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Box(-9, 9, (2,), np.float64)),
        (np.full((7, 2), 3), gym.spaces.Box(0, 255, (2,), np.uint8), gym.spaces.Box(0, 255, (2,), np.int64)),
        (np.arange(7).astype(np.uint64), gym.spaces.Discrete(7), gym.spaces.Discrete(7)),
        (np.ones((7, 2), np.int64), gym.spaces.MultiBinary(2), gym.spaces.MultiBinary(2)),
    ],
)
def test_numbers_wider_than_their_space_can_be_converted(
    tmp_path: Path, obs: np.ndarray, space: gym.Space, wanted: gym.Space
) -> None:
    state = {
        "id_": "e", "t_started": 0, "t": ROWS, "is_terminated": True, "is_truncated": False,
        "_observation_space": space_map(space), "_action_space": space_map(gym.spaces.Discrete(2)),
        "observations": buffer(list(obs)), "actions": buffer([1] * ROWS), "rewards": buffer([1.0] * ROWS),
    }  # fmt: skip
    recording = Recording.open(write_items(tmp_path / "a.parquet", [state]))
    assert recording.obs_space == wanted
    ours = convert(recording, tmp_path / "ours")
    assert ours.obs_space == wanted
    read = ours.read().steps["obs"]
    np.testing.assert_array_equal(read, obs[:-1])
    assert read.dtype == wanted.dtype
