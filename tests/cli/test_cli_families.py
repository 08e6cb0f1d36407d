# SPDX-License-Identifier: Apache-2.0
"""Envs whose state can't be saved, from the shell: the run is saved, and what begins anew is said."""

from pathlib import Path

import pytest

from etude.checkpoints import load_meta
from etude.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of Box2D and pygame


@pytest.mark.parametrize("env", ["LunarLander-v3", "BipedalWalker-v3", "CarRacing-v3"])
def test_box2d_is_trained_saved_and_resumed(env: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("Box2D", reason="Box2D is missing: pip install 'gymnasium[box2d]'")
    out = str(tmp_path / "run")
    small = ["--num-steps", "24", "--minibatch-size", "24", "--epochs", "1", "--num-envs", "1", "--seed", "1"]
    train = ["train", "ppo", "--env", env, "--out", out, "--stop.env-steps", "48", "--save-interval", "0", "--quiet"]
    assert main([*train, *small, "--network.conv", "4,16,16", "--network.hidden", "8"]) == 0
    assert capsys.readouterr().err.count("new episodes") == 1
    assert load_meta(out)["env_steps"] == 48
    assert main(["train", "ppo", "--resume", out, "--stop.env-steps", "72", "--quiet"]) == 0
    assert capsys.readouterr().err.count("new episodes") == 1
    assert load_meta(out)["env_steps"] == 72
