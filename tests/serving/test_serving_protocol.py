"""Values of spaces and steps, as clients send them."""

import json

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from etude.serving.protocol import JSON, MSGPACK, RequestError, check_fields, decode, encode, read_step, read_value
from etude.spaces import Flattener, NamedDiscrete, leaf_dtype

SIMPLE = (
    spaces.Box(-1, 1, (2, 3), np.float32),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Box(-np.inf, np.inf, (), np.float64),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(5),
)
SPACE = spaces.Dict(
    {"camera": SIMPLE[1], "state": spaces.Tuple((SIMPLE[0], SIMPLE[3])), "more": spaces.Dict({"x": SIMPLE[4]})}
)


def plain(value):
    """A value as JSON has it."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else np.asarray(value).tolist()


def packed(value, dtype):
    array = np.asarray(value, dtype)
    return {"shape": list(array.shape), "data": array.astype(array.dtype.newbyteorder("<")).tobytes()}


@pytest.mark.parametrize("space", [*SIMPLE, SPACE], ids=lambda space: type(space).__name__)
def test_what_is_sent_is_what_is_read(space):
    space.seed(3)
    samples = [space.sample() for _ in range(4)]
    columns = [Flattener(space, "obs")(sample) for sample in samples]
    for sample, wanted in zip(samples, columns, strict=True):
        found, is_batch = read_value(space, json.loads(json.dumps(plain(sample))), "obs", 8)
        assert not is_batch
        for name, leaf in Flattener(space, "obs").leaves.items():
            assert found[name].dtype == leaf_dtype(leaf)
            np.testing.assert_array_equal(found[name], np.asarray(wanted[name])[None])


def test_a_batch_has_an_axis_in_front_of_every_part():
    space = SPACE
    space.seed(3)
    samples = [space.sample() for _ in range(4)]
    batch = {
        "camera": [plain(one["camera"]) for one in samples],
        "state": [[plain(one["state"][i]) for one in samples] for i in range(2)],
        "more": {"x": [plain(one["more"]["x"]) for one in samples]},
    }
    found, is_batch = read_value(space, batch, "obs", 4)
    assert is_batch
    np.testing.assert_array_equal(found["obs/state/1"], [one["state"][1] for one in samples])
    batch["more"]["x"].pop()
    with pytest.raises(RequestError, match="`obs/more/x` has 3 rows, but `obs/camera` has 4 rows") as refused:
        read_value(space, batch, "obs", 4)
    assert refused.value.field == "obs/more/x"


@pytest.mark.parametrize("space", SIMPLE, ids=lambda space: type(space).__name__)
def test_arrays_may_be_bytes_in_msgpack(space):
    space.seed(4)
    sample = space.sample()
    body = msgpack.packb({"obs": packed(sample, space.dtype)})
    found, is_batch = read_value(space, decode(body, MSGPACK)["obs"], "obs", 1)
    assert not is_batch
    np.testing.assert_array_equal(found["obs"][0], sample)
    batch, is_batch = read_value(space, packed([sample] * 2, space.dtype), "obs", 2)
    assert is_batch
    np.testing.assert_array_equal(batch["obs"], [sample] * 2)


@pytest.mark.parametrize(
    ("space", "value", "field", "word"),
    [
        (SIMPLE[0], [[1, 2], [3, 4]], "obs", r"shape \[2, 2\], but in its space \[2, 3\]"),
        (SIMPLE[0], [[1, 2, 3], [4]], "obs", "differ in length"),
        (SIMPLE[0], "text", "obs", "a text"),
        (SIMPLE[0], None, "obs", "null"),
        (SIMPLE[0], [["a", 2, 3]] * 2, "obs", "values that are not numbers"),
        (SIMPLE[0], [[1e300, 0, 0]] * 2, "obs", "too large"),
        (SIMPLE[0], [[10**400, 0, 0]] * 2, "obs", "numbers"),
        (SIMPLE[1], [[[256]] * 4] * 4, "obs", "range of uint8"),
        (SIMPLE[1], [[[1.5]] * 4] * 4, "obs", "fraction"),
        (SIMPLE[3], 2, "obs", "outside its space"),
        (SIMPLE[4], [0, 4], "obs", "outside its space"),
        (SIMPLE[5], [0, 1, 2, 0, 0], "obs", "outside its space"),
        (SIMPLE[0], {"shape": [2, 3], "data": b"123"}, "obs", "3 bytes"),
        (SIMPLE[0], {"shape": [-1], "data": b""}, "obs", "must be numbers"),
        (SIMPLE[0], {"shape": [0, 2**62], "data": b""}, "obs", "too large"),
        (NamedDiscrete(["a", "b"]), [["a"], ["b", "a"]], "obs", "values that are not numbers"),
        (NamedDiscrete(["a", "b"]), ["a", 1], "obs", "values that are not numbers"),
        (SPACE, [], "obs", "an object with camera"),
        (SPACE, {"camera": [[[0]] * 4] * 4, "more": {"x": [0, 0]}}, "obs/state", "is missing"),
        (SPACE, {"camera": [[[0]] * 4] * 4, "state": [0], "more": {"x": [0, 0]}}, "obs/state", "an array of 2 parts"),
        (SPACE, {"zoom": 1}, "obs/zoom", "not in the space"),
        (SIMPLE[3], [], "obs", "batch of 0"),
        (SIMPLE[3], [0] * 9, "obs", "batch of 9"),
    ],
)
def test_what_does_not_fit_is_named(space, value, field, word):
    with pytest.raises(RequestError, match=word) as refused:
        read_value(space, value, "obs", 8)
    assert refused.value.field == field
    assert 400 <= refused.value.status < 500


@pytest.mark.parametrize("space", [SIMPLE[0], NamedDiscrete(["a", "b"])], ids=lambda space: type(space).__name__)
def test_a_long_text_among_short_ones_takes_no_more_room_than_it_has(space):
    with pytest.raises(RequestError, match="`obs`"):
        read_value(space, ["a" * 8_000_000, *[""] * 2_000_000], "obs", 8)  # 64 TB, as an array of texts


def test_a_request_without_fields_says_so():
    with pytest.raises(RequestError, match="`policy` is not a field of this request: it takes none"):
        check_fields({"policy": "main"}, ())


@pytest.mark.parametrize(
    ("fields", "first", "field"),
    [
        ({"obs": 0, "reward": 1.0}, True, "reward"),
        ({"obs": 0, "terminated": True}, True, "terminated"),
        ({"obs": 0}, False, "reward"),
        ({"obs": 0, "reward": "1"}, False, "reward"),
        ({"obs": 0, "reward": True}, False, "reward"),
        ({"obs": 0, "reward": 10**400}, False, "reward"),
        ({"reward": 1}, False, "obs"),
        ({"reward": 1, "truncated": True}, False, "obs"),
        ({"obs": 0, "reward": 1, "truncated": 1}, False, "truncated"),
        ({"obs": [0], "reward": 1}, False, "obs"),
        ({"obs": 0, "reward": 1, "info": {}}, False, "info"),
    ],
)
def test_steps_that_say_too_little_or_too_much(fields, first, field):
    with pytest.raises(RequestError) as refused:
        read_step(fields, SIMPLE[3], is_first=first, needs_reward=True)
    assert refused.value.field == field


def test_a_terminated_episode_may_lack_its_last_observation():
    step = read_step({"reward": 2, "terminated": True}, SIMPLE[3], is_first=False, needs_reward=True)
    assert step.done
    assert (step.obs, step.reward) == (None, 2.0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([*SIMPLE, SPACE]))
def test_any_value_is_read_or_refused_by_name(value, space):
    try:
        columns, _ = read_value(space, value, "obs", 4)
    except RequestError as refused:
        assert refused.field.startswith("obs")  # noqa: PT017  it may also be read
    else:
        assert all(np.isfinite(column).all() for column in columns.values())


@given(st.binary(max_size=64), st.sampled_from([JSON, MSGPACK]))
def test_any_body_is_an_object_or_refused(body, kind):
    try:
        assert isinstance(decode(body, kind), dict)
    except RequestError as refused:
        assert refused.field == "body"  # noqa: PT017


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"obs": NaN}', b'{"obs": Infinity}', b"[]", b"\xff"])
def test_bodies_that_are_not_json_objects(body):
    with pytest.raises(RequestError, match="`body`"):
        decode(body, JSON)


def test_answers_are_in_the_format_of_the_request():
    answer = {"action": [1, 0.5], "session": "ü"}
    assert json.loads(encode(answer, JSON)) == answer
    assert msgpack.unpackb(encode(answer, MSGPACK)) == answer
