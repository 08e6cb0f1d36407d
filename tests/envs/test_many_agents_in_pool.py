# SPDX-License-Identifier: Apache-2.0
"""Many agents through a pool: the arena's turns hold the very rows that happened, env by env and episode by episode."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import assume, given
from hypothesis import strategies as st
from many_agent_envs import CartPoles, Nim, TwoJobs
from many_agent_scripts import Rounds, Scene, Script, ScriptedDicts, ScriptedParallel
from numpy.typing import NDArray
from pettingzoo.utils import conversions
from pool_envs import copies_of
from test_many_agents import NAMES, Seen, blind_taken, logged, play, spans, truth, turns

from etude.envs.arena import Arena, Turn
from etude.envs.copies import CopiesArena
from etude.envs.multi_agent import AECAdapter
from etude.envs.workers import Workers

Played = dict[tuple[int, int, str | None], list[Seen]]
"""By env, episode and agent."""


def played(arena: CopiesArena, episodes: int, *, is_clock: bool = True) -> Played:
    """The rows of the first episodes of each env; checks what arenas promise.

    ``is_clock``: the second number in observations is the env's clock.
    """
    found: Played = defaultdict(list)
    running: set[int] = set()
    over = np.zeros(arena.num_envs, np.int64)
    number = 0
    arena.reset(0)
    while over.min() < episodes:
        given = arena.recv()
        assert given
        assert [turn.waits for turn in given] == sorted(turn.waits for turn in given), "ends come before all else"
        for turn in given:
            assert turn.env_t is not None
            assert turn.episode is not None
            first = turn.first if turn.first is not None else np.zeros(len(turn.slots), bool)
            ends = flags_of(turn).any(axis=1)
            assert len(set(turn.slots.tolist())) == len(turn.slots)
            assert not ends.any() if turn.waits else ends.all()
            for i, slot in enumerate(turn.slots.tolist()):
                assert slot in arena.kinds[turn.kind].slots
                assert (slot in running) != bool(first[i]), "a row before the first, or after an end"
                (running.discard if ends[i] else running.add)(slot)
                key = int(arena.env_of[slot]), int(turn.episode[i]), arena.agents[slot]
                assert key[1] == over[key[0]]
                found[key].append(seen(turn, i, bool(first[i]), is_clock))
            if turn.over is not None:
                over[turn.over] += 1
                assert not {slot for slot in running if arena.env_of[slot] in turn.over}, "it is over without its end"
            if turn.waits:
                number += 1
                arena.send(turn, action_for(arena, turn, number))
    arena.close()
    return {key: rows for key, rows in found.items() if key[1] < episodes}


def seen(turn: Turn, i: int, first: bool, is_clock: bool) -> Seen:
    blind = turn.blind is not None and bool(turn.blind[i])
    time = None if blind else float(turn.obs["obs"][i][1])
    assert turn.env_t is not None
    assert blind or not (turn.waits and is_clock) or time == turn.env_t[i]
    taken = None
    if turn.taken is not None and i in turn.taken[0]:
        taken = int(turn.taken[1]["action"][turn.taken[0].tolist().index(i)])
    reward = 0.0 if first else float(turn.reward[i])
    terminated, truncated = flags_of(turn)[i].tolist()
    return Seen(time, reward, (terminated, truncated), first, taken)


def flags_of(turn: Turn) -> NDArray[np.bool_]:
    """``[n, 2]``"""
    none = np.zeros(len(turn.slots), bool)
    return np.stack([none if flags is None else flags for flags in (turn.terminated, turn.truncated)], axis=1)


def action_for(arena: Arena, turn: Turn, number: int) -> dict[str, Any]:
    space = arena.kinds[turn.kind].action_space
    if isinstance(space, spaces.Discrete):
        return {"action": np.full(len(turn.slots), number % int(space.n))}
    return {"action": np.zeros((len(turn.slots), *(space.shape or ())), np.float32)}


def wanted(scripts: list[tuple[tuple[str, ...], Script]], episodes: int) -> Played:
    return {
        (env, episode, agent): rows
        for env, (agents, script) in enumerate(scripts)
        for episode in range(episodes)
        for agent in agents
        if (rows := truth(script, agent))
    }


def pool_of(envs: list[Any]) -> CopiesArena:
    """One copy of each."""
    given = iter(envs)
    return copies_of(lambda: next(given), num_envs=len(envs))


class OwnSpaces(ScriptedDicts):
    """Each agent has an action space of its own, so that there are as many kinds as agents."""

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(10 + self.possible_agents.index(agent))


@given(st.lists(turns(), min_size=2, max_size=3), st.sampled_from([ScriptedDicts, OwnSpaces]))
def test_dicts_in_a_pool(scripts: list[Any], make: type[ScriptedDicts]) -> None:
    agents = max((agents for agents, _ in scripts), key=len)  # one alone is one like others
    scripts = [(agents, script) for _, script in scripts]
    assume(all(any(truth(script, agent) for agent in agents) for _, script in scripts))
    pool = pool_of([make(agents, script) for _, script in scripts])
    assert len(pool.kinds) == (len(agents) if make is OwnSpaces else 1)
    assert played(pool, 2) == wanted(scripts, 2)


@given(st.lists(spans(), min_size=2, max_size=3), st.booleans())
def test_pettingzoo_in_a_pool(scripts: list[Any], in_turns: bool) -> None:
    scripts = [(NAMES, script) for _, script in scripts]
    want = wanted(scripts, 2)
    envs = [ScriptedParallel(NAMES, script) for _, script in scripts]
    if in_turns:
        pool = pool_of([conversions.parallel_to_aec(env) for env in envs])
        assert blind_taken(played(pool, 2, is_clock=False)) == blind_taken(want)
    else:
        assert played(pool_of(envs), 2) == want


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=3), st.booleans(), st.booleans())
def test_turns_in_a_pool(seeds: list[int], at_once: bool, orderly: bool) -> None:
    envs = [Rounds(seed, at_once=at_once, orderly=orderly) for seed in seeds]
    found = played(pool_of([Rounds(seed, at_once=at_once, orderly=orderly) for seed in seeds]), 2)
    for env in envs:
        play(AECAdapter(env))
    agents = envs[0].possible_agents
    assert found == {
        (i, episode, agent): want
        for i, env in enumerate(envs)
        for episode in range(2)
        for agent in agents
        if (want := logged(env.log, agent))
    }


def test_stopped_episodes_in_a_pool() -> None:
    found = played(copies_of(CartPoles, Workers(max_steps=5), num_envs=2), 3, is_clock=False)
    assert len(found) == 2 * 3 * 4
    for rows in found.values():
        assert [(row.reward, row.ends, row.first) for row in rows] == [
            (0.0, (False, False), True),
            *[(1.0, (False, False), False)] * 4,
            (1.0, (False, True), False),
        ]


def test_agents_with_jobs_of_their_own_have_kinds_of_their_own() -> None:
    arena = copies_of(TwoJobs, num_envs=3)
    assert [(kind.action_space, len(kind.slots)) for kind in arena.kinds] == [
        (TwoJobs.action_spaces["echo"], 3),
        (TwoJobs.action_spaces["aim"], 3),
    ]
    assert arena.agents == ["echo"] * 3 + ["aim"] * 3
    arena.reset(0)
    turns = arena.recv()
    assert [turn.obs["obs"].shape for turn in turns] == [(3, 2), (3, 1)]
    arena.send(turns[0], {"action": turns[0].obs["obs"].argmax(axis=1)})
    arena.send(turns[1], {"action": turns[1].obs["obs"].copy()})
    for turn in arena.recv():
        assert turn.reward == pytest.approx(1.0)
    arena.close()


def test_players_in_a_pool() -> None:
    """The first takes what wins, the other one stick: rewards of both sides, and who is to move."""
    arena = copies_of(Nim, num_envs=4)
    arena.reset(3)
    total = np.zeros(8)
    can_win = np.zeros(4, bool)
    over = np.zeros(4, bool)
    while not over.all():
        for turn in arena.recv():
            first = np.zeros(len(turn.slots), bool) if turn.first is None else turn.first
            counted = ~over[arena.env_of[turn.slots]] & ~first
            np.add.at(total, turn.slots[counted], turn.reward[counted])
            if turn.over is not None:
                over[turn.over] = True
            if turn.waits:
                heap = turn.obs["obs"].argmax(axis=1)
                starts = first & (turn.env_t == 0) & (turn.episode == 0)
                can_win[arena.env_of[turn.slots[starts]]] = heap[starts] % 4 != 0
                right = np.array([arena.agents[slot] == "first" for slot in turn.slots.tolist()])
                arena.send(turn, {"action": np.where(right, (heap - 1) % 4 % 3, 0)})
    arena.close()
    winners = np.array([arena.agents[slot] == "first" for slot in range(8)])
    assert can_win.any()
    assert (total[winners][can_win[arena.env_of[winners]]] == 1).all()


def test_a_limit_that_is_reached_while_nobody_acts() -> None:
    script = [Scene(("a",)), *[Scene((), {"a": 1.0})] * 3, *[Scene(("a",))] * 9, Scene((), {}, {"a": (True, False)})]
    found = played(copies_of(lambda: ScriptedDicts(("a", "b"), script), Workers(max_steps=2), num_envs=1), 1)
    assert found == {(0, 0, "a"): [Seen(0, 0.0, (False, False), True), Seen(None, 2.0, (False, True), False)]}
