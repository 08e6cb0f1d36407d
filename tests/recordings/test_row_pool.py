# SPDX-License-Identifier: Apache-2.0
"""Rows taken from several parts as if from one."""

from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from etude import Experience, Recording, RecordingWriter
from etude.experience import Segments
from etude.recordings.batches import LARGE_ROW, RowPool


def _parts(lengths: list[int], width: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"obs": rng.integers(0, 255, (n, width), np.uint8), "action": rng.integers(0, 9, n)} for n in lengths]


@pytest.mark.parametrize("width", [3, LARGE_ROW])
@pytest.mark.parametrize("lengths", [[5], [4, 1, 7], [3, 0, 2]])
def test_rows_are_as_of_one_array(width: int, lengths: list[int]) -> None:
    parts = _parts(lengths, width)
    pool = RowPool(parts)
    index = np.random.default_rng(1).permutation(len(pool))
    taken = pool.take(index)
    for name in parts[0]:
        np.testing.assert_array_equal(taken[name], np.concatenate([part[name] for part in parts])[index])
        assert not any(np.shares_memory(taken[name], part[name]) for part in parts)
    assert len(pool) == sum(lengths)
    assert RowPool.row_bytes(taken) == width + 8


def test_large_rows_of_several_dtypes_are_widened() -> None:
    parts = [{"obs": np.ones((2, LARGE_ROW), dtype)} for dtype in (np.float32, np.float64)]
    assert RowPool(parts).take(np.array([3, 0]))["obs"].dtype == np.float64


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("buffer_size", [40, 1000])
def test_batches_of_images_can_be_written_to(tmp_path: Path, shuffle: bool, buffer_size: int) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (101, 40, 40, 4), np.uint8)
    with RecordingWriter(
        tmp_path, obs_space=Box(0, 255, (40, 40, 4), np.uint8), action_space=Discrete(200), max_rows_per_file=30
    ) as writer:
        for start in range(0, 100, 10):
            segments = Segments.of(1, episode_id=[f"e{start}"], truncated=True)
            steps = {"obs": frames[start : start + 10], "action": np.arange(start, start + 10)}
            final_obs = {"obs": frames[start + 10 : start + 11]}
            writer.write(Experience(steps, np.array([0, 10]), segments, final_obs))
    batches = list(Recording.open(tmp_path).batches(16, shuffle=shuffle, buffer_size=buffer_size, epochs=2))
    assert sum(len(batch["action"]) for batch in batches) == 200
    for batch in batches:
        np.testing.assert_array_equal(batch["obs"], frames[batch["action"]])
        batch["obs"][:] = 0
        batch["action"][:] = 100


def test_joined_rows_are_one_after_the_other_in_memory() -> None:
    columns = {"obs": np.arange(12.0).reshape(4, 3, order="F")}
    joined = RowPool.concat([columns, columns])["obs"]
    assert joined.flags.c_contiguous
    np.testing.assert_array_equal(joined, np.concatenate([columns["obs"]] * 2))
