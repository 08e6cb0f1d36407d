# SPDX-License-Identifier: Apache-2.0
"""Experiences for tests: drawn by hypothesis, and what it means that two are the same."""

import numpy as np
import torch
from hypothesis import strategies as st

from etude.experience import Experience, Segments
from etude.experience.experience import SEGMENT_COLUMNS

NUMBERS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
TORCH_NUMBERS = ["bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def bits(array):
    """The bytes of an array or tensor with its dtype and shape; the items of one of objects."""
    if isinstance(array, torch.Tensor):
        return "torch", bits(array.numpy())
    return str(array.dtype), array.shape, array.tolist() if array.dtype == object else array.tobytes()


def assert_same(a, b):
    """Both Experiences are equal bit for bit, NaN payloads included."""
    assert {n: bits(c) for n, c in a.steps.items()} == {n: bits(c) for n, c in b.steps.items()}
    assert {n: bits(c) for n, c in a.final_obs.items()} == {n: bits(c) for n, c in b.final_obs.items()}
    assert bits(a.offsets) == bits(b.offsets)
    for name in SEGMENT_COLUMNS:
        assert bits(getattr(a.segments, name)) == bits(getattr(b.segments, name)), name


def any_bits(rng, dtype, shape):
    """Random bits of a dtype: with NaNs of all payloads, infinities and subnormals among the floats."""
    if dtype == "O":
        return rng.choice(np.array(["", "a", "äß", "longer text", None], object), shape)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    dtype = np.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


@st.composite
def experiences(draw, *, dtypes=NUMBERS, with_strings=False, lookback=True, min_steps=0, images=True, whole=False):
    """Pieces of episodes of one to three agents, segment by segment, with several columns of random bits.

    whole: no lookback, and each segment is an episode that ended.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1 if min_steps else 0, max_size=6))
    num = len(lengths)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    row_shapes = [(), (3,), (1,), (2, 2)]
    kinds = [*dtypes, "O"] if with_strings else dtypes
    columns = {
        "obs/a": (draw(st.sampled_from(dtypes)), draw(st.sampled_from(row_shapes))),
        "obs/b": (draw(st.sampled_from(kinds)), draw(st.sampled_from(row_shapes))),
        "action": (draw(st.sampled_from(dtypes)), draw(st.sampled_from(row_shapes))),
        "reward": ("f8", ()),
        "info/x": (draw(st.sampled_from(kinds)), draw(st.sampled_from(row_shapes))),
    }
    if images:
        columns["obs/image"] = ("u1", draw(st.sampled_from([(4, 3), (2, 2, 3)])))
    total = int(offsets[-1])
    steps = {name: any_bits(rng, dtype, (total, *shape)) for name, (dtype, shape) in columns.items()}
    steps["reward"] = rng.integers(-9, 9, total).astype(np.float64)
    final_obs = {n: any_bits(rng, d, (num, *s)) for n, (d, s) in columns.items() if n.startswith("obs")}
    for final in final_obs.values():
        if final.dtype == object:
            final[final == None] = "none"  # noqa: E711 - elementwise
    known = np.ones(num, bool) if whole else rng.random(num) < 0.7
    for final in final_obs.values():
        final[~known] = None if final.dtype == object else np.zeros((), final.dtype)
    end = rng.integers(0, 3, num) if not whole else rng.integers(1, 3, num)
    segments = Segments.of(
        num,
        episode_id=[f"e{i if whole else i // 3}" for i in range(num)],
        agent_id=rng.choice(np.array([None, "red", "blue"], object), num),
        module_id=rng.choice(np.array([None, "net"], object), num),
        t_start=0 if whole else rng.integers(0, 50, num),
        lookback=rng.integers(0, np.array(lengths, int) + 1, num) if lookback and not whole and num else 0,
        terminated=end == 1,
        truncated=end == 2,
        has_final_obs=known,
    )
    return Experience(steps, offsets, segments, final_obs)


def numbered(lengths, *, lookback=0, dtype=np.float32, **segments):
    """An Experience whose obs is 100 * segment + step in it, so that any shift of an index shows."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    obs = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)] or [np.zeros(0)]).astype(dtype)
    final = np.array([100 * i + n for i, n in enumerate(lengths)], dtype)
    ids = segments.pop("episode_id", [f"e{i}" for i in range(len(lengths))])
    table = Segments.of(len(lengths), episode_id=ids, lookback=lookback, **segments)
    steps = {"obs": obs, "action": obs.astype(np.int64), "reward": obs.astype(np.float64)}
    return Experience(steps, offsets, table, {"obs": final})
