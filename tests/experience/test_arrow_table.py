# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_experience import NUMBERS, TORCH_NUMBERS, any_bits, assert_same, experiences, numbered

from etude.errors import DataError
from etude.experience import Experience


@given(experiences(with_strings=True))
def test_to_table_then_from_table_is_the_identity(exp):
    table = exp.to_table()
    assert table.num_rows == exp.num_steps
    assert_same(Experience.from_table(table), exp)


@given(experiences(dtypes=TORCH_NUMBERS))
def test_tensors_make_the_same_table(exp):
    assert_same(Experience.from_table(exp.to("cpu").to_table()), exp)


@given(experiences(with_strings=True), st.integers(1, 5))
def test_a_table_in_chunks_and_through_a_file_is_the_same(tmp_path_factory, exp, rows):
    table = exp.to_table()
    chunks = [table.slice(i, rows) for i in range(0, max(1, table.num_rows), rows)]
    assert_same(Experience.from_table(pa.concat_tables(chunks)), exp)
    path = tmp_path_factory.mktemp("file") / "t.parquet"
    pq.write_table(table, path, row_group_size=rows)
    assert_same(Experience.from_table(pq.read_table(path)), exp)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_every_dtype_keeps_every_bit(dtype, shape):
    rng = np.random.default_rng(3)
    exp = numbered([40, 25])
    obs, final = any_bits(rng, dtype, (65, *shape)), any_bits(rng, dtype, (2, *shape))
    exp = Experience(exp.steps | {"obs": obs}, exp.offsets, exp.segments, {"obs": final})
    assert_same(Experience.from_table(exp.to_table()), exp)


@pytest.mark.parametrize(("dtype", "raw"), [("f2", "u2"), ("f4", "u4"), ("f8", "u8")])
def test_nan_payloads_and_signs_survive_and_are_not_taken_for_absent(dtype, raw):
    size = np.dtype(dtype).itemsize * 8
    nan = np.array([np.nan], dtype).view(raw)[0]
    values = np.array([nan | 5, nan | np.array(1, raw) << np.array(size - 1, raw), nan], raw).view(dtype)
    exp = numbered([1, 1, 1]).with_steps(obs=values, reward=values)
    exp = Experience(exp.steps, exp.offsets, exp.segments, {"obs": values.copy()})
    assert_same(Experience.from_table(exp.to_table()), exp)


def test_the_layout_is_what_recordings_promise():
    exp = numbered([2, 3], lookback=[0, 1], t_start=[0, 7], terminated=[True, False], agent_id=["red", None])
    table = exp.to_table()
    assert table["t"].to_pylist() == [0, 1, 7, 8, 9]
    assert table["episode_id"].to_pylist() == ["e0", "e0", "e1", "e1", "e1"]
    assert table["agent_id"].to_pylist() == ["red", "red", None, None, None]
    assert table["segment"].to_pylist() == [0, 0, 2, 2, 2]
    assert table["lookback"].to_pylist() == [False, False, True, False, False]
    assert table["final_obs"].to_pylist() == [None, 2.0, None, None, 103.0]
    assert table["terminated"].to_pylist() == [False, True, False, False, False]
    assert table["truncated"].to_pylist() == [False] * 5
    assert "next_obs" not in table.column_names


def test_images_are_fixed_size_binary_and_vectors_are_lists():
    exp = numbered([2]).with_steps(info=np.zeros((2, 4, 4, 3), np.uint8), action=np.zeros((2, 3), np.float32))
    types = {field.name: field.type for field in exp.to_table().schema}
    assert types["info"] == pa.binary(48)
    assert types["action"] == pa.list_(pa.field("element", pa.float32(), nullable=False), 3)


def test_numbers_are_read_without_a_copy():
    table = numbered([5]).to_table().combine_chunks()
    reward = Experience.from_table(table).steps["reward"]
    address = table["reward"].chunk(0).buffers()[1].address
    assert reward.__array_interface__["data"][0] == address


def test_rows_that_a_filter_left_out_cut_segments():
    exp = numbered([6, 3], terminated=[True, True])
    table = exp.to_table()
    kept = Experience.from_table(table.filter(pc.not_equal(table["t"], 3)))
    assert kept.lengths.tolist() == [3, 2, 3]
    assert kept.segments.t_start.tolist() == [0, 4, 0]
    assert kept.segments.has_final_obs.tolist() == [False, True, True]
    assert kept.segments.terminated.tolist() == [False, True, True]
    kept.validate()


def test_a_foreign_table_needs_only_episode_and_time():
    table = pa.table({"episode_id": ["a", "a", "b"], "t": [0, 1, 0], "obs": [1.0, 2.0, 3.0]})
    exp = Experience.from_table(table)
    assert exp.lengths.tolist() == [2, 1]
    assert exp.segments.agent_id.tolist() == [None, None]
    assert not exp.segments.has_final_obs.any()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward": np.zeros(2, complex)}, "column `reward` has dtype complex128, which a recording can't store"),
        ({"reward": np.zeros(2, ">f4")}, "column `reward` has dtype >f4"),
        ({"reward": np.zeros(2, "U3")}, "column `reward` has dtype <U3"),
        ({"x": np.array([1, "a"], object)}, "column `x` holds objects that a recording can't store"),
        ({"x": np.array([1, 2], object)}, r"column `x` holds objects that are not strings \(int64\)"),
        ({"x": np.array([[1.5], [2]], object)}, r"column `x` holds objects that are not strings"),
        ({"x": np.array(["\ud800", ""], object)}, "column `x` holds objects that a recording can't store"),
        ({"x": np.zeros((2, 0))}, r"column `x` has rows of shape \[0\]: there is nothing to store"),
        ({"t": np.zeros(2)}, "a step column can't be called `t`"),
        ({"final_obs/y": np.zeros(2)}, "a step column can't be called `final_obs/y`"),
    ],
)
def test_what_a_table_cannot_keep_is_named(columns, message):
    with pytest.raises(DataError, match=message):
        numbered([2]).with_steps(**columns).to_table()


def test_an_unknown_string_as_final_obs_is_refused():
    exp = numbered([2, 2])
    steps = exp.steps | {"obs": np.array(list("abcd"), object)}
    exp = Experience(steps, exp.offsets, exp.segments, {"obs": np.array(["x", None], object)})
    with pytest.raises(DataError, match="column `final_obs` holds None, which means an unknown observation"):
        exp.to_table()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"t": [0], "obs": [1.0]}, "the table has no column `episode_id`; it has t, obs"),
        ({"episode_id": ["a"], "obs": [1.0]}, "the table has no column `t`"),
        (
            {"episode_id": ["a"] * 3, "t": [0, 1, 2], "obs": [1.0, None, None]},
            "`obs` has 2 empty rows, the first .* row 1",
        ),
        (
            {"episode_id": ["a"], "t": [0], "obs": [[1.0]]},
            "`obs` has the Arrow type list<.*>, which Experience can't hold",
        ),
    ],
)
def test_tables_that_are_none_of_ours_are_named(table, message):
    with pytest.raises(DataError, match=message):
        Experience.from_table(pa.table(table))
