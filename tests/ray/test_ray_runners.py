# SPDX-License-Identifier: Apache-2.0
"""Runners on a cluster give what a runner here gives."""

import copy
import functools
import math
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import runner_envs
import tensor_envs
import torch
from signalling import Signalling

import etude
from etude import columns as col
from etude.algorithms import Ray
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.dqn import DQN, DQNConfig
from etude.algorithms.ppo import PPO, PPOConfig
from etude.algorithms.results import Stop
from etude.errors import DataError, EngineError
from etude.experience import Experience
from etude.ray import runners
from etude.ray.policies import Broadcast
from etude.recordings import Recording, validate

pytestmark = pytest.mark.usefixtures("cluster")

SMALL: dict[str, Any] = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "epochs": 1, "seed": 1}


class BackgroundEvaluation(PPO):
    """Its runners go on while it learns."""

    collects_in_background = True


@pytest.fixture(autouse=True, scope="module")
def envs_by_value() -> Iterator[None]:
    """Runners need not find the module of these envs."""
    ray.cloudpickle.register_pickle_by_value(runner_envs)
    yield
    ray.cloudpickle.unregister_pickle_by_value(runner_envs)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no runner counts as late."""
    monkeypatch.setattr(runners, "SLACK", 60.0)


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes algorithms, and closes them."""
    there: list[Algorithm[Any]] = []

    def make(engine: Any, cls: Any = PPO, env: Any = runner_envs.Walk, **settings: Any) -> Any:
        there.append(cls(PPOConfig(env=env, engine=engine, **SMALL | settings)))
        return there[-1]

    yield make
    for algorithm in there:
        algorithm.close()


def members(algorithm: Any) -> list[Any]:
    return algorithm.runner.members  # type: ignore[no-any-return]


def same(a: Experience, b: Experience) -> None:
    """Bit for bit."""
    assert a.steps.keys() == b.steps.keys()
    for name, column in a.steps.items():
        np.testing.assert_array_equal(column, b.steps[name], err_msg=name)
        assert b.steps[name].flags.writeable
    np.testing.assert_array_equal(a.offsets, b.offsets)
    for name in ("episode_id", "agent_id", "module_id", "t_start", "terminated", "truncated", "has_final_obs"):
        np.testing.assert_array_equal(getattr(a.segments, name), getattr(b.segments, name), err_msg=name)
    for name, column in a.final_obs.items():
        np.testing.assert_array_equal(column, b.final_obs[name], err_msg=name)


def weights(algorithm: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in algorithm.module.state_dict().items()}


def test_a_run_with_one_runner_is_the_run_without_a_cluster(made: Any) -> None:
    settings = {"connectors": ("frame_stack:2", "normalize_obs"), "lr": ((0, 1e-2), (1000, 1e-3))}
    here = made("local", **settings)
    there = made(Ray(num_runners=1, fragment_steps=64), **settings)
    for _ in range(4):
        a, b = here.train(), there.train()
        assert (a.losses, a.return_mean, a.episodes, a.env_steps) == (b.losses, b.return_mean, b.episodes, b.env_steps)
    for name, value in weights(here).items():
        np.testing.assert_array_equal(value, weights(there)[name], err_msg=name)
    same(here.runner.collect_each(num_steps=64)[None], there.runner.collect_each(num_steps=64)[None])


def test_experience_of_tensors_comes_in_numpy(made: Any) -> None:
    ray.cloudpickle.register_pickle_by_value(tensor_envs)
    try:
        one, two = (
            made(engine, env=tensor_envs.Follow, num_envs=8)
            for engine in ("local", Ray(num_runners=1, fragment_steps=64))
        )
        here, there = (algorithm.runner.collect_each(num_steps=64)[None] for algorithm in (one, two))
        assert isinstance(here.steps[col.OBS], torch.Tensor)
        assert isinstance(there.steps[col.OBS], np.ndarray)
        order = [there.segments.episode_id.tolist().index(name) for name in here.segments.episode_id]
        same(here.numpy(), there.select(order))
        assert all(np.isfinite(loss) for loss in two.train().losses.values())
    finally:
        ray.cloudpickle.unregister_pickle_by_value(tensor_envs)


def test_fragments_that_go_on_are_put_together(made: Any) -> None:
    runner = made("local").runner
    pieces = [runner.collect_each(num_steps=num)[None] for num in (20, 20, 20, 4)]
    exp = made(Ray(num_runners=1, fragment_steps=20)).runner.collect_each(num_steps=64)[None]
    exp.validate()
    names = exp.segments.episode_id.tolist()
    assert len(names) == len({*names}) == len({name for piece in pieces for name in piece.segments.episode_id})
    for i, name in enumerate(names):
        own = [piece[k] for piece in pieces for k in np.flatnonzero(piece.segments.episode_id == name)]
        for column in exp.steps:
            np.testing.assert_array_equal(exp[i].steps[column], np.concatenate([part.steps[column] for part in own]))
        np.testing.assert_array_equal(exp[i].final_obs[col.OBS], own[-1].final_obs[col.OBS])
        assert exp.segments.done[i] == own[-1].segments.done[0]


def test_the_first_runner_acts_as_one_here_and_each_has_its_own_stream(made: Any) -> None:
    here, there = made("local"), made(Ray(num_runners=2, fragment_steps=32))
    for _ in range(3):
        parts = there.runner.collect_each(num_steps=64)[None]
        own = here.runner.collect_each(num_steps=32)[None]
        assert parts.num_steps == 64
        same(own, parts[: own.num_segments])
        other = parts[own.num_segments :]
        assert not {*own.segments.episode_id} & {*other.segments.episode_id}
        assert not np.isin(other.steps[col.OBS], own.steps[col.OBS]).any()
    again = made(Ray(num_runners=2, fragment_steps=32))
    first = again.runner.collect_each(num_steps=64)[None]
    assert {*parts.segments.episode_id[:1]} != {*first.segments.episode_id[:1]}
    for _ in range(2):
        last = again.runner.collect_each(num_steps=64)[None]
    same(last, parts)  # the same seed, the same experience


def test_as_many_steps_come_as_are_asked_for(made: Any) -> None:
    runner = made(Ray(num_runners=3)).runner
    total = 0
    for num in (100, 1, 64, 7):
        total += num
        assert runner.collect_each(num_steps=num)[None].num_steps == num
        assert (runner.env_steps, runner.agent_steps) == (total, total)
    finished = runner.take_finished()
    assert len(finished.returns) == len(finished.envs) > 0
    assert len({*zip(finished.envs.tolist(), finished.numbers.tolist(), strict=True)}) == len(finished.envs)
    assert set(finished.envs.tolist()) <= set(range(6))
    assert runner.turns >= total // 2
    assert runner.times["env"] > 0
    with pytest.raises(EngineError, match="give num_steps, not num_episodes"):
        runner.collect_each(num_episodes=3)


def test_two_agents_with_a_module_each(made: Any) -> None:
    settings: dict[str, Any] = {"env": Signalling, "modules": ("speaker", "listener")}
    here, there = made("local", **settings), made(Ray(num_runners=1, fragment_steps=64), **settings)
    for _ in range(2):
        a, b = here.train(), there.train()
        assert (a.losses, a.env_steps, a.agent_steps) == (b.losses, b.env_steps, b.agent_steps)
        assert a.module_returns == b.module_returns
    there.add_module("another", like="listener", module_of=runner_envs.another_listens)
    result = there.train()
    assert "another/policy" in result.losses
    assert set(there.runner.collect_each(num_steps=64)) == {"speaker", "another"}
    there.remove_module("listener", module_of=runner_envs.another_listens)
    there.train()


def test_only_episodes_that_have_ended(made: Any) -> None:
    algorithm = made(Ray(num_runners=2), whole_episodes=True)
    for _ in range(3):
        exp = algorithm.runner.collect_each(num_steps=64, whole_episodes=True)[None]
        assert exp.num_steps >= 64
        assert exp.segments.done.all()
        assert not exp.segments.t_start.any()
        assert (exp.lengths == 5).all()


def test_runners_act_by_the_newest_weights_however_they_came(made: Any) -> None:
    algorithm = made(Ray(num_runners=1), callbacks=(runner_envs.Noting(),))
    assert algorithm.train().custom["length"]["mean"] == 5  # what callbacks log, there, comes here
    with torch.no_grad():
        for parameter in algorithm.module.parameters():
            parameter.zero_()
    exp = algorithm.runner.collect_each(num_steps=64)[None]
    np.testing.assert_allclose(exp.steps[col.LOGP], math.log(0.5), rtol=1e-6)
    assert algorithm.runner.stats()["policy_lag"] == 0
    # an earlier state is acted by, too
    state = copy.deepcopy(algorithm.get_state("modules", None) | algorithm.get_state("learners", None))
    for _ in range(3):
        algorithm.train()
    exp = algorithm.runner.collect_each(num_steps=64)[None]
    assert np.abs(exp.steps[col.LOGP] - math.log(0.5)).min() > 1e-6
    algorithm.set_state(state)
    exp = algorithm.runner.collect_each(num_steps=64)[None]
    np.testing.assert_allclose(exp.steps[col.LOGP], math.log(0.5), rtol=1e-6)


def test_weights_are_stored_again_only_if_one_of_them_changed(made: Any) -> None:
    algorithm = made(Ray(num_runners=1))
    broadcast = Broadcast()
    for version in (1, 1):
        broadcast.refresh(algorithm)
        assert broadcast.version == version
    weight = next(algorithm.module.parameters()).detach()
    weight[:2] = weight[:2].flip(0).clone()  # a sum over them stays
    for version in (2, 2):
        broadcast.refresh(algorithm)
        assert broadcast.version == version
    np.testing.assert_array_equal(next(iter(ray.get(broadcast.ref).values["main"].values())), weight)


def test_exploration_is_the_learners(made: Any) -> None:
    config = DQNConfig(env=runner_envs.Walk, epsilon=1.0, seed=1, num_envs=2, engine=Ray(num_runners=1))
    algorithm = DQN(config)
    try:
        algorithm.before_collect(0)
        exp = algorithm.runner.collect_each(num_steps=64)[None]
        np.testing.assert_allclose(exp.steps[col.LOGP], math.log(0.5), rtol=1e-6)
    finally:
        algorithm.close()


def test_an_id_that_only_this_process_has_registered(made: Any) -> None:
    try:
        gym.register("OnlyHere-v0", runner_envs.Walk, kwargs={"length": 3})
        algorithm = made(Ray(num_runners=1, num_evaluation_runners=1), env="OnlyHere-v0", evaluation_interval=1)
        results = [algorithm.train() for _ in range(2)]
    finally:
        gym.registry.pop("OnlyHere-v0", None)
    assert results[0].length_mean == 3
    assert results[1].evaluation["length_mean"] == 3


def test_a_runner_that_lags_is_not_waited_for(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "SLACK", 0.1)
    env = functools.partial(runner_envs.Gated, str(tmp_path), 40)
    algorithm = made(Ray(num_runners=2, fragment_steps=16), env=env)
    for i in range(1, 5):
        assert algorithm.train().env_steps >= 64 * i  # the other makes up for it
    behind = sum(len(member.requests) for member in members(algorithm))
    assert behind > 0
    assert [member.is_late for member in members(algorithm)].count(True) == 1
    (tmp_path / "go").touch()
    late = next(member for member in members(algorithm) if member.is_late)
    ray.wait([late.requests[0].answer])
    before = algorithm.env_steps
    result = algorithm.train()
    assert result.metrics["lost_fragments"] == 0
    assert result.metrics["policy_lag"] > 0  # what it had made by older weights counts now
    assert 64 <= result.env_steps - before <= 64 + 16


def test_a_collection_goes_on_with_what_has_come(made: Any, tmp_path: Path) -> None:
    env = functools.partial(runner_envs.Gated, str(tmp_path), 20)
    algorithm = made(Ray(num_runners=1, fragment_steps=16, sample_timeout=0.5), env=env)
    result = algorithm.train()
    assert 16 <= result.env_steps < 64
    assert result.metrics["sample_timeouts"] == 1
    (tmp_path / "go").touch()
    assert algorithm.train().env_steps >= result.env_steps + 64


def test_beside_the_learner_runners_stop_at_the_bound(made: Any) -> None:
    algorithm = made(Ray(num_runners=2, in_flight=3), cls=BackgroundEvaluation)
    algorithm.train()
    for _ in range(3):
        for member in members(algorithm):
            assert len(member.requests) == 3
            ray.wait([request.answer for request in member.requests], num_returns=3)
            turns = ray.get(member.actor.turns.remote())
            assert turns % 32 == 1  # two envs, and 64 steps a fragment: all are made, and none more
        result = algorithm.train()
        assert result.metrics["lost_fragments"] == 0
    assert result.env_steps == 4 * 64
    # nothing is thrown away: what was made first comes first, though its weights are older
    assert result.metrics["policy_lag"] >= 1


def collected(exp: Experience) -> dict[Any, Any]:
    """Each step that is not lookback, by episode and t; an episode's id without the suffix of a recording."""
    segment, t, found = exp.segment_of_step(), exp.t(), dict[Any, Any]()
    for row in np.flatnonzero(exp.trained()):
        key = (exp.segments.episode_id[segment[row]].partition("+")[0], int(t[row]))
        assert key not in found
        found[key] = (exp.steps[col.OBS][row].tolist(), exp.steps[col.ACTION][row].tolist())
    return found


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("cls", [PPO, BackgroundEvaluation])
def test_all_that_is_collected_is_recorded_once(made: Any, tmp_path: Path, layout: Any, cls: Any) -> None:
    path, seen = tmp_path / "run", dict[Any, Any]()

    class Keeping(cls):  # type: ignore[misc]
        def collect(self, **how: Any) -> Any:
            parts = super().collect(**how)
            for exp in parts.values():
                own = collected(exp)
                assert not own.keys() & seen.keys()
                seen.update(own)
            return parts

    record = etude.RecordConfig(path=str(path), layout=layout)
    engine = Ray(num_runners=2, fragment_steps=32)
    algorithm = made(engine, cls=Keeping, record=record, connectors=("normalize_obs", "frame_stack:3"))
    for _ in range(3):
        algorithm.train()
    algorithm.close()
    recording = Recording.open(path)
    exp = recording.read()
    assert collected(exp) == seen
    assert recording.num_steps == algorithm.env_steps == len(seen) == 192
    assert recording.num_episodes == len({*exp.segments.episode_id})
    assert "filter" in recording.header.meta
    with pytest.raises(DataError, match="holds a recording"):
        made(engine, record=record).train()
    again = made(engine, record=etude.RecordConfig(path=str(path), layout=layout, append=True))
    again.train()
    again.close()
    assert Recording.open(path).num_steps == 256
    assert validate(path).ok


@pytest.mark.parametrize("layout", ["episodes", "table"])
def test_a_run_goes_on_with_its_recording_in_other_episodes(made: Any, tmp_path: Path, layout: Any) -> None:
    path, saved = tmp_path / "run", tmp_path / "saved"
    record = etude.RecordConfig(path=str(path), layout=layout)
    algorithm = made(Ray(num_runners=2), record=record, env="CartPole-v1")
    algorithm.train()
    algorithm.save(saved)
    assert (Recording.open(path).num_steps == 64) == (layout == "table")  # all is on the disk by then
    copy_of_files = {file: file.read_bytes() for file in path.glob("*.parquet")}
    algorithm.train()
    algorithm.close()
    # of the run that went on from there, something was written before it was lost
    before = {*Recording.open(path).read().segments.episode_id}
    steps = Recording.open(path).num_steps
    assert steps == 128
    assert len(before) > len(copy_of_files)
    for i in range(2):
        loaded = etude.load(saved, engine=Ray(num_runners=2))
        result = loaded.train()
        loaded.close()
        assert result.resumed == "new episodes: those of remote runners are not saved in checkpoints"
        assert result.env_steps == 128
        assert Recording.open(path).num_steps == 128 + 64 * (i + 1)
        ids = {*Recording.open(path).read().segments.episode_id}
        assert len(ids - before) >= 2
        before = ids
    assert validate(path).ok


def test_a_run_that_began_without_a_cluster_goes_on_with_its_recording_there(made: Any, tmp_path: Path) -> None:
    """Its first runner gives its episodes the names that they had here; none has ended when the run is saved."""
    path, saved = tmp_path / "run", tmp_path / "saved"
    settings = {"num_envs": 2, "num_steps": 8, "minibatch_size": 8, "record": etude.RecordConfig(path=str(path))}
    algorithm = made("local", env="CartPole-v1", **settings)
    algorithm.train()
    algorithm.save(saved)
    shutil.copytree(path, tmp_path / "then")
    algorithm.close()
    shutil.rmtree(path)
    (tmp_path / "then").rename(path)  # as if the process had been killed
    loaded = etude.load(saved, engine=Ray(num_runners=1))
    loaded.train()
    loaded.save(saved)
    loaded.close()
    back = etude.load(saved, engine="local")
    back.train()
    back.close()
    exp = Recording.open(path).read()
    assert exp.num_steps == 24
    assert len({*exp.segments.episode_id}) == 6
    assert validate(path).ok


def test_a_full_disk_ends_the_run_and_spares_what_is_there(made: Any, tmp_path: Path) -> None:
    record = etude.RecordConfig(path=str(tmp_path / "run"), layout="table", max_rows_per_file=64)
    algorithm = made(Ray(num_runners=1), record=record)
    algorithm.fit(Stop(env_steps=64 * 3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        with pytest.raises(DataError, match=r"run: writing failed after \d+ rows were on the disk.*large"):
            algorithm.fit(Stop(env_steps=64 * 20))
        with pytest.raises(DataError):
            algorithm.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    there = Recording.open(tmp_path / "run")
    assert there.num_steps >= 64
    there.read().validate()


def test_evaluations_by_runners_of_their_own(made: Any) -> None:
    algorithm = made(Ray(num_runners=1, num_evaluation_runners=2))
    evaluators = algorithm.engine.evaluators
    assert evaluators.next(5, seed=3) is None
    updates = algorithm.updates
    algorithm.train()
    evaluation, finished, _ = evaluators.next(4, seed=3)
    assert evaluation.episodes == len(finished.returns) == 5
    assert evaluation.updates == updates < algorithm.updates
    assert evaluation.length_mean == 5
    ray.kill(evaluators.members[0].actor)
    first, second, third = (evaluators.next(4, seed=3)[0], evaluators.next(4, seed=3)[0], evaluators.finished()[0])
    # its part of the first is lost, or of the second if it had played that already
    assert (first.episodes, second.episodes, third.episodes) in ((2, 4, 4), (4, 2, 4))
    assert evaluators.restarts == 1


def test_evaluations_elsewhere_leave_out_what_single_modules_drop(made: Any) -> None:
    seen = gym.spaces.Dict({"place": runner_envs.Walk().observation_space, "told": gym.spaces.Text(5)})

    def env() -> Any:
        return gym.wrappers.TransformObservation(runner_envs.Walk(), lambda obs: {"place": obs, "told": "go"}, seen)

    own = {name: {"connectors": ("drop:told",)} for name in ("one", "other")}
    agents = {"modules": tuple(own), "module_of": lambda agent, episode: "one", "overrides": own}
    algorithm = made(Ray(num_runners=1, num_evaluation_runners=1), env=env, **agents)
    algorithm.engine.evaluators.next(2, seed=3)
    assert algorithm.engine.evaluators.finished()[0].episodes == 2


def test_what_a_budget_ends_waits_for_the_evaluation_of_its_last_weights(made: Any) -> None:
    algorithm = made(Ray(num_evaluation_runners=1), evaluation_interval=1, evaluation_episodes=3)
    result = algorithm.fit(Stop(updates=1))
    assert (result.evaluation["episodes"], result.evaluation["updates"]) == (3, result.updates)
    assert result.evaluating is None


def test_nobody_is_left_behind(made: Any) -> None:
    algorithm = made(Ray(num_runners=2))
    algorithm.train()
    pids = [member.pid for member in members(algorithm)]
    algorithm.close()
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
