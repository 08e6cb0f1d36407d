# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from etude import columns as col
from etude import envs, recordings


@pytest.mark.parametrize(
    ("name", "root", "inside"),
    [
        ("obs", "obs", True),
        ("obs/camera", "obs", True),
        ("obs/camera/left", "obs/camera", True),
        ("observed", "obs", False),
        ("obs", "obs/camera", False),
        ("next_obs/x", "obs", False),
    ],
)
def test_a_column_is_under_its_root_only(name, root, inside):
    assert col.is_under(name, root) is inside
    assert col.under([name, "reward"], root) == ([name] if inside else [])


def test_a_subtree_keeps_names_order_and_values():
    a, b = np.zeros(1), np.ones(1)
    columns = {"obs/b": b, "reward": a, "obs/a": a}
    assert list(col.subtree(columns, "obs")) == ["obs/b", "obs/a"]
    assert col.subtree(columns, "obs")["obs/b"] is b


def test_renaming_changes_the_root_alone():
    assert col.renamed({"obs/obs/x": 1, "obs": 2, "observed": 3}, "obs", "next_obs") == {
        "next_obs/obs/x": 1,
        "next_obs": 2,
    }


def test_columns_of_arrays_have_one_name():
    assert envs.Columns is col.Columns
    assert not hasattr(recordings, "Batch")
