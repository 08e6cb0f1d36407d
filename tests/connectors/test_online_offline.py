# SPDX-License-Identifier: Apache-2.0
"""The property that holds for every connector: what it does online equals what it makes of the recording."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from connector_cases import ACTION_SPACES, OBS_SPACES, World, assert_fits, assert_same_obs
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.connectors import (
    ClipAction,
    ClipReward,
    Connector,
    Drop,
    FrameStack,
    FunctionConnector,
    History,
    Inputs,
    NormalizeObs,
    NormalizeReward,
    Pipeline,
    PrevActionReward,
    RescaleAction,
)
from etude.spaces import leaf_dtype, leaf_shape, leaves


def squeeze(obs: Any) -> Any:
    """Row by row, for any observation: dicts gain a key, floats are bent, the rest is handed through."""
    if isinstance(obs, dict):
        return {key: squeeze(value) for key, value in obs.items()} | {"one": np.ones(len(_first(obs)), np.float64)}
    if isinstance(obs, tuple):
        return tuple(squeeze(value) for value in obs)
    return obs / (1 + np.abs(obs)) if obs.dtype.kind == "f" else obs


def _first(obs: Any) -> Any:
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values())) if isinstance(obs, dict) else obs[0]
    return obs


CHAINS: dict[str, Callable[[], list[Connector]]] = {
    "nothing": lambda: [],
    "normalize_obs": lambda: [NormalizeObs(clip=1.5)],
    "frame_stack": lambda: [FrameStack(3)],
    "frame_stack_of_one": lambda: [FrameStack(1)],
    "prev_action_reward": lambda: [PrevActionReward()],
    "drop": lambda: [Drop("camera,mode/gear")],
    "function": lambda: [FunctionConnector(squeeze)],
    "clip_reward": lambda: [ClipReward(0.5, 1.0), PrevActionReward()],
    "normalize_reward": lambda: [NormalizeReward(0.9, clip=1.5), PrevActionReward()],
    "sign": lambda: [PrevActionReward(), ClipReward(sign=True)],
    "actions": lambda: [RescaleAction(), ClipAction(), PrevActionReward()],
    "steps": lambda: [History(3)],
    "steps_of_frames": lambda: [FrameStack(2), NormalizeObs(), History(2)],
    "normalized_frames": lambda: [NormalizeObs(), FrameStack(2)],
    "frames_normalized": lambda: [FrameStack(4), NormalizeObs()],
    "frames_of_frames": lambda: [FrameStack(2), FrameStack(3)],
    "history": lambda: [ClipReward(), PrevActionReward(), FrameStack(3), FunctionConnector(squeeze), NormalizeObs()],
    "nested": lambda: [Pipeline([FunctionConnector(squeeze), NormalizeObs()]), FrameStack(2)],
}


def made(chain: str, obs: str, action: str) -> tuple[Pipeline, Any]:
    pipeline = Pipeline(CHAINS[chain]())
    seen_space, _ = pipeline.spaces(OBS_SPACES[obs], ACTION_SPACES[action])
    return pipeline, seen_space


def lived(pipeline: Pipeline, obs: str, action: str, seed: int, num_slots: int, turns: int, shy: bool) -> World:
    pipeline.start(num_slots)
    world = World(pipeline, OBS_SPACES[obs], ACTION_SPACES[action], num_slots, seed, shy=shy)
    for _ in range(turns):
        world.turn()
    return world


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=25, deadline=None)
@given(
    obs=st.sampled_from(list(OBS_SPACES)),
    action=st.sampled_from(list(ACTION_SPACES)),
    seed=st.integers(0, 10_000),
    num_slots=st.integers(1, 4),
    turns=st.integers(1, 12),
    shy=st.booleans(),
    max_len=st.integers(1, 6),
)
def test_online_is_offline(
    chain: str, obs: str, action: str, seed: int, num_slots: int, turns: int, shy: bool, max_len: int
) -> None:
    pipeline, seen_space = made(chain, obs, action)
    before, _ = lived(pipeline, obs, action, seed + 1, 2, 6, shy).finish()
    pipeline.update(before)
    raw, seen = lived(pipeline, obs, action, seed, num_slots, turns, shy).finish()

    offline = pipeline.offline(raw)

    assert_same_obs(offline, seen)
    assert_fits(offline.steps, seen_space)
    assert_fits(offline.final_obs, seen_space)

    # cut with as much lookback as the connectors ask for, and on its own in any order
    pieces = raw.cut(max_len, lookback=pipeline.context)
    expected = seen.cut(max_len, lookback=pipeline.context)
    assert_same_obs(pipeline.offline(pieces), expected)
    order = np.random.default_rng(seed).permutation(pieces.num_segments)
    assert_same_obs(pipeline.offline(pieces.select(order)), expected.select(order))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("obs", OBS_SPACES)
def test_every_space_and_experience_of_no_steps(chain: str, obs: str) -> None:
    pipeline, seen_space = made(chain, obs, "dict")
    raw, seen = lived(pipeline, obs, "dict", 3, 2, 5, True).finish()
    pipeline.update(raw[0:0])
    assert_same_obs(pipeline.offline(raw), seen)
    nothing = pipeline.offline(raw[0:0])
    assert nothing.num_steps == 0
    assert_fits(nothing.steps, seen_space)
    assert_fits(nothing.final_obs, seen_space)


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=8, deadline=None)
@given(obs=st.sampled_from(list(OBS_SPACES)), seed=st.integers(0, 10_000), turns=st.integers(0, 8), shy=st.booleans())
def test_a_loaded_state_goes_on_as_if_never_stopped(chain: str, obs: str, seed: int, turns: int, shy: bool) -> None:
    pipeline, _ = made(chain, obs, "box")
    pipeline.update(lived(pipeline, obs, "box", seed + 1, 2, 6, shy).finish()[0])
    world = lived(pipeline, obs, "box", seed, 3, turns, shy)
    state = pipeline.state_dict()
    _assert_plain(state)
    twin, _ = made(chain, obs, "box")
    twin.start(3)
    twin.load_state_dict(state)

    for _ in range(4):
        world.pipeline = twin.copy()  # looking does not change the twin
        peeked = world.shown(np.arange(3))
        world.pipeline = pipeline.copy()
        for name, values in world.shown(np.arange(3)).items():
            np.testing.assert_array_equal(peeked[name], values)
        world.pipeline = _Both(pipeline, twin)
        world.turn()


class _Both(Pipeline):
    """Two pipelines that must show the same."""

    def __init__(self, one: Pipeline, two: Pipeline) -> None:
        self.one, self.two = one, two

    def online(self, inputs: Any) -> Any:
        shown, again = self.one.online(inputs), self.two.online(inputs)
        for name, values in shown.obs.items():
            np.testing.assert_array_equal(again.obs[name], values)
        return shown


def _assert_plain(state: Any) -> None:
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state)
        for value in state.values():
            _assert_plain(value)
    elif isinstance(state, list):
        for value in state:
            _assert_plain(value)
    else:
        assert isinstance(state, (str, int, float, np.ndarray)), type(state)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("obs", ["vector", "dict", "tuple"])
def test_a_turn_of_nobody(chain: str, obs: str) -> None:
    pipeline, seen_space = made(chain, obs, "dict")
    pipeline.start(2)
    columns = {n: np.zeros((0, *leaf_shape(s)), leaf_dtype(s)) for n, s in leaves(OBS_SPACES[obs], "obs").items()}
    action = {
        n: np.zeros((0, *leaf_shape(s)), leaf_dtype(s)) for n, s in leaves(ACTION_SPACES["dict"], "action").items()
    }
    nobody = Inputs(np.zeros(0, np.int64), columns, np.zeros(0, bool), action, np.zeros(0))
    assert_fits(pipeline.online(nobody).obs, seen_space)
    pipeline.act(action)


@pytest.mark.parametrize("chain", CHAINS)
def test_neither_side_writes_to_what_it_is_given(chain: str) -> None:
    pipeline, _ = made(chain, "dict", "dict")
    world = lived(pipeline, "dict", "dict", 5, 2, 5, False)
    raw, seen = world.finish()
    for columns in (raw.steps, raw.final_obs):
        for values in columns.values():
            values.flags.writeable = False
    assert_same_obs(pipeline.offline(raw), seen)
