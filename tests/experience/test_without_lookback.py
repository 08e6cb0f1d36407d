# SPDX-License-Identifier: Apache-2.0
from some_experience import assert_same, numbered

from etude.experience.experience import without_lookback


def test_what_is_left_are_the_steps_themselves() -> None:
    whole = numbered([6, 2])
    cut = whole.cut(3, lookback=2)
    assert cut.num_steps > whole.num_steps
    assert_same(without_lookback(cut).join(), whole)
    assert without_lookback(whole) is whole


def test_segments_of_nothing_but_context_are_left_out() -> None:
    cut = numbered([6]).cut(3, lookback=2)
    before, context_only = cut.split(5)
    assert context_only.segments.lookback.tolist() == [0]
    assert before.segments.lookback.tolist() == [0, 2]
    found = without_lookback(before)
    assert found.lengths.tolist() == [3]
    assert found.segments.t_start.tolist() == [0]
