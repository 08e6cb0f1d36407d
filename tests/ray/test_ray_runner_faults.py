# SPDX-License-Identifier: Apache-2.0
"""Runners on a cluster that die, hang or lose what they made: training goes on, and everything is counted."""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import runner_envs

from etude.algorithms import Ray
from etude.algorithms.config import RecordConfig
from etude.algorithms.ppo import PPO, PPOConfig
from etude.envs import Workers
from etude.errors import EngineError, EnvError, SettingsError
from etude.recordings import Recording, validate

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True, scope="module")
def envs_by_value() -> Iterator[None]:
    """Runners need not find the module of these envs."""
    ray.cloudpickle.register_pickle_by_value(runner_envs)
    yield
    ray.cloudpickle.unregister_pickle_by_value(runner_envs)


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes algorithms, and closes them."""
    there: list[PPO] = []

    def make(env: Any, engine: Ray, **settings: Any) -> PPO:
        own = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "epochs": 1, "seed": 1} | settings
        there.append(PPO(PPOConfig(env=env, engine=engine, **own)))
        return there[-1]

    yield make
    for algorithm in there:
        algorithm.close()


def members(algorithm: PPO) -> list[Any]:
    return algorithm.runner.members  # type: ignore[attr-defined,no-any-return]


def total(algorithm: PPO, iterations: int) -> dict[str, float]:
    """The sums of what iterations have counted."""
    counts: dict[str, float] = {}
    for _ in range(iterations):
        for name, value in algorithm.train().metrics.items():
            counts[name] = counts.get(name, 0.0) + value
    return counts


def test_a_runner_that_is_killed_is_made_anew_and_what_it_was_making_is_lost_and_counted(made: Any) -> None:
    algorithm = made(runner_envs.Walk, Ray(num_runners=2, fragment_steps=16))
    assert algorithm.train().metrics["runner_restarts"] == 0
    before = members(algorithm)[1].pid
    os.kill(before, signal.SIGKILL)
    counts = total(algorithm, 3)
    while members(algorithm)[1].pid in (0, before):  # until it takes part again
        for name, value in total(algorithm, 1).items():
            counts[name] = counts.get(name, 0.0) + value
    assert counts["runner_restarts"] == 1
    assert counts["lost_fragments"] >= 1
    assert algorithm.env_steps >= 4 * 64
    # it acts by a seed of its own
    parts = algorithm.runner.collect_each(num_steps=512)
    prefixes = {name.split("-")[0] for name in parts[None].segments.episode_id}
    assert len(prefixes) == 2


@pytest.mark.parametrize("how", ["hang", "hold"])
def test_a_runner_whose_env_hangs_ends_itself(made: Any, tmp_path: Path, how: str) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), how)
    algorithm = made(env, Ray(num_runners=1, step_timeout=1.0))
    counts = total(algorithm, 2)
    assert counts["lost_fragments"] >= counts["runner_restarts"] == 1
    assert algorithm.env_steps >= 128


def test_an_env_that_hangs_while_it_is_made_is_found_too(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.SlowlyMade, str(tmp_path))
    algorithm = made(env, Ray(num_runners=1, step_timeout=1.0))
    assert total(algorithm, 1)["runner_restarts"] == 1
    assert algorithm.env_steps == 64


def test_envs_that_are_slow_do_not_hang(made: Any) -> None:
    """A fragment may take several times `step_timeout`, as long as turns are made."""
    algorithm = made(functools.partial(runner_envs.Slow, 0.05), Ray(num_runners=1, step_timeout=0.4, fragment_steps=64))
    assert total(algorithm, 1)["runner_restarts"] == 0
    assert algorithm.env_steps == 64


def test_a_recording_is_what_was_collected_though_runners_are_killed(made: Any, tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "run"), layout="table")
    algorithm = made(runner_envs.Walk, Ray(num_runners=2), record=record)
    algorithm.train()
    os.kill(members(algorithm)[0].pid, signal.SIGKILL)
    counts = total(algorithm, 2)
    assert counts["runner_restarts"] == 1
    algorithm.close()
    assert Recording.open(tmp_path / "run").num_steps == algorithm.env_steps
    assert validate(tmp_path / "run").ok


def test_a_runner_that_finds_no_room_is_told(made: Any, caplog: Any) -> None:
    taken = ray.remote(runner_envs.Giver).options(num_cpus=5).remote()
    ray.get(taken.give.remote(1))
    algorithm = made(runner_envs.Walk, Ray(num_runners=2, cpus_per_runner=2, sample_timeout=0.5))
    assert algorithm.train().env_steps > 0
    assert "of the runners, [1] could not begin within 0.5 s; the others continue without them." in caplog.text
    assert "The cluster has free: 1 of 8 CPU, 1 of 1 GPU. Processes that find no room wait." in caplog.text
    ray.kill(taken)
    parts = algorithm.runner.collect_each(num_steps=64)
    while len({name.split("-")[0] for name in parts[None].segments.episode_id}) < 2:  # until it takes part, too
        parts = algorithm.runner.collect_each(num_steps=64)


def test_the_processes_of_envs_end_with_their_runner(made: Any) -> None:
    algorithm = made("CartPole-v1", Ray(num_runners=1), workers=Workers(num_workers=2, min_batch=2))
    algorithm.train()
    (member,) = members(algorithm)
    found = [pid for pid in processes() if parent(pid) == member.pid]
    found += [pid for pid in processes() if parent(pid) in found]
    assert len(found) >= 3
    os.kill(member.pid, signal.SIGKILL)
    assert algorithm.train().metrics["runner_restarts"] == 1
    deadline = time.monotonic() + 300
    while any(parent(pid) is not None for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def parent(pid: int) -> int | None:
    """Of a process; None where that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if text[0] == "Z" else int(text[1])


def test_training_goes_on_with_the_others_where_none_is_to_be_made_anew(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), "die")
    algorithm = made(env, Ray(num_runners=2, restart_failed_runners=False))
    counts = total(algorithm, 3)
    assert len(members(algorithm)) == 1
    assert counts["runner_restarts"] == 0
    assert counts["lost_fragments"] >= 1
    assert algorithm.env_steps >= 3 * 64


def test_the_last_runner_is_lost(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), "die")
    algorithm = made(env, Ray(num_runners=1, restart_failed_runners=False))
    with pytest.raises(EngineError, match=r"runner 0 \(process .*the last one, was lost.*restart_failed_runners"):
        total(algorithm, 2)


def test_restarts_have_an_end(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), "die", again=True)
    algorithm = made(env, Ray(num_runners=1, max_restarts=1))
    with pytest.raises(EngineError, match=r"`ray.max_restarts` \(1\) is used up") as error:
        total(algorithm, 3)
    assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)


def test_an_env_that_can_not_be_made_says_so_at_once(made: Any) -> None:
    with pytest.raises(EnvError, match="no wheels") as error:
        made(runner_envs.Unmade, Ray(num_runners=1))
    assert "in runner " in "".join(error.value.__notes__)
    assert "runner_envs.py" in "".join(error.value.__notes__)  # its traceback


def test_nor_is_it_tried_again_and_again_where_a_restarted_runner_can_not_make_it(made: Any, tmp_path: Path) -> None:
    algorithm = made(functools.partial(runner_envs.UnmadeLater, str(tmp_path)), Ray(num_runners=1))
    with pytest.raises(EnvError, match="no wheels left"):
        total(algorithm, 3)


def test_an_error_of_an_env_comes_as_itself(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), "raise")
    algorithm = made(env, Ray(num_runners=1), workers=Workers(restart_failed=False))
    with pytest.raises(EnvError, match="a wheel came off") as error:
        total(algorithm, 3)
    assert "in runner " in "".join(error.value.__notes__)


def test_or_the_env_is_made_again_in_its_runner(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.OnceBad, str(tmp_path), "raise")
    algorithm = made(env, Ray(num_runners=1))
    counts = total(algorithm, 3)
    assert counts["restarts"] == 1
    assert algorithm.faulty_episodes == 1
    assert counts["runner_restarts"] == 0


def test_and_so_does_one_of_a_function_of_the_user(made: Any) -> None:
    algorithm = made(runner_envs.Walk, Ray(num_runners=1), modules=("only",), module_of=runner_envs.of_nobody)
    with pytest.raises(LookupError, match="who is that"):
        total(algorithm, 2)


def test_what_can_not_be_sent_is_told_before_anything_is_started(made: Any) -> None:
    lock = threading.Lock()

    def make() -> Any:
        return lock and runner_envs.Walk()

    with pytest.raises(SettingsError, match="the settings can't be sent to other processes"):
        made(make, Ray(num_runners=1))


def test_a_module_that_runners_do_not_find(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from runner_envs import Walk\nclass Here(Walk): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    here = importlib.import_module("only_here")
    with pytest.raises(EngineError, match=r"runner 0 can't be started.*only_here.*`ray.runtime_env`"):
        made(here.Here, Ray(num_runners=1))


def test_a_node_that_goes_costs_what_lay_on_it_and_one_with_a_learner_nothing() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lost_node.py"))],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    counts, then, learned = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    assert counts["lost_steps"] == 2 * 64  # what was made and lay there
    assert counts["lost_fragments"] >= 2
    assert counts["runner_restarts"] == 1
    assert counts["env_steps"] == 3 * 64
    # of what runners are sent: it is put there again, and they are as well as before
    assert (then["env_steps"], then["lost_fragments"], then["runner_restarts"]) == (4 * 64, 1, 0)
    # in the middle of the third update: it is made again, and comes out as that of a peer from the same experience
    assert learned["learner_restarts"] == [0, 0, 1, 0, 0]
    assert (learned["updates"], learned["env_steps"]) == (5, 5 * 64)
    assert not any(learned["runner_restarts"] + learned["lost_fragments"])
    assert learned["apart"] < 1e-5
