# SPDX-License-Identifier: Apache-2.0
"""What is learned from episodes whose env fails: every step before, and nothing else."""

from collections import defaultdict
from typing import Any

import failing_envs as envs
import numpy as np
import pytest
from failing_envs import LENGTH, fails_at

import etude
from etude.envs import InlineArena, PoolArena, Workers
from etude.experience import Experience
from etude.modules import make_module
from etude.recordings import validate
from etude.runners import Runner

ANY = {"max_failure_rate": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "thread": {"num_workers": 2, "envs_per_worker": 2, "mode": "thread"},
    "process": {"num_workers": 2, "envs_per_worker": 2},
}
CASES = [
    *((mode, env) for mode in MODES for env in (envs.Failing, envs.GivingNaN, envs.GivingShape)),
    ("process", envs.Dying),
    *(("sync", env) for env in (envs.GivingInf, envs.GivingScalar, envs.GivingReward)),
]


def made(mode: str, env: Any, **options: Any) -> Runner:
    workers = Workers(**MODES[mode], **ANY)
    arena = PoolArena(env, workers) if workers.num_workers else InlineArena(env, 4, workers)
    kind = arena.kinds[0]
    module = make_module(None, kind.obs_space, kind.action_space, etude.NetworkConfig(hidden=(4,)))
    return Runner(arena, module, seed=1, **options)


def episodes_of(parts: list[Experience]) -> dict[tuple[int, int], list[tuple[Experience, int]]]:
    """By key and number: the segments of each episode, in order."""
    found = defaultdict(list)
    for exp in parts:
        exp.validate()
        for i in range(exp.num_segments):
            key, number, _ = exp.steps["obs"][exp.offsets[i]].astype(int).tolist()
            found[key, number].append((exp, i))
    return found


@pytest.mark.parametrize(("mode", "env"), CASES)
def test_steps_before_a_failure_are_kept_and_end_truncated(mode: str, env: Any) -> None:
    runner = made(mode, env)
    parts = [runner.collect(num_steps=count) for count in (150, 1, 7, 300, 142)]
    assert [exp.num_steps for exp in parts] == [150, 1, 7, 300, 142]
    cut = whole = 0
    ids = set()
    for (key, number), segments in episodes_of(parts).items():
        t, failure = 0, fails_at(key, number)
        last, i = segments[-1]
        for exp, j in segments:
            rows = slice(exp.offsets[j], exp.offsets[j + 1])
            steps = np.arange(t, t + rows.stop - rows.start)
            np.testing.assert_array_equal(exp.steps["obs"][rows], [[key, number, step] for step in steps])
            np.testing.assert_array_equal(exp.steps["reward"][rows], steps + 1)
            assert exp.segments.t_start[j] == t
            t = int(steps[-1]) + 1
            assert exp.segments.has_final_obs[j]
            assert exp.final_obs["obs"][j].tolist() == [key, number, t]
            ids.add((exp.segments.episode_id[j], key, number))
        assert t <= min(failure, LENGTH)
        assert not any(exp.segments.done[j] for exp, j in segments[:-1])
        assert bool(last.segments.terminated[i]) == (t == LENGTH)
        if last.segments.truncated[i]:  # its worker's other envs fail with the one that dies
            assert t == failure or env is envs.Dying
        cut += bool(last.segments.truncated[i])
        whole += bool(last.segments.terminated[i])
    assert len(ids) == len({name for name, _, _ in ids}) == len({(key, number) for _, key, number in ids})
    assert cut > 15
    assert whole > 8
    finished, stats = runner.take_finished(), runner.stats()
    assert finished.lengths.tolist() == [LENGTH] * whole  # cut ones count for no return
    assert finished.returns.tolist() == [LENGTH * (LENGTH + 1) / 2] * whole
    assert stats["faulty_episodes"] >= cut  # some fail before any step
    assert stats["lost_steps"] >= stats["restarts"] >= 15
    runner.close()


def test_long_episodes_are_not_favoured_less_than_short_ones() -> None:
    """Each step fails alike, so that each t is as frequent among the steps as it is in the env."""
    runner = made("sync", envs.Failing)
    exp = runner.collect(num_steps=6000)
    t = exp.steps["obs"][:, 2].astype(int)
    seen = np.bincount(t, minlength=LENGTH)
    keys = {tuple(row) for row in exp.steps["obs"][:, :2].astype(int).tolist()}
    expected = np.array([sum(fails_at(*key) > step for key in keys) for step in range(LENGTH)])
    assert (np.abs(seen - expected) <= 4).all()  # but for those that run
    runner.close()


@pytest.mark.parametrize("mode", ["sync", "process"])
def test_whole_episodes_end_where_the_env_fails(mode: str) -> None:
    runner = made(mode, envs.Failing)
    parts = [runner.collect(num_steps=100, whole_episodes=True) for _ in range(4)]
    cut = 0
    for (key, number), segments in episodes_of(parts).items():
        ((exp, i),) = segments
        assert exp.segments.done[i]
        assert exp.lengths[i] == min(fails_at(key, number), LENGTH)
        cut += bool(exp.segments.truncated[i])
    assert cut > 5
    assert all(exp.num_steps >= 100 for exp in parts)
    runner.close()


def test_episodes_that_were_asked_for_are_whole() -> None:
    runner = made("sync", envs.Failing)
    exp = runner.collect(num_episodes=20)
    assert exp.segments.terminated.all()
    assert exp.lengths.tolist() == [LENGTH] * 20
    assert runner.stats()["faulty_episodes"] > 10
    runner.close()


class NeverDone(envs.Failing):
    """Fails in each episode, at its second step."""

    def step(self, action: Any) -> Any:
        if self.t == 1:
            raise RuntimeError("out of order")
        return super().step(action)


def test_episodes_are_not_tried_without_end() -> None:
    runner = made("sync", NeverDone)
    assert runner.collect(num_episodes=6).num_segments == 0
    assert runner.stats()["faulty_episodes"] >= 60
    runner.close()
    config = etude.PPOConfig(env=NeverDone, workers=Workers(**ANY), num_envs=2, num_steps=64, seed=1)
    algorithm = etude.PPO(config)
    found = algorithm.evaluate(3)
    assert (found.episodes, found.env_steps) == (0, 0)
    assert np.isnan(found.return_mean)
    assert found.faulty_episodes >= 30
    assert algorithm.train().env_steps == 64
    algorithm.close()


def test_it_is_learned_from_and_recorded_as_any_other_truncation(tmp_path: Any) -> None:
    record = etude.RecordConfig(path=str(tmp_path), layout="table")
    own: dict[str, Any] = {"num_envs": 4, "num_steps": 256, "minibatch_size": 64, "epochs": 1, "seed": 1}
    algorithm = etude.PPO(etude.PPOConfig(env=envs.Failing, workers=Workers(**ANY), record=record, **own))
    results = [algorithm.train() for _ in range(3)]
    algorithm.close()
    assert [result.env_steps for result in results] == [256, 512, 768]
    assert sum(result.metrics["lost_steps"] for result in results) > 20
    assert sum(result.metrics["restarts"] for result in results) == sum(r.metrics["lost_steps"] for r in results)
    assert results[-1].length_mean == LENGTH
    recording = etude.Recording.open(tmp_path)
    assert validate(tmp_path).ok
    exp = recording.read()
    assert exp.segments.has_final_obs[exp.segments.truncated].all()
    assert exp.segments.truncated.sum() > 20


class OnceWrong(envs.Failing):
    """One of its copies gives something wrong once, in its fifth step."""

    wrong = 0
    value: Any = None

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.is_first and self.t == 5:
            OnceWrong.wrong += 1
            obs = self.value
        return obs, reward, terminated, truncated, info

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.how = "not at all"
        OnceWrong.made += 1
        self.is_first = OnceWrong.made == 2


@pytest.mark.parametrize(
    "value",
    [
        np.full(3, np.nan), np.full(3, np.inf), np.zeros(1), np.zeros((1, 3)), np.zeros((3, 1)), 0.5,
        None, "text", [1.0, 2.0], np.zeros(3, complex), {"obs": 1},
    ],
)  # fmt: skip
def test_one_env_that_is_wrong_once_does_not_end_the_run(value: Any) -> None:
    OnceWrong.made = OnceWrong.wrong = 0
    OnceWrong.value = value
    runner = made("sync", OnceWrong)
    exp = runner.collect(num_steps=100)
    assert OnceWrong.wrong == 1
    assert exp.segments.truncated.sum() == 1
    assert exp.lengths[exp.segments.truncated].tolist() == [4]
    assert runner.stats()["lost_steps"] == 1
    runner.close()
