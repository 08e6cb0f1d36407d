# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
from gymnasium import spaces

from etude.modules.critics import ActionEncoder


def test_boxes_are_scaled_by_their_bounds_and_clipped_and_others_left() -> None:
    low, high = np.array([-2.0, 0.0, -np.inf, 1.0], np.float32), np.array([4.0, 1.0, 5.0, 1.0], np.float32)
    encoder = ActionEncoder(spaces.Box(low, high))
    action = torch.tensor([[4.0, 0.0, -7.0, 1.0], [10.0, 0.25, 3.0, 1.5]])
    expected = [[1.0, -1.0, -7.0, 1.0], [1.0, -0.5, 3.0, 1.5]]
    torch.testing.assert_close(encoder(action), torch.tensor(expected))


def test_choices_are_ones_and_zeros_and_parts_stand_in_a_row() -> None:
    space = spaces.Dict(
        {"bits": spaces.MultiBinary(2), "push": spaces.Box(-2, 2, (1, 2)), "turn": spaces.Discrete(3, start=-1)}
    )
    encoder = ActionEncoder(space)
    action = {
        "bits": torch.tensor([[1, 0]], dtype=torch.int8),
        "push": torch.tensor([[[1.0, -2.0]]]),
        "turn": torch.tensor([1]),
    }
    assert encoder.width == 7
    assert encoder(action).tolist() == [[1.0, 0.0, 0.5, -1.0, 0.0, 0.0, 1.0]]
    multi = ActionEncoder(spaces.MultiDiscrete([2, 3]))
    assert multi(torch.tensor([[1, 0]])).tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0]]
