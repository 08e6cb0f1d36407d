# SPDX-License-Identifier: Apache-2.0
"""Updates that go on while more is collected: connectors that ask the module work at the learners, on their shares."""

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import etude
from etude import APPO, IMPALA, PPO, APPOConfig, IMPALAConfig, PPOConfig, Ray
from etude.experience import Experience, Segments
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig

ray = pytest.importorskip("ray", reason="the ray engine needs Ray: pip install 'etude[ray]'")

from etude.ray.learners import Learners  # noqa: E402

pytestmark = pytest.mark.usefixtures("cluster")

OBS, ACT = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
CONFIG = APPOConfig(seed=3, network=NetworkConfig(hidden=(8,)), lr=1e-2, epochs=2, minibatch_size=1000)


def made() -> APPO:
    return APPO(CONFIG, saved_spaces={"main": (OBS, ACT)})


def seen(seed: int, lengths: tuple[int, ...] = (9, 20, 3, 14, 30)) -> Experience:
    """What a module saw, by weights that are none of those that learn."""
    rng = np.random.default_rng(seed)
    num_steps, num = sum(lengths), len(lengths)
    steps = {
        "obs": rng.normal(size=(num_steps, 4)).astype(np.float32),
        "action": rng.integers(0, 3, num_steps),
        "reward": rng.normal(size=num_steps),
        "logp": np.log(rng.uniform(0.2, 0.6, num_steps)).astype(np.float32),
    }
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)]).replace(terminated=np.arange(num) % 2 == 0)
    final_obs = {"obs": rng.normal(size=(num, 4)).astype(np.float32)}
    return Experience(steps, np.cumsum([0, *lengths]), segments, final_obs)


def check_alike(one: Any, other: Any) -> None:
    assert one.updates == other.updates
    for key, value in one.module.state_dict().items():
        torch.testing.assert_close(value, other.module.state_dict()[key], atol=2e-6, rtol=1e-4)


@pytest.fixture
def pair(cluster: None) -> Iterator[tuple[APPO, Learners]]:
    algorithm = made()
    learners = Learners(algorithm, Ray(num_learners=2))
    yield algorithm, learners
    learners.close()


def test_two_learn_as_one_and_a_killed_one_changes_nothing(pair: tuple[APPO, Learners]) -> None:
    """V-trace by the weights of each update, advantages normalised over both shares."""
    (algorithm, learners), one = pair, made()
    told, own = [], []
    for i, lengths in enumerate([(9, 20, 3, 14, 30), (9, 8), (50,), (2, 30, 3)]):  # of one segment, one has nothing
        exp = seen(i, lengths)
        told.append(learners.update_next({"main": exp}, 5))
        check_alike(algorithm, one)  # what is under way is not here yet
        if i == 1:
            os.kill(learners.pids[1], signal.SIGKILL)
        own.append(one.learn("main", one.prepared("main", exp)))
    learners.pull()
    check_alike(algorithm, one)
    told.append(learners.update_next({"main": seen(9)}, 5))
    assert told[0] is None
    for update, expected in zip(told[1:], own, strict=True):
        assert update is not None
        assert update["main"].losses == pytest.approx(expected.losses, rel=1e-3, abs=1e-5)
    assert learners.stats() == {"learner_restarts": 1.0}


def test_what_was_loaded_meanwhile_counts(pair: tuple[APPO, Learners]) -> None:
    (algorithm, learners), one = pair, made()
    learners.update_next({"main": seen(0)}, 5)
    algorithm.set_state(one.get_state(["modules", "optimizers"]))
    learners.push()
    assert learners.update_next({"main": seen(1)}, 5) is None
    one.learn("main", one.prepared("main", seen(1)))
    learners.pull()
    check_alike(algorithm, one)


def test_an_iteration_tells_of_the_update_before(cluster: None) -> None:
    engine = Ray(num_runners=1, num_learners=1)
    config = dataclasses.replace(CONFIG, env="CartPole-v1", num_envs=2, num_steps=64, engine=engine)
    algorithm = APPO(config)
    try:
        first, second = algorithm.train(), algorithm.train()
        assert first.env_steps >= 128  # collected twice: at first there is nothing to tell of
        assert second.env_steps - first.env_steps < 128
        assert (first.updates, second.updates) == (2, 4)
        assert first.losses.keys() == second.losses.keys() == {"policy", "value", "entropy"}
        state = algorithm.get_state()
        assert algorithm.updates == 6  # the one under way has come
        assert state["counters"]["env_steps"] == second.env_steps
    finally:
        algorithm.close()


class Scaled(IMPALA):
    """Its rewards are normalised where it learns."""

    def learner_connectors(self) -> list[Any]:
        return ["normalize_reward", *super().learner_connectors()]


@pytest.mark.parametrize("killed", [False, True])
def test_connectors_of_learners_learn_from_all_that_they_see(killed: bool, cluster: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = IMPALAConfig(seed=3, network=NetworkConfig(hidden=(8,)), epochs=2, num_minibatches=1)
    algorithm, one = (Scaled(config, saved_spaces={"main": (OBS, ACT)}) for _ in range(2))
    learners = Learners(algorithm, Ray(num_learners=2))
    try:
        for i in range(4):
            exp = seen(i)
            learners.update_next({"main": exp}, 5)
            if killed and i == 2:
                os.kill(learners.pids[1], signal.SIGKILL)
            one.learn("main", one.prepared("main", exp))
            one.learner.modules["main"].connectors.update(exp)
        learners.pull()
    finally:
        learners.close()
    check_alike(algorithm, one)
    own, wanted = (of.learner.modules["main"].connectors for of in (algorithm, one))
    assert own.metrics() == wanted.metrics()


class Weighted(PPO):
    """Its losses use what `before_update` makes of a number that is set from outside."""

    beta = 0.0

    def before_update(self, env_steps: int) -> None:
        self.scale = torch.tensor(self.beta)

    def loss(self, module: Module, batch: Batch) -> Loss:
        return Loss(**super().loss(module, batch).parts).log(beta=torch.tensor(self.beta), scale=self.scale)


def test_learners_have_the_schedules_and_attributes_of_one_in_this_process(cluster: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def played(engine: Any) -> tuple[list[dict[str, float]], Any]:
        config = PPOConfig(env="CartPole-v1", num_envs=4, num_steps=400, seed=1, engine=engine, epochs=1, lr=1e-3)
        schedules: Any = {"entropy_weight": ((0, 1.0), (800, 0.0)), "clip": ((0, 0.5), (800, 0.01))}
        algorithm = Weighted(dataclasses.replace(config, **schedules))
        told = []
        try:
            for i in range(3):
                algorithm.beta = 10.0**i
                result = algorithm.train()
                metrics = {name: result.metrics[name] for name in ("beta", "scale", "entropy_weight", "clip")}
                told.append(result.losses | metrics)
            return told, algorithm.module.state_dict()
        finally:
            algorithm.close()

    (here, weights), (there, moved) = played("local"), played(Ray(num_runners=1, fragment_steps=400, num_learners=1))
    for own, wanted in zip(there, here, strict=True):
        assert own == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert [own["scale"] for own in here] == [1.0, 10.0, 100.0]
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, atol=1e-5, rtol=1e-4)


def test_steps_that_learners_trained_on_are_counted_although_the_run_is_saved(cluster: None, tmp_path: Path) -> None:
    engine = Ray(num_runners=1, num_learners=1)
    algorithm = IMPALA(IMPALAConfig(env="CartPole-v1", num_envs=4, num_steps=256, seed=1, engine=engine))
    try:
        trained = 0.0
        for i in range(5):
            result = algorithm.train()
            trained += result.metrics["env_steps_trained"]
            if i in (1, 3):
                algorithm.save(tmp_path / "run")
        # the update that goes on meanwhile was counted when it was fetched
        assert result.metrics["env_steps_trained_lifetime"] == trained == 256 * result.updates
    finally:
        algorithm.close()
    loaded = etude.load(tmp_path / "run", engine="local")
    before = 256 * loaded.updates
    result = loaded.train()
    assert result.metrics["env_steps_trained_lifetime"] == before + 256


def test_an_iteration_without_a_gradient_step_needs_no_learners(cluster: None) -> None:
    engine = Ray(num_learners=1)
    algorithm = etude.DQN(etude.DQNConfig(env="CartPole-v1", seed=0, learning_starts=5000, engine=engine))
    try:
        result = algorithm.train()
        assert (result.env_steps >= 1000, result.updates) == (True, 0)
    finally:
        algorithm.close()


def test_statistics_that_are_loaded_are_not_those_of_the_recording(cluster: None, tmp_path: Path) -> None:
    ppo = PPO(PPOConfig(env="CartPole-v1", seed=0))
    for i, name in enumerate(("first", "more")):
        ppo.record(tmp_path / name, num_episodes=10 + 10 * i, seed=i, explore=True)
    given: dict[str, Any] = {"connectors": ("normalize_obs",), "batch_size": 32, "updates_per_iteration": 5, "seed": 0}
    before = etude.BC(etude.BCConfig(data=str(tmp_path / "first"), **given))
    before.train()
    before.save(tmp_path / "run")
    engines: list[Any] = ["local", Ray(num_learners=1)]
    for engine in engines:
        algorithm = etude.BC(etude.BCConfig(data=str(tmp_path / "more"), engine=engine, **given))
        try:
            algorithm.load(tmp_path / "run", ["modules", "connectors"])
            algorithm.train()
            assert algorithm.connectors.metrics() == before.connectors.metrics()
        finally:
            algorithm.close()
