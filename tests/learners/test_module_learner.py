# SPDX-License-Identifier: Apache-2.0
import functools
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from etude.checkpoints import load_tree, save_tree
from etude.errors import CheckpointError, DataError, EtudeError, ModuleError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, ComputeConfig, Loss, ModuleLearner, OptimizerConfig, load_weights
from etude.modules import Module, NetworkConfig, Output, make_module

OBS = spaces.Box(-1, 1, (4,), np.float32)
ACT = spaces.Discrete(3)


def make(net: Any = None, obs_space: Any = OBS, action_space: Any = ACT) -> Module:
    torch.manual_seed(0)
    return make_module(net, obs_space, action_space, NetworkConfig(hidden=(16,)))


def loss(module: Module, batch: Batch) -> Loss:
    out = module(batch.obs)
    assert out.value is not None
    return Loss(
        policy=-(out.logp(batch.action) * batch["weight"]).mean(),
        value=3.0 * (out.value - batch.reward).square().mean(),
    ).log(entropy=out.entropy().mean())


def some_batches(count: int = 6, size: int = 32) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "obs": rng.normal(size=(size, 4)).astype(np.float32),
            "action": rng.integers(0, 3, size),
            "reward": rng.normal(size=size) * 5,
            "weight": rng.normal(size=size),
        }
        for _ in range(count)
    ]


def as_torch(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
    return {name: t.float() if t.dtype == torch.float64 else t for name, t in tensors.items()}


def by_torch(module: Module, batches: list[dict[str, Any]], groups: Any, clip: Any, by: str) -> list[dict[str, float]]:
    """The same updates with torch's own optimizers and clipping; the loss parts and norms at each step."""
    optimizers = [torch.optim.Adam(parameters, lr=lr) for parameters, lr in groups]
    rows = []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        of = loss(module, Batch(as_torch(batch), module))
        of.total.backward()
        row = {name: part.item() for name, part in of.parts.items()}
        row["grad_norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in groups[0][0]]))
        rows.append(row)
        for parameters, _ in groups:
            if clip is not None and by == "global_norm":
                nn.utils.clip_grad_norm_(parameters, clip)
            elif clip is not None and by == "value":
                nn.utils.clip_grad_value_(parameters, clip)
            elif clip is not None:
                for p in parameters:
                    nn.utils.clip_grad_norm_([p], clip)
        for optimizer in optimizers:
            optimizer.step()
    return rows


CLIPPED = OptimizerConfig(grad_clip=0.5, grad_clip_by="global_norm")


def assert_close(module: Module, other: Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("clip", "by"), [(None, "global_norm"), (0.5, "global_norm"), (0.3, "norm"), (0.05, "value")])
def test_steps_are_those_of_torch(clip: float | None, by: Any) -> None:
    module, other = make(), make()
    learner = ModuleLearner(module, loss, lr=0.01, optimizer=OptimizerConfig(grad_clip=clip, grad_clip_by=by))
    update = learner.update_from(some_batches())
    rows = by_torch(other, some_batches(), [(list(other.parameters()), 0.01)], clip, by)
    assert_close(module, other)
    assert learner.updates == 6
    assert update.losses.keys() == {"policy", "value"}
    for name, mean in update.losses.items():
        assert mean == pytest.approx(np.mean([row[name] for row in rows]), rel=1e-4)
    assert ("grad_norm" in update.metrics) == (clip is not None)
    if clip is not None:
        assert update.metrics["grad_norm"] == pytest.approx(np.mean([row["grad_norm"] for row in rows]), rel=1e-4)
    assert "entropy" in update.metrics


def halves(module: Module) -> dict[str, list[nn.Parameter]]:
    critic = [p for name, p in module.named_parameters() if "critic" in name or "value" in name]
    actor = [p for name, p in module.named_parameters() if not ("critic" in name or "value" in name)]
    assert critic
    assert actor
    return {"actor": actor, "critic": critic}


def test_several_named_optimizers() -> None:
    module, other = make(), make()
    schedule = ((0, 0.0), (100, 0.02))
    learner = ModuleLearner(
        module,
        loss,
        lr={"critic": schedule, "actor": 0.003},
        parameters=halves(module),
        optimizer=CLIPPED,
    )
    assert learner.lr == {"critic": 0.0, "actor": 0.003}
    learner.set_env_steps(50)
    assert learner.lr == {"critic": pytest.approx(0.01), "actor": 0.003}
    learner.update_from(some_batches())
    groups = halves(other)
    by_torch(other, some_batches(), [(groups["actor"], 0.003), (groups["critic"], 0.01)], 0.5, "global_norm")
    assert_close(module, other)


def test_parameters_without_an_optimizer_or_with_two_are_named() -> None:
    module = make()
    groups = halves(module)
    missing = next(name for name, p in module.named_parameters() if p is groups["actor"][0])
    with pytest.raises(EtudeError, match=f"parameter `{missing}` has no optimizer"):
        ModuleLearner(module, loss, parameters={"a": groups["actor"][1:], "c": groups["critic"]})
    with pytest.raises(EtudeError, match=f"parameter `{missing}` has two optimizers: a, c"):
        ModuleLearner(module, loss, parameters={"a": groups["actor"], "c": [*groups["critic"], groups["actor"][0]]})
    with pytest.raises(EtudeError, match="optimizer `c` has no parameters"):
        ModuleLearner(module, loss, parameters={"a": list(module.parameters()), "c": []})
    with pytest.raises(ModuleError, match=r"optimizer `a` was given a tuple: .* such as list\(module.parameters\(\)\)"):
        ModuleLearner(module, loss, parameters={"a": list(module.named_parameters())})  # type: ignore[dict-item]
    with pytest.raises(ModuleError, match=r"optimizer `a` was given a \w+: .* such as list\(module.parameters\(\)\)"):
        ModuleLearner(module, loss, parameters={"a": module})  # type: ignore[dict-item]
    own = nn.Parameter(torch.zeros(3))
    with pytest.raises(ModuleError, match=r"optimizer `c` has a parameter of shape \(3,\) that is not in the module"):
        ModuleLearner(module, loss, parameters={"a": list(module.parameters()), "c": [own]})
    module.register_parameter("own", own)
    assert "own" in ModuleLearner(module, loss).weights()
    with pytest.raises(EtudeError, match=r"learning rates for \['a'\], but optimizers \['actor', 'critic'\]"):
        ModuleLearner(module, loss, lr={"a": 0.1}, parameters=groups)
    with pytest.raises(EtudeError, match="no parameter to train"):
        ModuleLearner(make().requires_grad_(False), loss)


def test_a_frozen_parameter_needs_no_optimizer_and_stays() -> None:
    module = make()
    first = next(module.parameters()).requires_grad_(False)
    before = first.clone()
    ModuleLearner(module, loss).update_from(some_batches())
    torch.testing.assert_close(first, before, rtol=0, atol=0)


def test_mixed_dtypes_are_refused() -> None:
    module = make()
    next(module.parameters()).data = next(module.parameters()).data.double()
    with pytest.raises(ModuleError, match=r"must share dtype and device, .*float64"):
        ModuleLearner(module, loss)


def experience(lookback: int = 0) -> Experience:
    rng = np.random.default_rng(0)
    offsets = np.array([0, 30, 31, 75])
    segments = Segments.of(3, episode_id=["a", "b", "c"], lookback=[lookback, 0, lookback])
    steps = {**some_batches(1, 75)[0], "number": np.arange(75)}
    return Experience(steps, offsets, segments, {"obs": rng.normal(size=(3, 4)).astype(np.float32)})


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_step_once_an_epoch_lookback_left_out(shuffle: bool) -> None:
    seen: list[list[int]] = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append(batch["number"].tolist())
        return loss(module, batch)

    exp = experience(lookback=4)
    ModuleLearner(make(), noting, seed=0).update(exp, minibatch_size=10, epochs=3, shuffle=shuffle)
    assert [len(rows) for rows in seen] == ([10] * 6 + [7]) * 3
    expected = np.flatnonzero(exp.trained()).tolist()
    epochs = [[row for rows in seen[i : i + 7] for row in rows] for i in (0, 7, 14)]
    assert len(expected) == 67
    for epoch in epochs:
        assert sorted(epoch) == expected
        assert (epoch == expected) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle)


def test_a_batch_of_experience_is_learned_from_without_its_lookback() -> None:
    seen: list[list[int]] = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append(batch["number"].tolist())
        return loss(module, batch)

    exp = experience(lookback=4)
    learner = ModuleLearner(make(), noting, seed=0)
    learner.update_from([exp, experience()])
    assert seen == [np.flatnonzero(exp.trained()).tolist(), list(range(75))]
    assert learner.steps_trained == 67 + 75


def test_batch_gathers_only_what_is_asked_for_and_nests() -> None:
    obs_space = spaces.Dict({"x": spaces.Dict({"y": spaces.Box(-1, 1, (2,), np.float64)}), "z": spaces.Discrete(3)})
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)])
    module = make(None, obs_space, action_space)
    columns = {
        "obs/x/y": torch.rand(5, 2),
        "obs/z": torch.tensor([0, 1, 2, 0, 1]),
        "next_obs/x/y": torch.rand(5, 2),
        "next_obs/z": torch.tensor([2, 2, 2, 2, 2]),
        "action/0": torch.tensor([0, 1, 1, 0, 1]),
        "action/1": torch.rand(5, 1),
        "my/column": torch.arange(5),
    }
    batch = Batch(columns, module)
    assert batch.used == {}
    assert batch["my/column"].tolist() == [0, 1, 2, 3, 4]
    assert list(batch.used) == ["my/column"]
    assert batch.next_obs["z"].tolist() == [2] * 5
    assert batch.obs["x"]["y"] is columns["obs/x/y"]
    assert batch.action[1] is columns["action/1"]
    assert list(batch.used) == ["my/column", "next_obs/x/y", "next_obs/z", "obs/x/y", "obs/z", "action/0", "action/1"]
    assert "my/column" in batch
    assert "logp" not in batch
    with pytest.raises(DataError, match=r"the batch has no column `logp`; it has action/0, .*learner_connectors"):
        _ = batch.logp


def test_minibatch_columns_are_lazy() -> None:
    seen = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append(set(batch.used))
        done = loss(module, batch)
        seen.append(set(batch.used))
        return done

    ModuleLearner(make(), noting).update(experience(), minibatch_size=50)
    assert seen[0] == set()
    assert seen[1] == {"obs", "action", "reward", "weight"}


def test_float64_comes_as_float32() -> None:
    kinds = {}

    def noting(module: Module, batch: Batch) -> Loss:
        kinds.update({name: batch[name].dtype for name in ("reward", "action", "obs")})
        return loss(module, batch)

    ModuleLearner(make(), noting).update(experience(), minibatch_size=50)
    assert kinds == {"reward": torch.float32, "action": torch.int64, "obs": torch.float32}


def test_state_goes_through_a_file_and_on_bit_for_bit(tmp_path: Path) -> None:
    learner = ModuleLearner(make(), loss, lr=0.01, seed=3, optimizer=CLIPPED)
    learner.update(experience(), minibatch_size=16, epochs=2)
    save_tree(tmp_path, learner.state_dict())
    other = ModuleLearner(make(), loss, lr=0.01, seed=4, optimizer=CLIPPED)
    other.load_state_dict(load_tree(tmp_path)[0])
    updates = [each.update(experience(), minibatch_size=16, epochs=2) for each in (learner, other)]
    assert updates[0] == updates[1]
    assert learner.updates == other.updates == 20
    assert_close(learner.module, other.module, 0)


def test_the_state_is_a_copy() -> None:
    learner = ModuleLearner(make(), loss, lr=0.01)
    state = learner.state_dict()
    before = {name: value.clone() for name, value in state["module"].items()}
    learner.update_from(some_batches())
    for name, value in before.items():
        torch.testing.assert_close(state["module"][name], value, rtol=0, atol=0)
    assert not state["optimizers"]["all"]["first_moment"].any()


def test_weights_of_another_module_are_refused() -> None:
    learner = ModuleLearner(make(), loss)
    weights = learner.state_dict()["module"]
    name, value = next(iter(weights.items()))
    with pytest.raises(
        CheckpointError, match=f"weight `{name}` has the shape .* in the checkpoint, but .* in the module"
    ):
        load_weights(learner.module, {**weights, name: value[:1]})
    with pytest.raises(CheckpointError, match=f"weight `{name}` has the shape none in the checkpoint"):
        load_weights(learner.module, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(CheckpointError, match="weight `zz` .* but none in the module"):
        load_weights(learner.module, {**weights, "zz": value})


def test_flat_parameters_outlive_zero_grad_and_load_state_dict() -> None:
    module, other = make(), make()
    learner = ModuleLearner(module, loss, lr=0.01)
    weights = {name: value.clone() + 0.1 for name, value in module.state_dict().items()}
    other.load_state_dict(weights)
    learner.update_from(some_batches(1))
    module.zero_grad()
    module.load_state_dict(weights)
    for optimizer in learner.optimizers.values():
        optimizer.load_state_dict({n: torch.zeros_like(t) for n, t in optimizer.state_dict().items()})
    batches = some_batches()
    learner.update_from(batches[:3])
    module.zero_grad(set_to_none=True)
    learner.update_from(batches[3:])
    by_torch(other, batches, [(list(other.parameters()), 0.01)], None, "value")
    assert_close(module, other)
    flat = learner.optimizers["all"].parameters.flat
    torch.testing.assert_close(torch.cat([p.reshape(-1) for p in module.parameters()]), flat, rtol=0, atol=0)


class Dropping(nn.Module):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, obs: torch.Tensor) -> Output:
        out = self.layers(obs)
        return Output(dist_inputs=out[:, 1:], value=out[:, 0])


def test_dropout_is_on_while_learning_and_comes_from_the_learners_seed() -> None:
    def losses(seed: int, noise: int) -> list[Any]:
        learner = ModuleLearner(make(Dropping), loss, lr=0.0, seed=seed)
        torch.manual_seed(noise)
        learner.module.eval()
        done = [learner.update_from(some_batches(1)) for _ in range(2)]
        assert learner.module.training
        assert torch.initial_seed() == noise
        return done

    first = losses(1, 10)
    assert first == losses(1, 11)
    assert first != losses(2, 10)
    assert first[0] != first[1]


def test_measure_is_a_mean_over_all_steps_in_evaluation_mode() -> None:
    learner = ModuleLearner(make(Dropping), loss, seed=0)
    learner.update(experience(), minibatch_size=75)
    exp = experience(lookback=4)

    def figures(module: Module, batch: Batch) -> dict[str, torch.Tensor]:
        assert not module.training
        return {"reward": batch.reward.mean(), "value": module(batch.obs).value.mean()}

    means = learner.measure(exp, figures, chunk_size=16)
    assert means["reward"] == pytest.approx(exp.steps["reward"][exp.trained()].mean(), rel=1e-5)
    assert means == learner.measure(exp, figures, chunk_size=16)
    sparse = learner.measure(exp, figures, chunk_size=5, sparse=3)
    assert sparse["reward"] == pytest.approx(exp.steps["reward"][exp.trained()][::3].mean(), rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_compiled_steps_are_the_plain_ones() -> None:
    modules = make(), make()
    learners = [
        ModuleLearner(
            module,
            loss,
            lr=0.01,
            seed=0,
            optimizer=CLIPPED,
            compute=ComputeConfig(compile=compiled),
        )
        for module, compiled in zip(modules, (True, False), strict=True)
    ]
    batches = [*some_batches(4), *some_batches(1, 7), *some_batches(2)]
    updates = [learner.update_from(batches) for learner in learners]
    assert_close(*modules, 1e-4)
    for part, value in updates[1].losses.items():
        assert updates[0].losses[part] == pytest.approx(value, rel=1e-3, abs=1e-4)
    for part, value in updates[1].metrics.items():
        assert updates[0].metrics[part] == pytest.approx(value, rel=1e-3, abs=1e-4)
    for learner in learners:
        learner.lr["all"] = 0.05
        learner.load_state_dict(learner.state_dict())
        learner.update_from(batches[:2])
    assert_close(*modules, 1e-3)


def test_parts_that_not_every_minibatch_has() -> None:
    count = [0]

    def loss(module: Any, batch: Any) -> Loss:
        count[0] += 1
        first = module(batch.obs).value.square().mean() * 0.0 + 1.0
        return Loss(first=first, second=first * count[0]) if count[0] % 2 else Loss(first=first)

    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    update = ModuleLearner(module, loss).update_from({"obs": np.ones((3, 2), np.float32)} for _ in range(4))
    assert update.losses == {"first": 1.0, "second": 2.0}  # the second in steps 1 and 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_a_compiled_loss_sees_numbers_that_change() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.scale = 1.0

        def __call__(self, module: Any, batch: Any) -> Loss:
            return Loss(all=module(batch.obs).value.square().mean() * 0.0 + self.scale)

        def method(self, module: Any, batch: Any) -> Loss:
            return self(module, batch)

    scaled = Scaled()
    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = ModuleLearner(module, scaled.method, compute=ComputeConfig(compile=True))
    seen = []
    for scale in (1.0, 2.0):
        scaled.scale = scale
        seen.append(learner.update_from([{"obs": np.ones((3, 2), np.float32)}]).losses["all"])
    assert seen == [1.0, 2.0]


CHANGES: dict[str, Any] = {
    "phase": 1,
    "teacher": nn.Identity(),
    "weights": [0.5, 0.5],
    "shape": (2.0,),
    "add": lambda x: x + 1,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_compiled_loss_sees_what_else_changes(name: str) -> None:
    class Phased:
        phase, teacher = 0, None  # of the class, until they are set on the object

        def __init__(self) -> None:
            self.weights, self.shape, self.add = [1.0], (1.0,), lambda x: x

        def loss(self, module: Any, batch: Any) -> Loss:
            total = module(batch.obs).value.square().mean() * 0.0 + self.phase * 10 + (self.teacher is not None) * 20
            return Loss(all=self.add(total + len(self.weights) * 30 + self.shape[0] * 40))

    phased = Phased()
    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = ModuleLearner(module, phased.loss, compute=ComputeConfig(compile=True))
    for _ in range(2):
        got = learner.update_from([{"obs": np.ones((3, 2), np.float32)}]).losses["all"]
        weights = len(phased.weights) * 30 + phased.shape[0] * 40
        assert got == phased.add(phased.phase * 10 + (phased.teacher is not None) * 20 + weights)
        setattr(phased, name, CHANGES[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_sees_what_changes() -> None:
    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.scale = nn.Linear(2, 3), torch.tanh, torch.tensor(1.0)

        def forward(self, obs: torch.Tensor) -> Output:
            out = self.act(self.layer(obs)) * self.scale
            return Output(out[:, :2], value=out[:, 2])

    def squares(module: Module, batch: Batch) -> Loss:
        return Loss(all=batch.forward(module).value.square().mean())

    torch.manual_seed(0)
    module = make_module(Acts(), spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = ModuleLearner(module, squares, lr=0.0, compute=ComputeConfig(compile=True))
    obs = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    for change in ({}, {"act": torch.sigmoid}, {"act": nn.ReLU()}, {"scale": torch.tensor(3)}):
        for name, value in change.items():
            delattr(module.net, name)
            setattr(module.net, name, value)
        wanted = squares(module, Batch({"obs": torch.from_numpy(obs)}, module)).total.item()
        assert learner.update_from([{"obs": obs}]).losses["all"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_may_read_numpy_values() -> None:
    class Weighted:
        weights = np.linspace(0, 1, 5)

        def __init__(self) -> None:
            self.weight = self.weights[2]

        def loss(self, module: Any, batch: Any) -> Loss:
            return Loss(all=module(batch.obs).value.square().mean() * 0.0 + self.weight)

    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = ModuleLearner(module, Weighted().loss, compute=ComputeConfig(compile=True))
    assert learner.update_from([{"obs": np.ones((3, 2), np.float32)}] * 2).losses["all"] == 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_that_changes_all_the_time_is_told() -> None:
    class Growing:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def loss(self, module: Any, batch: Any) -> Loss:
            return Loss(all=module(batch.obs).value.square().mean() + len(self.seen))

    growing = Growing()
    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = ModuleLearner(module, growing.loss, compute=ComputeConfig(compile=True))

    def grow() -> None:
        growing.seen.append(0)
        learner.update_from([{"obs": np.ones((3, 2), np.float32)}])

    with pytest.raises(EtudeError, match="reads a Python number or object that keeps changing, and each state is comp"):
        deque(iter(grow, 0), maxlen=0)


class Alternating:
    turn = 0  # of the class, until it is set on the object

    def loss(self, module: Module, batch: Batch) -> Loss:
        self.turn = (self.turn + 1) % 2
        return Loss(all=module(batch.obs).value.square().mean() * self.turn)


class Wrapped(Alternating):
    @functools.wraps(Alternating.loss)
    def loss(self, module: Module, batch: Batch) -> Loss:
        return super().loss(module, batch)


class Counting(nn.Linear):
    calls = 0

    def forward(self, obs: torch.Tensor) -> Output:  # type: ignore[override]
        self.calls += 1
        return Output((out := super().forward(obs))[:, 1:], value=out[:, 0])


@pytest.mark.parametrize(
    ("net", "function", "what"),
    [
        (None, Alternating().loss, "`turn` of Alternating from 0 to 1"),
        (None, Wrapped().loss, "`turn` of Wrapped from 0 to 1"),
        (Counting(4, 4), lambda module, batch: module(batch.obs).value.mean(), "`calls` of Counting from 0 to 1"),
    ],
)
def test_a_loss_that_changes_its_state_is_not_compiled(net: Any, function: Any, what: str) -> None:
    learner = ModuleLearner(make(net), function, compute=ComputeConfig(compile=True))
    with pytest.raises(SettingsError, match=f"the loss changes {what}.* change it in `after_step`"):
        learner.update_from(some_batches())


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("branch", "Data-dependent branching"),
        ("float", "data-dependent expression"),
        ("numpy", ""),
        ("buffer", r"changes in place or keeps in an object \(do that in `after_step`\)"),
    ],
)
def test_a_loss_that_can_not_be_compiled_is_told(kind: str, what: str) -> None:
    def by_values(module: Module, batch: Batch) -> Loss:
        value = module(batch.obs).value
        if kind == "branch" and value.mean() > 0:
            return Loss(all=value.square().mean())
        if kind == "buffer":
            module.get_buffer("seen").add_(1)
            return Loss(all=value.square().mean())
        size = float(value.mean()) if kind == "float" else float(np.interp(batch.obs[0, 0], (0, 1), (1, 2)))
        return Loss(all=value.square().mean()).log(size=size)

    module = make()
    module.register_buffer("seen", torch.zeros(()))
    learner = ModuleLearner(module, by_values, compute=ComputeConfig(compile=True))
    with pytest.raises(EtudeError, match=f"can't make one graph of the loss .*{what}.* or train without compile"):
        learner.update_from(some_batches())


def with_nan(batch: dict[str, Any], column: str = "obs") -> dict[str, Any]:
    values = batch[column].copy()
    values[0] = np.nan
    return {**batch, column: values}


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_that_are_not_finite_are_skipped_and_counted(compiled: bool) -> None:
    module, other = make(), make()
    good = some_batches()
    learner = ModuleLearner(
        module,
        loss,
        lr=0.01,
        seed=0,
        optimizer=CLIPPED,
        compute=ComputeConfig(compile=compiled),
    )
    update = learner.update_from([good[0], with_nan(good[1]), *good[1:3], with_nan(good[0], "weight"), *good[3:]])
    expected = ModuleLearner(other, loss, lr=0.01, seed=0, optimizer=CLIPPED).update_from(good)
    assert_close(module, other, 1e-4 if compiled else 0.0)
    assert update.losses == pytest.approx(expected.losses, rel=1e-3)
    assert update.metrics.pop("skipped_steps") == 2
    assert update.metrics == pytest.approx(expected.metrics, rel=1e-3)
    assert (learner.updates, learner.skipped) == (8, 2)


def test_a_gradient_alone_that_is_not_finite() -> None:
    def rooted(module: Module, batch: Batch) -> Loss:
        value = module(batch.obs).value
        return Loss(root=(value * 0.0).abs().sqrt().sum())  # 0, with a slope that is infinite

    learner = ModuleLearner(make(), rooted, optimizer=OptimizerConfig(grad_clip=None, max_skipped=3))
    with pytest.raises(EtudeError, match="3 gradient steps in a row were skipped, because of a gradient, though the"):
        learner.update_from(some_batches())


def test_too_many_steps_in_a_row_name_module_part_and_column() -> None:
    module = make()
    before = [p.clone() for p in module.parameters()]
    learner = ModuleLearner(module, loss, name="red", seed=0, optimizer=OptimizerConfig(grad_clip=None, max_skipped=2))
    bad = [with_nan(batch, "reward") for batch in some_batches()]
    message = (
        r"module 'red': 2 gradient steps in a row were skipped, because of the loss part `value` = nan. In the last "
        r"batch `reward` holds 1 numbers of 32 that are not finite \(of the others: least -\d"
    )
    with pytest.raises(EtudeError, match=message):
        learner.update_from(bad)
    for p, q in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, q)
    huge = [{**batch, "reward": np.full(32, 1e30)} for batch in some_batches()]
    with pytest.raises(
        EtudeError, match=r"all columns are finite; the largest numbers are in `reward` \(of the others"
    ):
        learner.update_from(huge)
    whole = [{**batch, "obs": np.full((32, 4), 10**18)} for batch in some_batches()]  # columns of integers count too
    with pytest.raises(EtudeError, match=r"the largest numbers are in `obs` .*greatest 1e\+18"):
        ModuleLearner(make(), overflowing, optimizer=OptimizerConfig(grad_clip=None, max_skipped=2)).update_from(whole)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_were_put_elsewhere_are_trained_on(compiled: bool) -> None:
    """As by ``.data =``, by a conversion there and back, and by another learner of the module."""

    def elsewhere(module: Module) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()

    def there_and_back(module: Module) -> None:
        module.double().float()

    def another_learner(module: Module) -> None:
        ModuleLearner(module, loss, seed=1)

    compute = ComputeConfig(compile=compiled)
    wanted = make()
    learner = ModuleLearner(wanted, loss, seed=0, compute=compute)
    learner.update_from(some_batches())
    learner.update_from(some_batches())
    for move in (elsewhere, there_and_back, another_learner):
        module = make()
        learner = ModuleLearner(module, loss, seed=0, compute=compute)
        learner.update_from(some_batches())
        move(module)
        learner.update_from(some_batches())
        for p, q in zip(module.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_parameters_that_are_new_or_of_another_kind_are_named() -> None:
    module = make()
    learner = ModuleLearner(module, loss, seed=0)
    learner.update_from(some_batches())
    module.load_state_dict({n: p.clone() for n, p in module.state_dict().items()}, assign=True)
    with pytest.raises(EtudeError, match="has no optimizer: .* that a module has, unfrozen, when the learner is made"):
        learner.update_from(some_batches())
    module = make()
    learner = ModuleLearner(module, loss, seed=0)
    module.double()
    with pytest.raises(
        ModuleError, match="a parameter is torch.float64 .* since the last update, and was torch.float32"
    ):
        learner.update_from(some_batches())


def test_parameters_that_are_frozen_later_are_named() -> None:
    module = make()
    learner = ModuleLearner(module, loss, seed=0)
    learner.update_from(some_batches())
    name, parameter = next(iter(module.named_parameters()))
    parameter.requires_grad_(False)
    with pytest.raises(EtudeError, match=f"parameter `{name}` of optimizer `all` is frozen .* a schedule sets to 0"):
        learner.update_from(some_batches())
    parameter.requires_grad_(True)
    learner.update_from(some_batches())


def test_learning_rates_below_zero_are_refused() -> None:
    with pytest.raises(SettingsError, match="the learning rate of optimizer `all` is -1.0, but a schedule is"):
        ModuleLearner(make(), loss, lr=-1.0)


def test_a_generator_of_parameters_is_a_group() -> None:
    learner = ModuleLearner(module := make(), loss, seed=0, parameters={"all": module.parameters()})
    before = [p.clone() for p in module.parameters()]
    learner.update_from(some_batches())
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def overflowing(module: Module, batch: Batch) -> Loss:
    return Loss(root=module(batch.obs).value.sum() * torch.inf)


def test_gradients_accumulate_to_those_of_the_joined_batch() -> None:
    module, other = make(), make()
    batches = some_batches(5)
    learner = ModuleLearner(
        module, loss, lr=0.01, optimizer=OptimizerConfig(grad_clip=0.5, accumulate=2, grad_clip_by="global_norm")
    )
    update = learner.update_from(batches)

    def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    plain = ModuleLearner(other, loss, lr=0.01, optimizer=CLIPPED)
    expected = plain.update_from([joined(batches[:2]), joined(batches[2:4]), batches[4]])
    assert_close(module, other)
    assert learner.updates == plain.updates == 3
    assert update.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)


def test_a_group_with_a_batch_that_is_not_finite_is_skipped_whole() -> None:
    module, other = make(), make()
    good = some_batches(6)
    bad = [*good[:2], with_nan(good[2]), *good[2:5], with_nan(good[0])]
    update = ModuleLearner(module, loss, lr=0.01, optimizer=OptimizerConfig(grad_clip=None, accumulate=2)).update_from(
        bad
    )
    expected = ModuleLearner(other, loss, lr=0.01, optimizer=OptimizerConfig(grad_clip=None, accumulate=2)).update_from(
        [*good[:2], *good[3:5]]
    )
    assert_close(module, other)
    assert update.losses == pytest.approx(expected.losses)
    assert update.metrics["skipped_steps"] == 2


def test_steps_of_fewer_batches_count_among_those_skipped_in_a_row() -> None:
    module, before = make(), make()
    learner = ModuleLearner(module, loss, optimizer=OptimizerConfig(grad_clip=None, accumulate=3, max_skipped=2))
    batch = with_nan(some_batches(1)[0])
    assert learner.update_from([batch]).metrics["skipped_steps"] == 1
    with pytest.raises(EtudeError, match="2 gradient steps in a row were skipped"):
        learner.update_from([batch, batch])
    assert_close(module, before, 0.0)


def test_half_precision_in_the_forward_pass_only() -> None:
    module, other = make(), make()
    dtypes = set()

    def noting(module: Module, batch: Batch) -> Loss:
        dtypes.add(module.net.policy_head(torch.zeros(1, 16)).dtype)
        output = batch.forward(module)
        assert output.dist_inputs.dtype == output.value.dtype == torch.float32  # so are probabilities and losses
        return loss(module, batch)

    learner = ModuleLearner(module, noting, lr=0.01, compute=ComputeConfig(precision="bfloat16"))
    update = learner.update_from(some_batches())
    expected = ModuleLearner(other, loss, lr=0.01).update_from(some_batches())
    assert dtypes == {torch.bfloat16}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters())
    assert update.losses == pytest.approx(expected.losses, rel=0.05)
    assert update.losses != expected.losses


def test_gradients_can_be_changed_and_steps_followed() -> None:
    module, other = make(), make()
    calls = []

    def halve(changed: Module) -> None:
        for p in changed.parameters():
            p.grad.mul_(0.5)

    learner = ModuleLearner(module, loss, lr=0.01, on_gradients=halve, after_step=lambda m: calls.append(m is module))
    learner.register_optimizer("all", torch.optim.SGD, list(module.parameters()), 0.01)
    learner.update_from(some_batches(3))
    plain = ModuleLearner(other, loss)
    plain.register_optimizer("all", torch.optim.SGD, list(other.parameters()), 0.005)
    plain.update_from(some_batches(3))
    assert_close(module, other)
    assert calls == [True] * 3


def test_any_of_torchs_optimizers_and_its_state() -> None:
    modules = [make(), make(), make()]
    make_one = functools.partial(torch.optim.AdamW, weight_decay=0.1, betas=(0.8, 0.9))
    learners = []
    for module in modules[:2]:
        learner = ModuleLearner(module, loss, parameters={}, seed=0)
        for name, params in halves(module).items():
            learner.register_optimizer(name, make_one, params, 0.01)
        learners.append(learner)
    learners[0].update_from(some_batches())
    by_hand = make_one(list(modules[2].parameters()), lr=0.01)
    for batch in some_batches():
        by_hand.zero_grad()
        loss(modules[2], Batch(as_torch(batch), modules[2])).total.backward()
        by_hand.step()
    assert_close(modules[0], modules[2])
    learners[1].load_state_dict(learners[0].state_dict())
    for learner in learners:
        learner.update_from(some_batches(2))
    for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_optimizers_that_are_still_to_be_registered_are_missed_at_the_first_update() -> None:
    module = make()
    learner = ModuleLearner(module, loss, parameters={})
    groups = halves(module)
    learner.register_optimizer("actor", None, groups["actor"], 0.01)
    with pytest.raises(EtudeError, match="has no optimizer: give it one"):
        learner.update_from(some_batches())
    learner.register_optimizer("critic", None, [*groups["critic"], groups["actor"][0]], 0.01)
    with pytest.raises(EtudeError, match="has two optimizers: actor, critic"):
        learner.update_from(some_batches())
    with pytest.raises(EtudeError, match="optimizer `none` has no parameters"):
        learner.register_optimizer("none", None, [], 0.01)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"optimizer": OptimizerConfig(accumulate=2)}, "`accumulate` is 2"),
        ({"on_gradients": lambda module: None}, r"on_gradients\(\) is defined"),
    ],
)
def test_what_can_not_be_compiled(given: Any, what: str) -> None:
    learner = ModuleLearner(make(), loss, **given, compute=ComputeConfig(compile=True))
    with pytest.raises(SettingsError, match=f"`compile` is True, but {what}"):
        learner.update_from(some_batches())
    learner = ModuleLearner(module := make(), loss, compute=ComputeConfig(compile=True))
    learner.register_optimizer("all", torch.optim.SGD, list(module.parameters()), 0.1)
    with pytest.raises(SettingsError, match="optimizer `all` is not Adam"):
        learner.update_from(some_batches())


def test_norms_are_logged_and_limits_are_each_optimizers_own() -> None:
    module, other = make(), make()
    groups = halves(module)
    learner = ModuleLearner(
        module,
        loss,
        lr=0.01,
        parameters=groups,
        optimizer=OptimizerConfig(grad_clip=0.1, grad_clip_by="global_norm"),
    )
    update = learner.update_from(some_batches(1))
    groups = halves(other)
    loss(other, Batch(as_torch(some_batches(1)[0]), other)).total.backward()
    for name, group in groups.items():
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in group]))
        assert update.metrics[f"grad_norm/{name}"] == pytest.approx(norm, rel=1e-4)
        own = learner.optimizers[name].parameters.grad.norm().item()
        assert own == pytest.approx(min(norm, 0.1), rel=1e-4)


def test_what_a_loss_keeps_is_there_before_the_next_batch_is_made() -> None:
    def keeping(module: Module, batch: Batch) -> Loss:
        return loss(module, batch).keep(error=batch.reward * 2)

    learner = ModuleLearner(make(), keeping)
    seen = []

    def batches() -> Any:
        for batch in some_batches(3):
            yield batch
            seen.append((learner.kept["error"].numpy() / 2, batch["reward"].astype(np.float32)))

    learner.update_from(batches())
    assert len(seen) == 3
    for kept, reward in seen:
        np.testing.assert_allclose(kept, reward, rtol=1e-6)


@given(rows=st.integers(1, 40), count=st.integers(1, 9))
def test_as_many_minibatches_as_asked_for(rows: int, count: int) -> None:
    seen: list[list[int]] = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append(batch["number"].tolist())
        return Loss(value=module(batch.obs).value.mean())

    rng = np.random.default_rng(0)
    steps = {**some_batches(1, rows)[0], "number": np.arange(rows)}
    exp = Experience(steps, np.array([0, rows]), Segments.of(1, episode_id=["a"]), {"obs": rng.normal(size=(1, 4))})
    ModuleLearner(make(), noting, seed=0).update(exp, num_minibatches=count)
    assert len(seen) == count
    assert max(map(len, seen)) - min(map(len, seen)) <= 1
    together = [number for part in seen for number in part]
    assert set(together) == set(range(rows))
    assert len(together) == max(rows, count)


def test_the_size_or_the_number_of_minibatches() -> None:
    with pytest.raises(SettingsError, match="minibatch_size is None and num_minibatches None: give one of them"):
        ModuleLearner(make(), loss).update(experience())
    with pytest.raises(SettingsError, match="minibatch_size is 3 and num_minibatches 2"):
        ModuleLearner(make(), loss).update(experience(), minibatch_size=3, num_minibatches=2)


def test_steps_trained_are_counted() -> None:
    learner = ModuleLearner(make(), loss, seed=0)
    learner.update(experience(), minibatch_size=30, epochs=2)
    assert learner.steps_trained == 150
    learner.update_from(some_batches(2))
    assert learner.steps_trained == 214
    other = ModuleLearner(make(), loss)
    other.load_state_dict(learner.state_dict())
    assert (other.steps_trained, other.updates) == (214, 8)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_rests_where_the_loss_says_so(compiled: bool) -> None:
    module = make()

    def halves(module: Any, batch: Any) -> Loss:
        out = module(batch.obs)
        return Loss(value=out.value.square().mean()).rest("policy")

    policy = [p for name, p in module.net.named_parameters() if name.startswith("policy") or name == "log_std"]
    others = [p for name, p in module.net.named_parameters() if not (name.startswith("policy") or name == "log_std")]
    groups = {"policy": policy, "value": others}
    learner = ModuleLearner(
        module,
        halves,
        parameters=groups,
        seed=0,
        optimizer=OptimizerConfig(grad_clip=1.0, grad_clip_by="global_norm"),
        compute=ComputeConfig(compile=compiled),
    )
    before = [[p.detach().clone() for p in group] for group in groups.values()]
    update = learner.update_from(some_batches(2))
    moved = [
        any(not torch.equal(a, b) for a, b in zip(old, group, strict=True))
        for old, group in zip(before, groups.values(), strict=True)
    ]
    assert moved == [False, True]
    assert "grad_norm/value" in update.metrics
    assert "grad_norm/policy" not in update.metrics
