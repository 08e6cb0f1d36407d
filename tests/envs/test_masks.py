# SPDX-License-Identifier: Apache-2.0
"""InfoActionMask: masks come from info into the observation, at every reset and step."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from etude.envs import InfoActionMask, adapters, make_arena
from etude.errors import EnvError
from etude.modules import distribution_for


class Doors(gym.Env):
    """Three doors and two keys; which are there changes at each step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.MultiDiscrete([3, 2])

    def __init__(self, masks):
        self.masks = iter(masks)

    def _info(self):
        mask = next(self.masks)
        return {} if mask is None else {"action_mask": mask, "other": 1}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), self._info()

    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, self._info()


def test_the_mask_of_every_step_is_in_its_observation():
    masks = [np.array([1, 0, 1, 0, 1], np.int8), [1, 1, 1, 1, 0], (0, 0, 1, 1, 1), np.array([True] * 5)]
    env = InfoActionMask(Doors(masks))
    assert env.action_space == Doors.action_space
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert obs["action_mask"].tolist() == [1, 0, 1, 0, 1]
    assert info["other"] == 1
    for mask in masks[1:]:
        obs, reward, *_ = env.step(np.array([0, 0]))
        assert env.observation_space.contains(obs)
        assert obs["action_mask"].tolist() == list(mask)
        assert obs["observation"].tolist() == [1, 1]
        assert reward == 1


def test_taxi():
    env = InfoActionMask(gym.make(max(name for name in gym.registry if name.startswith("Taxi-"))))
    assert env.spec is not None
    obs, info = env.reset(seed=1)
    env.action_space.seed(0)
    for _ in range(300):
        assert env.observation_space.contains(obs)
        assert (obs["action_mask"] == info["action_mask"]).all()
        assert 1 <= obs["action_mask"].sum() < 6
        action = env.action_space.sample(mask=info["action_mask"])
        before = obs["observation"]
        obs, _, terminated, truncated, info = env.step(action)
        assert obs["observation"] != before  # what the mask allows always changes something
        if terminated or truncated:
            obs, info = env.reset()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary((2, 3)),
        spaces.Tuple([spaces.Box(-1, 1, (7,)), spaces.Dict({"b": spaces.Discrete(3), "a": spaces.MultiBinary(2)})]),
    ],
    ids=str,
)
def test_masks_are_as_long_as_modules_want_them(space):
    env = Doors([])
    env.action_space = space
    mask = InfoActionMask(env).observation_space["action_mask"]
    assert mask.shape == (sum(run.size for run in distribution_for(space).logits),)


def test_errors():
    env = InfoActionMask(Doors([[1] * 5, None]))
    env.reset()
    with pytest.raises(EnvError, match=r"info that step of Doors returns has no 'action_mask' \(it has \[\]\)"):
        env.step(np.array([0, 0]))
    with pytest.raises(EnvError, match=r"info that reset of Doors returns has no 'action_mask'"):
        InfoActionMask(Doors([None])).reset()
    with pytest.raises(EnvError, match=r"reset of Doors returns is \[1 1\]: it needs 5 numbers, 0 or 1, one for each"):
        InfoActionMask(Doors([[1, 1]])).reset()
    with pytest.raises(EnvError, match=r"is \[1 2 0 1 1\]: it needs 5 numbers, 0 or 1"):
        InfoActionMask(Doors([[1, 2, 0, 1, 1]])).reset()
    env = Doors([])
    env.action_space = spaces.Box(-1, 1, (2,))
    with pytest.raises(EnvError, match=r"the action space Box.* has no choices that a mask could forbid"):
        InfoActionMask(env)


class Methodical(Doors):
    """Shows its mask as sb3-contrib's MaskablePPO expects it."""

    def _info(self):
        return {}

    def action_masks(self):
        return next(self.masks)


@pytest.mark.parametrize("is_vector", [False, True])
@pytest.mark.parametrize(
    ("kind", "found"), [(Doors, "the infos hold an `action_mask`"), (Methodical, "the env has a method `action_masks`")]
)
def test_a_mask_that_observations_lack_is_told_once(kind, found, is_vector, caplog):
    def make():
        return gym.wrappers.TimeLimit(kind([[1] * 5] * 9), 5)

    adapters._warn_of_masks.cache_clear()
    for _ in range(2):
        arena = make_arena(lambda: SyncVectorEnv([make] * 2) if is_vector else make(), 2)
        arena.reset()
        arena.recv()
    (record,) = caplog.records
    assert f"{kind.__name__}: {found}, but observations hold no mask" in record.getMessage()
    assert "InfoActionMask" in record.getMessage()
    caplog.clear()
    arena = make_arena(InfoActionMask(Doors([[1] * 5])), 1)
    arena.reset()
    arena.recv()
    assert not caplog.records


def test_a_property_that_fails_is_no_error_of_the_env(caplog):
    class Failing(gym.Wrapper):
        @property
        def action_masks(self):
            raise RuntimeError("not now")

    arena = make_arena(lambda: Failing(gym.make("CartPole-v1")), 1)
    arena.reset()
    arena.recv()
    assert not caplog.records
