# SPDX-License-Identifier: Apache-2.0
import copy
import json

import gymnasium as gym
import numpy as np
import pytest

from etude.connectors import Connector, Pipeline
from etude.connectors.pipeline import state_from_json, state_to_json
from etude.errors import DataError
from etude.experience import Experience, Segments

SPACE = gym.spaces.Dict(
    {"eye": gym.spaces.Box(0, 255, (4, 4), np.uint8), "arm": gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)}
)


def pipeline(*specs, space=SPACE):
    made = Pipeline(specs)
    made.spaces(space, gym.spaces.Discrete(2))
    return made


def learned(*specs):
    made, rng = pipeline(*specs), np.random.default_rng(0)
    made.start(5)
    exp = Experience(
        {"obs/eye": np.zeros((7, 4, 4), np.uint8), "obs/arm": rng.normal(size=(7, 3)) / 3, "reward": np.zeros(7)},
        np.array([0, 7]),
        Segments.of(1, episode_id=["e"]),
        {"obs/eye": np.zeros((1, 4, 4), np.uint8), "obs/arm": np.zeros((1, 3))},
    )
    made.update(exp)
    return made


def test_what_was_learned_comes_back_bit_for_bit_through_json():
    one = learned("normalize_obs")
    other = pipeline("normalize_obs")
    state_from_json(other, json.loads(json.dumps(state_to_json(one), allow_nan=False)))
    ours, theirs = (p.state_dict()["connectors"][0]["state"]["obs/arm"] for p in (one, other))
    assert (ours["count"], theirs["count"]) == (7, 7)
    for name in ("mean", "squares"):
        assert theirs[name].dtype == np.float64
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_frames_of_running_slots_are_left_out():
    one = learned("frame_stack:2", "normalize_obs")
    assert one.state_dict()["connectors"][0]["state"]["frames"]["obs/arm"].shape[0] == 5
    data = state_to_json(one)
    assert data["connectors"][0]["state"]["frames"]["obs/arm"]["$array"] == []
    state_from_json(pipeline("frame_stack:2", "normalize_obs"), data)
    assert one.state_dict()["connectors"][0]["state"]["frames"]["obs/arm"].shape[0] == 5  # ours go on


def test_who_learns():
    assert learned("normalize_obs").learns
    assert not pipeline("frame_stack:2", "clip_action").learns


class Odd(Connector):
    def __init__(self, what=None):
        self.what = what

    def update(self, exp):
        """Learns nothing."""

    def state_dict(self):
        return {"what": self.what}

    def load_state_dict(self, state):
        self.what = state["what"]


def test_plain_data_of_any_kind():
    values = {
        "a": [1, 2.5, None, True, "x"],
        "b": float("inf"),
        "c": np.float32(0.1),
        "d": np.array([[np.nan, -np.inf]]),
    }
    data = json.loads(json.dumps(state_to_json(Pipeline([Odd(values)])), allow_nan=False))
    back = Odd()
    state_from_json(Pipeline([back]), data)
    assert back.what["a"] == values["a"]
    assert back.what["b"] == float("inf")
    assert np.float32(back.what["c"]) == np.float32(0.1)
    np.testing.assert_array_equal(back.what["d"], values["d"])


@pytest.mark.parametrize("thing", [object(), {1: 2}, np.array(["a"])])
def test_what_is_not_plain_is_refused_by_its_place(thing):
    with pytest.raises(DataError, match="`connectors/connectors/0/state/what` is .* can't be kept with a recording"):
        state_to_json(Pipeline([Odd(thing)]))


def test_other_connectors_or_shapes_are_refused_and_change_nothing():
    data = state_to_json(learned("normalize_obs"))
    smaller = gym.spaces.Box(-1, 1, (2,), np.float32)
    for other in (pipeline("clip_reward"), pipeline("normalize_obs", space=smaller)):
        before = repr(other.state_dict())
        with pytest.raises(DataError, match="what the recording stores of its connectors does not fit: the stat"):
            state_from_json(other, data)
        assert repr(other.state_dict()) == before
    for broken in (None, 3, {}, {"connectors": [{}]}, {"connectors": 1}):
        with pytest.raises(DataError, match="can't be read"):
            state_from_json(pipeline("normalize_obs"), broken)
    wrong = copy.deepcopy(data)
    wrong["connectors"][0]["state"]["obs/arm"]["mean"]["dtype"] = "object"
    with pytest.raises(DataError, match="can't be read .ValueError: an array of object"):
        state_from_json(pipeline("normalize_obs"), wrong)
