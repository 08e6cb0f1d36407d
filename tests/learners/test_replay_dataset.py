# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.learners import ReplayDataset


def experience(lengths: list[int], lookback: list[int] | None = None, seed: int = 0, **more: Any) -> Experience:
    """Segments with a nested observation, which ends by turns: terminated, truncated, cut."""
    rng = np.random.default_rng(seed)
    rows, num = sum(lengths), len(lengths)
    steps = {
        "obs/a": rng.normal(size=(rows, 2)).astype(np.float32),
        "obs/b": rng.integers(5, size=rows),
        "action": rng.integers(3, size=rows),
        "reward": rng.normal(size=rows),
        **more,
    }
    final = {"obs/a": rng.normal(size=(num, 2)).astype(np.float32), "obs/b": rng.integers(5, size=num)}
    segments = Segments.of(
        num,
        episode_id=[str(i) for i in range(num)],
        lookback=np.array(lookback or [0] * num, np.int64),
        terminated=np.arange(num) % 3 == 0,
        truncated=np.arange(num) % 3 == 1,
        has_final_obs=np.arange(num) % 5 != 4,
    )
    return Experience(steps, offsets_of(np.array(lengths, np.int64)), segments, final)


def naive(exp: Experience, num_samples: int, stride: int) -> list[list[dict[str, Any]]]:
    """Of each sample its steps, without what is behind the end."""
    samples = []
    for segment in exp:
        where = segment.segments
        steps = []
        for i in range(int(where.lookback[0]), segment.num_steps):
            is_last = i == segment.num_steps - 1
            step = {name: column[i] for name, column in segment.steps.items()}
            for name, final in segment.final_obs.items():
                step["next_" + name] = final[0] if is_last else segment.steps[name][i + 1]
            step["terminated"] = is_last and bool(where.terminated[0])
            step["truncated"] = is_last and bool(where.truncated[0])
            step["mask"] = not is_last or bool(where.has_final_obs[0])
            steps.append(step)
        begin = 0
        while begin < len(steps):
            samples.append(steps[begin : begin + num_samples])
            if begin + num_samples >= len(steps):
                break
            begin += stride
    return samples


collections = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=4).map(
        lambda pairs: [(length, min(back, length)) for length, back in pairs]
    ),
    min_size=1,
    max_size=4,
)


@given(collections, st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_samples_are_those_of_a_naive_cut_of_the_last_collections(
    drawn: list[list[tuple[int, int]]], num_samples: int, stride: int, kept: int
) -> None:
    dataset = ReplayDataset(num_samples, stride=stride, collections=kept, next_obs=True)
    parts = [experience([n for n, _ in c], [b for _, b in c], seed=i) for i, c in enumerate(drawn)]
    for part in parts:
        dataset.add(part)
    wanted = [sample for part in parts[-kept:] for sample in naive(part, num_samples, stride)]
    assert len(dataset) == len(wanted)
    assert dataset.num_steps == sum(n - b for c in drawn[-kept:] for n, b in c)
    has_gaps = False
    for i, steps in enumerate(wanted):
        sample = dataset[i]
        for name, column in sample.items():
            assert len(column) == num_samples
            for t, step in enumerate(steps):
                np.testing.assert_array_equal(column[t], step[name], err_msg=name)
        has_gaps |= len(steps) < num_samples or not all(step["mask"] for step in steps)
        assert not sample["mask"][len(steps) :].any()
        assert all(set(sample) == set(step) for step in steps)
    assert dataset.has_gaps == has_gaps


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 7))
def test_without_a_stride_each_step_is_in_one_sample(lengths: list[int], num_samples: int) -> None:
    dataset = ReplayDataset(num_samples)
    exp = experience(lengths)
    dataset.add(exp)
    columns = dataset.gather(np.arange(len(dataset)))
    np.testing.assert_array_equal(columns["reward"][columns["mask"]], exp.steps["reward"])


def test_behind_the_end_the_last_step_is_repeated() -> None:
    dataset = ReplayDataset(4)
    dataset.add(experience([2]))
    sample = dataset[0]
    assert sample["mask"].tolist() == [True, True, False, False]
    assert (sample["reward"][1:] == sample["reward"][1]).all()


def test_torch_loads_it() -> None:
    dataset = ReplayDataset(3, stride=2, next_obs=True)
    dataset.add(experience([7, 4, 9]))
    loaded = list(DataLoader(dataset, batch_size=4))
    assert sum(len(batch["obs/a"]) for batch in loaded) == len(dataset)
    gathered = dataset.gather(np.arange(4))
    for name, column in loaded[0].items():
        assert torch.equal(column, torch.from_numpy(gathered[name])), name
    assert torch.equal(dataset[-1]["action"], dataset[len(dataset) - 1]["action"])
    with pytest.raises(IndexError, match=f"sample {len(dataset)} of {len(dataset)}"):
        dataset[len(dataset)]


def test_batches_go_in_passes_over_all_samples_each_in_a_new_order() -> None:
    dataset = ReplayDataset(seed=0)
    exp = experience([12])
    dataset.add(exp)
    got = [b["reward"][:, 0] for b in dataset.batches(5, 12)]
    assert [len(rewards) for rewards in got] == [5] * 12
    passes = np.concatenate(got).reshape(5, 12)
    for one in passes:
        assert sorted(one) == sorted(exp.steps["reward"])
    assert len({tuple(one) for one in passes}) == 5
    for size in (None, 100):
        (whole,) = dataset.batches(size, 1)
        assert len(whole["reward"]) == 12


def test_strings_are_left_out() -> None:
    dataset = ReplayDataset()
    dataset.add(experience([3], note=np.array(["a", None, "b"], object)))
    assert "note" not in dataset[0]


def test_its_state_goes_on_exactly() -> None:
    one, other = (ReplayDataset(2, collections=2, next_obs=True) for _ in range(2))
    one.add(experience([5, 2], seed=1))
    one.add(experience([3], seed=2))
    state = one.state_dict()
    other.load_state_dict(state)
    for dataset in (one, other):
        dataset.add(experience([4], seed=3))
    state["steps"]["reward"][:] = 0  # nobody else holds it
    assert len(one) == len(other) == 4
    for i in range(len(one)):
        a, b = one[i], other[i]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    for x, y in zip(one.batches(3, 5), other.batches(3, 5), strict=True):
        np.testing.assert_array_equal(x["reward"], y["reward"])


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda: ReplayDataset(0), SettingsError, "`num_samples` is 0, but must be at least 1"),
        (lambda: ReplayDataset(2, stride=0), SettingsError, "`stride` is 0, but must be at least 1"),
        (lambda: ReplayDataset(collections=0), SettingsError, "`collections` is 0, but must be at least 1"),
        (
            lambda: ReplayDataset().add(experience([2], mask=np.ones(2))),
            DataError,
            "a step column can't be called `mask`: the dataset adds mask, terminated, truncated, next_obs itself",
        ),
        (lambda: _two({}, {"x": np.ones(2)}), DataError, "those before it differ: only one of them has column `x`"),
        (
            lambda: _two({"x": np.ones(2)}, {"x": np.ones((2, 3), np.float32)}),
            DataError,
            r"column `x` is float32\[3\], not float64. Convert it first",
        ),
        (
            lambda: next(ReplayDataset().batches(1, 1)),
            DataError,
            "no steps to learn from: the collections that are kept are empty",
        ),
    ],
)
def test_errors(act: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        act()


def _two(first: dict[str, Any], second: dict[str, Any]) -> None:
    dataset = ReplayDataset(collections=2)
    dataset.add(experience([2], **first))
    dataset.add(experience([2], **second))
