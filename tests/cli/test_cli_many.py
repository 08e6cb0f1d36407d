# SPDX-License-Identifier: Apache-2.0
"""Workers, several modules and memory, from the command line and from files."""

import json

import cli_runs
import pytest
from cli_runs import SMALL, trained

import etude
from etude.cli.main import main
from etude.envs import Workers
from etude.metrics import read_jsonl

WORKERS = ["--workers", "2", "--envs-per-worker", "8", "--min-batch", "4", "--step-timeout", "30"]
TWO = ["train", "ppo", "--env", "many_agent_envs:TwoJobs", "--num-steps", "64", "--epochs", "1", "--hidden", "8"]


def config(out):
    return etude.load(out, trust=True).config


def test_workers_and_memory(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["train", "ppo", "--env", "cli_runs:make_env", "--num-steps", "128", "--epochs", "1", "--hidden", "8"]
    args += ["--minibatch-size", "128", *WORKERS, "--recurrent", "lstm"]
    assert main([*args, "--updates", "2", "--out", str(out), "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["updates"], last["env_steps"]) == (2, 256)
    found = config(out)
    assert found.workers == Workers(num_workers=2, envs_per_worker=8, min_batch=4, step_timeout=30.0)
    assert (found.network.recurrent, found.network.hidden) == ("lstm", (8,))
    env = ["--env", "cli_runs:make_env"]
    other = ["--max-wait", "0.5", "--mode", "thread"]
    assert main(["train", "ppo", "--resume", str(out), *env, *other, "--updates", "3", "--quiet"]) == 0
    assert config(out).workers == Workers(
        num_workers=2, envs_per_worker=8, min_batch=4, step_timeout=30.0, max_wait=0.5, mode="thread"
    )
    assert [row["updates"] for row in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("workers: 2", [], Workers(num_workers=2)),
        ("workers: 2", ["--min-batch", "1", "--mode", "thread"], Workers(num_workers=2, min_batch=1, mode="thread")),
        ("workers: 2", ["--workers", "1"], Workers(num_workers=1)),
        ("workers: {step_timeout: 30, max_wait: none}", ["--workers", "1"], Workers(num_workers=1, step_timeout=30.0)),
        ("workers: {num_workers: 1, check: always}", ["--no-restart-failed"],
         Workers(num_workers=1, check="always", restart_failed=False)),
        ("workers:", ["--check", "0"], Workers(check=0)),
    ],
)  # fmt: skip
def test_workers_from_a_file(tmp_path, text, args, expected):
    path = tmp_path / "ppo.yaml"
    path.write_text(text)
    assert config(trained(tmp_path / "run", "--config", str(path), *args, updates=2)).workers == expected


def test_settings_of_the_network_that_are_as_they_were_may_be_given_again(tmp_path):
    out = trained(tmp_path / "run")
    args = ["--activation", "tanh", "--hidden", "8", "--updates", "6", "--quiet"]
    assert main(["train", "ppo", "--resume", str(out), *args]) == 0


@pytest.mark.parametrize(
    ("args", "text", "modules"),
    [
        (["--modules", "echo", "aim"], "", ("echo", "aim")),
        (["--modules", "echo=cli_runs:Net", "aim"], "", {"echo": cli_runs.Net, "aim": None}),
        ([], "modules: [echo, aim]", ("echo", "aim")),
        ([], "modules: {echo: 'cli_runs:Net', aim: none}", {"echo": cli_runs.Net, "aim": None}),
        ([], "modules: {echo: 'cli_runs:Net', aim:}", {"echo": cli_runs.Net, "aim": None}),
        (["--modules", "aim", "echo"], "modules: {echo: 'cli_runs:Net', aim:}", ("aim", "echo")),
    ],
)
def test_several_modules(tmp_path, args, text, modules):
    path, out = tmp_path / "ppo.yaml", tmp_path / "run"
    path.write_text(text)
    assert (
        main([*TWO, *args, "--num-steps", "256", "--config", str(path), "--updates", "2", "--out", str(out), "--quiet"])
        == 0
    )
    assert config(out).agents.modules == modules
    assert read_jsonl(out / "metrics.jsonl")[-1]["module_returns"].keys() == {"echo", "aim"}


def test_who_acts_for_whom_and_what_one_sees_of_it(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--modules", "talker", "shooter", "--module-of", "cli_runs:by_job", "--count-steps-by", "agent_steps"]
    assert main([*TWO, *args, "--num-steps", "640", "--updates", "2", "--out", str(out), "--json"]) == 0
    text = capsys.readouterr()
    last = json.loads(text.out)
    assert last["agent_steps"] == 2 * last["env_steps"]
    assert "modules shooter " in text.err
    assert "losses talker/policy " in text.err
    assert config(out).agents.module_of is cli_runs.by_job
    for command in (["train", "ppo", "--resume"], ["evaluate"]):
        assert main([*command, str(out)]) == 2
        assert "`config/env` names many_agent_envs:TwoJobs" in capsys.readouterr().err
    own = ["--env", "many_agent_envs:TwoJobs", "--module-of", "cli_runs:by_job"]
    assert main(["train", "ppo", "--resume", str(out), *own, "--updates", "4", "--quiet"]) == 0
    assert main(["evaluate", str(out), "--episodes", "3", "--trust"]) == 0
    assert "\nmean returns of modules: shooter " in capsys.readouterr().out


def test_agents_that_share_a_module_are_told_apart(tmp_path, capsys):
    args = ["train", "ppo", "--env", "many_agent_envs:Nim", "--num-steps", "256", "--epochs", "1", "--hidden", "8"]
    assert main([*args, "--workers", "1", "--updates", "1", "--out", str(tmp_path / "run")]) == 0
    assert "agents first " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--modules", "red", "red"], "`agents.modules` is ('red', 'red'), but must be a list of at least one id"),
        (["--modules", "red=cli_runs:Net", "red"], "ppo.agents.modules has one name twice: red=cli_runs:Net red."),
        (["--modules", "red=Net"], "`modules` is 'Net', but must be written as `module:Class`, to be imported."),
        (["--modules", "red=cli_runs:Nett"], "`modules` is `cli_runs:Nett`, which can't be imported here"),
        (["--module-of", "by_job"], "`module_of` is 'by_job', but must be written as `module:function`"),
        (["--module-of", "cli_runs:by_job"], "but must be none without `modules`"),
        (["--modul", "red"], "ppo has no setting `modul`. Nearest: `module` "),
        (["--min-bach", "2"], "ppo has no setting `min-bach`. Nearest: `min-batch` (how many envs must be ready"),
        (["--worker", "2"], "Nearest: `workers` (processes or threads that step envs, at least 0, default 0)"),
        (["--workers", "two"], "ppo.workers.num_workers is 'two', expected INT."),
        (["--workers", "2", "--workers.num-workers", "2"], "ppo: --workers and --workers.num-workers are one setting"),
        (["--min-batch", "0"], "`workers.min_batch` is 0, but must be at least 1, or none."),
        (["--step-timeout", "3"], "Workers.step_timeout must be auto or none without workers"),
        (["--recurrent", "rnn"], "ppo.network.recurrent is 'rnn', expected {lstm,gru}|none"),
        (
            ["--count-steps-by", "steps"],
            "ppo.trajectories.count_steps_by is 'steps', expected {env_steps,agent_steps}",
        ),
    ],
)
def test_what_is_wrong(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    assert main([*TWO, *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: many", "a.yaml: ppo.workers.num_workers is 'many', expected int."),
        ("workers: yes", "a.yaml: ppo.workers.num_workers is True, expected int, not true or false."),
        ("workers: {min_bach: 2}", "a.yaml: ppo.workers has no setting `min_bach`. Nearest: `min_batch`"),
        ("min_bach: 2", "a.yaml: ppo has no setting `min_bach`. Nearest: `workers.min_batch`"),
        ("network: 64", "a.yaml: ppo.network is 64, expected NetworkConfig: give its fields by name."),
        ("modules: 3", "a.yaml: ppo.agents.modules is 3, expected tuple[str, ...] | Mapping[str, "),
        ("modules: red", "a.yaml: ppo.agents.modules is 'red', expected tuple[str, ...] | Mapping[str, "),
        ("modules: {red: 3}", "a.yaml: ppo.agents.modules is {'red': 3}, expected "),
        ("modules: {red: Net}", "`modules` is 'Net', but must be written as `module:Class`"),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, capsys, text, message):
    (tmp_path / "a.yaml").write_text(text)
    assert main([*SMALL, "--config", str(tmp_path / "a.yaml")]) == 2
    assert message in capsys.readouterr().err


def times_of(run):
    """When the files of a run were written, but for the one that is locked while a command works on it."""
    return sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*") if path.name != ".lock")


def test_a_resumed_run_whose_envs_can_not_be_made_is_left_as_it_is(tmp_path, capsys):
    out, new = trained(tmp_path / "run"), trained(tmp_path / "new")
    before = times_of(new)
    args = ["--resume", str(out), "--env", "cli_runs:nowhere", "--out", str(new), "--overwrite"]
    assert main(["train", "ppo", *args]) == 2
    assert "cli_runs:nowhere" in capsys.readouterr().err
    assert times_of(new) == before
