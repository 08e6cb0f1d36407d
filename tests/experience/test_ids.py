# SPDX-License-Identifier: Apache-2.0
"""Ids read as the array of names that they stand for, whatever was done with them."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import Experience, Segments
from etude.experience.ids import Ids

NAMES = st.lists(st.sampled_from(["", "a", "b", "ab", "äß", None]), max_size=8)


def forms(names):
    """The same names as they are made, coded, cut from more, and out of several tables."""
    plain = Ids.of(names, len(names))
    coded = Ids.of(names, len(names))
    assert len(coded.codes) == len(names)
    more = Ids.of(["x", *names, "y", "a"], len(names) + 3)
    assert len(more.codes) == len(names) + 3
    part = more[1:-2]
    return plain, coded, part, Ids.concat([plain[:2], part[2:]]), pickle.loads(pickle.dumps(part))  # noqa: S301


@given(names=NAMES)
def test_all_forms_read_as_the_array_of_names(names):
    array = np.empty(len(names), object)
    array[:] = names
    for ids in forms(names):
        assert (len(ids), list(ids), ids.tolist()) == (len(names), names, names)
        assert [ids[i] for i in range(len(names))] == names
        assert ids[::-1].tolist() == names[::-1]
        assert ids[array == "a"].tolist() == [name for name in names if name == "a"]
        assert str(ids) == repr(ids) == str(array)
        for other in ("a", "nobody", None, array, Ids.of(names, len(names)), ids):
            wanted = array == (np.asarray(other) if isinstance(other, Ids) else other)
            assert (ids == other).tolist() == wanted.tolist()
            assert (ids != other).tolist() == (~wanted).tolist()
        assert ids.repeat(2).tolist() == array.repeat(2).tolist()
        assert ids.mapped(lambda name: len(name or ""), np.int64).tolist() == [len(name or "") for name in names]


@given(names=NAMES)
def test_equal_names_have_equal_codes_of_a_table_of_names_that_differ(names):
    for ids in forms(names):
        assert [ids.names[code] for code in ids.codes] == names
        assert len(set(ids.names)) == len(ids.names)


def test_one_name_stands_for_all_and_a_wrong_number_is_an_error():
    assert Ids.of("ab", 3).tolist() == ["ab"] * 3
    assert Ids.of(None, 2).tolist() == [None, None]
    for names in (["a"], ["a", "b"]):
        with pytest.raises(ValueError, match=f"{len(names)} ids for 3 segments"):
            Ids.of(names, 3)


def test_they_do_not_change_with_what_they_were_made_of():
    given_names = np.array(["a", "b"], object)
    ids = Ids.of(given_names, 2)
    given_names[0] = "c"
    assert ids.tolist() == ["a", "b"]
    np.array(ids)[0] = "c"
    assert ids.tolist() == ["a", "b"]
    with pytest.raises(TypeError):
        ids[0] = "c"


def test_a_part_is_pickled_without_the_names_of_the_whole():
    whole = Ids.of([f"a long name of an episode {i}" for i in range(1000)], 1000)
    assert len(whole.codes) == 1000
    assert len(pickle.dumps(whole[3:5])) < 1000


def test_a_dictionary_with_a_name_twice_and_a_null_in_it_is_read():
    codes, names = pa.array([0, 2, 1, None, 3]), pa.array(["a", "b", "a", None])
    table = pa.table({"episode_id": ["e"] * 5, "agent_id": pa.DictionaryArray.from_arrays(codes, names), "t": range(5)})
    exp = Experience.from_table(table)
    assert exp.segments.agent_id.tolist() == ["a", "b", None]
    assert exp.lengths.tolist() == [2, 1, 2]


def test_tracks_are_equal_where_episode_and_agent_are():
    segments = Segments.of(5, episode_id=["a", "b", "a", "a", "a"], agent_id=["x", "x", "y", None, "x"])
    tracks = segments.tracks()
    assert [[int(i) for i in np.flatnonzero(tracks == track)] for track in tracks] == [[0, 4], [1], [2], [3], [0, 4]]
