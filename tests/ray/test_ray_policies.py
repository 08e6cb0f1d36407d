# SPDX-License-Identifier: Apache-2.0
"""What runners are sent."""

import pickle
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude import PPOConfig
from etude import columns as col
from etude.algorithms.dqn import QModule
from etude.algorithms.task import Task, TaskConfig
from etude.connectors import Connector, Pipeline
from etude.connectors.connector import Inputs
from etude.experience import Experience, Segments
from etude.learners import ModuleLearner
from etude.modules import make_module
from etude.modules.critics import TargetNetwork

pytest.importorskip("ray")
from etude.ray.policies import (
    Sent,
    _arrived,
    as_arrays,
    fingerprint,
    from_arrays,
    learned_of,
    plain_attributes,
    portable,
    set_learned,
    set_plain_attributes,
)

OBS, ACTION = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)


def test_a_module_travels_without_the_block_of_memory_that_its_learner_keeps() -> None:
    module = make_module(None, OBS, ACTION)
    ModuleLearner(module, lambda module, batch: None, name="one", lr=1e-3, seed=np.random.SeedSequence(1))  # type: ignore[arg-type,return-value]
    sent = pickle.loads(pickle.dumps(portable(module)))  # noqa: S301
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    assert len(pickle.dumps(portable(module))) < 2 * size + 100_000
    for name, value in module.state_dict().items():
        torch.testing.assert_close(sent.state_dict()[name], value, rtol=0, atol=0)
    with torch.no_grad():
        next(sent.parameters()).add_(1)
    assert not torch.equal(next(sent.parameters()), next(module.parameters()))


class Shaky(nn.Module):
    """A net with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.shake = 0.5
        self._own = 1


def test_numbers_beside_the_weights() -> None:
    module, other = (QModule(Shaky(), OBS, ACTION) for _ in range(2))
    module.dist.epsilon, module.net.shake, module.net._own = 0.3, 0.1, 7
    module.eval()
    set_plain_attributes(other, plain_attributes(module))
    assert (other.dist.epsilon, other.net.shake, other.net._own) == (0.3, 0.1, 1)
    assert other.training
    assert isinstance(other.follower, TargetNetwork)


class Guess(Task[TaskConfig]):
    """Acts by a number of its own, and holds what can't be sent."""

    def environment(self) -> str:
        return "CartPole-v1"

    def network(self, obs_space: Any, action_space: Any) -> nn.Module:
        return nn.Linear(4, 2)

    def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
        return torch.full((len(obs),), self.guess)

    guess = 0


def test_of_a_task_its_settings_and_numbers_go_along() -> None:
    task = Guess(TaskConfig(num_envs=1, seed=1))
    task.held = (i for i in range(3))  # type: ignore[attr-defined]
    task.guess = 1
    sent = pickle.loads(pickle.dumps(portable(task.module)))  # noqa: S301
    actor = sent.actor(explore=True)
    actor.start(np.random.default_rng(0), 2)
    obs = {col.OBS: np.zeros((2, 4), np.float32)}
    assert actor.step(obs)[0][col.ACTION].tolist() == [1, 1]
    task.guess = 0
    set_plain_attributes(sent, plain_attributes(task.module))
    assert actor.step(obs)[0][col.ACTION].tolist() == [0, 0]
    task.close()


class Relative(Connector):
    """Observations less the mean of all, and less the last one of the slot: it learns, and remembers."""

    def __init__(self) -> None:
        self.mean = np.zeros(3)
        self.last = np.zeros((0, 3), np.float32)
        self.names: dict[int, str] = {}

    def start(self, num_slots: int) -> None:
        self.last = np.zeros((num_slots, 3), np.float32)
        self.names = {}

    def online(self, inputs: Inputs) -> Inputs:
        out = inputs.obs[col.OBS] - self.mean - self.last[inputs.slots]
        self.last[inputs.slots] = inputs.obs[col.OBS]
        self.names = {int(slot): "seen" for slot in inputs.slots}
        return inputs.with_obs({col.OBS: out.astype(np.float32)})

    def update(self, exp: Experience) -> None:
        self.mean = np.asarray(exp.steps[col.OBS]).mean(0)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.copy(), "last": self.last.copy(), "names": dict(self.names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.last, self.names = state["mean"], state["last"], state["names"]


def test_connectors_learn_from_afar_and_remember_their_slots() -> None:
    here = Pipeline([Relative(), "normalize_obs"])
    there = Pipeline([Relative(), "normalize_obs"])
    for pipeline, slots in ((here, 0), (there, 2)):
        pipeline.spaces(OBS, ACTION)
        pipeline.start(slots)
    obs = np.arange(6, dtype=np.float32).reshape(2, 3)
    there.online(Inputs(np.arange(2), {col.OBS: obs}, np.ones(2, bool), {}, np.zeros(2)))
    segments = Segments.of(1, episode_id=["a"])
    here.update(Experience({col.OBS: obs}, np.array([0, 2]), segments, {col.OBS: obs[:1]}))
    set_learned(there, pickle.loads(pickle.dumps(learned_of(here))))  # noqa: S301
    relative: Any = there.connectors[0]
    np.testing.assert_array_equal(relative.mean, obs.mean(0))
    np.testing.assert_array_equal(relative.last, obs)
    assert relative.names == {0: "seen", 1: "seen"}
    assert there.metrics()["normalize_obs/count"] == 2


def test_weights_of_a_kind_that_numpy_lacks_travel_as_well() -> None:
    module = make_module(None, OBS, ACTION)
    module.register_buffer("scale", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    sent = from_arrays(pickle.loads(pickle.dumps(as_arrays(module.state_dict()))))  # noqa: S301
    assert sent.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(sent[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_any_changed_weight_changes_the_fingerprint(dtype: torch.dtype) -> None:
    module = nn.Module()
    memory = torch.zeros(40, dtype=dtype)
    module.register_buffer("whole", memory[1:38])  # neither begins nor ends on a word of eight bytes
    module.register_buffer("one", torch.zeros((), dtype=dtype))
    before = fingerprint(module)
    assert before == fingerprint(module)
    for number in memory[1:38]:
        number.fill_(1)
        assert fingerprint(module) != before
        number.fill_(0)
    assert fingerprint(module) == before
    module.get_buffer("one").fill_(1)
    assert fingerprint(module) != before


def arrived(env: Any) -> Any:
    return pickle.loads(pickle.dumps(Sent(PPOConfig(env=env))))  # noqa: S301


def test_what_an_id_stands_for_is_sent_where_that_is_possible() -> None:
    lock = threading.Lock()
    try:
        gym.register("Sent-v0", lambda: None, kwargs={"size": 3})
        gym.register("Unsent-v0", lambda: lock)
        for env in ("Unsent-v0", "Unknown-v0", gym.Env):
            assert arrived(env) == PPOConfig(env=env)
        sent = pickle.dumps(Sent(PPOConfig(env="Sent-v0")))
        before = gym.registry.pop("Sent-v0")
        assert pickle.loads(sent) == PPOConfig(env="Sent-v0")  # noqa: S301
        found = gym.registry["Sent-v0"]
        assert (found.id, found.kwargs) == (before.id, before.kwargs)
        assert found is not before
        arrived("Sent-v0")
        assert gym.registry["Sent-v0"] is found
        config, _ = Sent(PPOConfig(env="Sent-v0")).__reduce__()[1]
        assert _arrived(config, b"of a module that is not here") is config
    finally:
        for name in ("Sent-v0", "Unsent-v0"):
            gym.registry.pop(name, None)
