# SPDX-License-Identifier: Apache-2.0
"""RLlib's tables that are broken: each fault is named with its place."""

import base64
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rllib import mutated, packed
from some_rllib_table import read, rows_of, write

from etude.errors import DataError
from etude.recordings import Recording, validate
from etude.recordings.formats.rllib_table import RLlibTable


def text_obs(rows):
    return pa.array(["not packed at all"] * len(rows["t"]))


def evil(rows):
    class Evil:
        def __reduce__(self):
            return eval, ("1/0",)

    return pa.array([packed(pickle.dumps(Evil()))] * len(rows["t"]))


BROKEN = [
    ({"without": ("actions",)}, "has no column `actions`, which a table of steps needs"),
    ({"obs": text_obs}, "row 0, column `obs`: `obs`: 'not packed at all' is not a packed array"),
    ({"obs": evil}, "a pickle holds the name `builtins.eval`"),
    ({"obs": lambda r: pa.array([[1.0, 2.0]] * 3 + [[1.0]] * 4)}, "row 3, column `obs`: column `obs` has 1 numbers"),
    ({"obs": lambda r: pa.array([None] + [[1.0, 2.0]] * 6)}, "row 0, column `obs`: column `obs` is empty"),
    ({"obs": lambda r: pa.array([[1.0, None]] * 7)}, "row 0, column `obs`: column `obs` is empty or NaN"),
    ({"rewards": lambda r: pa.array(["x"] * 7)}, "row 0, column `rewards`: `reward`: 'x' is not a packed array"),
    ({"eps_id": lambda r: pa.array(["a"] * 5 + [None] * 2)}, "row 5, column `eps_id`: column `episode_id` is empty"),
    ({"obs": lambda r: pa.array([packed(pickle.dumps({"a": i})) for i in range(7)])}, "has another structure"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[m[-30:] for _, m in BROKEN])
def test_broken_columns_are_named(tmp_path, changes, message):
    rows = rows_of([4, 3])
    given = {name: make(rows) if callable(make) else make for name, make in changes.items()}
    path = write(tmp_path / "some.parquet", rows, **given)
    with pytest.raises(DataError, match=f"some.parquet: .*{message}|some.parquet: {message}"):
        read(path)


def test_files_that_do_not_belong_together(tmp_path):
    rows = rows_of([3])
    write(tmp_path / "a.parquet", rows)
    write(tmp_path / "b.parquet", rows, without=("action_logp",))
    with pytest.raises(DataError, match=r"b.parquet: has no column `action_logp`, but .*a.parquet has"):
        Recording.open(tmp_path)


def test_problems_name_what_is_not_finite(tmp_path):
    rows = rows_of([4])
    rows["rewards"][2] = np.inf
    path = write(tmp_path / "a.parquet", rows)
    (problem,) = validate(path).problems
    assert (problem.kind, problem.row, problem.column) == ("nan", 2, "reward")
    assert f"{path}: row 2: column `reward` holds inf" in problem.message


def test_detect(tmp_path):
    assert RLlibTable.detect(write(tmp_path / "a.parquet", rows_of([2])))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    assert not RLlibTable.detect(tmp_path / "b.parquet")


def test_mutated_rows_end_only_in_data_errors(tmp_path):
    rng = np.random.default_rng(2)
    rows = rows_of([3, 2])
    texts = [packed(pickle.dumps(row, 5)) for row in rows["obs"]]
    good = write(tmp_path / "good.parquet", rows).read_bytes()
    refused = 0
    for i in range(300):
        path = tmp_path / "bad.parquet"
        if i % 2:
            path.write_bytes(mutated(good, rng))
        else:
            raw = mutated(base64.b64decode(texts[2]), rng)
            write(path, rows, obs=pa.array([*texts[:2], base64.b64encode(raw).decode(), *texts[3:]]))
        try:
            validate(path)
            Recording.open(path, on_bad=None).read()
        except DataError:
            refused += 1
    assert 100 < refused < 300
