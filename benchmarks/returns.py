# SPDX-License-Identifier: Apache-2.0
"""Generalised advantage estimation over ragged segments."""

from collections.abc import Iterator

import numpy as np

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row, milliseconds, race

STEPS, SEGMENTS = 100_000, 500
GAMMA, LAMBDA = 0.99, 0.95
SCAN, REACH = "bare doubling scan", 1 / 0.36


def rows(options: Options) -> Iterator[Row]:
    """100,000 steps in 500 segments of any length, float32."""
    from etude.experience.returns import gae

    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, STEPS), SEGMENTS - 1, replace=False))
    offsets = np.concatenate([[0], cuts, [STEPS]])
    reward, value = rng.standard_normal((2, STEPS), np.float32)
    bootstrap = rng.standard_normal(SEGMENTS, np.float32)
    passes = int(np.ceil(np.log2(np.diff(offsets).max())))
    following = np.append(value[1:], np.float32(0))
    following[offsets[1:] - 1] = bootstrap
    delta = reward + np.float32(GAMMA) * following - value
    decay = np.full(STEPS, GAMMA * LAMBDA, np.float32)
    decay[offsets[1:] - 1] = 0
    x, d, product = np.empty_like(delta), np.empty_like(decay), np.empty_like(decay)

    def scan() -> int:
        """The recursion alone, in memory that is there already."""
        x[:], d[:] = delta, decay
        for k in range(passes):
            reach = 2**k
            x[:-reach] += np.multiply(d[:-reach], x[reach:], out=product[:-reach])
            d[:-reach] = np.multiply(d[:-reach], d[reach:], out=product[:-reach])
            d[-reach:] = 0
        return 1

    def whole() -> int:
        gae(reward, value, bootstrap, offsets, GAMMA, LAMBDA)
        return 1

    scan()
    np.testing.assert_allclose(x, gae(reward, value, bootstrap, offsets, GAMMA, LAMBDA)[0], rtol=1e-3, atol=1e-4)
    times = milliseconds(race({ETUDE: whole, SCAN: scan}, options))
    yield Row(
        "GAE over 100,000 steps in 500 ragged segments",
        "ms",
        [Figure(ETUDE, times[ETUDE], "etude"), Figure(SCAN, times[SCAN])],
        Reach(REACH, SCAN),
        f"segments of {np.diff(offsets).min()} to {np.diff(offsets).max():,} steps",
    )
