# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_experience import experiences, numbered


@given(experiences(), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_every_step_to_train_on_comes_once_an_epoch(exp, size, epochs, as_tensors):
    exp = exp.with_steps(row=np.arange(exp.num_steps))
    wanted = np.flatnonzero(exp.trained()).tolist()
    source = exp.with_steps().to("cpu") if as_tensors else exp
    batches = list(source.minibatches(size, epochs=epochs, rng=np.random.default_rng(0), names=["row", "reward"]))
    per_epoch = -(-len(wanted) // size)
    assert len(batches) == epochs * per_epoch
    for e in range(epochs):
        epoch = batches[e * per_epoch : (e + 1) * per_epoch]
        assert all(len(batch["row"]) == size for batch in epoch[:-1])
        rows = [int(row) for batch in epoch for row in batch["row"]]
        assert sorted(rows) == wanted
        assert [float(r) for batch in epoch for r in batch["reward"]] == exp.steps["reward"][rows].tolist()


def test_minibatches_are_seeded_shuffled_anew_each_epoch_or_in_order():
    exp = numbered([50, 50])

    def order(**kwargs):
        return np.concatenate([batch["obs"] for batch in exp.minibatches(7, **kwargs)]).tolist()

    assert order(shuffle=False) == exp.steps["obs"].tolist()
    one, other = (order(rng=np.random.default_rng(1), epochs=2) for _ in range(2))
    assert one == other
    assert one[:100] != one[100:]
    assert order() != order(shuffle=False)
    assert set(next(exp.minibatches(7))) == {"obs", "action", "reward"}


def test_batches_of_nothing_are_refused():
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        next(numbered([2]).minibatches(0))
