# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of readers compares does the same work."""

from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from benchmarks import readers
from benchmarks.harness import Options
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, validate


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """With a recording of three episodes as the expert's."""
    lengths = np.array([5, 7, 4])
    steps = {"obs": np.random.default_rng(0).random((16, 4), np.float32), "action": np.arange(16) % 2}
    segments = Segments.of(3, episode_id=["a", "b", "c"], truncated=True)
    exp = Experience(
        {**steps, "reward": np.ones(16)},
        np.append(0, np.cumsum(lengths)),
        segments,
        {"obs": np.ones((3, 4), np.float32)},
    )
    with RecordingWriter(tmp_path / "expert", obs_space=Box(-9, 9, (4,)), action_space=Discrete(2)) as writer:
        writer.write(exp)
    return Options(True, tmp_path)


def test_all_readers_find_the_same_steps(options: Options) -> None:
    names = ("rllib-episodes", "rllib-table", "minari", "lerobot")
    episodes, table, minari, lerobot = (readers.written(name, options) for name in names)
    assert [readers._experience(path) for path in (episodes, table, minari, lerobot)] == [16] * 4
    assert [readers._msgpack(episodes), readers._to_numpy(table), readers._h5py(minari)] == [16] * 3
    assert readers._to_numpy(lerobot) == 16


def test_a_repeated_table_holds_episodes_of_its_own(options: Options) -> None:
    recording = Recording.open(readers.repeated(3, options))
    assert (recording.num_steps, recording.num_episodes) == (48, 9)


def test_images_are_drawn_and_read(options: Options) -> None:
    readers._draw(options.folder / "images", 500)
    assert validate(options.folder / "images").ok
    obs = Recording.open(options.folder / "images").read().steps["obs"]
    assert obs.shape == (500, *readers.IMAGE)
    assert np.array_equal(obs[1:, ..., :3], obs[:-1, ..., 1:])  # four frames, the newest last
