# SPDX-License-Identifier: Apache-2.0
"""The first cases of each format, in a child process; see `fuzz.py` for many more."""

import collections

import pytest
from formats import FORMATS
from fuzz import run

CASES = 20


@pytest.mark.slow
def test_broken_recordings_end_in_data_errors() -> None:
    found = list(run(list(FORMATS), 0, CASES))
    bad = [f"{name}, case {case}: {outcome}" for name, case, outcome in found if outcome not in ("good", "refused")]
    assert not bad, "\n".join(bad[:3])
    assert len(found) == CASES * len(FORMATS)
    refused = collections.Counter(name for name, _, outcome in found if outcome == "refused")
    assert all(refused[name] > CASES // 10 for name in FORMATS), refused
