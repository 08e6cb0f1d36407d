# SPDX-License-Identifier: Apache-2.0
"""Policies that have learned: what is estimated from another's episodes orders them as playing does."""

import json

import numpy as np
import pytest

from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop, load
from etude.cli.main import main
from etude.evaluation import FQEConfig, evaluate_on
from etude.presets import preset
from etude.recordings import Recording

ENV = "CartPole-v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Episodes to learn from, held-out ones, and clones of a better and a worse policy than the one that played."""
    path = tmp_path_factory.mktemp("cartpole")
    trained = {}
    for name, steps in (("worse", 2_000), ("middle", 8_000), ("better", 10_000)):
        trained[name] = PPO(preset("ppo", ENV, seed=0))
        trained[name].fit(Stop(env_steps=steps))
    trained["middle"].record(path / "held_out", 150, seed=1, explore=True)
    for name in ("worse", "better"):
        trained[name].record(path / f"{name}_data", 60, seed=2, explore=True)
        clone = BC(BCConfig(data=str(path / f"{name}_data"), seed=0))
        clone.fit(Stop(updates=400))
        clone.save(path / name)
    return path


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Held-out episodes, and a clone that has learned a little of who played them."""
    path = tmp_path_factory.mktemp("little")
    player = PPO(PPOConfig(env=ENV, seed=0))
    player.record(path / "held_out", 150, seed=1, explore=True)
    learner = BC(BCConfig(data=str(path / "held_out"), seed=0, updates_per_iteration=10))
    learner.train()
    learner.save(path / "clone")
    return path


def truth(algorithm, path):
    algorithm.record(path, 200, env=ENV, seed=3, explore=True)
    exp = Recording.open(path).read()
    return np.mean([np.sum(one.steps["reward"] * 0.99 ** np.arange(one.num_steps)) for one in exp])


@pytest.mark.learning
def test_clones_are_ordered_as_they_play(folder, tmp_path):
    found, wanted = {}, {}
    for name in ("worse", "better"):
        clone = load(folder / name)
        wanted[name] = truth(clone, tmp_path / name)
        found[name] = evaluate_on(clone, folder / "held_out", fqe=FQEConfig(members=3, steps=1_000))
    played = found["worse"].behaviour.mean
    assert wanted["worse"] < played - 5 < played + 5 < wanted["better"]
    for method in ("wis", "pdis", "wpdis", "dm", "dr", "wdr", "fqe"):
        estimates = {name: result.estimates[method] for name, result in found.items()}
        assert estimates["worse"].mean < played < estimates["better"].mean, method
        for name in found:
            assert estimates[name].mean == pytest.approx(wanted[name], rel=0.25), (method, name)
    for name in found:
        dr = found[name].estimates["dr"]
        assert dr.mean == pytest.approx(wanted[name], rel=0.15)
        assert dr.high - dr.low < found[name].estimates["is"].high - found[name].estimates["is"].low


def test_on_the_command_line(clone, capsys):
    line = ["evaluate", str(clone / "clone"), "--on", str(clone / "held_out"), "--methods", "wis,wpdis"]
    assert main(line) == 0
    words = capsys.readouterr().out
    assert words.startswith("module 'main', drawing its actions, over 150 episodes, ")
    assert [row.split()[0] for row in words.splitlines()[3:6]] == ["as", "wis", "wpdis"]
    assert main([*line, "--gamma", "0.9", "--confidence", "0.8", "--seed", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on"] == str(clone / "held_out")
    result = found["modules"]["main"]
    direct = evaluate_on(
        load(clone / "clone"), clone / "held_out", methods=["wis", "wpdis"], gamma=0.9, confidence=0.8, seed=4
    )
    assert result == json.loads(direct.to_json())
    assert main([*line, "--greedy", "--behaviour", "fit"]) == 0
    text = capsys.readouterr()
    assert "taking its most likely actions" in text.out
    assert {"fitting the behaviour policy", "valuing the episodes"} <= {*text.err.splitlines()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--env", ENV], "`env` is for playing, but with `on` nothing is played"),
        (["--explore"], "`explore` is for playing, but with `on` nothing is played"),
        (["--episodes", "3"], "`episodes` is for playing, but with `on` nothing is played"),
        (["--methods", "wsi"], "there is no method `wsi`"),
        (["--gamma", "2"], "`gamma` is 2.0, but must be between 0 and 1"),
        (["--behaviour", "guess"], "evaluate.behaviour is 'guess', expected {recorded,fit}"),
        (["--on", "nowhere"], "nowhere"),
    ],
)
def test_errors_on_the_command_line(clone, capsys, more, message):
    assert main(["evaluate", str(clone / "clone"), "--on", str(clone / "held_out"), *more]) == 2
    text = capsys.readouterr()
    assert message in text.err
    assert text.out == ""
