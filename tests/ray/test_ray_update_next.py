# SPDX-License-Identifier: Apache-2.0
"""Updates that go on while more is collected: connectors that ask the module work at the learners, on their shares."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude import APPO, APPOConfig, Ray
from etude.experience import Experience, Segments
from etude.modules import NetworkConfig
from etude.ray.learners import Learners

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
