# SPDX-License-Identifier: Apache-2.0
"""Whole episodes from recordings of all kinds; what is not whole is counted."""

import numpy as np
import pytest
from tabular import GAMMA, WANTS, Chain, played, policy

from etude.errors import DataError, SettingsError
from etude.evaluation import FQEConfig, episodes, evaluate_on
from etude.evaluation.policies import shuffled_rows
from etude.experience import Experience
from etude.recordings import Recording, RecordingWriter

CHEAP = ("is", "wis", "pdis", "wpdis")


def write(path, *parts, **options):
    with RecordingWriter(path, obs_space=Chain.observation_space, action_space=Chain.action_space, **options) as writer:
        for part in parts:
            writer.write(part)
    return path


def same(found, other):
    assert found.episodes == other.episodes
    for name, estimate in found.estimates.items():
        assert estimate.mean == pytest.approx(other.estimates[name].mean, rel=1e-5), name


def test_a_path_a_recording_and_experience_give_the_same(tmp_path):
    exp, algorithm = played(300, seed=1), policy(WANTS)
    path = write(tmp_path / "data", exp)
    results = [evaluate_on(algorithm, d, methods=CHEAP, gamma=GAMMA) for d in (exp, path, Recording.open(path))]
    assert results[0].to_dict() == results[1].to_dict() == results[2].to_dict()
    as_tensors = evaluate_on(algorithm, exp.to("cpu"), methods=CHEAP, gamma=GAMMA)
    assert as_tensors.to_dict() == results[0].to_dict()


def test_pieces_are_joined_in_whatever_order_they_come(tmp_path):
    exp, algorithm = played(40, seed=2), policy(WANTS)
    whole = evaluate_on(algorithm, exp, methods=CHEAP, gamma=GAMMA)
    cut = exp.cut(2)
    shuffled_up = cut.select(np.random.default_rng(0).permutation(cut.num_segments))
    with_context = exp.cut(3, lookback=2)
    for pieces in (cut, shuffled_up, with_context):
        same(evaluate_on(algorithm, pieces, methods=CHEAP, gamma=GAMMA), whole)
    path = write(tmp_path / "cut", *(cut[i] for i in range(cut.num_segments)))
    same(evaluate_on(algorithm, path, methods=CHEAP, gamma=GAMMA), whole)


def test_in_small_chunks_all_is_the_same(monkeypatch):
    exp, algorithm = played(200, seed=3), policy(WANTS)
    fqe = FQEConfig(members=2, steps=30, batch_size=32)
    whole = evaluate_on(algorithm, exp, gamma=GAMMA, methods=CHEAP)
    monkeypatch.setattr(episodes, "CHUNK_ROWS", 37)
    same(evaluate_on(algorithm, exp, gamma=GAMMA, methods=CHEAP), whole)
    assert evaluate_on(algorithm, exp, gamma=GAMMA, methods=["fqe", "dr"], fqe=fqe).episodes == 200


def test_chunks_may_end_in_the_context_of_a_piece(monkeypatch):
    exp, algorithm = played(30, seed=6), policy(WANTS)
    whole = evaluate_on(algorithm, exp, methods=CHEAP, gamma=GAMMA)
    monkeypatch.setattr(episodes, "CHUNK_ROWS", 1)
    same(evaluate_on(algorithm, exp.cut(2, lookback=2), methods=CHEAP, gamma=GAMMA), whole)


def test_what_is_not_whole_is_left_out_and_counted():
    exp, algorithm = played(30, seed=4), policy(WANTS)
    long = np.flatnonzero(exp.lengths >= 3)[:3]
    parts = [exp.select(np.setdiff1d(np.arange(30), long))]
    rest = exp.select(long).cut(1)
    first = np.flatnonzero(rest.segments.t_start == 0)
    keep = np.ones(rest.num_segments, bool)
    keep[first[0]] = False  # without its beginning
    keep[first[1] + 1] = False  # with a gap
    keep[first[2] + int(exp.lengths[long[2]]) - 1] = False  # not done
    found = evaluate_on(algorithm, Experience.concat([*parts, rest.select(keep)]), methods=CHEAP, gamma=GAMMA)
    assert found.episodes == 27
    assert found.left_out == {"with a gap or without their beginning": 2, "not done": 1}
    assert "left out: 2 with a gap or without their beginning\nleft out: 1 not done" in str(found)
    same(found, evaluate_on(algorithm, parts[0], methods=CHEAP, gamma=GAMMA))


def test_steps_that_are_there_twice_make_no_whole_episode():
    exp, algorithm = played(30, seed=4), policy(WANTS)
    long = int(np.flatnonzero(exp.lengths == 3)[0])
    first, _, third = exp[long].cut(1)
    others = exp.select(np.arange(30) != long)
    found = evaluate_on(algorithm, Experience.concat([others, first, first, third]), methods=CHEAP, gamma=GAMMA)
    assert found.episodes == 29
    assert found.left_out == {"with a gap or without their beginning": 1}


def test_nothing_whole_is_an_error(tmp_path):
    path = write(tmp_path / "rows", played(20, seed=5).cut(1).select(slice(0, 1)))
    if Recording.open(path).read().segments.done.any():
        pytest.fail("the first episode has one step")
    with pytest.raises(DataError, match=r"rows: there is no whole episode, from its first step to one that is done"):
        evaluate_on(policy(WANTS), path)


def test_columns_that_must_be_there():
    exp = played(5, seed=6)
    for root in ("obs", "action", "reward"):
        steps = {name: column for name, column in exp.steps.items() if name != root}
        lacking = Experience(steps, exp.offsets, exp.segments, exp.final_obs)
        with pytest.raises(
            DataError, match=f"the experience: there is no column `{root}`, which off-policy evaluation requires"
        ):
            evaluate_on(policy(WANTS), lacking)


def test_rewards_that_are_no_numbers():
    exp = played(5, seed=7)
    reward = exp.steps["reward"].copy()
    reward[exp.offsets[2]] = np.nan
    with pytest.raises(DataError, match="`reward` is nan at t 0 of episode '7-2': its return can't be computed"):
        evaluate_on(policy(WANTS), exp.with_steps(reward=reward))


@pytest.mark.parametrize("buffer_bytes", [10**9, 2_000])
def test_batches_hold_every_row_about_once_a_pass(buffer_bytes):
    def chunks():
        return ({"x": np.arange(at, at + 50), "y": np.arange(at, at + 50) * 2.0} for at in range(0, 500, 50))

    batches = shuffled_rows(chunks, 32, seed=1, buffer_bytes=buffer_bytes)
    taken = [next(batches) for _ in range(160)]  # ten passes
    assert all(len(batch["x"]) == 32 and (batch["y"] == 2 * batch["x"]).all() for batch in taken)
    counts = np.bincount(np.concatenate([batch["x"] for batch in taken]), minlength=500)
    assert counts.min() >= 8
    assert counts.max() <= 22
    again = shuffled_rows(chunks, 32, seed=1, buffer_bytes=buffer_bytes)
    assert all((next(again)["x"] == batch["x"]).all() for batch in taken)
    other = next(shuffled_rows(chunks, 32, seed=2, buffer_bytes=buffer_bytes))
    assert (other["x"] != taken[0]["x"]).any()


def test_few_rows_fill_a_batch():
    (batch,) = [next(shuffled_rows(lambda: iter([{"x": np.arange(3)}]), 8, seed=0))]
    assert sorted(set(batch["x"])) == [0, 1, 2]
    assert len(batch["x"]) == 8


def test_bad_data_are_refused_or_left_out_with_a_note(tmp_path):
    exp, algorithm = played(30, seed=1), policy(WANTS)
    reward = exp.steps["reward"].copy()
    reward[exp.offsets[4]] = np.nan
    path = write(tmp_path / "data", exp.with_steps(reward=reward))
    with pytest.raises(DataError, match="`reward` holds NaN"):
        evaluate_on(algorithm, path, methods=CHEAP)
    with pytest.raises(SettingsError, match="on_bad is 'no'"):
        evaluate_on(algorithm, path, methods=CHEAP, on_bad="no")
    for data, on_bad in ((path, "skip"), (Recording.open(path, on_bad="skip"), "strict")):
        found = evaluate_on(algorithm, data, methods=CHEAP, on_bad=on_bad)
        assert found.episodes == 29
        assert "nan 1 times" in found.notes[-1]
    with pytest.raises(SettingsError, match=r"`on_bad` is 'repair', but has no effect on a Recording that was opened"):
        evaluate_on(algorithm, Recording.open(path), methods=CHEAP, on_bad="repair")
    with pytest.raises(SettingsError, match="`on_bad` is 'skip', but has no effect on Experience"):
        evaluate_on(algorithm, exp, methods=CHEAP, on_bad="skip")


def test_a_greedy_policy_that_nobody_played_is_told_so():
    exp = played(30, seed=1, logits=np.array([[9.0, 0.0]] * 3))
    found = evaluate_on(policy(np.array([[0.0, 1.0]] * 3)), exp, methods=["wis"], explore=False)
    assert found.mean_weight < 0.5
    assert found.trusted is False
    assert any("always takes its most likely action" in note for note in found.notes)
