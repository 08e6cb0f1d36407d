# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn

from etude.modules.critics import TargetNetwork, frozen_copy


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
