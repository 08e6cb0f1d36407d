# SPDX-License-Identifier: Apache-2.0
"""What is written for Minari, read back, and read by Minari itself."""

import json
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_written import assert_equal, converted, episodes, recorded, spaces_of

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, convert
from etude.spaces import Nester

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
MOVE = gym.spaces.Discrete(3)
IMAGE = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8)
NESTED = gym.spaces.Dict({"image": IMAGE, "pair": gym.spaces.Tuple([MOVE, BOX])})


def held(exp: Experience) -> Experience:
    """What Minari has a place for."""
    names = [name for name in exp.steps if name.split("/")[0] in ("obs", "action", "reward", "info")]
    ids = np.array([str(i) for i in range(exp.num_segments)], object)
    segments = exp.segments.replace(episode_id=ids)
    return Experience({name: exp.steps[name] for name in names}, exp.offsets, segments, exp.final_obs)


@settings(deadline=None, max_examples=25)
@given(spaces_of(), spaces_of(), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_episodes_come_back_as_they_were(obs: gym.Space, action: gym.Space, lengths: list[int]) -> None:
    exp = episodes(obs, action, lengths)
    with tempfile.TemporaryDirectory() as folder:
        written = converted(Path(folder), "minari", obs, action, exp)
        assert written.format == "minari-hdf5"
        assert (written.obs_space, written.action_space) == (obs, action)
        assert_equal(written.read(), held(exp))


def test_minari_reads_every_value(tmp_path: Path) -> None:
    exp = episodes(NESTED, BOX, [3, 12, 1])
    own = recorded(tmp_path / "own", NESTED, BOX, exp, env="CartPole-v1", meta={"seeds": {"e001": 7}})
    convert(own, tmp_path / "some" / "data-v3", format="minari")
    dataset = minari.MinariDataset(tmp_path / "some" / "data-v3" / "data")
    assert (dataset.total_episodes, dataset.total_steps) == (3, 16)
    assert (dataset.observation_space, dataset.action_space) == (NESTED, BOX)
    assert dataset.spec.dataset_id == "data-v3"
    assert dataset.env_spec is not None
    assert dataset.env_spec.id == "CartPole-v1"
    assert [m.get("seed") for m in dataset.storage.get_episode_metadata(range(3))] == [None, 7, None]
    for i, found in enumerate(dataset.iterate_episodes()):
        one = exp[i]
        seen = {name: np.concatenate([one.steps[name], final]) for name, final in one.final_obs.items()}
        assert_same(found.observations, Nester(NESTED, "obs")(seen))
        assert_same(found.actions, one.steps["action"])
        assert_same(found.rewards, one.steps["reward"])
        assert found.terminations.tolist() == [False] * (len(found) - 1) + [bool(one.segments.terminated[0])]
        assert found.truncations.tolist() == [False] * (len(found) - 1) + [bool(one.segments.truncated[0])]
        assert_same(found.infos["fuel"][1:], one.steps["info/fuel"])
        assert_same(found.infos["at"]["xy"][1:], one.steps["info/at/xy"])
        assert np.isnan(found.infos["fuel"][0])


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict | tuple):
        items = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        assert len(found) == len(wanted)
        for key, value in items:
            assert_same(found[key], value)
    else:
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [4, 3], terminated=[True, False], truncated=False, t_start=[0, 5])
    written = converted(tmp_path, "minari", BOX, MOVE, exp)
    assert written.notes == (
        "1 episode is neither terminated nor truncated: marked as truncated, since minari holds episodes that are done",
        "1 episode lacks its first steps: minari counts steps from 0",
        "`logp`, `dist_inputs`, `state_out/h`, `my_score`: not an observation, action, reward or info, and "
        "Minari has no place for anything else: left out",
        "infos at an env's reset are unknown: NaN or 0 in their place",
    )
    assert written.read().segments.truncated.tolist() == [False, True]
    assert written.read().segments.t_start.tolist() == [0, 0]


def test_only_a_column_that_is_written_needs_a_name_for_hdf5(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [4])
    written = converted(tmp_path, "minari", BOX, MOVE, exp.with_steps(**{"": np.arange(4)}))
    assert "`my_score`, the column without a name: not an observation" in written.notes[0]
    with pytest.raises(DataError, match="HDF5 can't store a part called '' or '.', as in the column `info/`: rename"):
        converted(tmp_path / "other", "minari", BOX, MOVE, exp.with_steps(**{"info/": np.arange(4)}))


def test_a_dataset_of_minari_keeps_what_it_says_of_itself(tmp_path: Path) -> None:
    first = converted(tmp_path, "minari", BOX, MOVE, episodes(BOX, MOVE, [4]))
    about = tmp_path / "out-v0" / "data" / "metadata.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"author": ["Ada"], "algorithm_name": "random"}))
    convert(Recording.open(first.path), tmp_path / "again-v1", format="minari")
    found = json.loads((tmp_path / "again-v1" / "data" / "metadata.json").read_text())
    assert (found["author"], found["algorithm_name"], found["dataset_id"]) == (["Ada"], "random", "again-v1")


def test_a_folder_that_is_no_name_of_a_dataset(tmp_path: Path) -> None:
    own = recorded(tmp_path / "own", BOX, MOVE, episodes(BOX, MOVE, [4]))
    with pytest.raises(DataError, match=r"but the folder is .*data\. Call it .*data-v0, say"):
        convert(own, tmp_path / "data", format="minari")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_an_id_that_hdf5_can_not_hold_is_named(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [4], episode_id=np.array(["a\0b"], object))
    with pytest.raises(DataError, match=r"episode 'a\\x00b': HDF5 can't store an id with a NUL character"):
        converted(tmp_path, "minari", BOX, MOVE, exp)


@pytest.mark.parametrize("key", ["", "."])
def test_a_key_that_hdf5_can_not_hold_is_named(tmp_path: Path, key: str) -> None:
    space = gym.spaces.Dict({key: BOX, "x": BOX})
    with pytest.raises(DataError, match=rf"can't store a part called '' or '\.', as in the column `obs/{key}`: rename"):
        converted(tmp_path, "minari", space, MOVE, episodes(space, MOVE, [4]))
