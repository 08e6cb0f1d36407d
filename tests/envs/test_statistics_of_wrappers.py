# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's wrappers with statistics of their own: a warning says which connector to take."""

import logging
import re
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit

from etude.envs import make_arena
from etude.envs.adapters import _warn_of_wrapper


@pytest.mark.parametrize(
    ("wrapper", "connector"), [(NormalizeObservation, "normalize_obs"), (NormalizeReward, "normalize_reward")]
)
def test_a_warning_names_the_connector_once(wrapper: Any, connector: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_wrapper.cache_clear()
    with caplog.at_level(logging.WARNING, "etude.envs"):
        make_arena(lambda: TimeLimit(wrapper(gym.make("Pendulum-v1")), 20), 2).close()
    (said,) = (record.getMessage() for record in caplog.records if record.name == "etude.envs")
    assert f"wrapped in Gymnasium's {wrapper.__name__}" in said
    assert f"connectors=('{connector}',), or --connectors {connector}." in said


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_wrappers_of_vector_envs_are_named_too(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_wrapper.cache_clear()
    envs = getattr(gym.wrappers.vector, name)(gym.make_vec("Pendulum-v1", 2, "sync"))
    with caplog.at_level(logging.WARNING, "etude.envs"):
        make_arena(gym.wrappers.vector.RecordEpisodeStatistics(envs), 2).close()
    (said,) = (record.getMessage() for record in caplog.records if record.name == "etude.envs")
    assert f"wrapped in Gymnasium's {name}" in said


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (lambda env: gym.wrappers.ClipReward(env, -1, 1), r"ClipReward: returns .* connectors=\('clip_reward',\)"),
        (lambda env: gym.wrappers.TransformReward(env, abs), "TransformReward: returns .* Use a connector instead"),
    ],
)
def test_wrappers_that_change_returns_are_told(wrap: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_wrapper.cache_clear()
    with caplog.at_level(logging.WARNING, "etude.envs"):
        make_arena(lambda: wrap(gym.make("Pendulum-v1")), 2).close()
    (said,) = (record.getMessage() for record in caplog.records if record.name == "etude.envs")
    assert re.search(told, said)


def test_other_wrappers_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_wrapper.cache_clear()
    with caplog.at_level(logging.WARNING, "etude.envs"):
        make_arena(lambda: TimeLimit(gym.make("Pendulum-v1"), 20), 2).close()
    assert not caplog.records
