# SPDX-License-Identifier: Apache-2.0
"""Names in files of strangers never reach the terminal as they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import trained
from gymnasium.spaces import Box, Discrete

from etude.algorithms import Stop
from etude.algorithms import progress as live
from etude.checkpoints import load_tree, save_tree
from etude.cli.main import main
from etude.experience import Experience, Segments
from etude.recordings import RecordingWriter

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e[/red]\rx"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr()
    both = text.out + text.err
    bad = [c for c in both if not c.isprintable() and c != "\n"]
    assert not bad, f"raw on the terminal: {bad!r}"
    return both


def forged(run: Path, to: Path, **meta: Any) -> str:
    tree, known = load_tree(run)
    save_tree(to, tree, meta={**known, **meta})
    return str(to)


def test_names_in_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    tree, meta = load_tree(run)
    config = meta["config"]
    for number, changed in enumerate([
        {"algorithm": EVIL},
        {"config": {**config, EVIL: 1}},
        {"config": {**config, "env": EVIL}},
        {"config": {**config, "env": f"{EVIL}:x"}},
        {"config": {**config, "module": {"$ref": f"a:{EVIL}"}}},
        {"config": {**config, "connectors": [EVIL]}},
        {"config": {**config, "env": {"$unsaved": EVIL}}},
        {"config": {**config, "agents": {**config["agents"], "modules": [EVIL]}}},
        {"spaces": {EVIL: meta["spaces"]["main"]}},
    ]):  # fmt: skip
        path = forged(run, tmp_path / f"run{number}", **changed)
        for command in (["evaluate", path], ["train", "ppo", "--resume", path], ["watch", path, "--to", "x.gif"]):
            assert main(command) == 2
            assert "owned" in shown(capsys) or changed.get("config", config)["agents"]["modules"]
    save_tree(tmp_path / "part", {EVIL: tree["counters"]}, meta=meta)
    assert main(["evaluate", str(tmp_path / "part")]) == 2
    assert "owned" in shown(capsys)


def test_names_in_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = Experience(
        {"obs": np.zeros((3, 2), np.float32), "action": np.zeros(3, np.int64), "reward": np.zeros(3)},
        np.array([0, 3]),
        Segments.of(1, episode_id=[f"e{EVIL}"], agent_id=[f"a{EVIL}"], terminated=np.ones(1, bool)),
        {"obs": np.zeros((1, 2), np.float32)},
    )
    spaces: dict[str, Any] = {"obs_space": Box(-1, 1, (2,)), "action_space": Discrete(2)}
    meta = {"algorithm": EVIL, f"key{EVIL}": EVIL}
    with RecordingWriter(tmp_path / "data", env=f"env{EVIL}\nepisodes   1,000,000", meta=meta, **spaces) as writer:
        writer.write(exp)
    assert main(["data", "info", str(tmp_path / "data")]) == 0
    found = shown(capsys)
    assert "owned" in found
    assert not [line for line in found.splitlines() if line.startswith("episodes   1,000,000")]
    for command in ("info", "validate"):
        assert main(["data", command, str(tmp_path / "data"), "--json"]) == 0
        json.loads(shown(capsys))
    with RecordingWriter(tmp_path / "again", **spaces) as writer:
        writer.write(exp)
    (path,) = (tmp_path / "again").glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    path.rename(path.with_name(f"{EVIL.replace('/', '')}.parquet"))
    for command in ("info", "validate"):
        assert main(["data", command, str(tmp_path / "again")]) in (1, 2)
        shown(capsys)


def test_names_in_a_live_picture() -> None:
    from test_cli_live import drawn, result

    picture = live.View(f"ppo on {EVIL}", Stop(), quiet=True)
    returns = {f"red{EVIL}": 1.0, "[bold]": 2.0, "[/]": 3.0}
    picture.show(result(returns_counted=3, return_mean=1.0, return_min=0.0, return_max=2.0, module_returns=returns))
    text = drawn(picture)
    assert text.replace("\n", "").isprintable()
    assert "[bold] 2.0, [/] 3.0" in text


def test_no_command_says_a_password_of_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained(tmp_path / "run"))
    tree, meta = load_tree(run)
    there = "memory://someone:SECRET@host/strangers-run?token=SECRET"
    save_tree(there, tree, meta=meta)
    named = "memory://someone:SECRET@host/other-run"
    save_tree(named, tree, meta={**meta, "config": {**meta["config"], "env": "nowhere:make"}})
    to = "memory://someone:SECRET@host/strangers-data"
    for command, code in (
        (["evaluate", there, "--episodes", "1", "--json"], 0),
        (["record", there, "--to", to, "--episodes", "1", "--json"], 0),
        (["record", run, "--to", to, "--episodes", "1", "--append"], 0),
        (["record", run, "--to", to, "--episodes", "1"], 2),
        (["data", "info", to, "--json"], 0),
        (["evaluate", named], 2),
        (["train", "ppo", "--resume", named, "--out", str(tmp_path / "on")], 2),
        (["train", "dqn", "--resume", there, "--out", str(tmp_path / "on")], 2),
        (["train", "ppo", "--config", "https://someone:SECRET@host/settings.yaml"], 2),
        (["plot", "https://someone:SECRET@host/run#SECRET"], 2),
    ):
        assert main(command) == code
        assert "SECRET" not in shown(capsys), command
