# SPDX-License-Identifier: Apache-2.0
"""The most memory that reading a recording holds, for each format: converted, validated and streamed for an epoch."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def _parts(source: Path) -> Iterator[Any]:
    from etude.recordings import Recording

    return Recording.open(source).stream()


def _episodes(source: Path) -> Iterator[Any]:
    return (exp for part in _parts(source) for exp in part)


def _json(source: Path, target: Path) -> None:
    """Lines of a batch for each episode, as RLlib's JSON writer makes them without compression."""
    target.mkdir()
    with (target / "output-0.json").open("w") as file:
        for number, exp in enumerate(_episodes(source)):
            length, next_obs = exp.num_steps, exp.next_obs()["obs"]
            batch = {
                "type": "SampleBatch", "t": list(range(length)), "eps_id": [number] * length,
                "agent_index": [0] * length, "obs": exp.steps["obs"].tolist(), "new_obs": next_obs.tolist(),
                "actions": exp.steps["action"].tolist(), "rewards": exp.steps["reward"].tolist(),
                "terminateds": exp.at_ends(exp.segments.terminated).tolist(),
                "truncateds": exp.at_ends(exp.segments.truncated).tolist(),
            }  # fmt: skip
            file.write(json.dumps(batch) + "\n")


def _minari(kind: str) -> Callable[[Path, Path], None]:
    """A folder for each episode, whose last row holds only the last observation, as Minari's writers make them."""

    def write(source: Path, target: Path) -> None:
        data = target / "data"
        steps = 0
        for number, exp in enumerate(_episodes(source)):
            obs = np.concatenate([exp.steps["obs"], exp.final_obs["obs"]])
            flags = {"terminations": exp.segments.terminated, "truncations": exp.segments.truncated}
            each = {"actions": exp.steps["action"], "rewards": exp.steps["reward"]}
            each |= {name: exp.at_ends(flag) for name, flag in flags.items()}
            table = pa.table(
                {"observations": pa.FixedSizeListArray.from_arrays(pa.array(obs.reshape(-1)), obs.shape[1])}
                | {name: np.append(values, values[-1:]) for name, values in each.items()}
            )
            folder = data / str(number)
            folder.mkdir(parents=True)
            (folder / "metadata.json").write_text(json.dumps({"id": number, "total_steps": exp.num_steps}))
            if kind == "parquet":
                pq.write_table(table, folder / "part-0.parquet")
            else:
                with pa.OSFile(str(folder / "part-0.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                    out.write_table(table)
            steps += exp.num_steps
        box = {"type": "Box", "dtype": "float32", "shape": [4], "low": [-9.0] * 4, "high": [9.0] * 4}
        about = {"data_format": kind, "total_episodes": number + 1, "total_steps": steps}
        about |= {"observation_space": json.dumps(box)}
        about |= {"action_space": json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": 2})}
        (data / "metadata.json").write_text(json.dumps(about))

    return write


def _d4rl(kind: str) -> Callable[[Path, Path], None]:
    """Arrays with a row for each step, in one file."""

    def write(source: Path, target: Path) -> None:
        import h5py

        target.mkdir()
        with h5py.File(target / "rows.hdf5", "w") as file:
            for exp in _parts(source):
                columns = {
                    "observations": exp.steps["obs"], "next_observations": exp.next_obs()["obs"],
                    "actions": exp.steps["action"], "rewards": exp.steps["reward"],
                    "terminals": exp.at_ends(exp.segments.terminated), "timeouts": exp.at_ends(exp.segments.truncated),
                }  # fmt: skip
                for name, values in columns.items():
                    if name not in file:
                        file.create_dataset(name, data=values, chunks=True, maxshape=(None, *values.shape[1:]))
                    else:
                        file[name].resize(len(file[name]) + len(values), axis=0)
                        file[name][-len(values) :] = values
            if kind == "npz":
                np.savez(target / "rows.npz", **{name: file[name][:] for name in file})
        if kind == "npz":
            (target / "rows.hdf5").unlink()

    return write


def _tables(source: Path) -> Iterator[pa.Table]:
    """A row for each step, with plain columns."""
    for exp in _parts(source):
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
        elif kind in ("arrow", "arrows"):
            new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, new(file, first.schema) as out:
                for table in (first, *tables):
                    out.write_table(table)
        elif kind == "json":
            with path.open("w") as text:
                lines = (json.dumps(row) for table in (first, *tables) for row in table.to_pylist())
                text.writelines(f"{',' if number else '['}{line}\n" for number, line in enumerate(lines))
                text.write("]")
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
    "minari in Arrow": _minari("arrow"),
    "minari in Parquet": _minari("parquet"),
    "d4rl in HDF5": _d4rl("hdf5"),
    "d4rl in NPZ": _d4rl("npz"),
    "lerobot": _converted("lerobot"),
    "table in Parquet": _table("parquet"),
    "table in CSV": _table("csv"),
    "table in CSV, gzip": _table("csv.gz"),
    "table in JSON lines": _table("jsonl"),
    "table in JSON, one list": _table("json"),
    "table in an Arrow file": _table("arrow"),
    "table in an Arrow stream": _table("arrows"),
}
