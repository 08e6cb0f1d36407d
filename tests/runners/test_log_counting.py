# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_arena import ScriptedArena

from etude.envs import Turn
from etude.runners.episodes import EpisodeTracker
from etude.runners.limits import StepLimit
from etude.runners.rollout import Rows

# -- Rows ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["append", "append", "write", "flag", "keep"]), st.integers(0, 9))))
def test_a_log_is_a_list_of_rows(what: list[tuple[str, int]]) -> None:
    log = Rows(capacity=2)
    rows: list[dict[str, Any]] = []  # what is not written is zero
    for i, (name, n) in enumerate(what):
        if name == "append":
            values: dict[str, Any] = {"a": i + np.arange(n)}
            if n % 2:
                values["b"] = np.full((n, 2), i, np.float32)
            assert log.append(n, values) == len(rows)
            rows += [{key: column[j] for key, column in values.items()} for j in range(n)]
        elif name == "write" and n < len(rows):
            log.write(slice(n, len(rows)), {"c": np.full(len(rows) - n, float(i))})
            for row in rows[n:]:
                row["c"] = float(i)
        elif name == "flag":
            log.columns["blind"][: len(rows)] |= np.arange(len(rows)) % 3 == n % 3
            for j, row in enumerate(rows):
                row["blind"] = row.get("blind", False) or j % 3 == n % 3
        elif name == "keep":
            kept = [j for j in range(len(rows)) if j % 10 != n]
            log.keep(np.array(kept, np.int64))
            rows = [rows[j] for j in kept]
        assert log.size == len(rows)
        assert {*log.names} == {key for key in log.columns if key in ("a", "b", "c")}
        for key in log.columns:
            is_flag = log.columns[key].dtype == bool  # flags are False where they are not written
            there = [j for j, row in enumerate(rows) if key in row or is_flag]
            for j, value in zip(there, log.columns[key][np.array(there, np.int64)], strict=True):
                np.testing.assert_array_equal(value, rows[j].get(key, False))


def test_a_column_grows_with_the_log_and_is_made_as_long_as_it() -> None:
    log = Rows(capacity=4)
    assert log.append(3, {"a": np.arange(3, dtype=np.int16)}) == 0
    assert log.append(6, {"a": np.arange(6), "b": np.ones((6, 2), np.float32)}) == 3
    log.append(100, {"a": np.zeros(100)})
    assert len({len(column) for column in log.columns.values()}) == 1
    assert len(log.columns["a"]) >= log.size == 109
    assert log.columns["a"].dtype == np.int16
    assert not log.columns["b"][:3].any()
    np.testing.assert_array_equal(log.columns["a"][:9], [0, 1, 2, 0, 1, 2, 3, 4, 5])
    log.columns["blind"][5:109] = True
    log.keep(np.array([8, 4]))
    log.append(3, {"a": np.zeros(3)})
    np.testing.assert_array_equal(log.columns["blind"][:5], [True, False, False, False, False])


# -- StepLimit --------------------------------------------------------------------------------------------------------


def turn(arena: ScriptedArena, rows: list[tuple[int, int, int]], first: bool = False) -> Turn:
    """Rows of (env, agent, the env's clock)."""
    slots = np.array([arena.slot[env, agent] for env, agent, _ in rows], np.int64)
    firsts = np.full(len(rows), first)
    made = Turn(slots, {}, np.zeros(len(rows)), None, None, firsts if first else None)
    made.env_t = np.array([t for _, _, t in rows], np.int64)
    return made


class Counter:
    """A limit with the tracker that it reads."""

    def __init__(self, arena: ScriptedArena, by: Any) -> None:
        self.tracker, self.by = EpisodeTracker("id", arena), by
        self.limit = StepLimit(self.tracker, by, 1000)

    @property
    def steps(self) -> int:
        return self.limit.steps

    def count(self, turns: list[Turn]) -> None:
        self.tracker.next_turns()
        for each in turns:
            self.limit.count(each, *self.tracker.note(each, 0.0))

    def late(self, turns: list[Turn], wanted: int) -> list[Any]:
        self.limit.wanted = wanted
        return [self.limit.late(each.slots).tolist() for each in reversed(turns)][::-1]

    def carry(self, late: int) -> None:
        self.limit = StepLimit(self.tracker, self.by, 1, late)


def counter_of(by: Any, agents: Any = "ab", num_envs: int = 3) -> tuple[ScriptedArena, Counter]:
    arena = ScriptedArena(num_envs, agents)
    counter = Counter(arena, by)
    counter.count([turn(arena, [(env, a, 0) for env in range(num_envs) for a in range(len(agents))], first=True)])
    assert counter.steps == 0
    return arena, counter


def test_agent_steps_count_results_and_the_last_are_late() -> None:
    arena, counter = counter_of("agent_steps")
    turns = [turn(arena, [(0, 0, 1), (0, 1, 1)]), turn(arena, [(2, 1, 1)]), turn(arena, [(1, 0, 1)])]
    counter.count(turns)
    assert counter.steps == 4
    assert counter.late(turns, 2) == [[False, False], [True], [True]]
    counter.carry(2)
    assert counter.steps == 2
    assert counter.late(turns[1:], 1) == [[False], [True]]


@pytest.mark.parametrize(("wanted", "late"), [(3, []), (2, [2]), (1, [1, 2])])
def test_env_steps_count_clocks_and_whole_envs_are_late(wanted: int, late: list[int]) -> None:
    arena, counter = counter_of("env_steps")
    turns = [turn(arena, [(2, 0, 1), (0, 0, 1), (0, 1, 1)]), turn(arena, [(2, 1, 1), (1, 1, 1)])]
    counter.count(turns)
    assert counter.steps == 3
    assert counter.late(turns, wanted) == [[2 in late, 0 in late, 0 in late], [2 in late, 1 in late]]
    counter.carry(5)
    assert counter.steps == len(late)
    counter.count([turn(arena, [(0, 0, 2)])])
    assert counter.steps == len(late) + 1


def test_an_env_that_leaps_is_late_only_as_a_whole() -> None:
    arena, counter = counter_of("env_steps")
    shown = turn(arena, [(0, 0, 1), (2, 0, 4)])  # three steps of env 2 went by in which nobody was shown anything
    counter.count([shown])
    assert counter.steps == 5
    assert counter.late([shown], 3)[0] == [True, False]  # one step too many, rather than four kept
    counter.carry(0)
    assert counter.steps == 1


def test_an_env_that_begins_again_is_counted_from_0() -> None:
    arena, counter = counter_of("env_steps")
    counter.count([turn(arena, [(0, 0, 7)])])
    counter.count([turn(arena, [(0, 0, 8)]), turn(arena, [(0, 0, 0), (0, 1, 0)], first=True)])
    counter.count([turn(arena, [(0, 0, 1)])])
    assert counter.steps == 9


def test_the_steps_of_an_episode_that_is_cut_stay_counted() -> None:
    arena, counter = counter_of("env_steps")
    counter.count([turn(arena, [(0, 0, 1), (1, 0, 1)])])
    counter.count([turn(arena, [(0, 0, 2), (1, 0, 2)])])
    counter.tracker.cut(np.zeros(1, np.int64))
    counter.count([turn(arena, [(0, 1, 1)]), turn(arena, [(1, 0, 3)])])  # nobody is shown how the new episode begins
    assert counter.steps == 6


@pytest.mark.parametrize("by", ["env_steps", "agent_steps"])
def test_agents_without_names_are_counted_alike(by: Any) -> None:
    arena, counter = counter_of(by, [None])
    shown = turn(arena, [(0, 0, 1), (2, 0, 1)])
    shown.env_t = None
    counter.count([shown])
    assert counter.steps == 2
    assert counter.late([shown], 1)[0] == [False, True]
