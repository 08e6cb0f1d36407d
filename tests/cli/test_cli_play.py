# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import signal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from cli_runs import MADE, SMALL, Interrupted, trained

from etude.algorithms import BC, BCConfig, Evaluation
from etude.cli.main import main
from etude.cli.play import summary
from etude.recordings import Recording, RecordingWriter, Source, validate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("play") / "run")


def test_an_evaluation_in_words_and_as_json(run, capsys):
    assert main(["evaluate", str(run), "--episodes", "3", "--seed", "9"]) == 0
    words = capsys.readouterr().out
    assert main(["evaluate", str(run), "--episodes", "3", "--seed", "9", "--json"]) == 0
    text = capsys.readouterr()
    found = json.loads(text.out)
    assert text.err == ""
    assert found["episodes"] == 3
    assert words.startswith(f"3 episodes, {found['env_steps']} steps: mean return {found['return_mean']:.1f} ")


def test_another_env(run, capsys):
    assert main(["evaluate", str(run), "--env", "cli_runs:make_env", "--episodes", "4", "--explore", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length_mean"] <= 20


def test_an_env_that_breaks_off_every_episode_is_an_error(run, tmp_path, capsys):
    for words in (["evaluate", str(run)], ["record", str(run), "--to", str(tmp_path / "data")]):
        assert main([*words, "--env", "cli_runs:breaking", "--episodes", "2"]) == 2
        assert "the env broke off every episode" in capsys.readouterr().err


def test_a_clip_ends_where_it_is_told_to(run, tmp_path, capsys):
    words = ["watch", str(run), "--to", str(tmp_path / "clip.gif"), "--max-steps", "3", "--seed", "0", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 4


def test_settings_can_be_others_than_they_were_saved(run, tmp_path, capsys):
    data, out = str(tmp_path / "data"), str(tmp_path / "out")
    assert main(["record", str(run), "--episodes", "2", "--to", data, "--quiet"]) == 0
    tiny = ["--embedding-size", "8", "--num-layers", "1", "--context-length", "2", "--updates-per-iteration", "1"]
    words = ["train", "decision_transformer", "--data", data, "--env", "CartPole-v1", "--evaluation-interval", "0"]
    assert main([*words, *tiny, "--stop.updates", "1", "--out", out, "--quiet"]) == 0
    capsys.readouterr()
    play = ["evaluate", out, "--episodes", "1", "--json", "--set"]
    assert main([*play, "target_return=5", "return_scale=10"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 1
    assert main([*play, "return_scale=0"]) == 2
    assert "`return_scale` is 0.0, but must be above 0, or none" in capsys.readouterr().err
    assert main([*play, "target=5"]) == 2
    assert "no setting `target`" in capsys.readouterr().err


def test_episodes_that_never_end_are_truncated_where_that_is_asked_for(run, tmp_path, capsys):
    args = [str(run), "--env", "cli_runs:endless_env", "--episodes", "2", "--max-steps", "30", "--json"]
    for command in (["evaluate"], ["record", "--to", str(tmp_path / "data")]):
        assert main([*command, *args]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["episodes"], found["length_mean"], found["return_mean"]) == (2, 30, 30)
    segments = Recording.open(tmp_path / "data").read().segments
    assert segments.truncated.all()
    assert segments.has_final_obs.all()
    assert main(["evaluate", str(run), "--max-steps", "0"]) == 2
    assert "`max_steps` is 0, but must be at least 1" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--max-steps", "9", "--on", "somewhere"]) == 2
    assert "`max_steps` is for playing" in capsys.readouterr().err


def test_to_play_elsewhere_training_s_envs_are_not_made(tmp_path, capsys):
    for name, workers in (("a", []), ("b", ["--workers", "1", "--mode", "thread"])):
        MADE.clear()
        out = trained(tmp_path / name, "--env", "cli_runs:counted_env", *workers)
        made = len(MADE)
        assert made == (1 if workers else 2)
        assert main(["evaluate", str(out), "--env", "CartPole-v1", "--episodes", "2"]) == 0
        to = ["--to", str(tmp_path / f"{name}-data"), "--quiet"]
        assert main(["record", str(out), "--env", "CartPole-v1", "--episodes", "2", *to]) == 0
        assert len(MADE) == made
        assert main(["evaluate", str(out), "--episodes", "1"]) == 2
        assert "(--env on the command line)" in capsys.readouterr().err
        assert len(MADE) == made
        for more in (["--trust"], ["--env", "cli_runs:counted_env"]):
            assert main(["evaluate", str(out), "--episodes", "1", *more]) == 0
        assert len(MADE) == made + 2


def test_several_modules_and_faulty_episodes_in_words():
    zero = dict.fromkeys(("return_min", "return_max", "return_std", "updates", "seconds", "sample_steps_per_s"), 0)
    found = Evaluation(**zero, episodes=3, return_mean=7.0, length_mean=9.0, env_steps=27, agent_returns={"a": 7.0})
    assert summary(found).count("\n") == 0
    more = dataclasses.replace(found, module_returns={"red": 3.0, "blue": 4.0}, faulty_episodes=2)
    assert summary(more).splitlines()[1:] == [
        "mean returns of modules: red 3.0, blue 4.0",
        "2 more episodes were cut by an error of the env",
    ]


def test_episodes_are_recorded_and_cloned_from_the_recording_alone(run, tmp_path, capsys):
    to = tmp_path / "rec"
    record = ["record", str(run), "--episodes", "5", "--to", str(to), "--explore"]
    assert main([*record, "--seed", "5", "--quiet"]) == 0
    assert tuple(capsys.readouterr()) == ("", "")
    recording = Recording.open(to)
    assert (recording.num_episodes, recording.env) == (5, "CartPole-v1")
    assert main([*record, "--seed", "5"]) == 2
    said = capsys.readouterr().err
    assert f"{to}: holds a recording" in said
    assert "--append" in said
    assert main([*record, "--seed", "6", "--append", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == str(to)
    assert Recording.open(to).num_episodes == 10
    clone = ["train", "bc", "--data", str(to), "--batch-size", "32", "--updates-per-iteration", "5", "--quiet"]
    out = tmp_path / "bc"
    assert main([*clone, "--stop.updates", "10", "--out", str(out)]) == 0
    assert main(["evaluate", str(out)]) == 2
    assert "was trained without an env: say where to play with --env" in capsys.readouterr().err
    assert main(["evaluate", str(out), "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert main([*clone, "--out", str(out), "--overwrite", "--stop.return-mean", "450"]) == 2
    assert "`stop.return_mean`" in capsys.readouterr().err


def test_a_run_that_learned_from_arrays_in_memory_plays_and_is_evaluated(run, tmp_path, capsys):
    to, out = tmp_path / "rec", tmp_path / "bc"
    assert main(["record", str(run), "--episodes", "5", "--to", str(to), "--explore", "--quiet"]) == 0
    table = pd.read_parquet(to)[["obs", "action", "reward", "terminated", "truncated"]]
    config = BCConfig(data=Source(table, {name: name for name in table}), batch_size=8)
    algorithm = BC(dataclasses.replace(config, updates_per_iteration=1))
    algorithm.save(out)
    algorithm.close()
    assert main(["evaluate", str(out), "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert main(["evaluate", str(out), "--on", str(to), "--methods", "wis"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 2
    assert "was trained without an env: say where to play with --env" in capsys.readouterr().err


def test_episodes_to_judge_by_are_looked_through(run, tmp_path, capsys):
    played, spoilt = tmp_path / "played", tmp_path / "spoilt"
    assert main(["record", str(run), "--episodes", "4", "--to", str(played), "--explore", "--quiet"]) == 0
    recording = Recording.open(played)
    exp = recording.read()
    obs = exp.steps["obs"].copy()
    obs[2] = np.nan
    with RecordingWriter(spoilt, obs_space=recording.obs_space, action_space=recording.action_space) as writer:
        writer.write(exp.with_steps(obs=obs))
    line = ["evaluate", str(run), "--on", str(spoilt), "--methods", "wis"]
    assert main(line) == 2
    assert "`obs` holds NaN" in capsys.readouterr().err
    assert main([*line, "--on-bad", "skip"]) == 0
    words = capsys.readouterr().out
    assert "over 3 episodes" in words
    assert f"note: {spoilt}: nan 1 times" in words


def test_sigterm_keeps_the_episodes_recorded_so_far(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Interrupted, "episodes", 0)
    args = ["--episodes", "1000", "--env", "cli_runs:interrupted_env", "--to", str(tmp_path / "rec")]
    assert main(["record", str(run), *args]) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert Recording.open(tmp_path / "rec").num_episodes == 64  # the first of the batches that are played at a time


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["evaluate", "EMPTY"], "is not a checkpoint"),
        (["evaluate", "EMPTY/nowhere"], "is not a checkpoint: there is no such folder"),
        (["evaluate"], "evaluate needs a value for `run`. All options: etude evaluate --help"),
        (["evaluate", "RUN", "--episodes", "0"], "`episodes` is 0, but must be at least 1"),
        (["evaluate", "RUN", "--episods", "3"], "evaluate has no setting `episods`. Nearest: `episodes`"),
        (["evaluate", "RUN", "--methods", "wis"], "`methods` is for estimates from a recording, but without `on`"),
        (["evaluate", "RUN", "--behaviour", "fit"], "`behaviour` is for estimates from a recording, but without `on`"),
        (["evaluate", "RUN", "--greedy"], "`greedy` is for estimates from a recording"),
        (["evaluate", "RUN", "--on-bad", "skip"], "`on_bad` is for estimates from a recording"),
        (["record", "RUN"], "record needs a value for `to`. All options: etude record --help"),
        (["record", "EMPTY", "--to", "x"], "is not a checkpoint"),
    ],
)
def test_errors(run, tmp_path, capsys, args, message):
    args = [word.replace("EMPTY", str(tmp_path)).replace("RUN", str(run)) for word in args]
    assert main(args) == 2
    text = capsys.readouterr()
    assert message in text.err
    assert text.out == ""


def test_how_a_recording_is_written(tmp_path, capsys):
    run = trained(tmp_path / "run")
    how = ["--compression", "obs=zstd:3,none", "--max-rows-per-file", "50"]
    assert (
        main(["record", str(run), "--episodes", "3", "--to", str(tmp_path / "r"), "--seed", "1", "--quiet", *how]) == 0
    )
    files = Recording.open(tmp_path / "r").files
    assert len(files) > 1
    group = pq.read_metadata(files[0]).row_group(0)
    found = {group.column(i).path_in_schema.partition(".")[0]: group.column(i).compression for i in range(4, 9)}
    assert (found["obs"], found["reward"]) == ("ZSTD", "UNCOMPRESSED")
    assert main(["record", str(run), "--to", str(tmp_path / "s"), "--compression", "zip"]) == 2
    assert "`compression` is 'zip'; known are none" in capsys.readouterr().err


def test_training_is_recorded_and_goes_on(tmp_path, capsys):
    run = trained(tmp_path / "run", "--record", str(tmp_path / "r"), "--record.compression", "zstd:3")
    recording = Recording.open(tmp_path / "r")
    assert recording.num_steps == 128  # two iterations of 64 steps
    assert main(["train", "ppo", "--resume", str(run), "--stop.updates", "8", "--quiet"]) == 0
    recording = Recording.open(tmp_path / "r")
    assert recording.num_steps == recording.info()["agent_steps"] == 256
    assert validate(tmp_path / "r").ok
    assert main(["data", "info", str(tmp_path / "r")]) == 0
    assert "updates    8" in capsys.readouterr().out
    again = ["--record.path", str(tmp_path / "r"), "--out", str(tmp_path / "other")]
    assert main([*SMALL, *again]) == 2
    said = capsys.readouterr().err
    assert "holds a recording" in said
    assert "--record.append" in said
