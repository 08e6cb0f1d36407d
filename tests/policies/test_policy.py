# SPDX-License-Identifier: Apache-2.0
"""Policies by hand: what `act` gives is what a runner does with the same module, connectors and observations."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformReward

import etude
from etude.connectors import Connector, FrameStack, Pipeline
from etude.errors import SettingsError, SpaceError
from etude.modules import make_module
from etude.modules.network import NetworkConfig
from etude.policies import Policy
from etude.spaces import NamedBox

KINDS: dict[str, Any] = {
    "plain": {},
    "normalized": {"connectors": ("normalize_obs",)},
    "stacked": {"connectors": ("normalize_obs", "frame_stack:3")},
    "previous": {"connectors": ("prev_action_reward",)},
    "recurrent": {"network": NetworkConfig(recurrent="lstm")},
    "all": {
        "connectors": ("prev_action_reward", "frame_stack:2"),
        "network": NetworkConfig(recurrent="gru"),
    },
}


def rewarded() -> gym.Env[Any, Any]:
    """CartPole whose rewards differ from step to step."""
    return TransformReward(gym.make("CartPole-v1"), lambda reward: float(reward) * 0.25)


def trained(kind: str, env: Any = rewarded, **settings: Any) -> etude.PPO:
    config: dict[str, Any] = {"num_envs": 2, "num_steps": 64, "epochs": 1, "seed": 5, **KINDS[kind], **settings}
    algorithm = etude.PPO(etude.PPOConfig(env=env, **config))
    algorithm.train()
    return algorithm


@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_as_a_runner_does(kind: str) -> None:
    with closing(trained(kind)) as ppo:
        runner = ppo.new_runner(None, 1, seed=7)
        exp = runner.collect(num_episodes=1, explore=False)
        runner.close()
        policy, state = ppo.policy, ppo.policy.initial_state()
        acted = []
        for obs, reward in zip(exp.steps["obs"], [0.0, *exp.steps["reward"][:-1]], strict=True):
            action, state = policy.act(obs, state, reward=reward)
            acted.append(action)
        assert exp.num_steps > 5
        np.testing.assert_array_equal(np.array(acted), exp.steps["action"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_acts_as_its_rows_do_and_rows_that_begin_forget(kind: str) -> None:
    with closing(trained(kind)) as ppo:
        policy, rng = ppo.policy, np.random.default_rng(0)
        obs, rewards = rng.normal(size=(8, 3, 4)).astype(np.float32), rng.normal(size=(8, 3))
        first = np.zeros((8, 3), bool)
        first[5, 1] = True
        state, singles = policy.initial_state(3), [policy.initial_state() for _ in range(3)]
        for t in range(8):
            actions, state = policy.act(obs[t], state, reward=rewards[t], first=first[t])
            for i in range(3):
                begun = policy.initial_state() if first[t, i] else singles[i]
                action, singles[i] = policy.act(obs[t, i], begun, reward=rewards[t, i])
                assert action == actions[i]


def test_a_state_is_not_written_to_and_a_runner_is_not_disturbed() -> None:
    with closing(trained("all")) as ppo, closing(trained("all")) as undisturbed:
        policy = ppo.policy
        state = policy.initial_state(2)
        obs, reward = np.ones((2, 4), np.float32), np.ones(2)
        _, state = policy.act(obs, state, reward=reward)
        again = [policy.act(obs, state, reward=reward) for _ in range(2)]
        for a, b in zip(_arrays(again[0][1]), _arrays(again[1][1]), strict=True):
            np.testing.assert_array_equal(a, b)
        assert ppo.train().losses == undisturbed.train().losses


def _arrays(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [array for part in tree.values() for array in _arrays(part)]
    return [np.asarray(tree)]


def test_drawn_actions_are_those_of_the_distribution() -> None:
    with closing(trained("plain")) as ppo:
        obs = np.zeros((20_000, 4), np.float32)
        drawn = ppo.policy.act(obs, explore=True, rng=np.random.default_rng(3))
        again = ppo.policy.act(obs, explore=True, rng=np.random.default_rng(3))
        np.testing.assert_array_equal(drawn, again)
        logits = ppo.module.actor(explore=False)
        logits.start(np.random.default_rng(0), 1)
        inputs = logits.step({"obs": obs[:1]})[1]["dist_inputs"][0].astype(np.float64)
        wanted = np.exp(inputs[1]) / np.exp(inputs).sum()
        assert abs(drawn.mean() - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / len(obs))


class Rooms(gym.Env[Any, Any]):
    """Nested observations and actions."""

    observation_space = spaces.Dict({"at": spaces.Discrete(5), "view": spaces.Box(0, 1, (2, 2), np.float32)})
    action_space = spaces.Dict({"go": spaces.Discrete(3), "push": spaces.Box(-2, 2, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return self._obs(), 1.0, False, False, {}

    def _obs(self) -> Any:
        return {"at": self.np_random.integers(5), "view": self.np_random.random((2, 2), np.float32)}


def test_nested_spaces_and_the_bounds_of_actions() -> None:
    env = gym.wrappers.TimeLimit(Rooms(), 10)
    with closing(trained("plain", lambda: gym.wrappers.TimeLimit(Rooms(), 10), connectors=("rescale_action",))) as ppo:
        obs, _ = env.reset(seed=0)
        for _ in range(5):
            action = ppo.policy.act(obs, explore=True, rng=np.random.default_rng(1))
            obs, *_ = env.step(ppo.policy.act(obs))
        batch = {"at": np.zeros(6, np.int64), "view": np.zeros((6, 2, 2), np.float32)}
        actions = ppo.policy.act(batch)
    assert env.action_space.contains(action)
    assert actions["go"].shape == (6,)
    assert actions["push"].shape == (6, 2)
    assert (np.abs(actions["push"]) <= 2).all()


def test_several_policies_each_by_its_id() -> None:
    config = etude.PPOConfig(env="CartPole-v1", modules=["a", "b"], module_of=lambda agent, episode: "a", num_steps=32)
    with closing(etude.PPO(config)) as ppo:
        assert list(ppo.policies) == ["a", "b"]
        assert ppo.policies["b"].act(np.zeros(4, np.float32)) in (0, 1)
        with pytest.raises(SettingsError, match=r"\.policies\[name\]"):
            _ = ppo.policy


def test_one_without_memory_needs_no_state_but_takes_one() -> None:
    with closing(trained("normalized")) as ppo:
        policy = ppo.policy
        assert policy.initial_state() == {}
        assert not policy.remembers
        obs = np.ones(4, np.float32)
        action, state = policy.act(obs, policy.initial_state())
        assert (action, state) == (policy.act(obs), {})
        with pytest.raises(SettingsError, match="this policy has no state, but was given one"):
            policy.act(obs, {"first": np.ones(1, bool)})


NAN = np.full(4, np.nan, np.float32)


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        (np.zeros(3, np.float32), r"`obs` has shape \(3,\), but in its space"),
        (np.zeros((2, 2, 4), np.float32), r"`obs` has shape \(2, 2, 4\)"),
        (np.zeros(4, complex), "`obs` is an array of dtype complex128"),
        ({"obs": 1}, "`obs` is a dict with obs, but must be numbers"),
        ("left", "`obs` is of type str, but must be numbers"),
        (None, "`obs` is None, but must be numbers"),
        ([[0, 0, 0, 0], [0, 0]], "`obs` is no array of numbers: its rows differ"),
        (NAN, "`obs` is not finite"),
        (np.stack([np.zeros(4), np.zeros(4), NAN]), "`obs` of row 2 is not finite"),
        (np.full(4, 1e300), "`obs` is not finite"),
    ],
)
def test_what_is_no_observation_is_told(obs: Any, said: str) -> None:
    policy = Policy(make_module(None, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)))
    with pytest.raises(SpaceError, match=said):
        policy.act(obs)


VIEW = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        ({"at": np.zeros(3, np.int64), "view": np.zeros((2, 2, 2), np.float32)}, "all of one length"),
        ({"at": 1}, "`obs/view` is missing: `obs` is a dict with at"),
        (VIEW, "`obs` is of type ndarray, but must be a dict with at, view"),
        ({"at": 5, "view": VIEW}, r"`obs/at` is outside its space Discrete\(5\): 5"),
        ({"at": np.array([0, 4, -1]), "view": np.stack([VIEW] * 3)}, r"`obs/at` of row 2 is outside .*: -1"),
        ({"at": 1.5, "view": VIEW}, "`obs/at` has dtype float64"),
        ({"at": 1, "view": VIEW + np.inf}, "`obs/view` is not finite"),
    ],
)
def test_parts_that_are_no_observation_are_told(obs: Any, said: str) -> None:
    policy = Policy(make_module(None, Rooms.observation_space, spaces.Discrete(2)))
    with pytest.raises(SpaceError, match=said):
        policy.act(obs)


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        (spaces.Discrete(3, start=-1), -1, -2),
        (spaces.MultiDiscrete([2, 3], start=[0, 5]), [1, 7], [1, 8]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [[1, 2], [3, 4]], [[1, 2], [4, 4]]),
        (spaces.MultiBinary(2), [1, 0], [2, 0]),
        (spaces.Box(0, 255, (2,), np.uint8), [255, 0], [256, 0]),
    ],
)
def test_numbers_outside_their_space_are_told(space: spaces.Space[Any], inside: Any, outside: Any) -> None:
    policy = Policy(make_module(None, space, spaces.Discrete(2)))
    assert policy.act(inside) in (0, 1)
    assert policy.act(np.array([inside, inside])).shape == (2,)
    with pytest.raises(SpaceError, match="`obs` (is|has a number) outside"):
        policy.act(outside)
    with pytest.raises(SpaceError, match="`obs` (of row 1 is|has a number) outside"):
        policy.act(np.array([inside, outside]))


def test_tuples_that_are_too_short_are_told_and_parts_that_are_not_needed_are_ignored() -> None:
    pair = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)])
    policy = Policy(make_module(None, pair, spaces.Discrete(2)))
    with pytest.raises(SpaceError, match="`obs` has 1 of the 2 parts"):
        policy.act((1,))
    with pytest.raises(SpaceError, match="`obs` is of type int, but must be a tuple of 2 parts"):
        policy.act(1)
    nested = Policy(make_module(None, spaces.Dict({"pair": pair}), spaces.Discrete(2)))
    with pytest.raises(SpaceError, match="`obs/pair` is None"):
        nested.act({"pair": None})
    rooms = Policy(make_module(None, Rooms.observation_space, spaces.Discrete(2)))
    assert rooms.act({"at": 1, "view": VIEW, "mission": "go left"}) == rooms.act({"at": 1, "view": VIEW})


def test_arguments_that_are_something_else_are_told() -> None:
    obs = np.zeros(4, np.float32)
    with closing(trained("recurrent")) as ppo, closing(trained("previous")) as previous:
        with pytest.raises(SettingsError, match=r"`rng` is 3.*numpy\.random\.default_rng\(3\)"):
            ppo.policy.act(obs, ppo.policy.initial_state(), rng=3)  # type: ignore[arg-type]
        for wrong in (-1, 2.5, "two"):
            with pytest.raises(SettingsError, match="`num_rows` is .* must be a number of rows"):
                ppo.policy.initial_state(wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="`first` is .* one for each of 1 rows"):
            ppo.policy.act(obs, ppo.policy.initial_state(), first=[True, False])
        with pytest.raises(SettingsError, match="`reward` is 'much'"):
            previous.policy.act(obs, previous.policy.initial_state(), reward="much")
        with pytest.raises(SettingsError, match="`first` is 'no'"):
            ppo.policy.act(obs, ppo.policy.initial_state(), first="no")
        _, state = previous.policy.act(obs, previous.policy.initial_state())
        for wrong in (np.nan, [np.inf], 1e300):
            with pytest.raises(SettingsError, match="`reward` is .*, but must be finite"):
                previous.policy.act(obs, state, reward=wrong)
        assert previous.policy.act(obs, previous.policy.initial_state(), reward=np.nan)[0] in (0, 1)  # not looked at


def test_arguments_of_other_libraries_are_told() -> None:
    policy, obs = Policy(make_module(None, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2))), np.zeros(4)
    with pytest.raises(SettingsError, match=r"`state` is True, .*policy\.initial_state\(\).* explore=True samples one"):
        policy.act(obs, True)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"unexpected keyword argument 'deterministic'.* explore=True samples one"):
        policy.act(obs, deterministic=True)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"Policy\.act: .*'mask'. It takes obs, state, reward, first, explore"):
        policy.act(obs, mask=None)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"Policy\.export: missing .*'path'. It takes path\."):
        policy.export()  # type: ignore[call-arg]


def test_what_is_no_module_is_told() -> None:
    for wrong in ("runs/ppo", 3, None):
        with pytest.raises(SettingsError, match=r"takes a module, not .*etude\.load_policy"):
            Policy(wrong)  # type: ignore[arg-type]


def test_whole_numbers_without_bounds_are_told_in_words() -> None:
    limits = np.iinfo(np.int64)
    policy = Policy(make_module(None, spaces.Box(limits.min, limits.max, (2,), np.int64), spaces.Discrete(2)))
    for wrong in (np.zeros(3, np.int64), "up", None):
        with pytest.raises(SpaceError, match="no bound") as caught:
            policy.act(wrong)
        assert "9223372036854775" not in str(caught.value)


def test_names_of_other_libraries_lead_to_act() -> None:
    policy = Policy(make_module(None, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)))
    with pytest.raises(AttributeError, match=r"Policy has no `predict`. policy\.act\(obs\)"):
        _ = policy.predict  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        _ = policy.walk  # type: ignore[attr-defined]
    assert not hasattr(policy, "get_action")


def test_what_is_missing_of_the_steps_before_is_told() -> None:
    with closing(trained("recurrent")) as ppo, closing(trained("previous")) as previous:
        obs = np.zeros((2, 4), np.float32)
        with pytest.raises(SettingsError, match=r"policy\.initial_state\(2\)"):
            ppo.policy.act(obs)
        with pytest.raises(SettingsError, match="pass that of 2 rows"):
            ppo.policy.act(obs, ppo.policy.initial_state())
        state = previous.policy.initial_state(2)
        _, state = previous.policy.act(obs, state)
        with pytest.raises(SettingsError, match=r"prev_action_reward needs the last reward.*reward=\.\.\."):
            previous.policy.act(obs, state)


def test_states_of_other_policies_are_told() -> None:
    obs = np.zeros(4, np.float32)
    with (
        closing(trained("recurrent")) as lstm,
        closing(trained("all")) as gru,
        closing(trained("previous")) as other,
    ):
        start = {kind: algorithm.policy.initial_state() for kind, algorithm in (("lstm", lstm), ("gru", gru))}
        memory = start["lstm"]["memory"]
        lists = {name: array.tolist() for name, array in memory.items()}
        doubles = {name: array.astype(np.float64) for name, array in memory.items()}
        short = {name: array[:, :3] for name, array in memory.items()}
        for wrong in (
            {"first": [True]},
            {"first": np.array([True])},
            {name: part for name, part in start["lstm"].items() if name != "connectors"},
            start["gru"],
            {**start["lstm"], "first": [True]},
            {**start["lstm"], "memory": lists},
            {**start["lstm"], "memory": doubles},
            {**start["lstm"], "memory": short},
        ):
            with pytest.raises(SettingsError, match=r"`state` is not one of this policy: its `.*initial_state"):
                lstm.policy.act(obs, wrong)
        with pytest.raises(SettingsError, match="its `action.* has another form"):
            other.policy.act(obs, start["lstm"])


class Counts(Connector):
    """A connector of a user's own that keeps something of each slot: steps since the episode began."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        return spaces.Box(-np.inf, np.inf, (obs_space.shape[0] + 1,), np.float32), action_space

    def start(self, num_slots: int) -> None:
        self.steps = np.zeros(num_slots)

    def online(self, inputs: Any) -> Any:
        self.steps[inputs.slots] = np.where(inputs.first, 0, self.steps[inputs.slots] + 1)
        count = self.steps[inputs.slots][:, None].astype(np.float32)
        return inputs.with_obs({"obs": np.concatenate([inputs.obs["obs"], count], axis=1)})

    def state_dict(self) -> Any:
        return {"steps": self.steps.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.steps = np.array(state["steps"])


def test_connectors_of_ones_own_that_keep_something_of_each_slot() -> None:
    pipeline = Pipeline([Counts()])
    box = spaces.Box(-1, 1, (2,), np.float32)
    seen, chosen = pipeline.spaces(box, spaces.Discrete(2))
    policy = Policy(make_module(None, seen, chosen), pipeline, obs_space=box)
    assert policy.remembers
    _, state = policy.act(np.zeros(2, np.float32), policy.initial_state())
    for t in range(1, 4):
        _, state = policy.act(np.zeros(2, np.float32), state)
        assert state["connectors"]["0"]["steps"].tolist() == [t]


class Smooth(Connector):
    """A connector of a user's own whose `act` changes what it keeps: actions that move slowly."""

    def start(self, num_slots: int) -> None:
        self.last, self.slots = np.zeros((num_slots, 1), np.float32), np.arange(num_slots)

    def online(self, inputs: Any) -> Any:
        self.slots = inputs.slots
        self.last[inputs.slots[inputs.first]] = 0
        return inputs

    def act(self, action: Any) -> Any:
        self.last[self.slots] = 0.75 * self.last[self.slots] + 0.25 * action["action"]
        return {"action": self.last[self.slots].copy()}

    def state_dict(self) -> Any:
        return {"last": self.last.copy(), "slots": self.slots.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.last, self.slots = np.array(state["last"]), np.array(state["slots"])


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_connector_keeps_when_it_acts_is_part_of_the_state(nested: bool, tmp_path: Path) -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    pipeline = Pipeline([Pipeline([Smooth()]), "frame_stack:2"] if nested else ["frame_stack:2", Smooth()])
    module = make_module(None, *pipeline.spaces(box, spaces.Box(-1, 1, (1,), np.float32)))
    policy = Policy(module, pipeline, obs_space=box, action_space=spaces.Box(-1, 1, (1,), np.float32))
    pipeline.start(2)
    before = pipeline.state_dict()
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 3, 2)).astype(np.float32)
    state, wanted = policy.initial_state(3), np.zeros((3, 1))
    for t in range(5):
        action, after = policy.act(obs[t], state)
        np.testing.assert_array_equal(policy.act(obs[t], state)[0], action)
        stacked = np.concatenate([obs[max(t - 1, 0)], obs[t]], axis=1)
        with torch.no_grad():
            chosen = module(torch.from_numpy(stacked)).dist_inputs[:, :1].numpy()
        wanted = 0.75 * wanted + 0.25 * chosen
        np.testing.assert_allclose(action, wanted, atol=1e-6)
        state = after
    assert repr(pipeline.state_dict()) == repr(before)
    with pytest.raises(SettingsError, match="`smooth` can't be exported"):
        policy.export(tmp_path / "policy.pt2")


def test_tensors_give_tensors_as_arrays_give_arrays() -> None:
    with closing(trained("plain", lambda: gym.wrappers.TimeLimit(Rooms(), 10))) as ppo:
        batch = {"at": np.arange(5), "view": np.random.default_rng(0).random((5, 2, 2), np.float32)}
        tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
        wanted, found = ppo.policy.act(batch), ppo.policy.act(tensors)
        for name in ("go", "push"):
            assert isinstance(found[name], torch.Tensor)
            np.testing.assert_array_equal(found[name].numpy(), wanted[name])
        one = ppo.policy.act({name: tensor[0] for name, tensor in tensors.items()})
    assert one["go"].shape == ()
    assert one["go"] == found["go"][0]
    assert one["push"].dtype == torch.float32


def test_tensors_without_a_counterpart_in_numpy() -> None:
    policy = Policy(make_module(None, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)))
    half = torch.tensor([0.5, -0.25, 1.0, 0.0], dtype=torch.bfloat16)
    assert policy.act(half) == policy.act(half.float())
    for wrong in (torch.zeros(4).to_sparse(), torch.zeros(4, device="meta")):
        with pytest.raises(SpaceError, match="`obs` can't be read as an array of numbers"):
            policy.act(wrong)
    with pytest.raises(SpaceError, match="`obs` can't be read as an array of numbers: .*requires grad"):
        policy.act([torch.zeros(4, requires_grad=True)])


def test_an_empty_batch_gives_no_actions() -> None:
    policy = Policy(make_module(None, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)))
    for rows in (0, 3, 0, 1, 0):
        for explore in (False, True):
            assert policy.act(np.zeros((rows, 4), np.float32), explore=explore).shape == (rows,)


def test_a_policy_explores_by_random_numbers_of_its_own() -> None:
    with closing(trained("plain")) as ppo:
        drawn = [int(ppo.policy.act(np.zeros(4, np.float32), explore=True)) for _ in range(60)]
    assert set(drawn) == {0, 1}


@pytest.mark.parametrize("connectors", [("normalize_reward",), ("clip_reward", "normalize_obs")])
def test_scaling_rewards_makes_no_memory(connectors: tuple[str, ...]) -> None:
    with closing(trained("plain", connectors=connectors)) as ppo:
        assert not ppo.policy.remembers
        assert ppo.policy.act(np.zeros(4, np.float32)) in (0, 1)


def test_rewards_of_the_last_step_are_seen_as_a_runner_shows_them() -> None:
    connectors = ("normalize_reward", "prev_action_reward", "history:3")
    with closing(trained("plain", connectors=connectors)) as ppo:
        runner = ppo.new_runner(None, 1, seed=3)
        exp = runner.collect(num_episodes=1, explore=False)
        runner.close()
        state, acted = ppo.policy.initial_state(), []
        for obs, reward in zip(exp.steps["obs"], [0.0, *exp.steps["reward"][:-1]], strict=True):
            action, state = ppo.policy.act(obs, state, reward=reward)
            acted.append(action)
    np.testing.assert_array_equal(np.array(acted), exp.steps["action"])


class Doubled(FrameStack):
    """Inherits a `step`, which is not what its `online` does."""

    def online(self, inputs: Any) -> Any:
        return super().online(inputs.with_obs({name: column * 2 for name, column in inputs.obs.items()}))


def test_a_connector_with_another_online_does_not_act_by_an_inherited_step() -> None:
    pipeline, box = Pipeline([Doubled(2)]), spaces.Box(-1, 1, (2,), np.float32)
    seen, chosen = pipeline.spaces(box, spaces.Discrete(2))
    policy = Policy(make_module(None, seen, chosen), pipeline, obs_space=box)
    _, state = policy.act(np.ones(2, np.float32), policy.initial_state())
    assert state["connectors"]["0"]["frames"]["obs"].tolist() == [[2, 2, 2, 2]]


@pytest.mark.parametrize("connectors", [[], [FrameStack(2)]])
def test_several_threads_act_with_one_policy(connectors: list[Any]) -> None:
    pipeline = Pipeline(connectors)
    space = spaces.Box(-1, 1, (4,), np.float32)
    module = make_module(None, *pipeline.spaces(space, spaces.Discrete(5)), NetworkConfig(hidden=(256, 256)))
    policy = Policy(module, pipeline, obs_space=space)
    obs = np.random.default_rng(0).normal(size=(4, 64, 4)).astype(np.float32)
    expected = [policy.act(own, policy.initial_state(64))[0] for own in obs]
    wrong: list[Any] = []

    def act(own: Any, wanted: Any) -> None:
        try:
            for _ in range(400):
                if (policy.act(own, policy.initial_state(64))[0] != wanted).any():
                    wrong.append(own)
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=act, args=pair) for pair in zip(obs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_of_tables_are_told_how_to_be_given() -> None:
    policy = Policy(make_module(None, spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)))
    table = pd.DataFrame({"a": [0.1, 0.2], "b": [0.3, 0.4], "c": [0.5, 0.6], "name": ["x", "y"]})
    with pytest.raises(SpaceError, match="`obs` is a DataFrame, whose column names are not looked at"):
        policy.act(table[["c", "b", "a"]])
    with pytest.raises(SpaceError, match=r"an array of dtype object, .* Convert it first, such as"):
        policy.act(table.iloc[0][["a", "b", "c"]])
    assert policy.act(table.iloc[0][["a", "b", "c"]].astype(float)) in (0, 1)
    assert policy.act(table[["a", "b", "c"]].to_numpy()).shape == (2,)
    named = Policy(make_module(None, NamedBox(-1, 1, ["a", "b", "c"]), spaces.Discrete(2)))
    row = table[["a", "b", "c"]].iloc[0]
    assert named.act(row) == named.act(row.to_numpy())
    with pytest.raises(SpaceError, match="in the order b, a, c, but the policy learned from a, b, c"):
        named.act(row[["b", "a", "c"]])


def test_a_noisy_policy_acts_greedily_in_one_thread_and_explores_in_another() -> None:
    algorithm = etude.DQN(etude.DQNConfig(env="CartPole-v1", seed=1, noisy=True))
    policy, obs = algorithm.policy, np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    expected, done = policy.act(obs), threading.Event()

    def explore() -> None:
        while not done.is_set():
            policy.act(obs, explore=True)

    thread = threading.Thread(target=explore)
    thread.start()
    wrong = sum(int((policy.act(obs) != expected).any()) for _ in range(300))
    done.set()
    thread.join()
    algorithm.close()
    assert wrong == 0


def test_an_env_with_other_bounds_would_get_other_actions_than_act_gives() -> None:
    """`rescale_action` maps 1 to the env's upper bound, which is 2 in the env where it learned."""

    class Stronger(gym.ActionWrapper[Any, Any, Any]):
        def __init__(self) -> None:
            super().__init__(gym.make("Pendulum-v1"))
            self.action_space = spaces.Box(-5, 5, (1,), np.float32)

        def action(self, action: Any) -> Any:
            return action

    algorithm = etude.PPO(
        etude.PPOConfig(env="Pendulum-v1", num_envs=1, num_steps=64, connectors=("rescale_action",), seed=0)
    )
    assert algorithm.evaluate(1, env="Pendulum-v1", seed=0).episodes == 1
    for play in (algorithm.evaluate, lambda n, env: algorithm.record("nowhere", n, env=env)):
        with pytest.raises(SettingsError, match=r"takes actions in Box\(-5\.0, 5\.0.* but the policy acts in Box\(-2"):
            play(1, env=Stronger)
    algorithm.close()
