# SPDX-License-Identifier: Apache-2.0
"""Recordings of other tools through `Recording`: read, filtered, streamed and batched as Etude's own are."""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from etude.errors import DataError
from etude.recordings import Recording, convert


@pytest.fixture
def both(tmp_path: Path) -> tuple[Recording, Recording]:
    """Ten episodes of seven steps in the manner of D4RL, and the same in Etude's format."""
    rng = np.random.default_rng(0)
    n = 70
    obs = rng.normal(size=(n, 3)).astype(np.float32)
    np.savez(
        tmp_path / "d4rl.npz",
        observations=obs,
        actions=rng.normal(size=(n, 2)).astype(np.float32),
        rewards=np.arange(n, dtype=np.float32),
        next_observations=np.roll(obs, -1, 0),
        terminals=np.arange(n) % 7 == 6,
    )
    foreign = Recording.open(tmp_path / "d4rl.npz")
    return foreign, convert(foreign, tmp_path / "own")


def test_what_it_says_of_itself(both: tuple[Recording, Recording]) -> None:
    foreign, own = both
    assert (foreign.format, own.format) == ("npz", "etude-recording")
    assert foreign.num_steps == own.num_steps == 70
    assert foreign.num_episodes == own.num_episodes == 10
    assert foreign.columns == own.columns
    with pytest.raises(DataError, match=r"d4rl\.npz: there is no column `obss`; .* Nearest: `obs`"):
        foreign.read(columns=["obss"])


def test_whole_filtered_and_in_pieces(both: tuple[Recording, Recording]) -> None:
    for recording in both:
        whole = recording.read()
        np.testing.assert_array_equal(whole.steps["reward"], np.arange(70))
        some = recording.read(columns=["obs"], filter=pc.field("reward") >= 63)
        assert list(some.steps) == ["obs"]
        np.testing.assert_array_equal(some.steps["obs"], whole.steps["obs"][63:])
        parts = list(recording.stream(columns=["reward"], max_rows=20))
        assert max(part.num_steps for part in parts) <= 20
        np.testing.assert_array_equal(np.concatenate([part.steps["reward"] for part in parts]), np.arange(70))


def test_batches_see_every_step_once_an_epoch(both: tuple[Recording, Recording]) -> None:
    for recording in both:
        batches = list(recording.batches(16, columns=["reward", "next_obs", "terminated"], seed=1, epochs=1))
        rewards = np.concatenate([batch["reward"] for batch in batches])
        assert sorted(rewards.tolist()) == list(range(70))
        obs = recording.read().steps["obs"]
        for batch in batches:
            np.testing.assert_array_equal(batch["next_obs"], np.roll(obs, -1, 0)[batch["reward"].astype(int)])
            np.testing.assert_array_equal(batch["terminated"], batch["reward"] % 7 == 6)
        segments = list(recording.segment_batches(14, 7, columns=["reward"], seed=1, epochs=1))
        assert sorted(np.concatenate([exp.steps["reward"] for exp in segments]).tolist()) == list(range(70))
