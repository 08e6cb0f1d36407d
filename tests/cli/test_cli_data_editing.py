# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from etude.cli.main import main
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter


@pytest.fixture
def recording(tmp_path):
    lengths = np.array([5, 10, 15, 20])
    steps = {"obs": np.zeros((50, 1), np.float32), "action": np.zeros(50, np.int64), "reward": np.ones(50)}
    segments = Segments.of(4, episode_id=["e0", "e1", "e2", "e3"], terminated=True)
    exp = Experience(steps, np.append(0, np.cumsum(lengths)), segments, {"obs": np.zeros((4, 1), np.float32)})
    with RecordingWriter(tmp_path / "a", obs_space=Box(-1, 1, (1,), np.float32), action_space=Discrete(2)) as writer:
        writer.write(exp)
    return tmp_path / "a"


def said(capsys, *words):
    """What a command says, in words and as JSON: of two runs."""
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


def test_filter_sample_and_split(recording, tmp_path, capsys):
    out = said(capsys, "filter", str(recording), str(tmp_path / "b"), "--min-length", "10", "--where", "length < 20")
    assert out == f"{tmp_path / 'b'}: 2 episodes, 25 steps\nleft out: 2 episodes, 25 steps\n"
    found = json.loads(said(capsys, "sample", str(recording), str(tmp_path / "c"), "--episodes", "3", "--json"))
    assert found["written"][0]["episodes"] == 3
    assert found["left_out"]["episodes"] == 1
    words = ["--to-train", str(tmp_path / "t"), "--to-validation", str(tmp_path / "v"), "--fraction", "0.5"]
    found = json.loads(said(capsys, "split", str(recording), *words, "--json"))
    assert [part["episodes"] for part in found["written"]] == [2, 2]
    assert found["left_out"] == {"episodes": 0, "steps": 0}
    both = [set(Recording.open(tmp_path / name).read().segments.episode_id) for name in "tv"]
    assert both[0] | both[1] == {"e0", "e1", "e2", "e3"}


def test_merge(recording, tmp_path, capsys):
    out = said(capsys, "merge", str(recording), str(recording), "--to", str(tmp_path / "m"))
    assert out.startswith(f"{tmp_path / 'm'}: 8 episodes, 100 steps\nleft out: 0 episodes, 0 steps\n4 episodes of ")
    assert "'e0' is now 'e0~2'" in out
    assert np.unique(Recording.open(tmp_path / "m").read().segments.episode_id.astype(str)).size == 8


def test_what_is_missing_or_wrong(recording, tmp_path, capsys):
    for words, message in (
        (["merge"], "needs a value for `paths`, `to`"),
        (["filter", str(recording), str(tmp_path / "b")], "no condition says which episodes to keep"),
        (
            ["filter", str(recording), str(tmp_path / "b"), "--where", "length"],
            "gives numbers, so it is not a condition",
        ),
        (["filter", str(recording), str(tmp_path / "b"), "--min-return", "1e9"], "no episode is left of 4"),
        (["sample", str(recording), str(tmp_path / "b")], "give the size of the sample"),
        (["split", str(recording), "--to-train", "x"], "needs a value for `to_validation`"),
        (["sample", str(recording), str(recording / "in"), "--steps", "1"], "is inside"),
    ):
        assert main(["data", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
