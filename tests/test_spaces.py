# SPDX-License-Identifier: Apache-2.0
import contextlib
import json

import gymnasium as gym
import numpy as np
import pytest
from checkpoint_documents import places, removed, replaced
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.errors import SpaceError
from etude.spaces import (
    Flattener,
    NamedBox,
    Nester,
    check_value,
    leaf_dtype,
    leaf_shape,
    leaves,
    outside_bounds,
    space_from_json,
    space_to_json,
    with_names,
)

VECTORS = [
    lambda n: spaces.Box(-1, np.arange(n), (n,), np.float64),
    lambda n: spaces.MultiDiscrete(np.arange(n) + 1, start=-np.ones(n, np.int64)),
    spaces.MultiBinary,
]
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)


@st.composite
def boxes(draw, *, widest=True):
    dtype = np.dtype(draw(st.sampled_from(["f2", "f4", "f8", "u1", "i1", "i4", "i8", "u8"])))
    shape = draw(shapes)
    if dtype.kind == "f":
        edges = st.floats(width=dtype.itemsize * 8, allow_nan=False)
        if not widest:  # Gymnasium can't sample from all that it can describe
            edges = st.floats(-1000, 1000, width=16)
        if draw(st.booleans()):
            return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    else:
        most = 2**64 if widest else 100
        edges = st.integers(max(np.iinfo(dtype).min, -most), min(np.iinfo(dtype).max, most))
    a, b = (draw(hnp.arrays(dtype, shape, elements=edges)) for _ in range(2))
    low, high = np.asarray(np.minimum(a, b)), np.asarray(np.maximum(a, b))
    low[low == np.inf], high[high == -np.inf] = 0, 0
    return spaces.Box(low, np.maximum(low, high), shape, dtype.type)


others = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(
        lambda nvec: spaces.MultiDiscrete(nvec, start=-np.ones_like(nvec)),
        hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=3), elements=st.integers(1, 9)),
    ),
    st.builds(
        lambda space, names: with_names(space(len(names)), names),
        st.sampled_from(VECTORS),
        st.lists(st.text(max_size=4), min_size=1, max_size=5),
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 5) | st.lists(st.integers(1, 3), min_size=2, max_size=3)),
)
keys = st.text(st.characters(exclude_characters="/", codec="utf-8"), min_size=1, max_size=3)


@pytest.mark.parametrize("depth", [70, 300])
def test_spaces_too_deep_to_be_meant_are_refused(depth):
    space, data = spaces.Discrete(2), {"type": "Discrete", "n": 2, "start": 0}
    for _ in range(depth):
        space, data = spaces.Tuple([space]), {"type": "Dict", "spaces": [["a", data]]}
    for work in (lambda: leaves(space, "obs"), lambda: space_to_json(space), lambda: space_from_json(data)):
        with pytest.raises(SpaceError, match="64 levels"):
            work()


def nested(*, widest):
    """Spaces of all kinds that Etude handles."""
    return st.recursive(
        others | boxes(widest=widest),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(spaces.Dict),
        ),
        max_leaves=6,
    )


@given(nested(widest=True))
def test_a_space_survives_json(space):
    again = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert again == space
    assert list(leaves(again, "obs")) == list(leaves(space, "obs"))
    for a, b in zip(leaves(again, "obs").values(), leaves(space, "obs").values(), strict=True):
        assert (leaf_dtype(a), leaf_shape(a)) == (leaf_dtype(b), leaf_shape(b))


def _equal(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is b


@given(nested(widest=False), st.integers(0, 99), st.booleans())
def test_nesting_undoes_flattening(space, seed, batched):
    whole = batch_space(space, 3) if batched else space
    whole.seed(seed)
    value = whole.sample()
    columns = Flattener(space, "obs")(value)
    assert list(columns) == list(leaves(space, "obs"))
    nested_again = Nester(space, "obs")(columns)
    assert type(nested_again) is type(value)
    assert _equal(nested_again, value)
    for name, leaf in leaves(space, "obs").items():
        shape = ((3,) if batched else ()) + leaf_shape(leaf)
        assert np.shape(columns[name]) == shape


@given(nested(widest=False), st.integers(0, 99))
def test_samples_fit_their_space(space, seed):
    space.seed(seed)
    check_value(space, space.sample(), "obs")


def test_columns_are_named_by_their_path():
    space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (4, 4, 3), np.uint8), "arms": spaces.Tuple([spaces.Discrete(2)] * 2)}
    )
    assert set(leaves(space, "obs")) == {"obs/camera", "obs/arms/0", "obs/arms/1"}
    assert list(leaves(spaces.Discrete(3), "action")) == ["action"]


def test_bounds_that_are_all_alike_are_one_number():
    data = space_to_json(spaces.Box(-np.inf, 1, (84, 84)))
    assert (data["low"], data["high"]) == ("-inf", 1.0)
    assert space_to_json(gym.make("CartPole-v1").observation_space)["high"][1] == "inf"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(3), "`obs` is a Text space. Etude handles Box, .* turn this part into one of them"),
        (spaces.Dict(a=spaces.Tuple([spaces.Graph(spaces.Discrete(2), None)])), "`obs/a/0` is a Graph space"),
        (spaces.Dict({"a/b": spaces.Discrete(2)}), "`obs`: the key 'a/b' holds a '/'"),
        (spaces.Box(-1, 1, (2,), np.dtype("=f4").newbyteorder()), "byte order is not this machine's: .* dtype float32"),
    ],
)
def test_spaces_that_are_not_handled_are_named(space, message):
    with pytest.raises(SpaceError, match=message):
        leaves(space, "obs")


def test_unknown_spaces_are_not_written_down():
    with pytest.raises(SpaceError, match="a Text space can't be saved"):
        space_to_json(spaces.Tuple([spaces.Text(3)]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "Cube"}, "unknown kind of space: 'Cube'"),
        ({}, r"this does not describe a space: \{\}"),
        ([], "this does not describe a space"),
        ({"type": "Box", "dtype": "f4", "shape": [2], "low": [0], "high": 1}, "does not describe a space"),
        ({"type": "Box", "dtype": "what", "shape": [2], "low": 0, "high": 1}, "does not describe a space"),
        ({"type": "Box", "dtype": "float32", "shape": [2], "low": "low", "high": 1}, "does not describe a space"),
        ({"type": "Discrete", "n": -1, "start": 0}, "does not describe a space"),
        ({"type": "Dict", "spaces": {"a": 1}}, "does not describe a space"),
        ({"type": "Tuple", "spaces": None}, "does not describe a space"),
        ({"type": "MultiBinary", "n": [-1]}, "does not describe a space"),
    ],
)
def test_data_that_describes_no_space_is_named(data, message):
    with pytest.raises(SpaceError, match=message):
        space_from_json(data)


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (BOX, np.zeros(3, np.float32), r"`obs` has shape \(3,\), but its space Box.* has shape \(2,\)"),
        (BOX, np.array([0, np.nan], np.float32), r"`obs` holds NaN at \[1\]"),
        (
            spaces.Box(0, 255, (1,), np.uint8),
            np.array([0.5]),
            "`obs` has dtype float64, but its space .* has dtype uint8",
        ),
        (spaces.Discrete(3), 3, "`obs` is 3, outside its space Discrete"),
        (spaces.Discrete(3), 1.5, "`obs` has dtype float64"),
        (spaces.MultiDiscrete([2, 2]), np.array([0, 2]), r"`obs` is \[0 2\], outside its space MultiDiscrete"),
        (spaces.Dict(a=BOX), {"b": 1}, "`obs/a` is missing: `obs` is a dict with b"),
        (spaces.Dict(a=BOX), np.zeros(2), "`obs` is of type ndarray, but must be a dict with a"),
        (spaces.Dict(a=BOX), {"a": np.zeros(1)}, r"`obs/a` has shape \(1,\)"),
        (spaces.Tuple([BOX, BOX]), (np.zeros(2),), "`obs` has 1 of the 2 parts"),
    ],
)
def test_values_that_do_not_fit_are_shown_beside_their_space(space, value, message):
    with pytest.raises(SpaceError, match=message):
        check_value(space, value, "obs")


@pytest.mark.parametrize(
    ("low", "high", "dtype", "inside", "outside"),
    [
        (0.0, 1.0, np.float64, [1.0000000000000002, -1e-9, 1.000001], [1.001, -1e-4]),
        (-np.pi, np.pi, np.float32, [np.nextafter(np.float32(np.pi), np.float32(4))], [3.1425]),
        (0.0, np.inf, np.float32, [-1e-7, 1e30], [-0.001]),
        (-np.inf, 0.0, np.float32, [1e-7], [0.001]),
        (0.0, 1e-6, np.float64, [1.000001e-6], [1.01e-6, -1e-8]),
        (-1e6, 1e6, np.float32, [1_000_000.1], [1_000_100.0]),
        (-1.0, 1e9, np.float32, [-1.000001], [-1.001]),
        (0.0, 1e9, np.float32, [-1e-6], [-1e-3]),
        (0.0, 0.0, np.float64, [0.0], [1e-9]),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, np.float32, [np.finfo(np.float32).max], []),
    ],
)
def test_floats_may_be_outside_their_bounds_by_a_rounding_error(low, high, dtype, inside, outside):
    box = spaces.Box(low, high, (2,), dtype)
    middle = np.clip(0.5, low, high)
    for value in inside:
        assert outside_bounds(box, np.array([middle, value], dtype)).tolist() == [False, False]
    for value in outside:
        array = np.array([[middle, value], [value, middle]], dtype)
        assert outside_bounds(box, array).tolist() == [[False, True], [True, False]]
        check_value(box, array[0], "obs")


def test_whole_numbers_may_not_be_outside_their_bounds():
    box = spaces.Box(0, 100_000, (1,), np.int32)
    assert outside_bounds(box, np.array([[100_001], [100_000], [-1]], np.int32)).tolist() == [[True], [False], [True]]


# -- what a file may say --------------------------------------------------------------------------------------------


def test_a_large_picture_is_a_space_as_any_other():
    picture = spaces.Box(0, 255, (2000, 2000, 3), np.uint8)
    made = space_from_json(space_to_json(picture))
    assert (made.shape, made.dtype, made.low.max(), made.high.min()) == ((2000, 2000, 3), np.uint8, 0, 255)


@pytest.mark.parametrize(
    "space",
    [
        {"type": "Box", "dtype": "uint8", "shape": [12000, 12000, 3], "low": 0, "high": 1},
        {"type": "MultiBinary", "n": [2**20, 2**20]},
        {"type": "Tuple", "spaces": [{"type": "MultiBinary", "n": [2**26]}] * 3},
    ],
)
def test_a_space_that_would_fill_the_memory_is_refused_with_the_limit_and_the_reason(space):
    with pytest.raises(SpaceError, match=r"of shape \[.*\], the space has more than 134,217,728 numbers .* memory"):
        space_from_json(space)


def test_what_could_not_be_read_again_is_not_written():
    with pytest.raises(SpaceError, match=r"MultiBinary of shape \[\d+\], the space has more than 134,217,728 numbers"):
        space_to_json(spaces.MultiBinary(2**28))
    space, data = spaces.Discrete(2), space_to_json(spaces.Discrete(2))
    for _ in range(64):
        space, data = spaces.Tuple([space]), {"type": "Tuple", "spaces": [data]}
    assert space_from_json(data) == space
    assert space_to_json(space) == data
    for deep in (70, 480, 5000, 100_000):
        deeper = data
        for _ in range(deep - 64):
            deeper = {"type": "Tuple", "spaces": [deeper]}
        with pytest.raises(SpaceError, match="more than 64 levels"):
            space_from_json(deeper)
    with pytest.raises(SpaceError, match="more than 64 levels"):
        space_to_json(spaces.Tuple([space]))


HOSTILE = (
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    "x",
    "O",
    "f4,f4",
    [],
    [[]],
    {},
    ["a"],
    [2**40] * 3,
    {"type": "Box"},
)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, np.array([1, 2], np.float32), (2,), np.float32),
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary([2, 3]),
        spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Tuple([spaces.Discrete(2)])),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_changed_anywhere_it_is_a_space_or_a_space_error(space):
    data = space_to_json(space)
    for place in places(data):
        changed = [replaced(data, place, value) for value in HOSTILE]
        for one in [*changed, removed(data, place)]:
            with contextlib.suppress(SpaceError):
                leaves(space_from_json(one), "obs")
    for value in HOSTILE:
        with pytest.raises(SpaceError):
            space_from_json(value)


def test_a_named_box_equals_boxes_and_those_with_other_names_but_none_with_its_names_in_another_order():
    box = NamedBox(-1, 1, ["speed", "load"])
    assert box == spaces.Box(-1, 1, (2,))
    assert spaces.Box(-1, 1, (2,)) == box
    assert box == NamedBox(-1, 1, ["speed", "weight"])
    assert box != NamedBox(-1, 1, ["load", "speed"])
    assert spaces.Dict(a=box) != spaces.Dict(a=NamedBox(-1, 1, ["load", "speed"]))
    assert box != NamedBox(-1, 2, ["speed", "load"])
    assert repr(box) == "Box(-1.0, 1.0, (2,), float32: speed, load)"
    again = space_from_json(json.loads(json.dumps(space_to_json(box))))
    assert isinstance(again, NamedBox)
    assert again.names == ("speed", "load")
    assert batch_space(box, 3).shape == (3, 2)
    for names in ("ab", [1, 2]):
        with pytest.raises(SpaceError, match="the names of a NamedBox are .*: give a list of texts"):
            NamedBox(-1, 1, names)
    for vector in (make(2) for make in VECTORS):
        one, other = with_names(vector, ["speed", "load"]), with_names(vector, ["load", "speed"])
        assert type(one).__name__ == f"Named{type(vector).__name__}"
        assert one == vector == other != one
        assert repr(one) == repr(vector)[:-1] + ": speed, load)"
        assert with_names(vector, ["speed"]) is vector
        assert space_from_json(space_to_json(one)).names == ("speed", "load")
    data = space_to_json(box) | {"names": ["speed"]}
    with pytest.raises(SpaceError, match="this does not describe a space"):
        space_from_json(data)
