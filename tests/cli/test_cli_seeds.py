# SPDX-License-Identifier: Apache-2.0
"""``etude train --seeds`` and ``etude sweep``: runs side by side, their signals, and how they go on."""

import csv
import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import SMALL

import etude
from etude.algorithms.comparison import compare
from etude.checkpoints import MANIFEST, load_meta
from etude.cli.main import main
from etude.metrics import read_jsonl

DEFAULT = "import signal; [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGTERM)]"
"""As if nobody had set anything: tests may run under nohup."""
MAIN = "import sys; from etude.cli.main import main; sys.exit(main())"
SWEEP = ["sweep", *SMALL[1:]]


@pytest.mark.slow
def test_seeds_that_end_and_go_on_with_the_settings_of_their_checkpoints(tmp_path, capsys):
    out = tmp_path / "runs"
    words = [*SMALL, "--seeds", "2", "--lr", "0.002", "--checkpoints.keep-last", "1", "--log", "csv"]
    assert main([*words, "--stop.updates", "4", "--out", str(out)]) == 0
    err = capsys.readouterr().err
    assert "2 seeds are done, with a return of " in err
    assert f"etude compare {out}" in err
    for seed in (1, 2):
        path = out / f"seed-{seed}"
        assert etude.load(path).config.seed == seed
        assert len(list((path / "checkpoints").iterdir())) == 1
        assert (path / "metrics.csv").exists()
    assert main([*words, "--stop.updates", "4", "--out", str(out)]) == 2
    assert f"Continue all runs in {out} (--resume {out};" in capsys.readouterr().err

    (out / "seed-2" / MANIFEST).unlink()  # as if it had not begun: it gets the settings of the other one
    assert main(["train", "ppo", "--seeds", "2", "--resume", str(out), "--stop.updates", "6", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["seed"], run["updates"], run["error"]) for run in found["seeds"]] == [(1, 6, None), (2, 6, None)]
    assert (found["goals_met"], found["interrupted"]) == (2, False)
    assert {etude.load(out / f"seed-{seed}").config.lr for seed in (1, 2)} == {0.002}


def test_code_that_would_end_the_program_is_told_as_an_error(tmp_path, capsys):
    words = [*SMALL, "--callbacks", "cli_runs:Exits", "--stop.updates", "9"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert "the run was ended by SystemExit: 0. A callback, a connector" in capsys.readouterr().err
    assert main([*words, "--seeds", "1", "--out", str(tmp_path / "runs")]) == 1
    err = capsys.readouterr().err
    assert "error: seed-1 failed: SystemExit: 0" in err
    assert f"Go on with: etude train ppo --seeds 1 --resume {tmp_path / 'runs'} --trust" in err


def test_a_seed_that_fails_is_told_with_its_error(tmp_path, capsys):
    out = tmp_path / "runs"
    words = ["train", "ppo", "--env", "Nowhere-v0", "--stop.updates", "2", "--out", str(out)]
    assert main([*words, "--seeds", "2"]) == 1
    err = capsys.readouterr().err
    assert "error: seed-0, seed-1 failed: " in err  # one error, told once
    assert err.count("no env 'Nowhere-v0'") == 1
    assert "Nowhere" in (out / "seed-0" / "log.txt").read_text()


def test_a_seed_that_can_not_begin_ends_no_other(tmp_path, capsys):
    out = tmp_path / "runs"
    out.mkdir()
    (out / "seed-2").write_text("no folder")
    assert main([*SMALL, "--seeds", "2", "--stop.updates", "4", "--out", str(out), "--quiet"]) == 1
    assert "error: seed-2 failed: its process can't be started: " in capsys.readouterr().err
    assert etude.load(out / "seed-1").updates == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "2", "--clip-interval", "1"], "`clip_interval` is for one run"),
        (["--max-concurrent", "2"], "`max_concurrent` limits how many seeds"),
        (["--seeds", "-1"], "`seeds` is -1, but must be at least 0"),
        (["--seeds", "2", "--out", "a", "--resume", "b"], "a run of several seeds can only be resumed in"),
    ],
)
def test_options_that_do_not_fit(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--stop.updates", "2", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# -- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_tries_all_and_goes_on_where_it_was(tmp_path, capsys):
    out = tmp_path / "sweep"
    words = [*SWEEP, "--space.lr", "0.001,0.01", "--space.clip", "uniform:0.1,0.3", "--seeds", "2"]
    words += ["--stop.updates", "2", "--quiet"]
    assert main([*words, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "lr", "clip", "return_mean", "low", "high", "env_steps", "state"]
    with (out / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["trial"] for row in table] == [line.split()[0] for line in lines[1:3]]
    scores = [float(row["return_mean"]) for row in table]
    assert scores == sorted(scores, reverse=True)
    assert lines[-1].startswith("best: return_mean ")
    assert table[0]["path"] in lines[-1]
    for row in table:
        runs = [etude.load(Path(row["path"]) / f"seed-{seed}") for seed in (1, 2)]
        assert {(run.config.lr, run.config.clip) for run in runs} == {(float(row["lr"]), float(row["clip"]))}
        ends = [load_meta(Path(row["path"]) / f"seed-{seed}")["result"]["return_mean"] for seed in (1, 2)]
        assert float(row["return_mean"]) == pytest.approx(sum(ends) / 2)
        assert (float(row["low"]), float(row["high"])) == (min(ends), max(ends))

    times = {path: path.stat().st_mtime_ns for path in out.glob("*/*/metrics.jsonl")}
    (out / "trial-1" / "seed-2" / MANIFEST).unlink()
    assert main([*words, "--resume", str(out), "--samples", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["trial"] for trial in found["trials"]] == [0, 1, 2, 3]
    assert {trial["state"] for trial in found["trials"]} == {"done"}
    trained = [path.parent for path, time in times.items() if path.stat().st_mtime_ns != time]
    assert trained == [out / "trial-1" / "seed-2"]
    assert found["trials"][0]["clip"] != found["trials"][2]["clip"]

    for other, message in (
        (["--epochs", "3"], "was trained with `epochs`"),
        (["--seeds", "1"], "has the seeds [2], too: a sweep goes on with the --seed"),
    ):
        assert main([*words, *other, "--resume", str(out)]) == 2
        assert message in capsys.readouterr().err
    words[words.index("0.001,0.01")] = "0.001,0.02"
    assert main([*words, "--resume", str(out)]) == 2
    assert "trial-1/seed-1 was trained with `lr` 0.01, but it is 0.02 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ppo", "--space.lrr", "1,2"], "the search space of ppo has no setting `lrr`. Nearest: `lr`"),
        (["ppo", "--space.lrr", "1,2"], "All settings: etude sweep ppo --help-all"),
        (["ppo", "--env", "X-v0"], "the search space of ppo is empty: give --space.lr"),
        (["ppo", "--env", "X-v0", "--space.lr", "1e-3,1e-4"], "`stop` is not set"),
        (["ppo", "--space.lr", "1", "--metric", "returns"], "`metric` is 'returns', but results have no such"),
        (["ppo", "--env", "X-v0", "--space.num-envs", "grid:0,4", "--stop.updates", "1"], "`num_envs` is 0, but"),
        (["ppo", "--space.lr", "1", "--seeds", "0"], "`seeds` is 0, but must be at least 1"),
        (
            ["ppo", "--env", "X", "--space.lr", "1", "--stop.updates", "1", "--out", "a", "--resume", "b"],
            "can only be resumed in its own folder",
        ),
        (["ppo", "--env", "X-v0", "--space.seed", "1,2", "--seeds", "2", "--stop.updates", "1"], "--seeds both say"),
        ([], "etude sweep needs an algorithm: ppo,"),
        (["--resume", "runs/sweep"], "a sweep continues with the command that started it, plus --resume FOLDER"),
        (["ppo", "--resume=runs/sweep"], "a sweep continues with the command that started it, plus --resume FOLDER"),
    ],
)
def test_errors_of_a_sweep(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_failed_sweep_names_the_command_that_continues_it(tmp_path, capsys):
    words = [*SWEEP, "--space.lr", "0.001", "--stop.updates", "2", "--overwrite"]
    words[words.index("CartPole-v1")] = "Nowhere-v0"
    assert main([*words, "--out", str(tmp_path / "s 1")]) == 1
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("go on: etude "))
    assert shlex.split(line)[3:] == [*words[:-1], "--resume", str(tmp_path / "s 1")]


@pytest.mark.slow
def test_trials_of_which_seeds_have_no_figure_come_last(tmp_path, capsys):
    words = [*SWEEP, "--space.num-steps", "2,12,200", "--num-envs", "1", "--seeds", "3"]
    assert main([*words, "--stop.updates", "1", "--quiet", "--json", "--out", str(tmp_path / "sweep")]) == 0
    found = json.loads(capsys.readouterr().out)
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        ranked = list(csv.DictReader(file))
    without = {}
    for row in ranked:
        metas = [load_meta(path) for path in Path(row["path"]).glob("seed-*")]
        without[row["trial"]] = sum(not math.isfinite(meta["result"]["return_mean"] or math.nan) for meta in metas)
        assert len(metas) == 3
    assert [int(row["without"]) for row in ranked] == [without[row["trial"]] for row in ranked]
    assert any(0 < count < 3 for count in without.values())  # the others' scores are not those of the trial
    assert [count > 0 for count in without.values()] == sorted(count > 0 for count in without.values())
    assert without[str(found["best"])] == 0


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Starts a command with a mark in the environment of all its processes, and waits until its runs have results."""
    mark, begun = f"ETUDE_MARK={tmp_path}", []

    def processes():
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or is another's
                continue
        return found

    def start(*words, until, env=()):
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-c", f"{DEFAULT}; {MAIN}", *words],
            env={**os.environ, "PYTHONPATH": path, "ETUDE_MARK": str(tmp_path)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(child)
        waits_for = {*until}
        for line in child.stderr:
            waits_for -= {word for word in waits_for if line.startswith(word)}
            if not waits_for:
                return child, processes
        raise AssertionError("it ended before")

    yield start
    for child in begun:
        child.kill()
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        child.communicate(timeout=60)


def assert_all_end(pids, seconds=60):
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], seconds)
        os.close(handle)
        assert ready, f"process {pid} goes on"


def assert_saved(path):
    """What was done is there: no step is lost that the metrics have."""
    loaded, rows = etude.load(path, env="CartPole-v1"), read_jsonl(path / "metrics.jsonl")
    assert loaded.env_steps == rows[-1]["env_steps"] > 0
    loaded.close()


ENDLESS = [*SMALL, "--seeds", "2", "--stop.env-steps", "1000000000", "--max-concurrent", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_ends_all_runs_and_they_go_on(tmp_path, start, number):
    out = tmp_path / "runs"
    child, processes = start(*ENDLESS, "--out", str(out), until=["seed-1  return", "seed-2  return"])
    pids = processes()
    assert len(pids) >= 3
    os.killpg(child.pid, number)  # as a terminal does
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert f"Go on with: etude train ppo --seeds 2 --resume {out}" in err
    assert_all_end(pids, 5)
    for seed in (1, 2):
        assert_saved(out / f"seed-{seed}")


@pytest.mark.slow
def test_the_second_signal_ends_all_at_once_though_an_env_hangs(tmp_path, start):
    words = [*ENDLESS, "--out", str(tmp_path / "runs")]
    words[words.index("CartPole-v1")] = "hanging_envs:IsDeaf"
    child, processes = start(*words, until=["seed-1  return", "seed-2  return"])
    pids = processes()
    child.send_signal(signal.SIGINT)
    for line in child.stderr:
        if "interrupt again" in line:
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert_all_end(pids, 20)


@pytest.mark.slow
def test_runs_whose_parent_is_killed_save_and_end(tmp_path, start):
    out = tmp_path / "runs"
    child, processes = start(*ENDLESS, "--out", str(out), "--workers", "2", until=["seed-1  ret", "seed-2  ret"])
    pids = processes()
    child.kill()
    child.communicate(timeout=60)
    assert_all_end(pids)
    for seed in (1, 2):
        assert_saved(out / f"seed-{seed}")


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path, start, capsys):
    out = tmp_path / "sweep"
    words = [*SWEEP, "--space.lr", "grid:0.001,0.01,0.1", "--stop.updates", "4", "--max-concurrent", "1"]
    child, processes = start(*words, "--out", str(out), until=["trial-0/seed-1  done"])
    pids = processes()
    child.kill()
    child.communicate(timeout=60)
    assert_all_end(pids)
    before = (out / "trial-0" / "seed-1" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*words, "--resume", str(out), "--json"]) == 0
    assert [trial["updates"] for trial in json.loads(capsys.readouterr().out)["trials"]] == [4, 4, 4]
    assert (out / "trial-0" / "seed-1" / "metrics.jsonl").stat().st_mtime_ns == before


def test_runs_that_are_overwritten_leave_none_behind(tmp_path, capsys):
    words = ["train", "ppo", "--env", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--epochs", "1", "--quiet"]
    words += ["--stop.env-steps", "32", "--max-concurrent", "1", "--out", str(tmp_path / "s")]
    assert main([*words, "--seeds", "2"]) == 0
    assert main([*words, "--seeds", "1", "--overwrite"]) == 0
    assert [group.num_runs for group in compare([tmp_path / "s"])] == [1]
