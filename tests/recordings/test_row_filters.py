# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from some_recording import numbered, record

from etude.errors import DataError, SettingsError
from etude.recordings import Recording
from etude.recordings.row_filters import row_filter


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
        ("reward == -1", lambda e, t, a: False),
        ("t > -1", lambda e, t, a: True),
    ],
)
def test_it_keeps_the_steps_for_which_it_holds(recording: Recording, text: str, holds: Any) -> None:
    whole, kept = recording.read(), recording.read(filter=row_filter(text))
    rows = zip(whole.steps["obs"][:, 0], whole.steps["obs"][:, 1], whole.steps["action"], strict=True)
    expected = [bool(holds(*row)) for row in rows]
    np.testing.assert_array_equal(kept.steps["obs"], whole.steps["obs"][expected])
    parts = [recording.part(k, filter=row_filter(text)) for k in range(recording.num_parts)]
    assert sum(part.num_steps for part in parts) == sum(expected)


@pytest.mark.parametrize(
    "text", ["", "1 < 2", "t <", "f(t)", "__import__('os')", "t.x > 1", "t < 1 < 2", "[t]", "t @ 2", "lambda: t"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="can't be used .* Write a condition on single steps"):
        row_filter(text)


def test_a_column_that_is_not_there_is_named(recording: Recording) -> None:
    with pytest.raises(DataError, match="can't be applied to .*speed"):
        recording.read(filter=row_filter("speed > 1"))
