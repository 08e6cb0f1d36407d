# SPDX-License-Identifier: Apache-2.0
"""What critics are made of: encoded actions and target networks."""

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from etude.modules.critics import ActionEncoder, Scaled, TargetNetwork, frozen_copy


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


def test_a_target_moves_a_part_of_the_way_and_takes_buffers_over() -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    target = frozen_copy(source)
    follower = TargetNetwork(target, source)
    before = [p.clone() for p in target.parameters()]
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    source[1].running_mean.fill_(5.0)
    follower.follow(0.25)
    for old, new in zip(before, target.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)
    assert target[1].running_mean.eq(5.0).all()


def test_buffers_are_followed_after_both_have_moved() -> None:
    source = nn.Sequential(nn.BatchNorm1d(3))
    target = frozen_copy(source)
    follower = TargetNetwork(target, source)
    source.to(torch.float64)  # as to another device: buffers are other objects then
    target.to(torch.float64)
    source[0].running_mean.fill_(5.0)
    follower.follow(1.0)
    assert target[0].running_mean.eq(5.0).all()


def test_numbers_with_one_bound_are_clipped_to_it_for_critics() -> None:
    box = spaces.Box(np.array([0, -np.inf, -1, -np.inf], np.float32), np.array([np.inf, 3, 1, np.inf], np.float32))
    given = torch.tensor([[-2.0, 5.0, 2.0, 7.0], [2.0, -5.0, 0.5, -7.0]])
    assert Scaled(box)(given).tolist() == [[0.0, 3.0, 1.0, 7.0], [2.0, -5.0, 0.5, -7.0]]
