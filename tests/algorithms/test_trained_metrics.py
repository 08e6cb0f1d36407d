# SPDX-License-Identifier: Apache-2.0
"""What results say of steps trained, of parameters and of phases, and figures of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from signalling import Signalling
from toy_envs import Echo

import etude
from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop
from etude.algorithms.results import log_trained
from etude.learners import Update
from etude.metrics import Metrics

KINDS = ("env_steps_trained", "agent_steps_trained")


def ppo(**given: Any) -> PPO:
    return PPO(PPOConfig(**({"env": Echo, "num_envs": 2, "num_steps": 100, "epochs": 3, "seed": 0} | given)))


def two(**given: Any) -> PPO:
    return ppo(**({"env": Signalling, "modules": ("speaker", "listener")} | given))


def size_of(module: torch.nn.Module) -> int:
    return sum(len(p.detach().reshape(-1)) for p in module.parameters())


def test_steps_trained_of_one_agent() -> None:
    algorithm = ppo(minibatch_size=32)
    for iteration in (1, 2):
        metrics = algorithm.train().metrics
        assert [metrics[kind] for kind in KINDS] == [300, 300]
        assert [metrics[f"{kind}_lifetime"] for kind in KINDS] == [300 * iteration] * 2
    assert algorithm.learner.only.steps_trained == 600
    assert not any(name.endswith("/steps_trained") for name in metrics)


def test_steps_trained_of_two_agents_and_modules() -> None:
    algorithm = two()
    algorithm.train()
    result = algorithm.train()
    metrics = result.metrics
    assert (result.env_steps, result.agent_steps) == (200, 400)
    assert [metrics[kind] for kind in KINDS] == [300, 600]
    assert [metrics[f"{kind}_lifetime"] for kind in KINDS] == [600, 1200]
    assert metrics["speaker/steps_trained"] == metrics["listener/steps_trained"] == 300
    assert metrics["speaker/steps_trained_lifetime"] == metrics["listener/steps_trained_lifetime"] == 600


def test_a_module_that_is_not_trained_has_no_steps() -> None:
    metrics = two(modules_to_train=("listener",)).train().metrics
    assert (metrics["speaker/steps_trained"], metrics["listener/steps_trained"]) == (0, 300)
    assert [metrics[kind] for kind in KINDS] == [150, 300]


def test_env_steps_are_as_many_to_an_agent_s_as_were_sampled() -> None:
    metrics = Metrics()
    log_trained(metrics, {"a": 0}, {"a": 100}, (0, 0), (10, 40))  # four agents at a time
    log_trained(metrics, {"a": 100}, {"a": 200, "b": 20}, (10, 40), (20, 60))  # two; and a new module
    log_trained(metrics, {"a": 200, "b": 20}, {"a": 230, "b": 20}, (20, 60), (20, 60))  # none sampled
    assert metrics.reduce() == {
        "env_steps_trained": 25 + 60 + 10,
        "env_steps_trained_lifetime": 95,
        "agent_steps_trained": 250,
        "agent_steps_trained_lifetime": 250,
        "a/steps_trained": 130,
        "a/steps_trained_lifetime": 130,
        "b/steps_trained": 20,
        "b/steps_trained_lifetime": 20,
    }


def test_offline_steps_are_those_of_the_batches(tmp_path: Path) -> None:
    ppo().record(tmp_path / "data", 5, seed=1)
    algorithm = BC(BCConfig(data=str(tmp_path / "data"), batch_size=16, updates_per_iteration=3, seed=0))
    algorithm.train()
    metrics = algorithm.train().metrics
    assert [metrics[kind] for kind in KINDS] == [48, 48]
    assert [metrics[f"{kind}_lifetime"] for kind in KINDS] == [96, 96]


def test_parameters_are_counted_by_whether_they_are_trained() -> None:
    algorithm = ppo()
    metrics = algorithm.train().metrics
    assert metrics["parameters/trainable"] == size_of(algorithm.module) > 0
    assert metrics["parameters/frozen"] == 0
    several = two()
    for parameter in several.policies["speaker"].module.parameters():
        parameter.requires_grad_(False)
    metrics = next(several.iterate(Stop(updates=0))).metrics
    sizes = {name: size_of(policy.module) for name, policy in several.policies.items()}
    assert (metrics["parameters/trainable"], metrics["parameters/frozen"]) == (sizes["listener"], sizes["speaker"])
    assert (metrics["speaker/parameters/trainable"], metrics["speaker/parameters/frozen"]) == (0, sizes["speaker"])
    assert metrics["listener/parameters/trainable"] == sizes["listener"]


def test_lifetimes_and_figures_of_one_s_own_go_on_in_a_loaded_run(tmp_path: Path) -> None:
    algorithm = ppo()
    algorithm.metrics.log("mine", 4, "lifetime")
    algorithm.metrics.under("main").log("recent", [1, 2, 3], "window", window=2)
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=Echo)
    for one in (algorithm, loaded):
        one.metrics.log("mine", 3, "lifetime")
        one.metrics.log("main/recent", 10, "window", window=2)
    expected, found = algorithm.train().metrics, loaded.train().metrics
    assert found == expected
    assert (found["mine"], found["main/recent"]) == (7, 6.5)
    assert (found["agent_steps_trained"], found["agent_steps_trained_lifetime"]) == (300, 600)


class Noted(PPO):
    """Logs from its own step, on the way to its update."""

    def training_step(self) -> Update:
        with self.timed("think"), self.timed("think_more"):
            self.metrics.log("weight", self.module.net.state_dict()[next(iter(self.module.net.state_dict()))].mean())
        return super().training_step()


def test_figures_and_phases_of_an_algorithm_s_own_are_in_its_results() -> None:
    algorithm = Noted(PPOConfig(env=Echo, num_steps=64, seed=0))
    algorithm.metrics.log("before", 1.0)
    results = list(algorithm.iterate(Stop(env_steps=128)))
    assert [result.metrics.get("before") for result in results] == [1.0, None], "nothing logged is lost or kept on"
    for result in results:
        assert list(result.times) == ["think_more", "think", "sample", "connect", "update"]
        assert 0 < result.times["think_more"] <= result.times["think"] < 0.1
        assert abs(result.metrics["weight"]) < 1
        assert not any(name.startswith("times") for name in result.metrics)
        assert sum(result.times.values()) - result.times["think_more"] < result.seconds  # which is a part of `think`


def test_how_things_stand_is_said_without_taking_anything() -> None:
    algorithm = ppo()
    algorithm.train()
    algorithm.metrics.log("mine", 2.0)
    (current_result,) = algorithm.iterate(Stop(env_steps=100))
    assert current_result.metrics["mine"] == 2.0
    assert current_result.metrics["agent_steps_trained"] == 0
    assert current_result.metrics["agent_steps_trained_lifetime"] == 300
    assert set(current_result.times.values()) == {0.0}
    assert algorithm.train().metrics["mine"] == 2.0
    with pytest.raises(etude.EtudeError, match="`mine` was logged by 'mean' and now by 'max'"):
        algorithm.metrics.log("mine", 2.0, "max")
