# SPDX-License-Identifier: Apache-2.0
"""The most memory that reading a recording holds, for each format: converted, validated and streamed for an epoch."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row, python
from benchmarks.readers import repeated

PARTS = 65_536
"""The steps of a part."""
REACH = 1.2
"""How many times the memory for a tenth of the steps."""

_READ = """
import json, os
os.environ["ETUDE_CACHE"] = cache
from etude.recordings import Recording, Source, convert, validate
data = Source(source, json.loads(columns)) if columns else source
convert(Recording.open(data), target)
report = validate(data)
assert report.ok, report
for batch in Recording.open(data).batches(1024, columns=wanted, epochs=1):
    pass
print(report.rows)
"""
_COLUMNS = {
    "obs": ["x0", "x1", "x2", "x3"], "action": "action", "reward": "reward", "episode_id": "episode", "t": "t",
    "terminated": "terminated", "truncated": "truncated",
}  # fmt: skip


def rows(options: Options) -> Iterator[Row]:
    """A row for each format: for 1 M steps, and for 10 M."""
    few, many = (1, 2) if options.quick else (4, 40)
    for name, write in _WRITERS.items():
        peaks: dict[int, list[float]] = {}
        for times in (few, many):
            source = options.folder / f"held-{name}-{times}-v0"
            if not source.exists():
                write(repeated(times, options), source)
            columns = json.dumps(_COLUMNS) if name.startswith("table") else ""
            wanted = ["obs", "action", "reward"]
            if not columns and name != "lerobot":  # these do not hold what was observed last
                wanted.append("next_obs")
            target, cache = options.folder / "converted", options.folder / "cache"
            done = python(
                f"source, target, cache = {str(source)!r}, {str(target)!r}, {str(cache)!r}\n"
                f"columns, wanted = {columns!r}, {wanted!r}\n{_READ}"
            )
            peaks[int(done.out)] = [done.megabytes]
            shutil.rmtree(target)
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(source)
        (less, small), (more, large) = peaks.items()
        other = f"of {less / 1e6:.2f}M steps"
        yield Row(
            f"{name}: memory of converting, validating and streaming {more / 1e6:.2f}M steps ({more // PARTS} parts)",
            "MB",
            [Figure(ETUDE, large, "etude"), Figure(other, small)],
            Reach(REACH, other),
        )


# -- the formats ----------------------------------------------------------------------------------------------


def _converted(name: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        from etude.recordings import convert

        convert(source, target, name)

    return write


def _json(source: Path, target: Path) -> None:
    """Lines of a batch for each episode, as RLlib's JSON writer makes them without compression."""
    from etude.recordings import Recording

    target.mkdir()
    with (target / "output-0.json").open("w") as file:
        for number, exp in enumerate(one for part in Recording.open(source).stream() for one in part):
            length, next_obs = exp.num_steps, exp.next_obs()["obs"]
            batch = {
                "type": "SampleBatch", "t": list(range(length)), "eps_id": [number] * length,
                "agent_index": [0] * length, "obs": exp.steps["obs"].tolist(), "new_obs": next_obs.tolist(),
                "actions": exp.steps["action"].tolist(), "rewards": exp.steps["reward"].tolist(),
                "terminateds": exp.at_ends(exp.segments.terminated).tolist(),
                "truncateds": exp.at_ends(exp.segments.truncated).tolist(),
            }  # fmt: skip
            file.write(json.dumps(batch) + "\n")


def _tables(source: Path) -> Iterator[pa.Table]:
    """A row for each step, with plain columns."""
    from etude.recordings import Recording

    for exp in Recording.open(source).stream():
        yield pa.table(
            {
                "episode": pa.array(exp.segments.episode_id.repeat(exp.lengths), pa.string()),
                "t": exp.t(),
                **{f"x{i}": np.ascontiguousarray(exp.steps["obs"][:, i]) for i in range(4)},
                "action": exp.steps["action"],
                "reward": exp.steps["reward"],
                "terminated": exp.at_ends(exp.segments.terminated),
                "truncated": exp.at_ends(exp.segments.truncated),
            }
        )


def _table(kind: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        target.mkdir()
        path = target / f"rows.{kind}"
        tables = _tables(source)
        first = next(tables)
        if kind == "parquet":
            with pq.ParquetWriter(path, first.schema) as parquet:
                for table in (first, *tables):
                    parquet.write_table(table)
        elif kind == "arrows":
            with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, pa.ipc.new_stream(file, first.schema) as out:
                for table in (first, *tables):
                    out.write_table(table)
        elif kind == "jsonl":
            with path.open("w") as text:
                for table in (first, *tables):
                    text.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
        else:
            with pa.output_stream(str(path)) as file, pa.csv.CSVWriter(file, first.schema) as csv:  # may compress
                for table in (first, *tables):
                    csv.write_table(table)

    return write


_WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "etude": _converted("etude"),
    "rllib-episodes": _converted("rllib-episodes"),
    "rllib-table": _converted("rllib-table"),
    "rllib-json": _json,
    "minari": _converted("minari"),
    "lerobot": _converted("lerobot"),
    "table in Parquet": _table("parquet"),
    "table in CSV": _table("csv"),
    "table in CSV, gzip": _table("csv.gz"),
    "table in JSON lines": _table("jsonl"),
    "table in an Arrow stream": _table("arrows"),
}
