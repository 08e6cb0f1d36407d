# SPDX-License-Identifier: Apache-2.0
"""PPO with two agents that see and do different things, each with a module of its own."""

from pathlib import Path
from typing import Any

import pytest
from over_seeds import median_over_seeds
from signalling import ROUNDS, TARGETS, WORDS, Signalling

import etude
from etude.algorithms import PPO, PPOConfig, Stop
from etude.envs import make_arena
from etude.errors import DataError, EtudeError, SettingsError


def config(**given: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "env": Signalling,
        "modules": ("speaker", "listener"),
        "num_envs": 16,
        "num_steps": 1024,
        "lr": 3e-3,
        "entropy_weight": 0.01,
        "gamma": 0.5,
        "seed": 1,
    }
    return PPOConfig(**settings | given)


@pytest.mark.learning
def test_two_modules_learn_to_understand_each_other() -> None:
    best = 2 * ROUNDS  # both are paid for each round

    def score(seed: int) -> float:
        result = PPO(config(seed=seed)).fit(Stop(return_mean=0.9 * best, env_steps=60_000))
        assert result.agent_returns["speaker"] == result.agent_returns["listener"]
        assert result.module_returns == result.agent_returns
        return result.return_mean / best

    assert median_over_seeds(score) >= 0.8


class Mute(Signalling):
    """The speaker says always the same."""

    def step(self, actions: Any) -> Any:
        return super().step(actions | {"speaker": 0})


@pytest.mark.learning
@pytest.mark.mistake
def test_nothing_is_understood_where_nothing_is_said() -> None:
    def score(seed: int) -> float:
        return PPO(config(env=Mute, seed=seed)).fit(Stop(env_steps=20_000)).return_mean

    assert median_over_seeds(score) < 1.5 * 2 * ROUNDS / TARGETS


def test_figures_are_by_module() -> None:
    algorithm = PPO(config(num_steps=256))
    result = algorithm.train()
    assert (result.env_steps, result.agent_steps) == (256, 512)
    assert {name.partition("/")[0] for name in result.losses} == {"speaker", "listener"}
    assert {"speaker/lr", "listener/lr"} <= result.metrics.keys()
    updates = [own.updates for own in algorithm.learner.modules.values()]
    assert result.updates == sum(updates)
    with pytest.raises(SettingsError, match=r"there are several modules \(speaker, listener\): choose one"):
        _ = algorithm.module


def test_a_saved_run_of_two_modules_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    algorithm = PPO(config(num_steps=100))
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=Signalling)
    for _ in range(2):
        expected, found = algorithm.train(), loaded.train()
        assert found.losses == expected.losses
        assert found.module_returns == expected.module_returns


def test_modules_see_the_spaces_of_their_agents() -> None:
    algorithm = PPO(config())
    arena = make_arena(Signalling, 1)
    by_agent = {agent: kind for kind in arena.kinds for agent in (arena.agents[slot] for slot in kind.slots)}
    for name, policy in algorithm.policies.items():
        assert policy.module.obs_space == by_agent[name].obs_space
        assert policy.module.action_space == by_agent[name].action_space


def test_one_module_can_not_act_for_agents_with_different_spaces() -> None:
    with pytest.raises(EtudeError, match=r"agents with different spaces need different modules"):
        PPO(config(modules=None)).train()


def test_agents_of_different_spaces_are_recorded_apart(tmp_path: Path) -> None:
    PPO(config()).record(tmp_path / "data", 2, seed=1)
    speaker, listener = (etude.Recording.open(tmp_path / "data" / name) for name in ("speaker", "listener"))
    assert (speaker.action_space.n, listener.action_space.n) == (WORDS, TARGETS)
    theirs = [set(recording.read().segments.episode_id) for recording in (speaker, listener)]
    assert theirs[0] == theirs[1]
    with pytest.raises(DataError, match="space is"):
        etude.Recording.open(tmp_path / "data")


def test_modules_that_act_for_nobody_in_an_env_are_named() -> None:
    with pytest.raises(SettingsError, match="module"):
        PPO(config()).evaluate(1, env="CartPole-v1")


def test_evaluation_is_by_module() -> None:
    evaluation = PPO(config()).evaluate(5, seed=1)
    assert evaluation.episodes == 5
    assert evaluation.length_mean == 2 * ROUNDS
    assert evaluation.return_mean == pytest.approx(sum(evaluation.module_returns.values()))
