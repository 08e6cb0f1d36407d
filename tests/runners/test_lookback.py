# SPDX-License-Identifier: Apache-2.0
"""What the module saw while acting is what the connectors make of the recorded Experience."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from some_envs import LendingVectorEnv, length_of, reward_of
from torch import nn

from etude.connectors import ClipAction, FrameStack, NormalizeObs, Pipeline, PrevActionReward
from etude.envs import VectorArena, make_arena
from etude.experience import Experience
from etude.learners.batch import as_tensors
from etude.modules import Module, Output, make_module
from etude.policies import Policy
from etude.runners import Runner


def small(obs: Any) -> Any:
    return obs * np.array([0.1, 0.3, 0.05], np.float32)


def flatten(obs: Any) -> torch.Tensor:
    return torch.cat([flatten(part) for part in obs.values()], -1) if isinstance(obs, dict) else obs.float()


class Plain(nn.Module):
    """A user's module: acts through torch."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(action_space.n + 1)

    def forward(self, obs: Any) -> Output:
        out = self.layer(flatten(obs))
        return Output(dist_inputs=out[:, 1:], value=out[:, :1])


PIPELINES: dict[str, Any] = {
    "frame_stack": lambda: [small, FrameStack(3)],
    "prev": lambda: [small, PrevActionReward(), lambda obs: obs * 0.01],
    "stack of prev": lambda: [small, PrevActionReward(), FrameStack(2), lambda obs: np.tanh(obs * 0.01)],
    "prev of stack": lambda: ["clip_reward", small, FrameStack(4), PrevActionReward(), ClipAction()],
    "normalize": lambda: [small, FrameStack(2), NormalizeObs()],
}


def make_runner(kind: str, env: Any, num_envs: int, net: Any = None) -> Runner:
    arena = make_arena(env, num_envs)
    pipeline = Pipeline(PIPELINES[kind]())
    spaces = pipeline.spaces(*arena.kinds[0][:2])
    torch.manual_seed(0)
    module = make_module(net, *spaces)
    with torch.no_grad():
        for parameter in module.parameters():
            if not isinstance(parameter, nn.UninitializedParameter):
                parameter.normal_(0, 0.3)
    return Runner(arena, Policy(module, pipeline), seed=1)


def assert_recomputed(module: Module, exp: Experience, seen: Experience) -> None:
    tensors = as_tensors(seen.steps, "cpu")
    with torch.no_grad():
        out = module(module.obs_from({n: c for n, c in tensors.items() if n.startswith("obs")}))
        logp = out.logp(module.action_from({"action": tensors["action"]}))
    assert out.value is not None
    rows = exp.trained()
    if isinstance(module.net, Plain):  # the built-in net's values are asked for later
        np.testing.assert_allclose(exp.steps["value"][rows], out.value.numpy()[rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(exp.steps["logp"][rows], logp.numpy()[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", tuple(AutoresetMode))
@pytest.mark.parametrize("net", [None, Plain])
@pytest.mark.parametrize("kind", PIPELINES)
def test_values_and_logp_are_those_of_what_offline_makes(kind: str, net: Any, mode: AutoresetMode) -> None:
    runner = make_runner(kind, LendingVectorEnv(3, mode), 3, net)
    norm = kind == "normalize"
    context = runner.policies[None].connectors.context
    for num_steps in (6, 6, 60) if norm and mode is not AutoresetMode.NEXT_STEP else (1, 2, 5, 3, 1, 40, 4, 1):
        exp = runner.collect(num_steps=num_steps)
        exp.validate()
        assert exp.trained().sum() == num_steps
        begins = exp.segments.t_start + exp.segments.lookback
        np.testing.assert_array_equal(exp.segments.lookback, np.minimum(context, begins))
        assert_recomputed(runner.policies[None].module, exp, runner.policies[None].connectors.offline(exp))
        if norm and mode is not AutoresetMode.NEXT_STEP:  # else a step made before would be normalised otherwise
            runner.policies[None].connectors.update(exp)


def seen_by_step(runner: Runner, pieces: list[int]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What the module sees at (copy, episode, t), of steps and of final observations, by `offline`."""
    steps: dict[Any, Any] = {}
    finals: dict[Any, Any] = {}
    for num_steps in pieces:
        exp = runner.collect(num_steps=num_steps, explore=False)
        seen = runner.policies[None].connectors.offline(exp)
        names = [name for name in seen.steps if name.startswith("obs")]
        for row in np.flatnonzero(exp.trained()):
            steps[tuple(exp.steps["obs"][row])] = np.concatenate([seen.steps[n][row] for n in names])
        for i in range(exp.num_segments):
            finals[tuple(exp.final_obs["obs"][i])] = np.concatenate([seen.final_obs[n][i] for n in names])
    return steps, finals


@pytest.mark.parametrize("kind", ["frame_stack", "prev", "stack of prev", "prev of stack"])
@settings(max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_how_a_life_is_cut_makes_no_difference(kind: str, pieces: list[int]) -> None:
    env = LendingVectorEnv(3, AutoresetMode.NEXT_STEP)
    steps, finals = seen_by_step(make_runner(kind, env, 3), pieces)
    env = LendingVectorEnv(3, AutoresetMode.SAME_STEP)
    long_steps, long_finals = seen_by_step(make_runner(kind, env, 3), [sum(pieces) + 30])
    assert len(steps) == sum(pieces)
    for key, seen in steps.items():
        np.testing.assert_array_equal(seen, long_steps[key])
    for (number, episode, t), seen in finals.items():
        expected = long_finals if t == length_of(int(number), int(episode)) else long_steps
        np.testing.assert_array_equal(seen, expected[number, episode, t])


def test_connectors_are_shown_the_step_before_and_nothing_at_the_start_of_an_episode() -> None:
    shown: list[Any] = []

    class Looks(PrevActionReward):
        def online(self, inputs: Any) -> Any:
            shown.append(copy.deepcopy(inputs))  # the env writes over what it lends
            return super().online(inputs)

    env = LendingVectorEnv(2, AutoresetMode.NEXT_STEP)
    arena = VectorArena(env, 2)
    pipeline = Pipeline([Looks()])
    module = make_module(None, *pipeline.spaces(arena.obs_space, arena.action_space))
    runner = Runner(arena, Policy(module, pipeline), seed=1)
    exp = Experience.concat([runner.collect(num_steps=n) for n in (5, 30, 7)])
    acted = {tuple(obs): action for obs, action in zip(exp.steps["obs"], exp.steps["action"], strict=True)}
    looked = 0
    for inputs in shown:
        for i, obs in enumerate(inputs.obs["obs"]):
            number, episode, t = obs
            if inputs.first[i]:
                assert t == 0
                assert (inputs.prev_action["action"][i], inputs.prev_reward[i]) == (0, 0.0)
            elif (number, episode, t - 1) in acted:
                looked += 1
                assert inputs.prev_action["action"][i] == acted[number, episode, t - 1]
                assert inputs.prev_reward[i] == np.float32(reward_of(int(number), int(episode), int(t) - 1))
    assert looked > 20
