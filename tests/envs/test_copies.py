# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
from some_envs import Numbered, is_terminated, length_of, reward_of

from etude.envs.adapters import AgentStep, GymAdapter
from etude.envs.multi_agent import adapt_env
from etude.errors import EnvError


def test_rows_of_a_gymnasium_env() -> None:
    copy = adapt_env(Numbered(copy=2))
    assert isinstance(copy, GymAdapter)
    assert copy.agents == (None,)
    assert copy.obs_spaces == (copy.env.observation_space,)
    assert copy.action_spaces == (copy.env.action_space,)
    for episode in range(4):
        assert copy.over
        (row,) = copy.reset(seed=None)
        assert row._replace(obs=row.obs.tolist()) == AgentStep(0, [2, episode, 0], 0.0, False, False, True)
        length = length_of(2, episode)
        for t in range(length):
            assert (copy.env_t, copy.over) == (t, False)
            (row,) = copy.step({0: np.int64(1)})
            ends = t + 1 == length
            flags = ends and is_terminated(2, episode), ends and not is_terminated(2, episode)
            assert row.obs.tolist() == [2, episode, t + 1]
            assert row[2:] == (reward_of(2, episode, t), *flags, False, None)
            assert copy.infos == {"t": t + 1}


def test_the_seed_goes_to_the_env() -> None:
    copy, other = adapt_env(Numbered()), Numbered()
    copy.reset(seed=7)
    other.reset(seed=7)
    assert copy.env.np_random.random() == other.np_random.random()


def test_truncated_from_outside() -> None:
    copy = adapt_env(Numbered())
    copy.reset(seed=None)
    rows = copy.step({0: 1})
    (row,) = copy.truncate(rows)
    assert copy.over
    assert (row.obs is rows[0].obs, row.reward, row.terminated, row.truncated) == (True, 0.5, False, True)


def test_an_action_that_the_env_took_itself() -> None:
    class Stubborn(Numbered):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"off_policy_action": 2}

    copy = adapt_env(Stubborn())
    copy.reset(seed=None)
    assert copy.step({0: 1})[0].taken == 2


def test_close() -> None:
    closed = []

    class Closing(Numbered):
        def close(self) -> None:
            closed.append(self)

    copy = adapt_env(Closing())
    copy.close()
    assert closed == [copy.env]


def test_what_is_no_env() -> None:
    with pytest.raises(EnvError, match=r"builtins.str is no env"):
        adapt_env("CartPole-v1")
