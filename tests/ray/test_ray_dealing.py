# SPDX-License-Identifier: Apache-2.0
"""Who is asked for what, and what several have made put together; without a cluster."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")
from etude.ray.dealing import DEPTH, deal, find_late, size_for
from etude.ray.fragments import Ended, merged
from etude.ray.members import Ask, Fragment, Member
from etude.ray.runner_actor import Report, seed_of
from etude.runners import Finished


def crew(num: int, pace: float | None = None) -> list[Member]:
    return [Member(number, 0, None, has_begun=True, pace=pace) for number in range(num)]


def ask(member: Member, steps: int) -> None:
    member.asks.append(Ask(0, steps, None, None))
    member.since = time.monotonic()


def dealt(members: list[Member], whole: int, left: int, size: int) -> list[tuple[int, int]]:
    out = []
    for member, steps in deal(members, whole, left, size):
        ask(member, steps)
        out.append((member.number, steps))
    return out


@given(num=st.integers(1, 5), whole=st.integers(1, 500), size=st.integers(1, 100), order=st.randoms())
def test_what_is_asked_for_makes_up_what_is_wanted(num: int, whole: int, size: int, order: Any) -> None:
    members, have = crew(num), 0
    while have < whole:
        dealt(members, whole, whole - have, size)
        assert all(len(member.asks) <= DEPTH for member in members)
        assert have + sum(ask.steps for member in members for ask in member.asks) <= whole
        busy = [member for member in members if member.asks]
        have += order.choice(busy).asks.popleft().steps
    assert have == whole
    assert not any(member.asks for member in members)


@pytest.mark.parametrize(
    ("pace", "num_runners", "size"),
    [
        (None, 2, 512),  # nobody knows: a quarter of a share
        (1e-3, 2, 512),
        (1e-5, 2, 1024),  # 20 ms of work: two fragments of each
        (1e-6, 2, 2048),
        (1e-3, 32, 128),  # 128 ms, in which as much as 32 fragments can be taken in without haste, and not 128
    ],
)
def test_fragments_are_worth_asking_for(pace: float | None, num_runners: int, size: int) -> None:
    assert size_for(crew(num_runners, pace), 4096, num_runners) == size


def test_all_are_asked_before_one_is_asked_twice() -> None:
    assert dealt(crew(3), 100, 100, 20) == [(0, 20), (1, 20), (2, 20), (0, 20), (1, 20)]
    assert dealt(crew(2), 100, 30, 20) == [(0, 20), (1, 10)]
    members = crew(2)
    members[0].has_begun = False
    assert dealt(members, 100, 100, 20) == [(1, 20), (1, 20)]


def test_who_is_slow_is_asked_but_nobody_counts_on_it() -> None:
    members = crew(2, pace=0.001)
    members[1].pace = 0.1  # 20 steps take 2 s, the whole takes the other 0.1 s
    assert dealt(members, 100, 100, 20) == [(1, 20), (0, 20), (0, 20)]
    assert [member.is_late for member in members] == [False, True]
    members[0].asks.clear()
    assert dealt(members, 100, 20, 20) == [(0, 20)]


def test_who_comes_late_is_waited_for_no_more() -> None:
    members = crew(3, pace=0.001)
    for member in members[1:]:
        ask(member, 10)
    find_late(members)
    assert not any(member.is_late for member in members)  # not yet
    members[2].since -= 10
    members[1].since -= 0.05  # within what is never late
    find_late(members)
    assert [member.is_late for member in members] == [False, False, True]
    assert dealt(members, 100, 20, 20) == [(0, 10)]
    busy = crew(2, pace=0.001)
    for member in busy:
        ask(member, 10)
        member.since -= 10
    find_late(busy)
    assert not any(member.is_late for member in busy)  # nobody waits for the others


def finished(envs: list[int], numbers: list[int], **more: Any) -> Finished:
    reals = np.arange(len(envs), dtype=float)
    return Finished(reals, np.array(numbers) + 1, {}, {}, reals, np.array(envs), np.array(numbers))._replace(**more)


def fragment(runner: int, life: int, what: Finished) -> Fragment:
    return Fragment(0, runner, life, None, Report(0, 0, {}, what, {}, 0, {}, 0.0), {})


def test_episodes_have_numbers_of_their_own_over_all_runners_and_lives() -> None:
    ended = Ended(2)
    ended.add(fragment(0, 0, finished([0, 1], [0, 0])))
    ended.add(fragment(1, 0, finished([0], [0])))
    ended.add(fragment(0, 0, finished([0], [5])))
    ended.add(fragment(0, 2, finished([0, 0], [0, 3])))
    ended.add(fragment(0, 2, finished([1], [1])))
    found = ended.take()
    keys = list(zip(found.envs.tolist(), found.numbers.tolist(), strict=True))
    assert keys == [(0, 0), (1, 0), (2, 0), (0, 5), (0, 6), (0, 9), (1, 7)]
    assert len(ended.take().returns) == 0


def test_what_was_logged_is_put_together_by_name() -> None:
    a = finished([0], [0], custom={"x": np.ones(1)}, media={"m": b"old"}, agent_returns={"p": np.zeros(1)})
    b = finished(
        [0], [1], custom={"x": np.zeros(1), "y": np.ones(1)}, media={"m": b"new"}, histograms={"h": np.ones(2)}
    )
    both = merged([a, b])
    assert {name: values.tolist() for name, values in both.custom.items()} == {"x": [1.0, 0.0], "y": [1.0]}
    assert both.media == {"m": b"new"}
    assert both.histograms["h"].tolist() == [1.0, 1.0]
    assert both.agent_returns["p"].tolist() == [0.0]


def test_each_runner_has_a_seed_of_its_own_in_each_life() -> None:
    seeds = [seed_of(7, number, life) for number in range(20) for life in range(20)]
    assert len({*seeds}) == len(seeds)
    assert seeds[0] == 7
    assert seeds == [seed_of(7, number, life) for number in range(20) for life in range(20)]
