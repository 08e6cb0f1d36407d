# SPDX-License-Identifier: Apache-2.0
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import assert_same, numbered

from etude.experience import Experience, Segments
from etude.recordings.episodes import Assembler


def pieces_of(exp, bounds):
    """Each episode cut where told, the pieces of all in order of time."""
    cut = [piece for one, size in zip(exp, bounds, strict=True) for piece in one.cut(size)]
    return sorted(cut, key=lambda piece: int(piece.segments.t_start[0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6), st.integers(1, 4))
def test_episodes_come_out_whole_whatever_they_were_cut_into(sizes, at_once):
    exp = numbered([length for length, _ in sizes])
    held = Assembler(together=True)
    pieces = pieces_of(exp, [size for _, size in sizes])
    out = []
    for i in range(0, len(pieces), at_once):
        given_now = held.add(Experience.concat(pieces[i : i + at_once]))
        assert all(part.segments.done.all() for part in given_now)
        out += given_now
        state = held.state_dict()  # as if it were saved and loaded after each step
        held = Assembler(together=True)
        held.load_state_dict(state)
    assert held.rest() == []
    assert held.state_dict() is None
    whole = Experience.concat(out)
    order = np.argsort(whole.segments.episode_id.astype(str), kind="stable")
    assert_same(whole.select(order), exp.select(np.argsort(exp.segments.episode_id.astype(str))))


def test_an_episode_waits_for_all_its_agents():
    both = numbered([6, 4], agent_id=["a", "b"], episode_id=["e", "e"])
    a, b = both
    held = Assembler(together=True)
    first, second = a.cut(3)
    assert held.add(Experience.concat([first, b])) == []
    (out,) = held.add(second)
    assert_same(out, both)


def test_what_was_added_to_longest_ago_goes_first_where_memory_is_full():
    exp = numbered([10, 10, 10])
    one, two, three = (episode.cut(5) for episode in exp)
    size = sum(column.nbytes for column in (*one[0].steps.values(), *one[0].final_obs.values()))
    held = Assembler(together=True, max_bytes=2 * size)
    assert held.add(one[0]) == []
    assert held.add(two[0]) == []
    (early,) = held.add(three[0])
    assert_same(early, one[0])  # cut: its last observation is known
    assert early.final_obs["obs"].tolist() == [[0, 5, 5]]
    (late,) = held.add(one[1])
    assert late.segments.t_start.tolist() == [5]
    (rest,) = held.rest()
    assert rest.segments.episode_id.tolist() == ["e1", "e2"]
    assert held.rest() == []


def test_what_is_held_is_copied():
    (piece, rest) = numbered([8]).cut(4)
    held = Assembler(together=True)
    held.add(piece)
    piece.steps["obs"][:] = 77
    piece.segments.t_start[:] = 77
    (out,) = held.add(rest)
    assert_same(out, numbered([8]))


def test_rows_in_front_are_left_out():
    exp = numbered([5, 3, 4], t_start=np.array([0, 2, 0]), lookback=np.array([0, 2, 1]))
    left = exp.without_first(exp.segments.lookback)
    assert left.lengths.tolist() == [5, 1, 3]
    assert left.segments.t_start.tolist() == [0, 4, 1]
    assert not left.segments.lookback.any()
    assert left.steps["obs"][:, 1].tolist() == [0, 1, 2, 3, 4, 4, 1, 2, 3]
    assert exp.without_first(np.array([5, 7, -3])).segments.episode_id.tolist() == ["e2"]
    assert exp.without_first(np.zeros(3, np.int64)) is exp


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6), st.randoms())
def test_pieces_in_any_order_make_whole_episodes(sizes, random):
    exp = numbered([length for length, _ in sizes])
    pieces = pieces_of(exp, [size for _, size in sizes])
    random.shuffle(pieces)
    assembler, missing = Assembler(), {one.segments.episode_id[0]: one.num_steps for one in exp}
    out = {}
    for piece in pieces:
        name = piece.segments.episode_id[0]
        whole = assembler.add(piece)
        missing[name] -= piece.num_steps
        assert (not whole) == (missing[name] > 0)
        for episode in whole:
            out[name] = episode
    assert not assembler.waiting
    for one in exp:
        assert_same(out[one.segments.episode_id[0]], one)


def test_an_assembler_knows_what_is_missing():
    first, second, third = numbered([9]).cut(3)
    assembler = Assembler()
    assert assembler.add(third) == []
    assert assembler.add(first) == []
    (waiting,) = assembler.waiting.values()
    assert (waiting.num_steps, waiting.total) == (6, 9)
    (twice,) = assembler.add(first)  # as many steps, but not those that are missing
    assert twice.num_segments > 1
    late = Assembler(lengths={hash("e0"): 6})  # its beginning was never recorded
    assert late.add(third) == []
    (whole,) = late.add(second)
    assert whole.segments.t_start.tolist() == [3]


def test_an_endless_episode_does_not_hold_the_others() -> None:
    assembler = Assembler(together=True)
    tracemalloc.start()
    try:
        for k in range(200):
            segments = Segments.of(
                10, episode_id=["endless", *(f"{k}-{i}" for i in range(9))], t_start=[k] + [0] * 9,
                terminated=[False] + [True] * 9,
            )  # fmt: skip
            obs = np.full((91, 100), k, np.float32)
            offsets = np.append(0, 1 + 10 * np.arange(10))
            exp = Experience({"obs": obs}, offsets, segments, {"obs": obs[:10]})
            assert sum(one.num_segments for one in assembler.add(exp)) == 9
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 200 * 91 * 100 * 4 / 3
    (rest,) = assembler.rest()
    assert rest.segments.episode_id.tolist() == ["endless"]
    assert set(rest.steps["obs"][:, 0].astype(int).tolist()) == set(range(200))
