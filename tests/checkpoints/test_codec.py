# SPDX-License-Identifier: Apache-2.0
import collections
import enum
import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.checkpoints.codec import Encoder, decode
from etude.errors import CheckpointError


def same(a, b):
    """Whether two trees are the same in every type and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return b.dtype == object and a.shape == b.shape and same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    return a == b


numpy_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="="),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
    hnp.datetime64_dtypes(),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
arrays = numpy_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shapes))
scalars = numpy_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(shapes)
    count = int(np.prod(shape))
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    size = count * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


keys = st.one_of(st.text(max_size=5), st.just("$"), st.just("__metadata__"), st.just("a/b"), st.integers(), st.none())
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(),
    st.binary(max_size=9),
)
trees = st.recursive(
    st.one_of(plain, arrays, scalars, tensors(), hnp.arrays(object, shapes, elements=st.text(max_size=3) | st.none())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(trees)
def test_decode_undoes_encode_bit_for_bit(tree):
    encoder = Encoder()
    text = json.dumps(encoder.encode(tree), allow_nan=False)
    assert same(decode(json.loads(text), encoder.arrays), tree)


def test_an_int_of_any_size_survives():
    huge = -(7**9999)
    assert decode(json.loads(json.dumps(Encoder().encode(huge))), {}) == huge


def test_arrays_are_named_by_their_path_and_never_twice():
    tree = {"a": {"b": np.zeros(2)}, "a/b": np.ones(2), "__metadata__": np.ones(1), "\ud800": np.ones(3)}
    encoder = Encoder()
    encoded = encoder.encode(tree)
    assert list(encoder.arrays) == ["a/b", "a/b~2", "__metadata__~2", "?"]
    assert same(decode(encoded, encoder.arrays), tree)


def test_strided_and_shared_arrays_are_kept_by_value():
    base = np.arange(12.0).reshape(3, 4)
    tree = {"t": base.T, "s": base[::2, 1], "tt": torch.arange(6).reshape(2, 3).T, "f": np.asfortranarray(base)}
    encoder = Encoder()
    assert same(decode(encoder.encode(tree), encoder.arrays), tree)


def test_parameters_and_mappings_come_back_as_plain_tensors_and_dicts():
    tree = collections.OrderedDict(w=torch.nn.Parameter(torch.ones(2)), n=torch.ones(2, dtype=torch.complex64).conj())
    encoder = Encoder()
    back = decode(encoder.encode(tree), encoder.arrays)
    assert type(back) is dict
    assert type(back["w"]) is torch.Tensor
    assert not back["w"].requires_grad
    assert torch.equal(back["w"], torch.ones(2))


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), r"a builtins\.object"),
        ({1, 2}, r"a builtins\.set"),
        (Colour.RED, r"a .*Colour"),
        (Point(1, 2), r"a .*Point"),
        (np.ma.masked_array([1], [True]), r"a numpy\.ma\..*MaskedArray"),
        (np.zeros(2, [("a", "i4")]), r"an array of dtype \[\('a', '<i4'\)\]"),
        (torch.zeros(2).to_sparse(), r"a tensor that is not dense"),
        (torch.zeros(2, device="meta"), r"a tensor that is not dense"),
        (print, r"a builtins\.builtin_function_or_method"),
    ],
)
def test_what_is_not_plain_data_is_refused_by_path(value, what):
    with pytest.raises(CheckpointError, match=f"can't save `learner/1/x.*`: it is {what}.*Turn it into numbers"):
        Encoder().encode({"learner": [0, {"x": value}]})


def test_what_contains_itself_is_refused_by_path_and_what_comes_twice_is_not():
    itself: list = []
    itself.append(itself)
    with pytest.raises(CheckpointError, match="can't save `x/0`: it is a list that contains itself"):
        Encoder().encode({"x": itself})
    around: dict = {}
    around["y"] = (around,)
    with pytest.raises(CheckpointError, match="can't save `y/0`: it is a dict that contains itself"):
        Encoder().encode(around)
    part = [1]
    assert Encoder().encode([part, part]) == [[1], [1]]


def test_arrays_do_not_belong_into_meta_data():
    with pytest.raises(CheckpointError, match="can't save `a`: it is an array, which does not belong"):
        Encoder(arrays_allowed=False).encode({"a": np.zeros(2)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"$": "pickle"}, "unknown kind of value, 'pickle': it is broken or newer"),
        ({"$": ["array"]}, "unknown kind of value"),
        ({"$": "array", "name": "gone"}, "broken at .*gone.*KeyError"),
        ({"$": "scalar", "hex": "00", "dtype": "O"}, "dtype 'O' is not plain"),
        ({"$": "scalar", "hex": "zz", "dtype": "i4"}, "broken"),
        ({"$": "scalar", "hex": "00", "dtype": "<i4"}, "broken"),
        ({"$": "tensor", "name": "w", "dtype": "load", "shape": [1]}, "'load' is not a dtype"),
        ({"$": "tensor", "name": "w", "dtype": "bfloat16", "shape": [7]}, "broken"),
        ({"$": "dict", "items": [[{"$": "dict", "items": []}, 1]]}, "broken"),
        ({"$": "int", "hex": None}, "broken"),
        ({"$": "tuple"}, "broken.*items"),
    ],
)
def test_broken_data_is_named(data, message):
    with pytest.raises(CheckpointError, match=message):
        decode({"a": [data]}, {"w": np.zeros(4, np.uint8)})
