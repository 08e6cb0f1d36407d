# SPDX-License-Identifier: Apache-2.0
"""How long ``etude show`` takes from its start until the page has what it shows first."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row, etude, python
from benchmarks.pipeline import synthetic

TORCH = "import torch alone"
STEPS = 1_000_000
REACH = Reach(2 / 0.87, TORCH)
"""Two seconds on a machine that imports torch in 0.87 s."""


def rows(options: Options) -> Iterator[Row]:
    """Served, and written to a file; whole processes, with warm caches."""
    steps = STEPS // 10 if options.quick else STEPS
    path = synthetic(options, steps)
    times: dict[str, list[float]] = {"served": [], "written": [], TORCH: []}
    for _ in range(options.processes + 1):
        times["served"].append(_served(path))
        times["written"].append(etude("show", str(path), "--to", str(options.folder / "page.html")).seconds)
        times[TORCH].append(python("import torch").seconds)
    own = {name: found[1:] for name, found in times.items()}  # the first run brings files into the system's cache
    for name, what in (("served", "served"), ("written", "written to a file, 20 episodes in it")):
        figures = [Figure(ETUDE, own[name], "etude"), Figure(TORCH, own[TORCH])]
        yield Row(f"etude show of {steps:,} steps, start to the first page: {what}", "s", figures, REACH)


def _served(path: Path) -> float:
    """Seconds until all requests are answered that the page makes when it opens."""
    begin = time.perf_counter()
    argv = [sys.executable, "-m", "etude", "show", str(path), "--no-browser"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            _ask(url)
            _ask(f"{url}api/recordings")
            listed = json.loads(_ask(f"{url}api/episodes?recording=0"))
            _ask(f"{url}api/episode?recording=0&id={listed['episode_id'][0]}")
            for column in ("return", "length", "action", "reward"):
                _ask(f"{url}api/column?name={column}")
            return time.perf_counter() - begin
        finally:
            server.terminate()


def _ask(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        found: bytes = answer.read()
    return found
