# SPDX-License-Identifier: Apache-2.0
"""Draws in proportion to priorities, and their weights, against the formulas of Schaul et al. 2016."""

import numpy as np
import pytest
from some_experience import numbered

from etude.errors import DataError
from etude.experience import Priorities, Replay


def filled(num, *, capacity=None, **priorities):
    replay = Replay(num if capacity is None else capacity, priorities=Priorities(**priorities), seed=0)
    replay.add(numbered([num]))
    return replay


def probabilities(priority, alpha):
    powers = np.asarray(priority, np.float64) ** alpha
    return powers / powers.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_steps_are_drawn_in_proportion(alpha: float) -> None:
    replay = filled(60, alpha=alpha, epsilon=1e-9)
    priority = np.random.default_rng(1).uniform(0.1, 5.0, 60)
    replay.update_priorities(np.arange(60), priority)
    drawn = np.concatenate([replay.sample(50)["index"] for _ in range(2000)])
    expected = probabilities(priority, alpha) * len(drawn)
    chi_square = ((np.bincount(drawn, minlength=60) - expected) ** 2 / expected).sum()
    assert chi_square < 98.3  # the 99.9 % quantile with 59 degrees of freedom


def test_each_equal_share_of_the_sum_gives_one_step() -> None:
    replay = filled(4, alpha=1.0, epsilon=1e-12)
    replay.update_priorities([0, 1, 2, 3], [1.0, 1.0, 2.0, 4.0])
    for _ in range(50):
        assert np.bincount(replay.sample(8)["index"]).tolist() == [1, 1, 2, 4]


def test_weights_make_up_for_probabilities() -> None:
    replay = filled(60, alpha=0.6, beta=0.4, epsilon=1e-9)
    priority = np.random.default_rng(2).uniform(0.1, 5.0, 60)
    replay.update_priorities(np.arange(60), priority)
    for beta in (0.4, 0.7, 1.0, 0.0):
        replay.beta = beta
        batch = replay.sample(32)
        weights = (60 * probabilities(priority, 0.6)[batch["index"]]) ** -beta
        assert batch["weight"].dtype == np.float32
        np.testing.assert_allclose(batch["weight"], weights / weights.max(), rtol=1e-5)


def test_new_steps_have_the_greatest_priority_so_far() -> None:
    replay = filled(4, capacity=8, alpha=1.0, epsilon=1e-9)
    replay.update_priorities([0, 1, 2], [7.0, 1.0, 1.0])
    replay.update_priorities([0], [1.0])  # 7 is still the greatest there has been
    replay.add(numbered([2], episode_id=["new"]))
    drawn = np.concatenate([replay.sample(90)["index"] for _ in range(200)])
    expected = np.array([1, 1, 1, 1, 7, 7]) / 18 * len(drawn)
    assert ((np.bincount(drawn) - expected) ** 2 / expected).sum() < 20.5  # 99.9 %, 5 degrees of freedom


def test_priorities_of_steps_that_are_gone_change_nothing() -> None:
    replay = filled(4, alpha=1.0)
    batch = replay.sample(4)
    replay.add(numbered([3], episode_id=["new"]))
    replay.update_priorities([0, 1, 2], [1e6, 1e6, 1e6])
    drawn = np.bincount(np.concatenate([replay.sample(4)["index"] for _ in range(100)]), minlength=7)
    assert drawn.tolist() == [0, 0, 0, 100, 100, 100, 100]
    replay.update_priorities(batch["index"], np.full(4, 1e-3))  # one of these is stored
    replay.update_priorities([], [])
    assert np.bincount(np.concatenate([replay.sample(4)["index"] for _ in range(100)]))[3] < 10


def test_of_steps_given_twice_the_last_counts() -> None:
    replay = filled(2, alpha=1.0, epsilon=1e-9)
    replay.update_priorities([0, 1, 0], [100.0, 1.0, 3.0])
    assert np.bincount(replay.sample(400)["index"]).tolist() == [300, 100]


def test_a_step_whose_outcome_is_not_known_has_no_priority() -> None:
    replay = Replay(8, priorities=Priorities(alpha=1.0), seed=0)
    replay.add(numbered([2], has_final_obs=False))
    assert set(replay.sample(100)["index"]) == {0}
    replay.update_priorities([0], [5.0])
    with pytest.raises(DataError, match="there is no step 1"):
        replay.update_priorities([0, 1], [5.0, 5.0])
    replay.add(numbered([1], episode_id=["e0"], t_start=2))
    batch = replay.sample(300)
    assert np.bincount(batch["index"]).tolist() == [150, 150]
    assert set(zip(batch["index"].tolist(), batch["next_obs"].tolist(), strict=True)) == {(0, 1.0), (1, 1.0)}


@pytest.mark.parametrize("extreme", [0.0, 1e-300, 1e300])
def test_extreme_priorities_are_kept_within_what_can_be_summed(extreme: float) -> None:
    replay = filled(3, alpha=3.0)
    replay.update_priorities([0, 1, 2], [extreme] * 3)
    batch = replay.sample(30)
    assert np.bincount(batch["index"]).tolist() == [10, 10, 10]
    assert (batch["weight"] == 1).all()


@pytest.mark.parametrize(
    ("index", "priority", "message"),
    [
        ([0], [-1.0], "priority 0 is -1.0: priorities must be finite and at least 0"),
        ([0, 1], [1.0, np.nan], "priority 1 is nan"),
        ([0, 1], [1.0], r"indices of shape \(2,\), priorities of shape \(1,\)"),
        ([0, 9], [1.0, 1.0], "there is no step 9: give the `index` that sample returned"),
        ([-1], [1.0], "there is no step -1"),
    ],
)
def test_priorities_that_can_not_be_are_refused(index, priority, message) -> None:
    with pytest.raises(DataError, match=message):
        filled(4).update_priorities(index, priority)


def test_a_uniform_replay_has_no_priorities() -> None:
    replay = Replay(4)
    for use in (lambda: replay.update_priorities([0], [1.0]), lambda: replay.beta):
        with pytest.raises(DataError, match=r"draws uniformly: make it with priorities=Priorities\(\)"):
            use()
