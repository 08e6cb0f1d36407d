# SPDX-License-Identifier: Apache-2.0
"""Replay against a replay in plain Python: what is stored, what is drawn, and what follows it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_replay import NaiveReplay, lives
from some_experience import bits, numbered

from etude.errors import DataError, SettingsError
from etude.experience import Experience, Priorities, Replay, Segments, trajectories

PRIORITIES = [None, Priorities(alpha=0.7)]


def both(experiences, capacity, n_step, priorities=None, gamma=0.9):
    replay = Replay(capacity, n_step=n_step, gamma=gamma, priorities=priorities, seed=0)
    naive = NaiveReplay(capacity, n_step, gamma)
    for exp in experiences:
        exp.validate()
        replay.add(exp)
        naive.add(exp)
        yield replay, naive


@given(lives(), st.integers(1, 14), st.integers(1, 4), st.sampled_from(PRIORITIES))
def test_each_step_that_can_be_drawn_is_drawn_with_what_followed_it(exps, capacity, n_step, priorities):
    for replay, naive in both(exps, capacity, n_step, priorities):
        assert replay.num_steps == len(naive.stored)
        assert replay.num_added == len(naive.steps)
        assert replay.can_sample(len(naive.stored))
        assert not replay.can_sample(len(naive.stored) + 1)
        if not naive.stored:
            with pytest.raises(DataError, match="no step to draw"):
                replay.sample(1)
            continue
        batch = replay.sample(200)  # of at most 14
        assert set(batch["index"].tolist()) == set(naive.stored)
        expected = [naive.with_n_step_returns(index) for index in batch["index"].tolist()]
        for name in expected[0]:
            column = np.array([one[name] for one in expected])
            if name == "next_obs":  # behind a terminated end it means nothing
                column, batch[name] = (np.where(batch["terminated"], 0, x) for x in (column, batch[name]))
            assert bits(batch[name]) == bits(column), name
        extra = {"index", "weight"} if priorities else {"index"}
        assert batch.keys() == expected[0].keys() | extra


@given(lives(), st.integers(1, 14), st.integers(1, 6), st.integers(0, 3))
def test_sequences_are_steps_of_one_episode_with_those_before_them(exps, capacity, length, lookback):
    for replay, naive in both(exps, capacity, 1):
        if not naive.stored:
            continue
        drawn = replay.sample_sequences(400, length, lookback)
        drawn.validate()
        places = {step["obs"]: i for i, (chain, place) in enumerate(naive.steps) for step in [chain.steps[place]]}
        stored = {naive.steps[i][0].steps[naive.steps[i][1]]["obs"] for i in naive.stored}
        assert set(drawn.steps["obs"][drawn.trained()]) == stored
        first = drawn.steps["obs"][drawn.offsets[:-1]] * 100 + drawn.segments.lookback
        for i in np.unique(first, return_index=True)[1]:
            segment, context = drawn[int(i)], int(drawn.segments.lookback[i])
            assert_is_part_of(segment, naive, length + context, context)
            before = naive.steps[places[segment.steps["obs"][0]]]
            if context < lookback and before[1] > 0:  # more would be wanted, and is no longer stored
                earlier = before[0].steps[before[1] - 1]["obs"]
                assert places[earlier] not in naive.stored


def test_each_step_of_an_episode_is_in_about_as_many_sequences():
    replay = Replay(100, seed=0)
    replay.add(numbered([40]))
    drawn = replay.sample_sequences(20_000, 10)
    counts = np.bincount((drawn.steps["obs"] - drawn.steps["obs"].min()).astype(int), minlength=40)
    assert counts.min() > 0.4 * np.median(counts)
    assert counts.max() < 1.5 * np.median(counts)


def assert_is_part_of(segment: Experience, naive: NaiveReplay, length: int, lookback: int = 0) -> None:
    chain, place = naive.find(segment.steps["obs"][0])
    own, rows = segment.segments, chain.steps[place : place + length]
    assert segment.num_steps == len(rows)
    for name, column in segment.steps.items():
        assert bits(column) == bits(np.array([row[name] for row in rows])), name
    assert (own.episode_id[0], own.agent_id[0], own.module_id[0]) == chain.key
    assert (own.t_start[0], own.lookback[0]) == (rows[0]["t"], lookback)
    goes_on = place + length < len(chain.steps)
    final = chain.steps[place + length]["obs"] if goes_on else chain.final_obs
    assert segment.final_obs["obs"][0] == final
    assert own.terminated[0] == (chain.terminated and not goes_on)
    assert own.truncated[0] == (chain.truncated and not goes_on)
    assert own.has_final_obs[0] == (chain.known or goes_on)


@given(lives(), st.integers(1, 14), st.integers(1, 3), st.sampled_from(PRIORITIES))
def test_pieces_or_all_at_once_are_the_same(exps, capacity, n_step, priorities):
    one, all_at_once = (Replay(capacity, n_step=n_step, priorities=priorities, seed=3) for _ in range(2))
    for exp in exps:
        one.add(exp)
    all_at_once.add(Experience.concat(exps))
    assert one.num_steps == all_at_once.num_steps
    if one.can_sample(1):
        a, b = one.sample(30), all_at_once.sample(30)
        assert {n: bits(c) for n, c in a.items()} == {n: bits(c) for n, c in b.items()}


@given(lives(), st.integers(1, 14))
def test_in_mapped_files_or_in_memory_is_the_same(tmp_path_factory, exps, capacity):
    folder = tmp_path_factory.mktemp("replay")
    in_memory, mapped = (Replay(capacity, n_step=2, seed=1, path=path) for path in (None, folder / "steps"))
    for exp in exps:
        for replay in (in_memory, mapped):
            replay.add(exp)
        if in_memory.can_sample(1):
            a, b = in_memory.sample(20), mapped.sample(20)
            assert {n: bits(c) for n, c in a.items()} == {n: bits(c) for n, c in b.items()}
            assert all(type(column) is np.ndarray for column in b.values())
    names = {path.name for path in (folder / "steps").iterdir()}
    assert names == {"obs.bin", "action.bin", "reward.bin", "state_in%2Fh.bin", "final_obs.bin"}
    assert (folder / "steps" / "obs.bin").stat().st_size == 4 * (capacity + 1)


def test_a_second_replay_in_a_folder_leaves_the_first_one_its_steps(tmp_path: Path) -> None:
    first = Replay(8, path=tmp_path, seed=0)
    first.add(numbered([5]))
    Replay(8, path=tmp_path).add(numbered([1]))
    assert set(first.sample(100)["obs"]) == {0, 1, 2, 3, 4}


def test_nested_observations_and_actions_keep_their_names() -> None:
    exp = numbered([3])
    steps = {"obs/a": exp.steps["obs"], "obs/b": np.ones((3, 2), np.uint8), "action/0": exp.steps["action"]}
    exp = Experience(
        {**steps, "reward": exp.steps["reward"]},
        exp.offsets,
        exp.segments,
        {"obs/a": exp.final_obs["obs"], "obs/b": np.full((1, 2), 7, np.uint8)},
    )
    replay = Replay(10, seed=0)
    replay.add(exp)
    batch = replay.sample(50)
    assert batch.keys() == {*steps, "reward", "next_obs/a", "next_obs/b", "terminated", "discount", "index"}
    assert bits(batch["next_obs/a"]) == bits(batch["obs/a"] + np.float32(1))
    last = batch["obs/a"] == 2
    assert (batch["next_obs/b"][last] == 7).all()
    assert (batch["next_obs/b"][~last] == 1).all()


@pytest.mark.parametrize("name", ["terminated", "discount", "index", "next_obs", "weight"])
def test_columns_with_the_names_of_a_batch_s_own_are_refused(name: str) -> None:
    exp = numbered([3])
    with pytest.raises(DataError, match=f"a replay can't store the column `{name}`"):
        Replay(10, priorities=Priorities()).add(exp.with_steps(**{name: np.ones(3, np.float32)}))
    with pytest.raises(DataError, match=r"`reward` of the experience has rows of shape \(1,\), but"):
        Replay(10).add(exp.with_steps(reward=np.ones((3, 1), np.float32)))
    plain = Replay(10, seed=0)
    plain.add(exp.with_steps(weight=np.full(3, 0.5, np.float32)))
    assert set(plain.sample(5)["weight"].tolist()) == {0.5}


def test_many_trajectories_at_once_find_room() -> None:
    replay = Replay(500, seed=0)
    replay.add(numbered([1] * 300, terminated=True))
    replay.add(numbered([1] * 300, episode_id=[f"later{i}" for i in range(300)]))
    expected = {f"e{i}" for i in range(100, 300)} | {f"later{i}" for i in range(300)}
    assert set(replay.sample_sequences(8000, 1).segments.episode_id) == expected


def test_uniform_draws_are_uniform() -> None:
    replay = Replay(100, seed=0)
    replay.add(numbered([70, 80]))
    counts = np.bincount(np.concatenate([replay.sample(1000)["index"] for _ in range(100)]))[50:]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 148.2  # the 99.9 % quantile with 99 degrees of freedom


def test_the_same_seed_draws_the_same() -> None:
    batches = []
    for _ in range(2):
        replay = Replay(100, seed=5)
        replay.add(numbered([70]))
        batches.append(replay.sample(10)["index"].tolist())
    assert batches[0] == batches[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity is 0, but a replay needs at least 1"),
        ({"n_step": 0}, "n_step is 0"),
        ({"gamma": 1.1}, "gamma is 1.1, but a discount factor is from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(SettingsError, match=message):
        Replay(**{"capacity": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, "`alpha` is -0.1, but must be at least 0"),
        ({"beta": 2.0}, "`beta` is 2.0, but must be between 0 and 1"),
        ({"epsilon": 0.0}, "`epsilon` is 0.0, but must be above 0"),
    ],
)
def test_priorities_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(SettingsError, match=message):
        Priorities(**settings)


def test_what_can_not_be_added_is_refused_and_leaves_the_rest_as_it_was() -> None:
    exp = numbered([4])
    replay = Replay(10, seed=0)
    with pytest.raises(DataError, match=r"needs observations and `reward`, but there are the columns \['obs'\]"):
        replay.add(Experience({"obs": exp.steps["obs"]}, exp.offsets, exp.segments, exp.final_obs))
    with pytest.raises(DataError, match=r"`obs` is a Tensor, but a replay holds NumPy: use exp.numpy\(\)"):
        replay.add(exp.to("cpu"))
    listed = {**exp.steps, "info/x": [0, 1, 2, 3]}
    with pytest.raises(DataError, match=r"`info/x` is a list, but a replay holds NumPy"):
        replay.add(Experience(listed, exp.offsets, exp.segments, exp.final_obs))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"`info/x` holds objects"):
        replay.add(exp.with_steps(**{"info/x": np.full(4, None, object)}))
    with pytest.raises(DataError, match="final_obs and observations differ: column `obs` is float64, not float32"):
        replay.add(Experience(exp.steps, exp.offsets, exp.segments, {"obs": np.zeros(1)}))
    replay.add(exp)
    with pytest.raises(DataError, match="those in the replay differ: only one of them has column `logp`"):
        replay.add(exp.with_steps(logp=exp.steps["obs"]))
    with pytest.raises(DataError, match=r"column `action` is float32\[2\], not int64. Convert it first"):
        replay.add(exp.with_steps(action=np.zeros((4, 2), np.float32)))
    assert replay.num_steps == 4
    replay.add(exp[0:0])  # nothing is no error
    with pytest.raises(ValueError, match="length of at least 1"):
        replay.sample_sequences(3, 0)
    with pytest.raises(DataError, match="none is stored"):
        Replay(4).sample_sequences(1, 1)


def test_what_came_of_a_terminated_end_needs_no_final_observation() -> None:
    segments = Segments.of(1, episode_id=["e"], terminated=True, has_final_obs=False)
    steps = {"obs": np.ones(2, np.float32), "reward": np.array([1.0, 2.0])}
    replay = Replay(4, n_step=2, gamma=0.5, seed=0)
    replay.add(Experience(steps, np.array([0, 2]), segments, {"obs": np.zeros(1, np.float32)}))
    batch = replay.sample(20)
    assert replay.num_steps == 2
    assert batch["terminated"].all()
    assert not batch["discount"].any()
    assert set(batch["reward"]) == {2.0}


def test_steps_that_nothing_is_known_to_follow_are_not_stored() -> None:
    exp, replay = numbered([3]), Replay(4, seed=0)
    unknown = exp.with_segments(has_final_obs=np.array([False]))
    replay.add(unknown[0:0])
    replay.add(unknown.split(2)[1])
    assert not replay.can_sample(1)
    with pytest.raises(DataError, match="none is stored.* needs an observation after it"):
        replay.sample(1)
    replay.add(unknown)
    batch = replay.sample(50)
    assert set(zip(batch["obs"].tolist(), batch["next_obs"].tolist(), strict=True)) == {(0.0, 1.0), (1.0, 2.0)}


def test_a_replay_larger_than_the_memory_is_refused_at_once() -> None:
    segments = Segments.of(1, episode_id=["e"], terminated=True, has_final_obs=False)
    steps = {"obs": np.zeros((1, 2**20)), "reward": np.zeros(1)}
    exp = Experience(steps, np.array([0, 1]), segments, {"obs": np.zeros((1, 2**20))})
    with pytest.raises(SettingsError, match=r"100,000,000 steps takes .* GiB .* Choose a smaller `capacity`"):
        Replay(100_000_000).add(exp)


def test_the_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "limit").write_text(f"{2**20}\n")
    monkeypatch.setattr(trajectories, "_LIMITS", [str(tmp_path / name) for name in ("none", "unlimited", "limit")])
    segments = Segments.of(1, episode_id=["e"], terminated=True, has_final_obs=False)
    exp = Experience(
        {"obs": np.zeros((1, 2**10)), "reward": np.zeros(1)}, np.array([0, 1]), segments, {"obs": np.zeros((1, 2**10))}
    )
    for capacity, told in ((50, False), (100, True)):
        caplog.clear()
        Replay(capacity).add(exp)
        assert ("A checkpoint copies" in caplog.text) == told
    with pytest.raises(SettingsError, match="a replay of 200 steps"):
        Replay(200).add(exp)
