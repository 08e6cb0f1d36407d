# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from toy_envs import Echo

import etude
from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop
from etude.cli.main import main
from etude.connectors import Connector
from etude.errors import DataError, EtudeError, SettingsError
from etude.learners import Batch
from etude.recordings import Recording, RecordingWriter
from etude.spaces import space_to_json


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("echo") / "data"
    PPO(PPOConfig(env=Echo, seed=0)).record(path, 30, seed=1, explore=True)
    return path


def test_loss_is_cross_entropy(recording: Path) -> None:
    algorithm = BC(BCConfig(data=str(recording), seed=0, entropy_weight=0.1))
    exp = Recording.open(recording).read()
    obs, action = exp.steps["obs"], exp.steps["action"]
    with torch.no_grad():
        logits = algorithm.module(torch.from_numpy(obs.copy())).dist_inputs.numpy().astype(float)
        tensors = {"obs": torch.from_numpy(obs.copy()), "action": torch.from_numpy(action.copy())}
        loss = algorithm.loss(algorithm.module, Batch(tensors, algorithm.module))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1).mean()
    assert float(loss.parts["imitation"]) == pytest.approx(-np.log(p[np.arange(len(p)), action]).mean(), rel=1e-5)
    assert float(loss.parts["entropy"]) == pytest.approx(-0.1 * entropy, rel=1e-5)
    assert "entropy" not in BC(BCConfig(data=str(recording))).train().losses


def test_no_env_is_needed_and_every_step_is_seen_once_an_epoch(recording: Path) -> None:
    seen: list[int] = []

    class Looks(BC):
        columns = ("obs", "action", "reward")

        def loss(self, module: Any, batch: Batch) -> Any:
            seen.append(len(batch.reward))
            return super().loss(module, batch)

    algorithm = Looks(BCConfig(data=str(recording), batch_size=50, updates_per_iteration=6))
    result = algorithm.train()
    assert seen == [50] * 6  # 300 steps
    assert result.updates == 6
    assert result.env_steps == 0
    assert np.isnan(result.return_mean)


@pytest.mark.parametrize("mode", ["stream", "materialize_data", "materialize_mapped_data"])
def test_learns_from_memory_and_from_a_stream(recording: Path, mode: Any) -> None:
    config = BCConfig(data=str(recording), mode=mode, seed=0, batch_size=64, updates_per_iteration=20)
    algorithm = BC(config)
    first, *_, last = (algorithm.train() for _ in range(4))
    assert last.losses["imitation"] < first.losses["imitation"]


def test_evaluates_where_there_is_an_env(recording: Path) -> None:
    config = BCConfig(data=str(recording), env=Echo, evaluation_episodes=5, evaluation_interval=2, seed=0)
    algorithm = BC(config)
    first, second = algorithm.train(), algorithm.train()
    assert first.returns_counted == 0
    assert second.returns_counted == second.episodes == 5
    assert 0 <= second.return_mean <= 10


def test_connectors_learn_from_the_data_and_are_kept(recording: Path, tmp_path: Path) -> None:
    import etude

    config = BCConfig(data=str(recording), connectors=("normalize_obs",), env=Echo, seed=0)
    algorithm = BC(config)
    algorithm.train()
    mean = Recording.open(recording).read().steps["obs"].mean(0)
    algorithm.save(tmp_path)
    for each in (algorithm, etude.load(tmp_path, env=Echo)):
        learned = each.connectors.state_dict()["connectors"][1]["state"]["obs"]
        np.testing.assert_allclose(learned["mean"], mean, rtol=1e-5)
    loaded = etude.load(tmp_path, env=Echo)
    assert loaded.evaluate(4, seed=3).return_mean == algorithm.evaluate(4, seed=3).return_mean
    loaded.train()
    algorithm.train()
    count = [each.connectors.state_dict()["connectors"][1]["state"]["obs"]["count"] for each in (algorithm, loaded)]
    assert count == [300, 300]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"lr": ((5, 1.0), (0, 0.1))}, "lr.* rising order of steps"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"evaluation_interval": -1}, "`evaluation.interval` is -1"),
    ],
)
def test_bad_settings(recording: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        BC(BCConfig(**{"data": str(recording), **given}))


def test_a_goal_that_is_never_measured_is_refused(recording: Path) -> None:
    with pytest.raises(SettingsError, match="returns are measured only where there is an `env`"):
        BC(BCConfig(data=str(recording))).fit(Stop(return_mean=1))
    with pytest.raises(SettingsError, match="over at least 20 episodes, but results are over 5 only"):
        BC(BCConfig(data=str(recording), env=Echo, evaluation_episodes=5)).fit(Stop(return_mean=1))


def test_a_column_that_was_not_recorded_is_named(recording: Path) -> None:
    class Wants(BC):
        columns = ("obs", "action", "value")

    with pytest.raises(DataError, match="no column `value`"):
        Wants(BCConfig(data=str(recording))).train()


def test_a_saved_clone_acts_without_its_recording(recording: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(recording, data)
    clone = BC(BCConfig(data=str(data), env=Echo, seed=0, batch_size=64, updates_per_iteration=200))
    clone.train()
    clone.save(tmp_path / "clone")
    shutil.rmtree(data)
    loaded = etude.load(tmp_path / "clone", env=Echo)
    assert loaded.evaluate(20, seed=3).return_mean == clone.evaluate(20, seed=3).return_mean
    with pytest.raises(DataError, match="data"):
        loaded.train()
    other = tmp_path / "other"
    PPO(PPOConfig(env="CartPole-v1", num_envs=1)).record(other, 1)
    with pytest.raises(DataError, match="go on with a recording of the same env"):
        etude.load(tmp_path / "clone", env=Echo, data=str(other)).train()


def test_actions_in_other_units_than_the_envs(tmp_path: Path) -> None:
    expert = PPO(PPOConfig(env="Pendulum-v1", connectors=("rescale_action",), num_envs=1, seed=0))
    expert.record(tmp_path / "data", 1, seed=1, explore=True)
    assert Recording.open(tmp_path / "data").action_space.high == 1.0
    with pytest.raises(SettingsError, match="put a connector such as rescale_action between"):
        BC(BCConfig(data=str(tmp_path / "data"), env="Pendulum-v1", seed=0))
    clone = BC(BCConfig(data=str(tmp_path / "data"), env="Pendulum-v1", seed=0, connectors=("rescale_action",)))
    assert clone.evaluate(1, seed=2).episodes == 1


@pytest.mark.parametrize("modules", [None, ("one",)])
@pytest.mark.parametrize("env", ["Pendulum-v1", None])
def test_what_learned_from_chosen_actions_acts_in_the_envs_units(
    tmp_path: Path, env: str | None, modules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, units = spaces.Box(-1, 1, (1,)), spaces.Box(-2, 2, (1,))
    ids: Any = {} if modules is None else {"modules": modules}
    expert = PPO(PPOConfig(env="Pendulum-v1", connectors=("rescale_action",), num_envs=1, seed=0, **ids))
    expert.record(tmp_path / "data", 1, seed=1, explore=True)
    assert Recording.open(tmp_path / "data").action_space == chosen
    config = BCConfig(
        data=str(tmp_path / "data"), env=env, seed=0, connectors=("rescale_action",), evaluation_interval=0
    )
    clone = BC(config)
    clone.fit(Stop(updates=100))
    clone.save(tmp_path / "clone")
    acts = etude.load_policy(tmp_path / "clone")
    assert acts.action_space == units
    assert acts.module.action_space == chosen
    assert not caplog.text
    # its loss is that of the actions as chosen, not of those halved
    exp = Recording.open(tmp_path / "data").read()
    with torch.no_grad():
        out = clone.policies["main"].module(torch.as_tensor(exp.steps["obs"]))
        nll = -out.logp(torch.as_tensor(exp.steps["action"])).mean()
    assert clone.train().losses["imitation"] == pytest.approx(float(nll), abs=0.1)
    resumed = etude.load(tmp_path / "clone")
    assert resumed.train().updates == 200
    assert resumed.spaces["main"][1] == units  # type: ignore[attr-defined]


def test_a_modules_own_connectors_map_its_actions_to_the_envs_units(tmp_path: Path) -> None:
    made = 0

    def env() -> Any:
        nonlocal made
        made += 1
        return gym.make("Pendulum-v1")

    expert = PPO(PPOConfig(env=env, connectors=("rescale_action",), num_envs=1, seed=0))
    expert.record(tmp_path / "data", 1, seed=1)
    own = {name: {"connectors": ("rescale_action",)} for name in ("one", "other")}
    agents: Any = {"modules": tuple(own), "module_of": lambda agent, episode: "one", "overrides": own}
    for where, num_made in ((None, 0), (env, 1)):
        made = 0
        clone = BC(BCConfig(data=str(tmp_path / "data"), env=where, seed=0, evaluation_interval=0, **agents))
        for name, policy in clone.policies.items():
            assert clone.spaces[name][1] == policy.action_space == spaces.Box(-2, 2, (1,))
            assert policy.module.action_space == spaces.Box(-1, 1, (1,))
        assert made == num_made


def test_units_are_those_of_the_same_module_or_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expert = PPO(PPOConfig(env="Pendulum-v1", connectors=("rescale_action",), num_envs=1, seed=0))
    exp = next(iter(expert.runner.collect_each(num_steps=50).values()))
    one, other = (spaces.Box(-high, high, (1,)) for high in (2, 5))
    cases: list[tuple[dict[str, Any], spaces.Box | None]] = [
        ({"a": one, "main": other}, other),
        ({"a": one, "b": one}, one),
        ({"a": one, "b": other}, None),
    ]
    for i, (by_module, outside) in enumerate(cases):
        caplog.clear()
        meta = {
            "connectors": {name: ["rescale_action"] for name in by_module},
            "env_action_space": {name: space_to_json(space) for name, space in by_module.items()},
        }
        inside = spaces.Box(-1, 1, (1,))
        with RecordingWriter(
            tmp_path / str(i), obs_space=expert.spaces["main"][0], action_space=inside, meta=meta
        ) as writer:
            writer.write(exp)
        clone = BC(BCConfig(data=str(tmp_path / str(i)), connectors=("rescale_action",), seed=0))
        assert clone.spaces["main"][1] == (inside if outside is None else outside)
        assert ("which the recording does not state" in caplog.text) == (outside is None)


def test_data_whose_actions_connectors_mapped_is_that_of_the_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Torque(Connector):
        """Five choices of a torque."""

        def spaces(self, obs_space: Any, action_space: Any) -> Any:
            return obs_space, spaces.Discrete(5)

        def act(self, action: Any) -> Any:
            return {"action": (action["action"][:, None] - 2).astype(np.float32)}

    PPO(PPOConfig(env="Pendulum-v1", connectors=(Torque,), num_envs=1, seed=0)).record(tmp_path / "data", 1, seed=1)
    assert main(["data", "validate", str(tmp_path / "data"), "--env", "Pendulum-v1"]) == 0
    assert main(["data", "info", str(tmp_path / "data")]) == 0
    assert "env action Box(-2.0, 2.0, (1,), float32)" in capsys.readouterr().out
    assert main(["data", "validate", str(tmp_path / "data"), "--env", "CartPole-v1"]) != 0


def test_actions_in_other_units_than_the_recorded_envs_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expert = PPO(PPOConfig(env="Pendulum-v1", connectors=("rescale_action",), num_envs=1, seed=0))
    expert.record(tmp_path / "data", 1, seed=1)
    clone = BC(BCConfig(data=str(tmp_path / "data"), seed=0))
    assert clone.spaces["main"][1] == spaces.Box(-1, 1, (1,))
    assert "add a connector such as `rescale_action`" in caplog.text
    caplog.clear()
    BC(BCConfig(data=str(tmp_path / "data"), env="Pendulum-v1", evaluation_interval=0, seed=0))
    assert "mapped them to the env's Box(-2.0, 2.0" in caplog.text
    caplog.clear()
    plain = PPO(PPOConfig(env="Pendulum-v1", num_envs=1, seed=0))
    plain.record(tmp_path / "plain", 1, seed=1)
    for connectors in ((), ("rescale_action",)):
        clone = BC(BCConfig(data=str(tmp_path / "plain"), seed=0, connectors=connectors))
        assert clone.spaces["main"][1] == spaces.Box(-2, 2, (1,))
    assert not caplog.text


def test_a_budget_of_env_steps_is_never_used_up(recording: Path) -> None:
    with pytest.raises(SettingsError, match="`stop.env_steps` is set, but no steps are sampled here"):
        BC(BCConfig(data=str(recording))).fit(Stop(env_steps=100))
