"""Tasks with a name of Etude's own: what they show, beside the same put together by hand."""

import sys
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest

import etude
from etude.envs import make_arena, names_module
from etude.envs.registry import named
from etude.envs.render import rendering_env


def test_an_atari_game_is_what_its_wrappers_make_of_it():
    ale_py = pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="opencv is not installed")
    gym.register_envs(ale_py)
    env = named("atari:Breakout")()
    by_hand = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    by_hand = gym.wrappers.AtariPreprocessing(by_hand, noop_max=30, frame_skip=4)
    obs, _ = env.reset(seed=3)
    by_hand.reset(seed=3)
    expected, *_ = by_hand.step(1)  # FIRE
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert obs.shape == (84, 84)
        np.testing.assert_array_equal(obs, expected)
        action = int(rng.integers(4))
        (obs, reward, *_), (expected, other, *_) = env.step(action), by_hand.step(action)
        assert reward == other
    env.close()
    by_hand.close()


@pytest.mark.parametrize(("name", "hidden"), [("CartPole-v1", [1, 3]), ("Pendulum-v1", [2]), ("MountainCar-v0", [1])])
def test_velocities_are_hidden(name, hidden):
    env, whole = named(f"no_velocity:{name}")(), gym.make(name)
    obs, expected = env.reset(seed=1)[0], whole.reset(seed=1)[0]
    for _ in range(5):
        np.testing.assert_array_equal(obs, np.delete(expected, hidden))
        assert env.observation_space.contains(obs)
        action = whole.action_space.sample()
        obs, expected = env.step(action)[0], whole.step(action)[0]


@pytest.mark.parametrize(("name", "package"), [("atari:Pong", "cv2"), ("no_velocity:CartPole-v1", "pygame")])
def test_a_clip_can_be_made(name, package):
    pytest.importorskip(package)
    if name.startswith("atari:"):
        pytest.importorskip("ale_py", reason="ale-py is not installed")
    with closing(rendering_env(name, "rgb_array")) as env:
        env.reset(seed=0)
        before = env.render()
        for _ in range(5):
            env.step(env.action_space.n - 1)
        assert before.shape[2] == 3
        assert (env.render() != before).any()


def test_a_run_is_loaded_again_without_trust(tmp_path):
    config = etude.PPOConfig(env="no_velocity:CartPole-v1", num_envs=2, num_steps=32, seed=1)
    with closing(etude.PPO(config)) as algo:
        algo.train()
        algo.save(tmp_path / "run")
    with closing(etude.load(tmp_path / "run")) as again:
        assert again.config.env == "no_velocity:CartPole-v1"
        assert again.train().env_steps == 64
    assert not names_module("atari:Pong")
    assert names_module("my_envs:Pong")


def test_missing_packages_of_atari_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(etude.EnvError, match="'atari:Pong' needs packages .* opencv-python-headless"):
        make_arena("atari:Pong", 1)


def test_what_is_unknown_is_named():
    with pytest.raises(etude.EnvError, match="not known which entries .* wrap another env"):
        make_arena("no_velocity:Taxi-v3", 1)
    with pytest.raises(etude.EnvError, match="no_velocity:CartPole-v9': .*v9.* doesn't exist"):
        make_arena("no_velocity:CartPole-v9", 1)
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="opencv is not installed")
    with pytest.raises(etude.EnvError, match="no Atari game 'Pnog'. Nearest: 'atari:Pong'"):
        make_arena("atari:Pnog", 1)
