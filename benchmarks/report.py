# SPDX-License-Identifier: Apache-2.0
"""Rows as text, as JSON and as the table of the documentation."""

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, Reach, Row

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
PACKAGES = ("torch", "numpy", "gymnasium", "pyarrow", "stable-baselines3", "ray")


def about() -> dict[str, Any]:
    """The machine, the versions, the date."""
    versions = {"python": platform.python_version()}
    for package in ("etude", *PACKAGES):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "-"
    return {"date": datetime.date.today().isoformat(), "machine": _machine(), "versions": versions}


def _machine() -> str:
    cpu, memory = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory"
    return f"{cpu}, {os.cpu_count()} cores{memory}, {platform.system()}"


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(figure: Figure) -> str:
    """The median, and the least and greatest of the rounds."""
    if len(figure.values) == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(min(figure.values))}-{number(max(figure.values))})"


def reach_of(row: Row) -> str:
    """What is to be reached, in words."""
    if row.reach is None:
        return ""
    bound = "at least" if row.more_is_better else "at most"
    value = f"{bound} {number(row.reach.ratio)} {f'x {row.reach.to}' if row.reach.to else row.unit}"
    return value + (", every time" if row.reach.every else "")


def got_of(row: Row) -> str:
    """What was got, in the same terms, and whether that is enough."""
    got = row.got()
    return "" if got is None else f"{number(got)}, {'met' if row.is_met() else 'MISSED'}"


def text(row: Row) -> str:
    """A row as lines of plain text."""
    lines = [f"{row.work} [{row.unit}]"]
    for figure in row.figures:
        beside = "" if figure is row.figures[0] else f"Etude / this = {number(row.ratio_to(figure))}"
        lines.append(f"  {figure.name:<30} {spread(figure):<32} {beside}".rstrip())
    if row.reach is not None:
        lines.append(f"  reach: {reach_of(row)}; got {got_of(row)}")
    if row.note:
        lines.append(f"  {row.note}")
    return "\n".join(lines)


def to_json(rows: Sequence[Row], told: dict[str, Any]) -> str:
    """All that was measured, and on what (see `about`)."""
    return json.dumps({**told, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)


def from_json(written: str) -> list[Row]:
    """The rows of `to_json`."""
    return [
        Row(
            row["work"],
            row["unit"],
            [Figure(**figure) for figure in row["figures"]],
            Reach(**row["reach"]) if row["reach"] else None,
            row["note"],
        )
        for row in json.loads(written)["rows"]
    ]


def markdown(rows: Sequence[Row], told: dict[str, Any]) -> str:
    """The table with what it was measured on."""
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    kind = " A quick run, for looks only." if told.get("quick") else ""
    lines = [
        f"Measured on {told['date']}: {told['machine']}; {versions}.{kind}",
        "",
        "| work | Etude | limit | peer | reach | got |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        own, *others = row.figures
        limits = "<br>".join(f"{f.name}: {spread(f)}" for f in others if f.kind == "limit")
        peers = "<br>".join(f"{f.name}: {spread(f)}" for f in others if f.kind == "peer")
        cells = (f"{row.work}, {row.unit}", spread(own), limits, peers, reach_of(row), got_of(row))
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"- {row.work}: {row.note}." for row in rows if row.note]
    return "\n".join([*lines, "", *notes])


def write_page(table: str, page: Path = PAGE) -> None:
    """Put the table between the markers of the documentation's page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no {BEGIN} ... {END} to put the table between.")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
