# SPDX-License-Identifier: Apache-2.0
"""Many agents in one env: every row is the one that happened, and no reward is lost, whatever the API."""

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from many_agent_scripts import Event, Rounds, Scene, Script, ScriptedDicts, ScriptedParallel
from pettingzoo.utils import conversions, wrappers

from etude.envs.multi_agent import AECAdapter, DictAdapter, ManyAgentsAdapter, ParallelAdapter
from etude.errors import EnvError

NAMES = ("a", "b", "c", "d")


class Seen(NamedTuple):
    """A row, with what doesn't matter taken away."""

    time: float | None
    """Of the observation; None: there is none."""
    reward: float
    ends: tuple[bool, bool]
    first: bool
    taken: Any = None


def play(copy: ManyAgentsAdapter, *, stop_at: int | None = None, limit: int = 200) -> dict[str | None, list[Seen]]:
    """One episode: the rows of each agent in their order, and checks of what holds for every copy.

    Actions are numbered, so that the env can log whose they were.
    """
    seen: dict[str | None, list[Seen]] = defaultdict(list)
    rows, number = copy.reset(1), 0
    assert copy.env_t == 0 or isinstance(copy, DictAdapter)
    for _ in range(limit):
        agents = [row.agent for row in rows]
        assert len(set(agents)) == len(agents), "two rows of one agent at once"
        waiting = {}
        for row in rows:
            is_end = row.terminated or row.truncated
            name = copy.agents[row.agent]
            if row.obs is not None:
                assert row.obs[0] == row.agent, "another agent's observation"
            else:
                assert is_end, "only an end may be blind"
            time = None if row.obs is None else float(row.obs[1])
            seen[name].append(Seen(time, row.reward, (row.terminated, row.truncated), row.first, row.taken))
            if not is_end:
                waiting[row.agent], number = number, number + 1
        if copy.over:
            assert not waiting
            return dict(seen)
        assert waiting
        rows = copy.step(waiting)
        assert not copy.ends, "kept although nothing failed: snapshots would hold it"
        assert not any(row.first and row.reward for row in rows)
        if copy.env_t == stop_at and not copy.over:
            rows = copy.truncate(rows)
    raise AssertionError("the episode never ends")


def truth(script: Script, agent: str) -> list[Seen]:
    """The rows that one agent must get, straight from the script: nothing is kept from step to step."""
    everyone = next((scene.ends["__all__"] for scene in script if "__all__" in scene.ends), None)
    own = [(t, scene.ends[agent]) for t, scene in enumerate(script) if agent in scene.ends]
    end, flags = own[0] if own else (len(script) - 1, everyone)
    shown = [t for t in range(end) if agent in script[t].shown]
    if not shown:
        return []
    bounds = [0, *shown[1:], end]
    rows = [Seen(shown[0], 0.0, (False, False), True)]
    for k, (since, until) in enumerate(pairwise(bounds)):
        span = script[since + 1 : until + 1]
        reward = sum(scene.rewards.get(agent, 0.0) for scene in span)
        taken = [scene.taken[agent] for scene in script[max(since, shown[0]) + 1 : until + 1] if agent in scene.taken]
        is_end = k == len(bounds) - 2
        time = until if agent in script[until].shown else None
        rows.append(Seen(time, reward, flags if is_end else (False, False), False, taken[-1] if taken else None))
    return rows


@st.composite
def turns(draw: st.DrawFn) -> tuple[tuple[str, ...], Script]:
    """Agents come late, sit out, leave early; rewards at any time; some ends are blind. ``__all__`` ends the rest."""
    agents = NAMES[: draw(st.integers(1, 4))]
    length = draw(st.integers(2, 8))
    scenes = [Scene((), {}, {}, {}) for _ in range(length)]
    last: dict[str, Any] = {"__all__": draw(some_flags)}
    for agent in agents:
        come = draw(st.integers(0, length))
        leave = draw(st.integers(1, length + 3))  # past the last scene: with all others
        for t in range(length):
            at_end = t == min(leave, length - 1)
            if t <= leave and (draw(st.booleans()) if t >= come or at_end else False):
                scenes[t] = scenes[t]._replace(shown=(*scenes[t].shown, agent))
            if 0 < t <= leave and draw(st.booleans()):
                scenes[t].rewards[agent] = float(draw(st.integers(-(10**6), 10**6)))
            if 0 < t <= leave and draw(st.integers(0, 4)) == 0:
                scenes[t].taken[agent] = draw(st.integers(0, 9))
        if leave < length:
            scenes[leave].ends[agent] = draw(some_flags)
    scenes[-1].ends.update(last)
    return agents, scenes


some_flags = st.sampled_from([(True, False), (False, True), (True, True)])


@given(turns())
def test_rows_of_dicts_are_those_of_the_script(case: tuple[tuple[str, ...], Script]) -> None:
    agents, script = case
    want = {agent: rows for agent in agents if (rows := truth(script, agent))}
    ends = [t for t, scene in enumerate(script) for agent in agents if agent in scene.ends]
    length = max(ends) if len(ends) == len(agents) else len(script) - 1  # when nobody can come any more
    env = ScriptedDicts(agents, script)
    copy = DictAdapter(env)
    if not want:
        with pytest.raises(EnvError, match="episodes in a row ended before"):
            copy.reset(None)
        return
    for _ in range(2):  # the second episode starts clean
        env.log.clear()
        assert play(copy) == want
        assert copy.env_t == length
        assert copy.infos["__common__"] == {"t": copy.env_t}
        assert [t for t, agent, _ in env.log] == sorted(t for t, agent, _ in env.log)
        for agent, rows in want.items():
            assert [t for t, who, _ in env.log if who == agent] == [row.time for row in rows[:-1]]


@st.composite
def spans(draw: st.DrawFn) -> tuple[tuple[str, ...], Script]:
    """Agents that are there without a break, as PettingZoo has it; somebody always is. Nobody is paid beforehand."""
    agents = NAMES[: draw(st.integers(1, 4))]
    length = draw(st.integers(2, 8))
    scenes = [Scene((), {}, {}, {}) for _ in range(length)]
    for i, agent in enumerate(agents):
        come = 0 if i == 0 else draw(st.integers(0, length - 2))
        leave = length - 1 if i == 0 else draw(st.integers(come + 1, length - 1))
        for t in range(come, leave + 1):
            if t < leave or draw(st.booleans()):
                scenes[t] = scenes[t]._replace(shown=(*scenes[t].shown, agent))
            if t > 0 and draw(st.booleans()):
                scenes[t].rewards[agent] = float(draw(st.integers(-(10**6), 10**6)))
            if t > come and draw(st.integers(0, 4)) == 0:
                scenes[t].taken[agent] = draw(st.integers(0, 9))
        scenes[leave].ends[agent] = draw(some_flags)
    return agents, scenes


@given(spans())
def test_all_apis_give_the_rows_of_the_script(case: tuple[tuple[str, ...], Script]) -> None:
    agents, script = case
    want = {agent: truth(script, agent) for agent in agents}
    parallel = ParallelAdapter(ScriptedParallel(agents, script))
    assert play(parallel) == want == play(parallel)
    assert parallel.env_t == len(script) - 1
    assert play(DictAdapter(ScriptedDicts(agents, script))) == want
    aec = AECAdapter(conversions.parallel_to_aec(ScriptedParallel(agents, script)))
    assert blind_taken(play(aec)) == blind_taken(want)
    back = ParallelAdapter(conversions.aec_to_parallel(conversions.parallel_to_aec(ScriptedParallel(agents, script))))
    assert play(back) == want
    if all(rows[-1].time is not None for rows in want.values()):  # this wrapper loses the rewards of unseen ends
        aec_env = conversions.parallel_to_aec(ScriptedParallel(agents, script))
        assert play(ParallelAdapter(conversions.aec_to_parallel_wrapper(aec_env))) == want


def blind_taken(rows: dict[Any, list[Seen]]) -> dict[Any, list[Seen]]:
    """Without what blind ends say of actions: an AEC env tells infos only to those whose turn it is."""
    return {
        agent: [row if row.time is not None else row._replace(taken=None) for row in seen]
        for agent, seen in rows.items()
    }


def logged(log: list[Event], agent: str) -> list[Seen]:
    """The rows that one agent must get, from what happened in `Rounds`."""
    turns = [i for i, event in enumerate(log) if event.agent == agent and event.what in ("shown", "dies", "gone")]
    if not turns or log[turns[0]].what != "shown":
        return []
    rows = [Seen(log[turns[0]].number, 0.0, (False, False), True)]
    for since, until in pairwise([0, *turns[1:]]):
        time = None if log[until].what == "gone" else log[until].number
        rows.append(Seen(time, rewarded(log[since:until], agent), log[until].flags, False))
    return rows


def rewarded(log: list[Event], agent: str) -> float:
    return sum(event.number for event in log if event.agent == agent and event.what == "rewarded")


@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_rows_of_turns_are_those_of_the_log(seed: int, at_once: bool, orderly: bool, wrapped: bool) -> None:
    env = Rounds(seed, at_once=at_once, orderly=orderly)
    copy = AECAdapter(wrappers.OrderEnforcingWrapper(env) if wrapped else env)
    rows = play(copy)
    assert rows == {agent: want for agent in env.possible_agents if (want := logged(env.log, agent))}
    for agent, seen in rows.items():
        assert sum(row.reward for row in seen) == rewarded(env.log, str(agent)), "a reward is lost"
        assert seen[-1].ends != (False, False)
    actions = [event.number for event in env.log if event.what == "acts"]
    assert actions == list(range(len(actions)))
    assert copy.env_t == len(actions)


@given(st.integers(0, 10**6), st.integers(1, 11), st.booleans())
def test_stopped_turns_end_all_that_act(seed: int, stop_at: int, at_once: bool) -> None:
    env = Rounds(seed, at_once=at_once)
    rows = play(AECAdapter(env), stop_at=stop_at)
    for agent in env.possible_agents:
        want = logged(env.log, agent)
        if want and want[-1].ends == (False, False):
            flags = env.flags(agent) if any(env.flags(agent)) else (False, True)
            turns = [i for i, event in enumerate(env.log) if event.agent == agent and event.what == "shown"]
            if turns[-1] == len(env.log) - 1:  # its turn is now
                want[-1] = want[-1]._replace(ends=flags)
            else:
                left = rewarded(env.log[turns[-1] if len(turns) > 1 else 0 :], agent)
                want.append(Seen(env.steps, left, flags, False))
            if len(want) == 1:
                want = []  # it never acted
        assert rows.get(agent, []) == want


@given(turns(), st.integers(1, 6))
def test_stopped_dicts_end_all_that_act(case: tuple[tuple[str, ...], Script], stop_at: int) -> None:
    agents, script = case
    env = ScriptedDicts(agents, script)
    copy = DictAdapter(env)
    if not any(truth(script, agent) for agent in agents):
        return
    rows = play(copy, stop_at=stop_at)
    stopped = [*script[: copy.env_t + 1]]
    if not (copy.env_t == stop_at and stop_at < len(script) - 1):
        return
    flags = {agent: (False, True) for agent in agents if not any(agent in scene.ends for scene in stopped)}
    stopped[-1] = stopped[-1]._replace(ends={**flags, **stopped[-1].ends})
    want = {agent: truth(stopped, agent) for agent in agents}
    assert rows == {agent: seen for agent, seen in want.items() if seen}


def test_ends_without_a_last_sight_and_by_all() -> None:
    script = [
        Scene(("a", "b", "c")),
        Scene(("a",), {"a": 1.0, "b": 2.0}),
        Scene(("a",), {"a": 3.0, "b": 5.0}, {"a": (False, False), "b": (False, False), "__all__": (False, True)}),
    ]
    rows = play(DictAdapter(ScriptedDicts(("a", "b", "c", "d"), script)))
    start, end = Seen(0, 0.0, (False, False), True), (False, True)
    assert rows == {
        "a": [start, Seen(1, 1.0, (False, False), False), Seen(2, 3.0, end, False)],
        "b": [start, Seen(None, 7.0, end, False)],
        "c": [start, Seen(None, 0.0, end, False)],
    }


def test_agents_that_never_act_have_no_rows() -> None:
    """Shown something for the first time when it is over."""
    script = [Scene(("a",)), Scene(("a", "b", "c"), {"b": 1.0}, {"a": (True, False), "b": (True, False)})]
    assert set(play(DictAdapter(ScriptedDicts(("a", "b"), [script[0], script[1]._replace(shown=("a", "b"))])))) == {"a"}
    script[1].ends["__all__"] = (True, False)
    assert set(play(DictAdapter(ScriptedDicts(("a", "b", "c"), script)))) == {"a"}


@pytest.mark.parametrize("api", [DictAdapter, ParallelAdapter])
def test_an_end_may_be_told_again(api: Any) -> None:
    end = Scene(("a", "b"), {}, {"a": (True, False)})
    script = [Scene(("a", "b")), end, end, Scene(("b",), {}, {"b": (False, True)})]
    env = ScriptedDicts(("a", "b"), script) if api is DictAdapter else ScriptedParallel(("a", "b"), script)
    assert play(api(env)) == {"a": truth(script[:2], "a"), "b": truth(script, "b")}
