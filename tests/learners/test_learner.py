# SPDX-License-Identifier: Apache-2.0
"""Several modules that learn side by side."""

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude.errors import DataError, EtudeError
from etude.experience import Experience, Segments
from etude.learners import Batch, Learner, Loss, ModuleLearner, Update, mean_of
from etude.learners.batch import as_tensors
from etude.modules import Module, NetworkConfig, make_module

OBS, ACT = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)


def loss(module: Module, batch: Batch) -> Loss:
    out = module(batch.obs)
    return Loss(policy=-out.logp(batch.action).mean(), value=(out.value - batch.reward).square().mean())


def make(name: str) -> ModuleLearner:
    seed = sum(name.encode())
    torch.manual_seed(seed)
    return ModuleLearner(make_module(None, OBS, ACT, NetworkConfig(hidden=(8,))), loss, name=name, lr=0.01, seed=seed)


def experience(rows: int, seed: int = 0) -> Experience:
    rng = np.random.default_rng(seed)
    steps = {"obs": rng.normal(size=(rows, 4)).astype(np.float32), "action": rng.integers(0, 3, rows)}
    steps["reward"] = rng.normal(size=rows)
    return Experience(steps, np.array([0, rows]), Segments.of(1, episode_id=["a"]), {"obs": steps["obs"][:1]})


def test_columns_that_no_tensor_can_hold_are_left_out():
    columns = {"who": np.array(["a", "b"]), "when": np.array([1, 2], "M8[s]"), "what": np.array([b"a", None], object)}
    found = as_tensors(columns | {"reward": np.array([1.0, 2.0])}, "cpu")
    assert found.keys() == {"reward"}
    assert found["reward"].dtype == torch.float32


def weights(learner: ModuleLearner) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in learner.module.parameters()])


def updated(learner: Learner, parts: dict[str, Experience], **how: Any) -> dict[str, Update]:
    return {name: learner.modules[name].update(exp, **how) for name, exp in learner.chosen(parts).items()}


def test_what_one_module_does_never_depends_on_others() -> None:
    alone = Learner({"a": make("a")})
    among = Learner({"b": make("b"), "a": make("a"), "c": make("c")})
    for round_ in range(6):
        parts = {name: experience(20 + i, round_) for i, name in enumerate("abc")}
        if round_ == 2:
            del among.modules["b"]
        if round_ == 4:
            among.modules["d"] = make("d")
        how: dict[str, Any] = {"minibatch_size": 8, "epochs": 2}
        mine = updated(alone, {"a": parts["a"]}, **how)["a"]
        theirs = updated(among, {n: p for n, p in parts.items() if n in among.modules}, **how)
        assert theirs["a"] == mine
    assert torch.equal(weights(alone.modules["a"]), weights(among.modules["a"]))
    assert list(among.modules) == ["a", "c", "d"]


@pytest.mark.parametrize("which", [["a"], lambda name, part: name == "a" and part.num_steps > 3])
def test_only_some_are_trained(which: Any) -> None:
    learner = Learner({"a": make("a"), "b": make("b")}, modules_to_train=which)
    before = weights(learner.modules["b"])
    updates = updated(learner, {"a": experience(10), "b": experience(10)}, minibatch_size=5)
    assert updates.keys() == {"a"}
    assert (learner.updates, learner.modules["b"].updates) == (2, 0)
    assert torch.equal(weights(learner.modules["b"]), before)


def test_unknown_modules_are_named_beside_those_there_are() -> None:
    learner = Learner({"a": make("a"), "b": make("b")})
    message = r"the batch is of the modules \['a', 'ghost'\], but the learner has \['a', 'b'\]"
    with pytest.raises(DataError, match=message):
        learner.chosen({"a": experience(4), "ghost": experience(4)})
    learner.modules_to_train = ["ghost"]
    with pytest.raises(EtudeError, match=r"there is no module 'ghost': there are \['a', 'b'\]"):
        learner.chosen({"a": experience(4)})
    with pytest.raises(EtudeError, match=r"there are the modules \['a', 'b'\]: choose one"):
        learner.only  # noqa: B018


def test_state_goes_on_with_an_optimizer_of_ones_own() -> None:
    learners = [make("b") for _ in range(2)]
    for learner in learners:
        parameters = list(learner.module.parameters())
        learner.register_optimizer("all", torch.optim.RMSprop, parameters, ((0, 0.1), (10, 0.0)))
        Learner({"b": learner}).set_env_steps(5)
        assert learner.lr == {"all": pytest.approx(0.05)}
    exp = experience(20)
    learners[0].update(exp, minibatch_size=5)
    learners[1].load_state_dict(learners[0].state_dict())
    for learner in learners:
        learner.update(exp, minibatch_size=5)
    assert torch.equal(weights(learners[0]), weights(learners[1]))


FAULTS = """
import resource
import torch
from etude.learners import Loss, ModuleLearner
from etude.modules import NetworkConfig, make_module
from gymnasium.spaces import Box, Discrete

def loss(module, batch):
    wide = module(batch.obs).dist_inputs.sum(-1).unsqueeze(-1) + torch.zeros(2**14)  # 2 MB, as are several others
    return Loss(wide=(wide * wide).mean()).log(mean=wide.mean())

module = make_module(None, Box(-1, 1, (3,)), Discrete(2), NetworkConfig(hidden=(8,)))
learner = ModuleLearner(module, loss)
batches = [{"obs": torch.ones(32, 3)}] * 50
learner.update_from(batches)
first = resource.getrusage(resource.RUSAGE_SELF)
learner.update_from(batches)
second = resource.getrusage(resource.RUSAGE_SELF)
print((second.ru_minflt - first.ru_minflt) / 50)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is kept depends on the C library")
@pytest.mark.parametrize("returns_it", [False, True])
def test_steps_use_the_memory_of_those_before_them(returns_it: bool) -> None:
    """Unless the environment says that it is to be returned to the system."""
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_TRIM_THRESHOLD_"}
    env |= {"MALLOC_TRIM_THRESHOLD_": "131072"} if returns_it else {}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert (float(done.stdout) > 500) is returns_it  # pages of 4 KiB that a step takes anew


def test_the_mean_of_updates_adds_up_and_keeps_only_metrics_of_these_names() -> None:
    one, other = {"threads": 1.0, "skipped_steps": 2.0}, {"threads": 4.0, "skipped_steps": 4.0}
    mean = mean_of([Update(dict(one), dict(one)), Update(dict(other), dict(other))], [1, 3])
    assert mean.losses == {"threads": 3.25, "skipped_steps": 3.5}
    assert mean.metrics == {"threads": 4.0, "skipped_steps": 6.0}
    with_nan = mean_of([Update({"a": math.nan, "b": math.nan}, {}), Update({"a": 1.0, "b": math.nan}, {})])
    assert with_nan.losses["a"] == 1.0
    assert math.isnan(with_nan.losses["b"])
