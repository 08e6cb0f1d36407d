# SPDX-License-Identifier: Apache-2.0
"""Experience of vector envs of torch tensors: that of the same env in NumPy, on the device of the env."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensor_envs import AsTensors, Follow, HostCount

import etude
from etude.connectors import Connector, FrameStack, Inputs, Pipeline
from etude.envs import Workers, make_arena
from etude.errors import EnvError, ModuleError, SettingsError, SpaceError
from etude.experience import Experience
from etude.modules import Module, NetworkConfig, make_module
from etude.policies import Policy
from etude.runners import Callback, Runner

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
MODES = list(AutoresetMode)


def cartpole(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return gym.make_vec("CartPole-v1", 4, "sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=25)


def pendulum() -> Any:
    return gym.make_vec("Pendulum-v1", 4, "sync", max_episode_steps=13)


class Hands(gym.Env[Any, Any]):
    """Observations and actions of several parts, with a mask; ends after 7 steps."""

    observation_space = spaces.Dict({"where": spaces.Box(-9, 9, (2,)), "action_mask": spaces.MultiBinary(5)})
    action_space = spaces.Dict(
        {"move": spaces.Box(-1, 1, (2,)), "tool": spaces.Discrete(3), "grip": spaces.Discrete(2)}
    )

    def _obs(self) -> Any:
        mask = np.ones(5, np.int8)
        mask[1 + self.t % 2] = 0
        return {"where": self.where.astype(np.float32), "action_mask": mask}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.where = 0, self.np_random.normal(size=2)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.where = np.clip(self.where + action["move"] * (1 + action["tool"]), -9, 9)
        return self._obs(), float(action["grip"] - self.where[0]), self.t == 7, False, {}


def hands() -> Any:
    return SyncVectorEnv([Hands] * 4)


def module_for(env: Any, device: str = "cpu", **network: Any) -> Module:
    torch.manual_seed(5)
    own = NetworkConfig(hidden=(16,), **network)
    return make_module(None, env.single_observation_space, env.single_action_space, own).to(device)


def played(env: Any, policy: Any, explore: bool, **asked: Any) -> list[Experience]:
    runner = Runner(make_arena(env, env.num_envs), policy, seed=7)
    parts = [runner.collect(explore=explore, **asked) for _ in range(3)]
    assert runner.take_finished().returns.size
    return parts


def check_alike(found: Experience, wanted: Experience, *, but: tuple[str, ...] = ("value",)) -> None:
    host = found.numpy()
    assert set(host.steps) - set(but) == set(wanted.steps) - set(but)
    np.testing.assert_array_equal(host.offsets, wanted.offsets)
    for name, column in host.segments.columns().items():
        np.testing.assert_array_equal(column, wanted.segments.columns()[name])
    for name in sorted(set(wanted.steps) - set(but)):
        np.testing.assert_allclose(host.steps[name], wanted.steps[name], rtol=1e-3, atol=1e-4)
        assert host.steps[name].dtype == wanted.steps[name].dtype
    for name, column in wanted.final_obs.items():
        np.testing.assert_allclose(host.final_obs[name], column, rtol=1e-3, atol=1e-4)


CASES = {
    "choices": (cartpole, {}, ()),
    "numbers": (pendulum, {}, ("clip_action",)),
    "parts": (hands, {}, ("clip_action",)),
    "memory": (cartpole, {"recurrent": "gru", "recurrent_size": 8}, ()),
    "rescaled": (pendulum, {}, ("rescale_action", "normalize_obs", "clip_reward")),
    "dropped": (hands, {}, ("drop:action_mask",)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("asked", [{"num_steps": 150}, {"num_episodes": 9}, {"num_steps": 60, "whole_episodes": True}])
def test_experience_is_that_of_the_same_env_in_numpy(case: str, asked: dict[str, Any], device: str) -> None:
    make, network, connectors = CASES[case]

    def policy(where: str) -> Policy:
        env, pipeline = make(), Pipeline(connectors)
        seen = pipeline.spaces(env.single_observation_space, env.single_action_space)
        env.single_observation_space, env.single_action_space = seen  # for the module
        return Policy(module_for(env, where, **network), pipeline)

    found = played(AsTensors(make(), device), policy(device), False, **asked)
    wanted = played(make(), policy("cpu"), False, **asked)
    for own, other in zip(found, wanted, strict=True):
        check_alike(own, other)
        for column in (*own.steps.values(), *own.final_obs.values()):
            assert column.device.type == device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_seen_and_done_never_comes_to_the_host(mode: AutoresetMode, device: str) -> None:
    env = Follow(8, mode, device)
    runner = Runner(make_arena(env, 8, Workers(check=0)), Policy(module_for(env, device)), seed=1)
    runner.collect(num_steps=80)
    before = runner.turns
    with HostCount() as counted:
        exp = runner.collect(num_steps=400)
    turns = runner.turns - before
    assert counted.counts.pop(("torch.float32", (3, 8))) == counted.counts.pop(("numpy", (3, 8))) == turns
    # beside: for each column of floats, one number tells whether all are finite
    assert set(counted.counts) <= {("torch.bool", ())}
    assert sum(counted.counts.values()) <= 6
    assert all(column.device.type == device for column in exp.steps.values())
    assert 0.2 < float(exp.steps["reward"].mean()) < 0.5  # of three choices


def test_equal_seeds_give_equal_experience() -> None:
    def collected(seed: int) -> Experience:
        env = Follow()
        return Runner(make_arena(env, 8), Policy(module_for(env)), seed=seed).collect(num_steps=300)

    first, again, other = collected(1), collected(1), collected(2)
    check_alike(first, again.numpy(), but=())
    assert not torch.equal(first.steps["action"], other.steps["action"])


def test_recorded_probabilities_are_those_of_the_module() -> None:
    env = Follow()
    module = module_for(env)
    exp = Runner(make_arena(env, 8), Policy(module), seed=1).collect(num_steps=200)
    with torch.no_grad():
        out = module(exp.steps["obs"])
    torch.testing.assert_close(out.logp(exp.steps["action"]), exp.steps["logp"])
    torch.testing.assert_close(out.value, exp.steps["value"])


def test_envs_that_several_modules_share() -> None:
    env = Follow()
    policies = {name: Policy(module_for(env)) for name in ("odd", "even")}
    arena = make_arena(env, 8)
    runner = Runner(arena, policies, module_of=lambda agent, episode: ("even", "odd")[episode.env % 2], seed=1)
    parts = runner.collect_each(num_steps=160)
    assert {name: exp.num_steps for name, exp in parts.items()} == {"odd": 80, "even": 80}
    together = runner.collect(num_steps=160)
    assert isinstance(together.steps["obs"], torch.Tensor)
    assert set(together.segments.module_id) == {"odd", "even"}


class Unready(Connector):
    def online(self, inputs: Inputs) -> Inputs:
        return inputs


@pytest.mark.parametrize("connector", [FrameStack(2), Unready(), lambda obs: obs])
def test_connectors_that_need_numpy_are_refused_when_the_run_is_made(connector: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"gives torch tensors, on which the connector `.*` can't work.*clip_action"
    ):
        etude.PPO(etude.PPOConfig(env=Follow(), num_envs=8, connectors=(connector,)))


def test_a_module_elsewhere_is_refused_when_the_run_is_made() -> None:
    env = Follow()
    module = module_for(env, "meta")
    with pytest.raises(ModuleError, match="tensors on cpu, but the weights of Network are on meta"):
        Runner(make_arena(env, 8), Policy(module), seed=1)


def test_numbers_that_are_not_finite_are_named() -> None:
    class Broken(Follow):
        def step(self, actions: Any) -> Any:
            obs, *others = super().step(actions)
            obs[3, 1] = torch.nan
            return obs, *others

    env = Broken()
    runner = Runner(make_arena(env, 8, Workers(check=0)), Policy(module_for(env)), seed=1)
    with pytest.raises(EnvError, match=r"column `obs` holds nan in component 1 at segment 6 "):
        runner.collect(num_steps=80)
    weights = Follow()
    module = module_for(weights)
    module.net.policy_head.bias.data[0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(ModuleError, match="`dist_inputs` that is not finite"):
        Runner(make_arena(weights, 8), Policy(module), seed=1).collect(num_steps=80)


def test_callbacks_see_numpy() -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_episode_step(self, episode: Any) -> None:
            seen.extend([episode.obs, episode.action, episode.reward])

        def on_segment(self, segment: Experience, episode: Any) -> None:
            seen.extend(segment.steps.values())

    env = Follow()
    Runner(make_arena(env, 8), Policy(module_for(env)), seed=1, callbacks=[Look()]).collect(num_steps=80)
    assert len(seen) > 200
    assert all(isinstance(value, np.ndarray | np.generic | float) for value in seen)


def test_actions_that_the_env_took_itself() -> None:
    class Own(Follow):
        def step(self, actions: Any) -> Any:
            *given, info = super().step(actions)
            taken = torch.full_like(actions, 2)
            return *given, info | {"off_policy_action": taken, "_off_policy_action": torch.arange(self.num_envs) < 3}

    env = Own()
    exp = Runner(make_arena(env, 8), Policy(module_for(env)), seed=1).collect(num_steps=80).numpy()
    of_slot = np.array([int(name.split("-")[1]) for name in exp.segments.episode_id])[exp.segment_of_step()]
    assert (exp.steps["action"][of_slot < 3] == 2).all()
    assert not (exp.steps["action"][of_slot >= 3] == 2).all()


class Guarded(gym.Env[Any, Any]):
    """Takes action 1 in place of 0; the reward is the action that was taken."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        info = {"off_policy_action": 1} if action == 0 else {}
        return np.zeros(2, np.float32), float(action or 1), False, self.t == 5, info


@pytest.mark.parametrize("mode", AutoresetMode)
def test_actions_that_the_env_took_itself_in_the_last_step(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([Guarded] * 3, autoreset_mode=mode)
    space = env.single_action_space
    module = make_module(None, env.single_observation_space, space)
    exp = Runner(make_arena(env, 3), Policy(module), seed=1).collect(num_steps=300).numpy()
    np.testing.assert_array_equal(exp.steps["action"], exp.steps["reward"])
    assert set(exp.steps["action"].tolist()) == {1, 2}


def taking(space: Any, given: Any) -> Any:
    """A function that makes two copies of an env that always says that it took ``given``."""

    class Taking(Guarded):
        action_space = space

        def step(self, action: Any) -> Any:
            self.t += 1
            return np.zeros(2, np.float32), 0.0, False, self.t == 5, {"off_policy_action": given}

    return lambda mode: SyncVectorEnv([Taking] * 2, autoreset_mode=mode)


TWO = gym.spaces.Tuple([gym.spaces.Discrete(3)] * 2)
FOUR, PLANE = gym.spaces.Discrete(4), gym.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("space", "given", "wanted"),
    [
        (TWO, (2, 0), {"action/0": 2, "action/1": 0}),
        (TWO, np.array([2, 0]), {"action/0": 2, "action/1": 0}),
        (gym.spaces.Tuple([FOUR]), (3,), {"action/0": 3}),
        (gym.spaces.Dict(a=TWO, b=FOUR), {"a": (2, 0), "b": 1}, {"action/a/0": 2, "action/a/1": 0, "action/b": 1}),
        (gym.spaces.Tuple([gym.spaces.Dict(a=FOUR), FOUR]), ({"a": 3}, 1), {"action/0/a": 3, "action/1": 1}),
    ],
)
def test_nested_actions_that_the_env_took_itself(space: Any, given: Any, wanted: Any, mode: AutoresetMode) -> None:
    env = taking(space, given)(mode)
    module = make_module(None, env.single_observation_space, space)
    exp = Runner(make_arena(env, 2), Policy(module), seed=1).collect(num_steps=20).numpy()
    for name, value in wanted.items():
        assert (exp.steps[name] == value).all()


@pytest.mark.parametrize(
    ("space", "given", "match"),
    [
        (FOUR, 7, r"copy 0: `off_policy_action` is 7, outside its space Discrete\(4\)"),
        (FOUR, 1.5, "`off_policy_action` has dtype float64, but its space"),
        (FOUR, "left", "`off_policy_action` has dtype <U4"),
        (FOUR, np.array([1]), r"`off_policy_action` has shape \(2, 1\)"),
        (PLANE, 0.5, r"`off_policy_action` has shape \(2,\)"),
        (PLANE, np.array([np.nan, 0]), "`off_policy_action` holds NaN"),
        (TWO, (2,), "`off_policy_action` is of type ndarray, but must be a tuple of 2 parts"),
        (gym.spaces.Dict(a=FOUR), {"a": -1}, "copy 0: `off_policy_action/a` is -1"),
        (gym.spaces.Dict(a=FOUR), {"b": 1}, "`off_policy_action/a` is missing"),
    ],
)
def test_actions_that_no_env_can_have_taken(space: Any, given: Any, match: str) -> None:
    env = taking(space, given)(AutoresetMode.NEXT_STEP)
    runner = Runner(make_arena(env, 2), Policy(make_module(None, env.single_observation_space, space)), seed=1)
    with pytest.raises(SpaceError, match=match):
        runner.collect(num_steps=20)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (torch.tensor([0, 1, 9]), r"copy 2: `off_policy_action` is 9, outside its space Discrete\(3\)"),
        (
            torch.tensor([0.5, 1, 2]),
            "`off_policy_action` is a Tensor of torch.float32 .* needs a tensor of .*int64",
        ),
        (torch.tensor([[0], [1], [2]]), r"`off_policy_action` is a Tensor of torch.int64 and shape .*3, 1"),
        (torch.tensor([0, 1]), "`off_policy_action` is of type Tensor, but its space"),
        (np.array([0, 1, 2]), "`off_policy_action` is a ndarray"),
    ],
)
def test_tensors_of_actions_that_no_env_can_have_taken(given: Any, match: str) -> None:
    class Own(Follow):
        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            return *rest, info | {"off_policy_action": given}

    env = Own(3)
    with pytest.raises(SpaceError, match=match):
        Runner(make_arena(env, 3), Policy(module_for(env)), seed=1).collect(num_steps=6)
