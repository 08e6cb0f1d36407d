# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings to Experience, images from Parquet, and how fast data is converted and looked at."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, expert, python, race

BARE, RLLIB, MINARI, LEROBOT = "bare decode", "RLlib", "Minari", "LeRobot"
DECODE, IMAGE_REACH = "decode alone", 0.9
IMAGE = (84, 84, 4)


def rows(options: Options) -> Iterator[Row]:
    """Every row of this file."""
    for name, reach, bare, peers in (
        ("rllib-episodes", 1e6, _msgpack, {RLLIB: ("ray.rllib", _rllib_episodes)}),
        ("rllib-table", 5e6, _to_numpy, {RLLIB: ("ray.rllib", _rllib_table)}),
        ("minari", 3e6, _h5py, {MINARI: ("minari", _minari)}),
        ("lerobot", 3e6, _to_numpy, {LEROBOT: ("lerobot", _lerobot)}),
    ):
        yield _reading(name, reach, bare, peers, options)
    yield _images(options)
    yield from _converting(options)


# -- readers --------------------------------------------------------------------------------------------------


def written(name: str, options: Options) -> Path:
    """The expert's recording in another tool's format; made when it is first asked for."""
    from etude import Recording
    from etude.recordings import convert

    path = options.folder / (f"{name}-v0" if name == "minari" else name)  # Minari wants a version
    if not path.exists():
        convert(Recording.open(expert(options)), path, format=name)
    return path


def _reading(
    name: str,
    reach: float,
    bare: Callable[[Path], int],
    peers: dict[str, tuple[str, Callable[[Path], int]]],
    options: Options,
) -> Row:
    path = written(name, options)
    works: dict[str, Work] = {ETUDE: lambda: _experience(path), BARE: lambda: bare(path)}
    absent = []
    for peer, (module, read) in peers.items():
        if _is_there(module):
            works[peer] = _of(read, path)
        else:
            absent.append(peer)
    rates = race(works, options)
    figures = [Figure(peer, rates[peer], "peer") for peer in peers if peer in rates]
    return Row(
        f"{name} of {_experience(path) // 1000}k steps to Experience, opening included",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(BARE, rates[BARE]), *figures],
        Reach(reach),
        "".join(f"{peer} is not installed beside it" for peer in absent),
    )


def _of(read: Callable[[Path], int], path: Path) -> Work:
    return lambda: read(path)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _experience(path: Path) -> int:
    from etude.recordings.opening import opened

    _, units = opened(path)
    return sum(units.load(k).num_steps for k in range(len(units)))


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.parquet"))


def _msgpack(path: Path) -> int:
    """Documents as plain Python objects, arrays as bytes: what any reader in Python begins with."""
    import msgpack

    steps = 0
    for file in _files(path):
        for item in pq.read_table(file, use_threads=False)["item"]:
            steps += len(msgpack.unpackb(item.as_py(), strict_map_key=False)["rewards"]["data"])
    return steps


def _to_numpy(path: Path) -> int:
    """All columns, as contiguous NumPy arrays."""
    return sum(_decoded(file, None) for file in _files(path) if "meta" not in file.parts)


def _decoded(path: Path, columns: list[str] | None) -> int:
    """Read row group by row group to NumPy; gives the rows."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns, use_threads=False)
            for column in table.combine_chunks().columns:
                values = column.chunk(0)
                if pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
                    values = values.flatten()
                if pa.types.is_primitive(values.type):
                    values.to_numpy(zero_copy_only=False)
        return int(file.metadata.num_rows)


def _h5py(path: Path) -> int:
    """Every array of every episode, by h5py."""
    import h5py

    steps = 0
    for name in path.rglob("main_data.hdf5"):
        with h5py.File(name) as file:
            for episode in file.values():
                for member in ("observations", "actions", "rewards", "terminations", "truncations"):
                    values = episode[member][()]
                steps += len(values)
    return steps


def _rllib_episodes(path: Path) -> int:
    import msgpack
    import msgpack_numpy
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    steps = 0
    for file in _files(path):
        for item in pq.read_table(file)["item"]:
            state = msgpack.unpackb(item.as_py(), object_hook=msgpack_numpy.decode)
            steps += len(SingleAgentEpisode.from_state(state))
    return steps


def _rllib_table(path: Path) -> int:
    """As RLlib's prelearner does it: an episode for each row. 10,000 rows of each file stand for all."""
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    steps = 0
    for file in _files(path):
        table = pq.read_table(file, columns=["obs", "new_obs", "actions", "rewards", "terminateds"]).slice(0, 10_000)
        columns = {name: np.stack(table[name].to_pandas().to_numpy()) for name in table.column_names}
        for obs, new_obs, action, reward, done in zip(*columns.values(), strict=True):
            SingleAgentEpisode(
                observations=[obs, new_obs], actions=[action], rewards=[reward], terminated=done, len_lookback_buffer=0
            )
            steps += 1
    return steps


def _minari(path: Path) -> int:
    from minari.dataset.minari_storage import MinariStorage

    folder = next(path.rglob("main_data.hdf5")).parent
    storage: Any = MinariStorage.read(folder)
    return sum(len(episode["rewards"]) for episode in storage.get_episodes(range(storage.total_episodes)))


def _lerobot(path: Path) -> int:
    """Step by step, as torch's loader asks for them. 2,000 steps stand for all."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("expert", root=path)
    return sum(dataset[i]["action"] is not None for i in range(min(2_000, len(dataset))))


# -- images ---------------------------------------------------------------------------------------------------


def _images(options: Options) -> Row:
    """Batches of images from Etude's own Parquet, in order, beside decoding the same files and doing nothing."""
    from etude import Recording

    path = options.folder / "images"
    num = 1_000 if options.quick else 8_000
    if not path.exists():
        _draw(path, num)
    recording = Recording.open(path)
    files = [Path(str(file)) for file in recording.files]

    def stream() -> int:
        batches = recording.batches(256, columns=["obs", "action"], shuffle=False, epochs=1)
        return sum(len(batch["action"]) for batch in batches)

    rates = race({ETUDE: stream, DECODE: lambda: sum(_decoded(file, ["obs", "action"]) for file in files)}, options)
    return Row(
        "images 84x84x4 uint8 from Parquet (zstd) to batches of 256, streaming",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(DECODE, rates[DECODE])],
        Reach(IMAGE_REACH, DECODE),
        f"{num:,} images",
    )


def _draw(path: Path, num: int) -> None:
    """A recording of frames with many small coloured things on a ground of one colour, four frames to an image."""
    from gymnasium.spaces import Box, Discrete

    from etude import Experience, RecordingWriter
    from etude.experience import Segments

    rng = np.random.default_rng(0)
    with RecordingWriter(path, obs_space=Box(0, 255, IMAGE, np.uint8), action_space=Discrete(4)) as writer:
        for start in range(0, num, 500):
            frames = np.full((504, 84, 84), 87, np.uint8)
            at = rng.integers(0, 78, (60, 2))
            looks = rng.integers(0, 256, (60, 6, 6), np.uint8)
            for frame in frames:
                at = (at + rng.integers(-2, 3, at.shape)) % 78
                for (x, y), look in zip(at, looks, strict=True):
                    frame[y : y + 6, x : x + 6] = look
            obs = np.stack([frames[i : i + 501] for i in range(4)], axis=-1)
            segments = Segments.of(1, episode_id=[f"game-{start}"], truncated=True)
            steps = {"obs": obs[:-1], "action": rng.integers(0, 4, 500)}
            writer.write(Experience(steps, np.array([0, 500]), segments, {"obs": obs[-1:]}))


# -- converting -----------------------------------------------------------------------------------------------

_CONVERT = """
import json, resource, sys, time
from etude.recordings import Recording, convert, validate
begin = time.perf_counter()
converted = convert(Recording.open(sys.argv[1]), sys.argv[2])
middle = time.perf_counter()
report = validate(sys.argv[2])
assert report.ok, report
print(json.dumps([report.rows, middle - begin, time.perf_counter() - middle]))
"""


def _converting(options: Options) -> Iterator[Row]:
    """Converting a table of RLlib's and validating what came out, each in a process of its own: speed and memory."""
    rates: dict[str, list[float]] = {"both": [], "converting": [], "validating": []}
    peaks: dict[int, list[float]] = {}
    for times in (1, 4) if options.quick else (4, 40):
        source = repeated(times, options)
        target = options.folder / "converted"
        for _ in range(1 if options.quick else 3):
            done = python(f"import sys\nsys.argv = ['', {str(source)!r}, {str(target)!r}]\n{_CONVERT}")
            num, converting, validating = json.loads(done.out)
            shutil.rmtree(target)
            peaks.setdefault(num, []).append(done.megabytes)
            for name, seconds in (("both", converting + validating), ("converting", converting),
                                  ("validating", validating)):  # fmt: skip
                rates[name].append(num / seconds)
    (few, small), (many, large) = peaks.items()
    yield Row(
        f"an RLlib table converted to Etude's Parquet and validated, {many:,} steps",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates["both"][-len(large) :], "etude"),
         *(Figure(name, rates[name][-len(large) :]) for name in ("converting", "validating"))],
        Reach(2e6),
    )  # fmt: skip
    other = f"of {few:,} steps"
    yield Row(
        f"memory of converting and validating {many:,} steps",
        "MB",
        [Figure(ETUDE, large, "etude"), Figure(other, small)],
        Reach(1.2, other),
    )


def repeated(times: int, options: Options) -> Path:
    """The table of the expert several times over, each with ids of its own."""
    path = options.folder / f"table-{times}"
    if not path.exists():
        path.mkdir()
        for k in range(times):
            for file in _files(written("rllib-table", options)):
                table = pq.read_table(file)
                ids = pa.compute.binary_join_element_wise(table["eps_id"].cast(pa.string()), str(k), "-")
                table = table.set_column(table.column_names.index("eps_id"), "eps_id", ids)
                pq.write_table(table, path / f"{k:03}-{file.name}")
    return path
