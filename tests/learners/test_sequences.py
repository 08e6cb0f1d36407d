# SPDX-License-Identifier: Apache-2.0
"""Learning on sequences against plain loops over them, one by one and without padding."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError, ModuleError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, ComputeConfig, Loss, ModuleLearner
from etude.learners.batch import Sequences
from etude.modules import Module, NetworkConfig, make_module

OBS = spaces.Dict({"x": spaces.Box(-1, 1, (3,), np.float64), "kind": spaces.Discrete(2, start=5)})
ACT = spaces.Discrete(3)
LENGTHS = [1, 9, 4, 13, 2, 6]
LOOKBACK = [0, 2, 0, 5, 1, 0]


def make(kind: Any = "lstm") -> Module:
    torch.manual_seed(0)
    return make_module(None, OBS, ACT, NetworkConfig(hidden=(8,), recurrent=kind, recurrent_size=4))


def experience(module: Module, lengths: Any = LENGTHS, lookback: Any = LOOKBACK) -> Experience:
    """Made-up steps with made-up states: nothing that follows from anything else, so that all that is used shows."""
    rng = np.random.default_rng(0)
    n = sum(lengths)
    steps = {
        "obs/x": rng.normal(size=(n, 3)),
        "obs/kind": rng.integers(5, 7, n),
        "action": rng.integers(0, 3, n),
        "reward": rng.normal(size=n),
        "row": np.arange(n),
    }
    for name, part in module.initial_state().items():
        steps[f"state_in/{name}"] = rng.normal(size=(n, *part.shape)).astype(np.float32)
    segments = Segments.of(len(lengths), episode_id=[str(i) for i in range(len(lengths))], lookback=lookback)
    final = {name: column[: len(lengths)] for name, column in steps.items() if name.startswith("obs")}
    return Experience(steps, np.cumsum([0, *lengths]), segments, final)


def test_burn_in_leaves_out_what_connectors_could_not_see_whole() -> None:
    exp = experience(make())
    t_start = np.array([0, 4, 0, 7, 0, 3])
    exp = exp.with_segments(t_start=t_start)
    for context in (0, 1, 3):
        found = Sequences.cut(exp, 4, 100, context)
        for start, burn_in in zip(found.starts.tolist(), found.burn_in.tolist(), strict=True):
            i = int(np.searchsorted(exp.offsets, start, side="right") - 1)
            # a row is whole if its episode begins in the segment, or `context` rows of it come before
            rows = range(int(exp.offsets[i]), start)
            whole = [row for row in rows if t_start[i] == 0 or row - rows.start >= min(context, LOOKBACK[i])]
            assert burn_in == len(whole)


def loss(module: Module, batch: Batch) -> Loss:
    out = batch.forward(module)
    assert out.value is not None
    return Loss(policy=-out.logp(batch.action).mean(), value=(out.value - batch.reward).square().mean()).log(
        entropy=out.entropy().mean()
    )


def cuts(exp: Experience, max_len: int) -> list[range]:
    """The rows of each sequence."""
    found = []
    for i in range(exp.num_segments):
        start = int(exp.offsets[i] + exp.segments.lookback[i])
        while start < exp.offsets[i + 1]:
            stop = min(start + max_len, int(exp.offsets[i + 1]))
            found.append(range(start, stop))
            start = stop
    return found


def unrolled(module: Module, exp: Experience, rows: range) -> Any:
    """The outputs of one sequence, a step at a time, with the state handed on."""
    columns = exp.to("cpu").steps
    names = list(module.initial_state())
    state = {name: columns[f"state_in/{name}"][rows.start : rows.start + 1] for name in names}
    outs = []
    for row in rows:
        obs = {"x": columns["obs/x"][None, row : row + 1], "kind": columns["obs/kind"][None, row : row + 1]}
        outs.append(module(obs, state))
        state = outs[-1].state
    return torch.cat([out.dist_inputs[0] for out in outs]), torch.cat([out.value[0] for out in outs])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("max_seq_len", "minibatch_size"), [(4, 8), (1, 5), (100, 10), (5, 1), (3, 1000)])
def test_outputs_are_those_of_each_sequence_alone(kind: str, max_seq_len: int, minibatch_size: int) -> None:
    module = make(kind)
    exp = experience(module)
    wanted = {rows.start: (rows, *unrolled(module, exp, rows)) for rows in cuts(exp, max_seq_len)}
    sizes: list[int] = []

    def checking(module: Module, batch: Batch) -> Loss:
        out, row = batch.forward(module), batch["row"].tolist()
        assert out.dist_inputs is not None
        assert out.value is not None
        assert len(row) == len(out.dist_inputs) == len(out.value) == len(batch.reward)
        at = 0
        while at < len(row):
            rows, inputs, value = wanted.pop(row[at])
            assert row[at : at + len(rows)] == list(rows)
            torch.testing.assert_close(out.dist_inputs[at : at + len(rows)], inputs)
            torch.testing.assert_close(out.value[at : at + len(rows)], value)
            assert batch["reward"][at].item() == pytest.approx(exp.steps["reward"][rows.start], rel=1e-6)
            at += len(rows)
        sizes.append(len(row))
        return loss(module, batch)

    ModuleLearner(module, checking, lr=0.0, seed=1).update(exp, minibatch_size=minibatch_size, max_seq_len=max_seq_len)
    assert not wanted
    assert sum(sizes) == exp.trained().sum()
    # a batch begins within a sequence's length of where it would with single steps
    begins = np.cumsum([0, *sizes[:-1]])
    assert ((begins % minibatch_size < max_seq_len) | (begins % minibatch_size == 0)).all()


def test_gradients_are_those_of_a_loop_over_sequences() -> None:
    for kind in ("lstm", "gru"):
        module, other = make(kind), make(kind)
        exp = experience(module)
        ModuleLearner(module, loss, lr=0.01).update(exp, minibatch_size=1000, max_seq_len=4)
        parts = [(rows, *unrolled(other, exp, rows)) for rows in cuts(exp, 4)]
        rows = [row for part in parts for row in part[0]]
        logp = torch.log_softmax(torch.cat([part[1] for part in parts]), -1)
        value = torch.cat([part[2] for part in parts])
        reward = torch.from_numpy(exp.steps["reward"][rows]).float()
        total = -logp[range(len(rows)), exp.steps["action"][rows]].mean() + (value - reward).square().mean()
        optimizer = torch.optim.Adam(other.parameters(), 0.01)
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for (name, p), q in zip(module.named_parameters(), other.named_parameters(), strict=True):
            torch.testing.assert_close(p, q[1], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_padding_and_lookback_play_no_part() -> None:
    """What stands in lookback rows, or in other sequences of the batch, changes nothing for a sequence."""
    module = make()
    exp = experience(module)
    spoiled = exp.with_steps(**{name: column.copy() for name, column in exp.steps.items()})
    lookback = ~exp.trained()
    for name in ("obs/x", "reward", "state_in/h", "state_in/c"):
        spoiled.steps[name][lookback] = 1e6

    def figures(module: Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: part.detach() for name, part in loss(module, batch).parts.items()}

    learner = ModuleLearner(module, loss)
    whole = learner.measure(exp, figures, max_seq_len=4)
    assert learner.measure(spoiled, figures, max_seq_len=4) == whole
    small = learner.measure(exp, figures, max_seq_len=4, chunk_size=1)  # a sequence at a time, so without padding
    assert small == pytest.approx(whole, rel=1e-5)


def test_measure_is_a_mean_over_all_steps() -> None:
    module = make()
    exp = experience(module)
    rewards = exp.steps["reward"][exp.trained()]
    for chunk_size in (1, 7, 1000):
        means = ModuleLearner(module, loss).measure(
            exp, lambda module, batch: {"reward": batch.reward.mean()}, chunk_size=chunk_size, max_seq_len=4
        )
        assert means["reward"] == pytest.approx(rewards.mean(), rel=1e-5)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_step_once_an_epoch_in_whole_sequences(shuffle: bool) -> None:
    module = make()
    exp = experience(module)
    seen: list[int] = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.extend(batch["row"].tolist())
        return loss(module, batch)

    ModuleLearner(module, noting, seed=0).update(exp, minibatch_size=8, epochs=2, max_seq_len=4, shuffle=shuffle)
    in_order = [row for rows in cuts(exp, 4) for row in rows]
    first, second = seen[: len(in_order)], seen[len(in_order) :]
    assert sorted(first) == sorted(second) == in_order
    assert (first == in_order) == (first == second) == (not shuffle)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda x: (x[0], min(x))), max_size=6),
    st.integers(1, 7),
)
def test_sequences_cover_all_that_is_trained_on(segments: list[tuple[int, int]], max_len: int) -> None:
    exp = experience(make(), [n for n, _ in segments], [lookback for _, lookback in segments])
    starts, lengths, before = Sequences.cut(exp, max_len)
    found = [range(start, start + n) for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    assert found == cuts(exp, max_len)
    assert not before.any()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("start", ["stored", "zeros"])
def test_burn_in_walks_to_the_state_that_a_sequence_starts_from(kind: str, start: Any) -> None:
    module, burn_in, max_len = make(kind), 3, 4
    exp = experience(module)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def noting(module: Module, batch: Batch) -> Loss:
        out = batch.forward(module)
        assert out.value is not None
        for row, inputs, value in zip(batch["row"].tolist(), out.dist_inputs, out.value, strict=True):
            seen[row] = (inputs.detach(), value.detach())
        return Loss(value=out.value.mean() * 0.0)

    learner = ModuleLearner(module, noting, lr=0.0)
    learner.update(exp, minibatch_size=9, max_seq_len=max_len, burn_in=burn_in, sequence_start=start)
    segment_of = np.repeat(np.arange(exp.num_segments), exp.lengths)
    for rows in cuts(exp, max_len):
        first = max(int(exp.offsets[segment_of[rows.start]]), rows.start - burn_in)
        longer = exp
        if start == "zeros":
            zeros = {name: np.zeros_like(c) for name, c in exp.steps.items() if name.startswith("state_in")}
            longer = exp.with_steps(**zeros)
        inputs, values = unrolled(module, longer, range(first, rows.stop))
        for row in rows:
            torch.testing.assert_close(seen[row][0], inputs[row - first], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(seen[row][1], values[row - first], rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_into_the_burn_in() -> None:
    grads = []
    for detach in (False, True):
        module = make()
        exp = experience(module, [8], [4])

        def by_hand(module: Module, batch: Batch, exp: Experience = exp) -> Loss:
            columns = exp.to("cpu").steps
            names = list(module.initial_state())
            state = {name: columns[f"state_in/{name}"][1:2] for name in names}
            obs = {part: columns[f"obs/{part}"][None] for part in ("x", "kind")}
            with torch.no_grad():
                state = module({part: column[:, 1:4] for part, column in obs.items()}, state).state
            return Loss(value=module({part: column[:, 4:] for part, column in obs.items()}, state).value.sum())

        def of_batch(module: Module, batch: Batch) -> Loss:
            return Loss(value=batch.forward(module).value.sum())

        learner = ModuleLearner(module, by_hand if detach else of_batch, lr=0.1)
        learner.update(exp, minibatch_size=8, burn_in=3)
        grads.append(learner.optimizers["all"].parameters.grad.clone())
    torch.testing.assert_close(*grads)


def test_as_many_minibatches_as_asked_for_of_whole_sequences() -> None:
    module = make()
    seen: list[int] = []

    def noting(module: Module, batch: Batch) -> Loss:
        seen.append(batch.size)
        return Loss(value=batch.forward(module).value.mean())

    exp = experience(module)
    ModuleLearner(module, noting, seed=0).update(exp, num_minibatches=3, epochs=2, max_seq_len=4, shuffle=False)
    lengths = [len(rows) for rows in cuts(exp, 4)]
    thirds = [sum(part) for part in np.array_split(lengths, 3)]
    assert seen == thirds * 2
    seen.clear()
    ModuleLearner(module, noting, seed=0).update(experience(module, [2, 1], [0, 0]), num_minibatches=3, shuffle=False)
    assert seen == [2, 1, 2]


def test_nothing_to_learn_from() -> None:
    module = make()
    update = ModuleLearner(module, loss).update(experience(module, [], []), minibatch_size=4)
    assert update.losses == {}


def test_a_seed_gives_the_same_updates() -> None:
    def weights(seed: int) -> torch.Tensor:
        module = make()
        ModuleLearner(module, loss, lr=0.01, seed=seed).update(
            experience(module), minibatch_size=8, epochs=3, max_seq_len=4
        )
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    torch.testing.assert_close(weights(1), weights(1), rtol=0, atol=0)
    assert not torch.allclose(weights(1), weights(2))


def test_feed_forward_modules_read_the_same_loss() -> None:
    module = make(None)
    exp = experience(module)
    batch = Batch(exp.to("cpu").steps, module)
    torch.testing.assert_close(batch.forward(module).value, module(batch.obs).value)
    assert "state_in/h" not in batch.used


def test_what_recurrent_modules_can_not_do_is_said() -> None:
    module = make()
    exp = experience(module)
    with pytest.raises(SettingsError, match=r"`compile` is True, but the module is recurrent.*Leave `compile` out"):
        ModuleLearner(module, loss, compute=ComputeConfig(compile=True))
    learner = ModuleLearner(module, loss)
    with pytest.raises(ModuleError, match="Network is recurrent, and can't learn from batches of single steps"):
        learner.update_from([exp.steps])
    del exp.steps["state_in/c"]
    with pytest.raises(DataError, match=r"its state is unknown: there is no column 'state_in/c'"):
        learner.update(exp, minibatch_size=8)
    with pytest.raises(ModuleError, match=r"called with \[B, T, ...\].*call batch.forward\(module\) rather than"):
        ModuleLearner(module, lambda module, batch: Loss(x=module(batch.obs).value.mean())).update(
            experience(module), minibatch_size=8
        )
