# SPDX-License-Identifier: Apache-2.0
"""Experience of any spaces, to be written in other tools' formats and read again."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from hypothesis import strategies as st

from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, convert
from etude.spaces import Flattener

_LEAVES: Any = st.sampled_from(
    [
        gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
        gym.spaces.Box(-1, 1, (2, 3), np.float64),
        gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
        gym.spaces.Box(-5, 5, (), np.float32),
        gym.spaces.Box(-9, 9, (2,), np.int16),
        gym.spaces.Discrete(5),
        gym.spaces.Discrete(3, start=-1),
        gym.spaces.MultiDiscrete([3, 2]),
        gym.spaces.MultiBinary(4),
    ]
)


def spaces_of(*, tuples: bool = True) -> Any:
    """Spaces that are simple, or a Dict or a Tuple of such, nested twice at most."""

    def nested(parts: Any) -> Any:
        kinds = [st.dictionaries(st.sampled_from(["a", "pos", "mode"]), parts, min_size=1).map(gym.spaces.Dict)]
        kinds += [st.lists(parts, min_size=1, max_size=3).map(gym.spaces.Tuple)] if tuples else []
        return st.one_of(kinds)

    return st.recursive(_LEAVES, nested, max_leaves=4)


def samples(space: gym.Space, root: str, rows: int) -> dict[str, np.ndarray]:
    flat = Flattener(space, root)
    drawn = [flat(space.sample()) for _ in range(rows)]
    return {name: np.array([s[name] for s in drawn], leaf.dtype) for name, leaf in flat.leaves.items()}


def episodes(obs: gym.Space, action: gym.Space, lengths: list[int], seed: int = 0, **changes: Any) -> Experience:
    """Episodes that are done, with what a module put out beside the action, and infos."""
    rng, num, count = np.random.default_rng(seed), sum(lengths), len(lengths)
    obs.seed(seed), action.seed(seed)
    steps = {
        **samples(obs, "obs", num),
        **samples(action, "action", num),
        "reward": rng.normal(size=num),
        "logp": rng.normal(size=num).astype(np.float32),
        "dist_inputs": rng.normal(size=(num, 2)).astype(np.float32),
        "state_out/h": rng.normal(size=(num, 1, 2)).astype(np.float32),
        "my_score": rng.integers(0, 9, num),
        "info/fuel": rng.normal(size=num),
        "info/at/xy": rng.normal(size=(num, 2)),
    }
    known = {
        "episode_id": [f"e{i:03d}" for i in range(count)],
        "terminated": np.arange(count) % 3 != 0,
        "truncated": np.arange(count) % 3 != 1,
    }
    segments = Segments.of(count, **(known | changes))
    return Experience(steps, np.cumsum([0, *lengths]).astype(np.int64), segments, samples(obs, "obs", count))


def recorded(path: Path, obs: gym.Space, action: gym.Space, *parts: Experience, **options: Any) -> Recording:
    """These parts as one of Etude's recordings."""
    with RecordingWriter(path, obs_space=obs, action_space=action, **options) as writer:
        for part in parts:
            writer.write(part)
    return Recording.open(path)


def converted(folder: Path, format: str, obs: gym.Space, action: gym.Space, *parts: Experience) -> Recording:
    """These parts, recorded in ``folder``, in another tool's format."""
    return convert(recorded(folder / "own", obs, action, *parts), folder / "out-v0", format)


def assert_equal(found: Experience, wanted: Experience, *, dtypes: bool = True) -> None:
    """The same columns, whatever their order, and the same segments."""
    for a, b in ((found.steps, wanted.steps), (found.final_obs, wanted.final_obs)):
        assert set(a) == set(b)
        for name in a:
            assert not dtypes or a[name].dtype == b[name].dtype, name
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    np.testing.assert_array_equal(found.offsets, wanted.offsets)
    for name in wanted.segments.__slots__:
        np.testing.assert_array_equal(getattr(found.segments, name), getattr(wanted.segments, name), err_msg=name)
