# SPDX-License-Identifier: Apache-2.0
"""Two learners in processes of their own against one that has everyone's rows."""

import dataclasses
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gymnasium import spaces
from torch import nn

from etude.errors import EtudeError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, ComputeConfig, Loss, ModuleLearner, OptimizerConfig
from etude.learners.distributed import Team, TeamLost, dealt
from etude.modules import Module, NetworkConfig, Output, make_module

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks, with torch's threads

OBS = spaces.Box(-1, 1, (4,), np.float32)
ACT = spaces.Discrete(3)


def _work(rank: int, path: str, connection: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    while (task := connection.recv()) is not None:
        function, args = task
        try:
            connection.send((True, function(*args)))
        except BaseException as error:  # noqa: BLE001 - it is raised by the test's process
            connection.send((False, (error, traceback.format_exc())))
    dist.destroy_process_group()


class Pair:
    """Two processes in one group."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(2):
            own, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, path, theirs), daemon=True)
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: tuple[Any, Any]) -> list[Any]:
        """What the function gives in each process; each argument is a pair, of one for each."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((function, tuple(pair[rank] for pair in args)))
        found = [pipe.recv() for pipe in self.pipes]
        for is_fine, value in found:
            if not is_fine:
                print(value[1])
                raise value[0]
        return [value for _, value in found]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(20)
            assert process.exitcode == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(os.fspath(tmp_path_factory.mktemp("team") / "store"))
    yield pair
    pair.close()


# -- what they learn ----------------------------------------------------------------------------------------------


class WithRunningMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.value = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, obs: torch.Tensor) -> Output:
        seen = self.norm(obs)
        return Output(self.out(seen), value=self.value(seen).squeeze(-1))


def make(kind: str) -> Module:
    torch.manual_seed(0)
    if kind == "norm":
        return make_module(WithRunningMeans(), OBS, ACT, NetworkConfig())
    recurrent = {"recurrent": "lstm", "recurrent_size": 4} if kind == "lstm" else {}
    return make_module(None, OBS, ACT, NetworkConfig(hidden=(8,), **recurrent))


def loss(module: Module, batch: Batch) -> Loss:
    out = batch.forward(module)
    assert out.value is not None
    found = Loss(
        policy=-(out.logp(batch.action) * batch.reward).mean(), value=3.0 * (out.value - batch.reward).square().mean()
    )
    return found.log(entropy=out.entropy().mean(), top=batch.reward.mean()).keep(td_error=batch.reward - out.value)


def experience(num_steps: int, *, seed: int = 0, module: Module | None = None, length: int = 7) -> Experience:
    """Segments of one length; what each begins with is made up, so that all that is used shows."""
    rng = np.random.default_rng(seed)
    offsets = np.unique(np.append(np.arange(0, num_steps, length), num_steps))
    steps = {
        "obs": rng.normal(size=(num_steps, 4)).astype(np.float32),
        "action": rng.integers(0, 3, num_steps),
        "reward": rng.normal(size=num_steps).astype(np.float32),
        "row": np.arange(num_steps),
    }
    for name, part in {} if module is None else module.initial_state().items():
        steps[f"state_in/{name}"] = rng.normal(size=(num_steps, *part.shape)).astype(np.float32)
    num = len(offsets) - 1
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)])
    return Experience(steps, offsets, segments, {"obs": rng.normal(size=(num, 4)).astype(np.float32)})


def learner_of(kind: str, how: dict[str, Any], *, with_team: bool) -> ModuleLearner:
    module = make(kind)
    if how.get("parameters") == "two":
        named = list(module.named_parameters())
        groups = {"net": [p for n, p in named if "value" not in n], "value": [p for n, p in named if "value" in n]}
        how = how | {"parameters": groups}
    settings = {field.name for field in dataclasses.fields(OptimizerConfig)}
    optimizer = {"grad_clip": None, "grad_clip_by": "global_norm"} | {n: how[n] for n in how if n in settings}
    learner = ModuleLearner(
        module,
        how.get("loss", loss),
        **{"seed": 3, "lr": 1e-2} | _without(how, "loss", "precision", *settings),
        optimizer=OptimizerConfig(**optimizer),
        compute=ComputeConfig(precision=how.get("precision", "float32")),
    )
    learner.team = Team() if with_team else None
    return learner


def _without(how: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name not in names}


def found(learner: ModuleLearner, update: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in learner.module.state_dict().items()},
        "losses": update.losses,
        "metrics": update.metrics,
        "counts": (learner.updates, learner.skipped, learner.steps_trained),
        "rng": learner.state_dict()["rng"],
        "moments": {name: optimizer.state_dict() for name, optimizer in learner.optimizers.items()},
    }


def update(kind: str, how: dict[str, Any], exp: Experience, going: dict[str, Any], with_team: bool = True) -> Any:
    learner = learner_of(kind, how, with_team=with_team)
    return found(learner, learner.update(exp, **going))


def update_from(kind: str, how: dict[str, Any], batches: list[Any], with_team: bool = True) -> Any:
    learner = learner_of(kind, how, with_team=with_team)
    return found(learner, learner.update_from(batches))


def both(value: Any) -> tuple[Any, Any]:
    return value, value


def check(two: list[Any], one: Any, atol: float = 2e-6) -> None:
    """Both have the same, to the bit, and it is what one learner has."""
    first, second = two
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name
        torch.testing.assert_close(value, one["weights"][name], atol=atol, rtol=1e-4)
    for name in ("losses", "metrics", "counts", "rng"):
        assert repr(first[name]) == repr(second[name])
    assert first["counts"] == one["counts"]
    for name in ("losses", "metrics"):
        assert first[name] == pytest.approx(one[name], rel=50 * atol, abs=5 * atol, nan_ok=True)


def shares_of(batch: dict[str, Any], at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: c[:at] for n, c in batch.items()}, {n: c[at:] for n, c in batch.items()}


def by_rank(shares: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [first for first, _ in shares], [second for _, second in shares]


# -- updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, 30, 60, 0])
@pytest.mark.parametrize(
    "how",
    [{}, {"grad_clip": 0.3}, {"parameters": "two", "log_grad_norms": True}, {"precision": "bfloat16"}],
    ids=["plain", "clipped", "two-optimizers", "bfloat16"],
)
def test_full_batches_are_those_of_one_learner(pair: Pair, at: int, how: dict[str, Any]) -> None:
    exp = experience(60)
    going = {"num_minibatches": 1, "epochs": 4}
    two = pair.run(update, both("mlp"), both(how), exp.split(at), both(going))
    # rounded to bfloat16, gradients of parts don't quite add up to those of the whole
    check(two, update("mlp", how, exp, going, with_team=False), atol=1e-3 if "precision" in how else 2e-6)


def test_a_loss_that_rests_and_rows_for_one_only(pair: Pair) -> None:
    how = {"parameters": "two", "loss": resting_loss}
    batches = [_columns(12, seed) for seed in range(5)]
    two = pair.run(update_from, both("mlp"), both(how), ([shares_of(b, 0)[0] for b in batches], batches))
    check(two, update_from("mlp", how, batches, with_team=False))


def resting_loss(module: Module, batch: Batch) -> Loss:
    of = loss(module, batch)
    return of.rest("value") if batch["row"][0] % 2 else of


def _columns(size: int, seed: int) -> dict[str, Any]:
    return {**experience(size, seed=seed).steps, "row": np.full(size, seed)}


@pytest.mark.parametrize("at", [1, 16, 40])
def test_minibatches_are_the_union_of_shares(pair: Pair, at: int) -> None:
    """In order, what each step learns from is known: against plain Adam on the rows of both."""
    exp = experience(47)
    going = {"minibatch_size": 12, "epochs": 2, "shuffle": False}
    two = pair.run(update, both("mlp"), both({}), exp.split(at), both(going))
    module = make("mlp")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    columns = exp.to("cpu").steps
    owned = [np.arange(at), np.arange(at, 47)]
    for _ in range(2):
        begun = [0, 0]
        for i in range(4):
            rows = []
            for rank, own in enumerate(owned):
                # row number n of all is dealt to minibatch n % 4
                size = sum(n % 4 == i for n in own)
                rows += own[begun[rank] : begun[rank] + size].tolist()
                begun[rank] += size
            assert len(rows) in (11, 12)
            optimizer.zero_grad()
            loss(module, Batch({n: c[rows] for n, c in columns.items()}, module)).total.backward()
            optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(two[0]["weights"][name], value, atol=2e-6, rtol=1e-4)
    assert two[0]["counts"] == (8, 0, 2 * 47)


def test_each_step_is_learned_from_once_an_epoch(pair: Pair) -> None:
    exp = experience(53)
    first, second = pair.run(rows_seen, exp.split(20))
    assert [len(a) + len(b) for a, b in zip(first, second, strict=True)] == [9, 9, 9, 9, 9, 8] * 2
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(itertools.chain(*first[epoch], *second[epoch])) == list(range(53))
    assert first[:6] != first[6:]


def rows_seen(exp: Experience) -> list[list[int]]:
    seen: list[list[int]] = []

    def watched(module: Module, batch: Batch) -> Loss:
        seen[-1] += batch["row"].tolist()
        return loss(module, batch)

    learner = learner_of("mlp", {"loss": watched, "on_gradients": lambda module: seen.append([])}, with_team=True)
    seen.append([])
    learner.update(exp, minibatch_size=10, epochs=2)
    return seen[:-1]


@pytest.mark.parametrize("size", [{"num_minibatches": 1}, {"minibatch_size": 500}])
@pytest.mark.parametrize("at", [0, 21, 42])
def test_recurrent_modules(pair: Pair, at: int, size: dict[str, int]) -> None:
    exp = experience(60, module=make("lstm"))
    going = {"epochs": 3, "max_seq_len": 3, "burn_in": 2, **size}
    two = pair.run(update, both("lstm"), both({}), exp.split(at), both(going))
    check(two, update("lstm", {}, exp, going, with_team=False))


def test_recurrent_minibatches_where_one_has_few_sequences(pair: Pair) -> None:
    exp = experience(60, module=make("lstm"))
    two = pair.run(update, both("lstm"), both({}), exp.split(7), both({"minibatch_size": 12, "epochs": 2}))
    assert two[0]["counts"] == (10, 0, 120)
    for name, value in two[0]["weights"].items():
        assert torch.equal(value, two[1]["weights"][name])


def test_recurrent_batches_of_segments(pair: Pair) -> None:
    batches = [experience(21, seed=seed) for seed in range(3)]
    shares = by_rank([batch.split(at) for batch, at in zip(batches, (7, 14, 0), strict=True)])
    two = pair.run(update_from, both("lstm"), both({}), shares)
    check(two, update_from("lstm", {}, batches, with_team=False))


@pytest.mark.parametrize("num", [4, 5])
def test_accumulated_batches_of_unequal_shares(pair: Pair, num: int) -> None:
    batches = [experience(size, seed=size).steps for size in (12, 3, 20, 8, 5)[:num]]
    shares = [shares_of(b, at) for b, at in zip(batches, (2, 3, 0, 4, 1)[:num], strict=True)]
    how = {"accumulate": 2, "grad_clip": 0.5}
    two = pair.run(update_from, both("mlp"), both(how), by_rank(shares))
    check(two, update_from("mlp", how, batches, with_team=False))


def test_running_means_are_those_of_who_had_most(pair: Pair) -> None:
    exp = experience(60)
    shares = exp.split(20)
    two = pair.run(update, both("norm"), both({}), shares, both({"num_minibatches": 1}))
    for name, value in two[0]["weights"].items():
        assert torch.equal(value, two[1]["weights"][name])
    mean = torch.from_numpy(shares[1].steps["obs"]).mean(0)
    torch.testing.assert_close(two[0]["weights"]["net.norm.running_mean"], 0.1 * mean)


# -- what decides how it goes on ----------------------------------------------------------------------------------


def test_steps_are_skipped_by_all_where_one_has_nan(pair: Pair) -> None:
    batches = [_columns(12, seed) for seed in range(4)]
    batches[2]["reward"][1] = np.nan
    two = pair.run(update_from, both("mlp"), both({}), by_rank([shares_of(b, 5) for b in batches]))
    check(two, update_from("mlp", {}, batches, with_team=False))
    assert two[0]["counts"] == (4, 1, 48)
    assert two[0]["metrics"]["skipped_steps"] == 1.0


def test_too_many_skipped_steps_are_one_error(pair: Pair) -> None:
    batches = [_columns(12, seed) for seed in range(4)]
    for batch in batches:
        batch["reward"][11] = np.inf
    shares = by_rank([shares_of(b, 5) for b in batches])
    said = pair.run(error_of, both({"max_skipped": 3}), shares)
    assert said[0] == said[1]
    assert "3 gradient steps in a row" in said[0]
    assert "the loss part `policy`" in said[0]
    assert "`reward` holds 1 numbers of 7 that are not finite" in said[0]


def error_of(how: dict[str, Any], batches: list[Any]) -> str:
    with pytest.raises(EtudeError) as caught:
        learner_of("mlp", how, with_team=True).update_from(batches)
    return str(caught.value)


def test_measures_are_of_everyones_steps(pair: Pair) -> None:
    exp = experience(50)
    two = pair.run(measured, exp.split(11))
    assert two[0] == two[1]
    assert two[0]["reward"] == pytest.approx(exp.steps["reward"].mean(), abs=1e-6)
    with_none = pair.run(measured, exp.split(0))
    assert with_none[0] == with_none[1] == pytest.approx({"reward": float(exp.steps["reward"].mean())}, abs=1e-6)


def measured(exp: Experience) -> dict[str, float]:
    return learner_of("mlp", {}, with_team=True).measure(exp, lambda module, batch: {"reward": batch.reward.mean()})


def test_state_is_that_of_all(pair: Pair) -> None:
    """Whoever has less to shuffle goes on with the same random stream: one state restores all."""
    exp = experience(40)
    two = pair.run(update, both("mlp"), both({}), exp.split(7), both({"minibatch_size": 8, "epochs": 3}))
    assert two[0]["rng"] == two[1]["rng"]
    for name, value in two[0]["moments"]["all"].items():
        assert torch.equal(value, two[1]["moments"]["all"][name])


# -- the team itself ----------------------------------------------------------------------------------------------


def test_what_a_team_agrees_on(pair: Pair) -> None:
    assert pair.run(agreed, (3, 8)) == [(11, [3, 8])] * 2


def agreed(number: int) -> Any:
    team = Team()
    assert team.size == 2
    return team.total(number), team.gathered(number)


def test_compiled_steps_are_refused(pair: Pair) -> None:
    assert pair.run(refused) == [None, None]


def refused() -> None:
    learner = ModuleLearner(make("mlp"), loss, compute=ComputeConfig(compile=True))
    with pytest.raises(SettingsError, match=r"`compile` is True, but 2 learners average their gradients .* take one"):
        learner.team = Team()


def test_others_that_are_gone_are_said(tmp_path: Any) -> None:
    pair = Pair(os.fspath(tmp_path / "store"))
    assert pair.run(agreed, (1, 2))[0][0] == 3
    pair.processes[1].kill()
    pair.pipes[0].send((agreed, (1,)))
    is_fine, (error, _) = pair.pipes[0].recv()
    assert not is_fine
    assert isinstance(error, TeamLost)
    assert "could not reach the others" in str(error)
    pair.processes[0].kill()


@pytest.mark.parametrize(
    ("count", "owned"), [(4, [3, 9]), (4, [0, 5]), (6, [2, 2]), (1, [0, 3]), (5, [1, 0]), (3, [3])]
)
def test_dealing(count: int, owned: list[int]) -> None:
    hands = [dealt(count, owned, rank) for rank in range(len(owned))]
    together = np.sum([sizes for _, sizes in hands], axis=0)
    assert together.max() - together.min() <= 1
    assert together.sum() == max(sum(owned), count)
    for (own, sizes), number in zip(hands, owned, strict=True):
        assert len(own) == sum(sizes)
        assert set(own.tolist()) == set(range(number))
