# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.metrics import Ema, Window

VALUES = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), min_size=1, max_size=6)


def naive(values: list[float], size: int) -> float:
    """The definition: every value weighs by its age."""
    left = 1 - 2 / (size + 1)
    weights = [left**age for age in range(len(values))][::-1]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@given(VALUES, st.integers(1, 9))
def test_an_average_of_all_values_by_their_age(parts: list[list[float]], size: int) -> None:
    ema, values = Ema(size), [value for part in parts for value in part]
    for part in parts:
        ema.add(part)
    assert len(ema) == min(len(values), size)
    if not values:
        assert math.isnan(ema.mean)
        return
    assert ema.mean == pytest.approx(naive(values, size), rel=1e-6, abs=1e-3)
    assert ema.min == min(values[-size:])
    assert ema.max == max(values[-size:])


def test_it_is_as_defined_for_a_few_values() -> None:
    ema = Ema(3)  # the newest value weighs 1/2
    ema.add(4.0)
    assert ema.mean == 4.0
    ema.add([8.0])
    assert ema.mean == (0.5 * 4 + 8) / 1.5
    for _ in range(60):
        ema.add(1.0)
    assert ema.mean == pytest.approx(1.0)
    one = Ema(1)
    one.add([5.0, 7.0])
    assert one.mean == 7.0


def test_it_goes_on_from_its_state_and_from_a_window_s() -> None:
    ema, other = Ema(5), Ema(5)
    ema.add(np.arange(20.0))
    other.add([1000.0])
    other.load_state_dict(ema.state_dict())
    for one in (ema, other):
        one.add([3.0, 9.0])
    assert (other.mean, other.min, other.max) == (ema.mean, ema.min, ema.max)
    window = Window(4)
    window.add([1.0, 2.0, 3.0])
    other.load_state_dict(window.state_dict())
    assert other.mean == pytest.approx(naive([1.0, 2.0, 3.0], 5))
    window.load_state_dict(ema.state_dict())
    assert window.mean == np.mean([18.0, 19.0, 3.0, 9.0])
