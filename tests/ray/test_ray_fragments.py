# SPDX-License-Identifier: Apache-2.0
"""Who is asked for what, and what several have made put together; without a cluster."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")
from etude.ray.runner_actor import FragmentReport, seed_of
from etude.ray.runners import DEPTH, FinishedEpisodes, Fragment, Member, Request, dealt, find_late, merged
from etude.runners import Finished


def pool(num: int, pace: float | None = None) -> list[Member]:
    return [Member(number, 0, None, has_begun=True, pace=pace) for number in range(num)]


def ask(member: Member, steps: int) -> None:
    member.requests.append(Request(0, steps, None, None))
    member.since = time.monotonic()


def asked(members: list[Member], wanted: int, size: int) -> list[tuple[int, int]]:
    out = []
    for member, steps in dealt(members, wanted, size):
        ask(member, steps)
        out.append((member.number, steps))
    return out


@given(num=st.integers(1, 5), whole=st.integers(1, 500), size=st.integers(1, 100), order=st.randoms())
def test_what_is_asked_for_makes_up_what_is_wanted(num: int, whole: int, size: int, order: Any) -> None:
    members, have = pool(num), 0
    while have < whole:
        asked(members, whole - have, size)
        assert all(len(member.requests) <= DEPTH for member in members)
        assert have + sum(request.steps for member in members for request in member.requests) <= whole
        busy = [member for member in members if member.requests]
        have += order.choice(busy).requests.popleft().steps
    assert have == whole
    assert not any(member.requests for member in members)


def test_all_are_asked_before_one_is_asked_twice() -> None:
    assert asked(pool(3), 100, 20) == [(0, 20), (1, 20), (2, 20), (0, 20), (1, 20)]
    assert asked(pool(2), 30, 20) == [(0, 20), (1, 10)]
    members = pool(2)
    members[0].has_begun = False
    assert asked(members, 100, 20) == [(1, 20), (1, 20)]


def test_who_comes_late_is_waited_for_no_more() -> None:
    members = pool(3, pace=0.001)
    for member in members[1:]:
        ask(member, 10)
    find_late(members)
    assert not any(member.is_late for member in members)  # not yet
    members[2].since -= 10
    members[1].since -= 0.05  # within what is never late
    find_late(members)
    assert [member.is_late for member in members] == [False, False, True]
    assert asked(members, 20, 20) == [(0, 10)]
    busy = pool(2, pace=0.001)
    for member in busy:
        ask(member, 10)
        member.since -= 10
    find_late(busy)
    assert not any(member.is_late for member in busy)  # nobody waits for the others


def finished(envs: list[int], numbers: list[int], **more: Any) -> Finished:
    reals = np.arange(len(envs), dtype=float)
    return Finished(reals, np.array(numbers) + 1, {}, {}, reals, np.array(envs), np.array(numbers))._replace(**more)


def fragment(runner: int, life: int, what: Finished) -> Fragment:
    return Fragment(0, runner, life, FragmentReport(0, 0, {}, what, {}, 0, {}, 0.0), {})


def test_episodes_have_numbers_of_their_own_over_all_runners_and_lives() -> None:
    ended = FinishedEpisodes(2)
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
