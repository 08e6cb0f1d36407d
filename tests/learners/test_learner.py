# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.checkpoints import load_tree, save_tree
from etude.errors import CheckpointError, DataError, EtudeError, ModuleError
from etude.experience import Experience, Segments
from etude.learners import Batch, Learner, Loss, load_weights
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
        parameters = [p for group, _ in groups for p in group]
        row = {name: part.item() for name, part in of.parts.items()}
        row["grad_norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        rows.append(row)
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


def assert_close(module: Module, other: Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("clip", "by"), [(None, "global_norm"), (0.5, "global_norm"), (0.3, "norm"), (0.05, "value")])
def test_steps_are_those_of_torch(clip: float | None, by: Any) -> None:
    module, other = make(), make()
    learner = Learner(module, loss, lr=0.01, grad_clip=clip, grad_clip_by=by)
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
    learner = Learner(module, loss, lr={"critic": schedule, "actor": 0.003}, parameters=halves(module), grad_clip=0.5)
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
        Learner(module, loss, parameters={"a": groups["actor"][1:], "c": groups["critic"]})
    with pytest.raises(EtudeError, match=f"parameter `{missing}` has two optimizers: a, c"):
        Learner(module, loss, parameters={"a": groups["actor"], "c": [*groups["critic"], groups["actor"][0]]})
    with pytest.raises(EtudeError, match="optimizer `c` has no parameters"):
        Learner(module, loss, parameters={"a": list(module.parameters()), "c": []})
    with pytest.raises(EtudeError, match=r"learning rates for \['a'\], but optimizers \['actor', 'critic'\]"):
        Learner(module, loss, lr={"a": 0.1}, parameters=groups)
    with pytest.raises(EtudeError, match="no parameter to train"):
        Learner(make().requires_grad_(False), loss)


def test_a_frozen_parameter_needs_no_optimizer_and_stays() -> None:
    module = make()
    first = next(module.parameters()).requires_grad_(False)
    before = first.clone()
    Learner(module, loss).update_from(some_batches())
    torch.testing.assert_close(first, before, rtol=0, atol=0)


def test_mixed_dtypes_are_refused() -> None:
    module = make()
    next(module.parameters()).data = next(module.parameters()).data.double()
    with pytest.raises(ModuleError, match=r"must share dtype and device, .*float64"):
        Learner(module, loss)


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
    Learner(make(), noting, seed=0).update(exp, minibatch_size=10, epochs=3, shuffle=shuffle)
    assert [len(rows) for rows in seen] == ([10] * 6 + [7]) * 3
    expected = np.flatnonzero(exp.trained()).tolist()
    epochs = [[row for rows in seen[i : i + 7] for row in rows] for i in (0, 7, 14)]
    assert len(expected) == 67
    for epoch in epochs:
        assert sorted(epoch) == expected
        assert (epoch == expected) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle)


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

    Learner(make(), noting).update(experience(), minibatch_size=50)
    assert seen[0] == set()
    assert seen[1] == {"obs", "action", "reward", "weight"}


def test_float64_comes_as_float32() -> None:
    kinds = {}

    def noting(module: Module, batch: Batch) -> Loss:
        kinds.update({name: batch[name].dtype for name in ("reward", "action", "obs")})
        return loss(module, batch)

    Learner(make(), noting).update(experience(), minibatch_size=50)
    assert kinds == {"reward": torch.float32, "action": torch.int64, "obs": torch.float32}


def test_state_goes_through_a_file_and_on_bit_for_bit(tmp_path: Path) -> None:
    learner = Learner(make(), loss, lr=0.01, grad_clip=0.5, seed=3)
    learner.update(experience(), minibatch_size=16, epochs=2)
    save_tree(tmp_path, learner.state_dict())
    other = Learner(make(), loss, lr=0.01, grad_clip=0.5, seed=4)
    other.load_state_dict(load_tree(tmp_path)[0])
    updates = [each.update(experience(), minibatch_size=16, epochs=2) for each in (learner, other)]
    assert updates[0] == updates[1]
    assert learner.updates == other.updates == 20
    assert_close(learner.module, other.module, 0)


def test_the_state_is_a_copy() -> None:
    learner = Learner(make(), loss, lr=0.01)
    state = learner.state_dict()
    before = {name: value.clone() for name, value in state["module"].items()}
    learner.update_from(some_batches())
    for name, value in before.items():
        torch.testing.assert_close(state["module"][name], value, rtol=0, atol=0)
    assert not state["optimizers"]["all"]["first_moment"].any()


def test_weights_of_another_module_are_refused() -> None:
    learner = Learner(make(), loss)
    weights = learner.state_dict()["module"]
    name, value = next(iter(weights.items()))
    with pytest.raises(CheckpointError, match=f"weight `{name}` has shape .* in the checkpoint, but .* in the module"):
        load_weights(learner.module, {**weights, name: value[:1]})
    with pytest.raises(CheckpointError, match=f"the checkpoint has no weight `{name}`"):
        load_weights(learner.module, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(CheckpointError, match="the module has no weight `zz`"):
        load_weights(learner.module, {**weights, "zz": value})


def test_flat_parameters_outlive_zero_grad_and_load_state_dict() -> None:
    module, other = make(), make()
    learner = Learner(module, loss, lr=0.01)
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
        learner = Learner(make(Dropping), loss, lr=0.0, seed=seed)
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
    learner = Learner(make(Dropping), loss, seed=0)
    learner.update(experience(), minibatch_size=75)
    exp = experience(lookback=4)

    def figures(module: Module, batch: Batch) -> dict[str, torch.Tensor]:
        assert not module.training
        return {"reward": batch.reward.mean(), "value": module(batch.obs).value.mean()}

    means = learner.measure(exp, figures, chunk_size=16)
    assert means["reward"] == pytest.approx(exp.steps["reward"][exp.trained()].mean(), rel=1e-5)
    assert means == learner.measure(exp, figures, chunk_size=16)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_compiled_steps_are_the_plain_ones() -> None:
    modules = make(), make()
    learners = [
        Learner(module, loss, lr=0.01, grad_clip=0.5, compile=compiled, seed=0)
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
    update = Learner(module, loss).update_from({"obs": np.ones((3, 2), np.float32)} for _ in range(4))
    assert update.losses == {"first": 1.0, "second": 2.0}  # the second in steps 1 and 3


def test_a_compiled_loss_sees_numbers_that_change() -> None:
    class Scaled:
        scale = 1.0

        def __call__(self, module: Any, batch: Any) -> Loss:
            return Loss(all=module(batch.obs).value.square().mean() * 0.0 + self.scale)

        def method(self, module: Any, batch: Any) -> Loss:
            return self(module, batch)

    scaled = Scaled()
    module = make_module(None, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    learner = Learner(module, scaled.method, compile=True)
    seen = []
    for scale in (1.0, 2.0):
        scaled.scale = scale
        seen.append(learner.update_from([{"obs": np.ones((3, 2), np.float32)}]).losses["all"])
    assert seen == [1.0, 2.0]
