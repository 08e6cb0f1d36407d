# SPDX-License-Identifier: Apache-2.0
"""What modules and connectors do on arenas whose slots come at different times, and what is recorded of it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scripted_envs import SPACES, reward_of, who
from scripted_runs import Marked, play
from torch import nn

from etude.connectors import FrameStack, Pipeline, PrevActionReward, RescaleAction
from etude.learners.batch import as_tensors
from etude.modules import Module, Output, make_module
from etude.modules.actors import RandomModule


class Plain(nn.Module):
    """A user's module: acts through torch."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(action_space.n + 1)

    def forward(self, obs: Any) -> Output:
        parts = obs.values() if isinstance(obs, dict) else [obs]
        out = self.layer(torch.cat([part.float() for part in parts], -1))
        return Output(dist_inputs=out[:, 1:], value=out[:, :1])


def small(obs: Any) -> Any:
    return obs * np.array([0.3, 0.1, 0.3, 0.05], np.float32)


def real(net: Any, pipeline: Pipeline) -> Any:
    def make(arena: Any, kind: int) -> Module:
        spaces = pipeline.spaces(arena.kinds[kind].obs_space, arena.kinds[kind].action_space)
        torch.manual_seed(1)
        module = make_module(net, *spaces)
        with torch.no_grad():
            module(module.obs_from({n: torch.ones(1, *s) for n, s in _shapes(spaces[0]).items()}))
            for parameter in module.parameters():
                parameter.normal_(0, 0.5)
        module.version = 0
        return module

    return make


def _shapes(space: Any) -> dict[str, Any]:
    return {f"obs/{k}": s.shape for k, s in space.spaces.items()} if hasattr(space, "spaces") else {"obs": space.shape}


def outputs(module: Module, columns: Any) -> tuple[Any, Any, Any]:
    tensors = as_tensors(columns, "cpu")
    with torch.no_grad():
        out = module(module.obs_from({n: c for n, c in tensors.items() if n.startswith("obs")}))
        logp = out.logp(module.action_from({"action": tensors["action"]}))
    assert out.value is not None
    assert out.dist_inputs is not None
    return out.value.numpy(), out.dist_inputs.numpy(), logp.numpy()


PIPELINES: dict[str, Any] = {
    "nothing": lambda: [small],
    "frame_stack": lambda: [small, FrameStack(3)],
    "prev": lambda: [small, PrevActionReward()],
    "stack of prev": lambda: [small, PrevActionReward(), FrameStack(2)],
    "prev of stack": lambda: [small, FrameStack(3), PrevActionReward()],
}


@pytest.mark.parametrize("net", [None, Plain])
@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("scene", ["vector, ends mixed in", "pool", "coming and going", "one module asked for"])
def test_what_acted_can_be_recomputed(scene: str, kind: str, net: Any) -> None:
    """With the weights of then, from what the connectors make of the Experience."""
    pipeline = Pipeline(PIPELINES[kind]())
    run = play(scene, 3, make=real(net, pipeline), connectors=pipeline, count_steps_by="agent_steps")
    (policy,), then = run.runner.policies.values(), {}
    module = policy.module
    carried = 0
    for num_steps in (1, 2, 30, 1, 1, 40, 3, 20):
        then[module.version] = copy.deepcopy(module)
        exp = run.runner.collect(num_steps=num_steps)
        assert exp.trained().sum() == num_steps
        run.enter({exp.segments.module_id[0]: exp})
        begins = exp.segments.t_start + exp.segments.lookback
        np.testing.assert_array_equal(exp.segments.lookback, np.minimum(pipeline.context, begins))
        whose = [who(exp.steps, row) for row in range(exp.num_steps)]
        stamps = np.array([run.arena.lives[key].stamps[k] for key, k in whose])
        seen = pipeline.offline(exp)
        for version in np.unique(stamps):
            value, inputs, logp = outputs(then[version], seen.steps)
            rows = exp.trained() & (stamps == version)
            carried += rows.sum() * (version != module.version)
            if "value" in exp.steps:  # the built-in net's are asked for later
                np.testing.assert_allclose(exp.steps["value"][rows], value[rows], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(exp.steps["dist_inputs"][rows], inputs[rows], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(exp.steps["logp"][rows], logp[rows], rtol=1e-4, atol=1e-4)
        run.learn()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert carried > 3


def test_connectors_are_shown_the_step_before_and_nothing_at_the_start_of_an_episode() -> None:
    shown: list[Any] = []

    class Looks(PrevActionReward):
        def online(self, inputs: Any) -> Any:
            shown.append(copy.deepcopy(inputs))  # the arena writes over what it lends
            return super().online(inputs)

    pipeline = Pipeline([Looks()])
    run = play("pool", 3, lambda arena, kind: Marked(arena, kind, pipeline.spaces(*SPACES[kind])), connectors=pipeline)
    for num_steps in (9, 1, 50, 2, 90):
        run.steps(num_steps)
    looked = 0
    for inputs in shown:
        for i in range(len(inputs.slots)):
            key, k = who(inputs.obs, i)
            assert inputs.first[i] == (k == 0)
            action, reward = (run.arena.lives[key].actions[k - 1]["action"], reward_of(key, k - 1)) if k else (0, 0.0)
            assert (inputs.prev_action["action"][i], inputs.prev_reward[i]) == (action, reward)
            looked += k > 0
    assert looked > 100


def test_what_was_taken_is_recorded_as_the_module_would_have_chosen_it() -> None:
    pipeline = Pipeline([RescaleAction()])
    low, high = SPACES[1][1].low, SPACES[1][1].high

    def make(arena: Any, kind: int) -> Module:
        return Marked(arena, kind, spaces=pipeline.spaces(*SPACES[kind]))

    def act(action: Any) -> Any:
        return low + (np.clip(action, -1, 1) + 1) / 2 * (high - low)

    scene = {"agents": "ab", "kinds": [1, 1], "taken": 0.5, "fail": 0.05}, (lambda agent, number: "m", {"m": 1})
    for seed in range(5):
        run = play(scene, seed, make, act, connectors=pipeline)
        for num_steps in (1, 7, 30, 1, 2, 40):
            run.learn()
            run.steps(num_steps)


def test_a_module_that_only_acts() -> None:
    def make(arena: Any, kind: int) -> Module:
        module = RandomModule(*arena.kinds[kind][:2])
        module.version = 0  # type: ignore[assignment]
        return module

    run = play("self-play", 1, make)
    for num_steps in (9, 1, 50, 2, 30):
        run.steps(num_steps)
        run.check_finished()


def test_greedy_and_exploring_collections_take_turns() -> None:
    """What was made by one and is given by the next keeps its own log-probability."""
    pipeline = Pipeline([small])
    run = play("many in step", 2, real(None, pipeline), connectors=pipeline, count_steps_by="agent_steps")
    (policy,) = run.runner.policies.values()
    mixed = 0
    for num_steps in (5, 9, 8, 30, 4, 6, 5, 8):
        run.learn()
        explore = bool(policy.module.version % 2)
        exp = run.runner.collect(num_steps=num_steps, explore=explore)
        whose = [who(exp.steps, row) for row in range(exp.num_steps)]
        explored = np.array([run.arena.lives[key].stamps[k] % 2 == 1 for key, k in whose])
        np.testing.assert_array_equal(exp.steps["logp"] != 0, explored)
        mixed += len(set(explored)) > 1
    assert mixed > 1
