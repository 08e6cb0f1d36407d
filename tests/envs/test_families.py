# SPDX-License-Identifier: Apache-2.0
"""One contract for all families of envs: train, save, load, resume, record, validate, evaluate and film."""

import dataclasses
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_envs
import pytest

import etude
from etude.envs.registry import no_screen_needed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what other packages warn of is not ours
]

TRAINED, RESUMED = 900, 100


@dataclasses.dataclass(frozen=True)
class Family:
    env: str | Callable[..., Any]
    package: str = "gymnasium"
    """What it needs: skipped without it."""
    resumes: str = "snapshot"
    """How a resumed run goes on without workers."""
    connectors: tuple[str, ...] = ()
    conv: tuple[tuple[int, int, int], ...] | None = None
    max_steps: int = 25
    is_drawn_by_mujoco: bool = False


BOX2D = {"package": "Box2D", "resumes": "new episodes: "}
MUJOCO = {"package": "mujoco", "max_steps": 6, "is_drawn_by_mujoco": True}
MINIGRID = {"package": "minigrid", "connectors": ("drop:mission",), "conv": ((4, 3, 2),)}
DM_CONTROL = {"package": "dm_control", "max_steps": 6, "is_drawn_by_mujoco": True}

FAMILIES = {
    getattr(family.env, "__name__", family.env): family
    for family in (
        Family("CartPole-v1"),
        Family("Acrobot-v1"),
        Family("Pendulum-v1"),
        Family("MountainCar-v0"),
        Family("MountainCarContinuous-v0"),
        Family("FrozenLake-v1"),
        Family("Taxi-v4"),
        Family("Blackjack-v1"),
        Family("CliffWalking-v1"),
        Family("LunarLander-v3", **BOX2D),
        Family("LunarLanderContinuous-v3", **BOX2D),
        Family("BipedalWalker-v3", **BOX2D),
        Family("InvertedPendulum-v5", **MUJOCO),
        Family("Hopper-v5", **MUJOCO),
        Family("HalfCheetah-v5", **MUJOCO),
        Family("Ant-v5", **MUJOCO),
        Family("Reacher-v5", **MUJOCO),
        Family("ALE/Pong-v5", package="ale_py", conv=((2, 16, 16),)),
        Family(family_envs.breakout_ram, package="ale_py"),
        Family("MiniGrid-Empty-5x5-v0", **MINIGRID),
        Family("MiniGrid-DoorKey-5x5-v0", **MINIGRID),
        Family("dm_control/cartpole-swingup-v0", **DM_CONTROL),
        Family("dm_control/reacher-easy-v0", **DM_CONTROL),
        Family(family_envs.tictactoe, package="pettingzoo"),
        Family(family_envs.connect_four, package="pettingzoo"),
        Family(family_envs.rock_paper_scissors, package="pettingzoo"),
        Family(family_envs.leduc_holdem, package="rlcard", resumes=""),
    )
}
WORKERS = {"in process": 0, "in workers": 1}
ONE_OF_EACH = {family.package: name for name, family in reversed(FAMILIES.items())}.values()
"""The first family of each package: a worker treats the others as it does these."""
RUNS = [(name, how) for how in WORKERS for name in FAMILIES if how == "in process" or name in ONE_OF_EACH]


@functools.cache
def why_not(package: str) -> str:
    """Why a package can't be used; "" if it can."""
    try:
        with no_screen_needed():
            importlib.import_module(package)
            if package == "dm_control":
                importlib.import_module("dm_control.suite").load("cartpole", "swingup")
    except ImportError as error:
        return f"{package} is missing ({error}): `pip install -e '.[dev]'` brings it where it has wheels"
    except AttributeError as error:
        return f"this dm_control does not fit this MuJoCo ({error})"
    return ""


def skip_without(package: str) -> None:
    if why_not(package):
        pytest.skip(why_not(package))


@functools.cache
def why_mujoco_does_not_draw() -> str:
    """Asked in a process of its own, since MuJoCo may end the process that it can't draw in."""
    code = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).render()"
    with no_screen_needed():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


@pytest.mark.parametrize(("name", "how"), RUNS)
def test_all_that_a_run_goes_through(name: str, how: str, tmp_path: Path) -> None:
    family, num_workers = FAMILIES[name], WORKERS[how]
    skip_without(family.package)
    if num_workers:
        workers = etude.Workers(num_workers=num_workers, envs_per_worker=2, max_steps=family.max_steps)
    else:
        workers = etude.Workers(max_steps=family.max_steps)
    config = etude.PPOConfig(
        env=family.env,
        num_envs=2,
        num_steps=300,
        minibatch_size=150,
        epochs=1,
        network=etude.NetworkConfig(hidden=(16,), separate=False, conv=family.conv, conv_width=16),
        connectors=family.connectors,
        workers=workers,
        seed=1,
    )
    ppo = etude.PPO(config)
    result = ppo.fit(etude.Stop(env_steps=TRAINED))
    assert result.env_steps == TRAINED
    assert result.faulty_episodes == 0
    ppo.save(tmp_path / "run")
    ppo.close()

    again = etude.load(tmp_path / "run", env=family.env, num_steps=RESUMED)
    result = again.train()
    assert result.env_steps == TRAINED + RESUMED
    expected = "new episodes: the envs run in workers" if num_workers else family.resumes
    assert str(result.resumed).startswith(expected)

    again.record(tmp_path / "data", 2, seed=2)
    recording = etude.Recording.open(tmp_path / "data")
    assert recording.validate().ok
    assert (recording.obs_space, recording.action_space) == again.spaces["main"]
    evaluation = again.evaluate(2, seed=2)
    assert evaluation.episodes == 2
    assert evaluation.length_mean <= family.max_steps
    if family.is_drawn_by_mujoco and why_mujoco_does_not_draw():
        pytest.skip(f"all but the clip is well; MuJoCo can't draw here: {why_mujoco_does_not_draw()}")
    clip = etude.clip(again, to=tmp_path / "clip.gif", size="64x48", seed=2)
    assert 2 <= clip.num_frames <= family.max_steps + 1
    assert os.path.getsize(tmp_path / "clip.gif") > 0
    again.close()


@pytest.mark.parametrize("num_workers", WORKERS.values(), ids=WORKERS)
def test_an_env_of_the_api_before_gymnasium_is_refused(num_workers: int) -> None:
    workers = etude.Workers(num_workers=num_workers)
    with pytest.raises(etude.EnvError):
        etude.PPO(etude.PPOConfig(env=family_envs.OldEnv, num_envs=1, num_steps=16, workers=workers)).train()
