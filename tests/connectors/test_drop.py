# SPDX-License-Identifier: Apache-2.0
"""Parts of observations that are left out: those that Etude can't handle, at the env; others, for the module."""

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from talking_envs import Graphs, Inside, OneOfs, Pair, Sequences, Talking

import etude
from etude.cli.main import main
from etude.envs import VectorArena, make_arena


def config(env: Any, **given: Any) -> etude.PPOConfig:
    small: dict[str, Any] = {"num_envs": 2, "num_steps": 40, "minibatch_size": 20, "epochs": 1, "seed": 1}
    return etude.PPOConfig(env=env, **{**small, **given})


@pytest.mark.parametrize(
    ("env", "num_workers"),
    [(Talking, 0), (Talking, 1), (Graphs, 0), (Sequences, 0), (OneOfs, 0), (Inside, 0), (Pair, 0), (Pair, 1)],
)
def test_what_can_not_be_handled_is_refused_with_the_line_that_drops_it(
    env: Any, num_workers: int, tmp_path: Path
) -> None:
    workers = etude.Workers(num_workers=num_workers, envs_per_worker=2) if num_workers else etude.Workers()
    with pytest.raises(etude.SpaceError) as caught:
        etude.PPO(config(env, workers=workers))
    line = re.search(r'connectors=\("(drop:[^"]+)",\)', str(caught.value))
    assert line is not None
    ppo = etude.PPO(config(env, workers=workers, connectors=(line[1],)))
    ppo.train()
    ppo.record(tmp_path / "data", 2, seed=1)
    recording = etude.Recording.open(tmp_path / "data")
    assert recording.validate().ok
    said = [name for name in recording.read().steps if name.startswith("obs/said")]
    assert said == (["obs/said/loud"] if env is Inside else [])
    ppo.save(tmp_path / "run")
    ppo.close()
    again = etude.load(tmp_path / "run", env=env)
    assert (again.train().resumed == "snapshot") == (not num_workers)
    assert again.evaluate(2).episodes == 2
    again.close()


def test_what_can_be_handled_is_recorded_and_left_out_for_the_module(tmp_path: Path) -> None:
    ppo = etude.PPO(config(Talking, connectors=("drop:said,mode", "frame_stack:2")))
    ppo.train()
    assert set(ppo.spaces["main"][0].spaces) == {"mode", "numbers"}  # type: ignore[attr-defined]
    assert set(ppo.module.obs_space.spaces) == {"numbers"}  # type: ignore[attr-defined]
    ppo.record(tmp_path / "data", 3, seed=1)
    exp = etude.Recording.open(tmp_path / "data").read()
    np.testing.assert_array_equal(exp.steps["obs/mode"], np.tile(np.arange(1, 9), 3) % 4)
    bc = etude.BC(etude.BCConfig(data=str(tmp_path / "data"), connectors=("drop:mode",), seed=1))
    bc.fit(etude.Stop(updates=2))
    assert set(bc.module.obs_space.spaces) == {"numbers"}  # type: ignore[attr-defined]


def test_a_vector_env() -> None:
    def make() -> Any:
        return SyncVectorEnv([Talking] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)

    with pytest.raises(etude.SpaceError, match="drop:said"):
        make_arena(make, 3)
    arena = make_arena(make, 3, drop=["said"])
    assert isinstance(arena, VectorArena)
    arena.reset(seed=1)
    assert set(arena.recv()[0].obs) == {"obs/mode", "obs/numbers"}


@pytest.mark.parametrize(
    ("connector", "error", "message"),
    [
        ("drop:sayd", etude.SpaceError, "no `sayd` to drop"),
        ("drop:said/now", etude.SpaceError, "no `said/now` to drop"),
        ("drop:said,numbers,mode", etude.SpaceError, "nothing"),
        ("drop", etude.SettingsError, "needs the name of a part"),
    ],
)
def test_messages(connector: str, error: type[Exception], message: str) -> None:
    env = gym.wrappers.FilterObservation(Talking(), ["mode", "numbers"]) if connector == "drop" else Talking()
    with pytest.raises(error, match=message):
        etude.PPO(config(env, num_envs=1, connectors=(connector,)))


def test_what_no_connector_can_drop_is_refused_with_a_wrapper() -> None:
    class Speaks(Talking):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Text(3)

    class Only(Talking):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Text(3)  # type: ignore[assignment]

    with pytest.raises(etude.SpaceError, match=r"`action` is a Text space.*TransformAction"):
        etude.PPO(config(Speaks, connectors=("drop:said",)))
    with pytest.raises(etude.SpaceError, match=r"`obs` is a Text space.*TransformObservation"):
        etude.PPO(config(Only))


def test_one_object_for_all_copies_is_noticed_behind_a_drop() -> None:
    one = Talking()
    with pytest.raises(etude.EnvError, match="same"):
        etude.PPO(config(lambda: one, connectors=("drop:said",)))


def test_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    train = ["train", "ppo", "--env", "talking_envs:Talking", "--num-steps", "32", "--quiet", "--stop.env-steps", "32"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*train, *out]) == 2
    line = re.search(r"--connectors (drop:\S+)\.", capsys.readouterr().err)
    assert line is not None
    assert main([*train, *out, "--connectors", line[1]]) == 0
    given = ["--env", "talking_envs:Talking"]
    assert main(["record", str(tmp_path / "run"), *given, "--episodes", "1", "--to", str(tmp_path / "data")]) == 0
    assert main(["data", "validate", str(tmp_path / "data")]) == 0
    assert main(["evaluate", str(tmp_path / "run"), *given, "--episodes", "1"]) == 0
