# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of memory writes in each format holds the same steps."""

from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from benchmarks import held
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A recording of three episodes."""
    steps = {"obs": np.random.default_rng(0).random((16, 4), np.float32), "action": np.arange(16) % 2}
    segments = Segments.of(3, episode_id=["a", "b", "c"], truncated=True)
    exp = Experience(
        {**steps, "reward": np.ones(16)}, np.array([0, 5, 12, 16]), segments, {"obs": np.ones((3, 4), np.float32)}
    )
    with RecordingWriter(tmp_path / "source", obs_space=Box(-9, 9, (4,)), action_space=Discrete(2)) as writer:
        writer.write(exp)
    return tmp_path / "source"


@pytest.mark.parametrize("name", held._WRITERS)
def test_each_format_holds_the_same_steps(name: str, source: Path) -> None:
    target = source.with_name("written-v0")
    held._WRITERS[name](source, target)
    exp = Recording.open(Source(target, held._COLUMNS) if name.startswith("table") else target).read()
    whole = Recording.open(source).read()
    assert exp.lengths.tolist() == whole.lengths.tolist()
    np.testing.assert_allclose(exp.steps["obs"], whole.steps["obs"], rtol=1e-6)
    np.testing.assert_array_equal(exp.steps["action"], whole.steps["action"])
    assert exp.segments.truncated.tolist() == [True] * 3
