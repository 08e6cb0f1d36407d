# SPDX-License-Identifier: Apache-2.0
"""PPO with a memory: learns what can't be known without one, and learns from what it did, in the state it did it in."""

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from over_seeds import median_over_seeds, mistaken
from torch import nn

from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop, load
from etude.errors import ModuleError, SettingsError
from etude.modules import NetworkConfig, Output, make_module


class Recall(gym.Env[Any, Any]):
    """A cue in the first step; 3 to 6 steps later, a signal: then doing what the cue said earns 1, and all ends.

    The signal looks the same for both cues, so that without a memory nothing is better than a guess: 0.5.
    """

    observation_space = spaces.Box(0, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)
    earns = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.cue, self.left = int(self.np_random.integers(2)), int(self.np_random.integers(3, 7))
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action: Any) -> Any:
        if not self.left:
            return np.zeros(3, np.float32), self.earns * float(action == self.cue), True, False, {}
        self.left -= 1
        return np.float32([0, 0, self.left == 0]), 0.0, False, False, {}


def config(recurrent: Any, **given: Any) -> PPOConfig:
    network = NetworkConfig(hidden=(32,), recurrent=recurrent, recurrent_size=32)
    defaults: dict[str, Any] = {
        "env": Recall,
        "seed": 0,
        "num_steps": 1024,
        "minibatch_size": 128,
        "epochs": 4,
        "lr": 3e-3,
        "gamma": 1.0,
        "window": 200,
    }
    return PPOConfig(**{"network": network, **defaults, **given})


class OwnGRU(nn.Module):
    """A user's own recurrent network."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.gru = nn.GRU(obs_space.shape[0], 32, batch_first=True)
        self.heads = nn.Linear(32, 3)

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"memory": torch.zeros(32)}

    def forward(self, obs: torch.Tensor, state: dict[str, torch.Tensor]) -> Output:
        hidden, last = self.gru(obs, state["memory"].unsqueeze(0))
        out = self.heads(hidden)
        return Output(out[..., :2], out[..., 2], {"memory": last[0]})


@pytest.mark.learning
@pytest.mark.parametrize("memory", ["lstm", "gru", OwnGRU])
def test_with_a_memory_the_cue_is_recalled(memory: Any) -> None:
    given: dict[str, Any] = {"module": memory} if memory is OwnGRU else {}

    def score(seed: int) -> float:
        algorithm = PPO(config(None if given else memory, seed=seed, **given))
        algorithm.fit(Stop(return_mean=0.95, env_steps=25_000))
        return algorithm.evaluate(100, seed=1).return_mean

    assert median_over_seeds(score) > 0.85


class Rich(Recall):
    """The same, and it earns 1,000: the errors of values are large beside the policy's gradient."""

    earns = 1000.0


class Shared(PPO):
    """The mistake of one memory and one gradient limit for both: what is left of the policy's gradient is little."""

    def make_module(self, given: Any, obs_space: Any, action_space: Any) -> Any:
        network = dataclasses.replace(self.config.network, separate=False)
        return make_module(given, obs_space, action_space, network)


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "kind"), [(PPO, "lstm"), (PPO, "gru"), mistaken(Shared, "lstm")])
def test_large_returns_do_not_drown_what_the_policy_remembers(algorithm: type[PPO], kind: str) -> None:
    def score(seed: int) -> float:
        one_limit: dict[str, Any] = {"grad_clip_by": "global_norm"} if algorithm is Shared else {}
        trained = algorithm(config(kind, env=Rich, seed=seed, **one_limit))
        return trained.fit(Stop(return_mean=950, env_steps=20_000)).return_mean / Rich.earns

    found = median_over_seeds(score)
    assert found > 0.85 if algorithm is PPO else found < 0.65


@pytest.mark.learning
@pytest.mark.mistake
def test_without_a_memory_it_is_guessed() -> None:
    def score(seed: int) -> float:
        algorithm = PPO(config(None, seed=seed))
        algorithm.fit(Stop(env_steps=6_000))
        return algorithm.evaluate(400, seed=1).return_mean

    assert 0.4 <= median_over_seeds(score) <= 0.6


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("connectors", [(), ("frame_stack:3", "prev_action_reward")])
@pytest.mark.parametrize(("max_seq_len", "burn_in"), [(2, 0), (32, 0), (8, 5)])
def test_unchanged_weights_say_what_they_said_while_acting(
    kind: str, connectors: Any, max_seq_len: int, burn_in: int
) -> None:
    """Every sequence begins in the state that it was acted in, wherever episodes were cut and whatever was before."""
    apart = []

    class Watched(PPO):
        def loss(self, module: Any, batch: Any) -> Any:
            apart.append((batch.forward(module).logp(batch.action) - batch.logp).abs().max().item())
            return super().loss(module, batch)

    given = {"max_seq_len": max_seq_len, "burn_in": burn_in, "env": "CartPole-v1"}
    algorithm = Watched(config(kind, connectors=connectors, lr=0.0, num_steps=103, num_envs=4, **given))
    with torch.no_grad():
        for parameter in algorithm.module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        result = algorithm.train()
        assert result.metrics["kl"] == pytest.approx(0, abs=1e-6)
        assert result.metrics["clip_fraction"] == 0
    assert max(apart) < 1e-5


def test_states_are_recorded_and_start_at_zero() -> None:
    algorithm = PPO(config("lstm", num_envs=4))
    exp = algorithm.runner.collect(num_steps=200)
    begins = exp.offsets[:-1][exp.segments.t_start == 0]
    assert len(begins) > 20
    for name in ("state_in/h", "state_in/c"):
        column = exp.steps[name]
        assert column.shape == (200, 32)
        assert not column[begins].any()
        assert (np.abs(np.delete(column, begins, 0)).sum(1) > 0).all()
    assert not any(name.startswith("state_out") for name in exp.steps)


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path: Any) -> None:
    given = config("gru", num_envs=4, num_steps=101)
    algorithm = PPO(given)
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path / "run")
    other = load(tmp_path / "run", env=Recall)
    results = [each.train() for each in (algorithm, other)]
    assert results[0].losses == results[1].losses
    assert results[0].metrics == results[1].metrics


def test_what_can_not_be_done_with_a_memory_is_said(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="`compile` is True, but the module is recurrent"):
        PPO(config("gru", compile=True))
    with pytest.raises(SettingsError, match="`sequences.max_len` is 0, but must be at least 1"):
        config("gru", max_seq_len=0)
    PPO(config(None)).record(tmp_path / "data", 3)
    algorithm = BC(BCConfig(data=str(tmp_path / "data"), network=NetworkConfig(recurrent="gru")))
    obs = np.zeros((4, *(algorithm.module.obs_space.shape or ())), np.float32)
    algorithm.learn_from([{"obs": obs, "action": np.zeros(4, np.int64)}])
    with pytest.raises(ModuleError, match="Network is recurrent, and can't learn from batches of single steps"):
        algorithm.train()
