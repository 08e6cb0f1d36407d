# SPDX-License-Identifier: Apache-2.0
"""The runner on arenas whose slots come at different times, with several agents, kinds, modules and lost episodes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_arena import ScriptedArena
from scripted_envs import who
from scripted_runs import SCENES, Marked, play

from etude.errors import EnvError, EtudeError
from etude.experience import Experience
from etude.runners import Runner

SIZES = st.lists(st.sampled_from([1, 2, 3, 7, 50]), min_size=1, max_size=10)
SEEDS = st.integers(0, 1 << 20)


@pytest.mark.parametrize("count_by", ["agent_steps", "env_steps"])
@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=8)
@given(SIZES, SEEDS)
def test_no_step_is_invented_lost_or_miscredited(scene: str, count_by: str, pieces: list[int], seed: int) -> None:
    run = play(scene, seed, count_steps_by=count_by)
    given = wanted = 0
    for num_steps in pieces:
        run.learn()
        count = run.steps(num_steps)
        run.check_finished()
        given, wanted = given + count, wanted + num_steps
        assert run.runner.agent_steps == given
        if not run.arena.named or count_by == "agent_steps":
            assert count == num_steps
        else:
            least, most = run.env_steps()
            assert least <= wanted <= most
            assert least == most or run.arena.chances.turn < 1.0
        if not run.arena.named or count_by == "env_steps":
            assert run.runner.env_steps == wanted


@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=6)
@given(st.lists(st.tuples(st.sampled_from(["steps", "episodes", "broken"]), st.integers(1, 8)), max_size=8), SEEDS)
def test_steps_and_episodes_in_any_order(scene: str, what: list[tuple[str, int]], seed: int) -> None:
    run = play(scene, seed, count_steps_by="agent_steps")
    fresh = False
    for name, number in what:
        run.learn()
        if name == "broken":
            run.arena.sends_left = number
            with pytest.raises(KeyboardInterrupt):
                run.runner.collect_each(num_steps=1000)
        elif name == "episodes":
            run.episodes(number)
        else:
            before = set(run.given)
            assert run.steps(number) == number
            assert not fresh or not before & run.changed
        run.check_finished()
        fresh = name != "steps"


@pytest.mark.parametrize("scene", ["pool", "coming and going", "self-play"])
def test_joined_segments_are_whole_lives(scene: str) -> None:
    run = play(scene, 5)
    parts = [run.runner.collect_each(num_steps=n) for n in (7, 1, 40, 3, 3, 60, 2)]
    lives = 0
    for module_id in run.runner.rollouts:
        whole = Experience.concat([part[module_id] for part in parts if module_id in part])
        for episode in set(whole.segments.episode_id):
            for agent in set(whole.segments.agent_id):
                mine = whole.select((whole.segments.episode_id == episode) & (whole.segments.agent_id == agent))
                if not mine.num_segments:
                    continue
                life = mine.join()
                assert life.num_segments == 1
                key, k = who(life.steps, 0)
                assert k == life.segments.t_start[0] == 0
                if run.arena.lives[key].end is not None and life.segments.done[0]:
                    assert life.num_steps == run.arena.lives[key].results
                    lives += mine.num_segments > 1
    assert lives > 3


def test_many_examples_reach_what_is_rare() -> None:
    """Else the tests above would hold for want of trying."""
    run = play("self-play", 1, count_steps_by="agent_steps")
    finished = late = 0
    for num_steps in [7, 1, 30, 2, 50] * 8:
        run.steps(num_steps)
        finished += run.check_finished()
        late += any(life.results > run.given.get(key, 0) for key, life in run.arena.lives.items() if not life.void)
    lives = run.arena.lives.values()
    assert finished > 20
    assert late > 5
    assert sum(life.is_cut and life.results > 0 for life in lives) > 10
    assert sum(life.end is not None and life.end.blind for life in lives) > 10
    assert sum(life.end is not None and life.clock[0] > 0 for life in lives) > 10


@pytest.mark.parametrize("scene", SCENES)
def test_a_broken_collection_leaves_no_gap(scene: str) -> None:
    run = play(scene, 2)
    run.steps(9)
    recv = run.arena.recv
    for broken in range(1, 8):
        calls = iter(range(broken))

        def breaks(calls: Any = calls) -> Any:
            if next(calls, None) is None:
                raise EnvError("no more")
            return recv()

        run.arena.recv = breaks  # type: ignore[method-assign]
        with pytest.raises(EnvError, match="no more"):
            run.runner.collect_each(num_steps=500)
        run.arena.recv = recv  # type: ignore[method-assign]
        before = set(run.given)
        run.steps(11)
        assert not before & run.changed
        run.check_finished()


def test_a_collection_that_breaks_before_it_has_begun_leaves_nothing_twice() -> None:
    run = play("self-play", 4, count_steps_by="agent_steps")
    for num_steps in (9, 1, 8):
        run.steps(num_steps)
        rollout = list(run.runner.rollouts.values())[-1]
        note = rollout.note

        def breaks(*args: Any) -> Any:
            raise KeyboardInterrupt

        rollout.note = breaks  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.runner.collect_each(num_steps=100)
        rollout.note = note  # type: ignore[method-assign]
        before = set(run.given)
        run.steps(7)
        assert not before & run.changed


def test_equal_seeds_give_equal_experience() -> None:
    def ran(seed: int) -> list[dict[Any, Experience]]:
        runner = play("self-play", seed).runner
        return [runner.collect_each(num_steps=n) for n in (5, 50, 1)] + [runner.collect_each(num_episodes=4)]

    for one, two in zip(ran(4), ran(4), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            for column in one[name].steps:
                np.testing.assert_array_equal(one[name].steps[column], two[name].steps[column])
            np.testing.assert_array_equal(one[name].segments.episode_id, two[name].segments.episode_id)
    ids = [{i for part in ran(seed) for exp in part.values() for i in exp.segments.episode_id} for seed in (4, 5)]
    assert not ids[0] & ids[1]


def test_env_steps_that_bring_nobody_a_result() -> None:
    arena = ScriptedArena(1, "ab", here=0.0, over=0.0, end=0.0, appear=1.0, turn=0.0)
    runner = Runner(arena, Marked(arena), seed=1)
    nothing = runner.collect(num_steps=1)  # after it, the second agent is shown something for the first time
    assert (nothing.num_segments, nothing.num_steps, runner.env_steps, runner.agent_steps) == (0, 0, 1, 0)
    exp = runner.collect(num_steps=1)
    assert (exp.num_steps, runner.env_steps, runner.agent_steps) == (1, 2, 1)
    assert exp.steps.keys() == nothing.steps.keys()
    assert Experience.concat([nothing, exp]).num_steps == 1


# -- who acts -----------------------------------------------------------------------------------------------------


def test_module_of_is_asked_once_for_each_agent_in_each_episode() -> None:
    asked: list[Any] = []
    arena = ScriptedArena(2, "ab", fail=0.05)

    def module_of(agent: Any, episode: Any) -> str:
        asked.append((agent, *episode))
        return "m"

    runner = Runner(arena, {"m": Marked(arena)}, module_of=module_of, seed=1)
    exp = Experience.concat([runner.collect(num_steps=n) for n in (5, 90, 1)])
    assert len(set(asked)) == len(asked)
    lives = {(arena.names[key.agent], key.env, key.episode) for key in arena.lives}
    assert {(agent, env, number) for agent, _, env, number in asked} == lives
    ids = {(agent, id) for agent, id, _, _ in asked}
    assert ids >= set(zip(exp.segments.agent_id, exp.segments.episode_id, strict=True))


def test_an_unknown_module_is_named() -> None:
    arena = ScriptedArena(1, "ab", here=1.0)
    modules = {"x": Marked(arena), "y": Marked(arena)}
    runner = Runner(arena, modules, module_of=lambda agent, episode: agent * 2, seed=1)
    with pytest.raises(
        EtudeError, match=r"returned '(aa|bb)' for agent '[ab]', .* no such module: there are \['x', 'y'\]"
    ):
        runner.collect(num_steps=1)


def test_modules_without_module_of_need_the_agents_names() -> None:
    arena = ScriptedArena(1, "abc")
    modules = {name: Marked(arena) for name in "ax"}
    with pytest.raises(EtudeError, match=r"the modules \['a', 'x'\], but none for \['b', 'c'\]: set which module"):
        Runner(arena, modules)


def test_one_module_can_not_act_for_different_spaces() -> None:
    arena = ScriptedArena(1, "abc", [0, 0, 1])
    with pytest.raises(EtudeError, match=r"the only module must act for agent 'c' with the spaces Dict.* but acts for"):
        Runner(arena, Marked(arena))
    runner = Runner(arena, {"m": Marked(arena)}, module_of=lambda agent, episode: "m", seed=1)
    with pytest.raises(EtudeError, match=r"the module 'm' must act for agent 'c' .* different modules"):
        runner.collect(num_steps=50)


def test_different_columns_do_not_go_into_one_experience() -> None:
    runner = play("a module each").runner
    with pytest.raises(EtudeError, match=r"the modules \['a', 'b', 'c'\] have columns .* use\s+collect_each"):
        runner.collect(num_steps=200)
    arena = ScriptedArena(2, "ab")
    runner = Runner(arena, {"a": Marked(arena), "b": Marked(arena)}, seed=1, count_steps_by="agent_steps")
    exp = runner.collect(num_steps=200)
    assert exp.num_steps == 200
    np.testing.assert_array_equal(exp.segments.module_id, exp.segments.agent_id)
