# SPDX-License-Identifier: Apache-2.0
import csv
import json
import os
import shlex
import signal
import subprocess
import sys

import cli_runs
import pytest
from cli_runs import SMALL, TRAIN, trained

import etude
from etude.algorithms import ALGORITHMS
from etude.algorithms.engine import Engine
from etude.algorithms.run import claimed
from etude.checkpoints import load_meta
from etude.cli.main import main
from etude.errors import SettingsError
from etude.files import Lock
from etude.metrics import read_jsonl
from etude.recordings import validate


def test_a_run_leaves_metrics_events_and_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*SMALL, "--stop.updates", "6", "--out", str(out)]) == 0
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["updates"] for row in rows] == [2, 4, 6]
    assert rows[-1].keys() == etude.load(out).train().to_dict().keys()
    assert list((out / "tensorboard").glob("events*"))
    text = capsys.readouterr()
    assert text.out == ""
    assert "updates 6" in text.err
    assert f"The run is in {out}" in text.err


@pytest.mark.parametrize("hidden", [["8", "4"], ["8,4"], ["[8,4]"], ["[8,", "4]"], ["(8, 4)"]])
def test_several_numbers_may_have_commas_between(tmp_path, hidden):
    (tmp_path / "run.yaml").write_text(f"network:\n  hidden: {json.dumps(' '.join(hidden))}\n")
    for out, given in (("flag", ["--hidden", *hidden]), ("file", ["--config", str(tmp_path / "run.yaml")])):
        assert main([*TRAIN, "--stop.updates", "1", "--quiet", "--out", str(tmp_path / out), *given]) == 0
        assert etude.load(tmp_path / out).config.network.hidden == (8, 4)


def test_flags_reach_the_settings(tmp_path):
    more = ["--network.hidden", "8", "4", "--connectors", "normalize_obs", "frame_stack:2", "cli_runs:halved"]
    out = trained(tmp_path / "run", *more, "--lr", "0:1e-3,1000:0", "--no-normalize-advantages", "--kl-target", "none")
    config = etude.load(out, trust=True).config
    assert (config.network.hidden, config.lr, config.seed) == ((8, 4), ((0, 1e-3), (1000, 0.0)), 1)
    assert not config.normalize_advantages
    assert [str(c) for c in config.connectors[:2]] == ["normalize_obs", "frame_stack:2"]


def test_envs_networks_and_algorithms_of_ones_own(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["train", "cli_runs:Mine", "--env", "cli_runs:make_env", "--module", "cli_runs:Net", "--num-steps", "64"]
    assert main([*args, "--num-envs", "2", "--stop.updates", "2", "--out", str(out), "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert last["length_mean"] <= 20
    assert type(etude.load(out, env=cli_runs.make_env, module=cli_runs.Net)).__name__ == "Mine"
    assert main(["evaluate", str(out), "--episodes", "2", "--trust"]) == 0


def test_quiet_and_json(tmp_path, capsys):
    trained(tmp_path / "a", "--json")
    text = capsys.readouterr()
    assert text.err == ""
    last = json.loads(text.out)
    assert {
        "return_mean", "return_min", "return_max", "episodes", "env_steps", "updates", "seconds",
        "sample_steps_per_s", "faulty_episodes", "algorithm", "out", "goal_met",
    } <= last.keys()  # fmt: skip
    assert (last["updates"], last["env_steps"], last["goal_met"], last["algorithm"]) == (4, 128, True, "ppo")
    trained(tmp_path / "b")
    assert tuple(capsys.readouterr()) == ("", "")


def test_what_is_not_a_number_is_null_in_json(tmp_path, capsys):
    args = ["--env", "cli_runs:make_env", "--num-steps", "4", "--minibatch-size", "4"]  # too few for an episode to end
    trained(tmp_path / "run", *args, "--json", updates=1)
    last = json.loads(capsys.readouterr().out)
    assert last["return_mean"] is None
    assert last["episodes"] == 0


def test_exit_code_3_where_a_budget_ran_out_before_the_goal(tmp_path, capsys):
    args = [*SMALL, "--stop.return-mean", "450", "--stop.env-steps", "128", "--out", str(tmp_path / "run")]
    assert main(args) == 3
    err = capsys.readouterr().err
    assert "a budget ran out with a mean return of" in err
    go_on = f"etude train ppo --resume {tmp_path / 'run'} --stop.return-mean 450.0"
    assert f"go on with: {go_on} and a larger budget." in err


def test_exit_code_0_where_the_goal_was_met(tmp_path):
    args = [*SMALL, "--stop.return-mean", "1", "--stop.env-steps", "100000", "--out", str(tmp_path / "run")]
    assert main([*args, "--quiet"]) == 0


def test_a_goal_that_is_never_measured_is_refused_before_anything_is_replaced(tmp_path, capsys):
    out = trained(tmp_path / "run")
    args = ["--window", "5", "--stop.return-mean", "9", "--out", str(out), "--overwrite"]
    assert main([*SMALL, *args]) == 2
    assert "`stop.return_mean`" in capsys.readouterr().err
    assert etude.load(out).learner.updates == 4


# -- files ----------------------------------------------------------------------------------------------------------


def test_settings_from_a_file_which_flags_override(tmp_path, capsys):
    path = tmp_path / "ppo.yaml"
    path.write_text(
        "env: CartPole-v1\nnum_envs: 4\nnum_steps: 64\nepochs: 1\nlr: 0:1e-3,100:0\nclip: 3e-1\nkl_target: none\n"
        "network: {hidden: [8], activation: relu}\nconnectors: [normalize_obs, cli_runs:halved]\nstop: {updates: 3}\n"
    )
    out = tmp_path / "run"
    args = ["--num-envs", "2", "--network.activation", "tanh", "--out", str(out), "--json"]
    assert main(["train", "ppo", "--config", str(path), *args]) == 0
    config = etude.load(out, trust=True).config
    assert (config.num_envs, config.num_steps, config.clip, config.lr) == (2, 64, 0.3, ((0, 1e-3), (100, 0.0)))
    assert (config.network.hidden, config.network.activation) == ((8,), "tanh")
    assert json.loads(capsys.readouterr().out)["updates"] == 3


def test_a_json_file_too(tmp_path):
    path = tmp_path / "ppo.json"
    path.write_text(json.dumps({"network": {"hidden": []}, "lr": [[0, 1e-3], [10, 1e-4]], "gamma": 0.5}))
    config = etude.load(trained(tmp_path / "run", "--network.hidden", "--config", str(path))).config
    assert (config.network.hidden, config.lr, config.gamma) == ((), ((0, 1e-3), (10, 1e-4)), 0.5)


def test_what_is_empty_in_a_file_sets_nothing(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("stop:\nnetwork:\n")
    assert etude.load(trained(tmp_path / "run", "--config", str(path))).learner.updates == 4


def test_yaml_may_merge(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("network: &small {hidden: [8], activation: relu}\nstop: {<<: {updates: 9}, updates: 2}\n")
    out = tmp_path / "run"
    assert main([*SMALL, "--config", str(path), "--out", str(out), "--quiet"]) == 0
    assert etude.load(out).learner.updates == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "num_envz: 3", "a.yaml: ppo has no setting `num_envz`. Nearest: `num_envs`"),
        ("a.yaml", "network: {hiden: 3}", "a.yaml: ppo.network has no setting `hiden`. Nearest: `hidden`"),
        ("a.yaml", "num_envs: many", "a.yaml: ppo.num_envs is 'many', expected int"),
        ("a.yaml", "lr: fast", "a.yaml: ppo.lr is 'fast', expected float"),
        ("a.yaml", "stop: 5", "a.yaml: ppo.stop is 5, but must be as in `stop: {updates: 1000}`"),
        ("a.yaml", "seed: 1\nlr: 1e-3\nseed: 2", "`seed` twice: leave one of them out."),
        ("a.yaml", "network: {hidden: [8], hidden: [4]}", "`hidden` twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "`seed` twice"),
        (
            "a.yaml",
            "lr: true",
            "a.yaml: ppo.lr is True, expected float | tuple[tuple[int, float] | 'cosine', ...], not true or false",
        ),
        ("a.yaml", "seed: yes", "a.yaml: ppo.seed is True, expected int | None, not true or false"),
        (
            "a.yaml",
            "network: {hidden: [8, on]}",
            "ppo.network.hidden is [8, True], expected tuple[int, ...], not true or false",
        ),
        ("a.yaml", "stop: {updates: yes}", "a.yaml: ppo.stop.updates is True, expected int | None, not true or false"),
        ("a.yaml", "stop: {updatez: 3}", "a.yaml: ppo.stop has no setting `updatez`. Nearest: `updates`"),
        ("a.yaml", "- 3", "a.yaml must hold settings by name"),
        ("a.yaml", "a: [", "a.yaml can't be parsed"),
        ("a.json", "{", "a.json can't be parsed"),
        ("a.json", '{"lr": ' + "[" * 5000 + "]" * 5000 + "}", "a.json can't be parsed: it is nested"),
        ("a.yaml", f"lr: {'[' * 5000}{']' * 5000}", "a.yaml can't be parsed: it is nested"),
        ("a.yaml", f"lr: {'{a: ' * 70}1{'}' * 70}", "a.yaml can't be parsed: it is nested"),
        ("a.yaml", "lr: &a [*a]", "a.yaml can't be parsed: it is nested more than 64 levels deep, or contains itself"),
        ("a.yaml", "network: &a {hidden: *a}", "a.yaml can't be parsed: it is nested"),
        ("a.txt", "", "a.txt: its name must end in .yaml, .yml or .json"),
        (None, "", "nowhere.yaml: No such file"),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, capsys, name, text, message):
    if name:
        (tmp_path / name).write_text(text)
    assert main([*TRAIN, "--config", str(tmp_path / (name or "nowhere.yaml"))]) == 2
    assert message in capsys.readouterr().err


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["ppo", "--env", "CartPole-v1", "--lrr", "0.1"],
            "error: ppo has no setting `lrr`. Nearest: `lr` (learning rate of Adam, ",
        ),
        (["ppo", "--num-envs", "many"], "error: ppo.num_envs is 'many', expected INT"),
        (["ppo", "--env", "CartPole-v1", "--num-envs", "0"], "error: `num_envs` is 0, but must be at least 1."),
        (["ppo", "--stop.update", "3"], "Nearest: `stop.updates`"),
        (["ppo", "--env", "CartPol-v1"], "Nearest: 'CartPole-v1'"),
        (["ppo", "--module", "Net"], "`module` is 'Net', but must be written as `module:Class`"),
        (["ppo", "--module", "cli_runs:Nett"], "`cli_runs:Nett`, which can't be imported here"),
        (["ppo", "--env", "CartPole-v1", "--connectors", "frame_stak:4"], "Nearest: `frame_stack`"),
        (["ppo", "--save-interval", "-1"], "`save_interval` is -1.0, but must be at least 0."),
        (["ppo", "--hidden", "64x64"], "hidden is '64x64', expected INT ..., such as 64 64"),
        (["ppo", "--lr", "abc"], "ppo.lr is 'abc', expected NUMBER|STEP:NUMBER,..., such as 3e-4"),
        (["ppo", "--lr", "0:1e-3,10:abc"], "ppo.lr is '0:1e-3,10:abc', expected NUMBER|STEP:NUMBER,..."),
        (["ppo", "--learning-rate", "1e-3"], "no setting `learning-rate`. Here it is: `lr`"),
        (["ppo", "--learning_rate", "1e-3"], "no setting `learning_rate`. Here it is: `lr`"),
        (["ppo", "--total-timesteps", "1000"], "Here it is: `stop.env-steps`"),
        (["ppo", "--stop", "1000"], "Here it is: `stop.env-steps`"),
        (["ppo", "--batch-size", "64"], "Here it is: `minibatch-size`"),
        (
            ["a2c", "--batch-size", "64"],
            "`minibatch-size` (which has no effect in a2c: an iteration makes one gradient step",
        ),
        (["ppo", "--n-steps", "64"], "Here it is: `num-steps`"),
        (["dqn", "--n-steps", "64"], "Here it is: `n-step`"),
        (["dqn", "--train_freq", "4"], "It is the inverse: `train_freq=4` is 0.25."),
        (["ppo", "--gae-lambda", "0.9"], "Here it is: `lambda`"),
        (["ppo", "--tensorboard-log", "x"], "Here it is: `out`"),
        (["ppo", "--policy-kwargs", "x"], "Here it is: `network."),
        (["dqn", "--buffer-size", "9"], "Here it is: `replay.capacity`"),
        (["ppo", "CartPole-v1"], "--env CartPole-v1"),
        (["ddpg"], f"there is no algorithm `ddpg`. There are {', '.join(ALGORITHMS)}."),
        (["trpo"], "there is no algorithm `trpo`. There are ppo,"),
        (["PPO", "--lrr", "1"], "ppo has no setting `lrr`"),
        (["TD3BC", "--lrr", "1"], "td3_bc has no setting `lrr`"),
        (["poo"], "error: there is no algorithm `poo`. Nearest: `ppo`."),
        (["cli_runs:make_env"], "error: cli_runs:make_env is not an algorithm"),
        ([], "error: etude train needs an algorithm: " + ", ".join(ALGORITHMS)),
        (["--resume", "runs/a"], "Put it first: etude train ppo"),
        (["bc", "--env", "CartPole-v1"], "error: bc needs a value for `data`, such as --data"),
        (["bc", "--data", "nowhere"], "nowhere: there is no such file or folder"),
    ],
)
def test_errors_name_the_culprit_and_what_to_do(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *args]) == 2
    text = capsys.readouterr()
    assert message in text.err
    assert text.out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "ppo", "--help-all"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())  # as if no line were wrapped
    for words in ("--hidden INT ...", "--network.hidden", "--stop.return-mean", "--clip", "--resume", "(default: 0.2)"):
        assert words in text
    assert main(["train", "--help"]) == 0
    assert f"ALGORITHM is one of {', '.join(ALGORITHMS)}," in capsys.readouterr().out


# -- folders --------------------------------------------------------------------------------------------------------


def test_two_runs_are_never_mixed(tmp_path, capsys):
    out = trained(tmp_path / "run")
    (out / "notes.txt").write_text("mine")
    assert main([*SMALL, "--stop.updates", "2", "--out", str(out)]) == 2
    assert f"{out} already contains a run. Continue it (--resume {shlex.quote(str(out))};" in capsys.readouterr().err
    trained(out, "--overwrite", updates=2)
    assert [row["updates"] for row in read_jsonl(out / "metrics.jsonl")] == [2]
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert (out / "notes.txt").read_text() == "mine"
    assert main([*SMALL, "--out", str(out / "notes.txt")]) == 2
    assert "which is a file" in capsys.readouterr().err


def test_what_a_resumed_run_keeps_and_what_it_can_not_have(tmp_path, capsys):
    out = trained(tmp_path / "run", "--log", "csv", "--checkpoints.keep-last", "2", "--save-interval", "0")
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "8", "--quiet"]) == 0
    rows = csv.DictReader((out / "metrics.csv").read_text().splitlines())
    assert [row["iteration"] for row in rows] == ["1", "2", "3", "4"]
    assert not (out / "tensorboard").exists()
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["checkpoint-000003", "checkpoint-000004"]
    assert load_meta(out)["run"]["save_interval"] == 0
    assert main(["train", "ppo", "--resume", str(out), "--seed", "7", "--stop.updates", "10"]) == 2
    assert "`seed` is 7, but the run was saved with" in capsys.readouterr().err
    older = out / "checkpoints" / "checkpoint-000003"
    assert main(["train", "ppo", "--resume", str(older), "--stop.updates", "10"]) == 2
    assert f"{older} is a checkpoint that a run keeps" in capsys.readouterr().err
    assert load_meta(older)["iteration"] == 3
    again = ["--out", str(tmp_path / "again"), "--log", "none"]
    assert main(["train", "ppo", "--resume", str(older), "--stop.updates", "10", "--quiet", *again]) == 0
    assert not (tmp_path / "again" / "metrics.csv").exists()


@pytest.mark.parametrize("out", ["/dev/null/x", "a.txt/x/y", "x" * 300])
def test_a_folder_that_can_not_be(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("")
    assert main([*SMALL, "--out", out]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: can't write a run to {tmp_path / out}: ")
    assert err.endswith("Choose a writable folder as `out`.\n")


def test_a_folder_that_must_not_be_written_to(tmp_path, monkeypatch, capsys):
    out = trained(tmp_path / "run")
    for folder in (out, tmp_path):
        folder.chmod(0o555)
    try:
        if os.access(out, os.W_OK):
            pytest.skip("this user may write everywhere")
        monkeypatch.chdir(tmp_path)
        for args in ([], ["--out", "x"], ["--out", str(out), "--overwrite"], ["--resume", str(out)]):
            assert main([*SMALL, *args]) == 2
            assert "Permission denied. Choose a writable folder" in capsys.readouterr().err
    finally:
        for folder in (out, tmp_path):
            folder.chmod(0o755)
    assert etude.load(out).learner.updates == 4


def test_two_processes_are_never_in_one_folder(tmp_path, capsys):
    out = trained(tmp_path / "run")
    with claimed(out):
        for args in (["--out", str(out), "--overwrite"], ["--resume", str(out)]):
            assert main([*SMALL, *args]) == 2
            assert f"{out} is in use: another process is training in it." in capsys.readouterr().err
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "6", "--quiet"]) == 0


@pytest.mark.parametrize("log", ["jsonl", "csv", "tensorboard"])
def test_a_folder_that_goes_away_ends_the_run_with_an_error(tmp_path, monkeypatch, capsys, log):
    def removed(algorithm, **how):
        if algorithm.iteration == 1:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return train(algorithm, **how)

    train = etude.PPO.train
    monkeypatch.setattr(etude.PPO, "train", removed)
    assert main([*SMALL, "--stop.updates", "40", "--out", str(tmp_path / "run"), f"--log={log}"]) != 0
    assert "removed or moved" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_runs_do_not_record_into_one_folder(tmp_path, capsys):
    record = ["--record", str(tmp_path / "data"), "--stop.updates", "2", "--quiet"]
    (tmp_path / "data").mkdir()
    with Lock(tmp_path / "data" / ".part.lock"):  # as of a run that has not written anything yet
        for more in ([], ["--record.append"]):
            assert main([*SMALL, *record, *more, "--out", str(tmp_path / "run")]) == 2
            assert "another writer is using this folder" in capsys.readouterr().err
    assert main([*SMALL, *record, "--out", str(tmp_path / "run")]) == 0
    assert validate(tmp_path / "data").ok


def test_a_claimed_folder_of_which_nothing_came_goes_again(tmp_path):
    with pytest.raises(SettingsError), claimed(tmp_path / "a" / "b"):
        raise SettingsError("no")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(SettingsError), claimed(tmp_path / "a" / "b"):
        raise SettingsError("no")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_folder_is_found_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--stop.updates", "2", "--quiet"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-CartPole-v1-")


# -- resuming -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole, parts = trained(tmp_path / "whole", updates=8), trained(tmp_path / "parts")
    assert main(["train", "ppo", "--resume", str(parts), "--stop.updates", "8", "--quiet"]) == 0
    one, other = (read_jsonl(out / "metrics.jsonl") for out in (whole, parts))
    assert [row["updates"] for row in other] == [2, 4, 6, 8]
    assert [row["losses"] for row in one] == [row["losses"] for row in other]
    assert other[2]["resumed"] is not None


def test_what_a_killed_run_did_after_its_last_checkpoint_is_done_and_written_once(tmp_path):
    out = trained(tmp_path / "run")
    path = out / "metrics.jsonl"
    lines = path.read_text()
    ahead = [json.dumps(json.loads(lines.splitlines()[-1]) | {"iteration": i, "updates": 2 * i}) for i in (3, 4, 5)]
    path.write_text(lines + "\n".join(ahead) + '\n{"iteration": 6, "upd')
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "8", "--quiet"]) == 0
    assert [row["iteration"] for row in read_jsonl(path)] == [1, 2, 3, 4]
    assert path.read_text().startswith(lines)


def test_a_run_with_nothing_left_to_do_stays_as_it_is(tmp_path):
    out = trained(tmp_path / "run")
    before = (out / "metrics.jsonl").read_text()
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "4", "--quiet"]) == 0
    assert (out / "metrics.jsonl").read_text() == before
    assert etude.load(out).iteration == 2


def test_settings_given_count_more_and_the_run_may_go_on_elsewhere(tmp_path):
    old, new = trained(tmp_path / "old"), tmp_path / "new"
    args = ["--lr", "1e-5", "--stop.updates", "6", "--out", str(new), "--quiet"]
    assert main(["train", "ppo", "--resume", str(old), *args]) == 0
    assert [row["updates"] for row in read_jsonl(new / "metrics.jsonl")] == [6]
    assert len(read_jsonl(old / "metrics.jsonl")) == 2
    assert etude.load(new).config.lr == 1e-5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bc", "--resume", "RUN", "--data", "x"], "is a run of etude.algorithms.ppo:PPO, not of bc"),
        (["ppo", "--resume", "RUN", "--network.hidden", "3"], "`network.hidden` can't be other than it was"),
        (["ppo", "--resume", "RUN", "--overwrite"], "can't be both resumed and overwritten"),
        (["ppo", "--resume", "RUN", "--num-envs", "many"], "ppo.num_envs is 'many', expected INT"),
        (["ppo", "--resume", "nowhere"], "nowhere is not a checkpoint"),
        (["cli_runs:Mine", "--resume", "RUN"], "is a run of etude.algorithms.ppo:PPO, not of Mine (cli_runs:Mine)"),
    ],
)
def test_what_can_not_be_resumed(tmp_path, capsys, args, message):
    out = trained(tmp_path / "run")
    assert main(["train", *(str(out) if word == "RUN" else word for word in args)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_ends_it(tmp_path, number):
    out = tmp_path / "run"
    code = "import sys; from etude.cli.main import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *SMALL, "--stop.env-steps", "10000000", "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in child.stderr:
        if line.startswith(("return", "steps", "updates")):
            break
    child.send_signal(number)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130
    assert f"Go on with: etude train ppo --resume {shlex.quote(str(out))} --stop.env-steps 10000000\n" in err
    assert "Traceback" not in err
    rows = read_jsonl(out / "metrics.jsonl")
    done = rows[-1]["updates"]
    assert etude.load(out).learner.updates == done
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", str(done + 2), "--quiet"]) == 0
    assert [row["iteration"] for row in read_jsonl(out / "metrics.jsonl")] == list(range(1, len(rows) + 2))


def test_sigterm_before_training_is_an_interruption_too(tmp_path, capsys):
    assert main(["train", "ppo", "--env", "cli_runs:never_made", "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
    assert not (tmp_path / "run").exists()


SHELL = f'"{sys.executable}" -c "import sys; from etude.cli.main import main; sys.exit(main())"'


LEAVES = '2>&1 | (head -1; exec <&-; touch "$GONE")'  # the run goes on only then


@pytest.mark.parametrize(
    "redirected",
    [
        pytest.param(LEAVES, id="head"),
        pytest.param(">&-", id="out", marks=pytest.mark.slow),
        pytest.param("2>&-", id="err", marks=pytest.mark.slow),
        pytest.param(">&- 2>&-", id="both"),
    ],
)
def test_a_run_outlives_those_who_watch_it(tmp_path, redirected):
    out, gone = tmp_path / "run", tmp_path / "gone"
    env = "cli_runs:unwatched_env" if "head" in redirected else "CartPole-v1"
    words = shlex.join([*SMALL, "--stop.updates", "20", "--json", "--out", str(out)]).replace("CartPole-v1", env)
    done = subprocess.run(
        ["bash", "-c", f"{SHELL} {words} {redirected}; exit ${{PIPESTATUS[0]}}"],
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__), "GONE": str(gone)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error" not in done.stdout + done.stderr
    assert done.returncode == (1 if "head" in redirected else 0)
    assert etude.load(out, env="CartPole-v1").learner.updates == 20


def test_checkpoints_are_saved_on_the_way(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(etude.PPO, "save", lambda self, out, result: saved.append(self.learner.updates))
    trained(tmp_path / "a", "--save-interval", "0")
    assert saved == [2, 4, 4]
    saved.clear()
    trained(tmp_path / "b")
    assert saved == [4]


def test_the_last_and_the_best_checkpoints_are_kept_beside_the_newest(tmp_path):
    out = tmp_path / "a"
    keep = ("--checkpoints.keep-last", "2", "--checkpoints.keep-best", "1", "--checkpoints.metric", "losses/value")
    trained(out, "--save-interval", "0", *keep, "--checkpoints.best-is", "min", updates=20)
    losses = {row["iteration"]: row["losses"]["value"] for row in read_jsonl(out / "metrics.jsonl")}
    assert len(losses) == 10
    kept = sorted(int(path.name.removeprefix("checkpoint-")) for path in (out / "checkpoints").iterdir())
    assert kept == sorted({9, 10, min(losses, key=losses.get)})
    assert etude.load(out / "checkpoints" / f"checkpoint-{kept[0]:06d}").iteration == kept[0]
    assert etude.load(out).iteration == 10
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "22", "--quiet"]) == 0
    assert etude.load(out).iteration == 11
    trained(out, "--overwrite")
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("keep-last", "-1", "`checkpoints.keep_last` is -1, but must be at least 0"),
        ("keep-best", "-1", "`checkpoints.keep_best` is -1, but must be at least 0"),
        ("metric", "retrn_mean", "`metric` is 'retrn_mean', but results have no such field. Nearest: `return_mean`"),
    ],
)
def test_checkpoints_that_can_not_be_kept_are_named_before_anything_is_replaced(tmp_path, capsys, flag, value, message):
    out = trained(tmp_path / "a")
    assert main([*SMALL, "--out", str(out), "--overwrite", f"--checkpoints.{flag}", value]) == 2
    assert message in capsys.readouterr().err
    assert etude.load(out).iteration == 2


def test_a_url_is_no_folder_for_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--stop.updates", "1", "--out", "memory://run", "--quiet"]) == 2
    assert "`out` is 'memory://run', but must be a folder on this machine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_failed_at_once_does_not_block_its_folder(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    assert trained(out) == out
    assert (out / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-env", "CartPole-v1"], "can't take '-env': write --env"),
        (["--normalize-advantages", "False"], "a flag that is yes or no takes no value, as in --quiet or --no-quiet"),
        (["quickly"], "flags begin with `--`"),
    ],
)
def test_words_that_are_no_flags(capsys, words, said):
    assert main(["train", "ppo", *words]) == 2
    assert said in capsys.readouterr().err


def test_modules_to_train_are_ids_or_a_function(capsys, tmp_path):
    given = [*SMALL, "--stop.updates", "1", "--quiet", "--out", str(tmp_path / "run"), "--modules-to-train"]
    for words in (["red,blue"], ["red", "blue"]):
        assert main([*given, *words]) == 2
        said = capsys.readouterr().err
        assert "`agents.modules_to_train` is ('red', 'blue'), but the `modules` are ('main',)" in said
    assert main(given) == 2
    assert "modules_to_train needs a value" in capsys.readouterr().err
    assert main([*given, "no_such_module:fn"]) == 2
    assert "`modules_to_train` is `no_such_module:fn`, which can't be imported here" in capsys.readouterr().err
    assert main([*given, "main"]) in (0, 3)
    capsys.readouterr()
    (tmp_path / "settings.yaml").write_text("modules_to_train: [red, blue]\n")
    assert main([*given[:-1], "--overwrite", "--config", str(tmp_path / "settings.yaml")]) == 2
    assert "`agents.modules_to_train` is ('red', 'blue'), but the `modules`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["save_interval", "log", "checkpoints"])
def test_what_is_a_flag_alone_is_told_from_settings(name, capsys, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(f"lr: 0.001\n{name}: 5\n")
    assert main([*SMALL, "--stop.updates", "1", "--config", str(file)]) == 2
    assert f"{file}: `{name}` is no setting of ppo, but given by flags alone" in capsys.readouterr().err


def test_a_relative_path_that_is_not_there_is_told_with_the_folder_it_begins_in(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bc", "--data", "data/none", "--stop.updates", "1"]) == 2
    assert f"data/none: there is no such file or folder in {tmp_path}." in capsys.readouterr().err


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "etude", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("etude ")
    assert subprocess.run([sys.executable, "-m", "etude", "trian"], capture_output=True, check=False).returncode == 2


def test_a_save_gathers_and_writes_the_state_once_whatever_is_kept(tmp_path, monkeypatch):
    out, gathered, written = tmp_path / "run", [], set()
    gather, add = Engine.pull, etude.Checkpoints.add
    monkeypatch.setattr(Engine, "pull", lambda self: gathered.append(self._algorithm.updates) or gather(self))

    def added(self, *args):
        path = add(self, *args)
        written.update(os.stat(file).st_ino for file in out.rglob("state-*"))
        return path

    monkeypatch.setattr(etude.Checkpoints, "add", added)
    keep = ["--checkpoints.keep-last", "2", "--checkpoints.keep-best", "1"]
    assert main([*SMALL, "--stop.updates", "10", "--save-interval", "0", *keep, "--out", str(out), "--quiet"]) == 0
    assert gathered == [2, 4, 6, 8, 10, 10]  # and at the end
    assert len(written) <= len(gathered)
    newest = max((out / "checkpoints").iterdir())
    assert etude.load(newest).updates == etude.load(out).updates == 10
    best = etude.load(sorted((out / "checkpoints").iterdir())[0]).updates
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "12", "--quiet"]) == 0
    assert etude.load(newest).updates == 10  # what is kept stays as it was
    assert best < 10
