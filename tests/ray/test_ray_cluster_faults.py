# SPDX-License-Identifier: Apache-2.0
"""The process that trains is killed or interrupted; evaluations hang; the disk is full; code of users fails."""

import ctypes
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_runs
import numpy as np
import pytest
import ray
import runner_envs

import etude
from etude.algorithms import Ray
from etude.cli.main import main
from etude.errors import DataError
from etude.recordings import Recording, validate

HERE = Path(__file__).parent
SMALL = ["--num-envs", "2", "--num-steps", "64", "--minibatch-size", "64", "--epochs", "1", "--network.hidden", "8"]
ON_RAY = ["--engine", "ray", "--num-runners", "2"]


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """Runners need not find these modules."""
    for module in (runner_envs, fault_runs):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in (runner_envs, fault_runs):
        ray.cloudpickle.unregister_pickle_by_value(module)


# -- the process that trains --------------------------------------------------------------------------------------


def begun(mark: Path, *args: str) -> "subprocess.Popen[str]":
    """A command line in a process of its own, with a cluster of its own; all of its processes know ``mark``."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"STUCK": str(mark), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    code = "import sys; from etude.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", "ppo", *args]
    return subprocess.Popen(command, env=environment, cwd=mark.parent, stderr=subprocess.PIPE, text=True)


def until(happened: Callable[[], bool], child: "subprocess.Popen[str] | None" = None) -> None:
    """Wait for something, as long as a child lives that is to bring it about."""
    deadline = time.monotonic() + 120
    while not happened():
        assert child is None or child.poll() is None, child.stderr.read()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(mark: Path) -> list[str]:
    """The command lines of processes that know a mark, but for Ray's agents, which look for their raylet at leisure."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"STUCK={mark}\0".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
        except OSError:
            pass  # it has ended
    return [words for words in found if words and "Agent" not in words]


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_whole(run: Path, recording: Path) -> int:
    """A checkpoint that loads, a recording without fault, and no episode in it twice; gives the steps of the run."""
    assert validate(recording).ok
    exp = Recording.open(recording).read()
    order = np.lexsort((exp.segments.t_start, exp.segments.episode_id))
    ids, starts = exp.segments.episode_id[order], exp.segments.t_start[order]
    stops = starts + exp.lengths[order]
    goes_on = ids[1:] == ids[:-1]
    assert (starts[1:][goes_on] == stops[:-1][goes_on]).all()
    assert not starts[np.flatnonzero(np.append(True, ~goes_on))].any()
    return int(etude.load(run, env="runner_envs:Walk", record={"path": None}).env_steps)


def test_a_driver_is_killed_and_goes_on_and_is_interrupted(tmp_path: Path) -> None:
    run, recording, mark = tmp_path / "run", tmp_path / "recording", tmp_path / "mark"
    record = ["--record.path", str(recording), "--record.layout", "table", "--record.max-rows-per-file", "64"]
    kept = ["--save-interval", "0", "--seed", "1"]
    child = begun(mark, "--env", "runner_envs:Walk", *ON_RAY, *SMALL, *record, *kept, "--out", str(run))
    until(lambda: len(rows(run)) >= 4, child)
    child.kill()
    child.communicate()
    until(lambda: not left(mark))
    done = check_whole(run, recording)
    assert done in [row["env_steps"] for row in rows(run)] + [rows(run)[-1]["env_steps"] + 64]

    child = begun(mark, "--resume", str(run), "--env", "runner_envs:Walk", *ON_RAY, "--save-interval", "0")
    until(lambda: bool(rows(run)) and rows(run)[-1]["env_steps"] >= done + 4 * 64, child)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert f"Go on with: etude train ppo --resume {shlex.quote(str(run))} --engine ray --trust" in err
    assert "Traceback" not in err
    until(lambda: not left(mark))
    assert check_whole(run, recording) == rows(run)[-1]["env_steps"]
    assert [row["env_steps"] for row in rows(run)] == [64 * (i + 1) for i in range(len(rows(run)))]
    assert Recording.open(recording).num_steps >= rows(run)[-1]["env_steps"]  # what was lost with it was recorded


def test_interrupted_twice_it_ends_at_once_though_envs_hang(tmp_path: Path) -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    record = ["--record.path", str(tmp_path / "recording"), "--record.layout", "table"]
    child = begun(mark, "--env", "fault_runs:Stuck", *ON_RAY, *SMALL, *record, "--out", str(run))
    until(mark.exists, child)
    assert child.stderr is not None
    child.send_signal(signal.SIGINT)
    for line in child.stderr:
        if "interrupt again to end it now" in line:
            break
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert err.endswith("error: interrupted.\n")
    assert "Traceback" not in err
    assert time.monotonic() - begin < 40
    until(lambda: not left(mark))


# -- code of the user's own ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_errors_of_users_code_end_the_command_as_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    to = ["--engine", "ray", "--num-runners", "1", *SMALL, "--stop.env-steps", "640", "--quiet", "--out"]
    assert main(["train", "ppo", "--env", "fault_runs:Wheel", *to, str(tmp_path / "a")]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("error: 6 failures without a step in between (see Workers.max_restarts): env ")
    assert err.endswith("ValueError: a wheel came off\n")
    assert "ray::" not in err
    assert len(err.splitlines()) < 15
    walk = ["--env", "runner_envs:Walk", *to]
    assert main(["train", "ppo", *walk, str(tmp_path / "p"), "--connectors", "fault_runs:pipe"]) == 2
    assert "error: the connector function `pipe` fails on" in capsys.readouterr().err
    for name, algorithm, more, error, where in (
        ("b", "ppo", ["--callbacks", "fault_runs:Drawer"], KeyError("no such drawer"), "runner 0 (process "),
        ("c", "fault_runs:Lossy", ["--num-learners", "1"], ArithmeticError("at a loss"), "learner 0"),
    ):
        with pytest.raises(type(error)) as caught:
            main(["train", algorithm, *walk, str(tmp_path / name), *more])
        assert caught.value.args == error.args
        notes = "\n".join(caught.value.__notes__)
        assert f"in {where}" in notes
        assert "fault_runs.py" in notes  # the traceback there
        assert "ray::" not in notes


# -- evaluations --------------------------------------------------------------------------------------------------


def made(env: Any, engine: Ray, **settings: Any) -> Any:
    own: dict[str, Any] = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "epochs": 1, "seed": 1}
    return etude.PPO(etude.PPOConfig(env=env, engine=engine, **own | settings))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["hang", "die"])
def test_an_evaluation_runner_that_hangs_or_dies_costs_its_part(tmp_path: Path, how: str) -> None:
    """The envs of training do not come to their 20th step."""
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), how)
    engine = Ray(num_runners=1, num_evaluation_runners=1, step_timeout=1.0)
    algorithm = made(env, engine, num_steps=16, minibatch_size=16, evaluation_interval=1, evaluation_episodes=100)
    try:
        first = algorithm.train()
        assert "evaluation_restarts" not in first.metrics  # the first evaluation is only begun
        second = algorithm.train()
        assert second.metrics["evaluation_restarts"] == 1
        assert not algorithm.evaluation  # all of it was lost: there was one runner
        assert algorithm.train().metrics["evaluation_restarts"] == 0
        assert algorithm.evaluation["episodes"] == 100
        assert algorithm.evaluation["updates"] == second.updates
    finally:
        algorithm.close()


class BackgroundEvaluation(etude.PPO):
    """Its runners go on while it learns."""

    collects_in_background = True


@pytest.mark.usefixtures("cluster")
def test_runners_that_wait_for_the_learner_do_not_hang() -> None:
    """However long it is away, and though they make no turn meanwhile."""
    config = etude.PPOConfig(
        env=runner_envs.Walk, num_envs=2, num_steps=64, minibatch_size=64, epochs=1, seed=1,
        engine=Ray(num_runners=2, step_timeout=1.0),
    )  # fmt: skip
    algorithm = BackgroundEvaluation(config)
    try:
        algorithm.train()
        members = algorithm.runner.members  # type: ignore[attr-defined]
        answers = [request.answer for member in members for request in member.requests]
        ray.wait(answers, num_returns=len(answers))
        time.sleep(2.5)  # several times as long as a turn may take
        metrics = algorithm.train().metrics
        assert metrics["runner_restarts"] == 0
        assert algorithm.env_steps == 2 * 64
    finally:
        algorithm.close()


# -- the disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform != "linux" or libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=3m"):
        pytest.skip("may not mount")
    yield folder
    assert libc.umount2(bytes(folder), 2) == 0


@pytest.mark.usefixtures("cluster")
def test_a_disk_that_is_full_ends_the_run_and_spares_what_is_there(small_disk: Path) -> None:
    record = etude.RecordConfig(path=str(small_disk / "run"), layout="table", max_rows_per_file=32)
    algorithm = made(runner_envs.Wide, Ray(num_runners=1), record=record)
    with pytest.raises(DataError, match=r"writing failed after \d+ rows were on the disk.*No space left"):
        algorithm.fit(etude.Stop(env_steps=64 * 20))
    with pytest.raises(DataError):
        algorithm.close()
    there = Recording.open(small_disk / "run")
    assert there.num_steps >= 64
    assert validate(small_disk / "run").ok
