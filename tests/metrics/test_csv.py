# SPDX-License-Identifier: Apache-2.0
import csv
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

from etude.errors import DataError
from etude.metrics import CSV, cut_csv


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_rows_come_back_and_the_header_grows(tmp_path):
    path = tmp_path / "run" / "metrics.csv"
    sink = CSV(path)
    sink.write({"iteration": 1, "losses": {"policy": np.float32(0.5)}, "note": 'a "b", c'})
    assert len(read(path)) == 1, "a row must be readable while the file is open"
    sink.write({"iteration": np.int64(2), "losses": {"policy": torch.tensor(0.25), "value": 1e-20}, "resumed": None})
    sink.write({"losses": {"value": math.nan, "policy": -math.inf}, "iteration": 3, "ids": [1, 2.5], "note": "x\ny"})
    sink.close()
    sink.close()
    none = {"losses/value": "", "resumed": "", "ids": ""}
    assert read(path) == [
        {"iteration": "1", "losses/policy": "0.5", "note": 'a "b", c'} | none,
        {"iteration": "2", "losses/policy": "0.25", "note": ""} | none | {"losses/value": "1e-20"},
        {"iteration": "3", "losses/policy": "-inf", "note": "x y"} | none | {"losses/value": "nan", "ids": "[1, 2.5]"},
    ]
    assert len(path.read_text().splitlines()) == 4
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


def test_other_readers_read_it(tmp_path):
    sink = CSV(tmp_path / "m.csv")
    sink.write({"a": 0.1})
    sink.write({"b": {"c": 2}})
    sink.close()
    assert arrow_csv.read_csv(tmp_path / "m.csv").to_pylist() == [{"a": 0.1, "b/c": None}, {"a": None, "b/c": 2}]


rows = st.dictionaries(st.text(min_size=1, max_size=3).filter(str.isprintable), st.floats() | st.integers(), min_size=1)


@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 5))
def test_every_number_comes_back_exactly(tmp_path_factory, written, reopened):
    path = tmp_path_factory.mktemp("csv") / "m.csv"
    sink = CSV(path)
    for i, row in enumerate(written):
        if i == reopened:
            sink.close()
            sink = CSV(path)
        sink.write(row)
    sink.close()
    names = list(dict.fromkeys(name for row in written for name in row))
    for row, found in zip(written, read(path), strict=True):
        assert list(found) == names
        assert {name: repr(value) for name, value in row.items()} == {k: v for k, v in found.items() if v}


def test_an_existing_file_is_continued_and_a_torn_last_line_taken_off(tmp_path):
    path = tmp_path / "m.csv"
    path.write_bytes(b'a,b\n1,2\n3,"4')
    sink = CSV(path)
    sink.write({"b": 6, "a": 5})
    sink.close()
    assert path.read_bytes() == b"a,b\n1,2\n5,6\n"
    path.write_bytes(b"a,")
    sink = CSV(path)
    sink.write({"c": 1})
    sink.close()
    assert path.read_bytes() == b"c\n1\n"


def test_every_row_written_before_a_kill_is_there(tmp_path):
    path = tmp_path / "m.csv"
    code = (
        "from etude.metrics import CSV\n"
        f"sink = CSV({str(path)!r})\n"
        "for i in range(10**9):\n    sink.write({'i': i, f'n{min(i, 50)}': i})\n    print(i, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        seen = [int(child.stdout.readline()) for _ in range(70)]
        child.send_signal(signal.SIGKILL)
        child.wait()
    CSV(path).close()  # takes off what is torn
    found = [int(row["i"]) for row in read(path)]
    assert found[:70] == seen
    assert found == list(range(len(found)))


def test_cutting_takes_off_what_came_after(tmp_path):
    path = tmp_path / "m.csv"
    cut_csv(path, 3)
    assert not path.exists()
    for text in (b"", b"a\n1\n", b"iteration,a\n"):
        path.write_bytes(text)
        cut_csv(path, 3)
        assert path.read_bytes() == text
    path.write_bytes(b'iteration,a\n1,"x, y"\n,no iteration\n2,\n3,4\n40,5\n4')
    cut_csv(path, 2)
    assert path.read_bytes() == b'iteration,a\n1,"x, y"\n,no iteration\n2,\n'


def test_what_is_no_table_is_named(tmp_path):
    path = tmp_path / "m.csv"
    path.write_bytes(b"a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"m\.csv, line 3 has 1 cells, but the first line names 2 columns\. Mend or"):
        CSV(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"m\.csv is no CSV file \(.*\): move it away"):
        cut_csv(path, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"can't write metrics to .*metrics\.csv: (Not a directory|File exists)"):
        CSV(tmp_path / "file" / "metrics.csv")
