# SPDX-License-Identifier: Apache-2.0
"""What is written for RLlib as episodes, read back, and looked into with msgpack alone."""

import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_rllib import NESTED, PAIR, coded, space_map
from some_written import assert_equal, converted, episodes, spaces_of

from etude.errors import DataError

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
MOVE = gym.spaces.Discrete(3)


@settings(deadline=None, max_examples=25)
@given(spaces_of(), spaces_of(), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_episodes_come_back_as_they_were(obs: gym.Space, action: gym.Space, lengths: list[int]) -> None:
    exp = episodes(obs, action, lengths)
    with tempfile.TemporaryDirectory() as folder:
        written = converted(Path(folder), "rllib-episodes", obs, action, exp)
        assert written.format == "rllib-episodes"
        assert not written.notes
        assert (written.obs_space, written.action_space) == (obs, action)
        assert_equal(written.read(), exp)


def documents(folder: Path) -> list[Any]:
    items = [item for file in sorted(folder.glob("*.parquet")) for item in pq.read_table(file)["item"].to_pylist()]
    return [msgpack.unpackb(item, strict_map_key=False) for item in items]


def test_a_document_is_what_rllib_writes(tmp_path: Path) -> None:
    exp = episodes(NESTED, PAIR, [3], agent_id="a", module_id="m", terminated=True, truncated=False)
    converted(tmp_path, "rllib-episodes", NESTED, PAIR, exp)
    (found,) = documents(tmp_path / "out-v0")
    s = exp.steps

    def buffer(data: list[Any], space: gym.Space | None = None) -> dict[str, Any]:
        about = None if space is None else space_map(space)
        return {"data": coded(data), "lookback": 0, "finalized": False, "space": about}

    seen = [{"mode": s["obs/mode"][i], "pos": s["obs/pos"][i]} for i in range(3)]
    seen.append({"mode": exp.final_obs["obs/mode"][0], "pos": exp.final_obs["obs/pos"][0]})
    infos = [{}, *({"fuel": s["info/fuel"][i], "at": {"xy": s["info/at/xy"][i]}} for i in range(3))]
    wanted = {
        "id_": "e000",
        "agent_id": "a",
        "module_id": "m",
        "multi_agent_episode_id": None,
        "observations": buffer(seen, NESTED),
        "actions": buffer([[s["action/0"][i], s["action/1"][i]] for i in range(3)], PAIR),
        "rewards": buffer(s["reward"].tolist(), gym.spaces.Box(-np.inf, np.inf, (), np.float32)),
        "infos": buffer(infos),
        "extra_model_outputs": {
            "action_logp": buffer(list(s["logp"])),
            "action_dist_inputs": buffer(list(s["dist_inputs"])),
            "state_out": buffer([{"h": h} for h in s["state_out/h"]]),
            "my_score": buffer(list(s["my_score"])),
        },
        "is_terminated": coded(np.bool_(True)),
        "is_truncated": coded(np.bool_(False)),
        "t_started": 0,
        "t": 3,
        "_observation_space": space_map(NESTED),
        "_action_space": space_map(PAIR),
        "_start_time": 0.0,
        "_last_step_time": 0.0,
        "custom_data": {},
    }
    assert found == wanted
    assert list(found) == list(wanted)


def test_without_outputs_and_infos(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [2])
    exp = type(exp)({n: exp.steps[n] for n in ("obs", "action", "reward")}, exp.offsets, exp.segments, exp.final_obs)
    assert_equal(converted(tmp_path, "rllib-episodes", BOX, MOVE, exp).read(), exp)
    (found,) = documents(tmp_path / "out-v0")
    assert found["extra_model_outputs"] is None
    assert found["infos"]["data"] == [{}, {}, {}]


def test_names_that_are_words_of_ours_come_back(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [2])
    exp.steps["extra/value"], exp.steps["value"] = np.array([1.0, 2.0]), np.array([3.0, 4.0], np.float32)
    assert_equal(converted(tmp_path, "rllib-episodes", BOX, MOVE, exp).read(), exp)
    (found,) = documents(tmp_path / "out-v0")
    assert {"value", "vf_preds"} <= set(found["extra_model_outputs"])


def test_pieces_of_several_episodes_mixed_are_put_together(tmp_path: Path) -> None:
    whole = episodes(BOX, MOVE, [12, 7, 5, 1], terminated=[True, False, False, True], truncated=False)
    cut = whole.cut(5, lookback=2)
    order = np.lexsort((cut.segments.episode_id.astype(str), cut.segments.t_start))
    parts = [cut.select(np.array([i])) for i in order]
    written = converted(tmp_path, "rllib-episodes", BOX, MOVE, *parts)
    assert written.notes == (
        "2 episodes are neither terminated nor truncated: marked as truncated, since rllib-episodes holds episodes "
        "that are done",
    )
    found = written.read()
    found = found.select(np.argsort(found.segments.episode_id.astype(str)))
    ends = whole.segments.replace(truncated=np.array([False, True, True, False]))
    assert_equal(found, type(whole)(whole.steps, whole.offsets, ends, whole.final_obs))


def test_an_episode_that_lacks_its_beginning(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [4], t_start=6)
    assert_equal(converted(tmp_path, "rllib-episodes", BOX, MOVE, exp).read(), exp)
    (found,) = documents(tmp_path / "out-v0")
    assert (found["t_started"], found["t"]) == (6, 10)


def test_many_files_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.recordings.formats.rllib_writers.MAX_BYTES", 20_000)
    monkeypatch.setattr("etude.recordings.formats.rllib_writers.GROUP_BYTES", 5_000)
    exp = episodes(BOX, MOVE, [20] * 12)
    written = converted(tmp_path, "rllib-episodes", BOX, MOVE, exp)
    assert len(written.files) > 3
    assert_equal(written.read(), exp)


def test_a_space_that_rllib_has_no_map_for(tmp_path: Path) -> None:
    odd = gym.spaces.MultiDiscrete([2, 2], start=[1, 0])
    with pytest.raises(DataError, match=r"own: .* there, the numbers of a MultiDiscrete start"):
        converted(tmp_path, "rllib-episodes", BOX, odd, episodes(BOX, odd, [2]))
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
