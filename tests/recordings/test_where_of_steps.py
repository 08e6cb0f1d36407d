# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import numpy as np
import pytest
from some_recording import numbered, record

from etude.errors import SettingsError
from etude.recordings import Recording
from etude.recordings.where import RowFilter


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("filters") / "data"
    record(path, numbered([8, 20, 5]))
    return Recording.open(path)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("t < 4", lambda e, t, a: t < 4),
        ("not t < 4 and action != 3", lambda e, t, a: t >= 4 and a != 3),
        ("t >= 4 or episode_id == 'e1'", lambda e, t, a: t >= 4 or e == 1),
        ("action in (0, 5)", lambda e, t, a: a in (0, 5)),
        ("2 * t - 1 > action + 3 / 2", lambda e, t, a: 2 * t - 1 > a + 1.5),
        ("t / 2 == 1.5", lambda e, t, a: t == 3),
        ("t // 2 == 1 and t % 2 not in (0, 7)", lambda e, t, a: t == 3),
        ("1 <= t < 3 < action + 3", lambda e, t, a: 1 <= t < 3 and a > 0),
        ("`obs`[1] >= 2 and abs(t - 4) < 2", lambda e, t, a: 3 <= t <= 5),
        ("terminated or truncated", lambda e, t, a: t == [7, 19, 4][int(e)]),
        ("reward == -1", lambda e, t, a: False),
        ("t > -1", lambda e, t, a: True),
        ("1 / -abs(reward * 0) < 0", lambda e, t, a: True),  # zero has a sign
    ],
)
def test_it_keeps_the_steps_for_which_it_holds(recording: Recording, text: str, holds: Any) -> None:
    whole = recording.read()
    kept = RowFilter(text).chosen(whole)
    kept.validate()
    rows = zip(whole.steps["obs"][:, 0], whole.steps["obs"][:, 1], whole.steps["action"], strict=True)
    expected = np.array([bool(holds(*row)) for row in rows])
    np.testing.assert_array_equal(kept.steps["obs"], whole.steps["obs"][expected])
    np.testing.assert_array_equal(kept.next_obs()["obs"], whole.next_obs()["obs"][expected])
    for flag in ("terminated", "truncated"):
        was, now = (exp.at_ends(getattr(exp.segments, flag)) for exp in (whole, kept))
        np.testing.assert_array_equal(now, was[expected])


@pytest.mark.parametrize(
    "text",
    ["", "1 < 2", "t <", "f(t)", "__import__('os')", "t.x > 1", "max(t) > 2", "t in t", "[t]", "t @ 2", "lambda: t"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="can't be used .* Write a condition on single steps"):
        RowFilter(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("speed > 1", "names the column `speed`. There are obs, action, reward; each step also has t, episode_id"),
        ("reward", "it is not a condition"),
        ("reward > 'a'", "text is compared with numbers"),
        ("obs > 1", r"name one of them, as in obs\[0\]"),
        ("obs[3] > 1", "out of bounds"),
    ],
)
def test_what_does_not_fit_the_recording_is_named(recording: Recording, text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"the filter {re.escape(repr(text))} can't be used .*{problem}"):
        RowFilter(text).chosen(recording.read())
