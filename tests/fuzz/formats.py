# SPDX-License-Identifier: Apache-2.0
"""A small recording of each format, and how it is broken."""

import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import corruptions
import gymnasium as gym
import h5py
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from corruptions import Rng

from etude.recordings import CustomSource, RecordingWriter, Source, read_binary, read_text

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "recordings"), str(TESTS / "recordings" / "formats")]

import some_rllib  # noqa: E402
import some_rllib_table  # noqa: E402
from some_recording import numbered  # noqa: E402

Mutation = Callable[[bytes, Rng], bytes]


class Format(NamedTuple):
    """How a recording is made, which of its files are broken, how, and how it is opened."""

    make: Callable[[Path], None]
    files: str
    mutations: tuple[Mutation, ...]
    given: Callable[[Path], Any] = lambda path: path


def _table_bytes(change: Callable[[pa.Table, Rng], pa.Table], **options: Any) -> Mutation:
    def mutate(data: bytes, rng: Rng) -> bytes:
        table = change(pq.read_table(io.BytesIO(data)), rng)
        out = io.BytesIO()
        try:
            pq.write_table(table, out, row_group_size=int(rng.integers(1, 40)), **options)
        except (pa.ArrowException, ValueError, TypeError):
            return corruptions.of_bytes(data, rng)
        return out.getvalue()

    return mutate


parquet = _table_bytes(corruptions.of_table)


def _footer(data: bytes, rng: Rng) -> bytes:
    """Another header or other facts of the file, in one that says it is in order, as Etude's do."""
    table, out = pq.read_table(io.BytesIO(data)), io.BytesIO()
    changed = table.replace_schema_metadata(corruptions.of_metadata(table.schema.metadata, rng))
    if rng.random() < 0.5:
        changed = corruptions.of_table(changed, rng)
    try:
        order = pq.SortingColumn.from_ordering(changed.schema, [("segment", "ascending"), ("t", "ascending")])
        pq.write_table(changed, out, row_group_size=int(rng.integers(1, 40)), sorting_columns=order)
    except (pa.ArrowException, ValueError, TypeError):
        return corruptions.of_bytes(data, rng)
    return out.getvalue()


def _ipc(data: bytes, rng: Rng) -> bytes:
    table = corruptions.of_table(pa.ipc.open_file(data).read_all(), rng)
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    return out.getvalue()


def _documents(table: pa.Table, rng: Rng) -> pa.Table:
    items = table["item"].to_pylist()
    i = int(rng.integers(len(items)))
    if rng.random() < 0.4:
        items[i] = corruptions.of_bytes(items[i], rng)
    else:
        tree = msgpack.unpackb(items[i], strict_map_key=False)
        tree = corruptions.of_tree(tree, rng, (*corruptions.ODD, *corruptions.BYTES))
        try:
            items[i] = msgpack.packb(tree)
        except (ValueError, OverflowError, TypeError):
            items[i] = corruptions.of_bytes(items[i], rng)
    return pa.table({"item": pa.array(items, pa.binary())})


def _packed_table(table: pa.Table, rng: Rng) -> pa.Table:
    values = table["obs"].to_pylist()
    i = int(rng.integers(len(values)))
    values[i] = some_rllib.packed(corruptions.of_bytes(_pickled(i), rng))
    return table.set_column(table.column_names.index("obs"), "obs", pa.array(values))


def _pickled(i: int) -> bytes:
    return pickle.dumps(np.arange(3, dtype=np.float32) + i, 5)


def _packed_json(data: bytes, rng: Rng) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    lines[int(rng.integers(len(lines)))]["obs"] = some_rllib.packed(corruptions.of_bytes(_PICKLES, rng))
    return "\n".join(map(json.dumps, lines)).encode()


_PICKLES = pickle.dumps(np.arange(12, dtype=np.float32).reshape(4, 3), 5)


def _npz(data: bytes, rng: Rng) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = str(rng.choice(sorted(members)))
    members[name] = corruptions.of_bytes(members[name][:200], rng) + members[name][200:]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


def _hdf5(data: bytes, rng: Rng) -> bytes:
    """Datasets of other shapes and types, or none; names moved."""
    out = io.BytesIO(data)
    with h5py.File(out, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name, kind = str(rng.choice(names)), int(rng.integers(6))
        if kind == 0:
            del file[name]
        elif kind == 1:
            file.move(name, str(rng.choice(["x", "infos/y", "observations/z"])) + str(rng.integers(9)))
        else:
            odd = [np.float16([1, 2]), np.zeros((3, 0)), np.array(5), np.bytes_("x"), np.zeros((4, 2), "c16")]
            odd += [np.full((40, 3), np.nan), np.zeros(40, ">i4"), h5py.Empty("f8"), np.zeros(40, [("a", "i4")])]
            del file[name]
            file[name] = odd[int(rng.integers(len(odd)))]
    return out.getvalue()


# -- recordings that are whole -------------------------------------------------------------------------------------


def _own(path: Path) -> None:
    spaces = {"obs_space": gym.spaces.Box(-9e9, 9e9, (3,), np.float32), "action_space": gym.spaces.Discrete(1000)}
    with RecordingWriter(path, **spaces, max_rows_per_file=25) as writer:
        writer.write(numbered([10, 12, 9, 14]))


def _format_1(path: Path) -> None:
    shutil.copytree(Path(__file__).parent.parent / "recordings" / "format_1", path, dirs_exist_ok=True)


def _episodes(path: Path) -> None:
    some_rllib.write_items(path / "a.parquet", [some_rllib.episode(n, name=f"e{n}")[0] for n in (4, 6, 5)])


def _table(path: Path) -> None:
    some_rllib_table.write(path / "a.parquet", some_rllib_table.rows_of([4, 6, 5]))


def _packed(path: Path) -> None:
    obs = pa.array([some_rllib.packed(_pickled(i)) for i in range(15)])
    after = pa.array([some_rllib.packed(_pickled(i + 1)) for i in range(15)])
    some_rllib_table.write(path / "a.parquet", some_rllib_table.rows_of([4, 6, 5]), obs=obs, new_obs=after)


def _json(path: Path, packed: bool = False) -> None:
    lines = []
    for i in range(4):
        obs: Any = np.arange(12.0).reshape(4, 3).tolist()
        columns = {
            "obs": some_rllib.packed(_PICKLES) if packed else obs,
            **{"new_obs": obs, "actions": [0, 1, 0, 1], "rewards": [1.0] * 4, "eps_id": [i // 2] * 4},
            **{"terminateds": [False] * 3 + [i % 2 == 1], "truncateds": [False] * 4, "infos": [{}] * 4},
            **{"t": list(range(i % 2 * 4, i % 2 * 4 + 4)), "agent_index": [0] * 4, "vf_preds": [0.5] * 4},
        }
        whole = {"type": "MultiAgentBatch", "count": 4, "policy_batches": {"p": columns}}
        lines.append(json.dumps(whole if not packed and i > 1 else {"type": "SampleBatch", **columns}))
    (path / "a.json").write_text("\n".join(lines))


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(40, 3)).astype(np.float32),
        "actions": rng.integers(0, 4, 40),
        "rewards": rng.normal(size=40),
        "terminals": np.arange(40) % 10 == 9,
        "timeouts": np.arange(40) % 10 == 20,
    }


def _d4rl(path: Path) -> None:
    with h5py.File(path / "a.hdf5", "w") as file:
        for name, values in _arrays().items():
            file.create_dataset(name, data=values, compression="gzip" if name == "observations" else None)


def _minari(path: Path, kind: str) -> None:
    import test_minari

    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [0, 0, 0], "high": [50, 50, 50]}
    action = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}
    data = test_minari.episodes(box, action, [5, 7], infos=True)
    if kind == "hdf5":
        test_minari.write_hdf5(path / "data", box, action, data)
    else:
        test_minari.write_arrow(path / "data", box, action, data, kind)


def _lerobot(path: Path, name: str) -> None:
    shutil.copytree(TESTS / "recordings" / "formats" / "lerobot_v3" / name, path, dirs_exist_ok=True)


def _steps() -> pa.Table:
    rng = np.random.default_rng(0)
    columns = {"trip": np.arange(30) // 10, "i": np.arange(30) % 10, "speed": rng.normal(size=30)}
    columns |= {"angle": rng.normal(size=30), "command": rng.integers(0, 3, 30), "gain": rng.normal(size=30)}
    return pa.table({**columns, "done": np.arange(30) % 10 == 9})


def _source(path: Path) -> Source:
    names = {"obs": ["speed", "angle"], "action": "command", "reward": "gain", "done": "done", "t": "i"}
    return Source(str(path), columns={**names, "episode_id": "trip"})


_OWN: dict[str, Any] = {
    "obs_space": gym.spaces.Dict({"place": gym.spaces.Box(-9, 9, (2,), np.float32), "mode": gym.spaces.Discrete(2)}),
    "action_space": gym.spaces.Discrete(3),
}


def _lines(path: Path) -> None:
    obs = {"place": [[0.5, 1.0]] * 5, "mode": [0, 1, 0, 1, 0]}
    line = {"obs": obs, "action": [0, 1, 2, 0], "reward": [1.0] * 4, "info/x": [1, 2, 3, 4], "terminated": True}
    line |= {"truncated": [False] * 4, "agent_id": "a", "module_id": "m", "t_start": 0}
    (path / "a.txt").write_text("\n".join(json.dumps({**line, "episode_id": f"e{i}"}) for i in range(4)))


def _lines_source(path: Path) -> CustomSource:
    return read_text(path, lambda row: json.loads(row.data), **_OWN)


def _frames(path: Path) -> None:
    for i in range(3):
        (path / f"e{i}").mkdir()
        for t in range(4):
            np.array([t, i, t % 2, t % 3, t == 3], np.float32).tofile(path / f"e{i}" / f"{t}.bin")


def _frames_source(path: Path) -> CustomSource:
    def episode(files: list[Any]) -> Any:
        rows = np.stack([np.frombuffer(file.data, np.float32) for file in files])
        obs = {"place": rows[:, :2], "mode": rows[:, 2].astype(int)}
        return {"obs": obs, "action": rows[:, 3].astype(int), "terminated": rows[:, 4].astype(int)}

    return read_binary(path, episode, **_OWN, together="folder")


def _ipc_file(path: Path) -> None:
    with pa.ipc.new_file(str(path / "a.arrow"), _steps().schema) as file:
        file.write_table(_steps())


RAW = corruptions.of_bytes
FORMATS: dict[str, Format] = {
    "etude": Format(_own, "*", (RAW, parquet, _footer)),
    "etude-1": Format(_format_1, "*", (RAW, parquet, corruptions.of_json)),
    "rllib-episodes": Format(_episodes, "*.parquet", (RAW, _table_bytes(_documents), _table_bytes(_documents))),
    "rllib-table": Format(_table, "*.parquet", (RAW, parquet, parquet)),
    "rllib-table-packed": Format(_packed, "*.parquet", (_table_bytes(_packed_table), parquet)),
    "rllib-json": Format(_json, "*.json", (RAW, corruptions.of_json, corruptions.of_json)),
    "rllib-json-packed": Format(lambda path: _json(path, True), "*.json", (RAW, _packed_json, _packed_json)),
    "d4rl-hdf5": Format(_d4rl, "*.hdf5", (RAW, _hdf5)),
    "npz": Format(lambda path: np.savez_compressed(path / "a.npz", **_arrays()), "*.npz", (RAW, _npz, _npz)),
    "minari-hdf5": Format(lambda path: _minari(path, "hdf5"), "*.hdf5", (RAW, _hdf5)),
    "minari-arrow": Format(lambda path: _minari(path, "arrow"), "*.arrow", (RAW, _ipc)),
    "minari-parquet": Format(lambda path: _minari(path, "parquet"), "*.parquet", (RAW, parquet)),
    "minari-metadata": Format(lambda path: _minari(path, "arrow"), "metadata.json", (RAW, corruptions.of_json)),
    "lerobot": Format(lambda path: _lerobot(path, "arms"), "*.parquet", (RAW, parquet, parquet)),
    "lerobot-images": Format(lambda path: _lerobot(path, "cameras"), "*.parquet", (RAW, parquet, parquet)),
    "lerobot-videos": Format(lambda path: _lerobot(path, "films"), "*.mp4", (RAW,)),
    "lerobot-info": Format(lambda path: _lerobot(path, "cameras"), "info.json", (RAW, corruptions.of_json)),
    "table-parquet": Format(lambda p: pq.write_table(_steps(), p / "a.parquet"), "*.parquet", (RAW, parquet), _source),
    "table-arrow": Format(_ipc_file, "*.arrow", (RAW, _ipc), _source),
    "table-csv": Format(lambda p: pa.csv.write_csv(_steps(), str(p / "a.csv")), "*.csv", (RAW,), _source),
    "table-json": Format(
        lambda p: p.joinpath("a.jsonl").write_text("\n".join(map(json.dumps, _steps().to_pylist()))) and None,
        "*.jsonl",
        (RAW, corruptions.of_json),
        _source,
    ),
    "custom-text": Format(_lines, "*.txt", (RAW, corruptions.of_json, corruptions.of_json), _lines_source),
    "custom-binary": Format(_frames, "*.bin", (RAW,), _frames_source),
}


def load() -> None:
    """Import what reading takes, so that a bound on memory is one on data."""
    import test_minari  # noqa: F401
