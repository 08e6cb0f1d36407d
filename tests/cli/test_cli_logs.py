# SPDX-License-Identifier: Apache-2.0
"""Where ``--log`` sends the metrics of a run."""

import csv
import importlib.util

import pytest
from cli_runs import SMALL, trained

import etude
from etude.cli.main import main
from etude.metrics import read_jsonl


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_metrics_go_where_they_are_sent(tmp_path):
    out = trained(tmp_path / "both", "--log", "csv", "jsonl", "csv")
    table, lines = read(out / "metrics.csv"), read_jsonl(out / "metrics.jsonl")
    assert [row["updates"] for row in table] == ["2", "4"]
    for row, line in zip(table, lines, strict=True):
        assert float(row["losses/policy"]) == line["losses"]["policy"]
        assert float(row["metrics/parameters/trainable"]) == line["metrics"]["parameters/trainable"]
        assert row["resumed"] == ""
    assert "tensorboard" not in names(out)
    assert not {"metrics.jsonl", "metrics.csv", "tensorboard"} & names(trained(tmp_path / "nowhere", "--log", "none"))


def test_a_table_goes_on_where_a_killed_run_was_saved(tmp_path):
    out = trained(tmp_path / "run", "--log", "csv")
    path = out / "metrics.csv"
    whole = path.read_text()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "updates": 6}\n{"iteration": 4')
    more = ["train", "ppo", "--resume", str(out), "--stop.updates", "8", "--quiet", "--log", "csv"]
    assert main(more) == 0
    assert [row["iteration"] for row in read(path)] == ["1", "2", "3", "4"]
    assert path.read_text().startswith(whole)


def test_a_table_alone_is_a_run_that_is_not_overwritten_unless_asked(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.csv").write_text("iteration\n1\n")
    assert main([*SMALL, "--out", str(out), "--log", "csv", "--stop.updates", "2"]) == 2
    assert "already contains a run" in capsys.readouterr().err
    trained(out, "--log", "csv", "--overwrite")
    assert [row["iteration"] for row in read(out / "metrics.csv")] == ["1", "2"]


def test_clips_are_made_without_tensorboard_too(tmp_path):
    out = tmp_path / "run"
    args = ["--clip-interval", "2"]
    assert main([*SMALL, *args, "--log", "jsonl", "--stop.updates", "4", "--quiet", "--out", str(out)]) == 0
    assert names(out / "clips") == {"iteration_000002.gif"}


def test_metrics_that_can_not_be_written_are_said_and_end_no_run(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setenv("RUN", str(out))
    log = ["--env", "cli_runs:tidying_env", "--log", "jsonl", "csv", "tensorboard"]
    trained(out, *log, updates=60)
    said = capsys.readouterr().err.splitlines()
    for place in ("metrics.jsonl", "tensorboard"):
        first, last = (line for line in said if f"to {out / place}" in line)  # once, and at the end
        assert "can't write" in first
        assert "30 writes of" in last
    assert any("can't read the metrics" in line for line in said), "there is nothing to make metrics.csv of"
    assert not {"metrics.jsonl", "metrics.csv", "tensorboard"} & names(out)
    assert etude.load(out, env="cli_runs:tidying_env").updates == 60


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_missing_is_said_before_anything_is_touched(tmp_path, capsys, name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    out = trained(tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main([*SMALL, "--out", str(out), "--overwrite", "--log", "jsonl", name]) == 2
    said = f"metrics can't go to {name} (No module named '{name}'): pip install '.[{name}]' in the clone"
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_is_tracked_where_the_package_is_installed(tmp_path, monkeypatch, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'etude[{name}]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = trained(tmp_path / "run", "--log", name)
    if name == "wandb":
        assert list((out / "wandb").glob("offline-run-*/*.wandb"))
        return
    from mlflow import MlflowClient

    (run,) = MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.data.metrics["updates"]) == ("run", 4)


def test_an_unknown_place_is_named(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path / "run"), "--log", "cvs"]) == 2
    assert "ppo.log" in (text := capsys.readouterr().err)
    assert "'cvs'" in text
    assert "csv" in text
