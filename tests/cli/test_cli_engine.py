# SPDX-License-Identifier: Apache-2.0
import pytest
from cli_runs import trained

import etude
from etude.algorithms import PPO, Ray
from etude.cli.main import main
from etude.cli.options import ask
from etude.cli.train import TrainOptions
from etude.errors import SettingsError
from etude.settings import from_dict


def engine_of(*args):
    """The engine that a command line asks for."""
    return from_dict(etude.PPOConfig, given(*args), owner="ppo").engine


def given(*args):
    """The settings that a command line gives."""
    return ask(PPO, TrainOptions, ["ppo", *args], "train", "")[1]


def test_flags_of_the_ray_engine():
    assert engine_of() == "local"
    assert engine_of("--engine", "ray") == "ray"
    assert engine_of("--engine", "ray", "--num-runners", "3", "--num-learners", "1") == Ray(
        num_runners=3, num_learners=1
    )
    assert engine_of("--engine", "ray", "--num-evaluation-runners", "2") == Ray(num_evaluation_runners=2)
    found = engine_of(
        "--engine", "ray", "--ray.num-runners", "4", "--ray.address", "auto", "--ray.fragment-steps", "64",
        "--ray.resources-per-runner", "simulator=1", "--ray.step-timeout", "none", "--no-ray.restart-failed-runners",
        "--ray.data.prefetch-batches", "4", "--ray.data.num-cpus", "0.5",
        "--ray.runtime-env", "working_dir=.", 'pip=["numpy"]', 'env_vars={"A": "1"}',
    )  # fmt: skip
    assert (found.num_runners, found.address, found.fragment_steps) == (4, "auto", 64)
    assert found.resources_per_runner == {"simulator": 1.0}
    assert found.step_timeout is None
    assert not found.restart_failed_runners
    assert (found.data.prefetch_batches, found.data.num_cpus) == (4, 0.5)
    assert found.runtime_env == {"working_dir": ".", "pip": ["numpy"], "env_vars": {"A": "1"}}


def test_names_that_workers_have_stay_theirs():
    found = given("--step-timeout", "3", "--max-restarts", "1")
    assert found == {"workers": {"step_timeout": "3", "max_restarts": "1"}}


@pytest.mark.parametrize(
    ("text", "args", "engine"),
    [
        ("engine: ray", [], "ray"),
        ("engine: {num_runners: 2}", [], Ray(num_runners=2)),
        ("engine: {num_runners: 2, data: {prefetch_batches: 4}}", ["--ray.data.num-cpus", "2"], None),
        ("engine: {num_runners: 2, num_learners: 1}", ["--num-runners", "5"], Ray(num_runners=5, num_learners=1)),
        ("engine: {num_runners: 2}", ["--engine", "ray"], Ray(num_runners=2)),
        ("engine: {num_runners: 2}", ["--engine", "local"], "local"),
        ("engine: ray", ["--num-runners", "5"], Ray(num_runners=5)),
        ("engine: 4", [], Ray(num_runners=4)),
    ],
)
def test_the_engine_in_a_file(tmp_path, text, args, engine):
    (tmp_path / "a.yaml").write_text(text)
    found = engine_of("--config", str(tmp_path / "a.yaml"), *args)
    if engine is None:
        assert (found.num_runners, found.data.prefetch_batches, found.data.num_cpus) == (2, 4, 2.0)
    else:
        assert found == engine


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-runners", "2"], "ppo has `ray.num_runners`, but uses the local engine: add --engine ray."),
        (["--engine", "local", "--ray.address", "auto"], "ppo has `ray.address`, but uses the local engine"),
        (["--engine", "roy"], "ppo.engine is 'roy', expected {local,ray}"),
        (["--engine", "ray", "--ray.num-runers", "2"], "Nearest: `ray.num-runners`"),
        (["--engine", "ray", "--ray.num-runners", "many"], "ppo.ray.num_runners is 'many', expected INT"),
        (["--engine", "ray", "--ray.runtime-env", "pip=[1"], "[1 can't be read as JSON"),
        (
            ["--engine", "ray", "--ray.resources-per-runner", "much"],
            "ppo.ray.resources_per_runner is 'much', expected NAME=VALUE",
        ),
    ],
)
def test_what_is_wrong_with_an_engine(args, message):
    with pytest.raises(SettingsError) as error:
        engine_of(*args)
    assert message in str(error.value)


def test_a_local_run_is_resumed_on_the_ray_engine_only_if_asked(tmp_path):
    out = trained(tmp_path / "run")
    with pytest.raises(SettingsError, match=r"add --engine ray"):
        engine_of("--resume", str(out), "--num-runners", "2")
    assert engine_of("--resume", str(out), "--engine", "ray", "--num-runners", "2") == Ray(num_runners=2)


def test_what_was_trained_on_a_cluster_plays_without_it(tmp_path, capsys):
    out = trained(tmp_path / "run")
    algorithm = etude.load(out)
    object.__setattr__(algorithm.config, "engine", Ray(num_runners=7, address="127.0.0.1:1"))
    algorithm.save(out)
    with pytest.raises(SettingsError, match=r"add --engine ray"):
        engine_of("--resume", str(out), "--num-learners", "1")
    assert engine_of("--resume", str(out), "--engine", "ray", "--num-learners", "1") == Ray(num_learners=1)
    assert main(["train", "ppo", "--resume", str(out), "--stop.updates", "6", "--quiet"]) == 0  # here
    assert main(["evaluate", str(out), "--episodes", "1"]) == 0
    assert "1 episodes" in capsys.readouterr().out
