# SPDX-License-Identifier: Apache-2.0
import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from preloaded import Preloaded
from setting_envs import Two
from some_envs import Simulated
from toy_envs import Echo, OwnNet, Toil, double, make_acrobot

import etude
from etude.algorithms import BC, PPO, Algorithm, BCConfig, PPOConfig, Result, saving
from etude.checkpoints import load_meta, load_tree, save_tree
from etude.connectors import Connector, FrameStack, NormalizeObs
from etude.errors import CheckpointError, SettingsError
from etude.spaces import NamedDiscrete

CLOCKS = (
    "seconds",
    "times",
    "sample_steps_per_s",
    "resumed",
    "turn_ms",
    "data",
    "bottleneck",
    *(f"duration_{x}" for x in ("mean", "min", "max")),
)

CHILD = """
import json, sys, etude
algorithm = etude.load(sys.argv[1], trust=True)
rows = [algorithm.train().to_dict() for _ in range(int(sys.argv[2]))]
weights = [p.sum().item() for p in algorithm.module.parameters()]
print(json.dumps([rows, weights]))
"""


def facts(result: Result | dict[str, Any]) -> str:
    """What must be equal, bit for bit, as text (in which NaN equals NaN)."""
    row = result.to_dict() if isinstance(result, Result) else result
    return json.dumps({name: value for name, value in row.items() if name not in CLOCKS})


def ppo(**given: Any) -> PPO:
    small = {"env": "CartPole-v1", "seed": 1, "num_envs": 5, "num_steps": 203, "minibatch_size": 64, "epochs": 2}
    return PPO(PPOConfig(**{**small, **given}))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saving") / "data"
    ppo(env=Echo).record(path, 20, seed=1, explore=True)
    return str(path)


def bc(data: str, **given: Any) -> BC:
    small = {"seed": 2, "batch_size": 48, "updates_per_iteration": 7, "env": Echo, "evaluation_episodes": 3}
    return BC(BCConfig(data=data, **{**small, **given}))


MAKERS: dict[str, Any] = {
    "CartPole": lambda data: ppo(),
    "no seed": lambda data: ppo(seed=None),
    "Acrobot with connectors": lambda data: ppo(
        env="toy_envs:make_acrobot",
        num_envs=3,
        connectors=("frame_stack:2", double, NormalizeObs(clip=float("inf")), "prev_action_reward", "clip_reward"),
        lr=((0, 1e-3), (1000, 0.0)),
    ),
    "own net, functions, all kinds of settings": lambda data: ppo(
        env=make_acrobot, num_envs=2, module=OwnNet, grad_clip_by="norm", kl_target=0.01, value_clip=0.2
    ),
    "BC in memory": lambda data: bc(data, connectors=("normalize_obs",)),
    "BC in memory, no seed": lambda data: bc(data, seed=None),
    "BC streamed": lambda data: bc(data, mode="stream"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_goes_on_in_a_new_process_as_if_it_had_never_stopped(
    name: str, recording: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    algorithm: Algorithm[Any] = MAKERS[name](recording)
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    expected = [algorithm.train() for _ in range(5)]
    weights = [p.sum().item() for p in algorithm.module.parameters()]
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "envs")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = preloaded.run(CHILD, str(tmp_path), "5", env=env)
    assert done.returncode == 0, done.stderr
    rows, other_weights = json.loads(done.stdout)
    assert [facts(row) for row in rows] == [facts(result) for result in expected]
    assert other_weights == weights
    assert rows[0]["resumed"] == (None if name.startswith("BC") else "snapshot")
    assert rows[1]["resumed"] is None
    assert rows[0]["seconds"] > 0


def test_settings_come_back(tmp_path: Path) -> None:
    algorithm = ppo(connectors=(FrameStack, NormalizeObs(clip=3.0), double), env=make_acrobot, lr=((0, 0.1), (5, 0.2)))
    algorithm.save(tmp_path)
    connectors = algorithm.config.connectors
    config = etude.load(tmp_path, env=make_acrobot, connectors=connectors).config
    assert config == algorithm.config
    config = etude.load(tmp_path, trust=True).config
    for name in ("env", "seed", "num_envs", "lr", "network", "module", "optimizer"):
        assert getattr(config, name) == getattr(algorithm.config, name)
    stack, normalize, function = config.connectors
    assert stack is FrameStack
    assert normalize.clip == 3.0
    assert function is double


def test_an_override_counts_more(tmp_path: Path) -> None:
    algorithm = ppo(env=Echo)
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=Echo, lr=0.5, num_steps=50)
    result = loaded.train()
    assert result.metrics["lr"] == 0.5
    assert result.env_steps == 203 + 50
    assert result.resumed == "snapshot"
    with pytest.raises(SettingsError, match=r"PPOConfig has no setting `num_step`. Nearest: `num_steps`"):
        etude.load(tmp_path, env=Echo, num_step=5)


def test_more_envs_or_another_env_begin_new_episodes(tmp_path: Path) -> None:
    algorithm = ppo(env=Toil)
    algorithm.train()
    algorithm.save(tmp_path)
    assert (
        etude.load(tmp_path, env=Toil, num_envs=7).train().resumed
        == "new episodes: there were 5 slots, and now there are 7"
    )
    other = functools.partial(Toil, terminates=True)
    loaded = etude.load(tmp_path, env=other)
    assert loaded.train().resumed == "new episodes: another env was given"
    assert loaded.runner.collect(num_steps=10).segments.terminated.any()  # type: ignore[attr-defined]
    assert etude.load(tmp_path, env=Toil).train().resumed == "snapshot"


def test_what_has_no_name_must_be_given_again(tmp_path: Path) -> None:
    for env in (lambda: Echo(), functools.partial(Toil, terminates=True)):
        algorithm = ppo(env=env)
        algorithm.train()
        algorithm.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"`env` was .* give it when loading, as etude.load\(path, env=...\)"):
            etude.load(tmp_path)
        expected = algorithm.train()
        result = etude.load(tmp_path, env=env).train()
        assert result.resumed == "snapshot"
        assert facts(result) == facts(expected)


def test_an_instance_of_a_network_must_be_given_again(tmp_path: Path) -> None:
    net = OwnNet(gym.make("CartPole-v1").observation_space, gym.make("CartPole-v1").action_space)
    algorithm = ppo(module=net)
    algorithm.train()
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"etude.load\(path, module=...\)"):
        etude.load(tmp_path)
    expected = algorithm.train()
    torch.manual_seed(5)
    other = OwnNet(gym.make("CartPole-v1").observation_space, gym.make("CartPole-v1").action_space)
    assert facts(etude.load(tmp_path, module=other).train()) == facts(expected)


class Own(Connector):
    """A user's connector, which keeps its argument as it should."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def online(self, inputs: Any) -> Any:
        return inputs.with_obs({name: column * np.float32(self.factor) for name, column in inputs.obs.items()})

    def offline(self, exp: Any, module: Any = None) -> Any:
        return exp.with_steps(obs=exp.steps["obs"] * np.float32(self.factor))


class Forgets(Own):
    """Does not."""

    def __init__(self, hidden: float) -> None:
        super().__init__(hidden)


def test_own_connectors_come_back_by_class_and_arguments(tmp_path: Path) -> None:
    algorithm = ppo(connectors=(Own(0.5),))
    algorithm.save(tmp_path)
    assert etude.load(tmp_path).config.connectors[0].factor == 0.5
    ppo(connectors=(Forgets(0.5),)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"etude.load\(path, connectors=...\)"):
        etude.load(tmp_path)


class Grows(Connector):
    """Changes its argument itself."""

    made = 0

    def __init__(self, names: list[str]) -> None:
        type(self).made += 1
        names.insert(0, "bias")
        self.names = names


class Doubled(Own):
    """Keeps something else than it was given: of what it keeps, another one would be made."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor * 2)


def test_a_connector_that_changes_its_argument_is_not_made_of_it_again(tmp_path: Path) -> None:
    algorithm = ppo(connectors=(Doubled(0.25),))
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"etude.load\(path, connectors=...\).*same names, unchanged"):
        etude.load(tmp_path)
    loaded = etude.load(tmp_path, connectors=(Doubled(0.25),))
    assert facts(loaded.train()) == facts(algorithm.train())
    grows = Grows(["x"])
    algorithm = ppo(connectors=(grows,))
    for _ in range(3):
        algorithm.save(tmp_path / "grows")
    assert (grows.names, Grows.made) == (["bias", "x"], 2)  # once more, to see whether it keeps its argument


def test_what_can_no_longer_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_envs

    ppo(env=make_acrobot).save(tmp_path)
    monkeypatch.delattr(toy_envs, "make_acrobot")
    with pytest.raises(CheckpointError, match=r"`env` is `toy_envs:make_acrobot`, which can't be imported"):
        etude.load(tmp_path, trust=True)


def test_running_episodes_that_cannot_be_kept_begin_anew_and_the_result_says_so(tmp_path: Path) -> None:
    algorithm = ppo(env=Simulated)
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=Simulated)
    resumed = loaded.train().resumed
    assert resumed is not None
    assert resumed.startswith("new episodes: ")
    assert ".simulator is a builtins:range_iterator" in resumed
    assert loaded.train().resumed is None


def test_other_weights_do_not_fit(tmp_path: Path) -> None:
    ppo().save(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint is of another module"):
        etude.load(tmp_path, network=etude.NetworkConfig(hidden=(3,)))


def test_the_spaces_of_a_source_come_back(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text("x,a,trip\n" + "".join(f"{k / 8},{'ab'[k % 2]},{k // 10}\n" for k in range(40)))
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    space = NamedDiscrete(["a", "b", "c"])
    source = etude.Source(str(table), columns, obs_space=gym.spaces.Box(0, 9, ()), action_space=space)
    BC(BCConfig(data=source)).save(tmp_path / "run")
    assert etude.load(tmp_path / "run").recording.action_space == space  # type: ignore[attr-defined]
    meta = load_meta(tmp_path / "run")
    meta["config"]["data"]["with"]["action_space"][saving.SPACE]["names"] = 3
    tree = load_tree(tmp_path / "run")
    save_tree(tmp_path / "other", tree[0] if isinstance(tree, tuple) else tree, meta=meta)
    with pytest.raises(CheckpointError, match="action_space` holds a space that can't be read"):
        etude.load(tmp_path / "other")


def test_what_is_no_algorithms_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        etude.load(tmp_path / "nowhere")
    save_tree(tmp_path, {"a": 1}, meta={"b": 2})
    with pytest.raises(CheckpointError, match="is a checkpoint, but not of an algorithm"):
        etude.load(tmp_path)
    save_tree(tmp_path, {"a": 1}, meta={"algorithm": "json:loads", "config": {}, "spaces": []})
    with pytest.raises(CheckpointError, match="names json:loads as its algorithm, which is not one"):
        etude.load(tmp_path)


def test_a_checkpoint_can_not_name_what_is_run_when_it_is_loaded(tmp_path: Path) -> None:
    ppo().save(tmp_path)
    touched = tmp_path / "touched"
    call = {"$made": "subprocess:Popen", "with": {"args": ["touch", str(touched)]}}
    tree, meta = load_tree(tmp_path)
    meta["config"]["connectors"] = [call]
    save_tree(tmp_path, tree, meta=meta)
    with pytest.raises(CheckpointError, match=r"`config/connectors/0` names subprocess:Popen\. Loading"):
        etude.load(tmp_path)
    assert not touched.exists()


def test_the_form_of_the_module_is_as_it_was_saved(tmp_path: Path) -> None:
    ppo().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"`network\.\w+` can't be other than it was saved"):
        etude.load(tmp_path, squash=True)
    with pytest.raises(CheckpointError, match=r"`network\.\w+` can't be other than it was saved"):
        etude.load(tmp_path, network=etude.NetworkConfig(activation="relu"))


def test_the_form_of_each_module_is_as_it_was_saved(tmp_path: Path) -> None:
    relu, tanh = etude.NetworkConfig(activation="relu"), etude.NetworkConfig(activation="tanh")
    modules = ("left", "right")
    ppo(env=Two, modules=modules, network=relu, overrides={"right": {"network": tanh}}).save(tmp_path)
    etude.load(tmp_path, env=Two, overrides={"right": {"network": tanh, "lr": 1e-4}}, network=relu)
    for others in ({}, {"right": {"network": relu}}, {"left": {"network": tanh}, "right": {"network": tanh}}):
        with pytest.raises(CheckpointError, match=r"`network\.\w+` can't be other than it was saved"):
            etude.load(tmp_path, env=Two, overrides=others)
    with pytest.raises(CheckpointError, match=r"`network\.\w+` can't be other than it was saved"):
        etude.load_policy(tmp_path, "right", network=relu)
    assert etude.load_policy(tmp_path, "right", network=tanh).act(np.zeros(3, np.float32)) is not None


def test_connectors_of_the_learner_without_a_state_are_as_the_settings_say(tmp_path: Path, recording: str) -> None:
    algorithm = ppo()
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, normalize_advantages=False)
    assert [c.name for c in loaded.learner.only.connectors.connectors] == ["gae"]
    assert loaded.train().losses != algorithm.train().losses
    offline = etude.IQL(etude.IQLConfig(data=recording, seed=1, batch_size=8, updates_per_iteration=2))
    offline.train()
    offline.save(tmp_path)
    three = etude.load(tmp_path, n_step=3)
    assert three.train().losses != offline.train().losses


def test_what_does_not_fit_names_the_settings_that_are_others(tmp_path: Path) -> None:
    small = {"env": "CartPole-v1", "seed": 1, "capacity": 200, "batch_size": 8}
    etude.DQN(etude.DQNConfig(**small)).save(tmp_path)
    differ = "Settings that differ from the saved ones: "
    for given, named in (
        ({"capacity": 100}, "replay.capacity"),
        ({"prioritized": True}, "replay.prioritized"),
        ({"dueling": True}, "dueling"),
        ({"connectors": ("clip_reward",)}, "connectors"),
    ):
        with pytest.raises(CheckpointError, match=f"{differ}`{named}`.$"):
            etude.load(tmp_path, **given)


def test_a_checkpoint_keeps_no_credentials():
    """Of a URL of data, what is no secret stays, so that it can be read again with credentials from elsewhere."""
    plain = saving.to_plain({"data": ["s3://KEY:SECRET@bucket/x?region=eu-west-1&secret_key=S", "runs/a"]})
    assert plain == {"data": ["s3://bucket/x?region=eu-west-1", "runs/a"]}


@pytest.mark.parametrize(
    "url", ["https://host/x.parquet#access_token=S3CR3T", "s3://bucket/x;sid=S3CR3T", "s3://b/x?S3CR3T"]
)
def test_a_url_that_may_mean_another_place_without_its_secret_is_asked_for(url, tmp_path):
    algorithm = ppo()
    algorithm.config.__dict__["record"] = etude.RecordConfig(path=url)
    algorithm.save(tmp_path)
    assert "S3CR3T" not in (tmp_path / "checkpoint.json").read_text()
    with pytest.raises(CheckpointError, match=r"`record` was .*, which can't be kept in a checkpoint: give it"):
        etude.load(tmp_path)
    assert etude.load(tmp_path, record={"path": None}).config.record.path is None


def test_what_an_object_was_made_with_is_not_told(tmp_path):
    ppo(env=functools.partial(Toil, terminates="S3CR3T")).save(tmp_path)
    assert "S3CR3T" not in (tmp_path / "checkpoint.json").read_text()
    with pytest.raises(CheckpointError, match=r"`env` was an object of functools:partial, which can't be kept"):
        etude.load(tmp_path)


def test_an_algorithm_is_copied_through_a_checkpoint() -> None:
    algorithm = ppo()
    with pytest.raises(TypeError, match=r"PPO holds envs and processes, .* etude.load\(\) the folder"):
        copy.deepcopy(algorithm)
    assert copy.deepcopy(algorithm.policy).module is not algorithm.module
