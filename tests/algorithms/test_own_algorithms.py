# SPDX-License-Identifier: Apache-2.0
"""Subclasses of Etude's algorithms, with settings of their own: trained, saved, loaded, resumed, from the shell too."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import own_algorithms as own
import pytest
from preloaded import Preloaded

import etude
from etude.algorithms import PPO
from etude.cli.main import main
from etude.connectors import Connector
from etude.errors import CheckpointError, SettingsError

SMALL = {
    "seed": 1,
    "num_envs": 2,
    "num_steps": 32,
    "network": etude.NetworkConfig(hidden=(8,)),
}
ON_POLICY = {**SMALL, "env": "CartPole-v1", "epochs": 1}
OFF_POLICY = {**SMALL, "iteration_steps": 64, "learning_starts": 32, "batch_size": 16, "capacity": 200}
OFFLINE = {"seed": 1, "batch_size": 16, "updates_per_iteration": 2, "network": etude.NetworkConfig(hidden=(8,))}
OF_ALL: dict[Any, dict[str, Any]] = {
    own.MyPPO: ON_POLICY,
    own.Heir: ON_POLICY,
    own.Mixed: ON_POLICY,
    own.MyA2C: ON_POLICY,
    own.MyIMPALA: ON_POLICY,
    own.MyAPPO: ON_POLICY,
    own.MyDQN: {**OFF_POLICY, "env": "CartPole-v1"},
    own.MyQRDQN: {**OFF_POLICY, "env": "CartPole-v1"},
    own.MySAC: {**OFF_POLICY, "env": "Pendulum-v1"},
    own.MyTD3: {**OFF_POLICY, "env": "Pendulum-v1"},
    own.MyBC: OFFLINE,
    own.MyMARWIL: OFFLINE,
    own.MyIQL: OFFLINE,
    own.MyAWAC: OFFLINE,
    own.MyCQL: OFFLINE,
    own.MyTD3BC: OFFLINE,
    own.MyDecisionTransformer: {**OFFLINE, "network": etude.NetworkConfig(), "embedding_size": 8, "context_length": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short recording of Pendulum."""
    path = tmp_path_factory.mktemp("data")
    actor = etude.PPO(etude.PPOConfig(env="Pendulum-v1", num_envs=1, seed=1))
    actor.record(path, 2, seed=1, explore=True)
    actor.close()
    return str(path)


def made(cls: Any, data: str, **more: Any) -> Any:
    given = {**OF_ALL.get(cls, ON_POLICY), **more}
    if issubclass(cls, etude.OfflineAlgorithm):
        given["data"] = data
    return cls(cls.Config(**given))


def logged(result: Any) -> float:
    return float(result.metrics["mine"])


@pytest.mark.parametrize("cls", OF_ALL)
def test_a_run_is_saved_and_goes_on_with_its_own_settings(cls: Any, data: str, tmp_path: Path) -> None:
    algorithm = made(cls, data, my_weight=0.25)
    first = algorithm.train()
    algorithm.save(tmp_path)
    expected = algorithm.train()
    loaded = etude.load(tmp_path)
    assert type(loaded) is cls
    assert loaded.config == algorithm.config
    assert type(loaded.config) is cls.Config
    result = loaded.train()
    assert result.losses == expected.losses
    other = etude.load(tmp_path, my_weight=0.75)
    if cls is not own.Mixed:
        assert [logged(r) for r in (first, result, other.train())] == [0.25, 0.25, 0.75]
    with pytest.raises(SettingsError, match=r"no setting `my_wieght`.*`my_weight`"):
        etude.load(tmp_path, my_wieght=0.5)


@pytest.mark.parametrize("cls", [own.Plain, own.PlainIQL])
def test_a_subclass_without_settings_of_its_own(cls: Any, data: str, tmp_path: Path) -> None:
    algorithm = made(cls, data) if cls is own.Plain else cls(cls.Config(**OFFLINE, data=data))
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path)
    assert type(loaded) is cls
    assert loaded.train().losses == algorithm.train().losses


def test_settings_that_no_class_names_come_back_as_they_were(tmp_path: Path) -> None:
    """Settings that inherit from those that an algorithm names."""
    for cls in (own.Plain, etude.PPO):
        cls(own.MyConfig(**ON_POLICY, my_weight=0.5)).save(tmp_path / cls.__name__)
        loaded = etude.load(tmp_path / cls.__name__)
        assert type(loaded) is cls
        assert type(loaded.config) is own.MyConfig
        assert loaded.config.my_weight == 0.5


def test_settings_of_a_class_that_this_program_does_not_have_are_refused(tmp_path: Path, preloaded: Preloaded) -> None:
    etude.PPO(own.MyConfig(**ON_POLICY)).save(tmp_path)
    code = "import sys, etude; print(etude.load(sys.argv[1], trust='trusted' in sys.argv).config.my_weight)"
    where = [str(Path(own.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(where)}
    done = preloaded.run(code, str(tmp_path), env=env)
    assert "CheckpointError" in done.stderr
    assert "own_algorithms:MyConfig" in done.stderr
    done = preloaded.run(code, str(tmp_path), "trusted", env=env)
    assert done.stdout == "0.1\n"


# -- from the shell -------------------------------------------------------------------------------------------------

ACTING = ["--env", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--epochs", "1", "--stop.env-steps"]
REPLAY = ["--env", "CartPole-v1", "--iteration-steps", "64", "--learning-starts", "32", "--batch-size", "16"]


@pytest.mark.parametrize("name", ["MyPPO", "Heir", "MyDQN", "MyIQL", "MyBC"])
def test_a_run_from_the_shell_goes_on_too(
    name: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {
        "MyDQN": [*REPLAY, "--stop.env-steps"],
        "MyIQL": ["--data", data, "--batch-size", "16", "--updates-per-iteration", "64", "--stop.updates"],
        "MyBC": ["--data", data, "--batch-size", "16", "--updates-per-iteration", "64", "--stop.updates"],
    }.get(name, ACTING)
    begin = ["train", f"own_algorithms:{name}"]
    small = ["--network.hidden", "8", "--seed", "1", "--json", "--quiet"]

    def last(*more: str) -> dict[str, Any]:
        assert main([*begin, *more]) == 0
        row: dict[str, Any] = json.loads(capsys.readouterr().out)
        return row

    row = last(*args, "64", *small, "--out", str(tmp_path / "run"), "--my-weight", "0.5")
    assert row["metrics"]["mine"] == 0.5
    row = last("--resume", str(tmp_path / "run"), args[-1], "128", "--json", "--quiet")
    assert row["metrics"]["mine"] == 0.5
    assert max(row["env_steps"], row["updates"]) >= 128
    row = last("--resume", str(tmp_path / "run"), args[-1], "192", "--my-weight", "2", "--json", "--quiet")
    assert row["metrics"]["mine"] == 2.0
    config = tmp_path / "settings.yaml"
    config.write_text("my_weight: 3\n")
    row = last(*args, "64", *small, "--out", str(tmp_path / "other"), "--config", str(config))
    assert row["metrics"]["mine"] == 3.0
    loaded = etude.load(tmp_path / "run")
    assert type(loaded).__name__ == name
    assert loaded.config.my_weight == 2.0


def test_a_subclass_without_settings_of_its_own_from_the_shell(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "own_algorithms:Plain", *ACTING, "64", "--out", run, "--seed", "1", "--quiet"]) == 0
    assert main(["train", "own_algorithms:Plain", "--resume", run, "--stop.env-steps", "128", "--quiet"]) == 0
    assert etude.load(run).env_steps >= 128


def test_settings_of_ones_own_are_among_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "own_algorithms:MyPPO", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--my-weight" in text
    assert "Weight of mine. (default: 0.1)" in text
    assert main(["train", "own_algorithms:MyPPO", "--env", "CartPole-v1", "--my-wieght", "1"]) != 0
    assert "my-weight" in capsys.readouterr().err


# -- what is written wrongly ----------------------------------------------------------------------------------------


def test_settings_that_would_have_no_effect_are_refused() -> None:
    class Bare(etude.PPOConfig):
        my_weight: float = 0.1

    class Changed(etude.PPOConfig):
        lr = 1e-5

    class Methods(etude.PPOConfig):
        def twice(self) -> float:
            return 2 * self.gamma

    for cls in (Bare, Changed):
        with pytest.raises(SettingsError, match=rf"@etude.settings above `class {cls.__name__}`"):
            cls(env="CartPole-v1")
    assert Methods(env="CartPole-v1").twice() == 1.98
    with pytest.raises(SettingsError, match=r"Silent sets `lr` without an annotation.*`lr: .* = 1e-5`"):
        etude.settings(type("Silent", (etude.PPOConfig,), {"lr": 1e-5}))
    assert etude.settings(type("Fine", (etude.PPOConfig,), {"lr": 1e-5, "__annotations__": {"lr": float}}))().lr == 1e-5
    without = etude.settings(type("Without", (etude.PPOConfig,), {"unused": {"gamma": "rewards are not discounted"}}))
    with pytest.raises(SettingsError, match="rewards are not discounted"):
        type("Plain", (etude.PPO,), {"Config": without})(without(env="CartPole-v1", gamma=0.5))


@pytest.mark.parametrize(
    ("base", "config"),
    [(etude.PPO, own.MyConfig()), (etude.PPO, "own:MyConfig"), (etude.PPO, dict), (etude.BC, etude.IQLConfig)],
)
def test_what_is_no_class_of_settings_is_refused_with_the_class(base: Any, config: Any) -> None:
    with pytest.raises(SettingsError, match=rf"Wrong\.Config is .* inherits from {base.Config.__name__}"):
        type("Wrong", (base,), {"Config": config})


def test_other_settings_than_its_own_are_refused() -> None:
    with pytest.raises(SettingsError, match="MyPPO takes a MyConfig, not a PPOConfig"):
        own.MyPPO(etude.PPOConfig(**ON_POLICY))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hook", "returned", "said"),
    [
        ("make_module", None, "make_module returned a NoneType: it must return a Module"),
        ("learner_connectors", None, "learner_connectors returned a NoneType: it must return a list"),
        ("parameter_groups", [1], "parameter_groups returned a list: it must return a dict"),
    ],
)
def test_hooks_that_return_something_else_are_told(hook: str, returned: Any, said: str) -> None:
    cls = type("Mine", (etude.PPO,), {hook: lambda *given: returned})
    with pytest.raises(etude.EtudeError, match=said):
        cls(etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32))


def test_an_update_that_returns_nothing_is_told() -> None:
    class Silent(etude.PPO):
        def update(self, learner: Any, exp: Any) -> Any:
            super().update(learner, exp)

    algorithm = Silent(etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32))
    with pytest.raises(
        SettingsError, match=r"Silent\.update returned None, but must return an Update, such as that of"
    ):
        algorithm.train()


@pytest.mark.parametrize("base", [etude.PPO, etude.DQN])
def test_what_is_called_before_steps_are_collected(base: Any) -> None:
    class Watching(base):  # type: ignore[misc]
        def before_collect(self, env_steps: int) -> None:
            super().before_collect(env_steps)
            seen.append(env_steps)

    seen: list[int] = []
    algorithm = Watching(base.Config(env="CartPole-v1", seed=0))
    algorithm.train()
    steps = algorithm.env_steps
    assert seen[0] == 0
    seen.clear()
    algorithm.train()
    assert steps in seen


SCRIPT = """
import sys, etude
class OfAScript(etude.PPO):
    pass
if __name__ == "__main__":
    OfAScript(etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32, seed=1)).save(sys.argv[1])
"""


def test_what_a_script_saves_is_loaded_where_the_script_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_in_a_script.py").write_text(SCRIPT)
    run = tmp_path / "run"
    subprocess.run([sys.executable, str(tmp_path / "mine_in_a_script.py"), str(run)], check=True, timeout=300)
    with pytest.raises(CheckpointError, match="names __main__:OfAScript .* which is the script that saved it"):
        etude.load(run)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mine_in_a_script:OfAScript", "--resume", str(run), "--stop.env-steps", "64", "--quiet"]) == 0
    loaded = etude.load(run)
    assert (type(loaded).__module__, loaded.env_steps) == ("mine_in_a_script", 64)


def test_methods_whose_name_is_misspelt_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="Slow.before_updates overrides nothing.*Did you mean `before_update`"):

        class Slow(PPO):
            def before_updates(self, env_steps: int) -> None: ...

    with pytest.warns(UserWarning, match="Blur.onilne overrides nothing.*Did you mean `online`"):

        class Blur(Connector):
            def onilne(self, inputs: Any) -> Any:
                return inputs


def test_helpers_with_names_like_others_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Own(PPO):
            def map_obs(self) -> None: ...
            def collector(self) -> None: ...
            def saved(self) -> None: ...
            def steps(self) -> None: ...
            def before_update(self, env_steps: int) -> None: ...

        class Next(Own):
            def map_obs2(self) -> None: ...
            def before_update(self, env_steps: int) -> None: ...
            def before_update2(self) -> None: ...

        assert Next.map_obs2 is not Own.map_obs
