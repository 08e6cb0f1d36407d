# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import subprocess
import sys
import urllib.request

import gymnasium as gym
import numpy as np
import pytest

from etude.cli.main import main
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source
from etude.recordings.converting import convert


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("show") / "data"
    box = gym.spaces.Box(-10, 10, (6,), np.float32)
    steps = {
        "obs": np.arange(60, dtype=np.float32).reshape(10, 6) / 10,
        "action": np.arange(10) % 2,
        "reward": np.arange(10, dtype=np.float32),
    }
    segments = Segments.of(2, episode_id=["a", "b"], terminated=[True, False], truncated=[False, True])
    with RecordingWriter(path, obs_space=box, action_space=gym.spaces.Discrete(2)) as writer:
        writer.write(Experience(steps, np.array([0, 4, 10]), segments, {"obs": np.zeros((2, 6), np.float32)}))
    return str(path)


def test_a_page_is_written(data, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["show", data, "--to", str(page), "--episodes", "1", "--where", "return > 1"]) == 0
    assert "the page has 1 of 2 episodes step by step" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_a_page_is_served_until_ctrl_c(data):
    args = [sys.executable, "-m", "etude", "show", data, "--no-browser"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{url}api/recordings") as answer:
            assert json.load(answer)[0]["episodes"] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["show", "{data}", "--where", "return > 1", "--no-browser"], "--to"),
        (["show", "{data}", "--to", "x.html", "--episodes", "-1"], "at least 0"),
        (["show", "{data}-elsewhere", "--no-browser"], "-elsewhere"),
        (["data", "head", "{data}", "--rows", "0"], "at least 1"),
        (["data", "head", "{data}", "--only", "speed"], "speed"),
    ],
)
def test_what_is_wrong_is_said(data, args, word, capsys):
    assert main([arg.format(data=data) for arg in args]) == 2
    assert word in capsys.readouterr().err


def test_head_shows_the_first_steps(data, capsys):
    assert main(["data", "head", data, "--rows", "5", "--only", "obs", "reward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["episode_id", "t", "obs", "reward", "terminated", "truncated"]
    assert lines[4].split() == ["a", "3", "[1.8", "1.9", "2", "2.1", "…]", "3", "True", "False"]
    assert lines[5].split()[:2] == ["b", "0"]
    assert len(lines) == 6
    assert main(["data", "head", data, "--rows", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["obs"] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert row["action"] == 0


def test_describe_gives_the_figures_of_each_column(data, capsys):
    assert main(["data", "describe", data]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["column"] == ["steps", "missing", "distinct", "mean", "std", "min", "max"]
    assert rows["reward"] == ["10", "0", "10", "4.5", f"{np.arange(10).std():.5g}", "0", "9"]
    assert rows["obs[5]"][-2:] == ["0.5", "5.9"]
    assert main(["data", "describe", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"]["action"]["mean"] == 0.5


def test_describe_says_which_numbers_of_a_long_vector_it_leaves_out(tmp_path, capsys):
    columns = {"obs": np.zeros((4, 40)), "action": np.zeros(4, np.int64), "terminated": [False, False, False, True]}
    convert(Recording.open(Source(columns)), tmp_path / "wide")
    assert main(["data", "describe", str(tmp_path / "wide")]) == 0
    said = capsys.readouterr().out
    assert "obs[31]" in said
    assert "obs[32]" not in said
    assert "only the first 32 of 40 numbers: obs" in said
