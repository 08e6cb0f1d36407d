# SPDX-License-Identifier: Apache-2.0
"""Recordings whose actions are in other units than the module's, or that have columns which learners compute, too;
connectors that learn from what others make of a recording."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from etude.algorithms import (
    BC,
    IQL,
    MARWIL,
    BCConfig,
    DecisionTransformer,
    DecisionTransformerConfig,
    IQLConfig,
    MARWILConfig,
)
from etude.algorithms.feed import plan_of
from etude.connectors import Connector
from etude.errors import SettingsError
from etude.experience import Experience, Segments
from etude.recordings import RecordingWriter

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
LENGTH = 10
UNEVEN = spaces.Box(np.array([-3, 0], np.float32), np.array([1, 10], np.float32))


def recorded(path: Path, action: Any, space: spaces.Space[Any], pieces: int = 1 << 20, **columns: Any) -> str:
    """A recording of 20 episodes of 10 steps that terminate, in files of so many rows."""
    num = 20
    obs = np.random.default_rng(0).normal(size=(num * LENGTH, 2)).astype(np.float32)
    steps = {"obs": obs, "action": action, "reward": np.ones(num * LENGTH)} | columns
    own = Segments.of(num, episode_id=[f"e{i}" for i in range(num)], terminated=True)
    exp = Experience(steps, np.arange(0, num * LENGTH + 1, LENGTH), own, {"obs": np.zeros((num, 2), np.float32)})
    with RecordingWriter(path, obs_space=BOX, action_space=space, max_rows_per_file=pieces) as writer:
        writer.write(exp)
    return str(path)


def batch_of(algorithm: Any) -> Any:
    """All steps as they are learned from."""
    return plan_of(algorithm, "main", {})(0)[0]


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_actions_in_the_units_of_the_env_are_learned_in_those_of_the_module(mode: Any, tmp_path: Path) -> None:
    action = np.random.default_rng(1).uniform(UNEVEN.low, UNEVEN.high, (200, 2)).astype(np.float32)
    data = recorded(tmp_path, action, UNEVEN)
    batch = batch_of(BC(BCConfig(data=data, connectors=("rescale_action",), mode=mode, seed=0)))
    np.testing.assert_allclose(batch["action"], (action - [-1, 5]) / [2, 5], atol=1e-6)
    without = batch_of(BC(BCConfig(data=data, mode=mode, seed=0)))
    np.testing.assert_array_equal(without["action"], action)


def test_actions_of_a_module_with_the_connector_stay_as_they_are(tmp_path: Path) -> None:
    action = np.random.default_rng(1).uniform(-1, 1, (200, 2)).astype(np.float32)
    data = recorded(tmp_path, action, spaces.Box(-1, 1, (2,), np.float32))
    batch = batch_of(BC(BCConfig(data=data, connectors=("rescale_action",), seed=0)))
    np.testing.assert_array_equal(batch["action"], action)


class Halves(Connector):
    """The module acts in a Box of half the size."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        return obs_space, spaces.Box(action_space.low / 2, action_space.high / 2)

    def act(self, action: Any) -> Any:
        return {"action": 2 * action["action"]}


def test_a_connector_without_an_inverse_is_named(tmp_path: Path) -> None:
    data = recorded(tmp_path, np.ones((200, 2), np.float32), UNEVEN)
    with pytest.raises(SettingsError, match="in a recording whose action space is not the module's.*`halves`.*`unact`"):
        BC(BCConfig(data=data, connectors=(Halves,), seed=0)).train()


class Same(Connector):
    """Changes nothing, and does not say which columns it needs."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp


@pytest.mark.parametrize("given", [{"connectors": (Same,)}, {"prelearner": lambda exp, connect: connect(exp)}, {}])
@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_a_recorded_discount_is_not_that_of_the_learner(mode: Any, given: Any, tmp_path: Path) -> None:
    """It was: dm_control's is 1 everywhere."""
    data = recorded(tmp_path, np.zeros(200, np.int64), spaces.Discrete(2), discount=np.full(200, 0.5, np.float32))
    algorithm = IQL(IQLConfig(data=data, n_step=3, gamma=0.9, mode=mode, seed=0, filter="discount > 0", **given))
    batch = batch_of(algorithm)
    ahead = LENGTH - np.tile(np.arange(LENGTH), 20)  # steps to the end, where it is 0
    np.testing.assert_allclose(batch["discount"], np.where(ahead <= 3, 0, 0.9**3), rtol=1e-6)
    one = batch_of(IQL(IQLConfig(data=data, gamma=0.9, mode=mode, seed=0, filter="discount > 0", **given)))
    assert "discount" not in one


@pytest.mark.parametrize("given", [{}, {"prelearner": lambda exp, connect: connect(exp)}])
def test_a_filter_of_recorded_values_does_not_make_them_the_learners(given: Any, tmp_path: Path) -> None:
    value = np.where(np.arange(200) % 2, 777.0, -1.0).astype(np.float32)
    data = recorded(tmp_path, np.zeros(200, np.int64), spaces.Discrete(2), value=value)
    seen: list[float] = []

    class Noting(MARWIL):
        def loss(self, module: Any, batch: Any) -> Any:
            seen.extend(batch["value"].tolist())
            return super().loss(module, batch)

    algorithm = Noting(MARWILConfig(data=data, filter="value > 0", seed=0, updates_per_iteration=2, **given))
    algorithm.train()
    assert seen
    assert max(seen) < 100


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_each_connector_learns_from_what_those_before_it_have_learned(mode: Any, tmp_path: Path) -> None:
    reward = np.random.default_rng(2).normal(3, 50, 200)
    data = recorded(tmp_path, np.zeros(200, np.int64), spaces.Discrete(2), reward=reward)
    tiny: Any = {"embedding_size": 8, "num_layers": 1, "num_heads": 1, "context_length": 2, "updates_per_iteration": 1}
    config = DecisionTransformerConfig(data=data, connectors=("normalize_reward",), mode=mode, seed=0, **tiny)
    metrics = DecisionTransformer(config).train().metrics
    scaled = (reward / metrics["normalize_reward/deviation"]).clip(-10, 10).reshape(20, LENGTH).sum(1)
    assert metrics["return_to_go/target"] == pytest.approx(scaled.max(), rel=1e-5)
    assert metrics["return_to_go/scale"] == pytest.approx(np.abs(scaled).max(), rel=1e-5)


@pytest.mark.parametrize("pieces", [4, 1 << 20])
def test_what_is_learned_of_rewards_does_not_depend_on_how_episodes_are_stored(pieces: int, tmp_path: Path) -> None:
    """A memory of ten steps before them leaves no reward out."""
    reward = np.random.default_rng(2).normal(3, 50, 200)
    data = recorded(tmp_path, np.zeros(200, np.int64), spaces.Discrete(2), pieces, reward=reward)
    connectors = ("normalize_obs", "frame_stack:9", "normalize_reward", "return_to_go")
    metrics = BC(BCConfig(data=data, connectors=connectors, mode="stream", seed=0)).connectors.metrics()
    so_far = np.zeros((20, LENGTH))
    for t, each in enumerate(reward.reshape(20, LENGTH).T):
        so_far[:, t] = each + (0.99 * so_far[:, t - 1] if t else 0)
    assert metrics["normalize_reward/deviation"] == pytest.approx(so_far.std(), rel=1e-5)
    assert metrics["normalize_obs/count"] == 200
    best = (reward / so_far.std()).clip(-10, 10).reshape(20, LENGTH).sum(1).max()
    assert metrics["return_to_go/target"] == pytest.approx(best, rel=1e-5)
