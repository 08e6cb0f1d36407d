# SPDX-License-Identifier: Apache-2.0
"""Recordings for the tests of the viewer."""

import gymnasium as gym
import numpy as np

from etude.experience import Experience, Segments
from etude.recordings import RecordingWriter

CAMERA = gym.spaces.Dict(
    {"camera": gym.spaces.Box(0, 255, (12, 16, 3), np.uint8), "speed": gym.spaces.Box(-9, 9, (2,), np.float32)}
)


def episode(number, length, *, terminated=True, agent=None, t_start=0, reward=None):
    """One segment whose values tell which step they are of."""
    t = np.arange(t_start, t_start + length)
    images = np.zeros((length + 1, 12, 16, 3), np.uint8)
    images[:, :, :, 0] = (np.arange(t_start, t_start + length + 1) * 10 % 256)[:, None, None]
    images[:, :, :, 1] = number
    speed = np.stack([t / 10, -t / 10], axis=1).astype(np.float32)
    steps = {
        "obs/camera": images[:-1],
        "obs/speed": speed,
        "action": (t % 3).astype(np.int64),
        "reward": np.full(length, 1.0 if reward is None else reward, np.float32),
    }
    segments = Segments.of(
        1,
        episode_id=[f"e{number}"],
        agent_id=[agent],
        t_start=[t_start],
        terminated=[terminated],
        has_final_obs=[True],
    )
    final_obs = {"obs/camera": images[-1:], "obs/speed": speed[-1:]}
    return Experience(steps, np.array([0, length]), segments, final_obs)


def write(path, pieces, max_rows=None):
    """A recording of ``pieces``, each in a file of its own."""
    with RecordingWriter(path, obs_space=CAMERA, action_space=gym.spaces.Discrete(3), env="Car-v0") as writer:
        for piece in pieces:
            writer.write(piece)
            writer.flush()
    return path
