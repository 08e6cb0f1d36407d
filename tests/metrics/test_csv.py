# SPDX-License-Identifier: Apache-2.0
import csv
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

from etude.errors import DataError
from etude.metrics import JSONLines, write_csv


def written(folder, rows):
    sink = JSONLines(folder / "m.jsonl")
    for row in rows:
        sink.write(row)
    sink.close()
    write_csv(folder / "m.jsonl", folder / "m.csv")
    return folder / "m.csv"


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_a_row_is_a_line_with_all_columns(tmp_path):
    path = written(
        tmp_path,
        [
            {"iteration": 1, "losses": {"policy": np.float32(0.5)}, "note": 'a "b", c'},
            {"iteration": np.int64(2), "losses": {"policy": 0.25, "value": 1e-20}, "resumed": None},
            {"losses": {"value": math.nan, "policy": -math.inf}, "iteration": 3, "ids": [1, 2.5], "note": "x\ny"},
        ],
    )
    none = {"losses/value": "", "resumed": "", "ids": "", "note": ""}
    assert read(path) == [
        none | {"iteration": "1", "losses/policy": "0.5", "note": 'a "b", c'},
        none | {"iteration": "2", "losses/policy": "0.25", "losses/value": "1e-20"},
        none | {"iteration": "3", "losses/policy": "-inf", "note": "x\ny", "ids": "[1, 2.5]"},
    ]


def test_other_readers_read_it(tmp_path):
    path = written(tmp_path, [{"a": 0.1}, {"b": {"c": 2}}])
    assert arrow_csv.read_csv(path).to_pylist() == [{"a": 0.1, "b/c": None}, {"a": None, "b/c": 2}]


numbers = st.floats(allow_nan=False) | st.integers()
rows = st.dictionaries(st.text(min_size=1, max_size=3).filter(str.isprintable), numbers, min_size=1)


@settings(max_examples=30)
@given(st.lists(rows, min_size=1, max_size=6))
def test_every_number_comes_back_exactly(tmp_path_factory, lines):
    path = written(tmp_path_factory.mktemp("csv"), lines)
    names = list(dict.fromkeys(name for row in lines for name in row))
    for row, found in zip(lines, read(path), strict=True):
        assert list(found) == names
        assert {name: repr(value) for name, value in row.items()} == {k: v for k, v in found.items() if v}


def test_it_replaces_what_is_there_and_nothing_else(tmp_path):
    path = written(tmp_path, [{"a": 1}])
    path.write_text("old")
    write_csv(tmp_path / "m.jsonl", path)
    assert path.read_text() == "a\n1\n"
    assert {file.name for file in tmp_path.iterdir()} == {"m.csv", "m.jsonl"}


def test_what_can_not_be_read_or_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"can't read the metrics .*gone\.jsonl"):
        write_csv(tmp_path / "gone.jsonl", tmp_path / "m.csv")
    written(tmp_path, [{"a": 1}])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"can't write metrics to .*m\.csv: (Not a directory|File exists)"):
        write_csv(tmp_path / "m.jsonl", tmp_path / "file" / "m.csv")
