"""Presets: every file of them holds, and gives what it says; the command line's --preset and `etude presets`."""

import dataclasses
import importlib.util
import json
from contextlib import closing

import pytest

import etude
from etude.algorithms import OfflineConfig, OnPolicyConfig
from etude.cli.main import main
from etude.presets import find_preset

NEEDS = {"atari:": ("ale_py", "cv2"), "pettingzoo": ("pettingzoo", "pygame"), "LunarLander": ("Box2D",)}
MUJOCO = ("HalfCheetah", "Hopper", "Walker2d", "Ant")


def ids(preset):
    return preset.name


@pytest.mark.parametrize("preset", etude.find_presets(), ids=ids)
def test_each_gives_its_settings_and_says_where_they_are_from(preset):
    config = preset.config()
    assert config.env == preset.env
    assert isinstance(config, etude.ALGORITHMS[preset.algorithm].Config)
    assert config == etude.preset(preset.algorithm, preset.env)
    (limit,) = preset.stop.values()
    assert limit >= 100_000
    assert etude.Stop(**preset.stop) != etude.Stop()
    assert len(preset.source) > 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what other packages warn of is not ours
@pytest.mark.parametrize("preset", etude.find_presets(), ids=ids)
def test_each_trains(preset):
    config = preset.config()
    if isinstance(config, OfflineConfig):
        pytest.skip("needs a recording of its env")
    needs = [package for part, packages in NEEDS.items() if part in preset.env for package in packages]
    needs += ["mujoco"] * preset.env.startswith(MUJOCO)
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    once = {"epochs": 1} if isinstance(config, OnPolicyConfig) else {}
    with closing(etude.ALGORITHMS[preset.algorithm](dataclasses.replace(config, seed=1, **once))) as algo:
        assert algo.train().env_steps >= 1


def test_the_most_particular_of_them_are_taken_over():
    ppo = etude.preset("ppo", "HalfCheetah-v5")
    assert (ppo.lr, ppo.clip, ppo.network.hidden, ppo.optimizer.eps) == (2.0633e-5, 0.1, (256, 256), 1e-5)
    assert etude.preset("iql", "Hopper-v5").optimizer.actor_lr == ("cosine", (0, 3e-4), (1_000_000, 0.0))
    assert [p.env for p in etude.find_presets("impala")] == ["atari:Breakout", "atari:Pong"]


def test_what_is_to_be_different_is_an_argument():
    changed = etude.preset("ppo", "HalfCheetah-v5", seed=3, window=20)
    assert changed == dataclasses.replace(etude.preset("ppo", "HalfCheetah-v5"), seed=3, window=20)
    assert (changed.seed, changed.metrics.window, changed.clip) == (3, 20, 0.1)
    assert etude.preset("ppo", "HalfCheetah-v5", env="Ant-v5").env == "Ant-v5"
    with pytest.raises(etude.SettingsError, match="PPOConfig has no setting `learning_rate`. Here it is: `lr`"):
        etude.preset("ppo", "HalfCheetah-v5", learning_rate=1e-3)


def test_what_is_unknown_is_named():
    with pytest.raises(etude.SettingsError, match="ppo has no preset for HalfCheetah-v4. Nearest: HalfCheetah-v5"):
        etude.preset("ppo", "HalfCheetah-v4")
    with pytest.raises(
        etude.SettingsError, match=r"impala has no preset for Taxi-v3. It has them for atari:Breakout, "
    ):
        etude.preset("impala", "Taxi-v3")
    with pytest.raises(etude.SettingsError, match="no algorithm `pop`. Nearest: `ppo`"):
        etude.find_presets("pop")


def test_a_run_from_the_shell_begins_with_them_and_flags_count_more(tmp_path, capsys):
    flags = ["--preset", "--stop.env-steps", "600", "--lr", "0.002", "--seed", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "dqn", "--env", "Acrobot-v1", "--json", "--quiet", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["env_steps"] == 1000  # an iteration
    with closing(etude.load(tmp_path / "run")) as algo:
        tuned = find_preset("dqn", "Acrobot-v1").config()
        assert algo.config == dataclasses.replace(tuned, lr=0.002, seed=1)


def test_it_stops_where_the_preset_does(tmp_path, capsys):
    settings = tmp_path / "mine.yaml"
    settings.write_text("num_steps: 60000\nepochs: 1\nminibatch_size: 30000\nnum_envs: 32\n")
    flags = ["--preset", "--config", str(settings), "--seed", "1", "--out", str(tmp_path / "run"), "--quiet", "--json"]
    assert main(["train", "ppo", "--env", "CartPole-v1", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 2  # 100,000 steps are two of these


def test_it_needs_an_env(capsys):
    assert main(["train", "ppo", "--preset"]) == 2
    assert "--preset is for an algorithm and an env: give --env" in capsys.readouterr().err


def test_they_are_listed_and_written(tmp_path, capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(etude.find_presets())
    assert main(["presets", "ppo", "CartPole-v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["lr"] == etude.preset("ppo", "CartPole-v1").lr
    assert main(["presets", "sac", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["presets"]
    assert {one["algorithm"] for one in listed} == {"sac"}
    assert main(["presets", "qr_dqn", "Acrobot-v1"]) == 0
    written = tmp_path / "preset.yaml"
    written.write_text(capsys.readouterr().out)
    flags = ["--config", str(written), "--stop.env-steps", "8", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "qr_dqn", *flags]) == 0
    with closing(etude.load(tmp_path / "run")) as algo:
        assert algo.config == etude.preset("qr_dqn", "Acrobot-v1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["pop"], "no algorithm `pop`. Nearest: `ppo`"),
        (["ppo", "Hopper-v4"], "Nearest: Hopper-v5"),
        (["a", "b", "c"], "give an algorithm and an env, not 3 names: a b c"),
    ],
)
def test_what_can_not_be_listed_is_said(args, said, capsys):
    assert main(["presets", *args]) == 2
    assert said in capsys.readouterr().err
