# SPDX-License-Identifier: Apache-2.0
"""Whole episodes by steps, and how long segments may be."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from many_agent_envs import TwoJobs
from numbered_experience import check_segments, life, lived, module_for
from some_envs import LendingVectorEnv

from etude.checkpoints import load_tree, save_tree
from etude.connectors import Pipeline
from etude.envs import VectorArena, make_arena
from etude.errors import SettingsError
from etude.experience import Experience
from etude.modules import make_module
from etude.policies import Policy
from etude.runners import Lengths, Runner


def runner_on(mode: AutoresetMode, **given: Any) -> Runner:
    arena = VectorArena(LendingVectorEnv(4, mode), 4)
    return Runner(arena, module_for(arena), seed=3, **given)


@pytest.mark.parametrize("mode", tuple(AutoresetMode))
def test_only_episodes_that_ended_and_none_is_lost(mode: AutoresetMode) -> None:
    runner = runner_on(mode)
    parts = []
    for num_steps in (1, 5, 30, 1, 1, 60, 2):
        exp = runner.collect(num_steps=num_steps, whole_episodes=True)
        check_segments(exp)
        assert exp.num_steps >= num_steps
        assert exp.segments.done.all()
        assert not exp.segments.t_start.any()
        parts.append(exp)
    whole = Experience.concat(parts)
    assert len(set(whole.segments.episode_id)) == whole.num_segments
    for copy in range(4):
        steps = lived(whole, copy)
        assert steps == life(copy, len(steps))
    finished = runner.take_finished()
    order, found = np.lexsort((whole.returns(), whole.lengths)), np.lexsort((finished.returns, finished.lengths))
    np.testing.assert_array_equal(finished.lengths[found], whole.lengths[order])
    np.testing.assert_allclose(finished.returns[found], whole.returns()[order])


def test_other_ways_of_collecting_begin_new_episodes() -> None:
    runner = runner_on(AutoresetMode.NEXT_STEP)
    runner.collect(num_steps=7)
    whole = runner.collect(num_steps=9, whole_episodes=True)
    assert not whole.segments.t_start.any()
    assert not runner.collect(num_steps=9).segments.t_start.any()
    for _ in range(5):  # steps of episodes that were abandoned do not count
        assert runner.collect(num_steps=30, whole_episodes=True).num_steps >= 30
        runner.collect(num_steps=1)


def test_logp_is_that_of_the_weights_that_acted() -> None:
    arena = VectorArena("CartPole-v1", 3)
    module = make_module(None, arena.obs_space, arena.action_space)
    runner = Runner(arena, module, seed=0)
    same = []
    for scale in (1.0, 3.0, 0.1):
        for parameter in module.parameters():
            parameter.data.mul_(scale)
        exp = runner.collect(num_steps=20, whole_episodes=True)
        logits = exp.steps["dist_inputs"].astype(float)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(
            exp.steps["logp"], np.take_along_axis(logp, exp.steps["action"][:, None], 1)[:, 0], rtol=1e-4, atol=1e-5
        )
        said, _ = module.logp_and_value({"obs": exp.steps["obs"]}, {"action": exp.steps["action"]})
        same.append(np.isclose(said, exp.steps["logp"], rtol=1e-4, atol=1e-5))
    assert same[0].all()
    assert 0 < same[2].sum() < len(same[2])  # some steps were made with the weights before


@pytest.mark.parametrize("by", ["env_steps", "agent_steps"])
def test_agents_that_share_an_env_are_whole_together(by: Any) -> None:
    arena = make_arena(TwoJobs, 3)
    modules = {str(i): make_module(None, kind.obs_space, kind.action_space) for i, kind in enumerate(arena.kinds)}
    kind_of = {arena.agents[slot]: str(i) for i, kind in enumerate(arena.kinds) for slot in kind.slots}
    runner = Runner(arena, modules, module_of=lambda agent, episode: kind_of[agent], seed=1, count_steps_by=by)
    episodes: list[set[str]] = []
    agents = set(arena.agents)
    for num_steps in (3, 40, 1, 1, 70):
        parts = runner.collect_each(num_steps=num_steps, whole_episodes=True)
        ids: dict[str, set[Any]] = {}
        for exp in parts.values():
            assert exp.segments.done.all()
            assert not exp.segments.t_start.any()
            for episode, agent in zip(exp.segments.episode_id, exp.segments.agent_id, strict=True):
                ids.setdefault(episode, set()).add(agent)
        assert all(there == agents for there in ids.values())
        episodes.append(set(ids))
        if by == "agent_steps":
            assert sum(exp.num_steps for exp in parts.values()) >= num_steps
        else:
            assert sum(runner.take_finished().lengths) >= num_steps
    assert len(set.union(*episodes)) == sum(map(len, episodes))


def test_a_runner_goes_on_with_unfinished_episodes(tmp_path: Path) -> None:
    def make() -> Runner:
        return runner_on(AutoresetMode.SAME_STEP)

    runner = make()
    runner.collect(num_steps=17, whole_episodes=True)
    save_tree(tmp_path, runner.state_dict())
    other = make()
    other.load_state_dict(load_tree(tmp_path)[0])
    for _ in range(3):
        a, b = (each.collect(num_steps=20, whole_episodes=True) for each in (runner, other))
        np.testing.assert_array_equal(a.steps["obs"], b.steps["obs"])
        np.testing.assert_array_equal(a.offsets, b.offsets)
        assert list(a.segments.episode_id) == list(b.segments.episode_id)


class Endless(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 3000, False, {}


def test_an_episode_that_is_held_for_long_is_warned_of_once() -> None:
    arena = make_arena(Endless, 1)
    kind = arena.kinds[0]
    runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0)
    with pytest.warns(
        UserWarning, match=r"1001 steps of episodes that have not ended .* where 50 were asked for"
    ) as one:
        exp = runner.collect(num_steps=50, whole_episodes=True)
    assert len(one) == 1
    assert exp.num_steps == 3000
    runner.collect(num_steps=50, whole_episodes=True)


def test_an_episode_whose_end_is_waited_for_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.runners.runner.LONG_EPISODE", 2500)
    arena = make_arena(Endless, 1)
    kind = arena.kinds[0]
    runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0)
    assert runner.collect(num_steps=2600).num_steps == 2600
    assert not caplog.records
    assert runner.collect(num_episodes=2).lengths.tolist() == [3000, 3000]
    (record,) = caplog.records
    assert "more than 2,500 steps" in record.getMessage()
    assert "Workers(max_steps=...)" in record.getMessage()


def test_long_segments_are_cut_and_short_ones_dropped_and_counted() -> None:
    plain = runner_on(AutoresetMode.NEXT_STEP).collect(num_episodes=12)
    cut = runner_on(AutoresetMode.NEXT_STEP, lengths=Lengths(most=3)).collect(num_episodes=12)
    assert cut.lengths.max() == 3
    np.testing.assert_array_equal(cut.join().lengths, plain.lengths)
    np.testing.assert_array_equal(cut.steps["obs"], plain.steps["obs"])
    runner = runner_on(AutoresetMode.NEXT_STEP, lengths=Lengths(least=4))
    long = runner.collect(num_episodes=12)
    np.testing.assert_array_equal(long.lengths, plain.lengths[plain.lengths >= 4])
    dropped = plain.lengths[plain.lengths < 4].sum()
    assert dropped > 0
    assert runner.stats()["dropped_steps"] == dropped
    assert runner.stats()["dropped_steps"] == 0


def test_pieces_that_go_on_have_lookback_for_connectors() -> None:
    arena = VectorArena("CartPole-v1", 2)
    pipeline = Pipeline(["frame_stack:3"])
    module = make_module(None, *pipeline.spaces(arena.obs_space, arena.action_space))
    runner = Runner(arena, Policy(module, pipeline), seed=1, lengths=Lengths(most=5))
    for _ in range(3):
        exp = runner.collect(num_steps=60)
        trained = exp.trained()
        assert trained.sum() == 60
        seen = pipeline.offline(exp)
        obs, action = np.asarray(seen.steps["obs"])[trained], exp.steps["action"][trained]
        logp, _ = module.logp_and_value({"obs": obs}, {"action": action})
        np.testing.assert_allclose(logp, exp.steps["logp"][trained], rtol=1e-4, atol=1e-5)


def test_lengths_that_contradict_each_other() -> None:
    with pytest.raises(SettingsError, match="segments of 5 to 3 steps"):
        Lengths(least=5, most=3)
