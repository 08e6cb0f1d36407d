# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
import json
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
import runner_envs

import etude
from etude.checkpoints import load_meta
from etude.errors import EngineError, SettingsError

ray_tune = pytest.importorskip("ray.tune")

from etude.algorithms import Algorithm  # noqa: E402
from etude.algorithms.parallel import algorithm_of  # noqa: E402
from etude.algorithms.search import Choice, Grid, Range  # noqa: E402
from etude.cli.tune import report  # noqa: E402
from etude.ray import Shared, Trainable, resume_tuning, tune  # noqa: E402
from etude.ray.cluster import driver_of  # noqa: E402
from etude.ray.trainable import flat, settings_of  # noqa: E402
from etude.ray.tuning import checked  # noqa: E402

TINY = etude.PPOConfig(
    env="CartPole-v1",
    num_envs=2,
    num_steps=64,
    epochs=1,
    minibatch_size=32,
    network=etude.NetworkConfig(hidden=(8,)),
    seed=1,
)


class Noted(etude.Callback):
    """Notes the process of each episode in a file."""

    def __init__(self, path):
        self.path = path

    def on_episode_end(self, episode):
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_no_more_trials_run_at_once_than_they_may(cluster, tmp_path):
    config = dataclasses.replace(TINY, callbacks=(Noted(tmp_path / "noted"),))
    space, stop = {"lr": ray_tune.grid_search([1e-3, 2e-3, 3e-3])}, etude.Stop(env_steps=2000)
    grid = tune(config, space, stop=stop, max_concurrent=1, out=tmp_path / "out", verbose=0)
    assert len(grid) == 3
    pids = (tmp_path / "noted").read_text().split()
    changes = sum(a != b for a, b in itertools.pairwise(pids))
    assert changes == len(set(pids)) - 1  # one after another; one process may run several


@pytest.fixture(scope="module")
def tuned(cluster, tmp_path_factory):
    """Four trials of two iterations."""
    space = {"lr": ray_tune.loguniform(1e-4, 1e-2), "network": {"hidden": [[8], [4, 4]]}}
    out = tmp_path_factory.mktemp("tune") / "four"
    return tune(TINY, space, stop=etude.Stop(env_steps=128), num_samples=2, max_concurrent=1, out=out, verbose=0)


def trials(grid):
    return [grid[i] for i in range(len(grid))]


def tried(result):
    return {name: value for name, value in result.config.items() if name != "shared"}


def test_all_trials_end_by_the_budget_with_the_settings_that_were_tried(tuned):
    found = trials(tuned)
    assert len(found) == 4
    assert not tuned.errors
    assert sorted(tuple(tried(trial)["network.hidden"]) for trial in found) == [(4, 4), (4, 4), (8,), (8,)]
    assert len({tried(trial)["lr"] for trial in found}) == 4
    for trial in found:
        metrics, config = trial.metrics, settings_of(trial.config)
        assert (metrics["env_steps"], metrics["training_iteration"], metrics["updates"]) == (128, 2, 4)
        assert metrics["metrics/lr"] == tried(trial)["lr"] == config.lr
        assert config.network.hidden == tuple(tried(trial)["network.hidden"])
        assert 1e-4 <= config.lr <= 1e-2
        assert {"losses/policy", "return_mean"} <= metrics.keys()
        assert metrics["done"]


def test_the_best_checkpoint_loads_and_plays(tuned):
    best = tuned.get_best_result()
    assert best.metrics["return_mean"] == max(trial.metrics["return_mean"] for trial in trials(tuned))
    path = best.checkpoint.path
    algorithm = etude.load(path)
    assert (algorithm.iteration, algorithm.env_steps) == (2, 128)
    assert algorithm.config == settings_of(best.config)
    assert algorithm.evaluate(2, seed=1).episodes == 2
    assert load_meta(path)["result"]["return_mean"] == best.metrics["return_mean"]
    # Tune's own marker lies beside
    names = {os.path.splitext(name)[1] for name in os.listdir(path) if not name.startswith(".")}
    assert names == {".json", ".safetensors"}


def test_a_trial_is_what_the_algorithm_alone_would_be(tuned):
    best = tuned.get_best_result()
    alone = etude.PPO(settings_of(best.config))
    result = alone.fit(etude.Stop(env_steps=128))
    assert result.return_mean == best.metrics["return_mean"]
    assert result.losses["policy"] == best.metrics["losses/policy"]


def test_the_command_line_shows_the_best_first(tuned, capsys):
    assert report(tuned, None, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lr", "network.hidden", "return_mean", "iterations", "env_steps", "updates"]
    assert len(lines) == 7
    score = f"{tuned.get_best_result().metrics['return_mean']:,.5g}"
    assert score in lines[1]
    assert lines[-1].startswith(f"best: return_mean {score} at the end, {score} in its best checkpoint: ")
    assert lines[-1].partition(": /")[2].startswith(tuned.experiment_path.lstrip("/"))


def test_a_folder_that_holds_trials_is_not_written_over(tuned):
    with pytest.raises(SettingsError, match="already holds trials: resume them with resume_tuning"):
        tune(TINY, {}, stop=etude.Stop(updates=1), out=tuned.experiment_path)


def test_resuming_what_has_ended_gives_it_again(tuned):
    again = resume_tuning(tuned.experiment_path)
    scores = [sorted(trial.metrics["return_mean"] for trial in trials(grid)) for grid in (again, tuned)]
    assert scores[0] == scores[1]


def test_resuming_needs_trials(tmp_path):
    with pytest.raises(EngineError, match="holds no tuning to resume"):
        resume_tuning(tmp_path)


def test_the_best_checkpoint_is_none_from_before_the_first_score(cluster, tmp_path, capsys):
    config = dataclasses.replace(TINY, env="Pendulum-v1")  # whose episodes take several iterations
    found = tune(config, {"lr": [1e-3]}, stop=etude.Stop(env_steps=640), out=tmp_path / "x", verbose=0)
    (trial,) = trials(found)
    assert [load_meta(kept.path)["iteration"] for kept, _ in trial.best_checkpoints] == [1, 10]
    assert np.isnan(load_meta(trial.best_checkpoints[0][0].path)["result"]["return_mean"])
    for metric, mode in (("return_mean", "max"), ("return_max", "min")):  # that of the tuning, and another
        assert trial.get_best_checkpoint(metric, mode).path == trial.checkpoint.path
    capsys.readouterr()
    assert report(found, None, as_json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)["trials"]
    assert told["checkpoint"] == trial.checkpoint.path
    assert told["checkpoint_score"] == told["score"] == trial.metrics["return_mean"]


def test_the_score_of_the_best_checkpoint_is_its_own(cluster, tmp_path, capsys):
    how = {"metric": "updates", "mode": "min", "save_interval": 0.0, "out": tmp_path / "x", "verbose": 0}
    found = tune(TINY, {"lr": [1e-3]}, stop=etude.Stop(updates=6), **how)
    capsys.readouterr()
    assert report(found, None, as_json=False) == 0
    told, _, path = capsys.readouterr().out.splitlines()[-1].partition(": /")
    assert told == "best: updates 6 at the end, 2 in its best checkpoint"
    assert etude.load(f"/{path}").updates == 2


# -- schedulers -------------------------------------------------------------------------------------------------------


def test_asha_ends_bad_trials_early(cluster, tmp_path):
    scheduler = ray_tune.schedulers.ASHAScheduler(grace_period=1, max_t=4, reduction_factor=2)
    found = tune(
        TINY,
        {"lr": [1e-3, 1e-4, 1e-5, 1e-6]},
        metric="updates",  # equal for all, so that who comes first goes on
        scheduler=scheduler,
        max_concurrent=2,
        out=tmp_path / "asha",
        verbose=0,
    )
    iterations = sorted(trial.metrics["training_iteration"] for trial in trials(found))
    assert iterations[-1] == 4
    assert not found.errors
    assert all(trial.checkpoint for trial in trials(found))


def test_population_based_training_goes_on_from_anothers_checkpoint_with_its_own_settings(cluster, tmp_path):
    scheduler = ray_tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"lr": [1e-3, 5e-4]},
        resample_probability=1.0,
        quantile_fraction=0.5,
        synch=True,
    )
    found = tune(
        TINY,
        {"lr": [1e-6, 1e-3]},
        stop=etude.Stop(env_steps=64 * 6),
        metric="metrics/lr",  # so that it is known who is copied
        scheduler=scheduler,
        out=tmp_path / "pbt",
        verbose=0,
    )
    assert not found.errors
    for trial in trials(found):
        assert trial.config["lr"] in (1e-3, 5e-4)  # the one with 1e-6 was given others
        assert trial.metrics["metrics/lr"] == trial.config["lr"]
        assert trial.metrics["env_steps"] == 64 * 6


def test_population_based_training_keeps_what_may_yet_be_copied(cluster, tmp_path):
    scheduler = ray_tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=2, hyperparam_mutations={"lr": [1e-3, 5e-4]}
    )
    stop, out = etude.Stop(env_steps=64 * 5), tmp_path / "pbt"
    found = tune(TINY, {"lr": [1e-3]}, stop=stop, scheduler=scheduler, keep=3, save_interval=0.0, out=out, verbose=0)
    kept = {load_meta(checkpoint.path)["iteration"] for checkpoint, _ in found[0].best_checkpoints}
    assert kept == {1, 2, 3, 4, 5}


# -- interrupted, and elsewhere ---------------------------------------------------------------------------------------


def interrupt_once_there_is(pattern, folder):
    """Let Ctrl-C come as soon as a file is there that has something in it."""
    done = threading.Event()

    def wait():
        while not done.wait(0.02):
            if any(path.stat().st_size for path in folder.glob(pattern)):
                os.kill(os.getpid(), signal.SIGINT)
                return

    threading.Thread(target=wait, daemon=True).start()
    return done


# Tune leaves its own log files open when it is interrupted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_what_ctrl_c_ended_goes_on_from_its_checkpoints(cluster, tmp_path, request, capsys):
    stop, handler = etude.Stop(env_steps=64 * 300), signal.default_int_handler
    was = signal.signal(signal.SIGINT, handler)  # it is ignored where the tests run in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, was))
    done = interrupt_once_there_is("x/*/checkpoint_*/*", tmp_path)
    found = tune(TINY, {"lr": [1e-3]}, stop=stop, save_interval=0.3, out=tmp_path / "x", verbose=0)
    done.set()
    assert report(found, None, as_json=False) == 130
    text = capsys.readouterr()
    assert "interrupted" in text.out
    assert f"go on with: etude tune --resume {tmp_path / 'x'} --trust" in text.err
    assert 0 < found[0].metrics["env_steps"] < 64 * 300
    assert signal.getsignal(signal.SIGINT) == handler
    again = resume_tuning(tmp_path / "x")
    result = again[0].metrics
    assert result["done"]
    assert (result["env_steps"], result["training_iteration"]) == (64 * 300, 300)
    assert result["iterations_since_restore"] < 300
    assert etude.load(again[0].checkpoint.path).env_steps <= 64 * 300


class Halves(ray_tune.search.Searcher):
    """Suggests half the last learning rate."""

    lr = 2e-3

    def suggest(self, trial_id):
        self.lr /= 2
        return {"lr": self.lr}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass

    def save(self, checkpoint_path):
        with open(checkpoint_path, "w") as file:
            json.dump(self.lr, file)

    def restore(self, checkpoint_path):
        with open(checkpoint_path) as file:
            self.lr = json.load(file)


# Tune leaves its own log files open when it is interrupted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("search", [None, Halves()])
def test_trials_that_had_not_begun_begin_when_a_tuning_goes_on(cluster, tmp_path, request, search):
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, was))
    done = interrupt_once_there_is("x/*/checkpoint_*/*", tmp_path)
    space, count = ({}, 3) if search else ({"lr": [1e-3, 5e-4, 2.5e-4]}, 1)
    how = {"stop": etude.Stop(env_steps=64 * 100), "num_samples": count, "search": search, "max_concurrent": 1}
    found = tune(TINY, space, out=tmp_path / "x", verbose=0, **how)
    done.set()
    assert len(found) < 3
    again = resume_tuning(tmp_path / "x")
    assert not again.errors
    assert [trial.metrics["env_steps"] for trial in trials(again)] == [64 * 100] * 3
    assert sorted(trial.metrics["metrics/lr"] for trial in trials(again)) == [2.5e-4, 5e-4, 1e-3]


def test_a_trial_may_have_runners_of_its_own(cluster, tmp_path):
    config = dataclasses.replace(TINY, engine=etude.Ray(num_runners=1))
    found = tune(config, {"lr": [1e-3]}, stop=etude.Stop(env_steps=128), out=tmp_path / "x", verbose=0)
    assert not found.errors
    assert found[0].metrics["env_steps"] >= 128
    assert etude.load(found[0].checkpoint.path).env_steps >= 128


# -- a trial ----------------------------------------------------------------------------------------------------------


def new_trial(**tried):
    shared = Shared(config=TINY, stop=etude.Stop(env_steps=256))
    return Trainable({"shared": shared, **tried})


@pytest.mark.parametrize("plainly", [False, True])
def test_trials_know_an_id_that_only_this_process_has_registered(cluster, tmp_path, plainly):
    try:
        gym.register("TriedOnlyHere-v0", runner_envs.Walk, kwargs={"length": 3})
        config, stop = dataclasses.replace(TINY, env="TriedOnlyHere-v0"), etude.Stop(env_steps=128)
        if plainly:
            space = {"lr": ray_tune.grid_search([1e-3]), "shared": Shared(config=config, stop=stop)}
            run_config = ray_tune.RunConfig(storage_path=str(tmp_path), verbose=0)
            grid = ray_tune.Tuner(Trainable, param_space=space, run_config=run_config).fit()
        else:
            grid = tune(config, {"lr": [1e-3]}, stop=stop, out=tmp_path / "out", verbose=0)
    finally:
        gym.registry.pop("TriedOnlyHere-v0", None)
    assert [trial.metrics["length_mean"] for trial in trials(grid)] == [3.0]


def test_a_trial_takes_another_ones_weights_and_keeps_its_own_settings(cluster, tmp_path):
    first, second = new_trial(lr=1e-3), new_trial(lr=5e-4, clip=0.1)
    first.train()
    first.train()
    first.save(str(tmp_path / "a"))
    second.restore(str(tmp_path / "a"))
    given, taken = first.trained.module.state_dict(), second.trained.module.state_dict()
    assert all(np.array_equal(given[name], taken[name]) for name in given)
    row = second.train()
    assert (row["env_steps"], row["iteration"], row["metrics/lr"]) == (192, 3, 5e-4)
    assert second.trained.config.clip == 0.1
    assert not row["done"]
    assert second.train()["done"]
    first.stop()
    second.stop()


def test_a_trial_becomes_another(cluster):
    trial = new_trial(lr=1e-3)
    trial.train()
    assert trial.reset({"shared": Shared(config=TINY), "lr": 1e-4})
    row = trial.train()
    assert (row["iteration"], row["metrics/lr"]) == (1, 1e-4)
    trial.stop()


def test_a_trial_saves_as_often_as_it_is_told(cluster, tmp_path):
    often = Trainable({"shared": Shared(config=TINY, save_interval=0.0)})
    assert often.train()["should_checkpoint"]
    often.stop()
    seldom = new_trial()
    assert seldom.train()["should_checkpoint"]  # what is interrupted early can go on, too
    seldom.save_checkpoint(str(tmp_path / "checkpoint"))
    assert not seldom.train()["should_checkpoint"]
    seldom.stop()


def test_a_trial_saves_weights_that_were_evaluated(cluster):
    config = dataclasses.replace(TINY, evaluation_interval=3, evaluation_episodes=1)
    trial = Trainable({"shared": Shared(config=config, save_interval=0.0)})
    assert [trial.train()["should_checkpoint"] for _ in range(6)] == [True, True, True, False, False, True]
    trial.stop()
    trial = Trainable({"shared": Shared(config=config, metric="evaluation/return_mean")})
    scores = [trial.train()["evaluation/return_mean"] for _ in range(3)]
    assert np.isnan(scores).tolist() == [True, True, False]
    trial.stop()


def test_a_trial_wants_what_is_shared():
    with pytest.raises(SettingsError, match=r"`shared` is None, but must be an etude.ray.Shared\(config=...\)"):
        Trainable.default_resource_request({"lr": 1e-3})


def test_the_resources_of_a_trial():
    def request(config, **more):
        return Trainable.default_resource_request({"shared": Shared(config=config, **more)}).bundles

    assert request(TINY) == [{"CPU": 1.0}]
    assert request(etude.PPOConfig(threads=2, workers=etude.Workers(num_workers=3))) == [{"CPU": 5.0}]
    assert request(TINY, resources={"CPU": 0.5}) == [{"CPU": 0.5}]
    engine = etude.Ray(num_runners=2, num_learners=1, gpus_per_learner=0.5, num_evaluation_runners=1)
    config = etude.PPOConfig(env="CartPole-v1", evaluation_interval=1, engine=engine)
    assert request(config) == [{"CPU": 1.0}, *[{"CPU": 1.0}] * 3, {"CPU": 1.0, "GPU": 0.5}]
    assert driver_of(etude.BCConfig(data="x", num_workers=2)) == {"CPU": 3.0}


# -- data -------------------------------------------------------------------------------------------------------------


def test_offline_trials_find_relative_data(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    etude.PPO(TINY).record("data", 2, seed=1)
    etude.PPO(TINY).record("more", 3, seed=2)
    config = etude.BCConfig(data="data", batch_size=16, updates_per_iteration=2, seed=1)
    source = etude.Source("table.csv", columns={"obs": ["x", "y"], "action": "a", "done": "d"})
    (tmp_path / "table.csv").write_text("x,y,a,d\n" + "".join(f"{t}.5,1.5,{t % 2},{t // 19}\n" for t in range(20)))
    space = {"data": ["data", "more", ["data", "more"], etude.Recording.open("data"), source]}
    stop = etude.Stop(updates=2)
    found = tune(config, space, stop=stop, metric="losses/imitation", mode="min", max_concurrent=1, out="o", verbose=0)
    assert not found.errors
    assert len(found) == 5
    assert str(tmp_path / "more") in [trial.config["data"] for trial in trials(found)]
    losses = [trial.metrics["losses/imitation"] for trial in trials(found)]
    assert found.get_best_result().metrics["losses/imitation"] == min(losses)
    assert found.experiment_path == str(tmp_path / "o")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lrr": [1e-3]}, "ppo has no setting `lrr`. Nearest: `lr`"),
        ({"network.hiden": [[8]]}, "ppo.network has no setting `hiden`. Nearest: `hidden`"),
        ({"network": {"hiden": [[8]]}}, "ppo.network has no setting `hiden`. Nearest: `hidden`"),
        ({"num_envs": ray_tune.uniform(1, 4)}, "expected int. The search space gave num_envs="),
        ({"clip": [0.1, "much"]}, "The search space gave clip='much'"),
        ({"clip": [0.1, -1.0]}, "The search space gave clip=-1.0"),
        ({"lr": []}, "the search space of `lr` is an empty list: give the values to try"),
        ({"engine.num_runners": [0]}, "`engine.num_runners` is 0, but must be at least 1"),
        ({"record.path": [None, "data"]}, "`record.path`: several runs can't write one recording"),
    ],
)
def test_what_is_wrong_with_a_search_space_is_told_before_anything_starts(tmp_path, space, message):
    with pytest.raises(SettingsError) as error:
        tune(TINY, space, stop=etude.Stop(updates=1), out=tmp_path / "x")
    assert message in str(error.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stop": None}, "`stop` is not set, but trials need to know when to end"),
        ({"stop": etude.Stop()}, "`stop` is not set"),
        (
            {"metric": "return_meen"},
            "is 'return_meen', but results have no such field. Nearest: `return_mean`",
        ),
        ({"mode": "most"}, "tune.mode is 'most', expected 'max' | 'min'"),
        ({"keep": 0}, "tune.keep must be at least 1, not 0"),
        ({"save_interval": -1}, "tune.save_interval must be at least 0, not -1"),
        ({"num_samples": 0}, "tune.num_samples must be at least 1, not 0"),
    ],
)
def test_what_is_wrong_with_other_arguments(tmp_path, more, message):
    with pytest.raises(SettingsError) as error:
        tune(TINY, {"lr": [1e-3]}, **{"stop": etude.Stop(updates=1), "out": tmp_path / "x", **more})
    assert message in str(error.value)


def test_a_search_that_limits_trials_itself_takes_no_other_limit(tmp_path):
    search = ray_tune.search.basic_variant.BasicVariantGenerator()
    with pytest.raises(SettingsError, match="a BasicVariantGenerator limits trials itself: give it the limit"):
        tune(
            TINY, {"lr": Grid((1e-3, 1e-4))}, stop=etude.Stop(updates=1), search=search, max_concurrent=1, out=tmp_path
        )


def test_trials_do_not_record(tmp_path):
    config = dataclasses.replace(TINY, record=etude.RecordConfig(path=str(tmp_path / "data")))
    with pytest.raises(SettingsError, match="`record.path`: several runs can't write one recording. Leave it out"):
        tune(config, {"lr": [1e-3]}, stop=etude.Stop(updates=1), out=tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_trial_that_the_cluster_has_no_room_for(cluster, tmp_path):
    with pytest.raises(UserWarning, match="the cluster has 8 CPU in all, but 99 are asked for"):
        tune(TINY, {}, stop=etude.Stop(updates=1), resources={"CPU": 99}, out=tmp_path / "x", verbose=0)


def test_trials_that_fail_are_told(cluster, tmp_path, capsys):
    space, stop = {"env": ["CartPole-v1", "CartPol-v1"]}, etude.Stop(updates=1)
    found = tune(TINY, space, stop=stop, max_concurrent=1, out=tmp_path / "x", verbose=0)
    assert [trial.error is None for trial in trials(found)] == [True, False]
    assert "EnvError" in str(found.errors[0])
    capsys.readouterr()  # what Tune prints of the trial
    assert report(found, None, as_json=True) == 1
    good, bad = json.loads(capsys.readouterr().out)["trials"]
    assert good["error"] is None
    assert "EnvError" in bad["error"]
    assert "CartPole-v1" in bad["error"]
    assert (bad["checkpoint"], bad["result"], bad["score"]) == (None, {}, None)
    assert report(found, None, as_json=False) == 1
    assert "EnvError" in capsys.readouterr().out


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_each_algorithm_is_found_by_its_settings():
    for cls in (etude.PPO, etude.DQN, etude.SAC, etude.BC, etude.MARWIL, etude.IQL, etude.CQL, etude.TD3BC):
        assert algorithm_of(cls.Config) is cls
    with pytest.raises(SettingsError, match="OnPolicyConfig are the settings of no algorithm. Pass the right one"):
        algorithm_of(etude.OnPolicyConfig)
    assert issubclass(etude.PPO, Algorithm)


def test_flat_names():
    assert flat({"a": 1, "b": {"c": 2, "d": {"e": None, "f": "x"}}, "g": None, "h": {}}) == {
        "a": 1,
        "b/c": 2,
        "b/d/f": "x",
    }


def test_lists_are_grids_and_the_rest_stays():
    space = ray_tune.uniform(0.1, 0.3)
    found = checked(TINY, {"lr": [1e-3, 1e-4], "clip": space, "num_envs": 4, "network.hidden": (8, 8)}, "ppo")
    assert found == {"lr": {"grid_search": [1e-3, 1e-4]}, "clip": space, "num_envs": 4, "network.hidden": (8, 8)}


def test_what_words_give_is_drawn_by_tune():
    space = {
        "lr": Range(1e-4, 1e-2, is_log=True, is_whole=False),
        "num_steps": Range(64, 67, is_log=False, is_whole=True),
        "clip": Choice([0.1, 0.2]),
        "epochs": Grid([1, 2]),
    }
    found = checked(TINY, space, "ppo")
    assert found["epochs"] == {"grid_search": [1, 2]}
    assert found["clip"].categories == [0.1, 0.2]
    draws = [np.random.RandomState(seed) for seed in range(50)]
    assert {found["num_steps"].sample(random_state=draw) for draw in draws} == {64, 65, 66}
    rates = np.array([found["lr"].sample(random_state=draw) for draw in draws])
    assert ((rates >= 1e-4) & (rates < 1e-2)).all()
    assert 0.2 < (rates < 1e-3).mean() < 0.8


def test_what_tune_writes_is_plain_json_lines(tuned):
    with open(os.path.join(tuned[0].path, "result.json"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["env_steps"] for row in rows] == [64, 128]
