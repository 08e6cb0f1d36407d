# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from connector_cases import ACTION_SPACES, OBS_SPACES, episodes
from gymnasium import spaces

from etude.connectors import Inputs, PrevActionReward
from etude.errors import DataError, SpaceError

BOX = spaces.Box(-3, 3, (2,), np.float32)


def test_an_episode_by_hand() -> None:
    connector = PrevActionReward()
    space, _ = connector.spaces(BOX, spaces.Discrete(4))
    assert space.shape == (2 + 4 + 1,)
    out = connector.offline(episodes([3, 2]))
    expected = [  # obs (segment, t), previous action one-hot, previous reward
        [0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 2, 0, 1, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 10],
    ]
    np.testing.assert_array_equal(out.steps["obs"], expected)
    np.testing.assert_array_equal(out.final_obs["obs"], [[0, 3, 0, 0, 1, 0, 2], [1, 2, 0, 1, 0, 0, 11]])


def test_online_codes_of_every_kind_of_action() -> None:
    codes = {
        "discrete": ([3], [0, 0, 1]),  # starts at 1
        "box": ([[0.5, -2]], [0.5, -2]),
        "multi_discrete": ([[2, 5]], [0, 0, 1, 1, 0]),  # starts at 0 and 5
        "multi_binary": ([[1, 0]], [1, 0]),
    }
    for kind, (action, code) in codes.items():
        connector = PrevActionReward()
        connector.spaces(BOX, ACTION_SPACES[kind])
        for first in (False, True):
            out = connector.online(
                Inputs(
                    np.arange(1),
                    {"obs": np.float32([[8, 9]])},
                    np.array([first]),
                    {"action": np.array(action, ACTION_SPACES[kind].dtype)},
                    np.array([7.0]),
                )
            )
            after = [0] * (len(code) + 1) if first else [*code, 7]
            np.testing.assert_array_equal(out.obs["obs"], [[8, 9, *after]], err_msg=kind)


def test_spaces() -> None:
    connector = PrevActionReward()
    action = ACTION_SPACES["dict"]  # move [2], jump of 2
    vector, same = connector.spaces(BOX, action)
    assert same is action
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector.high, [3, 3, *[np.inf] * 5])
    assert connector.spaces(OBS_SPACES["vector64"], action)[0].dtype == np.float64
    joined, _ = connector.spaces(OBS_SPACES["dict"], action)
    assert list(joined.spaces) == [*OBS_SPACES["dict"].spaces, "prev_action", "prev_reward"]
    assert joined["prev_action"].shape == (4,)
    assert joined["prev_reward"].shape == (1,)
    for name in ("image", "discrete", "tuple", "number"):
        wrapped, _ = connector.spaces(OBS_SPACES[name], action)
        assert list(wrapped.spaces) == ["obs", "prev_action", "prev_reward"]
        assert wrapped["obs"] is OBS_SPACES[name]


def test_a_key_that_is_taken() -> None:
    with pytest.raises(SpaceError, match="adds the key 'prev_reward', but the observation has it"):
        PrevActionReward().spaces(spaces.Dict({"prev_reward": BOX}), spaces.Discrete(2))


def test_a_missing_column_is_named() -> None:
    connector = PrevActionReward()
    connector.spaces(BOX, spaces.Discrete(4))
    exp = episodes([2])
    del exp.steps["action"]
    with pytest.raises(
        DataError, match="PrevActionReward needs the column `action`, but the experience has only obs, "
    ):
        connector.offline(exp)
