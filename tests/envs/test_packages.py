# SPDX-License-Identifier: Apache-2.0
"""Envs of other packages: found by their ids, named when missing, and the same env wherever a run acts."""

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from some_envs import Numbered
from test_families import skip_without

import etude
from etude.envs import InlineArena, VectorArena, Workers, make_arena

# -- missing packages -----------------------------------------------------------------------------------------------

WITHOUT = """
import json, sys
from etude.envs import make_arena
from etude.envs.render import rendering_env
from etude.errors import EnvError

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing, envs = json.loads(sys.argv[1])
sys.meta_path.insert(0, Missing())
told = []
for env in envs:
    for make in (lambda: make_arena(env, 1), lambda: rendering_env(env, "rgb_array")):
        try:
            make()
        except EnvError as error:
            told.append(str(error))
print(json.dumps(told))
"""

INSTALL = {
    "Ant-v5": 'pip install "gymnasium[mujoco]"',
    "LunarLander-v3": 'pip install "gymnasium[box2d]"',
    "ALE/Pong-v5": "pip install ale-py",
    "ale_py:ALE/Pong-v5": "pip install ale-py",
    "PongNoFrameskip-v4": "pip install ale-py",
    "MiniGrid-Empty-5x5-v0": "pip install minigrid",
    "dm_control/cartpole-swingup-v0": 'pip install "shimmy[dm-control]"',
}


@pytest.mark.parametrize(
    ("missing", "envs"),
    [
        (["mujoco", "Box2D", "ale_py", "minigrid", "dm_control"], list(INSTALL)),
        (["imageio", "shimmy"], ["Ant-v5", "dm_control/cartpole-swingup-v0"]),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(missing: list[str], envs: list[str]) -> None:
    code = [sys.executable, "-W", "ignore", "-c", WITHOUT, json.dumps([missing, envs])]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == 2 * len(envs)
    for i, text in enumerate(told):
        assert INSTALL[envs[i // 2]] in text
        assert repr(envs[i // 2]) in text


def test_the_nearest_id_of_a_package_is_named() -> None:
    skip_without("ale_py")
    with pytest.raises(etude.EnvError, match="Nearest: 'ALE/Pong-v5'"):
        make_arena("ALE/Pongg-v5", 1)


# -- vectorised versions --------------------------------------------------------------------------------------------


class Doubled(SyncVectorEnv):
    """Another env than `Numbered`: it shows twice as much."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__([Numbered] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.single_observation_space = gym.spaces.Box(-1, 1e6, (6,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return np.concatenate([obs, obs], axis=1), info

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return np.concatenate([obs, obs], axis=1), *rest


class Generous(SyncVectorEnv):
    """Another env than `Numbered`, though its spaces are the same: it pays more."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__([Numbered] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)

    def step(self, actions: Any) -> Any:
        obs, reward, *rest = super().step(actions)
        return obs, reward + 1000, *rest


_COUNT = itertools.count()


@pytest.fixture(params=[Doubled, Generous])
def differing(request: pytest.FixtureRequest) -> Iterator[str]:
    """An id with a vectorised version that acts by other rules than the single env."""
    name = f"Differs{next(_COUNT)}-v0"
    gym.register(name, entry_point=Numbered, vector_entry_point=request.param, max_episode_steps=7)
    yield name
    del gym.registry[name]


def test_a_vectorised_version_with_other_rules_is_used_nowhere_and_that_is_said_once(
    differing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = etude.PPOConfig(env=differing, num_envs=5, num_steps=60, minibatch_size=60, epochs=1, seed=1)
    ppo = etude.PPO(config)
    assert isinstance(ppo.runner.arena, InlineArena)  # type: ignore[union-attr]
    trained = ppo.runner.collect(num_steps=60)
    ppo.record(tmp_path / "data", 4, seed=1)
    recorded = etude.Recording.open(tmp_path / "data").read()
    assert ppo.evaluate(4, seed=1).return_mean == recorded.returns().mean()
    for exp in (trained, recorded):
        assert exp.steps["obs"].shape[1:] == (3,)
        t, copy, episode = (exp.steps["obs"][:, i] for i in (2, 0, 1))
        np.testing.assert_array_equal(exp.steps["reward"], 10_000 * copy + 100 * episode + t + 0.5)
    told = [r for r in caplog.records if r.levelno == logging.WARNING and "vectorised version" in r.getMessage()]
    assert len(told) == 1
    assert differing in told[0].getMessage()


def test_a_vectorised_version_that_is_given_is_used_everywhere(differing: str, tmp_path: Path) -> None:
    kind = gym.registry[differing].vector_entry_point
    assert isinstance(kind, type)
    ppo = etude.PPO(etude.PPOConfig(env=lambda: kind(3), num_envs=3, num_steps=60, minibatch_size=60, epochs=1, seed=1))
    trained = ppo.runner.collect(num_steps=60)
    ppo.record(tmp_path / "data", 4, seed=1)
    recorded = etude.Recording.open(tmp_path / "data").read()
    for exp in (trained, recorded):
        t, copy, episode = (exp.steps["obs"][:, i] for i in (2, 0, 1))
        more = 1000 if kind is Generous else 0
        np.testing.assert_array_equal(exp.steps["reward"], 10_000 * copy + 100 * episode + t + 0.5 + more)
        assert exp.steps["obs"].shape[1:] == ((6,) if kind is Doubled else (3,))


@pytest.fixture(params=[500, 41])
def cart_pole(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """An id and its limit of steps."""
    spec = gym.spec("CartPole-v1")
    name = f"LimitedCartPole{next(_COUNT)}-v0"
    entries = {"entry_point": spec.entry_point, "vector_entry_point": spec.vector_entry_point}
    gym.register(name, **entries, max_episode_steps=request.param)
    yield name, request.param
    del gym.registry[name]


def test_cartpoles_vectorised_version_is_not_used_without_a_limit_as_it_has_one(monkeypatch: Any) -> None:
    spec = gym.spec("CartPole-v1")
    entries = {"entry_point": spec.entry_point, "vector_entry_point": spec.vector_entry_point}
    monkeypatch.setitem(gym.registry, "Endless-v0", EnvSpec("Endless-v0", **entries))
    arena = make_arena("Endless-v0", 8, Workers(max_steps=30))
    assert isinstance(arena, InlineArena)
    arena.close()


@pytest.mark.parametrize("steered", [True, False])
def test_cartpoles_vectorised_version_acts_by_the_rules_of_the_single_env(
    cart_pole: tuple[str, int], steered: bool
) -> None:
    """Steered, the pole stands until the time is up; else it falls."""
    name, limit = cart_pole
    arena = make_arena(name, 5)
    assert isinstance(arena, VectorArena)
    single: Any = gym.make(name)
    single.reset(seed=0)
    arena.reset(seed=3)
    single.unwrapped.state = arena.env.unwrapped.state[:, 2].astype(np.float64)  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    t, terminated, truncated = 0, False, False
    while not (terminated or truncated):
        t += 1
        turn = arena.recv()[-1]
        actions = rng.integers(2, size=5)
        if steered:
            position, speed, angle, turning = turn.obs["obs"].T
            actions = (0.1 * position + 0.3 * speed + 3 * angle + turning > 0).astype(np.int64)
        arena.send(turn, {"action": actions})
        obs, reward, terminated, truncated, _ = single.step(int(actions[2]))
        turn = arena.recv()[0]
        np.testing.assert_allclose(turn.obs["obs"][2], obs, rtol=1e-4, atol=1e-5)
        assert turn.reward[2] == reward
        ended = [bool(flags[2]) if flags is not None else False for flags in (turn.terminated, turn.truncated)]
        assert ended == [terminated, truncated]
    assert (t, truncated) == (limit, True) if steered else terminated
    arena.close()


def test_ale_is_one_env_wherever_a_run_acts(tmp_path: Path) -> None:
    skip_without("ale_py")
    network = etude.NetworkConfig(hidden=(8,), separate=False, conv=((2, 16, 16),), conv_width=8)
    config = etude.PPOConfig(
        env="ale_py:ALE/Pong-v5",
        num_envs=2,
        num_steps=20,
        minibatch_size=20,
        epochs=1,
        network=network,
        workers=etude.Workers(max_steps=6),
        seed=1,
    )
    ppo = etude.PPO(config)
    ppo.train()
    assert ppo.spaces["main"][0].shape == (210, 160, 3)
    assert ppo.evaluate(2, seed=1).episodes == 2
    ppo.record(tmp_path / "data", 2, seed=1)
    assert etude.Recording.open(tmp_path / "data").obs_space == ppo.spaces["main"][0]
    etude.clip(ppo, to=tmp_path / "clip.gif", size="16x20", seed=1)
    assert os.path.getsize(tmp_path / "clip.gif") > 0
