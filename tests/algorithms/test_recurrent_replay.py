# SPDX-License-Identifier: Apache-2.0
"""DQN and SAC with a memory: what a loss is given of sequences, against whole episodes walked through step by step."""

import copy
import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from over_seeds import median_over_seeds, mistaken

import etude
from etude import DQN, SAC, DQNConfig, NetworkConfig, Output, SACConfig, SettingsError, Stop
from etude.algorithms.off_policy import with_n_step_returns
from etude.algorithms.sac import SoftModule
from etude.errors import CheckpointError
from etude.experience import Experience, Segments
from etude.experience.replay import without_blind
from etude.learners import Batch, Loss
from etude.modules import Module

LENGTH = 13


class Told(gym.Env[Any, Any]):
    """Episodes of 13 steps whose observations all follow from the number that the first one shows."""

    observation_space = spaces.Box(-10, 10, (3,))

    def __init__(self, box: bool = False) -> None:
        self.action_space = spaces.Box(-1, 1, (1,)) if box else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.x = 0, float(self.np_random.uniform(1, 2))
        return shown(self.x, 0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return shown(self.x, self.t), self.x + self.t, self.t == LENGTH, False, {}


def shown(x: float, t: int) -> Any:
    return np.array([x, t, np.sin(7 * x + 3 * t)], np.float32)


def network(kind: Any, **given: Any) -> NetworkConfig:
    return NetworkConfig(**{"hidden": (8,), "recurrent": kind, "recurrent_size": 5, **given})


SHARED: dict[str, Any] = {
    "seed": 1,
    "num_envs": 3,
    "num_steps": 7,
    "learning_starts": 60,
    "iteration_steps": 150,
    "batch_size": 40,
    "max_seq_len": 4,
    "updates_per_step": 0.14,
    "capacity": 120,
    "n_step": 3,
    "gamma": 0.9,
    "lr": 0.0,
}


def whole(x: torch.Tensor) -> torch.Tensor:
    """``[n, 14, 3]``: the whole episodes that begin with ``x`` ``[n]``."""
    return torch.from_numpy(np.array([[shown(float(one), t) for t in range(LENGTH + 1)] for one in x.double()]))


def moved(module: Module) -> None:
    """Let target networks differ from what they follow, and no weight be zero."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draws)


def check(batch: Batch, said: torch.Tensor, later: torch.Tensor, expected: torch.Tensor, next_: torch.Tensor) -> None:
    """What was said of rows and of what followed them is what was expected of their steps of whole episodes."""
    t, k = batch.obs[:, 1].long(), batch["steps_ahead"]
    rows = torch.arange(len(t))
    torch.testing.assert_close(said, expected[rows, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(later, next_[rows, t + k], rtol=1e-4, atol=1e-5)


def check_rewards(batch: Batch) -> None:
    x, t, k = batch.obs[:, 0], batch.obs[:, 1], batch["steps_ahead"]
    assert set(k.tolist()) == {1, 2, 3}
    sums = sum(torch.where(i < k, 0.9**i * (x + t + i + 1), 0.0) for i in range(3))
    torch.testing.assert_close(batch.reward, sums)
    ends = t + k == LENGTH
    torch.testing.assert_close(batch.discount, torch.where(ends, 0.0, 0.9**k))


class Watched(DQN):
    """DQN that compares what a loss can ask for with whole episodes."""

    rows: list[tuple[int, int]]

    def loss(self, module: Any, batch: Batch) -> Loss:
        with torch.no_grad():
            episodes = whole(batch.obs[:, 0])
            for net in (module, module.target):
                expected = net(episodes).dist_inputs
                said, later = batch.forward(net).dist_inputs, batch.forward_next(net).dist_inputs
                assert said is not None
                assert later is not None
                check(batch, said, later, expected, expected)
        check_rewards(batch)
        self.rows += [(round(float(x) * 1e6), int(t)) for x, t, _ in batch.obs]
        return super().loss(module, batch)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("start", "burn_in"), [("stored", 0), ("stored", 3), ("zeros", LENGTH)])
def test_dqn_is_asked_about_steps_in_the_states_that_episodes_lead_to(kind: str, start: Any, burn_in: int) -> None:
    """Weights stand still, so that stored states are those of the net; other weights need the whole burn-in."""
    given = {"burn_in": burn_in, "sequence_start": start, "network": network(kind, separate=False)}
    capacity = 120 if start == "stored" else 1000  # the first steps of an episode may be gone, or not
    algorithm = Watched(DQNConfig(env=Told, **{**SHARED, **given, "capacity": capacity}))
    algorithm.rows = []
    moved(algorithm.module.net)
    if start == "zeros":
        moved(algorithm.module.target)
    else:
        algorithm.module.follower.follow(1.0)
    for _ in range(2):
        result = algorithm.train()
    assert result.updates > 30
    assert {t for _, t in algorithm.rows} == set(range(LENGTH))
    names = {name for name in algorithm.replay.sample(1) if name.startswith("state_in")}
    assert names == ({f"state_in/{name}" for name in algorithm.module.initial_state()} if start == "stored" else set())


class WatchedSAC(SAC):
    count = 0

    def loss(self, module: Any, batch: Batch) -> Loss:
        with torch.no_grad():
            episodes = whole(batch.obs[:, 0])
            expected = module(episodes).dist_inputs
            said, later = batch.forward(module).dist_inputs, batch.forward_next(module).dist_inputs
            assert said is not None
            assert later is not None
            check(batch, said, later, expected, expected)
            for critic in (module.critic, module.target_critic):
                encoded, _ = critic.encode({"obs": episodes})
                check(batch, batch.encode(critic), batch.encode_next(critic), encoded, encoded)
        check_rewards(batch)
        self.count += 1
        return super().loss(module, batch)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_sac_is_asked_likewise_and_its_critics_have_a_memory_of_their_own(kind: str) -> None:
    config = SACConfig(
        env=lambda: Told(box=True), **{**SHARED, "capacity": 1000, "burn_in": LENGTH, "network": network(kind)}
    )
    algorithm = WatchedSAC(config)
    moved(algorithm.module)
    for _ in range(2):
        algorithm.train()
    assert algorithm.count > 30
    learned = {name for name, p in algorithm.module.named_parameters() if p.requires_grad and "memor" in name}
    assert {name.split(".")[0] for name in learned} == {"net", "critic"}


def test_without_a_burn_in_that_long_zeros_are_another_state() -> None:
    """The check above notices it."""
    given = {"burn_in": 2, "sequence_start": "zeros", "network": network("lstm", separate=False)}
    algorithm = Watched(DQNConfig(env=Told, **{**SHARED, **given}))
    algorithm.rows = []
    moved(algorithm.module)
    with pytest.raises(AssertionError, match="not close"):
        algorithm.train()


class Torn(Told):
    """Ends now and then for a reason that its observations do not show."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self.t == 5 and self.x > 1.5, info


def test_a_truncated_episode_is_bootstrapped_from() -> None:
    discounts: dict[bool, set[float]] = {False: set(), True: set()}

    class Noting(DQN):
        def loss(self, module: Any, batch: Batch) -> Loss:
            last = batch.obs[:, 1] + batch["steps_ahead"]
            for end in (5, LENGTH):
                rows = (last == end) & (batch["steps_ahead"] == 1)
                discounts[end == 5].update(round(d, 3) for d in batch.discount[rows].tolist())
            return super().loss(module, batch)

    algorithm = Noting(DQNConfig(env=Torn, **{**SHARED, "network": network("gru", separate=False)}))
    for _ in range(2):
        algorithm.train()
    assert discounts == {False: {0.0}, True: {0.9}}


def test_a_last_step_that_nothing_is_known_to_follow_is_left_out() -> None:
    """As when an env was lost: the observation in such a step is what follows those before it."""
    lengths, blind = [6, 1, 4], [True, True, False]
    obs = np.concatenate([[shown(1.0 + i, t) for t in range(n)] for i, n in enumerate(lengths)])
    final = np.array([shown(9.0, 0), shown(9.0, 0), shown(3.0, 4)])
    segments = Segments.of(3, episode_id=["a", "b", "c"], lookback=np.array([2, 0, 1]))
    segments = segments.replace(has_final_obs=~np.array(blind))
    steps = {"obs": obs, "reward": np.ones(len(obs))}
    exp = without_blind(Experience(steps, np.cumsum([0, *lengths]), segments, {"obs": final}))
    exp = with_n_step_returns(exp, 2, 0.5)
    assert exp.lengths.tolist() == [5, 4]
    assert exp.segments.lookback.tolist() == [2, 1]
    assert exp.steps["obs"].tolist() == np.concatenate([obs[:5], obs[7:]]).tolist()
    assert exp.final_obs["obs"].tolist() == [obs[5].tolist(), shown(3.0, 4).tolist()]
    assert exp.steps["steps_ahead"].tolist() == [2, 2, 2, 2, 1, 2, 2, 2, 1]
    assert exp.steps["reward"].tolist() == [1.5, 1.5, 1.5, 1.5, 1.0, 1.5, 1.5, 1.5, 1.0]
    assert exp.steps["discount"].tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.25, 0.25, 0.25, 0.5]


def test_what_does_not_go_together_is_said() -> None:
    with pytest.raises(SettingsError, match="`replay.prioritized` is set, but Network is recurrent"):
        DQN(DQNConfig(env="CartPole-v1", prioritized=True, network=NetworkConfig(recurrent="gru")))
    with pytest.raises(SettingsError, match="`sequences.max_len` is 0"):
        DQNConfig(env="CartPole-v1", max_seq_len=0)

    class Own(torch.nn.Module):
        def __init__(self, obs_space: Any, action_space: Any) -> None:
            super().__init__()
            self.gru, self.out = torch.nn.GRU(3, 4, batch_first=True), torch.nn.Linear(4, 2)

        def initial_state(self) -> dict[str, torch.Tensor]:
            return {"h": torch.zeros(4)}

        def forward(self, obs: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
            hidden, last = self.gru(obs, state["h"].unsqueeze(0))
            return Output(self.out(hidden), state={"h": last[0]})

    with pytest.raises(SettingsError, match="policy of SAC would be recurrent, but not the critics"):
        SAC(SACConfig(env="Pendulum-v1", module=Own))
    SAC(SACConfig(env="Pendulum-v1", module=Own, network=NetworkConfig(recurrent="gru", hidden=(8,)))).train()


class Recall(gym.Env[Any, Any]):
    """A cue in the first step; 3 to 6 steps later a signal: then acting as the cue said earns most, and all ends.

    Without a memory nothing is better than a guess: 0.5 for two choices, 0 for a number.
    """

    observation_space = spaces.Box(0, 1, (3,), np.float32)

    def __init__(self, box: bool) -> None:
        self.action_space = spaces.Box(-1, 1, (1,)) if box else spaces.Discrete(2)
        self.box = box

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.cue, self.left = int(self.np_random.integers(2)), int(self.np_random.integers(3, 7))
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action: Any) -> Any:
        if not self.left:
            earned = 1 - abs(float(action[0]) + 1 - 2 * self.cue) if self.box else float(action == self.cue)
            return np.zeros(3, np.float32), earned, True, False, {}
        self.left -= 1
        return np.float32([0, 0, self.left == 0]), 0.0, False, False, {}


def earned(algorithm: type[DQN] | type[SAC], kind: Any, seed: int) -> float:
    """What is earned after 5,000 steps, or when nearly all is learned."""
    given: dict[str, Any] = {"seed": seed, "lr": 3e-3, "gamma": 1.0, "max_seq_len": 8, "window": 100, "num_envs": 4}
    given |= {"batch_size": 128, "updates_per_step": 0.25, "learning_starts": 500, "iteration_steps": 500}
    net = NetworkConfig(hidden=(32,), activation="relu", recurrent=kind, recurrent_size=32)
    trained: DQN | SAC
    if algorithm is DQN:
        trained = DQN(DQNConfig(env=lambda: Recall(False), network=net, epsilon=((0, 1.0), (3000, 0.05)), **given))
    else:
        trained = SAC(SACConfig(env=lambda: Recall(True), network=net, tau=0.02, **given))
    trained.fit(Stop(return_mean=0.9, env_steps=5_000))
    return trained.evaluate(100, seed=1).return_mean


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "kind"), [(DQN, "lstm"), (SAC, "gru"), mistaken(DQN, None), mistaken(SAC, None)])
def test_with_a_memory_the_cue_is_recalled(algorithm: Any, kind: Any) -> None:
    found = median_over_seeds(lambda seed: earned(algorithm, kind, seed))
    most = 0.65 if algorithm is DQN else 0.3
    assert found > 0.8 if kind else found < most


class Drift(gym.Env[Any, Any]):
    """A point that drifts a little in each step; naming how fast, from the second step on, earns up to 10 in all.

    Two observations tell it; one tells next to nothing, with which 5 can be earned.
    """

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, (self.x, self.speed) = 0, self.np_random.uniform(-1, 1, 2)
        return np.float32([self.x]), {}

    def step(self, action: Any) -> Any:
        earned = 1 - abs(float(action[0]) - self.speed) if self.t else 0.0
        self.t += 1
        self.x += 0.05 * self.speed
        return np.float32([self.x]), earned, False, self.t == 11, {}


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_few_numbers_move_all_memories_of_sac(kind: str) -> None:
    config = SACConfig(env=lambda: Drift(), network=NetworkConfig(hidden=(8,), recurrent=kind, recurrent_size=256))
    module = SAC(config).module
    memories = {name: part for name, part in module.named_modules() if isinstance(part, torch.nn.LSTM | torch.nn.GRU)}
    assert {name.split(".")[0] for name in memories} == {"net", "critic", "target_critic"}
    seen = torch.linspace(-2, 2, 100).reshape(100, 1, 1)
    for memory in memories.values():
        assert memory(seen)[0].std() > 0.1  # it was 0.01
    given = SAC(SACConfig(env=lambda: Drift(), network=config.network, module=copy.deepcopy(module.net)))
    assert all(torch.equal(a, b) for a, b in zip(given.module.net.parameters(), module.net.parameters(), strict=True))


class Timid(SAC):
    """The mistake of weights that share their scale between all gates: two inputs hardly move a memory."""

    def make_module(self, given: Any, obs_space: Any, action_space: Any) -> Module:
        module = super().make_module(given, obs_space, action_space)
        assert isinstance(module, SoftModule)
        for part in module.modules():
            if isinstance(part, torch.nn.LSTM):
                for weight in part.all_weights[0][:2]:
                    torch.nn.init.orthogonal_(weight)
        module.follower.follow(1.0)
        return module


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "kind"), [(SAC, "lstm"), mistaken(Timid, "lstm"), mistaken(SAC, None)])
def test_small_differences_between_observations_are_learned_of(algorithm: type[SAC], kind: Any) -> None:
    """As with the velocities of Pendulum-v1 where they are hidden."""
    net = NetworkConfig(hidden=(32,), activation="relu", recurrent=kind, recurrent_size=32)
    given: dict[str, Any] = {"lr": 2e-3, "gamma": 0.5, "num_envs": 4, "batch_size": 96, "max_seq_len": 8, "burn_in": 2}
    given |= {"updates_per_step": 0.25, "learning_starts": 500, "iteration_steps": 500, "network": net}

    def score(seed: int) -> float:
        trained = algorithm(SACConfig(env=Drift, seed=seed, **given))
        trained.fit(Stop(env_steps=5_000))
        return trained.evaluate(50, seed=1).return_mean

    found = median_over_seeds(score)
    assert found > 6.5 if algorithm is SAC and kind else found < 6


@pytest.mark.parametrize("start", ["stored", "zeros"])
def test_a_replay_with_other_states_is_refused(start: Any, tmp_path: Path) -> None:
    other = "zeros" if start == "stored" else "stored"
    config = DQNConfig(env="CartPole-v1", network=NetworkConfig(recurrent="gru"), seed=0, iteration_steps=64)
    with closing(DQN(dataclasses.replace(config, sequence_start=start))) as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"`sequences.start` is '{other}', but the steps in the saved replay"):
        etude.load(tmp_path / "run", sequence_start=other)
    with closing(etude.load(tmp_path / "run")) as algorithm:
        algorithm.train()
