# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks [ROW ...] [--quick] [--json FILE] [--markdown] [--from FILE]``."""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.harness import THREADS, Options, Row

ROWS = {
    "sampling": "sampling:rows",
    "ray-sampling": "ray_sampling:rows",
    "recurrent": "recurrent:rows",
    "act": "act:rows",
    "serve": "serve:rows",
    "overhead": "overhead:rows",
    "workers": "workers:rows",
    "agents": "agents:rows",
    "mujoco": "mujoco:rows",
    "busy": "busy:rows",
    "ppo-step": "updates:ppo",
    "ppo-modules": "updates:modules",
    "ppo-memory": "peak:rows",
    "ppo": "training:ppo",
    "bc-step": "updates:bc",
    "bc": "training:bc",
    "marwil": "marwil:rows",
    "off-policy": "off_policy:rows",
    "threads": "default_threads:rows",
    "offline": "offline_algorithms:rows",
    "parquet": "data:parquet",
    "memory": "data:memory",
    "pipeline": "pipeline:rows",
    "readers": "readers:rows",
    "formats-memory": "held:rows",
    "recording": "data:recording",
    "show": "show:rows",
    "checkpoints": "checkpoints:rows",
    "gae": "returns:rows",
    "ray-data": "ray_data:rows",
    "replay": "replay:rows",
    "metrics": "metrics:rows",
    "ray-learners": "ray_learners:rows",
    "ray-ppo": "ray_ppo:rows",
    "ray-hops": "ray_hops:rows",
    "start": "start:rows",
}
"""Where each group of rows is measured; a module is imported only when it is needed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="How fast Etude is, row by row.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none")
    parser.add_argument("--quick", action="store_true", help="short, to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help=f"write the table into {report.PAGE.name}")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="measure nothing: take this JSON")
    args = parser.parse_args(argv)
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    failed: list[str] = []
    if args.source is not None:
        told = json.loads(args.source.read_text())
        rows = report.from_json(args.source.read_text())
        print("\n".join(map(report.text, rows)))
    else:
        told = report.about() | {"quick": args.quick}
        rows = list(_measured(args.rows or list(ROWS), failed, quick=args.quick))
    if args.json is not None:
        args.json.write_text(report.to_json(rows, told))
    if args.markdown:
        report.write_page(report.markdown(rows, told))
    missed = [row.work for row in rows if row.is_met() is False]
    print(f"\n{len(rows)} rows; " + (f"missed: {'; '.join(missed)}" if missed else "every reach is met"))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _measured(names: Sequence[str], failed: list[str], *, quick: bool) -> Iterator[Row]:
    """Each row as soon as it is there, printed. A group that fails is noted, and the others go on."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder:
        options = Options(quick, Path(folder))
        for name in names:
            module, _, function = ROWS[name].partition(":")
            measure: Callable[[Options], Iterator[Row]]
            measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
            try:
                for row in measure(options):
                    print(report.text(row), flush=True)
                    yield row
            except Exception:  # noqa: BLE001  the others go on
                print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
                failed.append(name)
            print(f"  ({time.perf_counter() - begin:.0f} s so far)\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Before NumPy and torch are loaded: with more threads than one, figures depend on what else the machine does.
    os.environ.update(dict.fromkeys(THREADS, "1"))
    raise SystemExit(main())
