# SPDX-License-Identifier: Apache-2.0
"""NormalizeReward, beside a loop over episodes as VecNormalize makes it."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import PPO, PPOConfig
from etude.connectors import Inputs, NormalizeReward, Pipeline, connector_from
from etude.connectors.pipeline import state_from_json, state_to_json
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments

GAMMA = 0.9


def lived(rng: np.random.Generator, num: int, *, agents: int = 1, scale: float = 1.0) -> Experience:
    """So many whole episodes of each agent, with rewards and nothing else to see."""
    parts = []
    for e in range(num):
        for a in range(agents):
            n = int(rng.integers(1, 12))
            ids = Segments.of(
                1, episode_id=[f"e{e}"], agent_id=[f"a{a}"], terminated=rng.random() < 0.7, truncated=True
            )
            ids = ids.replace(truncated=~ids.terminated)
            reward = (rng.normal(size=n) * 3 + 1) * scale
            steps = {"obs": np.zeros((n, 1), np.float32), "reward": reward}
            parts.append(Experience(steps, np.array([0, n]), ids, {"obs": np.zeros((1, 1), np.float32)}))
    return Experience.concat(parts)


def so_far(exp: Experience) -> list[float]:
    """The return so far at each step of whole episodes, one step after the other."""
    found = []
    for i in range(exp.num_segments):
        total = 0.0
        for reward in np.asarray(exp[i].steps["reward"]).tolist():
            total = GAMMA * total + reward
            found.append(total)
    return found


def scaled(connector: NormalizeReward) -> float:
    """What a reward of 1 becomes."""
    inputs = Inputs(np.arange(1), {}, np.zeros(1, bool), {}, np.ones(1))
    return float(connector.online(inputs).prev_reward[0])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), agents=st.integers(1, 2), cut=st.integers(1, 6), lookback=st.integers(0, 2),
    in_parts=st.integers(1, 4), stops=st.booleans(),
)  # fmt: skip
def test_the_deviation_is_that_of_a_loop_over_steps(
    seed: int, agents: int, cut: int, lookback: int, in_parts: int, stops: bool
) -> None:
    rng = np.random.default_rng(seed)
    exp = lived(rng, 5, agents=agents)
    connector = NormalizeReward(GAMMA)
    connector.start(3)
    pieces = exp.cut(cut, lookback=lookback)
    t = pieces.segments.t_start + pieces.segments.lookback
    for part in np.array_split(np.arange(int(t.max()) + 1), in_parts):  # each collection has a stretch of time
        inside = pieces.select(np.isin(t, part))
        connector.update(inside.select(rng.permutation(inside.num_segments)))
        if stops:
            state = connector.state_dict()
            connector = NormalizeReward(GAMMA)
            connector.load_state_dict(state)
    expected = 1 / np.sqrt(np.var(so_far(exp)) + 1e-8)
    np.testing.assert_allclose(scaled(connector), min(expected, 10.0), rtol=1e-9)
    assert connector.state_dict()["count"] == exp.num_steps
    assert connector.state_dict()["running"] == []


def test_rewards_of_another_scale_become_the_same() -> None:
    seen = []
    for scale in (1.0, 1000.0):
        exp = lived(np.random.default_rng(3), 20, scale=scale)
        connector = NormalizeReward(GAMMA)
        connector.update(exp)
        seen.append(np.asarray(connector.offline(exp).steps["reward"]))
    np.testing.assert_allclose(*seen, rtol=1e-6)
    assert np.abs(seen[0]).max() < 10


def test_before_the_first_update_only_the_clipping_works_and_statistics_are_frozen_between() -> None:
    connector = NormalizeReward(GAMMA, clip=2.0)
    exp = lived(np.random.default_rng(0), 3)
    raw = np.asarray(exp.steps["reward"])
    np.testing.assert_array_equal(connector.offline(exp).steps["reward"], np.clip(raw, -2, 2))
    connector.update(exp)
    once = scaled(connector)
    connector.offline(lived(np.random.default_rng(1), 3, scale=100))
    assert scaled(connector) == once != 1


def test_tensors_stay_tensors() -> None:
    exp = lived(np.random.default_rng(0), 3)
    here, there = NormalizeReward(GAMMA), NormalizeReward(GAMMA)
    here.update(exp)
    there.update(exp.to("cpu"))
    reward = there.offline(exp.to("cpu")).steps["reward"]
    assert isinstance(reward, torch.Tensor)
    np.testing.assert_allclose(reward.numpy(), here.offline(exp).steps["reward"])


def test_what_was_learned_goes_into_recordings_and_running_episodes_do_not() -> None:
    def made() -> Pipeline:
        pipeline = Pipeline([NormalizeReward(GAMMA)])
        pipeline.spaces(spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
        return pipeline

    first, second = made(), made()
    whole = lived(np.random.default_rng(0), 4)
    first.update(whole.cut(3)[:2])  # of which at least one goes on
    assert first.state_dict()["connectors"][0]["state"]["running"]
    state_from_json(second, state_to_json(first))
    assert second.metrics() == first.metrics()
    assert second.metrics()["normalize_reward/deviation"] != 1
    assert second.state_dict()["connectors"][0]["state"]["running"] == []


def test_nan_is_named_and_spoils_nothing() -> None:
    exp = lived(np.random.default_rng(0), 2)
    reward = np.asarray(exp.steps["reward"]).copy()
    reward[1] = np.nan
    connector = NormalizeReward(GAMMA)
    with pytest.raises(DataError, match="column `reward` holds nan"):
        connector.update(exp.with_steps(reward=reward))
    assert connector.state_dict()["count"] == 0


@pytest.mark.parametrize(("given", "named"), [({"gamma": 1.5}, "gamma"), ({"clip": 0.0}, "clip")])
def test_arguments_that_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=f"NormalizeReward.{named} must be"):
        NormalizeReward(**given)


def test_returns_are_reported_raw() -> None:
    config = {"env": "Pendulum-v1", "num_envs": 2, "num_steps": 400, "epochs": 1, "seed": 0}
    plain, scaled = PPO(PPOConfig(**config)), PPO(PPOConfig(**config, connectors=("normalize_reward:0.99",)))
    first, second = plain.train(), scaled.train()
    assert first.return_mean == second.return_mean < -100  # the first iteration acts with equal weights
    assert second.metrics["normalize_reward/deviation"] > 5
    assert scaled.train().losses["value"] < plain.train().losses["value"] / 10
    assert repr(connector_from("normalize_reward:0.9,clip=5")) == "normalize_reward:gamma=0.9,clip=5.0"
