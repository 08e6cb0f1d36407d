# SPDX-License-Identifier: Apache-2.0
"""What off-policy algorithms share: the replay and what connectors make of it, the count of updates, exact resume."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from preloaded import Preloaded
from torch import Tensor, nn

import etude
from etude import (
    DQN,
    SAC,
    TD3,
    ClipReward,
    Connector,
    DQNConfig,
    NetworkConfig,
    Result,
    SACConfig,
    SettingsError,
    TD3Config,
)
from etude.algorithms import Algorithm
from etude.algorithms.dqn import QModule
from etude.connectors import Inputs
from etude.errors import DataError
from etude.experience import Experience

CLOCKS = ("seconds", "times", "sample_steps_per_s", "resumed", "turn_ms")
NET = NetworkConfig(hidden=(16,), activation="relu", separate=False)
SMALL: dict[str, Any] = {
    "seed": 1,
    "network": NET,
    "num_envs": 3,
    "num_steps": 7,
    "learning_starts": 50,
    "batch_size": 32,
    "capacity": 300,
    "iteration_steps": 101,
    "updates_per_step": 0.3,
}


def dqn(**given: Any) -> DQN:
    return DQN(DQNConfig(**{"env": "CartPole-v1", **SMALL, **given}))


class Noted(DQN):
    """Keeps the losses and a figure of all gradient steps."""

    def setup(self) -> None:
        self.noted: list[tuple[float, float]] = []
        super().setup()

    def loss(self, module: Any, batch: Any) -> etude.Loss:
        found = super().loss(module, batch)
        self.noted.append((float(found.parts["td"].detach()), float(found.logged["q"])))
        return found


@pytest.mark.parametrize("num_steps", [16, 64])
def test_figures_are_means_over_gradient_steps(num_steps: int) -> None:
    given = {**SMALL, "num_envs": 1, "num_steps": num_steps, "iteration_steps": 100, "updates_per_step": 1.0}
    algorithm = Noted(DQNConfig(env="CartPole-v1", **given))
    result = algorithm.train()
    td, q = np.mean(algorithm.noted, axis=0)
    assert result.updates == len(algorithm.noted) == 50  # rounds of different length: the first and the last are short
    assert (result.losses["td"], result.metrics["q"]) == (pytest.approx(td, rel=1e-5), pytest.approx(q, rel=1e-5))


def sac(**given: Any) -> SAC:
    own = {"env": "Pendulum-v1", **SMALL, "network": dataclasses.replace(NET, separate=True)}
    return SAC(SACConfig(**{**own, **given}))


def td3(**given: Any) -> TD3:
    own = {"env": "Pendulum-v1", **SMALL, "network": dataclasses.replace(NET, separate=True)}
    return TD3(TD3Config(**{**own, **given}))


def facts(result: Result | dict[str, Any]) -> str:
    """What must be equal, bit for bit, as text (in which NaN equals NaN)."""
    row = result.to_dict() if isinstance(result, Result) else result
    return json.dumps({name: v for name, v in row.items() if name not in CLOCKS and not name.startswith("duration")})


MAKERS: dict[str, Any] = {
    "DQN": functools.partial(dqn, capacity=170, target_interval=7, epsilon=((0, 1.0), (700, 0.1))),
    "DQN, prioritized, n-step, dueling": functools.partial(
        dqn, prioritized=True, n_step=3, dueling=True, priority_beta=((0, 0.4), (900, 1.0))
    ),
    "DQN with connectors": functools.partial(
        dqn, connectors=("frame_stack:2", "clip_reward:0,high=0.5", "normalize_obs"), num_envs=1
    ),
    "DQN before it learns": functools.partial(dqn, learning_starts=250, capacity=1000),
    "DQN with a memory": functools.partial(
        dqn, network=NetworkConfig(hidden=(8,), recurrent="lstm", recurrent_size=4), connectors=("normalize_obs",)
    ),
    "SAC with a memory, at random at first": functools.partial(
        sac, network=NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4), learning_starts=250
    ),
    "SAC": functools.partial(sac, capacity=170, lr=((0, 1e-3), (900, 1e-4))),
    "SAC at random": functools.partial(sac, learning_starts=300),
    "DQN, noisy": functools.partial(dqn, noisy=True),
    "TD3": functools.partial(td3, policy_delay=3),
    "TD3 with a memory": functools.partial(td3, network=NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4)),
}

CHILD = """
import json, sys, etude
algorithm = etude.load(sys.argv[1])
rows = [algorithm.train().to_dict() for _ in range(int(sys.argv[2]))]
weights = [v.double().sum().item() for v in algorithm.module.state_dict().values()]
print(json.dumps([rows, weights]))
"""


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_goes_on_in_a_new_process_as_if_it_had_never_stopped(
    name: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    algorithm: Algorithm[Any] = MAKERS[name]()
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path)
    expected = [algorithm.train() for _ in range(2)]
    weights = [v.double().sum().item() for v in algorithm.module.state_dict().values()]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = preloaded.run(CHILD, str(tmp_path), "2", env=env)
    assert done.returncode == 0, done.stderr
    rows, other_weights = json.loads(done.stdout)
    assert [facts(row) for row in rows] == [facts(result) for result in expected]
    assert other_weights == weights
    assert expected[-1].updates > 0


def test_gradient_steps_are_as_many_as_env_steps_bring_once_learning_has_started() -> None:
    algorithm = dqn()
    counts = [algorithm.train() for _ in range(4)]
    assert [result.env_steps for result in counts] == [101, 202, 303, 404]
    assert [result.updates for result in counts] == [int(0.3 * (n - 50)) for n in (101, 202, 303, 404)]
    assert algorithm.replay.num_steps == 300
    assert counts[-1].metrics["replay_steps"] == 300


class Counts(gym.Env[NDArray[np.float32], Any]):
    """Shows how many steps were made and pays as much; an episode has 10."""

    observation_space = spaces.Box(0, 100, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.full(1, self.t, np.float32), float(self.t), self.t == 10, False, {}


def test_the_replay_holds_what_was_lived_through() -> None:
    algorithm = dqn(env=Counts, n_step=2, gamma=0.5)
    algorithm.train()
    batch = algorithm.replay.sample(500)
    t = batch["obs"][:, 0]
    latest = batch["discount"] == 0.5  # the second step is not there yet
    np.testing.assert_allclose(batch["reward"], t + 1 + np.where((t < 9) & ~latest, 0.5 * (t + 2), 0))
    at_end = (t >= 8) & ~latest
    np.testing.assert_array_equal(batch["terminated"], at_end)
    assert set(batch["discount"][at_end]) == {0}
    inside = ~at_end & (batch["discount"] == 0.25)
    np.testing.assert_array_equal(batch["next_obs"][inside, 0], t[inside] + 2)
    assert inside.mean() > 0.5
    assert set(algorithm.replay.sample(1)) == {
        "obs",
        "action",
        "reward",
        "next_obs",
        "terminated",
        "discount",
        "index",
    }


def test_connectors_before_one_that_learns_are_applied_once_and_see_whole_episodes() -> None:
    algorithm = dqn(env=Counts, n_step=1, connectors=("frame_stack:3", ClipReward(0, 5)))
    algorithm.train()
    batch = algorithm.replay.sample(200)
    t = batch["obs"][:, -1]
    stacked = np.stack([np.maximum(t - 2, 0), np.maximum(t - 1, 0), t], 1)
    np.testing.assert_array_equal(batch["obs"].reshape(200, -1), stacked)
    np.testing.assert_array_equal(batch["next_obs"].reshape(200, -1)[:, 1:], np.stack([t, t + 1], 1))
    np.testing.assert_array_equal(batch["reward"], np.minimum(t + 1, 5))


def test_one_that_learns_is_applied_to_batches_as_it_is_now() -> None:
    algorithm = dqn(env=Counts, n_step=1, connectors=("normalize_obs",))
    algorithm.train()
    assert set(algorithm.replay.sample(200)["obs"][:, 0]) == set(range(10))  # raw
    _, batch = algorithm.drawn("main")
    assert isinstance(batch, dict)
    normalize = algorithm.connectors.connectors[-1]
    mean, squares, count = (normalize.state_dict()["obs"][name] for name in ("mean", "squares", "count"))
    assert count == 101
    raw = batch["obs"][:, 0] * np.sqrt(squares / count) + mean
    np.testing.assert_allclose(raw, np.round(raw), atol=1e-4)
    going_on = ~batch["terminated"]
    after = batch["next_obs"][:, 0] * np.sqrt(squares / count) + mean
    np.testing.assert_allclose(after[going_on], raw[going_on] + 1, atol=1e-4)


class Clock(Connector):
    """Puts the time in the episode, and the number of the episode, in place of the observation's first number."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        return spaces.Box(-np.inf, np.inf, (2,), np.float32), action_space

    def start(self, num_slots: int) -> None:
        self.t = np.zeros(num_slots)

    def online(self, inputs: Inputs) -> Inputs:
        self.t[inputs.slots] = np.where(inputs.first, 0, self.t[inputs.slots] + 1)
        return inputs.with_obs({"obs": np.column_stack([inputs.obs["obs"], self.t[inputs.slots]]).astype(np.float32)})

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        obs = np.column_stack([exp.steps["obs"], exp.t()]).astype(np.float32)
        after = np.column_stack([exp.final_obs["obs"], exp.segments.t_start + exp.lengths]).astype(np.float32)
        return Experience({**exp.steps, "obs": obs}, exp.offsets, exp.segments, {"obs": after})

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = np.array(state["t"])


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_connector_behind_one_that_learns_knows_when_a_step_was_made(n_step: int, prioritized: bool) -> None:
    algorithm = dqn(env=Counts, n_step=n_step, prioritized=prioritized, connectors=(Still, Clock), capacity=70)
    for _ in range(2):
        algorithm.train()
    _, batch = algorithm.drawn("main")
    assert isinstance(batch, dict)
    np.testing.assert_array_equal(batch["obs"][:, 1], batch["obs"][:, 0])  # which counts steps, too
    np.testing.assert_array_equal(batch["next_obs"][:, 1], batch["next_obs"][:, 0])
    assert batch["obs"][:, 1].max() > n_step
    assert len(set(batch["next_obs"][:, 1] - batch["obs"][:, 1])) == n_step


class Still(Connector):
    """Learns, but changes nothing."""

    def update(self, exp: Experience) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Estimates(Connector):
    uses_module = True


def test_connectors_of_the_learner_that_use_the_module_are_refused() -> None:
    class Estimating(DQN):
        def learner_connectors(self) -> list[Any]:
            return [Estimates()]

    with pytest.raises(
        SettingsError, match=r"learner_connectors\(\) of Estimating has estimates, which uses the module"
    ):
        Estimating(DQNConfig(env=Counts, **SMALL))


class EndBonus(Connector):
    """A reward for the step that terminates."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        reward = np.array(exp.steps["reward"], np.float64)
        reward[exp.offsets[1:][exp.segments.terminated] - 1] -= 1000
        return exp.with_steps(reward=reward)


@pytest.mark.parametrize("connectors", [("normalize_obs", EndBonus), (EndBonus, "normalize_obs")])
def test_a_connector_behind_one_that_learns_knows_where_episodes_terminate(connectors: Any) -> None:
    algorithm = dqn(env=Counts, n_step=1, connectors=connectors)
    algorithm.train()
    _, batch = algorithm.drawn("main")
    assert isinstance(batch, dict)
    np.testing.assert_array_equal(batch["reward"] < 0, batch["terminated"])


class Adds(Connector):
    """A connector of the learner that adds a column, and one to the reward."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(bonus=np.ones(exp.num_steps), reward=np.asarray(exp.steps["reward"]) + 1)


class WithBonus(DQN):
    stored = (*DQN.stored, "logp")

    def learner_connectors(self) -> list[Any]:
        return [Adds()]


def test_what_the_learners_connectors_add_is_stored() -> None:
    algorithm = WithBonus(DQNConfig(env=Counts, **{**SMALL, "n_step": 1}))
    algorithm.train()
    batch = algorithm.replay.sample(100)
    np.testing.assert_array_equal(batch["reward"], batch["obs"][:, 0] + 2)
    assert set(batch["bonus"]) == {1}
    assert "logp" in batch


class Doubled(Connector):
    needs = ("reward",)

    def online(self, inputs: Inputs) -> Inputs:
        return inputs

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(reward=2 * exp.steps["reward"])


def test_rewards_that_are_summed_already_are_not_changed() -> None:
    with pytest.raises(SettingsError, match="sums of 2 rewards: set `n_step` to 1, or put before it"):
        dqn(env=Counts, n_step=2, connectors=("normalize_obs", "clip_reward"), learning_starts=10**6).train()
    from signalling import Signalling

    config = {**SMALL, "modules": ("speaker", "listener"), "modules_to_train": ("speaker",), "n_step": 2}
    fixed = {"listener": {"connectors": ("normalize_obs", "clip_reward")}}  # which does not learn
    assert DQN(DQNConfig(env=Signalling, **config, overrides=fixed)).train().env_steps > 0
    own = dqn(env=Counts, n_step=2, connectors=("normalize_obs", Doubled()))  # known only from what it does
    with pytest.raises(SettingsError, match="sums of 2 rewards"):
        own.train()
    assert dqn(env=Counts, n_step=1, connectors=("normalize_obs", "clip_reward")).train().updates > 0


def test_each_module_has_a_replay_and_learns_by_itself() -> None:
    from signalling import Signalling

    config = {**SMALL, "num_envs": 2, "learning_starts": 0, "updates_per_step": 1.0}
    algorithm = DQN(DQNConfig(env=Signalling, modules=("speaker", "listener"), **config))
    result = algorithm.train()
    assert sorted(algorithm.replays) == ["listener", "speaker"]
    assert all(replay.num_steps > 0 for replay in algorithm.replays.values())
    assert {"speaker/td", "listener/td"} <= set(result.losses)
    only = DQN(DQNConfig(env=Signalling, modules=("speaker", "listener"), modules_to_train=("speaker",), **config))
    assert set(only.train().losses) == {"speaker/td"}


def test_a_function_chooses_by_new_experience_which_modules_learn(tmp_path: Path) -> None:
    from signalling import Signalling

    config = {**SMALL, "num_envs": 2, "learning_starts": 0, "updates_per_step": 1.0}
    learns = lambda module_id, exp: module_id == "speaker" and exp.num_steps > 0  # noqa: E731
    algorithm = DQN(DQNConfig(env=Signalling, modules=("speaker", "listener"), modules_to_train=learns, **config))
    assert set(algorithm.train().losses) == {"speaker/td"}
    algorithm.save(tmp_path)
    again = etude.load(tmp_path, env=Signalling, modules_to_train=learns)
    assert again._learning == algorithm._learning == {"speaker"}
    algorithm.close()


def test_a_module_that_comes_later_has_a_replay_of_its_own(tmp_path: Path) -> None:
    from test_league import Duel, all_three, first_and_last

    config = {**SMALL, "num_envs": 2, "modules": ("first", "last"), "module_of": first_and_last}
    algorithm = DQN(DQNConfig(env=Duel, **config))
    algorithm.train()
    held = algorithm.replays["first"].num_steps
    algorithm.add_module("third", like="last", module_of=all_three)
    assert algorithm.replays["first"].num_steps == held > 0
    assert algorithm.replays["third"].num_steps == 0
    assert {"first/td", "last/td", "third/td"} <= set(algorithm.train().losses)
    algorithm.save(tmp_path)
    expected = algorithm.train()
    assert facts(etude.load(tmp_path, env=Duel, module_of=all_three).train()) == facts(expected)
    algorithm.remove_module("last", module_of=first_and_third)
    assert sorted(algorithm.replays) == ["first", "third"]
    assert set(algorithm.train().losses) == {"first/td", "third/td"}


def first_and_third(agent: Any, episode: Any) -> str:
    return "first" if agent == "left" else "third"


class Drops(nn.Module):
    """A net that drops out, in training only."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, obs: Tensor) -> etude.Output:
        return etude.Output(self.layers(obs))


def test_a_net_of_ones_own_drops_out_in_training_and_its_target_never() -> None:
    module = dqn(module=Drops).module
    assert isinstance(module, QModule)
    obs = torch.ones(50, 4)
    is_same = []
    for training in (True, False):
        module.train(training)
        is_same.append((torch.equal(module.values(obs), module.values(obs)), module.target.net.training))
        assert torch.equal(module.target_values(obs), module.target_values(obs))
    assert is_same == [(False, False), (True, False)]


def test_settings_inside_others_keep_the_rest_of_the_algorithms_default() -> None:
    from etude.settings import from_dict

    network = from_dict(SACConfig, {"network": {"hidden": [8]}}, owner="sac").network
    assert (network.hidden, network.activation, network.state_dependent_std) == ((8,), "relu", True)


def test_a_loaded_one_plays_as_it_would_have(tmp_path: Path) -> None:
    algorithm = dqn(epsilon=((0, 1.0), (101, 0.25)))
    algorithm.train()
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path)
    assert loaded.module.dist.epsilon == 0.25  # type: ignore[attr-defined]
    played = [one.evaluate(5, seed=3, explore=True).return_mean for one in (algorithm, loaded)]
    assert played[0] == played[1]


@pytest.mark.parametrize(("num_steps", "accumulate"), [(4, 3), (1, 2)])
def test_gradient_steps_are_counted_as_such_where_they_gather(num_steps: int, accumulate: int) -> None:
    calls: list[int] = []

    class Counting(DQN):
        def after_step(self, module: Any) -> None:
            calls.append(self.learner.only.updates)
            super().after_step(module)

    given = {"num_envs": 1, "num_steps": num_steps, "iteration_steps": 60, "learning_starts": 20, "batch_size": 8}
    given |= {"updates_per_step": 0.5, "accumulate": accumulate, "network": NET}
    algorithm = Counting(DQNConfig(env="CartPole-v1", seed=0, **given))
    result = algorithm.train()
    assert calls == list(range(1, 21))
    assert result.updates == 20
    assert algorithm.learner.only.steps_trained == 20 * 8 * accumulate


@pytest.mark.parametrize("connectors", [("frame_stack:2",), ("prev_action_reward",), ("normalize_obs",)])
def test_context_from_before_the_policy_acted(connectors: Any) -> None:
    algorithm = sac(connectors=connectors, learning_starts=30, num_steps=7, iteration_steps=60)
    assert algorithm.train().updates > 0


class Pair:
    """Two agents, each paid for saying what it sees."""

    possible_agents = ["left", "right"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng, self.t = np.random.default_rng(seed), 0
        return self.look(), {}

    def look(self) -> Any:
        self.seen = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}
        return {agent: np.eye(2, dtype=np.float32)[seen] for agent, seen in self.seen.items()}

    def step(self, actions: Any) -> Any:
        reward = {agent: float(action == self.seen[agent]) for agent, action in actions.items()}
        self.t += 1
        return self.look(), reward, {"__all__": self.t == 8}, {}, {}


def test_settings_of_single_modules_hold_off_policy_too() -> None:
    seen: dict[int, float] = {}

    class Looking(DQN):
        def loss(self, module: Any, batch: Any) -> Any:
            seen[id(module)] = self.config.gamma
            assert (batch["discount"][~batch["terminated"]] <= self.config.gamma + 1e-6).all()
            return super().loss(module, batch)

    overrides = {"left": {"gamma": 0.5, "n_step": 1}}
    given = {"num_envs": 1, "learning_starts": 0, "batch_size": 4, "iteration_steps": 40, "network": NET}
    algorithm = Looking(DQNConfig(env=Pair, modules=("left", "right"), overrides=overrides, seed=0, **given))
    algorithm.train()
    assert {name: seen[id(s.module)] for name, s in algorithm.policies.items()} == {"left": 0.5, "right": 0.99}
    assert (algorithm.replays["left"].gamma, algorithm.replays["left"].n_step) == (0.5, 1)


def test_learning_rates_follow_env_steps_however_many_are_between_results() -> None:
    def rates(iteration_steps: int) -> list[float]:
        class Noting(DQN):
            def loss(self, module: Any, batch: Any) -> Any:
                found.append(self.learner.only._optim.lr["all"])
                return super().loss(module, batch)

        found: list[float] = []
        lr = ((0, 0.0), (100, 1e-3), (200, 0.0))
        config = DQNConfig(env="CartPole-v1", seed=0, lr=lr, iteration_steps=iteration_steps, num_steps=10)
        algorithm = Noting(dataclasses.replace(config, batch_size=8, learning_starts=0, updates_per_step=0.1))
        while algorithm.env_steps < 200:
            algorithm.train()
        algorithm.close()
        return found

    assert max(rates(200)) > 8e-4
    assert rates(200) == rates(20)


class Mirrored(Connector):
    """Adds a mirrored copy of each segment."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        ids = np.array([f"{episode}{self.suffix}" for episode in exp.segments.episode_id], object)
        mirrored = Experience(
            {**exp.steps, "obs": -exp.steps["obs"]}, exp.offsets, exp.segments, {"obs": -exp.final_obs["obs"]}
        )
        return Experience.concat([exp, mirrored.with_segments(episode_id=ids)])


@pytest.mark.parametrize("suffix", ["", "-mirrored"])
def test_copies_of_steps_are_refused_unless_they_are_of_other_episodes(suffix: str) -> None:
    class WithCopies(DQN):
        def learner_connectors(self) -> list[Connector]:
            return [Mirrored(suffix), *super().learner_connectors()]

    algorithm = WithCopies(dqn(learning_starts=32, n_step=1).config)
    if not suffix:
        with pytest.raises(DataError, match="return steps of episode .* twice, with other values. Give changed"):
            algorithm.train()
        return
    algorithm.train()
    batch = algorithm.replay.sample(256)
    followed = batch["discount"] > 0
    # positions change little in a step, so that a next observation of the other copy would have another sign
    moved = np.abs(batch["obs"][:, 0] - batch["next_obs"][:, 0])
    assert followed.any()
    assert moved[followed].max() < 0.1
    assert algorithm.replay.num_steps == 2 * algorithm.env_steps


class Relabels(Connector):
    """Puts a changed copy of each finished segment before it."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        done = exp.select(exp.segments.terminated)
        return Experience.concat([done.with_steps(obs=-done.steps["obs"]), exp])


def test_changed_copies_of_finished_segments_are_refused() -> None:
    class WithCopies(DQN):
        def learner_connectors(self) -> list[Connector]:
            return [Relabels(), *super().learner_connectors()]

    with pytest.raises(DataError, match="return steps of episode .* twice, with other values"):
        WithCopies(dqn(learning_starts=32, n_step=1).config).train()


class Repeated(Connector):
    """Gives each segment twice, and cut with context: copies that a replay may hold."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return Experience.concat([exp.cut(4, lookback=2), exp])


def test_copies_of_unchanged_steps_are_not_refused() -> None:
    class WithCopies(DQN):
        def learner_connectors(self) -> list[Connector]:
            return [Repeated(), *super().learner_connectors()]

    algorithm = WithCopies(dqn(learning_starts=32, n_step=1).config)
    algorithm.train()
    assert algorithm.replay.num_steps == 2 * algorithm.env_steps
    batch = algorithm.replay.sample(256)
    assert np.abs(batch["obs"][:, 0] - batch["next_obs"][:, 0])[batch["discount"] > 0].max() < 0.1
