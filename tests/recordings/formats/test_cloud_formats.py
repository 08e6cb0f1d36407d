# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings behind URLs, beside the same ones on this machine."""

import gzip
import json
import shutil
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import some_rllib_table as table
from pyarrow import fs
from some_rllib import episode, write_items

from etude.errors import DataError
from etude.recordings import Recording, convert
from etude.recordings.formats.source import Source

COLUMNS = {"obs": ["x", "y"], "action": "a", "reward": "r", "terminated": "end", "episode_id": "trip"}


def arrays(rows=30):
    rng = np.random.default_rng(0)
    return {
        "observations": rng.standard_normal((rows, 3)).astype(np.float32),
        "actions": rng.integers(0, 4, rows),
        "rewards": rng.standard_normal(rows),
        "terminals": np.arange(rows) % 10 == 9,
    }


def hdf5(path):
    with h5py.File(path, "w") as file:
        for name, values in arrays().items():
            file[name] = values


def minari(folder):
    (folder / "data").mkdir(parents=True)
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-9, -9], "high": [9, 9]}
    meta = {"data_format": "hdf5", "observation_space": json.dumps(box)}
    meta["action_space"] = json.dumps({"type": "Discrete", "n": 4, "dtype": "int64", "start": 0})
    (folder / "data" / "metadata.json").write_text(json.dumps(meta))
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for i in range(3):
            group = file.create_group(f"episode_{i}")
            group.attrs["total_steps"] = 4
            group["observations"] = np.full((5, 2), i, np.float32)
            group["actions"] = np.arange(4)
            group["rewards"] = np.ones(4)
            group["terminations"] = np.arange(4) == 3
            group["truncations"] = np.zeros(4, bool)


def sample_batches(path):
    rows = {"obs": [[0.0, 1.0], [2.0, 3.0]], "actions": [0, 1], "rewards": [1.0, 1.0], "terminateds": [False, True]}
    lines = [{"type": "SampleBatch", "eps_id": [i, i], "truncateds": [False, False], **rows} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make(folder):
    """One recording of each kind, by the name of its folder."""
    for name in ("episodes", "rows", "hdf5", "npz", "json"):
        (folder / name).mkdir(parents=True)
    for i in range(3):
        write_items(folder / "episodes" / f"run-{i}.parquet", [episode(5 + i, name=f"e{i}")[0]])
        table.write(folder / "rows" / f"{i}" / "x.parquet", table.rows_of([3, 4], seed=i))
    hdf5(folder / "hdf5" / "a.hdf5")
    np.savez(folder / "npz" / "a.npz", **arrays())
    sample_batches(folder / "json" / "a.json")
    minari(folder / "minari")
    shutil.copytree(Path(__file__).parent / "lerobot_v3" / "cameras", folder / "lerobot")


def sent(folder, system, root):
    for path in folder.rglob("*"):
        if path.is_file():
            to = f"{root}/{path.relative_to(folder).as_posix()}"
            system.create_dir(to.rsplit("/", 1)[0])
            with system.open_output_stream(to, compression=None) as file:
                file.write(path.read_bytes())


@pytest.fixture(params=["s3", "memory"])
def places(request, tmp_path):
    """The folder here, and its URL there."""
    make(tmp_path)
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        sent(tmp_path, s3.system, s3.url.removeprefix("s3://"))
        return tmp_path, s3.url
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    sent(tmp_path, fs.PyFileSystem(fs.FSSpecHandler(memory)), "/bucket")
    return tmp_path, "memory://bucket"


def same(a, b):
    assert (a.format, a.header.to_json(), a.columns) == (b.format, b.header.to_json(), b.columns)
    one, other = a.read(), b.read()
    for name, values in one.steps.items():
        np.testing.assert_array_equal(values, other.steps[name])
    for name, values in one.final_obs.items():
        np.testing.assert_array_equal(values, other.final_obs[name])
    assert one.segments.episode_id.tolist() == other.segments.episode_id.tolist()
    assert one.offsets.tolist() == other.offsets.tolist()
    found, wanted = (json.dumps(r.validate().to_json()) for r in (a, b))
    assert found.replace(str(a.path), "") == wanted.replace(str(b.path), "")


def test_every_format_reads_the_same_from_anywhere(places):
    here, url = places
    formats = []
    for name in ("episodes", "rows", "hdf5", "npz", "json", "minari", "lerobot"):
        there = Recording.open(f"{url}/{name}")
        same(there, Recording.open(here / name))
        formats.append(there.format)
    assert formats == ["rllib-episodes", "rllib-table", "d4rl-hdf5", "npz", "rllib-json", "minari-hdf5", "lerobot"]
    same(Recording.open(f"{url}/minari/data/main_data.hdf5"), Recording.open(here / "minari/data/main_data.hdf5"))


def test_lists_of_files_of_rllib_s(places):
    here, url = places
    for name, glob in (("episodes", "run-*.parquet"), ("rows", "*/x.parquet")):
        whole = Recording.open(here / name)
        files = [str(path) for path in Recording.open(f"{url}/{name}").files]
        for given in (
            f"{url}/{name}/{glob}",
            files,
            [files[0], f"{url}/{name}/{glob}"],
            [*files[:2], here / name / whole.files[2]],
        ):
            assert Recording.open(given).read().steps["obs/0" if "obs/0" in whole.columns else "obs"].tolist() == (
                whole.read().steps["obs"].tolist()
            )


def test_files_of_several_kinds_are_told_apart(places, tmp_path):
    here, url = places
    both = Recording.open([f"{url}/rows/*/x.parquet", f"{url}/rows/0/x.parquet"])
    assert both.format == "rllib-table"
    with pytest.raises(DataError, match=r"run-0\.parquet and .*x\.parquet can't be read as one recording"):
        Recording.open([f"{url}/episodes/*", f"{url}/rows/0"])
    (here / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes\.txt: is not in a known recording format"):
        Recording.open([f"{url}/rows/0/x.parquet", here / "notes.txt"])


def test_a_table_s_space_gives_way_to_one_that_was_recorded(tmp_path):
    """Spaces of tables are taken from the numbers."""
    hdf5(tmp_path / "a.hdf5")
    made = Recording.open(tmp_path / "a.hdf5")
    convert(made, tmp_path / "own")
    joined = Recording.open([tmp_path / "own", tmp_path / "a.hdf5"])
    assert joined.format == "joined"
    assert joined.num_steps == 60
    assert joined.num_episodes == 6


TABLE = pa.table(
    {
        "trip": [0, 0, 0, 1, 1, 2],
        "x": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
        "y": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "a": [0, 1, 0, 1, 0, 1],
        "r": [1.0] * 6,
        "end": [False, False, True, False, True, True],
    }
)


def test_sources_read_every_kind_of_table_from_a_server(s3, tmp_path):
    bucket = s3.url.removeprefix("s3://")
    writers = {
        "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=2),
        "a.csv": lambda path: pa.csv.write_csv(TABLE, path),
        "a.csv.gz": lambda path: path.write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes())),
        "a.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist())),
        "a.json": lambda path: path.write_text(json.dumps(TABLE.to_pylist())),
        "a.arrow": lambda path: pa.feather.write_feather(TABLE, path),
    }
    for name, write in writers.items():
        write(tmp_path / name)
    sent(tmp_path, s3.system, f"{bucket}/logs")
    wanted = Recording.open(Source(TABLE, columns=COLUMNS)).read()
    for name in writers:
        found = Recording.open(Source(f"{s3.url}/logs/{name}", columns=COLUMNS))
        assert [str(file) for file in found.files] == [f"{s3.url}/logs/{name}"]
        np.testing.assert_array_equal(found.read().steps["obs"], wanted.steps["obs"], err_msg=name)
    two = Source(f"{s3.url}/logs/a.[pc]*[tv]", columns=COLUMNS)
    with pytest.raises(DataError, match="continues at t|has step t|can't be read"):
        Recording.open(two).read()  # the same trips, twice
    given = Source(f"{bucket}/logs/a.parquet", columns=COLUMNS, filesystem=s3.system)
    assert Recording.open(given).num_steps == 6
    assert Recording.open([given, Source(TABLE, columns=COLUMNS)]).num_episodes == 6
    with pytest.raises(DataError, match=r"s3://.*/logs/\*\.orc: no file or folder matches this glob"):
        Recording.open(Source(f"{s3.url}/logs/*.orc", columns=COLUMNS))
    assert "SECRET" not in repr(Source("s3://KEY:SECRET@bucket/x", columns=COLUMNS))
