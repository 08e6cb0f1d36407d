# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.metrics import Window

chunks = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), max_size=8)


@given(chunks, st.integers(1, 6))
def test_a_window_holds_the_last_values(parts, size):
    window = Window(size)
    for part in parts:
        window.add(np.array(part))
    last = [x for part in parts for x in part][-size:]
    assert window.values.tolist() == last
    assert len(window) == len(last)
    if last:
        assert window.mean == pytest.approx(sum(last) / len(last))
        assert (window.min, window.max) == (min(last), max(last))


def test_an_empty_window_knows_nothing_and_takes_single_values():
    window = Window()
    assert all(map(math.isnan, (window.mean, window.min, window.max)))
    window.add(3)
    assert window.mean == window.min == window.max == 3.0


@given(chunks, chunks)
def test_a_restored_window_goes_on_as_the_saved_one(before, after):
    saved, restored = Window(5), Window(5)
    for part in before:
        saved.add(part)
    restored.load_state_dict(saved.state_dict())
    for part in after:
        saved.add(part)
        restored.add(part)
    assert saved.values.tolist() == restored.values.tolist()


def test_a_state_is_not_changed_by_what_comes_after():
    window = Window(2)
    window.add([1, 2])
    state = window.state_dict()
    window.add([3])
    assert state["values"].tolist() == [1, 2]


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Window(0)
