# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from etude.errors import ModuleError, SettingsError
from etude.learners import Loss, check_schedule, value_at


def test_a_number_stays() -> None:
    assert value_at(0.5, 10**9) == 0.5
    assert value_at(1, 0) == 1.0


@pytest.mark.parametrize(
    ("env_steps", "value"), [(0, 1.0), (10, 1.0), (60, 0.75), (110, 0.5), (160, 0.3), (210, 0.1), (10**9, 0.1)]
)
def test_points_have_straight_lines_between(env_steps: int, value: float) -> None:
    assert value_at(((10, 1.0), (110, 0.5), (210, 0.1)), env_steps) == pytest.approx(value)


@pytest.mark.parametrize("schedule", [0.1, 1, ((0, 1.0),), ((0, 1.0), (5, 0.0)), [[0, 1.0], [5, 0.0]]])
def test_good_schedules(schedule: Any) -> None:
    check_schedule("lr", schedule)


@pytest.mark.parametrize("schedule", [(), ((5, 1.0), (0, 0.0)), ((0, 1.0), (0, 2.0)), ((0, 1.0, 2.0),), (1, 2), "high"])
def test_bad_schedules_are_shown(schedule: Any) -> None:
    with pytest.raises(SettingsError, match=r"lr is .*, but a schedule is a number from 0 on, or points"):
        check_schedule("lr", schedule)


def test_a_loss_is_the_sum_of_its_parts() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    loss = Loss(a=x * x, b=3 * x).log(x=x)
    loss.total.backward()
    assert loss.total.item() == 10.0
    assert x.grad is not None
    assert x.grad.item() == 7.0
    assert not loss.logged["x"].requires_grad


def test_a_loss_needs_a_part() -> None:
    with pytest.raises(ModuleError, match="at least one part"):
        Loss()


def test_what_can_not_be_logged_is_told() -> None:
    loss = Loss(policy=torch.tensor(1.0))
    for wrong in (torch.ones(3), torch.ones(0), [1.0, 2.0]):
        with pytest.raises(ModuleError, match=r"Loss\.log got a tensor of shape .* as `x`"):
            loss.log(x=wrong)  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match=r"Loss\.log got a str as `x`"):
        loss.log(x="much")  # type: ignore[arg-type]
    for name in ("lr", "grad_norm", "grad_norm/policy", "skipped_steps", "threads"):
        with pytest.raises(ModuleError, match=f"Loss.log got `{name}`, which the learner logs itself: give it another"):
            loss.log(**{name: 1.0})
    assert loss.log(x=torch.ones(1), y=2.0).logged.keys() == {"x", "y"}
