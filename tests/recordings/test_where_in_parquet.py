# SPDX-License-Identifier: Apache-2.0
"""A filter given as text is pushed down to Parquet, and means the same there, in NumPy and in Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import numbered, record

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings import Recording
from etude.recordings.where import RowFilter

ROWS = 64
LENGTHS = [10, 20, 4, 30]
ON_BAD = ("strict", "skip", None)


def facts() -> Experience:
    """Columns of every type, with what is hard about it: NaN, infinity, the ends of the type, no text at all."""
    exp = numbered(LENGTHS, agent_id=["a", None, "b", ""])
    rng = np.random.default_rng(0)
    floats = rng.choice([0.0, -0.0, 0.1, 0.5, -3, 1e30, np.nan, np.inf, -np.inf], ROWS)
    columns = {
        "id": np.arange(ROWS),
        "small": rng.choice([-128, -1, 0, 3, 127], ROWS).astype(np.int8),
        "large": rng.choice(np.array([0, 3, 2**53 + 1, 2**64 - 1], np.uint64), ROWS),
        "double": floats,
        "single": floats.astype(np.float32),
        "half": rng.choice([0.0, 0.1, 0.5, np.nan], ROWS).astype(np.float16),
        "flag": rng.random(ROWS) < 0.5,
        "word": rng.choice(np.array(["a", "b", "é", "", None], object), ROWS),
    }
    columns["double"][:12] = [*[0.5] * 5, np.nan, *[0.5] * 6]  # statistics of these groups are silent about NaN
    columns["word"][12:24] = ["b", None] * 6
    return exp.with_steps(**{f"info/{name}": values for name, values in columns.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("facts") / "data"
    record(path, facts())
    for file in path.glob("*.parquet"):
        pq.write_table(pq.read_table(file), file, row_group_size=12)  # cuts through segments
    return path


NUMBERS = ["`info/small`", "`info/large`", "`info/double`", "`info/single`", "`info/half`", "t", "reward", "action"]
VALUES = ["0", "3", "-1", "0.1", "0.5", "127", "128", "-1e30", "1e999", str(2**53 + 1), str(2**64), "True", "-3.0"]
WORDS = ["`info/word`", "agent_id", "episode_id", "module_id"]
compared = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
number, value, word = st.sampled_from(NUMBERS), st.sampled_from(VALUES), st.sampled_from(WORDS)
among = st.lists(value, max_size=3).map(lambda values: f"[{', '.join(values)}]")
conditions = st.one_of(
    st.tuples(number, compared, value),
    st.tuples(value, compared, number),
    st.tuples(value, compared, number, compared, value),
    st.tuples(number, compared, number),
    st.tuples(number, st.sampled_from(["in", "not in"]), among),
    st.tuples(number, st.sampled_from(["+ 1 > 3", "// 2 == 1", "/ 3 < 1"])),
    st.tuples(word, compared, st.sampled_from(["'a'", "''", "'é'", "'e1'", r"'\ud800'"])),
    st.tuples(word, st.sampled_from(["in ('a', 'e2')", "not in ['', 'b']", "in ()"])),
    st.tuples(st.sampled_from(["terminated", "`info/flag`", "`info/flag` == False", "truncated != True"])),
    st.tuples(st.sampled_from(["`info/flag` < True", "`info/flag` == 1", "obs[1] > 8", "2 > 1"])),
).map(" ".join)
conditions = st.recursive(
    conditions,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(lambda p: f"({''.join(p)})"),
        inner.map(lambda x: f"not {x}"),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def read(folder: Path) -> dict[Any, tuple[Recording, Experience]]:
    """The recording, and all of it, by what it does with what is bad."""
    recordings = {on_bad: Recording.open(folder, on_bad=on_bad) for on_bad in ON_BAD}
    return {on_bad: (recording, recording.read()) for on_bad, recording in recordings.items()}


@settings(max_examples=150, deadline=None)
@given(conditions, st.sampled_from(ON_BAD))
def test_parquet_leaves_out_no_step_that_numpy_keeps(read: Any, text: str, on_bad: Any) -> None:
    text = f"{text} and t >= 0"  # names a column in any case
    recording, whole = read[on_bad]
    expected = RowFilter(text).holds(whole)
    some = recording.read(columns=["info/id"], filter=text)
    some.validate()
    assert list(some.steps) == ["info/id"]
    assert some.steps["info/id"].tolist() == whole.steps["info/id"][expected].tolist()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("episode_id == 'e2'", 1),
        ("episode_id in ('e0', 'e2') and obs[0] > -1", 2),
        ("t >= 0 and episode_id == 'no such'", 0),
        ("episode_id == 'e2' or t < 3", 6),
        ("episode_id in ()", 0),
    ],
)
def test_row_groups_that_can_not_match_are_not_read(folder: Path, text: str, groups: int) -> None:
    (file,) = folder.glob("*.parquet")
    (fragment,) = ds.dataset(file).get_fragments()
    pushed = RowFilter(text).episodes()
    schema = fragment.physical_schema
    assert (
        len(fragment.split_by_row_group() if pushed is None else fragment.split_by_row_group(pushed, schema)) == groups
    )


def test_a_text_and_an_expression_of_arrow_give_the_same(folder: Path) -> None:
    recording = Recording.open(folder)
    by_text = recording.read(columns=["obs"], filter="t < 4 and episode_id != 'e1'")
    by_arrow = recording.read(columns=["obs"], filter=(pc.field("t") < 4) & (pc.field("episode_id") != "e1"))
    for name in by_text.segments.__slots__:
        np.testing.assert_array_equal(getattr(by_text.segments, name), getattr(by_arrow.segments, name))
    np.testing.assert_array_equal(by_text.steps["obs"], by_arrow.steps["obs"])
    assert by_text.segments.has_final_obs.tolist() == [False, True, False]
    np.testing.assert_array_equal(by_text.final_obs["obs"], by_arrow.final_obs["obs"])


@pytest.mark.parametrize("text", ["t >= 8", "obs[1] >= 8"])
def test_steps_of_lookback_stay_untrained(tmp_path: Path, text: str) -> None:
    record(tmp_path, numbered([10, 10], t_start=[6, 0], lookback=[4, 0]))
    exp = Recording.open(tmp_path).read(filter=text)
    assert exp.steps["obs"][exp.trained(), 1].tolist() == [10, 11, 12, 13, 14, 15, 8, 9]


def test_recordings_read_as_one_are_filtered_by_the_ids_that_they_have_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        record(tmp_path / name, numbered([3, 4]))
    recording = Recording.open([tmp_path / "one", tmp_path / "two"])
    assert recording.read(filter="episode_id == '1-e0'").num_steps == 3
    assert recording.read(filter="episode_id == 'e0'").num_steps == 0


@pytest.mark.parametrize("text", ["nowhere > 1", "t <", "reward", "t == 'x'", "obs > 1"])
def test_a_text_that_is_no_condition_is_named(folder: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="the filter .* can't be used"):
        Recording.open(folder).read(filter=text)


def test_what_is_neither_text_nor_an_expression_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="can't be applied"):
        Recording.open(folder).read(filter=3)  # type: ignore[arg-type]
