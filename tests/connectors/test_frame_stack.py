# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
from connector_cases import OBS_SPACES, episodes
from gymnasium import spaces

from etude.connectors import FrameStack, Inputs
from etude.errors import CheckpointError, SettingsError
from etude.spaces import Space

ACTION = spaces.Discrete(2)
BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def made(space: Space, k: int, slots: int = 0) -> tuple[FrameStack, Space]:
    connector = FrameStack(k)
    seen, _ = connector.spaces(space, ACTION)
    connector.start(slots)
    return connector, seen


def turn(slots: list[int], obs: np.ndarray, first: list[bool]) -> Inputs:
    n = len(slots)
    return Inputs(np.array(slots), {"obs": obs}, np.array(first), {"action": np.zeros(n, int)}, np.zeros(n))


def test_frames_of_an_episode_by_hand() -> None:
    connector, _ = made(BOX, 3)
    out = connector.offline(episodes([4, 1]))
    t = out.steps["obs"].reshape(5, 3, 2)[..., 1]
    np.testing.assert_array_equal(t, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0]])
    np.testing.assert_array_equal(out.steps["obs"][-1], [1, 0, 1, 0, 1, 0])  # nothing of segment 0 in segment 1
    final = out.final_obs["obs"].reshape(2, 3, 2)[..., 1]
    np.testing.assert_array_equal(final, [[2, 3, 4], [0, 0, 1]])


def test_a_piece_without_context_starts_anew() -> None:
    connector, _ = made(BOX, 3)
    piece = connector.offline(episodes([4]).cut(2)[1])
    np.testing.assert_array_equal(piece.steps["obs"].reshape(2, 3, 2)[..., 1], [[2, 2, 2], [2, 2, 3]])
    np.testing.assert_array_equal(piece.final_obs["obs"].reshape(3, 2)[..., 1], [2, 3, 4])


def test_a_mask_stays_that_of_the_newest_observation() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "x": spaces.Box(-9, 9, (1,), np.float32)})
    connector, made_space = made(space, 2, slots=1)
    assert made_space["action_mask"] == space["action_mask"]
    assert made_space["x"].shape == (2,)
    inputs = turn([0], np.zeros(1), [True])
    for i, mask in enumerate(([1, 0], [0, 1])):
        obs = {"obs/action_mask": np.int8([mask]), "obs/x": np.float32([[i]])}
        out = connector.online(dataclasses.replace(inputs, obs=obs, first=np.array([i == 0]))).obs
        np.testing.assert_array_equal(out["obs/action_mask"], [mask])
        np.testing.assert_array_equal(out["obs/x"], [[0, i]])


def test_frames_of_slots_by_hand() -> None:
    connector, _ = made(spaces.Box(-np.inf, np.inf, (1,), np.float32), 2, slots=3)
    column = lambda *values: np.array(values, np.float32)[:, None]  # noqa: E731
    everyone = connector.online(turn([0, 1, 2], column(1, 2, 3), [True] * 3)).obs["obs"]
    np.testing.assert_array_equal(everyone, [[1, 1], [2, 2], [3, 3]])
    some = connector.online(turn([2, 0], column(30, 10), [False, True])).obs["obs"]
    np.testing.assert_array_equal(some, [[3, 30], [10, 10]])
    np.testing.assert_array_equal(everyone, [[1, 1], [2, 2], [3, 3]])  # what was lent is not written to
    again = connector.online(turn([2, 1, 0], column(31, 21, 11), [False] * 3)).obs["obs"]
    np.testing.assert_array_equal(again, [[30, 31], [2, 21], [10, 11]])
    np.testing.assert_array_equal(
        connector.online(turn([0, 1, 2], column(12, 22, 32), [False] * 3)).obs["obs"], [[11, 12], [21, 22], [31, 32]]
    )
    connector.start(1)
    assert connector.state_dict()["frames"]["obs"].shape == (1, 2)


def test_spaces() -> None:
    shapes = {
        name: made(space, 3)[1].shape for name, space in OBS_SPACES.items() if name not in ("dict", "masked", "tuple")
    }
    assert shapes == {
        "vector": (9,),
        "vector64": (6,),
        "number": (3,),
        "image": (4, 5, 9),
        "image_channels_first": (6, 4, 4),
        "grey": (4, 5, 3),
        "discrete": (3,),
        "multi_discrete": (6,),
        "multi_binary": (9,),
    }
    assert made(OBS_SPACES["discrete"], 2)[1] == spaces.MultiDiscrete([4, 4], start=[-1, -1])
    bounded = made(spaces.Box(np.float32([0, -1]), np.float32([1, 2])), 2)[1]
    np.testing.assert_array_equal(bounded.low, [0, -1, 0, -1])
    np.testing.assert_array_equal(bounded.high, [1, 2, 1, 2])
    assert set(made(OBS_SPACES["dict"], 2)[1].spaces) == {"joints", "camera", "mode"}


def test_channels_first_images_are_joined_by_channel() -> None:
    connector, _ = made(OBS_SPACES["image_channels_first"], 2, slots=1)
    frames = np.arange(2 * 32, dtype=np.uint8).reshape(2, 1, 2, 4, 4)
    connector.online(turn([0], frames[0], [True]))
    out = connector.online(turn([0], frames[1], [False])).obs["obs"]
    np.testing.assert_array_equal(out, np.concatenate(frames, axis=1))


def test_a_state_of_another_k_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"frames of frame_stack:k=3 have the shapes"):
        made(BOX, 3)[0].load_state_dict(made(BOX, 2, slots=2)[0].state_dict())


@pytest.mark.parametrize("k", [0, -1, 1.5, "4"])
def test_k_is_a_whole_number(k: object) -> None:
    with pytest.raises(SettingsError, match=r"FrameStack\.k (must be at least 1, not|is .*, expected int)"):
        FrameStack(k)  # type: ignore[arg-type]


def test_context() -> None:
    assert FrameStack(4).context == 3
    assert FrameStack(1).context == 0
