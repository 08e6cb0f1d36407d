# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.connectors import NStep
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments


def episodes(lengths: list[int], terminated: list[bool], known: bool = True) -> Experience:
    """Rewards are noise; the observation of step t of episode i is [i, t]."""
    rows = sum(lengths)
    obs = np.array([[i, t] for i, length in enumerate(lengths) for t in range(length)], np.float32)
    segments = Segments.of(
        len(lengths),
        episode_id=[f"e{i}" for i in range(len(lengths))],
        terminated=np.array(terminated),
        has_final_obs=np.array([known or end for end in terminated]),
    )
    final = np.array([[i, length] for i, length in enumerate(lengths)], np.float32)
    steps = {"obs": obs, "reward": np.random.default_rng(0).normal(size=rows)}
    return Experience(steps, np.cumsum([0, *lengths]).astype(np.int64), segments, {"obs": final})


@given(
    ends=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    n=st.integers(1, 12),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_it_is_the_sum_written_out(ends: list[tuple[int, bool]], n: int, gamma: float) -> None:
    lengths, terminated = [length for length, _ in ends], [end for _, end in ends]
    exp = episodes(lengths, terminated)
    seen = NStep(n, gamma).offline(exp)
    row = 0
    for i, length in enumerate(lengths):
        rewards = exp.steps["reward"][row : row + length]
        for t in range(length):
            k = min(n, length - t)
            expected = sum(gamma**j * rewards[t + j] for j in range(k))
            assert seen.steps["reward"][row + t] == pytest.approx(expected, abs=1e-5)
            assert seen.steps["next_obs"][row + t].tolist() == [i, t + k]
            is_end = terminated[i] and t + k == length
            assert seen.steps["terminated"][row + t] == is_end
            assert seen.steps["discount"][row + t] == pytest.approx(0.0 if is_end else gamma**k)
        row += length


def test_what_can_not_be_known_is_named() -> None:
    with pytest.raises(DataError, match="the observation after the last step of episode 'e1', which was not recorded"):
        NStep(2).offline(episodes([3, 4], [True, False], known=False))
    with pytest.raises(SettingsError, match="NStep.n must be at least 1, not 0"):
        NStep(0)
    with pytest.raises(SettingsError, match="NStep.gamma must be between 0 and 1"):
        NStep(1, 2.0)
