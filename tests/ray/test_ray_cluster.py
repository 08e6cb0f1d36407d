# SPDX-License-Identifier: Apache-2.0
"""What an algorithm has on a cluster, all together: how it begins, goes on and ends."""

import dataclasses
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from runner_envs import Walk

import etude
from etude import APPO, BC, DQN, PPO, APPOConfig, BCConfig, DQNConfig, PPOConfig, Ray, RecordConfig
from etude.algorithms import RayData
from etude.connectors import Inputs
from etude.errors import DataError, SettingsError
from etude.learners import Update
from etude.modules import NetworkConfig
from etude.ray.cluster import actors_of
from etude.ray.engine import RayEngine

pytestmark = pytest.mark.usefixtures("cluster")

SMALL: dict[str, Any] = {"env": Walk, "num_envs": 2, "num_steps": 64, "seed": 1, "network": NetworkConfig(hidden=(8,))}


def test_whatever_fails_while_it_ends_all_else_has_ended() -> None:
    """As where the disk of a recording is full."""

    class Fails:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise DataError("no space left")

    algorithm = PPO(PPOConfig(**SMALL, engine=Ray(num_runners=1, num_learners=1)))
    algorithm.train()
    engine: Any = algorithm.engine
    pids = engine.learners.pids
    assert len(pids) == 1
    fails = engine._kept(Fails())
    with pytest.raises(DataError, match="no space left"):
        algorithm.close()
    assert fails.closed == 1
    assert engine.learners.pids == []
    algorithm.close()


@pytest.mark.parametrize("given", [{"record": RecordConfig(path="rec")}, {"callbacks": (etude.Callback(),)}])
def test_evaluation_runners_refuse_what_they_would_not_do(given: dict[str, Any], tmp_path: Path) -> None:
    with closing(PPO(PPOConfig(**SMALL))) as expert:
        expert.record(tmp_path / "data", 4)
    engine = Ray(num_evaluation_runners=1)
    config = BCConfig(data=str(tmp_path / "data"), env=Walk, updates_per_iteration=1, engine=engine, **given)
    with pytest.raises(SettingsError, match="`callbacks` and `record` do not work"):
        BC(config)


def test_batches_that_make_a_step_together_stay_together() -> None:
    settings = {**SMALL, "iteration_steps": 64, "learning_starts": 0, "batch_size": 8, "updates_per_step": 0.55}
    config = DQNConfig(**settings, accumulate=20)
    engine = Ray(num_runners=1, num_learners=1, fragment_steps=64)
    with closing(DQN(dataclasses.replace(config, engine=engine))) as far:
        assert far.train().updates == 35


def test_a_module_that_comes_meets_those_that_have_learned_what_was_under_way() -> None:
    config = APPOConfig(**SMALL, modules=("a",), module_of=lambda agent, episode: "a", epochs=1, minibatch_size=64)
    with closing(APPO(dataclasses.replace(config, engine=Ray(num_runners=1, num_learners=1)))) as algorithm:
        algorithm.train()
        before = algorithm.updates
        policy = algorithm.add_module("b", like="a", module_of=lambda agent, episode: "b")
        assert algorithm.updates == before + 1
        for name, value in algorithm.policies["a"].module.state_dict().items():
            np.testing.assert_array_equal(value, policy.module.state_dict()[name])
        algorithm.train()
        assert algorithm.learner.modules["b"].updates >= 1


def test_what_was_counted_before_there_was_something_to_tell_is_told() -> None:
    with closing(APPO(APPOConfig(**SMALL, engine=Ray(num_runners=1, num_learners=1)))) as algorithm:
        collect, waits = algorithm.collect, []

        def counted(**how: Any) -> Any:
            parts = collect(**how)
            waits.append(algorithm.counts["sample_wait_s"])
            return parts

        algorithm.collect = counted  # type: ignore[method-assign]
        result = algorithm.train()
        assert len(waits) == 2
        assert result.metrics["sample_wait_s"] == pytest.approx(sum(waits))


class Tenfold(etude.Connector):
    """Observations tenfold when acting, and raw when learning."""

    def online(self, inputs: Inputs) -> Inputs:
        return inputs.with_obs({name: 10 * column for name, column in inputs.obs.items()})


def test_observations_that_change_only_when_acting_are_told_from_runners() -> None:
    algorithm = PPO(PPOConfig(**SMALL, connectors=(Tenfold(),), engine=Ray(num_runners=1)))
    with closing(algorithm), pytest.raises(SettingsError, match="write its method offline, too"):
        algorithm.train()


def test_a_device_that_learners_do_not_have_is_refused() -> None:
    algorithm = PPO(PPOConfig(**SMALL))
    algorithm.config = dataclasses.replace(algorithm.config, engine=Ray(num_learners=1), device="cuda")
    with pytest.raises(SettingsError, match="`compute.device` is 'cuda', but learners have no GPUs"):
        RayEngine(algorithm)
    with pytest.raises(
        SettingsError, match="`ray.backend` is 'nccl', but must be auto or gloo where learners have no whole GPU each"
    ):
        Ray(backend="nccl", gpus_per_learner=0.5)


def test_what_a_run_asks_a_cluster_for(tmp_path: Path) -> None:
    engine = Ray(num_runners=2, gpus_per_runner=0.5, num_learners=1, gpus_per_learner=1, num_evaluation_runners=1)
    runner, learner = {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 1.0}
    acting = PPOConfig(**SMALL, engine=engine)
    assert actors_of(acting) == [runner, runner, learner]
    assert actors_of(dataclasses.replace(acting, evaluation_interval=1)) == [runner, runner, {"CPU": 1.0}, learner]
    offline = BCConfig(data="data", engine=Ray(num_learners=1, data=RayData(num_cpus=0.5)))
    assert actors_of(offline) == [{"CPU": 1.0}, {"CPU": 0.5}]
    assert actors_of(BCConfig(data="data", engine="ray")) == []  # this process reads


def test_an_end_after_that_of_the_cluster_starts_none(cluster: None) -> None:
    """In a process of its own, as the cluster is everybody's."""
    code = (
        "import ray, etude\n"
        "ray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False)\n"
        "config = etude.PPOConfig(env='CartPole-v1', num_envs=2, num_steps=32, seed=1,\n"
        "                         engine=etude.Ray(num_runners=1, num_learners=1))\n"
        "algorithm = etude.PPO(config)\nalgorithm.train()\nray.shutdown()\n"
        "try:\n    algorithm.train()\nexcept etude.EngineError as error:\n    print(error)\n"
        "algorithm.close()\nprint(ray.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    told, is_there = done.stdout.splitlines()
    assert told.startswith("the connection to the Ray cluster has ended: load the last checkpoint")
    assert is_there == "False"
    assert ray.is_initialized()


class LearnsItself(PPO):
    """Makes its gradient steps with the learner that it finds here."""

    def training_step(self) -> Update:
        (exp,) = self.collect(num_steps=64).values()
        return self.update_epochs(self.learner.only, self.prepared("main", exp))


class LearnsAsEver(PPO):
    """Does something more."""

    def training_step(self) -> Update:
        return super().training_step()


def test_learners_of_a_cluster_are_never_left_out_silently() -> None:
    config = PPOConfig(**SMALL, engine=Ray(num_runners=1, num_learners=1))
    with closing(LearnsAsEver(config)) as algorithm:
        algorithm.train()
    with (
        closing(LearnsItself(config)) as algorithm,
        pytest.raises(SettingsError, match=r"num_learners=1, but LearnsItself\.training_step .*leave"),
    ):
        algorithm.train()


def test_a_run_that_changes_between_this_process_and_a_cluster_plays_other_episodes(tmp_path: Path) -> None:
    """And records each step once."""
    config = PPOConfig(**SMALL, record=RecordConfig(path=str(tmp_path / "data"), append=True))
    played = 0
    for session in range(4):
        engine = Ray(num_runners=2) if session % 2 else "local"
        run = etude.load(tmp_path / "run", env=Walk, engine=engine) if session else PPO(config)
        with closing(run):
            run.train()
            run.save(tmp_path / "run")
            played = run.env_steps
    recording = etude.Recording.open(tmp_path / "data")
    assert recording.num_steps == played
    steps = recording.read()
    starts = steps.steps["obs"][steps.offsets[:-1]][steps.segments.t_start == 0]
    assert len(np.unique(starts, axis=0)) == len(starts)
