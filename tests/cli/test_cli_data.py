# SPDX-License-Identifier: Apache-2.0
import json
import shlex
import shutil

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_runs import trained

from etude.algorithms import load
from etude.cli.main import main
from etude.recordings import Recording, RecordingWriter, cache, convert


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run = trained(folder / "run")
    assert main(["record", str(run), "--episodes", "4", "--to", str(folder / "rec"), "--quiet", "--seed", "1"]) == 0
    return folder / "rec"


def test_info_in_words_and_as_json(recording, capsys):
    assert main(["data", "info", str(recording), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["env"], found["agents"]) == (4, "CartPole-v1", [])
    assert main(["data", "info", str(recording)]) == 0
    words = capsys.readouterr().out
    for text in (
        str(recording),
        "CartPole-v1",
        f"steps      {found['env_steps']:,}",
        "Discrete(2)",
        " reward",
        "Box([-4.8 -inf -0.41887903 -inf]",  # without NumPy's padding
    ):
        assert text in words


def test_a_recording_without_a_fault(recording, capsys):
    assert main(["data", "validate", str(recording)]) == 0
    assert "4 episodes: no problems." in capsys.readouterr().out
    (file,) = recording.glob("*.parquet")
    assert main(["data", "validate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_what_is_harmless_is_read_but_found(recording, tmp_path, capsys):
    other = tmp_path / "rllib"
    assert main(["data", "convert", str(recording), str(other), "--format", "rllib-episodes"]) == 0
    file = next(other.rglob("*.parquet"))
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), file)
    capsys.readouterr()
    assert main(["data", "validate", str(other)]) == 1
    out = capsys.readouterr().out
    assert "no problems, 1 warning" in out
    assert f"{file}: row {len(table)}: repeats the episode" in out
    assert main(["data", "info", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 4


def test_a_fault_is_reported_with_its_file(recording, tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(recording, cut)
    (file,) = cut.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["data", "validate", str(cut)]) == 1
    assert file.name in capsys.readouterr().out
    assert main(["data", "validate", str(cut), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["file"] == str(file)
    assert main(["data", "info", str(cut)]) == 2
    assert file.name in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "validate"])
def test_where_there_is_nothing(tmp_path, capsys, command):
    assert main(["data", command, str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'}: there is no such" in capsys.readouterr().err
    assert main(["data", command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    assert main(["data"]) == 0
    assert "validate" in capsys.readouterr().out
    assert main(["data", "inof"]) == 2
    assert "etude data has no command `inof`. Nearest: `info`." in capsys.readouterr().err
    assert main(["data", "zzz"]) == 2
    assert "There are info, head, " in capsys.readouterr().err
    assert main(["data", "info"]) == 2
    assert "info needs a value for `path`" in capsys.readouterr().err


def test_convert_writes_the_same_anew(recording, tmp_path, capsys):
    assert main(["data", "convert", str(recording), str(tmp_path / "anew"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    old, new = Recording.open(recording), Recording.open(tmp_path / "anew")
    assert new.meta["converted_from"] == {"path": str(recording), "format": "etude-recording"}
    ours, theirs = old.read(), new.read()
    assert ours.segments.episode_id.tolist() == theirs.segments.episode_id.tolist()
    for name, column in ours.steps.items():
        np.testing.assert_array_equal(column, theirs.steps[name])
    assert main(["data", "convert", str(recording), str(tmp_path / "anew")]) == 2
    assert "holds a recording" in capsys.readouterr().err
    assert main(["data", "convert", str(recording)]) == 2
    assert "needs a value for `to`" in capsys.readouterr().err


def test_convert_gives_data_without_spaces_those_of_an_env(tmp_path, capsys):
    arrays = {"observations": np.zeros((10, 3), np.float32), "actions": np.ones((10, 1), np.float32)}
    np.savez(tmp_path / "a.npz", rewards=np.zeros(10), terminals=np.arange(10) == 9, **arrays)
    assert main(["data", "convert", str(tmp_path / "a.npz"), str(tmp_path / "b"), "--env", "Pendulum-v1"]) == 0
    env, new = gym.make("Pendulum-v1"), Recording.open(tmp_path / "b")
    assert (new.obs_space, new.action_space) == (env.observation_space, env.action_space)
    assert new.env == "Pendulum-v1"
    assert main(["data", "convert", str(tmp_path / "a.npz"), str(tmp_path / "c"), "--env", "CartPole-v1"]) == 2
    assert "does not fit the space given" in capsys.readouterr().err
    assert main(["data", "convert", str(tmp_path / "b"), str(tmp_path / "c"), "--env", "Pendulum-v1"]) == 0
    capsys.readouterr()
    assert main(["data", "convert", str(tmp_path / "b"), str(tmp_path / "d"), "--env", "CartPole-v1"]) == 2
    assert "states its `obs` space, Box" in (err := capsys.readouterr().err)
    assert "that of CartPole-v1 is Box" in err
    assert not (tmp_path / "d").exists()


def test_what_rllib_maps_to_the_bounds_of_an_env_is_of_that_env(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"observations": rng.uniform(-1, 1, (10, 3)).astype(np.float32), "actions": rng.uniform(-1, 1, (10, 1))}
    np.savez(tmp_path / "a.npz", rewards=np.zeros(10), terminals=np.arange(10) == 9, **arrays)
    convert(tmp_path / "a.npz", tmp_path / "table", "rllib-table")
    for first, second in (("table", "own"), ("own", "again")):
        assert main(["data", "convert", str(tmp_path / first), str(tmp_path / second), "--env", "Pendulum-v1"]) == 0
        new = Recording.open(tmp_path / second)
        assert (new.env, new.action_space) == ("Pendulum-v1", gym.spaces.Box(-1, 1, (1,)))


def test_validate_checks_data_without_spaces_by_those_of_an_env(tmp_path, capsys):
    arrays = {"observations": np.zeros((10, 4), np.float32), "actions": np.arange(10) % 3}
    np.savez(tmp_path / "a.npz", rewards=np.zeros(10), terminals=np.arange(10) == 9, **arrays)
    assert main(["data", "validate", str(tmp_path / "a.npz")]) == 0
    assert main(["data", "validate", str(tmp_path / "a.npz"), "--env", "CartPole-v1"]) == 1
    assert "column `action` is 2, outside its space Discrete(2)" in capsys.readouterr().out
    assert main(["data", "validate", str(tmp_path / "a.npz"), "--env", "Pendulum-v1"]) == 2
    arrays["observations"][3] = 9
    np.savez(
        tmp_path / "b.npz",
        rewards=np.zeros(10),
        terminals=np.arange(10) == 9,
        **arrays | {"actions": np.arange(10) % 2},
    )
    assert main(["data", "validate", str(tmp_path / "b.npz"), "--env", "CartPole-v1"]) == 1
    assert "no problems, 1 warning" in (out := capsys.readouterr().out)
    assert "outside the bounds of Box" in out


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_recordings_of_others_are_read_and_converted(suffix, tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrays = {
        "observations": rng.normal(size=(10, 3)).astype(np.float32),
        "actions": rng.normal(size=(10, 1)).astype(np.float32),
        "rewards": np.arange(10, dtype=np.float32),
        "terminals": np.arange(10) % 5 == 4,
    }
    arrays["next_observations"] = np.roll(arrays["observations"], -1, 0)
    path = tmp_path / f"d4rl{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array
    assert main(["data", "info", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["agent_steps"], found["return_total"], found["terminated"]) == (2, 10, 45.0, 2)
    assert found["obs_sum"] == pytest.approx(float(arrays["observations"].sum(dtype=np.float64)))
    assert main(["data", "convert", str(path), str(tmp_path / "ours")]) == 0
    assert main(["data", "validate", str(tmp_path / "ours")]) == 0
    exp = Recording.open(tmp_path / "ours").read(columns=["obs", "reward"])
    np.testing.assert_array_equal(exp.steps["obs"], arrays["observations"])


def test_convert_to_other_tools_formats(recording, tmp_path, capsys):
    out = tmp_path / "cartpole-v0"
    assert main(["data", "convert", str(recording), str(out), "--format", "minari", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["format"], len(found["notes"])) == (4, "minari-hdf5", 1)
    assert main(["data", "convert", str(recording), str(tmp_path / "rllib"), "--format", "rllib-episodes"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'rllib'}: {found['steps']:,} steps of 4 episodes.\n"
    assert main(["data", "convert", str(out), str(tmp_path / "table"), "--format", "rllib-tables"]) == 2
    assert "Nearest: `rllib-table`" in capsys.readouterr().err


@pytest.fixture
def spoilt(recording, tmp_path):
    """The recording with NaN in one episode."""
    path, exp = tmp_path / "spoilt", Recording.open(recording).read()
    reward = exp.steps["reward"].copy()
    reward[3] = np.nan
    source = Recording.open(recording)
    with RecordingWriter(path, obs_space=source.obs_space, action_space=source.action_space) as writer:
        writer.write(exp.with_steps(reward=reward))
    return path


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("info", []),
        ("convert", ["--to", "OUT"]),
        ("merge", ["--to", "OUT"]),
        ("filter", ["--to", "OUT", "--min-length", "1"]),
        ("sample", ["--to", "OUT", "--episodes", "2"]),
        ("split", ["--to-train", "OUT", "--to-validation", "OUT2"]),
    ],
)
def test_bad_data_are_left_out_and_told(spoilt, tmp_path, capsys, command, more):
    def words(number):
        return ["data", command, str(spoilt), *(w.replace("OUT", str(tmp_path / f"{number}-")) for w in more)]

    assert main([*words(1), "--on-bad", "skip"]) == 0
    assert f"{spoilt}: nan 1 times" in capsys.readouterr().out
    assert main([*words(2), "--on-bad", "skip", "--json"]) == 0
    bad = json.loads(capsys.readouterr().out)["bad"]
    assert bad["met"] == {"nan": 1}
    assert bad["left_out_rows"]["nan"] > 3
    for number, by_default in ((3, ["--on-bad", "strict"]), (4, [])):
        assert main([*words(number), *by_default]) == 2
        assert "`reward` holds NaN" in capsys.readouterr().err


def test_info_says_how_to_go_on(recording, tmp_path, capsys):
    one, other = tmp_path / "two" / "a.parquet", tmp_path / "two" / "b.parquet"
    one.parent.mkdir()
    (file,) = recording.glob("*.parquet")
    for path in (one, other):
        shutil.copy(file, path)
    other.write_bytes(other.read_bytes()[:-100])
    hint = "`etude data validate` lists all problems; --on-bad=skip reads the rest."
    assert main(["data", "info", str(one.parent)]) == 2
    assert capsys.readouterr().err.endswith(f". {hint}\n")
    assert main(["data", "info", str(one.parent), "--on-bad", "skip"]) == 0
    assert "truncated_file 1 times" in capsys.readouterr().out
    assert main(["data", "info", str(other)]) == 2
    assert hint not in capsys.readouterr().err


def test_several_recordings_are_one(recording, tmp_path, capsys):
    shutil.copytree(recording, tmp_path / "b")
    assert main(["data", "info", str(recording), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 8
    assert main(["data", "validate", str(recording), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 8
    for words in (["data", "info", ""], ["data", "convert", str(recording), ""], ["train", "bc", "--data", ""]):
        assert main(words) == 2
        assert "an empty path was given" in capsys.readouterr().err
    train = ["train", "bc", "--batch-size", "32", "--updates-per-iteration", "2", "--stop.updates", "2", "--quiet"]
    assert main([*train, "--data", str(recording), str(tmp_path / "b"), "--out", str(tmp_path / "run")]) == 0
    run = load(tmp_path / "run")
    assert run.recording.num_episodes == 8
    run.close()
    assert main([*train, "--data", str(recording), "--data", str(tmp_path / "b")]) == 2
    assert "bc has --data twice: put all its values behind one" in capsys.readouterr().err
    assert main([*train, "--data"]) == 2
    assert "bc.data needs a value" in capsys.readouterr().err


def test_nothing_is_written_into_what_is_read(recording, capsys):
    before = sorted(recording.rglob("*"))
    for command in (["convert"], ["sample", "--episodes", "1"], ["filter", "--min-length", "1"]):
        assert main(["data", command[0], str(recording), str(recording / "sub"), *command[1:]]) == 2
        assert "is inside" in capsys.readouterr().err
    assert main(["data", "convert", str(recording), str(recording)]) == 2
    assert "is also an input" in capsys.readouterr().err
    assert sorted(recording.rglob("*")) == before


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path))
    assert main(["data", "cache"]) == 0
    assert f"{tmp_path / 'recordings'}: 0 converted files, 0.00 MB of at most 20,000 MB." in capsys.readouterr().out
    cache.entry("key", lambda folder: (folder / "a").write_bytes(bytes(20_000)))
    assert main(["data", "cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"path": str(tmp_path / "recordings"), "entries": 1, "bytes": 20_000, "max_bytes": 20 * 10**9}
    assert main(["data", "cache", "--clear"]) == 0
    assert "0.02 MB removed" in capsys.readouterr().out
    assert list((tmp_path / "recordings").iterdir()) == []


def test_info_of_several_tables_names_them_all(tmp_path, capsys):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("obs,action,done\n0.5,1,0\n0.25,0,1\n")
    both = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    for given in (both, [str(tmp_path / "*.csv")]):
        assert main(["data", "info", *given]) == 0
        out = capsys.readouterr().out
        assert "a table of 4 rows" in out
        assert f"--data {shlex.join(given)} --columns" in out
