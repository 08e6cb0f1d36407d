# SPDX-License-Identifier: Apache-2.0
"""One rule for bad data: whatever reads a recording, of whatever format, refuses the same faults, or warns of them."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import some_rllib
import some_rllib_table
from some_rllib import coded

from etude.algorithms import BC, BCConfig
from etude.cli.main import main
from etude.errors import DataError
from etude.evaluation import FQEConfig, evaluate_on
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source, convert, filter_recording, merge_recordings, validate

OBS = gym.spaces.Box(-10, 10, (3,), np.float32)
ACTION = gym.spaces.Discrete(4)
FINE, WARNS, REFUSES = "fine", "warns", "refuses"


# -- recordings, each with one fault --------------------------------------------------------------------------------


def some(*lengths: int, **segments: Any) -> Experience:
    """Whole episodes called e0, e1 and so on."""
    rng, rows, count = np.random.default_rng(3), sum(lengths), len(lengths)
    steps = {
        "obs": rng.normal(size=(rows, 3)).astype(np.float32),
        "action": rng.integers(0, 4, rows),
        "reward": rng.normal(size=rows),
        "logp": np.full(rows, np.log(0.25)),
    }
    known = {"episode_id": [f"e{i}" for i in range(count)], "terminated": True} | segments
    finals = {"obs": rng.normal(size=(count, 3)).astype(np.float32)}
    return Experience(steps, np.cumsum([0, *lengths]).astype(np.int64), Segments.of(count, **known), finals)


def own(path: Path, *parts: Experience, **options: Any) -> Path:
    with RecordingWriter(path, obs_space=OBS, action_space=ACTION, **options) as writer:
        for part in parts:
            writer.write(part)
    return path


def own_with(path: Path, name: str, row: int, value: Any) -> Path:
    """Two episodes, of 20 and 9 steps, with one value of the file changed by another tool."""
    own(path, some(20, 9))
    table = pq.read_table(path / "part-00000.parquet")
    column = table[name].to_pylist()
    column[row] = value
    at = table.column_names.index(name)
    changed = table.set_column(at, table.schema.field(at), pa.array(column, table.schema.field(at).type))
    pq.write_table(changed, path / "part-00000.parquet")
    return path


def own_outside(path: Path) -> Path:
    exp = some(20, 9)
    exp.steps["action"][7] = 99
    return own(path, exp)


def own_of_type(path: Path, name: str, kind: pa.DataType) -> Path:
    """A column cast by another tool."""
    own(path, some(20, 9))
    table = pq.read_table(path / "part-00000.parquet")
    at = table.column_names.index(name)
    field = table.schema.field(at).with_type(kind)
    pq.write_table(table.set_column(at, field, table[name].cast(kind)), path / "part-00000.parquet")
    return path


def own_gap(path: Path) -> Path:
    start, end = some(5, terminated=False), some(9, t_start=[12])
    return own(path, start, end, some(9, episode_id=["e1"]))


def own_copied(path: Path) -> Path:
    own(path, some(20, 9))
    shutil.copy(path / "part-00000.parquet", path / "part-00001.parquet")
    return path


def own_folders(path: Path) -> Path:
    """Two recordings below one folder, whose episodes have equal ids."""
    own(path / "run1", some(20, 9))
    own(path / "run2", some(12, 30))
    return path


def own_folders_above(path: Path) -> Path:
    own(path, some(20, 9))
    own(path / "below", some(12, 30))
    return path


def own_files(path: Path) -> list[str]:
    """The files of two recordings, given as those of one."""
    own_folders(path)
    return [str(file) for file in sorted(path.glob("*/*.parquet"))]


def episode(steps: int, name: str, **changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = some_rllib.episode(steps, OBS, ACTION, name=name)[0]
    return state | changes


def items(path: Path, *documents: Any) -> Path:
    path.mkdir()
    return some_rllib.write_items(path / "a.parquet", [*documents, episode(8, "last")]).parent


def item_outside(path: Path) -> Path:
    wrong = episode(9, "a")
    wrong["actions"]["data"][3] = coded(np.int64(99))
    return items(path, wrong)


def many(**changes: Any) -> dict[str, Any]:
    """An episode of two agents."""
    buffer = some_rllib.buffer
    document = {
        "id_": "shared",
        "_agent_to_module_mapping": {0: "p", "two": "p"},
        "env_t_started": 0,
        "env_t": 6,
        "env_t_to_agent_t": {0: buffer([0, "S", 1, "S", 2, "S", 3]), "two": buffer(["S", 0, "S", 1, "S", 2, "S"])},
        "_hanging_actions_end": {},
        "is_terminated": True,
        "is_truncated": False,
        "agent_episodes": [[0, episode(3, "own0")], ["two", episode(2, "own2")]],
    }
    return document | changes


def shared(path: Path, **changes: Any) -> Path:
    path.mkdir()
    return some_rllib.write_items(path / "a.parquet", [many(**changes), many(id_="last")]).parent


def lines(path: Path, *batches: dict[str, Any]) -> Path:
    path.mkdir()
    told = [{"type": "SampleBatch", **batch} for batch in (*batches, rows(8, eps_id=7))]
    (path / "a.json").write_text("".join(json.dumps(batch) + "\n" for batch in told))
    return path


def rows(length: int, eps_id: int = 5, seed: int = 0, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(length + 1, 3)).astype(np.float32)
    return {
        "obs": obs[:-1].tolist(),
        "new_obs": obs[1:].tolist(),
        "actions": (np.arange(length) % 4).tolist(),
        "rewards": rng.normal(size=length).tolist(),
        "terminateds": [i == length - 1 for i in range(length)],
        "truncateds": [False] * length,
        "eps_id": [eps_id] * length,
        "agent_index": [0] * length,
        "t": list(range(length)),
    } | changes


def flags(length: int, *true: int) -> list[bool]:
    return [i in true for i in range(length)]


def rllib_table(path: Path, change: Callable[[dict[str, Any]], None], index: Any = slice(None)) -> Path:
    found = some_rllib_table.rows_of([9, 12])
    change(found)
    found = some_rllib_table.at(found, index)
    path.mkdir()
    return some_rllib_table.write(path / "a.parquet", found, t=pa.array(found["t"])).parent


def set_at(name: str, row: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(columns: dict[str, Any]) -> None:
        columns[name][row] = value

    return change


def nothing(columns: dict[str, Any]) -> None:
    """A change that is none."""


def flat(path: Path, change: Callable[[dict[str, Any]], None], suffix: str = "parquet") -> Source:
    """A table of a user's own, which says what is observed after each step."""
    rng, n = np.random.default_rng(1), 21
    obs = rng.normal(size=n + 1)
    columns = {
        "x": obs[:-1].copy(), "x2": obs[1:].copy(), "a": rng.integers(0, 4, n), "r": rng.normal(size=n),
        "end": np.zeros(n, bool), "trip": np.repeat(["a", "b"], [9, 12]),
        "i": np.concatenate([np.arange(9), np.arange(12)]),
    }  # fmt: skip
    columns["end"][[8, 20]] = True
    change(columns)
    path.mkdir()
    table = pa.table(columns)
    if suffix == "parquet":
        pq.write_table(table, path / "a.parquet", row_group_size=6)
    else:
        pa.csv.write_csv(table, path / "a.csv")
    names = {"obs": "x", "next_obs": "x2", "action": "a", "reward": "r", "terminated": "end", "episode_id": "trip"}
    return Source(str(path / f"a.{suffix}"), columns=names | {"t": "i"}, action_space=ACTION)


def arrays(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A file as those of D4RL: two episodes of nine and twelve steps, with what is observed after each step."""
    rng, n = np.random.default_rng(2), 21
    obs = rng.normal(size=(n + 1, 3)).astype(np.float32)
    columns: dict[str, Any] = {
        "observations": obs[:-1].copy(),
        "next_observations": obs[1:].copy(),
        "actions": rng.normal(size=(n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "terminals": np.isin(np.arange(n), [8, 20]),
        "timeouts": np.zeros(n, bool),
    }
    change(columns)
    path.mkdir()
    np.savez(path / "a.npz", **columns)
    return path


def minari(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    own(path.with_name("m-own"), some(20, 9))
    folder = path.with_name(f"{path.name}-v0")
    convert(Recording.open(path.with_name("m-own")), folder, "minari")
    import h5py

    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        change(file["episode_0"])
    return folder


CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "own: good": (FINE, lambda p: own(p, some(20, 9))),
    "own: an action outside its space": (REFUSES, own_outside),
    "own: an agent twice in a step": (REFUSES, lambda p: own(p, some(9, agent_id="a"), some(9, agent_id="a"))),
    "own: two ends": (REFUSES, lambda p: own_with(p, "terminated", 5, True)),
    "own: a time limit in the middle": (REFUSES, lambda p: own_with(p, "truncated", 5, True)),
    "own: t repeats": (REFUSES, lambda p: own_with(p, "t", 5, 4)),
    "own: t is negative": (REFUSES, lambda p: own_with(p, "t", 0, -1)),
    "own: t jumps": (WARNS, own_gap),
    "own: actions of another type": (REFUSES, lambda p: own_of_type(p, "action", pa.float64())),
    "own: narrower actions": (FINE, lambda p: own_of_type(p, "action", pa.int32())),
    "own: wider observations": (FINE, lambda p: own_of_type(p, "obs", pa.list_(pa.float64(), 3))),
    "own: wider final observations": (
        FINE,
        lambda p: own_of_type(p, "final_obs", pa.list_(pa.float64(), 3)),
    ),
    "own: rewards of another type": (FINE, lambda p: own_of_type(p, "reward", pa.float32())),
    "own: appended twice": (REFUSES, lambda p: own(p, some(20, 9), some(20, 9))),
    "own: a file copied": (REFUSES, own_copied),
    "own: folders of equal ids below one": (FINE, own_folders),
    "own: a recording below another": (FINE, own_folders_above),
    "own: files of two recordings as one": (REFUSES, own_files),
    "episodes: good": (FINE, lambda p: items(p, episode(9, "a"))),
    "episodes: an action outside its space": (REFUSES, item_outside),
    "episodes: an agent twice in a step": (REFUSES, lambda p: items(p, episode(9, "a"), episode(7, "a"))),
    "episodes: two ends": (REFUSES, lambda p: items(p, episode(9, "a"), episode(7, "a", t_started=9, t=16))),
    "episodes: chunks that overlap": (
        REFUSES,
        lambda p: items(p, episode(9, "a", is_terminated=False), episode(7, "a", t_started=5, t=12)),
    ),
    "episodes: a chunk lost": (
        WARNS,
        lambda p: items(p, episode(9, "a", is_terminated=False), episode(7, "a", t_started=20, t=27)),
    ),
    "episodes: a t that is none": (WARNS, lambda p: items(p, episode(9, "a", t=95))),
    "episodes: bytes behind an item": (WARNS, lambda p: items(p, msgpack.packb(episode(9, "a")) + b"behind")),
    "episodes: an item written again": (WARNS, lambda p: items(p, episode(9, "a"), episode(9, "a"))),
    "agents: good": (FINE, shared),
    "agents: the steps of one are missing": (
        REFUSES,
        lambda p: shared(p, agent_episodes=[[0, episode(3, "own0")]]),
    ),
    "agents: one has no step": (
        REFUSES,
        lambda p: shared(p, agent_episodes=[[0, episode(3, "own0")], ["two", episode(0, "own2")]]),
    ),
    "agents: one has too few steps": (
        REFUSES,
        lambda p: shared(p, agent_episodes=[[0, episode(3, "own0")], ["two", episode(1, "own2")]]),
    ),
    "agents: one is there twice": (
        REFUSES,
        lambda p: shared(p, agent_episodes=[[0, episode(3, "a")], ["two", episode(2, "b")], [0, episode(3, "c")]]),
    ),
    "agents: an env_t that is none": (WARNS, lambda p: shared(p, env_t=50)),
    "json: good": (FINE, lambda p: lines(p, rows(9))),
    "json: t repeats": (REFUSES, lambda p: lines(p, rows(9, t=[0, 1, 2, 3, 3, 4, 5, 6, 7]))),
    "json: t jumps": (WARNS, lambda p: lines(p, rows(9, t=[0, 1, 2, 3, 14, 15, 16, 17, 18]))),
    "json: two ends": (REFUSES, lambda p: lines(p, rows(9, terminateds=flags(9, 4, 8)))),
    "json: an agent twice in a step": (REFUSES, lambda p: lines(p, rows(9), rows(9, seed=4))),
    "json: a line written again": (WARNS, lambda p: lines(p, rows(9), rows(9))),
    "json: a next observation that does not follow": (
        WARNS,
        lambda p: lines(p, rows(9, new_obs=rows(9, seed=6)["obs"])),
    ),
    "rllib table: good": (FINE, lambda p: rllib_table(p, nothing)),
    "rllib table: t repeats": (REFUSES, lambda p: rllib_table(p, set_at("t", 5, 4))),
    "rllib table: t jumps": (WARNS, lambda p: rllib_table(p, nothing, [*range(4), *range(6, 21)])),
    "rllib table: two ends": (REFUSES, lambda p: rllib_table(p, set_at("terminateds", 5, True))),
    "rllib table: rows written again": (WARNS, lambda p: rllib_table(p, nothing, [*range(21), *range(9)])),
    "rllib table: a next observation that does not follow": (
        WARNS,
        lambda p: rllib_table(p, lambda found: found["new_obs"].__setitem__(4, found["new_obs"][0])),
    ),
    "table: good": (FINE, lambda p: flat(p, nothing)),
    "table: a next observation that does not follow": (WARNS, lambda p: flat(p, set_at("x2", 4, 7.0))),
    "arrays: good": (FINE, lambda p: arrays(p, nothing)),
    "arrays: a next observation that does not follow": (
        WARNS,
        lambda p: arrays(p, set_at("next_observations", 4, 7.0)),
    ),
    "arrays: steps in any order": (
        WARNS,
        lambda p: arrays(p, lambda found: found.update({name: values[::-1] for name, values in found.items()})),
    ),
    "arrays: an infinite observation": (REFUSES, lambda p: arrays(p, set_at("observations", 4, np.inf))),
    "table: an action outside its space": (REFUSES, lambda p: flat(p, set_at("a", 4, 99))),
    "table: t repeats": (REFUSES, lambda p: flat(p, set_at("i", 5, 4))),
    "table: t jumps": (WARNS, lambda p: flat(p, set_at("i", slice(5, 9), [15, 16, 17, 18]))),
    "table: two ends": (REFUSES, lambda p: flat(p, set_at("end", 5, True))),
    "CSV: an action outside its space": (REFUSES, lambda p: flat(p, set_at("a", 4, 99), "csv")),
    "minari: good": (FINE, lambda p: minari(p, nothing)),
    "minari: an action outside its space": (REFUSES, lambda p: minari(p, set_at("actions", 4, 99))),
    "minari: two ends": (REFUSES, lambda p: minari(p, set_at("terminations", 4, True))),
}


# -- what reads them ------------------------------------------------------------------------------------------------


def train(data: Any) -> None:
    """Some epochs of strict training, which is the default."""
    algorithm = BC(BCConfig(data=data, batch_size=32, updates_per_iteration=4))
    try:
        algorithm.train()
    finally:
        algorithm.close()


def evaluate(data: Any) -> None:
    """An off-policy evaluation of a new policy for the spaces of the data."""
    algorithm = BC(BCConfig(data=Recording.open(data, on_bad="skip"), batch_size=32, updates_per_iteration=1))
    try:
        evaluate_on(algorithm, data, methods=["fqe"], fqe=FQEConfig(members=2, steps=2, batch_size=16))
    finally:
        algorithm.close()


def verdicts(data: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, tuple[str, str]]:
    """What each way to read the data says of it, and the first message."""
    ways: dict[str, Callable[[], Any]] = {
        "read": lambda: Recording.open(data).read(),
        "stream": lambda: list(Recording.open(data).stream()),
        "info": lambda: Recording.open(data).info(),
        "convert": lambda: convert(Recording.open(data), folder / "converted"),
        "merge": lambda: merge_recordings([Recording.open(data)], folder / "merged"),
        "train": lambda: train(data),
        "evaluate": lambda: evaluate(data),
    }
    report = validate(data)
    told = report.problems[0].message if report.problems else ""
    found = {"validate": ((WARNS if report.warnings else FINE) if report.ok else REFUSES, told)}
    for name, way in ways.items():
        caplog.clear()
        try:
            way()
        except DataError as error:
            found[name] = REFUSES, str(error)
            continue
        logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        found[name] = (WARNS, logged[0]) if logged else (FINE, "")
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_all_that_reads_judges_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    wanted, made = CASES[case]
    given = made(tmp_path / "given")
    data = str(given) if isinstance(given, Path) else given
    caplog.set_level(logging.WARNING, "etude")
    found = verdicts(data, tmp_path, caplog)
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(found, wanted), found


@pytest.mark.parametrize("command", ["validate", "info", "convert", "merge", "train", "evaluate"])
@pytest.mark.parametrize("case", ["own: two ends", "own: t jumps", "own: good"])
def test_so_does_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, command: str) -> None:
    wanted, made = CASES[case]
    data, out, run = str(made(tmp_path / "given")), str(tmp_path / "out"), str(tmp_path / "run")
    small = ["--batch-size", "32", "--updates-per-iteration", "2", "--stop.updates", "2", "--quiet"]
    args = {
        "validate": ["data", "validate", data],
        "info": ["data", "info", data],
        "convert": ["data", "convert", data, out],
        "merge": ["data", "merge", data, "--to", out],
        "train": ["train", "bc", "--data", data, "--out", out, *small],
        "evaluate": ["evaluate", run, "--on", data, "--methods", "is"],
    }
    if command == "evaluate":
        good = own(tmp_path / "good", some(20, 9))
        assert main(["train", "bc", "--data", str(good), "--out", run, *small]) == 0
        capsys.readouterr()
    code = main(args[command])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    if wanted == REFUSES:
        assert code in (1, 2)
        assert "continues at t 6, after its end" in text
    else:
        assert code == (1 if wanted == WARNS and command == "validate" else 0)
        assert ("steps from t 5 on are missing" in text) == (wanted == WARNS)


def test_folders_below_one_stay_apart(tmp_path: Path) -> None:
    own_folders(tmp_path / "runs")
    exp = Recording.open(tmp_path / "runs").read()
    first, second = (Recording.open(tmp_path / "runs" / name).read() for name in ("run1", "run2"))
    assert exp.lengths.tolist() == [20, 9, 12, 30]
    assert len(set(exp.segments.episode_id.tolist())) == 4
    for name in ("obs", "action", "reward"):
        np.testing.assert_array_equal(exp.steps[name], np.concatenate([first.steps[name], second.steps[name]]))
    merged = merge_recordings([Recording.open(tmp_path / "runs" / name) for name in ("run1", "run2")], tmp_path / "m")
    assert merged.written[0].episodes == 4
    assert sorted(Recording.open(tmp_path / "m").read().lengths.tolist()) == [9, 12, 20, 30]


@pytest.mark.parametrize("mode", ["strict", "repair", "skip", None])
def test_no_mode_joins_steps_that_overlap(tmp_path: Path, mode: Any) -> None:
    files = own_files(tmp_path / "runs")
    if mode in ("strict", None):
        with pytest.raises(DataError, match="a second time"):
            Recording.open(files, on_bad=mode).read()
        return
    exp = Recording.open(files, on_bad=mode).read()
    parts = [Recording.open(tmp_path / "runs" / name).read() for name in ("run1", "run2")]
    rewards = {tuple(part[i].steps["reward"].tolist()) for part in parts for i in range(part.num_segments)}
    for i in range(exp.num_segments):  # each is, or begins or ends, an episode that was
        own_rewards = tuple(exp[i].steps["reward"].tolist())
        assert any(own_rewards in (whole[: len(own_rewards)], whole[-len(own_rewards) :]) for whole in rewards)


def test_a_recording_without_some_columns_of_its_spaces_can_be_copied(tmp_path: Path) -> None:
    data = Recording.open(own(tmp_path / "given", some(20, 9), columns=["obs", "reward"]))
    filter_recording(data, tmp_path / "filtered", min_length=1)
    merge_recordings([data], tmp_path / "merged")
    for made in (convert(data, tmp_path / "made"), *(Recording.open(tmp_path / n) for n in ("filtered", "merged"))):
        assert sorted(made.columns) == ["obs", "reward"]
        np.testing.assert_array_equal(made.read().next_obs()["obs"], data.read().next_obs()["obs"])


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated"),
    [
        ({"dones": [0, 1, 0, 1]}, [True, True], [False, False]),
        ({"dones": [0, 1, 0, 1], "truncateds": [0, 0, 0, 1]}, [True, False], [False, True]),
        ({"dones": [0, 1, 0, 1], "terminateds": [0, 0, 0, 1]}, [False, True], [True, False]),
        ({"dones": [0, 1, 0, 1], "terminateds": [0, 0, 0, 1], "truncateds": [0] * 4}, [True, True], [False, False]),
    ],
)
@pytest.mark.parametrize("form", ["rllib-table", "rllib-json", "table"])
def test_done_stands_for_the_other_flag_in_every_form(
    tmp_path: Path, form: str, flags: dict[str, list[int]], terminated: list[bool], truncated: list[bool]
) -> None:
    obs = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    rows = {"obs": obs, "actions": [0, 1, 0, 1], "rewards": [1.0] * 4, "t": [0, 1, 0, 1]}
    rows |= {name: [bool(flag) for flag in values] for name, values in flags.items()}
    data: Any = tmp_path
    if form == "rllib-json":
        line = {"type": "SampleBatch", **rows, "eps_id": [3, 3, 4, 4]}
        (tmp_path / "a.json").write_text(json.dumps(line) + "\n")
    else:
        pq.write_table(pa.table(rows | {"eps_id": ["a", "a", "b", "b"]}), tmp_path / "a.parquet")
    if form == "table":
        own = {"obs": "obs", "action": "actions", "reward": "rewards", "episode_id": "eps_id", "t": "t"}
        data = Source(tmp_path, own | {name.removesuffix("s"): name for name in flags})
    exp = Recording.open(data).read()
    assert exp.segments.terminated.tolist() == terminated
    assert exp.segments.truncated.tolist() == truncated
