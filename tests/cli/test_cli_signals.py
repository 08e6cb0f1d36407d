# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run: the first saves, whatever the envs do, and the second does not wait."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
from cli_runs import SMALL

import etude
from etude.cli.main import main
from etude.metrics import read_jsonl

pytestmark = pytest.mark.slow

HERE = os.path.dirname(__file__)
SOONER = "import etude.interruption as i; i.GRACE, i.STUCK, i.LIMIT = 0.5, 1.5, 3.0"
"""The same in less time."""
DEFAULT = "import signal; [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGTERM)]"
"""As if nobody had set anything: tests may run under nohup."""
MAIN = "import sys; from etude.cli.main import main; sys.exit(main())"


@pytest.fixture
def start(tmp_path):
    """Starts a run, and gives it with the process that hangs once it does."""
    children = []

    def begin(env, *more, first=SOONER, told=1, code=MAIN):
        words = [*SMALL, "--out", str(tmp_path / "run"), "--stop.env-steps", "1000000000", *more]
        words[words.index("CartPole-v1")] = f"hanging_envs:{env}"
        child = subprocess.Popen(
            [sys.executable, "-c", f"{DEFAULT}; {first}; {code}", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path])},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        children.append(child)
        return child, *(hears(child) for _ in range(told))

    yield begin
    for child in children:
        child.kill()
        child.communicate(timeout=60)


def hears(child):
    """The process that says that it hangs."""
    for line in child.stderr:
        if line.startswith("hangs in "):
            return int(line.split()[2])
    raise AssertionError("it ended before")


def ended(child, seconds=60):
    """What it says until its end."""
    _, err = child.communicate(timeout=seconds)
    return err


def assert_ends(pid, seconds=20):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    assert ready, f"process {pid} goes on"


def assert_saved(run, child, err):
    """What was done is there, and can go on."""
    assert child.returncode == 130, err
    assert f"Go on with: etude train ppo --resume {shlex.quote(str(run))}" in err
    assert "Traceback" not in err
    rows = read_jsonl(run / "metrics.jsonl")
    loaded = etude.load(run, env="CartPole-v1", workers=0)
    assert loaded.iteration == (rows[-1]["iteration"] if rows else 0)
    assert loaded.env_steps == 64 * loaded.iteration
    assert loaded.train().env_steps == 64 * (loaded.iteration)
    loaded.close()


@pytest.mark.parametrize(
    ("env", "number"),
    [
        ("Hangs", signal.SIGINT),
        ("Waits", signal.SIGTERM),
        ("Loops", signal.SIGHUP),
        ("IsDeaf", signal.SIGINT),
        ("IsLocked", signal.SIGTERM),
        ("NeverCloses", signal.SIGHUP),
        ("AtOnce", signal.SIGINT),
    ],
)
def test_a_signal_saves_and_ends_it_however_an_env_hangs_in_process(tmp_path, start, env, number):
    child, _ = start(env)
    child.send_signal(number)
    err = ended(child)
    assert "saves and ends within 10 seconds; interrupt again to end it now" in err
    assert_saved(tmp_path / "run", child, err)


def test_a_run_that_hangs_before_it_begins_is_ended_and_says_so(tmp_path, start):
    child, _ = start("IsDeafWhenMade", first="import etude.interruption as i; i.CLOSING = 0.5")
    child.send_signal(signal.SIGTERM)
    err = ended(child)
    assert (child.returncode, err) == (130, "error: interrupted.\n")
    assert not (tmp_path / "run" / "checkpoint.json").exists()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_an_env_that_hangs_in_a_worker(tmp_path, start, mode):
    child, pid = start("Waits", "--workers", "2", "--workers.mode", mode)
    child.send_signal(signal.SIGTERM)
    err = ended(child)
    assert_ends(pid)
    assert_saved(tmp_path / "run", child, err)


def test_it_takes_less_than_ten_seconds_and_a_little(tmp_path, start):
    child, _ = start("IsLocked", first="pass")
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    err = ended(child)
    assert time.monotonic() - begin < 20  # on a machine that is busy
    assert_saved(tmp_path / "run", child, err)


def test_signals_to_the_whole_group_leave_the_workers_until_it_is_saved(tmp_path, start):
    child, _ = start("Walks", "--workers", "2")
    os.killpg(child.pid, signal.SIGTERM)
    assert_saved(tmp_path / "run", child, ended(child))


def test_an_evaluation_is_left_too(tmp_path, start):
    child, _ = start("InEvaluation", "--evaluation-interval", "2", "--num-envs", "1")
    child.send_signal(signal.SIGINT)
    err = ended(child)
    assert child.returncode == 130, err
    assert etude.load(tmp_path / "run", env="CartPole-v1").iteration == 2


def named(algorithm):
    """The same with another algorithm."""
    return f"import sys; sys.argv[2] = '{algorithm}'; {SOONER}"


@pytest.mark.parametrize(
    ("more", "first"),
    [
        (["--callbacks", "hanging_code:Segments"], SOONER),
        (["--connectors", "hanging_code:Connects"], SOONER),
        (["--epochs", "1000000"], named("hanging_code:IsSlow")),
    ],
    ids=["callback", "connector", "long update"],
)
def test_a_signal_saves_and_ends_it_wherever_it_hangs(tmp_path, start, more, first):
    child, _ = start("Quiet", *more, first=first)
    child.send_signal(signal.SIGTERM)
    err = ended(child)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    loaded = etude.load(tmp_path / "run", env="CartPole-v1", callbacks=(), epochs=1, trust=True)
    assert loaded.train().iteration == loaded.iteration > 0
    loaded.close()


def test_a_loss_that_hangs_leaves_the_last_checkpoint(tmp_path, start):
    child, _ = start("Quiet", "--save-interval", "0", first=named("hanging_code:HangsInLoss"))
    child.send_signal(signal.SIGINT)
    err = ended(child)
    assert child.returncode == 130, err
    assert f"the run hangs where it can't be interrupted: {tmp_path / 'run'} keeps its last checkpoint" in err
    assert etude.load(tmp_path / "run", env="CartPole-v1", trust=True).iteration == 2


@pytest.mark.parametrize("workers", [[], ["--num-workers", "1"]], ids=["here", "thread"])
def test_a_signal_saves_and_ends_an_offline_run_whose_data_hangs(tmp_path, start, workers):
    data, out = str(tmp_path / "data"), tmp_path / "run"
    ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", seed=1))
    ppo.record(data, num_episodes=20, seed=1)
    ppo.close()
    words = ["train", "bc", "--data", data, "--mode", "stream", "--batch-size", "16", "--updates-per-iteration", "5"]
    words += ["--prelearner", "hanging_code:prelearner", "--out", str(out), "--stop.updates", "1000000", *workers]
    (child,) = start("Quiet", first=f"import sys; sys.argv[1:] = {words}; {SOONER}", told=0)
    waits_for = {"hangs", "updates"}  # the data hangs, perhaps already while it is opened, and the run has begun
    for line in child.stderr:
        waits_for -= {line.partition(" ")[0]}
        if not waits_for:
            break
    child.send_signal(signal.SIGHUP)
    err = ended(child)
    assert child.returncode == 130, err
    assert "the checkpoint is in" in err
    assert etude.load(out, prelearner=None).iteration >= 1


@pytest.mark.parametrize(
    ("env", "number"), [("Hangs", signal.SIGINT), ("IsLocked", signal.SIGTERM), ("Loops", signal.SIGHUP)]
)
def test_the_second_signal_ends_it_at_once(start, env, number):
    child, _ = start(env, first="import etude.interruption as i; i.GRACE = 1000.0")
    child.send_signal(number)
    for line in child.stderr:
        if "interrupt again" in line:
            break
    child.send_signal(number)
    err = ended(child)
    assert child.returncode == 130, err
    assert err.endswith("error: interrupted.\n")
    assert "Traceback" not in err


def test_code_that_holds_pythons_lock_does_not_keep_it(start):
    child, _ = start("HoldsPython")
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    err = ended(child)
    assert child.returncode == -signal.SIGKILL
    assert "holds Python's lock" in err


def test_an_env_that_is_never_made(tmp_path, start):
    for more in ([], ["--workers", "2", "--workers.cleanup-time", "0.1"]):
        child, pid = start("WhenMade", *more)
        child.send_signal(signal.SIGTERM)
        err = ended(child)
        assert child.returncode == 130
        assert err.endswith("error: interrupted.\n")
        assert_ends(pid)
        assert not (tmp_path / "run" / "checkpoint.json").exists()


def test_nohup_is_respected(tmp_path, start):
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    child, _ = start("Walks", first=ignore)
    child.send_signal(signal.SIGHUP)
    hears(child)  # it goes on
    child.send_signal(signal.SIGTERM)
    assert_saved(tmp_path / "run", child, ended(child))


def test_other_commands_end_too(tmp_path, start):
    out = tmp_path / "done"
    assert main([*SMALL, "--stop.updates", "2", "--out", str(out), "--quiet"]) == 0
    words = ["evaluate", str(out), "--env", "hanging_envs:Waits", "--episodes", "99"]
    child, _ = start("Waits", first=f"import sys; sys.argv[1:] = {words}")
    child.send_signal(signal.SIGHUP)
    assert ended(child).endswith("error: interrupted.\n")
    assert child.returncode == 130


def test_ctrl_c_in_a_program_leaves_nothing_behind(start):
    child, pid = start("Waits", code="from hanging_envs import fit; fit()")
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert out == "interrupted\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert_ends(pid)


def test_a_process_ends_with_its_parent_although_a_thread_waits_for_ever():
    child = (
        "import os, threading; from concurrent.futures import ThreadPoolExecutor\n"
        "from etude.interruption import when_parent_ends\n"
        "when_parent_ends(lambda: os._exit(1)); ThreadPoolExecutor().submit(threading.Event().wait)\n"
        "print(os.getpid(), flush=True)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    os.kill(int(parent.stdout.readline()), 0)  # it is there, and waits for its thread
    parent.kill()
    parent.communicate(timeout=60)  # ends when nobody holds the output any more


LONG = """
import os, signal, sys
import etude, etude.interruption
from pathlib import Path

etude.interruption.GRACE = 0.0
out = Path(sys.argv[1])

def kept():
    return {str(path): path.read_bytes() for path in sorted(out.glob("checkpoints/*/*")) if path.is_file()}

class Long(etude.PPO):
    def training_step(self):
        if self.iteration < 2:
            return super().training_step()
        self.kept = kept()
        os.kill(os.getpid(), signal.SIGINT)
        while True:  # until it is interrupted
            super().training_step()

class LongEvaluation(etude.PPO):
    def evaluate(self, *args, **kwargs):
        if self.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            done = super().evaluate(*args, **kwargs)
            if self.iteration < 3:
                return done

config = etude.PPOConfig(
    env="CartPole-v1", num_envs=2, num_steps=32, epochs=1, seed=1, evaluation_interval=1, evaluation_episodes=2
)
algorithm = {"iteration": Long, "evaluation": LongEvaluation}[sys.argv[2]](config)
checkpoints = etude.Checkpoints(out / "checkpoints", keep_best=1, keep_last=1, metric="evaluation/return_mean")
try:
    algorithm.fit(etude.Stop(env_steps=10**6), out=out, checkpoints=checkpoints, save_interval=0)
except KeyboardInterrupt:
    if sys.argv[2] == "iteration":
        assert algorithm.kept and kept() == algorithm.kept
    print("interrupted", algorithm.iteration, algorithm.updates)
"""


@pytest.mark.parametrize("what", ["iteration", "evaluation"])
def test_what_a_signal_stops_is_not_taken_for_what_was_scored(tmp_path, what):
    out = tmp_path / "run"
    command = [sys.executable, "-c", f"{DEFAULT}; signal.signal(signal.SIGINT, signal.default_int_handler)\n{LONG}"]
    done = subprocess.run([*command, str(out), what], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("interrupted "), done.stderr
    iteration, updates = map(int, done.stdout.split()[1:])
    rows, meta = read_jsonl(out / "metrics.jsonl"), etude.checkpoints.load_meta(out)["result"]
    assert [row["iteration"] for row in rows] == [*range(1, iteration + 1)]
    assert iteration == (2 if what == "iteration" else 3)
    assert (meta["iteration"], meta["updates"]) == (iteration, updates)
    assert meta["metrics"]["env_steps_trained_lifetime"] == 32 * updates
    assert (updates > rows[-1]["updates"]) == (what == "iteration")
