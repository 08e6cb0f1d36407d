# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from some_experience import numbered

from etude.errors import DataError
from etude.experience import Experience


def _changed(**changes):
    exp = numbered([3, 2], t_start=[0, 5], agent_id=[None, "red"])
    parts = {"steps": exp.steps, "offsets": exp.offsets, "segments": exp.segments, "final_obs": exp.final_obs}
    for name, value in changes.items():
        parts[name] = value(parts[name]) if callable(value) else value
    return Experience(**parts)


def _with(array, index, value):
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("exp", "message"),
    [
        (
            _changed(offsets=np.array([0, 3, 3])),
            r"segment 1: offsets do not increase \(3 to 3\); it needs at least one step",
        ),
        (_changed(offsets=np.array([0, 6, 5])), r"segment 1: offsets do not increase \(6 to 5\)"),
        (_changed(offsets=np.array([1, 3, 5])), "offsets must be int64, one-dimensional and start at 0"),
        (_changed(offsets=np.array([0, 3, 5], np.int32)), r"offsets must be int64.*\(int32\)"),
        (_changed(offsets=np.zeros(0, np.int64)), "offsets must be int64"),
        (_changed(offsets=np.array([0, 3, 6])), "column `obs` has 5 rows, but the offsets are those of 6 steps"),
        (
            _changed(steps=lambda s: s | {"value": np.zeros(4)}),
            "column `value` has 4 rows, but the offsets are those of 5 steps",
        ),
        (_changed(segments=lambda s: s[:1]), r"segments\.episode_id has 1 rows, but .* of 2 segments"),
        (_changed(final_obs={}), "final_obs and observations differ: only one of them has column `obs`"),
        (_changed(final_obs=lambda f: {"obs": f["obs"][:1]}), "final_obs `obs` has 1 rows, but .* of 2 segments"),
        (_changed(final_obs=lambda f: {"obs": f["obs"].astype("f8")}), "`obs` is float64, not float32"),
        (_changed(final_obs={"obs": np.zeros((2, 3), "f4")}), r"`obs` is float32\[3\], not float32"),
        (
            _changed(segments=lambda s: s.replace(episode_id=np.array(["a", 7], object))),
            "segment 1: episode_id is 7, not a string",
        ),
        (
            _changed(segments=lambda s: s.replace(lookback=np.array([0, 3]))),
            r"segment 1 \(episode 'e1'\): lookback 3 or t_start 5 is impossible with 2 steps",
        ),
        (_changed(segments=lambda s: s.replace(t_start=np.array([-1, 0]))), r"segment 0 .*t_start -1 is impossible"),
        (_changed(segments=lambda s: s.replace(t_start=np.array([0, 2**63 - 2]))), r"segment 1 .*is impossible with 2"),
        (
            _changed(steps=lambda s: s | {"obs": _with(s["obs"], 4, np.nan)}),
            r"column `obs` holds nan at segment 1 \(episode 'e1', agent 'red'\), t 6",
        ),
        (
            _changed(steps=lambda s: s | {"reward": _with(_with(s["reward"], 2, np.inf), 1, -np.inf)}),
            r"column `reward` holds -inf at segment 0 \(episode 'e0'\), t 1",
        ),
        (
            _changed(steps=lambda s: s | {"action": _with(np.zeros((5, 2, 2)), (3, 1, 0), np.nan)}),
            "column `action` holds nan in component 2 at segment 1",
        ),
        (
            _changed(final_obs=lambda f: {"obs": _with(f["obs"], 1, np.nan)}),
            r"final_obs `obs` holds nan in segment 1 \(ep",
        ),
    ],
)
def test_what_breaks_a_rule_is_named(exp, message):
    with pytest.raises(DataError, match=message):
        exp.validate()


def test_tensors_are_checked_too():
    exp = numbered([3, 2]).to("cpu")
    exp.validate()
    exp.steps["reward"][4] = torch.nan
    with pytest.raises(DataError, match="column `reward` holds nan at segment 1"):
        exp.validate()


def test_what_may_be_not_finite_is_let_through():
    exp = numbered([3, 2], has_final_obs=[True, False])
    exp.final_obs["obs"][1] = np.nan  # not known: it means nothing
    exp = exp.with_steps(value=np.full(5, np.nan))
    exp.validate()
    with pytest.raises(DataError, match="column `value` holds nan"):
        exp.validate(finite=("value",))


def test_great_but_finite_numbers_are_finite():
    numbered([3, 2]).with_steps(reward=np.full(5, 1.7e308)).validate()
    numbered([3, 2]).with_steps(reward=np.full(5, 6e4, np.float16)).validate()
