# SPDX-License-Identifier: Apache-2.0
"""PPO with action masks: what is allowed changes at random, so that without the mask it can't be known."""

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from over_seeds import median_over_seeds

from etude.algorithms import PPO, PPOConfig, Stop
from etude.connectors import FrameStack
from etude.envs import InfoActionMask
from etude.errors import EnvError, ModuleError
from etude.modules import NetworkConfig

KEYS = 100


class Keyring(gym.Env[Any, Any]):
    """A hundred keys, of which an even and an odd one fit, others at each step. A lamp says which kind earns 1.

    A key that does not fit earns -1 and ends the episode, which else takes 10 steps. Only the mask says which ones fit:
    without it, the best there is to do is to guess, which goes wrong 98 times of 100.
    """

    action_space = spaces.Discrete(KEYS)

    def __init__(self, *, masked: bool) -> None:
        lamp = spaces.Box(0, 1, (2,), np.float32)
        self.masked = masked
        self.observation_space = lamp
        if masked:
            self.observation_space = spaces.Dict({"observation": lamp, "action_mask": spaces.MultiBinary(KEYS)})

    def _look(self) -> Any:
        self.wanted = int(self.np_random.integers(2))
        self.fitting = 2 * self.np_random.integers(KEYS // 2, size=2) + [0, 1]
        lamp = np.eye(2, dtype=np.float32)[self.wanted]
        mask = np.zeros(KEYS, np.int8)
        mask[self.fitting] = 1
        return {"observation": lamp, "action_mask": mask} if self.masked else lamp

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        fits = action in self.fitting
        reward = float(action % 2 == self.wanted) if fits else -1.0
        return self._look(), reward, not fits or self.t == 10, False, {}


def score(masked: bool, seed: int) -> float:
    """What was earned at last, in training or evaluation: whichever is further from the goal of this test."""
    config = PPOConfig(
        env=functools.partial(Keyring, masked=masked),
        seed=seed,
        network=NetworkConfig(hidden=(32,)),
        num_steps=1024,
        minibatch_size=128,
        lr=5e-3,
        gamma=0.0,
    )
    algorithm = PPO(config)
    trained = algorithm.fit(Stop(return_mean=9.0, env_steps=10_000))  # masked, 3,000 are enough; at random: 5
    both = trained.return_mean, algorithm.evaluate(50, seed=1).return_mean
    return min(both) if masked else max(both)


@pytest.mark.learning
def test_with_the_mask_it_is_learned_and_without_it_is_not() -> None:
    assert median_over_seeds(lambda seed: score(True, seed)) >= 8.5
    assert median_over_seeds(lambda seed: score(False, seed)) < 0.0


def taxi() -> gym.Env[Any, Any]:
    return InfoActionMask(
        gym.make(max(name for name in gym.registry if name.startswith("Taxi-")), max_episode_steps=30)
    )


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_what_is_forbidden_in_taxi_is_never_done(recurrent: Any) -> None:
    network = NetworkConfig(recurrent=recurrent, recurrent_size=16, hidden=(16,))
    algorithm = PPO(
        PPOConfig(env=taxi, seed=0, num_envs=4, num_steps=500, minibatch_size=128, epochs=1, network=network)
    )
    for explore in (True, False):
        exp = algorithm.runner.collect(num_steps=500, explore=explore)
        mask = exp.steps["obs/action_mask"]
        assert mask.shape == (500, 6)
        assert mask[np.arange(500), exp.steps["action"]].all()
        assert ((exp.steps["dist_inputs"] < -1e29) == (mask == 0)).all()
        assert (exp.steps["reward"] > -10).all()  # which is what an illegal pick-up or drop-off costs
    result = algorithm.train()
    assert np.isfinite(list(result.losses.values())).all()
    assert 0 < result.metrics["entropy"] < np.log(6)


class FloatMask(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        seen = env.observation_space["observation"]  # type: ignore[index]
        self.observation_space = spaces.Dict({"observation": seen, "action_mask": spaces.Box(0, 1, (KEYS,))})

    def observation(self, observation: Any) -> Any:
        return {**observation, "action_mask": observation["action_mask"].astype(np.float32)}


class Doubles(FrameStack):
    """Stacks the mask, too."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        twice = spaces.MultiBinary(2 * obs_space["action_mask"].n)
        return spaces.Dict({**obs_space.spaces, "action_mask": twice}), action_space


@pytest.mark.parametrize("connector", ["normalize_obs", "frame_stack:2"])
def test_connectors_leave_the_mask_alone_or_say_that_they_can_not(connector: str) -> None:
    config = PPOConfig(
        env=lambda: FloatMask(Keyring(masked=True)), seed=0, num_steps=300, connectors=(connector,), num_envs=4
    )
    algorithm = PPO(config)
    for _ in range(3):
        algorithm.train()
    exp = algorithm.runner.collect(num_steps=300)
    assert exp.steps["obs/action_mask"][np.arange(exp.num_steps), exp.steps["action"]].all()
    with pytest.raises(ModuleError, match="must hold 100 numbers.* that change the mask can't be used"):
        PPO(PPOConfig(env=lambda: Keyring(masked=True), connectors=(Doubles,)))


class Countdown(gym.Env[Any, Any]):
    """Its last observation allows nothing, as PettingZoo's games have it; or that of step 3 does, by mistake."""

    observation_space = spaces.Dict({"left": spaces.Box(0, 9, (1,)), "action_mask": spaces.MultiBinary(3)})
    action_space = spaces.Discrete(3)

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def _look(self) -> Any:
        mask = np.zeros(3, np.int8)
        mask[self.left % 3] = self.left > 0 and not (self.broken and self.t == 3)
        return {"left": np.float32([self.left]), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.t = int(self.np_random.integers(5, 9)), 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert action == self.left % 3
        self.left, self.t = self.left - 1, self.t + 1
        return self._look(), 1.0, not self.left, False, {}


@pytest.mark.parametrize("recurrent", [None, "lstm"])
def test_what_the_last_observation_allows_is_nobodys_concern(recurrent: Any) -> None:
    algorithm = PPO(
        PPOConfig(env=Countdown, seed=0, num_envs=4, num_steps=200, network=NetworkConfig(recurrent=recurrent))
    )
    exp = algorithm.runner.collect(num_steps=200)
    assert exp.segments.terminated.sum() > 20
    assert not exp.final_obs["obs/action_mask"][exp.segments.terminated].any()
    assert (exp.steps["action"] == exp.steps["obs/left"][:, 0] % 3).all()


def test_where_an_episode_goes_on_something_must_be_allowed() -> None:
    algorithm = PPO(PPOConfig(env=functools.partial(Countdown, broken=True), seed=0, num_envs=4))
    with pytest.raises(EnvError, match="`obs/action_mask` allows nothing in row 0 of 4: its entries 0 to 2 are all 0"):
        algorithm.runner.collect(num_steps=200)
