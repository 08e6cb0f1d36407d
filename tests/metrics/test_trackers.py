# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases and MLflow: what is said where they are missing, and what they hold where they are installed."""

import importlib.util
import math
import os
import struct
import subprocess
import sys

import pytest

from etude.errors import SettingsError
from etude.metrics import MLflow, WandB


def where_installed(name):
    reason = f"{name} is not installed: pip install 'etude[{name}]'"
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=reason)


@pytest.mark.parametrize(("name", "sink"), [("wandb", WandB), ("mlflow", MLflow)])
def test_a_missing_package_is_named_with_how_to_get_it(name, sink, monkeypatch):
    if importlib.util.find_spec(name) is not None:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not
    said = rf"^metrics can't go to {name} \(.*{name}.*\): pip install '\.\[{name}\]' in the clone of Etude"
    with pytest.raises(SettingsError, match=said):
        sink("mine")


ROWS = [
    (100, {"iteration": 1, "losses": {"policy": 0.5}, "env": "X", "return_mean": math.nan}),
    (300, {"iteration": 2, "losses": {"policy": 0.25, "a[0]": -1}, "resumed": None}),
    (200, {"iteration": 3, "many": {str(i): i for i in range(1500)}}),
]


def write_in_a_process(sink, tmp_path, **env):
    code = f"from etude.metrics import *\nfrom math import nan\nsink = {sink}\nfor step, row in {ROWS}:\n"
    code += "    sink.write(row, step)\nsink.close()\nsink.close()\nprint(getattr(sink, 'run_id', ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1:]


@where_installed("wandb")
def test_a_run_of_wandb_holds_the_numbers_over_steps(tmp_path):
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path / "elsewhere")}
    write_in_a_process("WandB('mine', 'run', config={'lr': 0.1})", tmp_path, **env)
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(path.read_bytes()))
    assert [r.run.display_name for r in records if r.HasField("run")] == ["mine"]
    assert {r.metric.glob_name: r.metric.step_metric for r in records if r.metric.glob_name} == {"*": "step"}
    found = [
        {"/".join(item.nested_key) or item.key: float(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    found = [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]
    assert math.isnan(found[0].pop("return_mean"))
    assert found == [
        {"iteration": 1, "losses/policy": 0.5, "step": 100},
        {"iteration": 2, "losses/policy": 0.25, "losses/a[0]": -1, "step": 300},
        {"iteration": 3, "step": 200} | {f"many/{i}": i for i in range(1500)},
    ]


def wandb_records(data):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, of records that may go on in the next one."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] == b":W&B"
    at, begun = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # too little for another head
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        begun += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(begun)
            begun = b""
            yield record


@where_installed("mlflow")
def test_a_run_of_mlflow_holds_the_numbers_over_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run_id,) = write_in_a_process("MLflow('mine')", tmp_path, MLFLOW_EXPERIMENT_NAME="études")
    write_in_a_process("MLflow('mine')", tmp_path, MLFLOW_EXPERIMENT_NAME="études")
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert client.get_experiment(run.info.experiment_id).name == "études"
    assert len(client.search_runs([run.info.experiment_id])) == 2
    metrics = run.data.metrics  # MLflow shows those of the greatest step
    assert math.isnan(metrics.pop("return_mean"))
    assert metrics == {"iteration": 2, "losses/policy": 0.25, "losses/a_0_": -1} | {f"many/{i}": i for i in range(1500)}
    history = client.get_metric_history(run_id, "iteration")
    assert sorted((point.step, point.value) for point in history) == [(100, 1), (200, 3), (300, 2)]


def test_neither_is_imported_before_it_is_used():
    code = "import sys\nimport etude.metrics\nassert not {'wandb', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
