# SPDX-License-Identifier: Apache-2.0
"""Running episodes in MuJoCo and in ALE go on bit for bit, in a new env and in a new process."""

import copy
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import simulated_envs
from pool_envs import copies_of
from test_families import skip_without
from test_snapshot import through_a_file

import etude
from etude.envs.copies import CopiesArena

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the simulators and what they draw with
]

MUJOCO: dict[str, Any] = {
    "Hopper": "Hopper-v5",
    "Ant": "Ant-v5",  # reads positions of the step before
    "Humanoid": "Humanoid-v5",
    "Reacher": "Reacher-v5",
    "wrapped": simulated_envs.wrapped_hopper,
    "model changes": simulated_envs.heavier_every_time,
    "views of its memory": simulated_envs.with_views,
    "get_state without its set_state": simulated_envs.with_a_get_state,
}
ALE: dict[str, Any] = {
    "Pong": "ALE/Pong-v5",
    "Q*bert": "ALE/Qbert-v5",  # draws by what it did before its state was put back
    "wrapped": simulated_envs.breakout,
    "mostly repeats actions": simulated_envs.sticky_pong,
}
DM_CONTROL = {"reacher": "dm_control/reacher-easy-v0", "walker": "dm_control/walker-walk-v0"}


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key that states of ALE are signed with is made in a folder of the test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "etude" / "signing-key"


def play(arena: CopiesArena, rounds: int, seed: int) -> list[Any]:
    """Act at random, and give all that is shown after each action."""
    space = arena.kinds[0].action_space
    space.seed(seed)
    seen: list[Any] = []
    for _ in range(rounds):
        for turn in arena.recv():
            if turn.waits:
                arena.send(turn, {"action": np.stack([space.sample() for _ in turn.slots])})
        for turn in arena.recv():
            obs = {name: column.tobytes() for name, column in turn.obs.items()}
            rows = (turn.slots, turn.reward, turn.terminated, turn.truncated, turn.first)
            seen.append((obs, *(None if column is None else column.tolist() for column in rows)))
    return seen


def goes_on(env: Any, before: int, after: int = 40, num_envs: int = 2) -> None:
    """Save after some steps, restore in a new env, and compare with one that was never saved."""
    saved, never_saved, new = (copies_of(env, num_envs=num_envs) for _ in range(3))
    for arena in (saved, never_saved):
        arena.reset(seed=before)
        play(arena, before, seed=0)
    state = through_a_file(saved.state_dict())
    expected = play(never_saved, after, seed=1)
    assert new.load_state_dict(state) == "snapshot"
    assert play(new, after, seed=1) == expected
    assert play(saved, after, seed=1) == expected  # to save it changes nothing
    for arena in (saved, never_saved, new):
        arena.close()


@pytest.mark.parametrize("name", MUJOCO)
def test_mujoco_goes_on(name: str) -> None:
    skip_without("mujoco")
    goes_on(MUJOCO[name], before=13)


@pytest.mark.parametrize("name", DM_CONTROL)
def test_dm_control_goes_on(name: str) -> None:
    skip_without("dm_control")
    goes_on(DM_CONTROL[name], before=13)


@pytest.mark.parametrize("name", ALE)
def test_ale_goes_on(name: str) -> None:
    skip_without("ale_py")
    goes_on(ALE[name], before=35)


def test_the_action_before_is_put_back() -> None:
    # The emulator repeats it by chance, and does not tell which it is: where one is saved, it matters in some places.
    skip_without("ale_py")
    for before in range(20, 28):
        goes_on(simulated_envs.sticky_pong, before, after=6, num_envs=1)


SCRIPT = """
import sys
import etude
algorithm = etude.load(sys.argv[1], trust=True)
for _ in range(2):
    result = algorithm.train()
print(result.resumed if result.resumed else "", end="")
algorithm.save(sys.argv[2])
"""


@pytest.mark.parametrize("env", ["Hopper-v5", simulated_envs.breakout], ids=["mujoco", "ale"])
def test_a_run_goes_on_in_a_new_process(env: Any, tmp_path: Path) -> None:
    skip_without("mujoco" if env == "Hopper-v5" else "ale_py")
    network = etude.NetworkConfig(hidden=(8,))
    config = etude.PPOConfig(env=env, num_envs=2, num_steps=70, epochs=1, network=network, seed=3)
    ppo = etude.PPO(config)
    ppo.train()
    ppo.save(tmp_path / "half")
    for _ in range(2):
        ppo.train()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "half"), str(tmp_path / "whole")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=120)
    again = etude.load(tmp_path / "whole", env=env)
    for name, weights in ppo.module.state_dict().items():
        assert (again.module.state_dict()[name] == weights).all()
    ppo.close()


# -- what a file holds is not believed ------------------------------------------------------------------------------


def inside(tree: Any, name: str) -> Iterator[dict[str, Any]]:
    """The dicts in a state that have something called ``name``."""
    if isinstance(tree, dict):
        if name in tree:
            yield tree
        for value in tree.values():
            yield from inside(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from inside(value, name)


def shortened(state: dict[str, Any]) -> None:
    state["data"] = state["data"][:-1]


def changed(state: dict[str, Any]) -> None:
    state["data"] = bytes([state["data"][0] ^ 1]) + state["data"][1:]


def emptied(state: dict[str, Any]) -> None:
    state["data"] = b""


def without_its_signature(state: dict[str, Any]) -> None:
    del state["signature"]


def of_no_bytes(state: dict[str, Any]) -> None:
    state["data"] = 7


@pytest.mark.parametrize("spoil", [shortened, changed, emptied, without_its_signature, of_no_bytes])
def test_a_state_of_ale_that_was_changed_is_not_used(spoil: Callable[[dict[str, Any]], None]) -> None:
    skip_without("ale_py")
    arena = copies_of("ALE/Pong-v5")
    arena.reset(seed=1)
    state = through_a_file(arena.state_dict())
    spoil(next(inside(state["env"], "signature")))
    how = arena.load_state_dict(state)
    assert how.startswith("new episodes: ")
    arena.reset()
    assert len(play(arena, 3, seed=0)) == 3


def test_a_state_of_ale_is_used_for_the_user_alone_who_saved_it(
    own_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("ale_py")
    arena = copies_of("ALE/Pong-v5")
    arena.reset(seed=1)
    state = through_a_file(arena.state_dict())
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600
    assert arena.load_state_dict(copy.deepcopy(state)) == "snapshot"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    how = arena.load_state_dict(state)
    assert how.startswith("new episodes: ")
    assert "another user" in how


def test_without_a_place_for_the_key_new_episodes_begin(own_key: Path) -> None:
    skip_without("ale_py")
    own_key.parent.parent.write_text("a file where a folder should be")
    arena = copies_of("ALE/Pong-v5")
    arena.reset(seed=1)
    state = arena.state_dict()
    assert state["how"] == "new episodes"
    assert "key" in state["why"]


def larger(state: dict[str, Any]) -> None:
    state["integration"] = np.append(state["integration"], 0.0)


def not_finite(state: dict[str, Any]) -> None:
    state["integration"][0] = np.nan


def other_names(state: dict[str, Any]) -> None:
    state["names"] = state["names"].replace("qpos", "_address")


def fewer(state: dict[str, Any]) -> None:
    state["numbers"] = state["numbers"][:-1]


@pytest.mark.parametrize("spoil", [larger, not_finite, other_names, fewer])
def test_a_state_of_mujoco_that_does_not_fit_is_not_used(spoil: Callable[[dict[str, Any]], None]) -> None:
    skip_without("mujoco")
    arena = copies_of("Hopper-v5")
    arena.reset(seed=1)
    state = through_a_file(arena.state_dict())
    spoil(next(inside(state["env"], "integration")))
    assert arena.load_state_dict(state).startswith("new episodes: ")
    arena.reset()
    assert len(play(arena, 3, seed=0)) == 3


MODELS = {
    "sleep": '<mujoco><option><flag sleep="enable"/></option></mujoco>',
    "delays or plugins": """<mujoco><worldbody><body><joint name="hinge"/><geom size="1"/></body></worldbody>
        <actuator><motor joint="hinge" delay="0.01" nsample="5"/></actuator></mujoco>""",
}


@pytest.mark.parametrize("why", MODELS)
def test_a_simulation_with_more_state_than_mujoco_gives_begins_new_episodes(why: str) -> None:
    skip_without("mujoco")
    import mujoco

    def make() -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1")
        env.unwrapped.data = mujoco.MjData(mujoco.MjModel.from_xml_string(MODELS[why]))  # type: ignore[attr-defined]
        return env

    arena = copies_of(make)
    arena.reset(seed=1)
    state = arena.state_dict()
    assert state["how"] == "new episodes"
    assert why in state["why"]


def test_the_state_of_another_game_or_robot_is_not_used() -> None:
    skip_without("mujoco")
    arena = copies_of("Hopper-v5")
    arena.reset(seed=1)
    assert copies_of("Walker2d-v5").load_state_dict(arena.state_dict()).startswith("new episodes: ")
    skip_without("ale_py")
    arena = copies_of("ALE/Pong-v5")
    arena.reset(seed=1)
    assert copies_of("ALE/Breakout-v5").load_state_dict(arena.state_dict()).startswith("new episodes: ")
