# SPDX-License-Identifier: Apache-2.0
"""Algorithms on vector envs of torch tensors: the same as in NumPy, and what goes to the host on the way."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensor_envs import AsTensors, Follow, HostCount

import etude
from etude.connectors import GAE, Connector
from etude.experience import Experience
from etude.modules import Actor, Module, make_module
from etude.recordings import Recording

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


class InNumPy(Module):
    """Acts in NumPy wherever it is, so that all draw the same actions."""

    def actor(self, *, explore: bool) -> Actor:
        return super().actor(explore=explore)


def own_module(obs_space: Any, action_space: Any) -> Module:
    made = make_module(None, obs_space, action_space)
    return InNumPy(made.net, obs_space, action_space, made.dist)


def cartpole() -> Any:
    return gym.make_vec("CartPole-v1", 4, "sync", max_episode_steps=50)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [etude.PPO, etude.IMPALA, etude.APPO])
def test_the_first_updates_are_those_of_numpy(make: Any, device: str) -> None:
    def trained(env: Any, device: str) -> Any:
        config = make.Config(env=env, num_envs=4, num_steps=128, module=own_module, device=device, seed=2)
        algorithm = make(config)
        return algorithm, [algorithm.train() for _ in range(2)]

    own, results = trained(AsTensors(cartpole(), device), device)
    other, wanted = trained(cartpole(), "cpu")
    assert [result.env_steps for result in results] == [result.env_steps for result in wanted]
    assert results[0].return_mean == wanted[0].return_mean
    for name, weight in own.policy.module.state_dict().items():
        torch.testing.assert_close(weight.cpu(), other.policy.module.state_dict()[name], rtol=5e-3, atol=5e-4)
    for name, loss in wanted[0].losses.items():
        assert results[0].losses[name] == pytest.approx(loss, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_ppo_learns_on_the_device(device: str) -> None:
    env = Follow(16, AutoresetMode.SAME_STEP, device)
    ppo = etude.PPO(etude.PPOConfig(env=env, num_envs=16, num_steps=512, lr=5e-3, gamma=0.0, device=device, seed=1))
    returns = [ppo.train().return_mean for _ in range(12)]
    assert returns[0] < 2.5  # of 5, where one choice of three is right
    assert returns[-1] > 4.5


def test_an_iteration_hands_no_observation_and_no_action_to_the_host() -> None:
    config = etude.PPOConfig(env=Follow(16), num_envs=16, num_steps=160, seed=1, connectors=("normalize_obs",))
    ppo = etude.PPO(config)
    for _ in range(2):
        ppo.train()
    before = ppo.runner.turns
    with HostCount() as counted:
        ppo.train()
    rows = {count for (dtype, shape), count in counted.counts.items() if shape == (3, 16) and dtype == "torch.float32"}
    assert rows == {ppo.runner.turns - before}  # rewards and flags
    # beside: statistics of normalize_obs, losses and figures, but no rows of observations and no whole numbers
    others = {dtype: shape for dtype, shape in counted.counts if shape != (3, 16)}
    assert all(len(shape) < 2 for shape in others.values())
    assert "torch.int64" not in others


def test_learner_connectors_that_need_numpy_are_given_it() -> None:
    seen: list[type] = []

    class Look(Connector):
        def offline(self, exp: Experience, module: Any = None) -> Experience:
            seen.append(type(exp.steps["obs"]))
            return exp

    class Own(etude.PPO):
        def learner_connectors(self) -> list[Any]:
            return [Look(), GAE()]

    Own(etude.PPOConfig(env=Follow(), num_envs=8, num_steps=80, normalize_advantages=False)).train()
    assert seen
    assert set(seen) == {np.ndarray}


class Push(Follow):
    """Follow, by one number for each action."""

    def __init__(self, num_envs: int = 8) -> None:
        super().__init__(num_envs)
        self.single_action_space = spaces.Box(-1, 1, (3,), np.float32)

    def step(self, actions: torch.Tensor) -> Any:
        assert actions.shape == (self.num_envs, 3)
        assert float(actions.abs().max()) <= 1
        return super().step(actions.argmax(1))


@pytest.mark.parametrize(
    ("make", "env", "options"),
    [
        (etude.DQN, Follow, {"learning_starts": 32, "iteration_steps": 96}),
        (etude.SAC, Push, {"learning_starts": 32, "iteration_steps": 96, "batch_size": 32}),
    ],
)
def test_replays_hold_numpy(make: Any, env: Any, options: dict[str, Any]) -> None:
    algorithm = make(make.Config(env=env(8), num_envs=8, seed=1, **options))
    assert algorithm.train().updates > 0
    batch, *_ = algorithm.drawn("main")
    assert all(isinstance(column, np.ndarray) for column in batch.values())


def test_what_is_recorded_is_in_numpy(tmp_path: Path) -> None:
    config = etude.PPOConfig(
        env=Follow(), num_envs=8, num_steps=240, seed=1, record=etude.RecordConfig(path=str(tmp_path / "r"))
    )
    ppo = etude.PPO(config)
    ppo.train()
    ppo.close()
    exp = Recording.open(tmp_path / "r").read()
    assert exp.num_steps > 150
    assert exp.steps["obs"].dtype == np.float32
    rows = exp.steps["obs"].argmax(1) == exp.steps["action"]
    np.testing.assert_array_equal(exp.steps["reward"], rows)


def test_evaluation_and_resuming(tmp_path: Path) -> None:
    config = etude.PPOConfig(env=Follow(), num_envs=8, num_steps=84, seed=1)
    ppo = etude.PPO(config)
    ppo.train()
    assert ppo.evaluate(10, env=Follow()).episodes == 10
    ppo.save(tmp_path / "saved")
    again = etude.load(tmp_path / "saved", env=Follow())
    assert again.train().env_steps == 168
    assert again.train().resumed is None or "tensors" in str(again.train().resumed)
    for name, weight in etude.load(tmp_path / "saved", env=Follow()).policy.module.state_dict().items():
        torch.testing.assert_close(weight, ppo.policy.module.state_dict()[name])
