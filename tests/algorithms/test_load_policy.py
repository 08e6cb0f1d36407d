# SPDX-License-Identifier: Apache-2.0
"""A policy alone from a checkpoint: it acts as the run it is from, and nothing that the file names is imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_documents import read, write
from many_agent_envs import CartPoles
from toy_envs import Echo, OwnNet

import etude
from etude.checkpoints import load_tree, save_tree
from etude.errors import CheckpointError, SettingsError

SMALL: dict[str, Any] = {"seed": 1, "num_envs": 2, "num_steps": 60}


def obs_of(policy: etude.Policy, rows: int) -> Any:
    policy.obs_space.seed(0)
    return np.stack([policy.obs_space.sample() for _ in range(rows)])


def assert_alike(policy: etude.Policy, other: etude.Policy) -> None:
    obs = obs_of(policy, 16)
    states = [p.initial_state(16) for p in (policy, other)]
    for reward in range(3):
        found = [p.act(obs, s, reward=np.full(16, reward)) for p, s in zip((policy, other), states, strict=True)]
        np.testing.assert_array_equal(found[0][0], found[1][0])
        states = [state for _, state in found]


@pytest.mark.parametrize(
    "config",
    [
        etude.PPOConfig(
            env="CartPole-v1", connectors=("normalize_obs", "prev_action_reward", "frame_stack:2"), **SMALL
        ),
        etude.PPOConfig(env="CartPole-v1", network=etude.NetworkConfig(recurrent="lstm"), **SMALL),
        etude.A2CConfig(env="Pendulum-v1", connectors=("rescale_action",), **SMALL),
        etude.SACConfig(env="Pendulum-v1", seed=1),
        etude.TD3Config(env="Pendulum-v1", seed=1),
        etude.QRDQNConfig(env="CartPole-v1", seed=1),
        etude.IQLConfig(env="CartPole-v1", seed=1),
        etude.CQLConfig(env="Pendulum-v1", seed=1),
        etude.DecisionTransformerConfig(env="CartPole-v1", seed=1, target_return=100.0, context_length=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_it_acts_as_the_run_it_is_from(config: Any, tmp_path: Path) -> None:
    algorithm = getattr(etude, type(config).__name__.removesuffix("Config"))(config)
    if hasattr(config, "num_envs"):
        algorithm.collect(num_steps=40)
        if isinstance(config, etude.PPOConfig):
            algorithm.train()
    algorithm.save(tmp_path)
    algorithm.close()
    assert_alike(etude.load_policy(tmp_path), algorithm.policy)


def env() -> Any:
    return Echo()


@pytest.mark.parametrize("learning_starts", [100, 5000])
@pytest.mark.parametrize("kind", ["SAC", "TD3"])
def test_it_acts_at_random_as_long_as_the_run_does(kind: str, learning_starts: int, tmp_path: Path) -> None:
    small: Any = {"iteration_steps": 300, "updates_per_step": 0.01, "network": etude.NetworkConfig(hidden=(8,))}
    config = getattr(etude, f"{kind}Config")(env="Pendulum-v1", seed=1, learning_starts=learning_starts, **small)
    algorithm = getattr(etude, kind)(config)
    algorithm.train()
    algorithm.save(tmp_path)
    policy = etude.load_policy(tmp_path)
    assert policy.module.acts_at_random is algorithm.module.acts_at_random is (learning_starts > 300)


def test_neither_the_env_nor_callbacks_nor_optimizers_are_needed(tmp_path: Path) -> None:
    class Own(etude.Callback):
        pass

    algorithm = etude.PPO(etude.PPOConfig(env=lambda: Echo(), callbacks=(Own(),), **SMALL))
    algorithm.save(tmp_path / "all")
    algorithm.close()
    with pytest.raises(CheckpointError):
        etude.load(tmp_path / "all")
    tree, meta = load_tree(tmp_path / "all")
    save_tree(tmp_path / "few", {n: tree[n] for n in ("modules/main", "connectors/main")}, meta=meta)
    for name in ("all", "few"):
        assert_alike(etude.load_policy(tmp_path / name), algorithm.policy)
    save_tree(tmp_path / "none", {"connectors/main": tree["connectors/main"]}, meta=meta)
    with pytest.raises(CheckpointError, match="lacks what a policy needs: there is no component `modules/main`"):
        etude.load_policy(tmp_path / "none")


def test_a_network_of_ones_own_is_given_and_not_imported(tmp_path: Path) -> None:
    algorithm = etude.PPO(etude.PPOConfig(env=env, module=OwnNet, **SMALL))
    algorithm.save(tmp_path)
    algorithm.close()
    document = read(tmp_path)
    text = repr(document)
    assert "toy_envs:OwnNet" in text
    with pytest.raises(CheckpointError, match=r"`config/module` names toy_envs:OwnNet.*module=\.\.\."):
        etude.load_policy(tmp_path)
    assert_alike(etude.load_policy(tmp_path, module=OwnNet), algorithm.policy)
    assert_alike(etude.load_policy(tmp_path, trust=True), algorithm.policy)


def test_what_a_strangers_file_names_is_not_imported(tmp_path: Path) -> None:
    algorithm = etude.PPO(etude.PPOConfig(env="CartPole-v1", connectors=("normalize_obs",), **SMALL))
    algorithm.save(tmp_path / "run")
    algorithm.close()
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    document = read(tmp_path / "run")
    document["meta"]["config"]["connectors"] = [{"$ref": "evil:thing"}]
    document["meta"]["config"]["env"] = "evil:thing"
    write(tmp_path / "run", document)
    code = "import etude\ntry:\n    etude.load_policy('run')\nexcept etude.CheckpointError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "`config/connectors/0` names evil:thing" in done.stdout, done


def test_one_of_several_policies_by_its_id(tmp_path: Path) -> None:
    agents: dict[str, Any] = {"modules": ["a", "b"], "module_of": lambda agent, episode: "a"}
    overrides = {"b": {"connectors": ("normalize_obs",)}}
    algorithm = etude.PPO(etude.PPOConfig(env=CartPoles, overrides=overrides, **agents, **SMALL))
    algorithm.save(tmp_path)
    algorithm.close()
    for name in ("a", "b"):
        assert_alike(etude.load_policy(tmp_path, name), algorithm.policies[name])
    with pytest.raises(SettingsError, match=r"has the policies a, b: say which, as etude.load_policy\(path, 'a'\)"):
        etude.load_policy(tmp_path)
    with pytest.raises(SettingsError, match="has no policy 'c'. There are a, b"):
        etude.load_policy(tmp_path, "c")
    with pytest.raises(SettingsError, match="has no policy 3. There are a, b"):
        etude.load_policy(tmp_path, 3)  # type: ignore[arg-type]


def test_networks_of_several_policies_are_given_one_by_one(tmp_path: Path) -> None:
    agents: dict[str, Any] = {"modules": {"a": OwnNet, "b": None}, "module_of": lambda agent, episode: "a"}
    algorithm = etude.PPO(etude.PPOConfig(env=CartPoles, **agents, **SMALL))
    algorithm.save(tmp_path)
    algorithm.close()
    assert_alike(etude.load_policy(tmp_path, "b"), algorithm.policies["b"])
    assert_alike(etude.load_policy(tmp_path, "a", module=OwnNet), algorithm.policies["a"])


def test_settings_that_a_policy_acts_by_can_be_others(tmp_path: Path) -> None:
    config = etude.DecisionTransformerConfig(env="CartPole-v1", seed=1, target_return=100.0, context_length=4)
    algorithm = etude.DecisionTransformer(config)
    algorithm.save(tmp_path)
    algorithm.close()
    policy = etude.load_policy(tmp_path, target_return=7.0)
    _, state = policy.act(np.zeros(4, np.float32), policy.initial_state())
    assert [part["left"].tolist() for part in state["connectors"].values() if "left" in part] == [[7.0]]
    with pytest.raises(SettingsError, match="no setting `target`"):
        etude.load_policy(tmp_path, target=7.0)


def test_overrides_that_are_no_settings_are_told_without_advice_on_training(tmp_path: Path) -> None:
    algorithm = etude.PPO(etude.PPOConfig(env="CartPole-v1", **SMALL))
    algorithm.save(tmp_path)
    algorithm.close()
    with pytest.raises(SettingsError, match=r"is of PPO, which has no setting `target_return`") as caught:
        etude.load_policy(tmp_path, target_return=3)
    assert "fit" not in str(caught.value).removeprefix(str(tmp_path))
    with pytest.raises(SettingsError, match="no setting `modul`. Nearest: `module`"):
        etude.load_policy(tmp_path, modul=OwnNet)
    with pytest.raises(SettingsError, match="Here it is: `gamma`"):
        etude.load_policy(tmp_path, discount=0.9)


class Biased(etude.PPO):
    """Sets a weight after loading, and makes something in `setup` that acting uses."""

    def setup(self) -> None:
        self.gain = 2.0
        super().setup()

    def after_load(self, module: Any) -> None:
        with torch.no_grad():
            module.net.policy_head.bias[1] = 1e3 * self.config.gamma

    def before_collect(self, env_steps: int) -> None:
        assert self.config.gamma < 1 or self.gain == 2


def test_hooks_of_loading_are_called_and_what_setup_makes_is_told_to_be_missing(tmp_path: Path) -> None:
    algorithm = Biased(etude.PPOConfig(env="CartPole-v1", **SMALL))
    algorithm.save(tmp_path)
    algorithm.close()
    policy = etude.load_policy(tmp_path, gamma=0.5)
    assert policy.act(obs_of(policy, 16)).all()
    with pytest.raises(AttributeError, match=r"PPO has no `gain`. (?!.*load_policy)"):
        etude.PPO(etude.PPOConfig(env="CartPole-v1", **SMALL)).gain  # noqa: B018
    with pytest.raises(AttributeError, match=r"Biased has no `gain` here: load_policy makes the policy alone"):
        etude.load_policy(tmp_path, gamma=1.0)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        etude.load_policy(tmp_path)
    save_tree(tmp_path, {"x": 1}, meta={"mine": True})
    with pytest.raises(CheckpointError, match="is a checkpoint, but not of an algorithm"):
        etude.load_policy(tmp_path)
