# SPDX-License-Identifier: Apache-2.0
"""Minari datasets, written here naively as Minari lays them out (https://minari.farama.org/content/dataset_standards)."""

import io
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from some_recording import assert_same

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, Source, convert, validate
from etude.recordings.formats import minari, minari_episodes

BOX = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-10.0] * 3, "high": [float("inf")] * 3}
MODE = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}
NESTED = {"type": "Dict", "subspaces": {"mode": MODE, "pos": BOX}}
PAIR = {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 5, "start": 0}, BOX]}
PICTURE = {"type": "Box", "dtype": "uint8", "shape": [32, 40, 3], "low": [[[0] * 3] * 40] * 32}
PICTURE["high"] = [[[255] * 3] * 40] * 32


def values(space: dict[str, Any], rows: int, rng: np.random.Generator) -> Any:
    if space["type"] == "Dict":
        return {key: values(sub, rows, rng) for key, sub in space["subspaces"].items()}
    if space["type"] == "Tuple":
        return tuple(values(sub, rows, rng) for sub in space["subspaces"])
    if space["type"] == "Discrete":
        return rng.integers(0, space["n"], rows)
    return (rng.random((rows, *space["shape"])) * 50).astype(space["dtype"])


def episodes(obs: dict[str, Any], action: dict[str, Any], lengths: list[int], infos: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    out = []
    for i, n in enumerate(lengths):
        ends = np.arange(n) == n - 1
        out.append(
            {
                "observations": values(obs, n + 1, rng),
                "actions": values(action, n, rng),
                "rewards": rng.normal(size=n),
                "terminations": ends & (i % 2 == 0),
                "truncations": ends & (i % 2 == 1),
            }
        )
        if infos:
            out[-1]["infos"] = {"speed": rng.normal(size=n + 1), "at": {"xy": rng.normal(size=(n + 1, 2))}}
    return out


def metadata(
    folder: Path, kind: str, obs: dict[str, Any], action: dict[str, Any], data: list[Any], **more: Any
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "total_episodes": len(data),
        "total_steps": sum(len(e["rewards"]) for e in data),
        "data_format": kind,
        "observation_space": json.dumps(obs),
        "action_space": json.dumps(action),
        "env_spec": json.dumps({"id": "Some-v0"}),
        "dataset_id": "some/data-v0",
    }
    (folder / "metadata.json").write_text(json.dumps(about | more))


def put(group: h5py.Group, name: str, value: Any) -> None:
    if isinstance(value, tuple):
        value = {f"_index_{i}": part for i, part in enumerate(value)}
    if isinstance(value, dict):
        inside = group.create_group(name)
        for key, part in value.items():
            put(inside, key, part)
    else:
        group.create_dataset(name, data=value, chunks=True, maxshape=(None, *value.shape[1:]))


def write_hdf5(folder: Path, obs: Any, action: Any, data: list[Any], **more: Any) -> Path:
    metadata(folder, "hdf5", obs, action, data, **more)
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for i, episode in enumerate(data):
            group = file.create_group(f"episode_{i}")
            group.attrs.update({"id": i, "seed": 100 + i, "total_steps": len(episode["rewards"])})
            for name, value in episode.items():
                put(group, name, value)
    return folder


def arrow(value: Any, pad: int) -> pa.Array:
    if isinstance(value, tuple):
        value = {str(i): part for i, part in enumerate(value)}
    if isinstance(value, dict):
        return pa.StructArray.from_arrays([arrow(part, pad) for part in value.values()], names=list(value))
    value = np.concatenate([value, np.zeros((pad, *value.shape[1:]), value.dtype)])
    if value.ndim == 1:
        return pa.array(value)
    return pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), int(np.prod(value.shape[1:])))


def write_arrow(folder: Path, obs: Any, action: Any, data: list[Any], kind: str = "arrow", **more: Any) -> Path:
    metadata(folder, kind, obs, action, data, **more)
    for i, episode in enumerate(data):
        (folder / str(i)).mkdir()
        (folder / str(i) / "metadata.json").write_text(json.dumps({"id": i, "seed": 100 + i}))
        full = ("observations", "infos")
        table = pa.table({name: arrow(value, int(name not in full)) for name, value in episode.items()})
        if kind == "parquet":
            pq.write_table(table, folder / str(i) / "part-0.parquet")
        else:
            with pa.ipc.new_file(folder / str(i) / "part-0.arrow", table.schema) as file:
                file.write_table(table)
    return folder


def everything(recording: Recording) -> Experience:
    exps = [recording.part(k) for k in range(recording.num_parts)]
    exp = Experience.concat(exps)
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return exp


def leaf(value: Any, path: list[str]) -> Any:
    for key in path:
        value = value[key] if isinstance(value, dict) else value[int(key)]
    return value


WRITERS = {
    "hdf5": write_hdf5,
    "arrow": write_arrow,
    "parquet": lambda folder, *args, **more: write_arrow(folder, *args, kind="parquet", **more),
}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_what_was_written_is_read(tmp_path: Path, kind: str) -> None:
    lengths = [3, 1, 7, 2, 5, 4, 6, 2, 3, 9, 8, 2]  # more than ten: in text order, 10 comes before 2
    data = episodes(NESTED, PAIR, lengths, infos=True)
    folder = WRITERS[kind](tmp_path / "some" / "data-v0" / "data", NESTED, PAIR, data)
    assert minari.detect(tmp_path)
    recording = Recording.open(tmp_path, on_bad=None)
    exp = everything(recording)
    assert recording.format == f"minari-{kind}"
    assert exp.lengths.tolist() == lengths
    assert exp.segments.episode_id.tolist() == [str(i) for i in range(12)]
    assert exp.segments.terminated.tolist() == [i % 2 == 0 for i in range(12)]
    assert exp.segments.truncated.tolist() == [i % 2 == 1 for i in range(12)]
    for i, episode in enumerate(data):
        steps = exp[i].steps
        for name, path in {"obs/mode": ["mode"], "obs/pos": ["pos"]}.items():
            wanted = leaf(episode["observations"], path)
            np.testing.assert_array_equal(steps[name], wanted[:-1])
            np.testing.assert_array_equal(exp.final_obs[name][i], wanted[-1])
            assert steps[name].dtype == wanted.dtype
        for part in range(2):
            np.testing.assert_array_equal(steps[f"action/{part}"], episode["actions"][part])
        np.testing.assert_array_equal(steps["reward"], episode["rewards"])
        np.testing.assert_array_equal(steps["info/speed"], episode["infos"]["speed"][1:])
        np.testing.assert_array_equal(steps["info/at/xy"], episode["infos"]["at"]["xy"][1:])
    assert recording.header.obs_space["pos"] == gym.spaces.Box(-10, np.inf, (3,), np.float32)
    assert isinstance(recording.header.action_space, gym.spaces.Tuple)
    assert recording.header.env == "Some-v0"
    assert recording.meta["seeds"] == {str(i): 100 + i for i in range(12)}
    assert recording.meta["minari"]["dataset_id"] == "some/data-v0"
    assert not recording.validate().problems
    assert folder.parent.name == "data-v0"


def test_a_file_that_is_opened_anew_after_some_episodes_is_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = episodes(NESTED, PAIR, [3, 1, 7, 2, 5], infos=True)
    data[3]["infos"]["late"] = np.zeros(3)
    folder = write_hdf5(tmp_path / "data", NESTED, PAIR, data)
    whole = Recording.open(folder, on_bad=None)
    monkeypatch.setattr(minari_episodes, "_AT_ONCE", 2)
    recording = Recording.open(folder, on_bad=None)
    assert dict(recording.meta) == dict(whole.meta)
    assert recording.meta["dropped"] == {"info/late": "not in every episode"}
    assert recording.columns == whole.columns
    for name, column in everything(whole).steps.items():
        np.testing.assert_array_equal(everything(recording).steps[name], column)


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_some_columns_alone(tmp_path: Path, kind: str) -> None:
    recording = Recording.open(
        WRITERS[kind](tmp_path, NESTED, MODE, episodes(NESTED, MODE, [3, 4], infos=False)), on_bad=None
    )
    exp = recording.part(0, ["reward", "obs/pos"])
    assert list(exp.steps) == ["obs/pos", "reward"]
    assert list(exp.final_obs) == ["obs/pos"]
    with pytest.raises(DataError, match=r"no column `rewards`.*Nearest: `reward`"):
        recording.part(0, ["rewards"])


def test_parts_are_bounded(tmp_path: Path) -> None:
    data = episodes(BOX, MODE, [40_000, 30_000, 20_000], infos=False)
    recording = Recording.open(write_hdf5(tmp_path, BOX, MODE, data), on_bad=None)
    assert [recording.part(k).num_steps for k in range(recording.num_parts)] == [40_000, 50_000]
    assert everything(recording).num_steps == 90_000


@pytest.mark.parametrize("form", ["arrow", "rows", "vlen", "plain"])
def test_images(tmp_path: Path, form: str) -> None:
    data = episodes(PICTURE, MODE, [2], infos=False)
    frames = data[0]["observations"]
    frames[:] = (
        np.arange(3)[:, None, None, None] * 60 + np.arange(3) * 20
    )  # flat colours come through JPEG nearly whole
    packed = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG")
        packed.append(buffer.getvalue())
    wanted = frames if form == "plain" else np.stack([np.asarray(Image.open(io.BytesIO(p))) for p in packed])
    if form == "arrow":
        folder = write_arrow(tmp_path, PICTURE, MODE, data)
        table = pa.ipc.open_file(folder / "0" / "part-0.arrow").read_all()
        table = table.set_column(0, "observations", pa.array(packed, pa.binary()))
        with pa.ipc.new_file(folder / "0" / "part-0.arrow", table.schema) as file:
            file.write_table(table)
    else:
        folder = write_hdf5(tmp_path, PICTURE, MODE, data)
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            group = file["episode_0"]
            if form != "plain":
                del group["observations"]
                rows = [np.frombuffer(p, np.uint8) for p in packed]
                if form == "rows":
                    width = max(map(len, rows))
                    rows = [np.pad(row, (0, width - len(row))) for row in rows]
                    group["observations"] = np.stack(rows)
                else:
                    group.create_dataset("observations", (3,), h5py.vlen_dtype(np.uint8))
                    for i, row in enumerate(rows):
                        group["observations"][i] = row
    exp = everything(Recording.open(folder, on_bad=None))
    np.testing.assert_array_equal(exp.steps["obs"], wanted[:2])
    np.testing.assert_array_equal(exp.final_obs["obs"][0], wanted[2])


def test_wider_numbers_than_the_space_are_kept(tmp_path: Path) -> None:
    data = episodes(BOX, MODE, [3], infos=False)
    data[0]["observations"] = data[0]["observations"].astype(np.float64) + 1e-12
    recording = Recording.open(write_hdf5(tmp_path, BOX, MODE, data), on_bad=None)
    assert recording.part(0).steps["obs"].dtype == recording.header.obs_space.dtype == np.float64
    assert recording.meta["inferred"] == {"obs": "the file's dtype is wider than the space's"}


def test_infos_that_are_no_numbers_or_not_everywhere_are_named(tmp_path: Path) -> None:
    data = episodes(BOX, MODE, [3, 2], infos=True)
    del data[1]["infos"]["speed"]
    folder = write_hdf5(tmp_path, BOX, MODE, data)
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        for i in range(2):
            file[f"episode_{i}/infos/word"] = ["a"] * len(data[i]["infos"]["at"]["xy"])
    recording = Recording.open(folder, on_bad=None)
    assert recording.columns == ["obs", "action", "reward", "info/at/xy"]
    assert set(recording.meta["dropped"]) == {"info/speed", "info/word"}


def test_several_datasets_are_listed(tmp_path: Path) -> None:
    data = episodes(BOX, MODE, [2], infos=False)
    for name in ("one", "two"):
        write_hdf5(tmp_path / "space" / f"{name}-v0" / "data", BOX, MODE, data)
    with pytest.raises(DataError, match=r"(?s)2 Minari datasets are here; name one.*one-v0\n.*two-v0"):
        Recording.open(tmp_path, on_bad=None)
    assert Recording.open(tmp_path / "space" / "two-v0", on_bad=None).num_parts == 1
    with pytest.raises(DataError, match="there is no such file or folder"):
        Recording.open(tmp_path / "space" / "three-v0", on_bad=None)


def broken(folder: Path, how: str) -> None:
    about = json.loads((folder / "metadata.json").read_text())
    if how == "text":
        about["observation_space"] = json.dumps({"type": "Text", "max_length": 3})
    elif how == "no space":
        del about["action_space"]
    elif how == "format":
        about["data_format"] = "zarr"
    if how == "json":
        (folder / "metadata.json").write_text("{")
    else:
        (folder / "metadata.json").write_text(json.dumps(about))
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        group = file["episode_1"]
        if how == "missing":
            del group["actions"]
        elif how == "short":
            del group["observations"]
            group["observations"] = np.zeros((3, 3), np.float32)
        elif how == "goes on":
            group["terminations"][0] = True
        elif how == "link":
            del group["actions"]
            group["actions"] = h5py.ExternalLink("/elsewhere.hdf5", "/actions")
        elif how == "external":
            del group["actions"]
            group.create_dataset("actions", (3,), np.int64, external=[("elsewhere.bin", 0, 24)])
        elif how == "huge":
            del group["actions"]
            group.create_dataset("actions", (2**40,), np.int64, chunks=(1024,))
        elif how == "text action":
            del group["actions"]
            group["actions"] = ["left", "left", "right"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("text", r"metadata.json: `observation_space`: unknown kind of space: 'Text'\. Etude handles Box"),
        ("no space", "`action_space` is missing"),
        ("format", "`data_format` is 'zarr'; known are hdf5, arrow and parquet"),
        ("json", "can't be read as JSON"),
        ("missing", "there is no `episode_1/actions`; beside it there are: observations, rewards"),
        ("short", r"`episode_1/observations` is \[3, 3\] of float32, but should be \[4, 3\] of float32"),
        ("goes on", "episode_1: the episode continues after its end: a flag is set at step 0 of 3"),
        ("link", "`episode_1/actions` is a link to another place, which is not followed"),
        ("external", "are not stored in this file"),
        ("huge", r"claims 8,796,093,022,208 bytes .* but the file holds only"),
        ("text action", "`episode_1/actions` holds object, not plain numbers"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, how: str, message: str) -> None:
    folder = write_hdf5(tmp_path, BOX, MODE, episodes(BOX, MODE, [2, 3, 2], infos=False))
    broken(folder, how)
    with pytest.raises(DataError, match=message):
        everything(Recording.open(folder, on_bad=None))


def test_problems_are_all_found(tmp_path: Path) -> None:
    data = episodes(BOX, MODE, [2, 3, 2], infos=False)
    data[2]["observations"][2, 1] = np.nan
    data[0]["rewards"][1] = np.inf
    folder = write_hdf5(tmp_path, BOX, MODE, data, total_steps=9)
    broken(folder, "missing")
    found = Recording.open(folder).validate().problems
    assert [p.kind for p in found] == ["lost_rows", "unreadable", "nan", "nan"]
    assert "metadata.json: total_steps is 9, but 7 are there" in found[0].message
    assert "episode_0, step 1: column `reward` holds inf" in found[2].message
    assert "episode_2, step 1: column `final_obs` holds NaN in component 1" in found[3].message
    assert (found[3].row, found[3].column) == (1, "final_obs")


def test_an_arrow_file_with_empty_rows_or_other_widths_is_refused(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path, BOX, MODE, episodes(BOX, MODE, [2, 3], infos=False))
    path = folder / "1" / "part-0.arrow"
    whole = pa.ipc.open_file(path).read_all()
    for column, message in (
        (pa.array([1.0, None, 2.0, 0.0]), "1, row 1: column `rewards` is empty"),
        (pa.array(["a"] * 4), "column `rewards` is of type string, for instance 'a', not of numbers"),
    ):
        table = whole.set_column(2, "rewards", column)
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
        with pytest.raises(DataError, match=message):
            everything(Recording.open(folder, on_bad=None))


def test_a_parquet_file_with_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = WRITERS["parquet"](tmp_path, BOX, MODE, episodes(BOX, MODE, [2, 3], infos=False))
    path = folder / "1" / "part-0.parquet"
    path.write_bytes(path.read_bytes().replace(b"rewards", b"re\xffards"))
    with pytest.raises(DataError, match=r"part-0.parquet: .*can't decode byte 0xff"):
        Recording.open(folder, on_bad=None)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("broken", ["cut off", "empty", "gone"])
def test_one_episode_that_cant_be_read_does_not_cost_the_others(tmp_path: Path, kind: str, broken: str) -> None:
    folder = write_arrow(tmp_path, BOX, MODE, episodes(BOX, MODE, [2, 3, 4], infos=True), kind=kind)
    whole = everything(Recording.open(folder))
    path = folder / "0" / f"part-0.{kind}"
    path.unlink() if broken == "gone" else path.write_bytes(path.read_bytes()[:-40] if broken == "cut off" else b"")
    with pytest.raises(DataError, match=str(path.parent)):
        Recording.open(folder)
    for on_bad in ("skip", "repair"):
        recording = Recording.open(folder, on_bad=on_bad)
        assert_same(recording.read(), whole[1:])
        assert recording.met == {"lost_rows": 2, "unreadable": 1}
    assert {problem.kind for problem in validate(folder).errors} == {"unreadable", "lost_rows"}


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_mutated_bytes_end_in_data_errors(tmp_path: Path, kind: str) -> None:
    folder = WRITERS[kind](tmp_path, NESTED, MODE, episodes(NESTED, MODE, [2, 3], infos=True))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        path = files[rng.integers(len(files))]
        data = bytearray(whole[path])
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            recording = Recording.open(folder, on_bad=None)
            for k in range(recording.num_parts):
                recording.part(k).validate(finite=())
        except DataError:
            refused += 1
        path.write_bytes(whole[path])
    assert refused > 20


def test_datasets_that_minari_has_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = np.array([0, 1, 1])
    table = pa.table({"obs": [0.5, 1.5, 2.5], "action": actions, "reward": [1.0] * 3, "done": [False, False, True]})
    columns = {"obs": "obs", "action": "action", "reward": "reward", "terminated": "done"}
    convert(Source(table, columns), str(tmp_path / "mine" / "small-v0"), "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    found = Recording.open("minari://mine/small-v0")
    assert found.read().steps["action"].tolist() == actions.tolist()
    with pytest.raises(
        DataError, match=r"no such dataset on this machine .*Nearest: `mine/small-v0`.* minari download"
    ):
        Recording.open("minari://mine/smal-v0")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_an_episode_without_its_file_is_told(tmp_path: Path, kind: str) -> None:
    folder = write_arrow(tmp_path, BOX, MODE, episodes(BOX, MODE, [2, 3], infos=False), kind=kind)
    (folder / "1" / f"part-0.{kind}").unlink()
    with pytest.raises(DataError, match=rf"1: there is no \.{kind} file of this episode\. Restore it\."):
        Recording.open(folder)
