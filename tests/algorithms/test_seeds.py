# SPDX-License-Identifier: Apache-2.0
"""Several seeds, each a run in a process and a folder of its own."""

import dataclasses
import json
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import etude
from etude.algorithms import EvaluationConfig
from etude.algorithms.comparison import compare
from etude.algorithms.parallel import TrainingJob, cores_of, seeds_of
from etude.algorithms.run import claimed
from etude.checkpoints import save_tree
from etude.errors import SettingsError

SMALL = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=3)
SHORT = etude.Stop(env_steps=256)


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def weights(algorithm):
    return np.concatenate([p.detach().numpy().ravel() for p in algorithm.module.parameters()])


def test_each_seed_is_a_run_of_its_own_and_finished_ones_are_not_trained_again(tmp_path, capsys):
    out = tmp_path / "runs"
    with claimed(out / "seed-4"):
        runs = etude.fit_seeds(SMALL, 2, stop=SHORT, out=out, progress=True)
    assert [(run.seed, run.path) for run in runs] == [(3, str(out / "seed-3")), (4, str(out / "seed-4"))]
    assert "another process is training in it" in runs[1].error  # and the other one got through
    assert runs[1].result is None
    assert runs[0].result.env_steps == 256
    err = capsys.readouterr().err
    assert "training ppo on CartPole-v1, 2 seeds\n" in err
    assert "seed-3  done  return " in err
    alone = etude.PPO(SMALL)
    assert dataclasses.replace(alone.fit(SHORT), seconds=0).return_mean == runs[0].result.return_mean
    np.testing.assert_array_equal(weights(etude.load(out / "seed-3")), weights(alone))

    before = (out / "seed-3" / "metrics.jsonl").stat().st_mtime_ns
    again = etude.fit_seeds(SMALL, [3, 4], stop=SHORT, out=out, resume=True)
    assert (out / "seed-3" / "metrics.jsonl").stat().st_mtime_ns == before
    assert again[0].result == runs[0].result
    assert [run.error for run in again] == [None, None]
    assert again[1].result.env_steps == 256

    more = etude.fit_seeds(SMALL, [3], stop=etude.Stop(env_steps=384), out=out, resume=True)
    assert [row["env_steps"] for row in rows(out / "seed-3")] == [64, 128, 192, 256, 320, 384]
    alone.fit(etude.Stop(env_steps=384))
    np.testing.assert_array_equal(weights(etude.load(more[0].path)), weights(alone))  # as if it had never stopped
    assert [group.num_runs for group in compare([out])] == [2]


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path):
    out = tmp_path / "runs"

    def refused(match, config=SMALL, seeds=2, stop=SHORT, **how):
        with pytest.raises(SettingsError, match=match):
            etude.fit_seeds(config, seeds, stop=stop, out=out, **how)
        assert not out.exists()

    refused("lambdas and functions in functions can't be sent", dataclasses.replace(SMALL, env=lambda: None))
    refused(
        "several runs can't write one recording", dataclasses.replace(SMALL, record=etude.RecordConfig(path="data"))
    )
    refused("these runs are processes on this machine", dataclasses.replace(SMALL, engine="ray"))
    refused("must be a number .at least 1. or a list of distinct integers", seeds=[1, 1])
    refused("`seeds` is 0", seeds=0)
    refused("needs to know when to stop", stop=etude.Stop())
    refused("`max_concurrent` is 0", max_concurrent=0)
    refused("both resumed and overwritten", resume=True, overwrite=True)


def test_runs_that_are_there_are_neither_mixed_nor_lost(tmp_path):
    out = tmp_path / "runs"
    etude.PPO(SMALL).fit(SHORT, out=out / "seed-3")
    with pytest.raises(SettingsError, match=f"Continue all runs in {out} "):
        etude.fit_seeds(SMALL, 2, stop=SHORT, out=out)
    with pytest.raises(SettingsError, match="is a run of etude.algorithms.ppo:PPO, not of a2c"):
        etude.fit_seeds(etude.A2CConfig(env="CartPole-v1", seed=3), 1, stop=SHORT, out=out, resume=True)
    changed = dataclasses.replace(SMALL, lr=0.5)
    with pytest.raises(SettingsError, match=r"seed-3 is finished. It was trained with `lr` 0.0003, but it is 0.5 now"):
        etude.fit_seeds(changed, 2, stop=SHORT, out=out, resume=True)
    assert not (out / "seed-4").exists()
    with pytest.raises(SettingsError, match="seed-3 already contains a run"):
        etude.fit_seeds(SMALL, 1, stop=SHORT, out=out / "seed-3")
    assert len(rows(out / "seed-3")) == 4
    for overwrite in (False, True):
        with pytest.raises(SettingsError, match="contains the runs of several seeds or of a sweep"):
            etude.PPO(SMALL).fit(SHORT, out=out, overwrite=overwrite)


def test_a_changed_result_of_a_checkpoint_is_none(tmp_path):
    """A run is finished if the result in its checkpoint says so; one that says nonsense is trained, or refused."""
    whole = etude.PPO(SMALL).train().to_dict()
    job = TrainingJob(
        name="run",
        algorithm=etude.PPO,
        config=SMALL,
        changes={},
        out=tmp_path,
        stop=etude.Stop(env_steps=64),
        resume=True,
    )
    losses = {**whole, "losses": {"policy": "much"}}
    missing = {name: value for name, value in whole.items() if name != "seconds"}
    changed = [
        {**whole, name: value} for name in whole for value in ("x", [1], {"a": "b"}, None) if whole[name] != value
    ]
    for meta in ([], "x", None, {}, *({"result": result} for result in (3, [1], "x", losses, missing, *changed))):
        save_tree(tmp_path, {}, meta=meta)
        found = job.finished()
        assert found is None or "x" in (found.resumed, found.bottleneck)  # the fields that are text
    save_tree(tmp_path, {}, meta={"result": whole})
    assert job.finished() == etude.Result(**whole)
    evaluated = dataclasses.replace(job, config=dataclasses.replace(SMALL, evaluation_interval=1))
    assert evaluated.finished() is None  # it was interrupted in its last evaluation
    whole["evaluation"] = {"updates": whole["updates"], "return_mean": 9.0}
    save_tree(tmp_path, {}, meta={"result": whole})
    assert evaluated.finished() == etude.Result(**whole)


def test_as_many_at_once_as_the_cores_allow():
    assert cores_of(SMALL) == 1
    assert cores_of(dataclasses.replace(SMALL, num_workers=3, threads=2)) == 5
    assert (seeds_of(None, 3), seeds_of(7, 2), seeds_of(7, 0)) == ([0, 1, 2], [7, 8], [])


SCRIPT = """
import gymnasium as gym
import sys
import etude

def make():
    return gym.make("CartPole-v1")

class Halved(etude.connectors.Connector):
    def online(self, inputs):
        return inputs.with_obs({name: 0.5 * column for name, column in inputs.obs.items()})

    def offline(self, exp, module=None):
        return exp.with_steps(obs=0.5 * exp.steps["obs"])

if __name__ == "__main__":
    config = etude.PPOConfig(env=make, connectors=(Halved(),), num_envs=1, num_steps=32, epochs=1, seed=3)
    for resume in (False, True):
        runs = etude.fit_seeds(config, 1, stop=etude.Stop(env_steps=32), out=sys.argv[1], resume=resume)
        print([run.error for run in runs], runs[0].result.env_steps)
"""


def test_finished_seeds_of_a_script_with_its_own_env_and_connectors_are_resumed(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "[None] 32\n[None] 32\n", done.stderr
    saved = (tmp_path / "runs" / "seed-3" / "checkpoint.json").read_text()
    assert '"__main__:make"' in saved  # as if the script's own process had trained
    assert "__mp_main__" not in saved


def first_env():
    return gym.make("CartPole-v1")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"env": first_env}, "`env` CartPole-v1, but it is .*:first_env now"),
        ({"env": first_env}, {}, "`env` .*:first_env, but it is CartPole-v1 now"),
        ({"connectors": ("normalize_obs",)}, {}, r"`connectors` \['normalize_obs'\], but it is \[\] now"),
        ({"overrides": {"main": {"lr": 0.1}}}, {}, "`agents.overrides` .*0.1.*, but it is None now"),
        ({"evaluation": EvaluationConfig(episodes=3)}, {}, "`evaluation.episodes` 3, but it is .* now"),
        ({"workers": etude.Workers(num_workers=1)}, {}, None),
    ],
)
def test_settings_of_finished_seeds_are_kept(before, after, said, tmp_path):
    changed = {"env": "CartPole-v1", "workers": etude.Workers(), **before}
    etude.PPO(dataclasses.replace(SMALL, **changed)).fit(SHORT, out=tmp_path / "seed-3")
    config = dataclasses.replace(SMALL, **after)
    if said is None:
        assert [run.error for run in etude.fit_seeds(config, 1, stop=SHORT, out=tmp_path, resume=True)] == [None]
        return
    with pytest.raises(SettingsError, match=f"seed-3 is finished. It was trained with {said}"):
        etude.fit_seeds(config, 1, stop=SHORT, out=tmp_path, resume=True)
