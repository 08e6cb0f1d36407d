# SPDX-License-Identifier: Apache-2.0
"""The benchmarks can be run, and what they print, write and compare holds together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness import SHARE, STEPS_A_SECOND, Figure, Reach, Row

ROOT = Path(__file__).parents[1]


def test_a_row_is_measured_printed_and_written(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks", "gae", "--quick", "--json", str(tmp_path / "gae.json")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "GAE over 100,000 steps" in done.stdout
    told = json.loads((tmp_path / "gae.json").read_text())
    (row,) = report.from_json((tmp_path / "gae.json").read_text())
    assert [len(figure.values) for figure in row.figures] == [3, 3]
    assert report.text(row) in done.stdout
    assert f"| {row.work}, ms |" in report.markdown([row], told)


@pytest.mark.parametrize(
    ("unit", "reach", "got", "met"),
    [
        (STEPS_A_SECOND, Reach(1.9, "bare"), 2.0, True),
        (STEPS_A_SECOND, Reach(1.9, "bare", every=True), 1.0, False),  # the worst, 2, over the median, 2
        ("ms", Reach(1.9, "bare"), 2.0, False),
        ("ms", Reach(4.0, "bare", every=True), 4.0, True),
        ("MB", Reach(600), 4.0, True),
        (SHARE, Reach(5), 4.0, False),
    ],
)
def test_what_is_got_is_compared_with_the_reach(unit: str, reach: Reach, got: float, met: bool) -> None:
    row = Row("work", unit, [Figure("Etude", [2, 8, 4], "etude"), Figure("bare", [1, 2, 8])], reach)
    assert row.ratio_to(row.figures[1]) == 2
    assert row.got() == got
    assert row.is_met() is met


def test_the_table_replaces_the_one_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_page("new", page)
    assert page.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    page.write_text("no place for it")
    with pytest.raises(SystemExit, match="to put the table between"):
        report.write_page("new", page)


def test_the_page_of_the_documentation_has_a_place_for_the_table() -> None:
    page = report.PAGE.read_text()
    assert 0 < page.index(report.BEGIN) < page.index(report.END)


def test_numbers_have_three_digits() -> None:
    assert [report.number(x) for x in (0.012345, 1.2345, 12.345, 999.4, 1234.5, 1_234_567)] == [
        "0.0123",
        "1.23",
        "12.3",
        "999",
        "1,230",
        "1,230,000",
    ]
