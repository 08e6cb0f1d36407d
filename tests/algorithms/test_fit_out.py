# SPDX-License-Identifier: Apache-2.0
"""Runs from Python leave what runs from the shell leave."""

import dataclasses
import json
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import etude
from etude.algorithms.run import claimed
from etude.checkpoints import load_meta, tree
from etude.errors import SettingsError

SMALL = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=1)


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(algorithm):
    return np.concatenate([p.detach().numpy().ravel() for p in algorithm.module.parameters()])


def test_a_run_leaves_metrics_events_and_a_checkpoint_to_go_on_from(tmp_path):
    out = tmp_path / "run"
    algorithm = etude.PPO(SMALL)
    result = algorithm.fit(etude.Stop(updates=4), out=out)
    assert [row["iteration"] for row in rows(out)] == [1, 2]
    assert load_meta(out)["result"]["updates"] == result.updates == 4
    assert list((out / "tensorboard").iterdir())
    lost = etude.metrics.TensorBoard(out / "tensorboard")
    lost.write({"return_mean": -1.0}, result.env_steps + 1)  # as of a run that was killed before it was saved
    lost.close()
    again = etude.load(out)
    again.fit(etude.Stop(updates=8), out=out)
    assert [row["iteration"] for row in rows(out)] == [1, 2, 3, 4]
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("env_steps")] == [row["env_steps"] for row in rows(out)]
    assert -1.0 not in [event.value for event in events.Scalars("return_mean")]
    whole = etude.PPO(SMALL)
    whole.fit(etude.Stop(updates=8))
    np.testing.assert_array_equal(weights(again), weights(whole))  # as if it had never stopped


def test_a_resumed_run_does_not_write_its_last_evaluation_again(tmp_path):
    config, steps = dataclasses.replace(SMALL, evaluation_interval=2), SMALL.num_steps
    etude.PPO(config).fit(etude.Stop(env_steps=2 * steps), out=tmp_path)
    etude.load(tmp_path).fit(etude.Stop(env_steps=4 * steps), out=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("evaluation/return_mean")] == [2 * steps, 4 * steps]


def test_a_run_that_saved_nothing_is_not_to_be_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(SettingsError, match="It has saved nothing yet: replace it"):
        etude.PPO(SMALL).fit(etude.Stop(updates=2), out=tmp_path)


def test_a_run_is_not_mixed_with_another(tmp_path):
    out = tmp_path / "run"
    etude.PPO(SMALL).fit(etude.Stop(updates=2), out=out, log=())
    other = etude.PPO(SMALL)
    with pytest.raises(SettingsError, match="already contains a run"):
        other.fit(etude.Stop(updates=2), out=out)
    assert other.iteration == 0
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events.mine").write_text("not of a run")
    other.fit(etude.Stop(updates=4), out=out, overwrite=True)
    assert (out / "tensorboard" / "events.mine").exists()
    assert load_meta(out)["iteration"] == 2
    with claimed(out), pytest.raises(SettingsError, match="another process is training in it"):
        other.fit(etude.Stop(updates=6), out=out)
    with pytest.raises(SettingsError, match="a folder on this machine"):
        other.fit(etude.Stop(updates=6), out="s3://bucket/run")


def test_what_is_logged_and_which_checkpoints_are_kept(tmp_path):
    out = tmp_path / "run"
    kept = etude.Checkpoints(out / "checkpoints", keep_last=2, keep_best=0)
    etude.PPO(SMALL).fit(etude.Stop(updates=8), out=out, log=("csv",), checkpoints=kept, save_interval=0)
    assert [entry.iteration for entry in kept.all()] == [3, 4]
    assert len((out / "metrics.csv").read_text().splitlines()) == 5
    assert not (out / "tensorboard").exists()


def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    real, failures = tree.write_arrays, iter([True, True, False, False, False])

    def write(path, arrays):
        if next(failures):
            raise OSError(28, "No space left on device")
        return real(path, arrays)

    monkeypatch.setattr("etude.checkpoints.tree.write_arrays", write)
    result = etude.PPO(SMALL).fit(etude.Stop(updates=8), out=tmp_path / "run", log=(), save_interval=0)
    assert (result.iteration, load_meta(tmp_path / "run")["iteration"]) == (4, 4)
    assert caplog.text.count("No space left on device. The run goes on, and is saved again later") == 2
    monkeypatch.setattr("etude.checkpoints.tree.write_arrays", write_nothing)
    with pytest.raises(etude.CheckpointError, match="No space left on device"):
        etude.PPO(SMALL).fit(etude.Stop(updates=2), out=tmp_path / "other", log=(), save_interval=3600)


def write_nothing(path, arrays):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("log", ["csv", ("csv", "jsonls")])
def test_a_sink_that_does_not_exist_is_refused_before_training(log, tmp_path):
    with pytest.raises(etude.SettingsError, match=r"`log` is .*, but must be a tuple of names. (There are|Nearest)"):
        etude.PPO(SMALL).fit(etude.Stop(updates=8), out=tmp_path / "run", log=log)


def test_progress_is_told_on_standard_error(capsys):
    etude.PPO(SMALL).fit(etude.Stop(updates=2), progress=True)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "training ppo on CartPole-v1"
    assert "updates 2" in last
    etude.PPO(SMALL).fit(etude.Stop(updates=2))
    assert capsys.readouterr().err == ""


class Stopping(etude.Callback):
    """Interrupts as Ctrl-C does, at the end of the third episode."""

    ended = 0

    def on_episode_end(self, episode):
        Stopping.ended += 1
        if Stopping.ended == 3:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_ctrl_c_saves_and_is_raised(tmp_path):
    Stopping.ended = 0
    before = signal.getsignal(signal.SIGINT)
    algorithm = etude.PPO(dataclasses.replace(SMALL, callbacks=(Stopping,)))
    with pytest.raises(KeyboardInterrupt, match="saved"):
        algorithm.fit(etude.Stop(env_steps=10**9), out=tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    assert load_meta(tmp_path / "run")["iteration"] == algorithm.iteration >= 1
    assert len(rows(tmp_path / "run")) == algorithm.iteration


class Wanders(gym.Wrapper):
    """Changes the current folder, as simulators do that load files from it."""

    def __init__(self, folder, when, render_mode=None):
        super().__init__(gym.make("CartPole-v1", render_mode=render_mode))
        self.folder, self.when = folder, when
        if when == "made":
            os.chdir(folder)

    def reset(self, **how):
        if self.when == "reset":
            os.chdir(self.folder)
        return super().reset(**how)


@pytest.mark.parametrize("when", ["made", "reset"])
def test_an_env_may_change_the_current_folder(when, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = dataclasses.replace(
        SMALL, env=lambda: Wanders(tmp_path / "there", when), record=etude.RecordConfig(path="data")
    )
    algorithm = etude.PPO(config)
    os.chdir(tmp_path / "here")
    kept = etude.Checkpoints("run/checkpoints", keep_last=1)
    algorithm.fit(etude.Stop(updates=4), out="run", checkpoints=kept, save_interval=0.0)
    assert load_meta(tmp_path / "here" / "run")["run"]["checkpoints"] == kept.rule()
    assert etude.load(kept.latest(), env="CartPole-v1").iteration == 2
    os.chdir(tmp_path / "here")
    algorithm.record("played", 2)
    os.chdir(tmp_path / "here")
    films = lambda render_mode: Wanders(tmp_path / "there", when, render_mode)  # noqa: E731
    etude.clip(algorithm, films, "clip.gif", size="20x20")
    algorithm.close()
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"run", "data", "played", "clip.gif"}
    assert len(rows(tmp_path / "here" / "run")) == 2
    assert etude.Recording.open(tmp_path / "here" / "data").num_steps == 128
    assert not list((tmp_path / "there").iterdir())
