# SPDX-License-Identifier: Apache-2.0
"""The limits of the policy's gradient and of the value's, and the learning rates of both, against plain torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.errors import EtudeError, SettingsError
from etude.learners import Batch, ComputeConfig, Loss, ModuleLearner, OptimizerConfig
from etude.modules import Module, NetworkConfig, Output, make_module

OBS, ACT = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
LIMIT, LR = 0.3, 0.01


class PartlyShared(nn.Module):
    """A first layer for both, then one for each; parameters of both kinds lie between each other."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 1)
        self.first = nn.Linear(4, 8)
        self.policy = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))  # of values

    def forward(self, obs: torch.Tensor) -> Output:
        hidden = self.first(obs).tanh()
        return Output(self.policy(hidden), value=self.value(hidden).squeeze(-1) * self.scale)


def make(kind: str) -> Module:
    torch.manual_seed(0)
    if kind == "partly shared":
        return make_module(PartlyShared(), OBS, ACT)
    return make_module(None, OBS, ACT, NetworkConfig(hidden=(8,), separate=kind == "separate"))


def loss(module: Module, batch: Batch) -> Loss:
    out = batch.forward(module)
    assert out.value is not None
    return Loss(
        policy=-(out.logp(batch.action) * batch["weight"]).mean(),
        value=1000.0 * (out.value - batch.reward).square().mean(),
        entropy=-0.1 * out.entropy().mean(),
    )


def batches(count: int = 6, size: int = 32) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "obs": rng.normal(size=(size, 4)).astype(np.float32),
            "action": rng.integers(0, 3, size),
            "reward": rng.normal(size=size).astype(np.float32),
            "weight": (20.0 * rng.normal(size=size)).astype(np.float32),
        }
        for _ in range(count)
    ]


def limited(module: Module, group: list[dict[str, Any]]) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The mean gradient of some batches, where each side's was limited; and the norms before, by plain torch."""
    parameters = list(module.parameters())
    sums = {"policy": [torch.zeros_like(p) for p in parameters], "value": [torch.zeros_like(p) for p in parameters]}
    for columns in group:
        parts = loss(module, Batch({n: torch.from_numpy(c) for n, c in columns.items()}, module)).parts
        for name, side in (("policy", parts["policy"] + parts["entropy"]), ("value", parts["value"])):
            grads = torch.autograd.grad(side / len(group), parameters, retain_graph=True, allow_unused=True)
            for total, grad in zip(sums[name], grads, strict=True):
                total += 0.0 if grad is None else grad
    norms = {name: float(nn.utils.get_total_norm(grads)) for name, grads in sums.items()}
    scales = {name: min(1.0, LIMIT / norm) for name, norm in norms.items()}
    pairs = zip(sums["policy"], sums["value"], strict=True)
    return [p * scales["policy"] + v * scales["value"] for p, v in pairs], norms


KINDS = ["separate", "shared", "partly shared"]


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate": 3}, id="accumulated"),
        pytest.param({"compile": True}, id="compiled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_value_are_limited_each_by_itself(kind: str, how: dict[str, Any]) -> None:
    module, other = make(kind), make(kind)
    size = how.get("accumulate", 1)
    optimizer = OptimizerConfig(grad_clip=LIMIT, accumulate=size)
    compute = ComputeConfig(compile=how.get("compile", False))
    learner = ModuleLearner(module, loss, lr=LR, optimizer=optimizer, compute=compute)
    update = learner.update_from(batches())
    norms = []
    optimizer = torch.optim.Adam(other.parameters(), lr=LR)
    for i in range(0, 6, size):
        grads, of_step = limited(other, batches()[i : i + size])
        for parameter, grad in zip(other.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        norms.append(of_step)
    for parameter, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5)
    for side in ("policy", "value"):
        assert update.metrics[f"grad_norm/{side}"] == pytest.approx(np.mean([n[side] for n in norms]), rel=1e-3)
    assert "grad_norm" in update.metrics


class InPhases:
    """One part alone at first, later both."""

    def __init__(self, first: str) -> None:
        self.first, self.is_later = first, False

    def loss(self, module: Module, batch: Batch) -> Loss:
        parts = loss(module, batch).parts
        return Loss(**{n: parts[n] for n in parts if self.is_later or (n == "value") == (self.first == "value")})

    def batches(self, count: int) -> Iterator[dict[str, Any]]:
        for batch in batches(count):
            yield batch
            self.is_later = True


@pytest.mark.parametrize("first", ["policy", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_comes_later_is_limited_by_itself_too(kind: str, first: str) -> None:
    module = make(kind)
    phases = InPhases(first)
    learner = ModuleLearner(module, phases.loss, optimizer=OptimizerConfig(grad_clip=LIMIT))
    learner.register_optimizer("all", torch.optim.SGD, list(module.parameters()), 1.0)
    one, two = batches(2)
    assert set(learner.update_from([one]).metrics) & {"grad_norm/policy", "grad_norm/value"} == set()
    phases.is_later = True
    wanted, norms = limited(module, [two])
    before = [p.detach().clone() for p in module.parameters()]
    update = learner.update_from([two])
    for old, parameter, grad in zip(before, module.parameters(), wanted, strict=True):
        torch.testing.assert_close(old - parameter, grad, rtol=1e-4, atol=1e-5)
    for side, norm in norms.items():
        assert update.metrics[f"grad_norm/{side}"] == pytest.approx(norm, rel=1e-4)


def test_a_later_part_of_the_policys_side_may_reach_the_values_layers() -> None:
    extras = [0]

    def with_extra(module: Module, batch: Batch) -> Loss:
        parts = dict(loss(module, batch).parts)
        if extras[0]:
            value = batch.forward(module).value
            assert value is not None
            parts["extra"] = 10.0 * value.mean()
        return Loss(**parts)

    module = make("separate")
    learner = ModuleLearner(module, with_extra, optimizer=OptimizerConfig(grad_clip=LIMIT))
    learner.register_optimizer("all", torch.optim.SGD, list(module.parameters()), 1.0)
    one, two = batches(2)
    learner.update_from([one])
    extras[0] = 1
    parameters = list(module.parameters())
    parts = with_extra(module, Batch({n: torch.from_numpy(c) for n, c in two.items()}, module)).parts
    grads = torch.autograd.grad(
        parts["policy"] + parts["entropy"] + parts["extra"], parameters, retain_graph=True, allow_unused=True
    )
    wanted = nn.utils.get_total_norm([grad for grad in grads if grad is not None])
    assert learner.update_from([two]).metrics["grad_norm/policy"] == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize("how", [{"accumulate": 2}, pytest.param({"compile": True}, marks=pytest.mark.slow)])
def test_parts_that_come_too_late_are_refused(how: dict[str, Any]) -> None:
    optimizer = OptimizerConfig(grad_clip=LIMIT, accumulate=how.get("accumulate", 1))
    compute = ComputeConfig(compile=how.get("compile", False))
    phases = InPhases("policy")
    learner = ModuleLearner(make("shared"), phases.loss, optimizer=optimizer, compute=compute)
    with pytest.raises(EtudeError, match="in .*first batch.*as 0 times themselves"):
        learner.update_from(phases.batches(6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_policys_step_does_not_depend_on_the_scale_of_returns(kind: str) -> None:
    def step(scale: float) -> torch.Tensor:
        def scaled(module: Module, batch: Batch) -> Loss:
            parts = loss(module, batch).parts
            return Loss(**parts | {"value": scale * parts["value"]})

        module = make(kind)
        torch.manual_seed(0)
        learner = ModuleLearner(module, scaled, optimizer=OptimizerConfig(grad_clip=LIMIT))
        learner.register_optimizer("all", torch.optim.SGD, list(module.parameters()), 1.0)
        learner.update_from(batches(1))
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    torch.testing.assert_close(step(1.0), step(1e6), rtol=1e-4, atol=1e-6)  # both are above the limit


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_sees_and_changes_the_gradient_that_is_applied(kind: str) -> None:
    seen: list[torch.Tensor] = []

    def hook(module: Module) -> None:
        seen.append(torch.cat([p.grad.reshape(-1).clone() for p in module.parameters() if p.grad is not None]))
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    module, before = make(kind), make(kind)
    learner = ModuleLearner(module, loss, on_gradients=hook, optimizer=OptimizerConfig(grad_clip=LIMIT))
    learner.update_from(batches(1))
    (grad,) = seen
    assert float(grad.norm()) > 0.1
    for parameter, old in zip(module.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_is_skipped(kind: str) -> None:
    bad = batches(3)
    bad[1]["reward"] = np.full(32, np.inf, np.float32)
    module, other = make(kind), make(kind)
    how: dict[str, Any] = {"optimizer": OptimizerConfig(grad_clip=LIMIT)}
    learner = ModuleLearner(module, loss, **how)
    assert learner.update_from(bad).metrics["skipped_steps"] == 1.0
    ModuleLearner(other, loss, **how).update_from([bad[0], bad[2]])
    for parameter, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted)


# -- learning rates -------------------------------------------------------------------------------------------------


def owners(module: Module, kind: str) -> dict[str, str]:
    """Whose each parameter is, by what the network looks like."""
    if kind == "separate":
        return {n: "critic" if "critic" in n or "value" in n else "actor" for n, _ in module.named_parameters()}
    if kind == "shared":
        return {
            n: "critic" if "value" in n else "actor" if "head" in n else "all" for n, _ in module.named_parameters()
        }
    kinds = {"value": "critic", "scale": "critic", "policy": "actor", "first": "all"}
    return {name: kinds[name.split(".")[1]] for name, _ in module.named_parameters()}


RATED = [
    *((kind, clip, False) for kind in KINDS for clip in (None, LIMIT)),
    ("partly shared", LIMIT, True),
    *(pytest.param(kind, clip, True, marks=pytest.mark.slow) for kind in KINDS[:2] for clip in (None, LIMIT)),
    pytest.param("partly shared", None, True, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize(("kind", "clip", "compiled"), RATED)
def test_actor_and_critic_have_learning_rates_of_their_own(kind: str, clip: float | None, compiled: bool) -> None:
    module, other = make(kind), make(kind)
    rates = {"all": 0.01, "actor": 0.002, "critic": 0.03}
    learner = ModuleLearner(
        module,
        loss,
        lr=0.01,
        optimizer=OptimizerConfig(grad_clip=clip, actor_lr=0.002, critic_lr=0.03),
        compute=ComputeConfig(compile=compiled),
    )
    learner.update_from(batches())
    of = owners(other, kind)
    optimizer = torch.optim.Adam([{"params": [p], "lr": rates[of[name]]} for name, p in other.named_parameters()])
    for columns in batches():
        if clip is None:
            optimizer.zero_grad()
            loss(other, Batch({n: torch.from_numpy(c) for n, c in columns.items()}, other)).total.backward()
        else:
            for parameter, grad in zip(other.parameters(), limited(other, [columns])[0], strict=True):
                parameter.grad = grad
        optimizer.step()
    for (name, parameter), wanted in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert learner.lr == pytest.approx(rates)


@pytest.mark.parametrize("own", ["actor", "critic"])
def test_a_learning_rate_of_no_parameter_is_refused(own: str) -> None:
    def values_alone(module: Module, batch: Batch) -> Loss:
        return Loss(value=loss(module, batch).parts["value"])

    learner = ModuleLearner(make("separate"), values_alone, optimizer=OptimizerConfig(**{f"{own}_lr": 0.1}), name="red")
    with pytest.raises(SettingsError, match=rf"`{own}_lr` is set, but in module 'red' no parameter"):
        learner.update_from(batches(1))


def test_adams_settings_are_those_of_torch() -> None:
    module, other = make("separate"), make("separate")
    learner = ModuleLearner(module, loss, lr=LR, optimizer=OptimizerConfig(grad_clip=None, eps=0.1, betas=(0.5, 0.6)))
    learner.update_from(batches())
    optimizer = torch.optim.Adam(other.parameters(), lr=LR, eps=0.1, betas=(0.5, 0.6))
    for columns in batches():
        optimizer.zero_grad()
        loss(other, Batch({n: torch.from_numpy(c) for n, c in columns.items()}, other)).total.backward()
        optimizer.step()
    for parameter, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5)


def test_schedules_count_gradient_steps_where_they_are_to() -> None:
    seen = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append((learner.lr["all"], float(module.scheduled["weight"])))
        return loss(module, batch)

    learner = ModuleLearner(
        make("separate"),
        noting,
        lr=("cosine", (0, 1.0), (4, 0.0)),
        scheduled={"weight": ((1, 0.0), (3, 4.0))},
        schedules_by="updates",
    )
    learner.set_env_steps(1000)  # is of no meaning here
    learner.update_from(batches(2))
    state = learner.state_dict()
    learner.update_from(batches(4))
    rates = [(1 + np.cos(np.pi * min(i, 4) / 4)) / 2 for i in range(6)]
    np.testing.assert_allclose(seen, list(zip(rates, [0, 0, 2, 4, 4, 4], strict=True)), atol=1e-6)
    other = ModuleLearner(make("separate"), loss, lr=((0, 1.0), (4, 0.0)), schedules_by="updates")
    other.load_state_dict(state)
    assert other.lr["all"] == 0.5
