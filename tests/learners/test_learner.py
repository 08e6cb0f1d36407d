# SPDX-License-Identifier: Apache-2.0
"""Several modules that learn side by side."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude.errors import DataError, EtudeError
from etude.experience import Experience, Segments
from etude.learners import Batch, Learner, Loss, ModuleLearner
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


def weights(learner: ModuleLearner) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in learner.module.parameters()])


def test_what_one_module_does_never_depends_on_others() -> None:
    alone = Learner({"a": make("a")})
    among = Learner({"b": make("b"), "a": make("a"), "c": make("c")})
    for round_ in range(6):
        parts = {name: experience(20 + i, round_) for i, name in enumerate("abc")}
        if round_ == 2:
            among.remove_module("b")
        if round_ == 4:
            among.add_module("d", make("d"))
        how: dict[str, Any] = {"minibatch_size": 8, "epochs": 2}
        mine = alone.update({"a": parts["a"]}, **how)["a"]
        theirs = among.update({n: p for n, p in parts.items() if n in among.modules}, **how)
        assert theirs["a"] == mine
    assert torch.equal(weights(alone.modules["a"]), weights(among.modules["a"]))
    assert list(among.modules) == ["a", "c", "d"]


@pytest.mark.parametrize("which", [["a"], lambda name, part: name == "a" and part.num_steps > 3])
def test_only_some_are_trained(which: Any) -> None:
    learner = Learner({"a": make("a"), "b": make("b")}, modules_to_train=which)
    before = weights(learner.modules["b"])
    updates = learner.update({"a": experience(10), "b": experience(10)}, minibatch_size=5)
    assert updates.keys() == {"a"}
    assert (learner.updates, learner.modules["b"].updates) == (2, 0)
    assert torch.equal(weights(learner.modules["b"]), before)


def test_unknown_modules_are_named_beside_those_there_are() -> None:
    learner = Learner({"a": make("a"), "b": make("b")})
    message = r"the batch is of the modules \['a', 'ghost'\], but the learner has \['a', 'b'\]"
    with pytest.raises(DataError, match=message):
        learner.update({"a": experience(4), "ghost": experience(4)}, minibatch_size=2)
    with pytest.raises(EtudeError, match=r"there is no module 'ghost': there are \['a', 'b'\]"):
        learner.remove_module("ghost")
    with pytest.raises(EtudeError, match="there is a module 'a' already"):
        learner.add_module("a", make("a"))
    learner.modules_to_train = ["ghost"]
    with pytest.raises(EtudeError, match="there is no module 'ghost'"):
        learner.update({"a": experience(4)}, minibatch_size=2)
    with pytest.raises(EtudeError, match=r"there are the modules \['a', 'b'\]: say which"):
        learner.only  # noqa: B018
    with pytest.raises(EtudeError, match="there is no module 'ghost'"):
        learner.register_optimizer("ghost", "all", None, [], 0.1)


def test_batches_by_module_or_plain_endless_or_not() -> None:
    def endless() -> Any:
        seed = 0
        while True:
            yield {name: dict(experience(8, seed).steps) for name in ("a", "b")}
            seed += 1

    learner = Learner({"a": make("a"), "b": make("b")})
    updates = learner.update_from(endless(), num_iters=3)
    assert {name: own.updates for name, own in learner.modules.items()} == {"a": 3, "b": 3}
    plain = Learner({"a": make("a")})
    of_a = plain.update_from((batch["a"] for batch in endless()), num_iters=3)["a"]
    assert of_a.losses == pytest.approx(updates["a"].losses)
    torch.testing.assert_close(weights(plain.modules["a"]), weights(learner.modules["a"]))
    assert plain.update_from([experience(8).steps, experience(8).steps]).keys() == {"a"}
    assert plain.updates == 5
    with pytest.raises(DataError, match=r"of the modules \['c'\]"):
        plain.update_from([{"c": experience(8).steps}])
    assert plain.update_from([]) == {}


def test_state_goes_on_and_optimizers_are_registered_by_module() -> None:
    learners = [Learner({"a": make("a"), "b": make("b")}) for _ in range(2)]
    for learner in learners:
        module = learner.modules["b"].module
        learner.register_optimizer("b", "all", torch.optim.RMSprop, list(module.parameters()), ((0, 0.1), (10, 0.0)))
        learner.set_env_steps(5)
        assert learner.modules["b"].lr == {"all": pytest.approx(0.05)}
    parts = {"a": experience(20), "b": experience(20)}
    learners[0].update(parts, minibatch_size=5)
    learners[1].load_state_dict(learners[0].state_dict())
    for learner in learners:
        learner.update(parts, minibatch_size=5)
    for name in ("a", "b"):
        assert torch.equal(weights(learners[0].modules[name]), weights(learners[1].modules[name]))
