# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept: the last few, and the best few."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_envs import Echo

import etude
from etude.algorithms import BC, PPO, BCConfig, Checkpoints, PPOConfig, Result
from etude.algorithms.checkpoint import score_of
from etude.checkpoints import load_meta, remove_tree, save_tree
from etude.errors import CheckpointError, SettingsError
from etude.metrics import read_jsonl
from etude.modules import NetworkConfig


@pytest.fixture(scope="module")
def base() -> Result:
    return PPO(PPOConfig(env=Echo, num_envs=1, num_steps=8, minibatch_size=8, epochs=1, seed=1)).train()


class Saves:
    """What `Checkpoints` needs of an algorithm, without the time it takes to be one."""

    def save(self, path: Any, *, result: Result) -> None:
        global NOW
        NOW += 1.0
        save_tree(path, {"i": result.iteration}, meta={"time": NOW, "result": result.to_dict()})


NOW = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.algorithms.checkpoint.time.time", lambda: NOW)


def save(kept: Checkpoints, base: Result, iteration: int, score: float) -> str:
    return kept.save(Saves(), dataclasses.replace(base, iteration=iteration, return_mean=score))  # type: ignore[arg-type]


def test_better_results_are_saved_between_two_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.algorithms.algorithm._REST", 0.0)  # however long saving takes
    out = tmp_path / "run"
    config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=1)
    kept = Checkpoints(out / "checkpoints", keep_last=1, keep_best=2, best_is="min")
    PPO(config).fit(etude.Stop(env_steps=64 * 20), out=out, checkpoints=kept, save_interval=3600.0)
    rows = read_jsonl(out / "metrics.jsonl")
    best = sorted(rows, key=lambda row: row["return_mean"])[:2]
    assert best[1]["return_mean"] < rows[-1]["return_mean"]
    assert set(there(out / "checkpoints")) == {row["iteration"] for row in (*best, rows[-1])}


def test_what_would_be_among_the_best(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=1, keep_best=2, best_is="min")
    for iteration, score in enumerate([5.0, 3.0]):
        assert kept.would_be_best(dataclasses.replace(base, return_mean=score))
        save(kept, base, iteration, score)
    better = [kept.would_be_best(dataclasses.replace(base, return_mean=score)) for score in (6.0, 4.0, 1.0, math.nan)]
    assert better == [False, True, True, False]
    assert not Checkpoints(tmp_path / "none", keep_best=0).would_be_best(base)


def there(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.iterdir())


def test_the_last_and_the_best_are_kept(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    assert kept.best() is kept.latest() is None
    for iteration, score in enumerate([5.0, 9.0, 1.0, 7.0, math.nan, 2.0]):
        path = save(kept, base, iteration, score)
        assert kept.latest() == path == str(tmp_path / f"checkpoint-{iteration:06d}")
    assert there(tmp_path) == [1, 3, 4, 5]
    assert kept.best() == str(tmp_path / "checkpoint-000001")
    assert [each.iteration for each in kept.all()] == [1, 3, 4, 5]
    assert [each.score for each in kept.ranked()] == [9.0, 7.0, 2.0]


@given(
    scores=st.lists(st.sampled_from([math.nan, -math.inf, 0.0, 1.0, 2.0, math.inf]), min_size=1, max_size=9),
    last=st.integers(1, 3),
    best=st.integers(0, 3),
    mode=st.sampled_from(["max", "min"]),
    again=st.integers(0, 9),
)
def test_what_is_kept_is_as_if_chosen_from_all(
    base: Result, tmp_path_factory: Any, scores: list[float], last: int, best: int, mode: Any, again: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    made = {"keep_last": last, "keep_best": best, "best_is": mode}
    kept = Checkpoints(folder, **made)
    for i, score in enumerate(scores):
        if i == again:
            kept = Checkpoints(folder, **made)  # of the folders alone
        save(kept, base, i, score)
        numbers = [j for j in range(i + 1) if not math.isnan(scores[j])]
        sign = 1.0 if mode == "max" else -1.0
        order = sorted(numbers, key=lambda j: (sign * scores[j], j), reverse=True)
        assert there(folder) == sorted({*order[:best], *range(max(0, i + 1 - last), i + 1)})
        assert (kept.best() is None) == (not [j for j in there(folder) if not math.isnan(scores[j])])
        if order and best:
            assert kept.best() == str(folder / f"checkpoint-{order[0]:06d}")


def test_all_may_be_kept(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=None, keep_best=0)
    for i in range(5):
        save(kept, base, i, 0.0)
    assert there(tmp_path) == [0, 1, 2, 3, 4]


def test_a_kill_between_saving_and_removing_leaves_one_too_many_which_goes_with_the_next(
    base: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    save(kept, base, 1, 0.0)

    def killed(path: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("etude.algorithms.checkpoint.remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(kept, base, 2, 0.0)
    assert there(tmp_path) == [1, 2]
    kept = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    assert kept.latest() == str(tmp_path / "checkpoint-000002")
    save(kept, base, 3, 0.0)
    assert there(tmp_path) == [3]


def test_what_a_killed_process_left_half_removed_or_half_saved_goes(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=3)
    save(kept, base, 1, 1.0)
    save(kept, base, 2, 2.0)
    (tmp_path / "checkpoint-000002" / "checkpoint.json").unlink()
    (tmp_path / "checkpoint-000003").mkdir()
    (tmp_path / "notes").mkdir()
    again = Checkpoints(tmp_path, keep_last=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "notes"]
    assert again.best() == again.latest() == str(tmp_path / "checkpoint-000001")


def test_a_run_that_went_back_keeps_what_it_saves(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    for i in (8, 9):
        save(kept, base, i, 0.0)
    for made in (kept, Checkpoints(tmp_path, keep_last=2, keep_best=0)):
        path = save(made, base, 5, 0.0)
        assert there(tmp_path) == [5, 9]
        assert made.latest() == Checkpoints(tmp_path).latest() == path


def test_an_iteration_that_is_saved_again_is_replaced(base: Result, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    save(kept, base, 1, 5.0)
    save(kept, base, 1, 3.0)
    assert [each.score for each in kept.all()] == [each.score for each in Checkpoints(tmp_path).all()] == [3.0]


def test_behind_a_url(base: Result) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    kept = Checkpoints("memory://run", keep_last=1, keep_best=1)
    for i, score in enumerate([1.0, 5.0, 2.0, 3.0]):
        save(kept, base, i, score)
    assert kept.best() == "memory://run/checkpoint-000001"
    assert [each.iteration for each in Checkpoints("memory://run").all()] == [1, 3]
    assert load_meta(kept.best())["result"]["return_mean"] == 5.0


def test_runs_are_saved_and_loaded(tmp_path: Path) -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20, minibatch_size=10, epochs=1, seed=1))
    kept = Checkpoints(tmp_path, keep_last=1, keep_best=1, metric="losses/value", best_is="min")
    losses = []
    for _ in range(4):
        result = algorithm.train()
        losses.append(result.losses["value"])
        kept.save(algorithm, result)
    best = kept.best()
    assert best is not None
    assert etude.load(best, env=Echo).iteration == 1 + int(np.argmin(losses))
    assert etude.load(kept.latest(), env=Echo).iteration == 4


def test_scores() -> None:
    result = {"a": 1, "b": {"c": 2.0, "d/e": 3.0, "f": {"mean": 4.0}, "g/h": {"max": 5}}, "resumed": None}
    found = [score_of(result, name) for name in ("a", "b/c", "b/d/e", "b/f/mean", "b/g/h/max")]
    assert found == [1, 2, 3, 4, 5]
    assert all(math.isnan(score_of(result, name)) for name in ("b", "b/x", "b/f", "resumed", "b/f/mean/x", "x"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_last": 0}, "`keep_last` is 0, but must be at least 1, or None to keep all"),
        ({"keep_best": -1}, "`keep_best` is -1, but must be at least 0"),
        ({"best_is": "most"}, "`best_is` is 'most', but must be 'max' or 'min'"),
        ({"metric": "retrn_mean"}, "`metric` is 'retrn_mean', but results have no such field. Nearest: `return_mean`"),
        ({"metric": "qqq"}, "`metric` is 'qqq', but results have no such field. There are iteration, env_steps, "),
    ],
)
def test_settings_that_can_not_be(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Checkpoints(tmp_path, **given)


def test_checkpoints_that_are_not_of_such_a_folder(tmp_path: Path, base: Result) -> None:
    save_tree(tmp_path / "checkpoint-000001", {})
    with pytest.raises(CheckpointError, match="checkpoint-000001 was saved without a result: take it out of"):
        Checkpoints(tmp_path)
    remove_tree(tmp_path / "checkpoint-000001")
    assert Checkpoints(tmp_path).all() == []


def test_a_score_that_no_result_has_is_told_of(tmp_path: Path) -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20, minibatch_size=10, epochs=1, seed=1))
    kept = Checkpoints(tmp_path, metric="losses/polcy")
    with pytest.warns(
        UserWarning, match=r"the result has no `losses/polcy`, .* It has losses/policy, losses/value and"
    ):
        kept.save(algorithm, algorithm.train())
    assert kept.best() is None


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recording of CartPole-v1."""
    folder = tmp_path_factory.mktemp("played") / "data"
    algorithm = PPO(PPOConfig(env="CartPole-v1", seed=0, num_envs=2, num_steps=64))
    algorithm.record(folder, 20, explore=True)
    algorithm.close()
    return str(folder)


def erratic(played: str, **given: Any) -> BC:
    """An algorithm whose weights are another policy after each update."""
    small = NetworkConfig(hidden=(8,))
    return BC(BCConfig(data=played, env="CartPole-v1", seed=1, lr=0.5, network=small, batch_size=64, **given))


def earned(checkpoint: str | None) -> float:
    """What the policy of a checkpoint earns in the evaluations of its run."""
    assert checkpoint is not None
    algorithm = etude.load(checkpoint)
    try:
        return algorithm.evaluate(algorithm.config.evaluation.episodes, seed=algorithm.runner_seed).return_mean
    finally:
        algorithm.close()


@pytest.mark.parametrize("save_interval", [0.0, 3600.0])
@pytest.mark.parametrize(("interval", "beside"), [(1, False), (3, False), (1, True), (3, True)])
def test_the_best_offline_earned_its_score(
    played: str, tmp_path: Path, interval: int, beside: bool, save_interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.algorithms.algorithm._REST", 0.0)  # however long saving takes
    given = {"updates_per_iteration": 1, "evaluation_interval": interval, "evaluate_beside": beside}
    algorithm = erratic(played, evaluation_episodes=4, **given)
    kept = Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=2)
    algorithm.fit(etude.Stop(updates=12), out=tmp_path, checkpoints=kept, save_interval=save_interval)
    algorithm.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    scores = {row["evaluation"]["updates"]: row["evaluation"]["return_mean"] for row in rows if row["evaluation"]}
    assert len(scores) == 12 // interval
    assert [each.score for each in kept.ranked()[:2]] == sorted(scores.values(), reverse=True)[:2]
    for each in kept.ranked()[:2]:
        assert each.score == scores[each.iteration] == earned(each.path)
    assert [*map(str, Checkpoints(tmp_path / "checkpoints").ranked())] == [*map(str, kept.ranked())]


def test_the_best_of_evaluations_online_earned_its_score(tmp_path: Path) -> None:
    config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, seed=1, lr=0.1, evaluation_interval=3)
    algorithm, kept = PPO(config), Checkpoints(tmp_path, keep_last=1, metric="evaluation/return_mean")
    results = []
    for _ in range(11):
        results.append(algorithm.train())
        kept.save(algorithm, results[-1])
    algorithm.close()
    assert kept.ranked()[0].score == max(result.evaluation["return_mean"] for result in results[2:])
    assert kept.ranked()[0].iteration % 3 == 0
    assert kept.ranked()[0].score == earned(kept.best())


def test_an_evaluation_that_never_ends_leaves_its_checkpoint_without_a_score(played: str, tmp_path: Path) -> None:
    algorithm, kept = (
        erratic(played, updates_per_iteration=1, evaluation_interval=1, evaluate_beside=True),
        Checkpoints(tmp_path),
    )
    kept.save(algorithm, result := algorithm.train())
    algorithm.close()
    assert (result.evaluation, result.evaluating) == ({}, 1)
    again = Checkpoints(tmp_path)
    assert again.best() is None
    assert [each.iteration for each in again.all()] == [1]
