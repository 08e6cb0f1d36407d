# SPDX-License-Identifier: Apache-2.0
"""Nothing that a checkpoint names is imported or called, wherever it stands, unless the caller asks for it."""

import builtins
import contextlib
import copy
import cProfile
import functools
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from many_agent_envs import TwoJobs
from signalling import Signalling
from toy_envs import Echo, OwnNet

import etude
from etude.algorithms import BC, DQN, PPO, SAC, BCConfig, DQNConfig, PPOConfig, SACConfig
from etude.checkpoints import load_tree, save_tree
from etude.cli.main import main
from etude.connectors import Connector, NormalizeObs, PreLearner
from etude.errors import CheckpointError, EtudeError
from etude.modules import NetworkConfig
from etude.recordings import Source
from etude.runners import Callback, GameReturns

SITTING = """
import pathlib
pathlib.Path(__file__).with_name("touched").write_text("imported")
def run(*args, **kwargs):
    pathlib.Path(__file__).with_name("touched").write_text("called")
class Thing:
    def __init__(self, *args, **kwargs):
        run()
"""
"""A module in the folder that one works in."""

CALLED = [
    (subprocess, "call"),
    (subprocess, "Popen"),
    (cProfile, "run"),
    (os, "abort"),
    (os, "system"),
    (pty, "spawn"),
    (builtins, "exec"),
]
ETUDES = ["etude.cli.main:main", "etude.algorithms.saving:imported", "etude.connectors.connector:FunctionConnector"]
"""Of Etude's own, what is not what may stand there, or would call what it is given."""

NAMES = [f"{module.__name__}:{name}" for module, name in CALLED] + [
    "sitting_here:run",
    "sitting_here:Thing-v0",
    *ETUDES,
]

FORMS = {
    "a text": lambda name: name,
    "a class or function": lambda name: {"$ref": name},
    "an object": lambda name: {"$made": name, "with": {}},
    "an object with arguments": lambda name: {
        "$made": name,
        "with": {"args": ["touch", "touched"], "fn": {"$ref": name}},
    },
}

PLACES = {
    "env": lambda given: {"env": given},
    "module": lambda given: {"module": given},
    "one of the modules": lambda given: {"agents": {"modules": {"main": given}}},
    "module_of": lambda given: {"agents": {"modules": ["main"], "module_of": given}},
    "modules_to_train": lambda given: {"agents": {"modules_to_train": given}},
    "a nested setting by its own name": lambda given: {"agents": {}, "modules": ["main"], "module_of": given},
    "filter_fn": lambda given: {"filter_fn": given},
    "connectors": lambda given: {"connectors": given},
    "a connector": lambda given: {"connectors": ["normalize_obs", given]},
    "an argument of a connector": lambda given: {
        "connectors": [{"$made": "etude.connectors.observations:NormalizeObs", "with": {"clip": given}}]
    },
    "a connector's function": lambda given: {
        "connectors": [{"$made": "etude.connectors.connector:FunctionConnector", "with": {"fn": given}}]
    },
    "a connector in a pipeline": lambda given: {
        "connectors": [{"$made": "etude.connectors.pipeline:Pipeline", "with": {"connectors": [given]}}]
    },
    "a callback": lambda given: {"callbacks": [given]},
    "network": lambda given: {"network": given},
    "a setting of the network": lambda given: {"network": {"hidden": given}},
    "workers": lambda given: {"workers": given},
    "record": lambda given: {"record": given},
    "lr": lambda given: {"lr": given},
    "overrides": lambda given: {"agents": {"overrides": {"main": given}}},
    "a setting of one module": lambda given: {"agents": {"overrides": {"main": {"connectors": [given]}}}},
    "the network of one module": lambda given: {"agents": {"overrides": {"main": {"module": given}}}},
    "overrides by their own name": lambda given: {"agents": {}, "overrides": {"main": {"connectors": [given]}}},
    "precision": lambda given: {"compute": {"precision": given}},
}

TEXTS = ("modules_to_train", "filter_fn", "an argument of a connector", "a connector in a pipeline", "record")
"""Where a text is not taken for a name."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trust") / "run"
    PPO(PPOConfig(env="CartPole-v1", num_envs=1, num_steps=8, seed=1)).save(path)
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that were called; none may be, nor anything be imported from the folder that one works in."""
    found: list[str] = []
    (tmp_path / "sitting_here.py").write_text(SITTING)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield found
    assert not found
    assert not (tmp_path / "touched").exists()
    assert "sitting_here" not in sys.modules
    assert sys.path == path


class Watch:
    """Notes calls of what is hostile while a ``with`` block lasts."""

    def __init__(self, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.patch = calls, monkeypatch

    def __enter__(self) -> None:
        for module, name in CALLED:
            if module is not builtins and (module, name) != (subprocess, "Popen"):  # others call these, too
                self.patch.setattr(module, name, lambda *args, of=name, **kwargs: self.calls.append(of))

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()


parts = functools.cache(load_tree)


def forged(saved: Path, to: Path, config: dict[str, Any], **described: Any) -> Path:
    """A copy of a checkpoint with other settings, and with another description, as whoever writes JSON can make it."""
    tree, meta = parts(saved)
    save_tree(to, tree, meta={**meta, "config": {**meta["config"], **config}, **described})
    return to


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_a_setting_names_is_imported_or_called(
    place: str, form: str, saved: Path, tmp_path: Path, calls: list[str]
) -> None:
    for name in NAMES:
        run = forged(saved, tmp_path / "run", PLACES[place](FORMS[form](name)))
        known = set(sys.modules)
        with pytest.MonkeyPatch.context() as patch, Watch(calls, patch), pytest.raises(CheckpointError) as caught:
            etude.load(run)
        assert {module for module in set(sys.modules) - known if not module.startswith("etude")} == set()
        if not (place in TEXTS and form == "a text") and "FunctionConnector" not in str(caught.value):
            assert name in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_is_imported(name: str, saved: Path, tmp_path: Path, calls: list[str]) -> None:
    run = forged(saved, tmp_path / "run", {}, algorithm=name)
    with pytest.MonkeyPatch.context() as patch, Watch(calls, patch):
        with pytest.raises(CheckpointError, match=f"names {name} as its algorithm"):
            etude.load(run)
        for command in COMMANDS:
            assert main([word.replace("RUN", str(run)) for word in command]) in (1, 2)


COMMANDS = [
    ["train", "ppo", "--resume", "RUN"],
    ["evaluate", "RUN"],
    ["evaluate", "RUN", "--on", "RUN"],
    ["record", "RUN", "--to", "recorded"],
    ["watch", "RUN", "--to", "clip.gif"],
    ["watch", "RUN", "--random", "--to", "clip.gif"],
    ["plot", "RUN"],
    ["data", "info", "RUN"],
    ["data", "validate", "RUN"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: "-".join(words))
def test_no_command_imports_or_calls_what_a_checkpoint_names(
    command: list[str], saved: Path, tmp_path: Path, calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("env", "module", "module_of", "a connector", "a callback", "a setting of one module"):
        if place == "a callback" and command[0] != "train":
            continue  # those of training are not asked for
        given = PLACES[place](
            FORMS["an object with arguments" if place == "a connector" else "a class or function"](
                "os:abort" if place == "module" else "sitting_here:run"
            )
        )
        run = forged(saved, tmp_path / "run", given)
        with pytest.MonkeyPatch.context() as patch, Watch(calls, patch):
            code = main([word.replace("RUN", str(run)) for word in command])
        assert code in (1, 2)
        assert "Traceback" not in capsys.readouterr().err


def test_only_what_is_needed_is_asked_for_where_nothing_is_trained(
    saved: Path, tmp_path: Path, calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = {
        "env": {"$ref": "__main__:Toy"},
        "callbacks": ["sitting_here:run"],
        "agents": {"modules_to_train": {"$ref": "sitting_here:run"}},
    }
    run = forged(saved, tmp_path / "run", own)
    assert main(["evaluate", str(run), "--episodes", "1"]) == 2
    assert "`config/env` names __main__:Toy" in capsys.readouterr().err
    here = ["--env", "CartPole-v1", "--episodes", "2"]
    assert main(["evaluate", str(run), *here]) == 0
    assert main(["record", str(run), *here, "--to", "recorded", "--explore", "--quiet"]) == 0
    assert main(["watch", str(run), *here, "--to", "clip.gif", "--size", "32x32", "--quiet"]) == 0
    assert main(["evaluate", str(run), "--on", "recorded", "--methods", "is"]) == 0


def test_an_id_with_a_module_before_it_is_given_or_trusted(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_it.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Registered-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv', max_episode_steps=9)\n"
    )
    run = forged(saved, tmp_path / "run", {"env": "registers_it:Registered-v0"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(CheckpointError, match=r"`config/env` names registers_it:Registered-v0\..*env=.*trust=True"):
        etude.load(run)
    assert "registers_it" not in sys.modules
    assert etude.load(run, env="CartPole-v1").evaluate(1).episodes == 1
    assert main(["evaluate", str(run), "--episodes", "1", "--trust"]) == 0  # in the folder that one works in
    assert "registers_it" in sys.modules
    assert etude.load(run, trust=True).evaluate(1).length_mean <= 9
    plain = forged(saved, tmp_path / "plain", {"env": "Registered-v0"})
    assert etude.load(plain).evaluate(1).length_mean <= 9
    del sys.modules["registers_it"]
    gym.registry.pop("Registered-v0")


def test_where_an_algorithm_lives_comes_from_the_caller(saved: Path, tmp_path: Path) -> None:
    for engine in ("ray", {"address": "10.9.8.7:6379", "runtime_env": {"pip": ["evil"]}}, {"$ref": "os:abort"}, 3):
        run = forged(saved, tmp_path / "run", {"engine": engine})
        assert etude.load(run).config.engine == "local"
        assert etude.load(run, trust=True).config.engine == "local"
        ppo = PPO(PPOConfig(env="CartPole-v1", num_envs=1, num_steps=8))
        ppo.load(run)
        assert ppo.config.engine == "local"


def test_a_component_names_nothing(saved: Path, tmp_path: Path, calls: list[str]) -> None:
    tree, meta = load_tree(saved)
    ppo = PPO(PPOConfig(env="CartPole-v1", num_envs=1, num_steps=8))
    for name in ("os:abort", "sitting_here:run"):
        for form in FORMS.values():
            for component in tree:
                hostile = {
                    **tree,
                    component: {**tree[component], "x": form(name)}
                    if isinstance(tree[component], dict)
                    else form(name),
                }
                save_tree(tmp_path / "run", hostile, meta=meta)
                with pytest.MonkeyPatch.context() as patch, Watch(calls, patch):
                    for load in (etude.load, ppo.load):
                        with contextlib.suppress(EtudeError):
                            load(tmp_path / "run")


# -- what is there already ----------------------------------------------------------------------------------------


class Doubled(Connector):
    def __init__(self, times: float = 2.0) -> None:
        self.times = times

    def online(self, inputs: Any) -> Any:
        return inputs.with_obs({name: column * np.float32(self.times) for name, column in inputs.obs.items()})

    def offline(self, exp: Any, module: Any = None) -> Any:
        return exp.with_steps(obs=exp.steps["obs"] * np.float32(self.times))


class Counts(Callback):
    pass


class Sorts(PreLearner):
    def __init__(self, by: str) -> None:
        self.by = by


class MyPPO(PPO):
    pass


def test_classes_of_this_program_come_back_where_they_belong(tmp_path: Path) -> None:
    own = (Doubled, Doubled(3.0), NormalizeObs(clip=4.0), "clip_reward")
    MyPPO(
        PPOConfig(
            env="CartPole-v1", num_envs=1, num_steps=8, connectors=own, callbacks=(Counts, Counts(), GameReturns())
        )
    ).save(tmp_path)
    loaded = etude.load(tmp_path)
    assert type(loaded) is MyPPO
    cls, made, normalize, name = loaded.config.connectors
    assert cls is Doubled
    assert (type(made), made.times) == (Doubled, 3.0)
    assert (type(normalize), normalize.clip, name) == (NormalizeObs, 4.0, "clip_reward")
    kinds = [callback if isinstance(callback, type) else type(callback) for callback in loaded.config.callbacks]
    assert kinds == [Counts, Counts, GameReturns]
    loaded.train()


def test_a_class_of_this_program_is_refused_where_another_kind_belongs(saved: Path, tmp_path: Path) -> None:
    here = __name__
    for config in (
        {"connectors": [{"$ref": f"{here}:Counts"}]},
        {"connectors": [{"$made": f"{here}:Sorts", "with": {"by": "t"}}]},
        {"connectors": [{"$ref": f"{here}:MyPPO"}]},
        {"callbacks": [{"$made": f"{here}:Doubled", "with": {}}]},
        {"callbacks": [f"{here}:Doubled"]},
        {"module": {"$ref": f"{here}:Doubled"}},
        {"env": {"$ref": f"{here}:Counts"}},
        {"agents": {"module_of": {"$made": f"{here}:Counts", "with": {}}, "modules": ["main"]}},
        {"lr": {"$made": f"{here}:Counts", "with": {}}},
    ):
        run = forged(saved, tmp_path / "run", config)
        with pytest.raises(CheckpointError, match=rf"names {here}:\w+\. Loading imports and calls nothing that"):
            etude.load(run)


def test_the_newest_of_a_name_is_taken(tmp_path: Path) -> None:
    def defined(factor: float) -> Any:  # as a cell of a notebook that is run again
        class Again(Connector):
            made_by = factor

        Again.__qualname__ = "Again"
        return Again

    global Again
    older = Again = defined(1.0)
    PPO(PPOConfig(env="CartPole-v1", num_envs=1, num_steps=8, connectors=(Again,))).save(tmp_path)
    newer = defined(2.0)
    assert etude.load(tmp_path).config.connectors == (newer,)
    assert older is not newer


def test_networks_and_functions_of_one_s_own_are_given_or_trusted(tmp_path: Path) -> None:
    def first(module_id: str, exp: Any) -> bool:
        return module_id == "red"

    modules = {"red": OwnNet, "blue": None}
    given: dict[str, Any] = {"env": TwoJobs, "modules": modules, "module_of": by_job, "modules_to_train": first}
    ppo = PPO(PPOConfig(**given, num_envs=2, num_steps=32, minibatch_size=16, epochs=1, seed=1))
    ppo.train()
    ppo.save(tmp_path)
    for name in given:
        rest = {other: value for other, value in given.items() if other != name}
        with pytest.raises(CheckpointError, match=rf"etude\.load\(path, {name}=\.\.\.\)"):
            etude.load(tmp_path, **rest)
    expected = ppo.train().losses
    assert etude.load(tmp_path, **given).train().losses == expected
    assert etude.load(tmp_path, modules_to_train=first, trust=True).train().losses == expected


def by_job(agent: Any, episode: Any) -> str:
    return "red" if agent == "echo" else "blue"


@pytest.mark.parametrize("kind", [(DQN, DQNConfig, "CartPole-v1"), (SAC, SACConfig, "Pendulum-v1")])
def test_target_networks_are_those_of_the_network_that_is_given(kind: Any, tmp_path: Path) -> None:
    cls, config, env = kind

    def made(seed: int, **own: Any) -> Any:
        small: dict[str, Any] = {"num_envs": 1, "num_steps": 32, "learning_starts": 16, "batch_size": 8, **own}
        small["iteration_steps"] = 64
        return cls(config(env=env, network=NetworkConfig(hidden=(8,)), seed=seed, **small))

    net = made(1).module.net
    net_class = type(net)
    assert net_class.__module__.startswith("etude.")
    first = made(2, module=copy.deepcopy(net))
    first.train()
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"`module` was an object of etude\..*, module=\.\.\.\)"):
        etude.load(tmp_path)
    again = etude.load(tmp_path, module=copy.deepcopy(net))
    for name, value in first.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name]), name
    assert again.train().losses == first.train().losses


def test_a_network_of_etude_s_own_may_be_named(saved: Path, tmp_path: Path) -> None:
    for name in ("etude.modules.network:Network", "etude.modules.networks:Network"):  # where it is, and where it was
        run = forged(saved, tmp_path / "run", {"module": {"$ref": name}})
        assert etude.load(run).evaluate(1).episodes == 1
    torchs = {"$ref": "torch.nn.modules.linear:Linear"}
    with pytest.raises(CheckpointError, match="names torch.nn.modules.linear:Linear"):
        etude.load(forged(saved, tmp_path / "run", {"module": torchs}))


def test_what_says_where_data_is_may_stand_where_data_belongs(tmp_path: Path) -> None:
    PPO(PPOConfig(env=Echo, num_envs=1, num_steps=8)).record(tmp_path / "data", 3, seed=1)
    source = Source(
        str(tmp_path / "data" / "*.parquet"), columns={"obs": "obs", "action": "action", "episode_id": "episode_id"}
    )
    bc = BC(BCConfig(data=str(tmp_path / "data"), prelearner=Sorts("t"), updates_per_iteration=1, batch_size=8))
    bc.config.__dict__["data"] = source
    bc.save(tmp_path / "run")
    loaded = etude.load(tmp_path / "run")
    assert loaded.config.data == source
    assert loaded.config.prelearner.by == "t"
    for name in [*NAMES, f"{__name__}:Counts", "etude.connectors.observations:FrameStack"]:
        custom = {
            "$made": "etude.recordings.formats.custom:CustomSource",
            "with": {"paths": "x", "to_experience": {"$ref": name}, "kind": "text", "together": "file"},
        }
        run = forged(tmp_path / "run", tmp_path / "other", {"data": custom})
        with pytest.raises(CheckpointError, match=f"`config/data/to_experience` names {name}"):
            etude.load(run)


def test_modules_added_for_agents_that_speak_are_given_by_name(tmp_path: Path) -> None:
    """Modules by id alone need no code of one's own, whatever they are called."""
    ids = ("os:abort", "sitting_here:run")
    PPO(PPOConfig(env=Signalling, modules=ids, module_of=by_name, num_envs=2, num_steps=16)).save(tmp_path)
    assert tuple(etude.load(tmp_path, env=Signalling, module_of=by_name).policies) == ids


def by_name(agent: Any, episode: Any) -> str:
    return "os:abort" if agent == "speaker" else "sitting_here:run"
