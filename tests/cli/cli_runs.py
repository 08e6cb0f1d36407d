# SPDX-License-Identifier: Apache-2.0
"""Small runs for the tests of the command line."""

import os
import shutil
import signal
import time

import gymnasium as gym
import torch
from gymnasium.spaces import flatdim
from torch import nn

import etude
from etude.cli.main import main

TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--seed", "1", "--num-envs", "2", "--num-steps", "64"]
SMALL = [*TRAIN, "--epochs", "1", "--minibatch-size", "32", "--network.hidden", "8"]
"""A run whose every iteration is 64 steps and 2 updates."""


def trained(out, *more, updates=4):
    """A small run in ``out``; gives it back."""
    code = main([*SMALL, "--stop.updates", str(updates), "--out", str(out), "--quiet", *more])
    assert code == 0
    return out


def make_env():
    return gym.make("CartPole-v1", max_episode_steps=20)


class Breaking(gym.Wrapper):
    """No episode comes to its end."""

    def reset(self, **how):
        self.left = 3
        return super().reset(**how)

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise RuntimeError("out of order")
        return super().step(action)


def breaking():
    return Breaking(make_env())


MADE = []
"""The envs that `counted_env` made, in this process."""


def counted_env():
    MADE.append(make_env())
    return MADE[-1]


def by_job(agent, episode):
    return "talker" if agent == "echo" else "shooter"


class Exits(etude.Callback):
    """Ends the program, as nothing in a run may."""

    def on_episode_end(self, episode):
        raise SystemExit(0)


class Interrupted(gym.Wrapper):
    """Gets a SIGTERM at the beginning of the hundredth episode."""

    episodes = 0

    def reset(self, **kwargs):
        Interrupted.episodes += 1
        if Interrupted.episodes == 100:
            signal.raise_signal(signal.SIGTERM)
        return super().reset(**kwargs)


def interrupted_env():
    return Interrupted(make_env())


class Unwatched(gym.Wrapper):
    """Steps once the file that the environment names is there."""

    def step(self, action):
        while not os.path.exists(os.environ["GONE"]):
            time.sleep(0.01)
        return super().step(action)


def unwatched_env():
    return Unwatched(make_env())


class Endless(gym.Env):
    """Its episodes have no end."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def endless_env():
    return Endless()


class Tidying(gym.Wrapper):
    """Removes the metrics of the run that the environment names, at the beginning of the fifth episode."""

    episodes = 0

    def reset(self, **kwargs):
        Tidying.episodes += 1
        if Tidying.episodes == 5:
            shutil.rmtree(os.path.join(os.environ["RUN"], "tensorboard"))
            for name in ("metrics.jsonl", "metrics.csv"):
                os.remove(os.path.join(os.environ["RUN"], name))
        return super().reset(**kwargs)


def tidying_env():
    return Tidying(make_env())


def never_made():
    signal.raise_signal(signal.SIGTERM)


class Net(nn.Module):
    def __init__(self, obs_space, action_space):
        super().__init__()
        self.policy = nn.Linear(flatdim(obs_space), int(action_space.n))
        self.value = nn.Linear(flatdim(obs_space), 1)

    def forward(self, obs, state=None):
        return etude.Output(dist_inputs=self.policy(obs), value=self.value(obs).squeeze(-1))


def halved(obs):
    return obs * 0.5


class Mine(etude.PPO):
    """Somebody's own algorithm."""

    name = ""

    def after_update(self, env_steps):
        assert isinstance(self.module, torch.nn.Module)
