# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from connector_cases import episodes
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from etude.connectors import ClipAction, ClipReward, Inputs, Pipeline, RescaleAction
from etude.errors import SettingsError, SpaceError

OBS = spaces.Box(-1, 1, (2,), np.float32)


def test_clip_reward() -> None:
    exp = episodes([2, 2])  # rewards 0 1 10 11
    np.testing.assert_array_equal(ClipReward(0.5, 10.5).offline(exp).steps["reward"], [0.5, 1, 10, 10.5])
    np.testing.assert_array_equal(ClipReward().offline(exp).steps["reward"], [0, 1, 1, 1])
    signs = ClipReward(sign=True).offline(exp.with_steps(reward=np.float32([-0.2, 0, 0.3, 9])))
    np.testing.assert_array_equal(signs.steps["reward"], [-1, 0, 1, 1])
    assert signs.steps["reward"].dtype == np.float32
    np.testing.assert_array_equal(exp.steps["reward"], [0, 1, 10, 11])


def test_clip_reward_online_leaves_starts_at_zero() -> None:
    previous = np.array([0.0, 9.0])
    inputs = Inputs(np.arange(2), {}, np.array([True, False]), {}, previous)
    np.testing.assert_array_equal(ClipReward(0.5, 1).online(inputs).prev_reward, [0, 1])
    np.testing.assert_array_equal(previous, [0, 9])


def test_clip_reward_bounds() -> None:
    with pytest.raises(SettingsError, match=r"ClipReward\.low must be at most high \(-1\), not 1"):
        ClipReward(1, -1)


BOUNDS = {"low": np.float32([-2, 0]), "high": np.float32([2, 10])}


def test_clip_action() -> None:
    connector = ClipAction()
    box = spaces.Box(**BOUNDS)
    assert connector.spaces(OBS, box) == (OBS, box)
    action = {"action": np.float32([[-3, 11], [1, 5]])}
    np.testing.assert_array_equal(connector.act(action)["action"], [[-2, 10], [1, 5]])
    np.testing.assert_array_equal(action["action"], [[-3, 11], [1, 5]])


def test_rescale_action() -> None:
    connector = RescaleAction()
    _, space = connector.spaces(OBS, spaces.Box(**BOUNDS))
    assert space == spaces.Box(-1, 1, (2,), np.float32)
    out = connector.act({"action": np.float32([[-1, -1], [0, 0], [1, 1], [3, -1.5]])})["action"]
    np.testing.assert_array_equal(out, [[-2, 0], [0, 5], [2, 10], [2, 0]])
    assert out.dtype == np.float32


FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)


@given(
    low=FLOATS,
    high=FLOATS,
    action=st.lists(FLOATS, min_size=1),
)
def test_rescaled_actions_are_in_the_space(low: float, high: float, action: list[float]) -> None:
    low, high = min(low, high), max(low, high)
    connector = RescaleAction()
    connector.spaces(OBS, spaces.Box(low, high, (1,), np.float32))
    out = connector.act({"action": np.float32(action)[:, None]})["action"]
    assert ((out >= np.float32(low)) & (out <= np.float32(high))).all()


def test_in_a_pipeline_the_module_is_clipped_before_the_env_is_reached() -> None:
    pipeline = Pipeline([RescaleAction(), ClipAction()])
    _, space = pipeline.spaces(OBS, spaces.Box(**BOUNDS))
    assert space == spaces.Box(-1, 1, (2,), np.float32)
    np.testing.assert_array_equal(pipeline.act({"action": np.float32([[-9, 0.5]])})["action"], [[-2, 7.5]])


@pytest.mark.parametrize("connector", [ClipAction(), RescaleAction()])
def test_other_actions_pass_as_they_are(connector: ClipAction | RescaleAction) -> None:
    space = spaces.Dict({"go": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (1,), np.float32)})
    connector.spaces(OBS, space)
    go = np.array([2])
    out = connector.act({"action/go": go, "action/speed": np.float32([[2]])})
    assert out["action/go"] is go
    np.testing.assert_array_equal(out["action/speed"], [[1]])
    connector.spaces(OBS, spaces.Discrete(3))
    assert connector.act({"action": go})["action"] is go


def test_rescale_needs_bounds() -> None:
    with pytest.raises(SpaceError, match=r"can't stretch \[-1, 1\] to `action/1`, which is not bounded on all sides"):
        RescaleAction().spaces(OBS, spaces.Tuple([OBS, spaces.Box(-np.inf, 1, (1,), np.float32)]))
