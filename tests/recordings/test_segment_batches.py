# SPDX-License-Identifier: Apache-2.0
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import numbered, record

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, sample_segments

LENGTHS = [1, 9, 30, 4, 200, 17, 2, 60]
NUM_STEPS = sum(LENGTHS)


def check(batch: Experience, lengths: list[int], max_len: int) -> None:
    """Each segment is consecutive steps, and knows what follows; ends of episodes are where they are."""
    batch.validate()
    assert batch.lengths.max() <= max_len
    assert not batch.segments.lookback.any()
    assert batch.segments.has_final_obs.all()
    for exp in batch:
        episode, t = exp.steps["obs"][:, 0], exp.steps["obs"][:, 1]
        assert len(set(episode)) == 1
        np.testing.assert_array_equal(t, np.arange(t[0], t[0] + len(t)))
        np.testing.assert_array_equal(exp.t(), t)
        np.testing.assert_array_equal(exp.final_obs["obs"][0, :2], [episode[0], t[-1] + 1])
        is_last, is_even = t[-1] + 1 == lengths[int(episode[0])], episode[0] % 2 == 0
        assert exp.segments.terminated[0] == (is_last and is_even)
        assert exp.segments.truncated[0] == (is_last and not is_even)


def steps(batches: list[Experience]) -> list[tuple[float, float]]:
    return [(row[0], row[1]) for batch in batches for row in batch.steps["obs"]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    batch_size=st.integers(1, 70),
    max_len=st.integers(1, 45),
)
@settings(max_examples=60, deadline=None)
def test_every_step_comes_once_an_epoch_in_batches_of_exactly_the_size(
    lengths: list[int], batch_size: int, max_len: int
) -> None:
    batches = list(sample_segments(numbered(lengths), batch_size, max_len, seed=3, epochs=2))
    assert [batch.num_steps for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        check(batch, lengths, max_len)
    everything = sorted((i, t) for i, length in enumerate(lengths) for t in range(length))
    found = steps(batches)
    assert sorted(found[: len(everything)]) == everything
    assert sorted(found[len(everything) :]) == everything


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """In files of at most 64 rows, which cut episodes."""
    path = tmp_path_factory.mktemp("segments") / "data"
    record(path, numbered(LENGTHS), max_rows_per_file=64)
    return Recording.open(path)


@pytest.mark.parametrize("buffer_size", [1, 100, 10_000])
def test_streamed_ones_are_the_same_kind(recording: Recording, buffer_size: int) -> None:
    batches = list(recording.segment_batches(32, 25, buffer_size=buffer_size, epochs=2, columns=["obs", "reward"]))
    assert set(batches[0].steps) == {"obs", "reward"}
    for batch in batches:
        check(batch, LENGTHS, 25)
    assert [batch.num_steps for batch in batches[:-1]] == [32] * (len(batches) - 1)
    found = steps(batches)
    assert sorted(found[:NUM_STEPS]) == sorted(found[NUM_STEPS:]) == sorted(set(found))
    assert found[:NUM_STEPS] != found[NUM_STEPS:]


@pytest.mark.parametrize("buffer_size", [100, 10_000])
@pytest.mark.parametrize("start", [1, 5, 11, 40])
def test_going_on_after_a_restart(recording: Recording, buffer_size: int, start: int) -> None:
    def take(start: int) -> Iterator[Experience]:
        return recording.segment_batches(32, 25, buffer_size=buffer_size, seed=4, start=start)

    def take_sampled(start: int) -> Iterator[Experience]:
        return sample_segments(numbered(LENGTHS), 32, 25, seed=4, start=start)

    for source in (take, take_sampled):
        whole, rest = source(0), source(start)
        for _ in range(start):
            next(whole)
        for _ in range(15):
            a, b = next(whole), next(rest)
            np.testing.assert_array_equal(a.steps["obs"], b.steps["obs"])
            np.testing.assert_array_equal(a.offsets, b.offsets)


def test_lookback_is_left_out() -> None:
    exp = numbered([50, 7, 3]).cut(10, lookback=4)
    batches = list(sample_segments(exp, 16, 20, epochs=1))
    assert sorted(steps(batches)) == sorted((i, t) for i, n in enumerate([50, 7, 3]) for t in range(n))
    for batch in batches:
        check(batch, [50, 7, 3], 20)
    only_lookback = numbered([5])
    only_lookback.segments.lookback[:] = 5
    with pytest.raises(DataError, match="no steps to make batches of"):
        next(sample_segments(only_lookback, 4, 4))


def test_order_depends_on_the_seed_alone(recording: Recording) -> None:
    first, same, other = (steps(list(recording.segment_batches(32, 8, seed=s, epochs=1))) for s in (1, 1, 2))
    assert first == same
    assert first != other


def test_bad_arguments(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        sample_segments(numbered([3]), 0, 5)
    with pytest.raises(ValueError, match="max_len must be at least 1, not 0"):
        sample_segments(numbered([3]), 5, 0)
    with pytest.raises(DataError, match="no column `value`"):
        recording.segment_batches(5, 5, columns=["value"])
    with pytest.raises(DataError, match="no column `value`"):
        sample_segments(numbered([3]), 5, 5, columns=["value"])


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    def peak(folder: Path, episodes: int) -> int:
        exp = numbered([100] * episodes)
        exp = exp.with_steps(x=np.zeros((exp.num_steps, 50)))
        record(folder, exp, max_rows_per_file=2_000)
        recording = Recording.open(folder)
        tracemalloc.start()
        try:
            for _ in recording.segment_batches(100, 30, buffer_size=4_000, epochs=1):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(tmp_path / "small", 100), peak(tmp_path / "large", 800)
    assert large < 1.5 * small + 2**20
    assert large < 800 * 100 * 50 * 8 / 2
