# SPDX-License-Identifier: Apache-2.0
"""What reading and converting other tools' recordings holds in memory: a part, however large the whole is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etude.recordings import Recording, Source, cache, format
from etude.recordings.formats import rllib_json, sorting
from etude.recordings.formats.arrow import plain, write_batches
from etude.recordings.formats.table_inputs import groups_of

STEPS = 25
"""Steps of each episode."""
IMAGE = (16, 16, 3)


@pytest.fixture(autouse=True)
def small_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and units of at most 64 KiB: 85 images."""
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(format, "MAX_BYTES", 2**16)


def images(num: int) -> np.ndarray[Any, Any]:
    return np.arange(num * 768).reshape(num, *IMAGE).astype(np.uint8)


def rows_of(parts: Recording) -> list[int]:
    """The steps of each part."""
    return [parts.part(k).num_steps for k in range(parts.num_parts)]


def rllib_table(folder: Path, episodes: int) -> Path:
    num = episodes * STEPS
    obs = images(num)
    kind = pa.large_list(pa.uint8())
    metadata = {
        b"ARROW:extension:name": b"ray.data.arrow_tensor_v2",
        b"ARROW:extension:metadata": json.dumps(list(IMAGE)).encode(),
    }
    columns = {
        "eps_id": pa.array([f"e{i // STEPS}" for i in range(num)]),
        "obs": pa.array(list(obs.reshape(num, -1)), kind),
        "actions": pa.array(np.arange(num) % 4),
        "rewards": pa.array(np.ones(num)),
        "new_obs": pa.array(list(np.roll(obs, -1, axis=0).reshape(num, -1)), kind),
        "terminateds": pa.array(np.arange(num) % STEPS == STEPS - 1),
        "truncateds": pa.array(np.zeros(num, bool)),
    }
    fields = [
        pa.field(name, array.type, metadata=metadata if name in ("obs", "new_obs") else None)
        for name, array in columns.items()
    ]
    folder.mkdir()
    pq.write_table(pa.table(list(columns.values()), schema=pa.schema(fields)), folder / "rows.parquet")
    return folder


def test_parts_of_rllib_tables_with_images_are_small(tmp_path: Path) -> None:
    recording = Recording.open(rllib_table(tmp_path / "table", 12))
    assert sum(rows_of(recording)) == 12 * STEPS
    assert max(rows_of(recording)) <= 3 * STEPS
    assert recording.meta["duplicates"] == 0


def test_parts_of_minari_datasets_with_images_are_small(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = tmp_path / "camera-v0" / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for k in range(12):
            group = file.create_group(f"episode_{k}")
            group.attrs["total_steps"] = STEPS
            ends = np.arange(STEPS) == STEPS - 1
            arrays = {"observations": images(STEPS + 1), "actions": np.arange(STEPS) % 4, "rewards": np.ones(STEPS)}
            for name, array in {**arrays, "terminations": ends, "truncations": ends & False}.items():
                group.create_dataset(name, data=array)
    bounds = {"low": np.zeros(IMAGE, int).tolist(), "high": np.full(IMAGE, 255).tolist()}
    spaces = {
        "observation_space": json.dumps({"type": "Box", "dtype": "uint8", "shape": IMAGE, **bounds}),
        "action_space": json.dumps({"type": "Discrete", "n": 4}),
    }
    metadata = {"data_format": "hdf5", "jpeg_encoding": False, "total_episodes": 12, **spaces}
    (data / "metadata.json").write_text(json.dumps(metadata))
    recording = Recording.open(data.parent)
    assert sum(rows_of(recording)) == 12 * STEPS
    assert max(rows_of(recording)) <= 3 * STEPS


def table_of(num: int) -> pa.Table:
    """A table of images with an episode every 25 rows."""
    return pa.table(
        {
            "image": pa.FixedSizeListArray.from_arrays(pa.array(images(num).reshape(-1)), 768),
            "action": np.arange(num) % 4,
            "episode": pa.array([f"{i // STEPS:05}" for i in range(num)]).dictionary_encode(),
            "end": np.arange(num) % STEPS == STEPS - 1,
        }
    )


SCHEMA = {"obs": "image", "action": "action", "episode_id": "episode", "terminated": "end"}


def test_parts_of_tables_with_images_are_small(tmp_path: Path) -> None:
    pq.write_table(table_of(12 * STEPS), tmp_path / "rows.parquet")
    recording = Recording.open(Source(tmp_path / "rows.parquet", SCHEMA))
    assert sum(rows_of(recording)) == 12 * STEPS
    assert max(rows_of(recording)) <= 3 * STEPS
    assert recording.read().num_segments == 12


def test_a_large_record_batch_is_read_in_parts(tmp_path: Path) -> None:
    table = table_of(12 * STEPS)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    groups = groups_of(tmp_path / "rows.arrow")
    assert max(group.num_rows for group in groups) <= 85
    found = pa.concat_tables([group.read(["image", "action"]) for group in groups])
    assert found.combine_chunks() == table.select(["image", "action"]).combine_chunks()


def test_an_arrow_stream_is_not_held_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(100 * STEPS)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    here = Recording.open(Source(tmp_path / "rows.arrow", SCHEMA)).read()
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**16)
    before = pa.total_allocated_bytes()
    recording = Recording.open(Source(tmp_path / "rows.arrow", SCHEMA))
    assert pa.total_allocated_bytes() - before < table.nbytes / 4
    exp = recording.read()
    np.testing.assert_array_equal(exp.steps["obs"], here.steps["obs"])
    assert exp.segments.episode_id.tolist() == here.segments.episode_id.tolist()
    assert cache.entries()


def test_converted_tables_of_images_have_small_record_batches(tmp_path: Path) -> None:
    one, held = plain(table_of(20)), list[int]()
    before = pa.total_allocated_bytes()

    def some() -> Any:
        for _ in range(125):
            held.append(pa.total_allocated_bytes() - before)
            yield plain(table_of(20))

    write_batches(tmp_path / "rows.arrow", one.schema, some())
    with pa.memory_map(str(tmp_path / "rows.arrow")) as file:
        reader = pa.ipc.open_file(file)
        sizes = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
    assert sum(sizes) == 125 * 20
    assert max(sizes) <= 100
    assert max(held) < 125 * one.nbytes / 4


def json_lines(folder: Path, lines: int) -> Path:
    """RLlib's JSON with an episode of images on each line, plain."""
    folder.mkdir()
    obs = images(STEPS)
    with (folder / "output.json").open("w") as file:
        for k in range(lines):
            batch = {
                "type": "SampleBatch",
                "t": list(range(STEPS)),
                "eps_id": [k] * STEPS,
                "agent_index": [0] * STEPS,
                "obs": obs.tolist(),
                "new_obs": np.roll(obs, -1, axis=0).tolist(),
                "actions": [0, 1, 2, 3, 0] * (STEPS // 5),
                "rewards": [1.0] * STEPS,
                "terminateds": [False] * (STEPS - 1) + [True],
                "truncateds": [False] * STEPS,
            }
            file.write(json.dumps(batch) + "\n")
    return folder


def test_rllib_json_of_images_is_sorted_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rllib_json, "_BATCH_BYTES", 2**16)
    found: list[int] = []
    real = sorting._split

    def counted(rows: sorting.KeyedRows, *more: Any) -> Any:
        found.append(rows.table.num_rows)
        return real(rows, *more)

    monkeypatch.setattr(sorting, "_split", counted)
    recording = Recording.open(json_lines(tmp_path / "json", 20))
    assert sum(found) == recording.num_steps == 20 * STEPS
    assert max(found) <= 4 * STEPS
    assert max(rows_of(recording)) <= 4 * STEPS


def test_what_is_large_once_decoded_goes_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = json_lines(tmp_path / "json", 4)
    size = sum(file.stat().st_size for file in path.iterdir())
    Recording.open(path)
    assert not cache.entries()
    monkeypatch.setattr(cache, "LEAST_BYTES", size + 1)
    real, made = rllib_json._convert, []

    def larger(files: Any, folder: Path) -> None:
        made.append(folder)
        real(files, folder)
        with (folder / "more").open("wb") as file:
            file.truncate(2 * size)

    monkeypatch.setattr(rllib_json, "_convert", larger)
    assert Recording.open(path).num_steps == 4 * STEPS
    assert len(cache.entries()) == 1
    assert Recording.open(path).num_steps == 4 * STEPS
    assert len(made) == 1
