# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import gc
import json
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from some_envs import make_lending
from test_saving import facts, ppo
from toy_envs import Echo, OwnNet, Switchboard, Toil

import etude
from etude.algorithms import (
    PPO,
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    DQNConfig,
    MARWILConfig,
    OnPolicyAlgorithm,
    OnPolicyConfig,
    PPOConfig,
    Result,
    SACConfig,
    Stop,
)
from etude.algorithms.config import ReplayConfig, SequenceConfig, TargetConfig
from etude.connectors import GAE, Connector, NormalizeObs
from etude.envs import Workers
from etude.errors import EtudeError, ModuleError, SettingsError, SpaceError
from etude.experience import Experience
from etude.learners import ComputeConfig, Loss, ModuleLearner, OptimizerConfig
from etude.modules import NetworkConfig, Output, make_module
from etude.recordings import Recording
from etude.settings import settings


def test_equal_seeds_give_equal_results() -> None:
    def results(seed: int) -> list[str]:
        algorithm = ppo(seed=seed)
        return [facts(algorithm.train()) for _ in range(3)]

    assert results(3) == results(3)
    assert results(3) != results(4)


@pytest.mark.parametrize("given", [{}, {"module": OwnNet}, {"connectors": ("frame_stack:2", "normalize_obs")}])
def test_evaluating_and_recording_do_not_disturb_training(given: dict[str, Any], tmp_path: Path) -> None:
    quiet, busy = ppo(**given), ppo(**given)
    for i in range(3):
        expected = quiet.train()
        assert facts(busy.train()) == facts(expected)
        busy.evaluate(3)
        busy.evaluate(2, env="CartPole-v0", explore=True)
        busy.record(tmp_path / str(i), 3, explore=True)
        busy.save(tmp_path / "checkpoint")


def test_evaluations_of_one_seed_are_equal_and_their_figures_right(tmp_path: Path) -> None:
    algorithm = ppo()
    algorithm.train()
    evaluation = algorithm.record(tmp_path / "data", 37, seed=5, explore=True)
    again = algorithm.evaluate(37, seed=5, explore=True)
    other = algorithm.evaluate(37, seed=6, explore=True)
    clocks = {"seconds", "sample_steps_per_s"}
    a, b, c = ({n: v for n, v in e.to_dict().items() if n not in clocks} for e in (evaluation, again, other))
    assert a == b != c
    exp = Recording.open(tmp_path / "data").read()
    returns = [float(episode.steps["reward"].sum()) for episode in exp.episodes()]
    assert evaluation.episodes == len(returns) == 37
    assert evaluation.return_mean == pytest.approx(np.mean(returns))
    assert evaluation.return_std == pytest.approx(np.std(returns))
    assert (evaluation.return_min, evaluation.return_max) == (min(returns), max(returns))
    assert evaluation.env_steps == exp.num_steps
    assert evaluation.length_mean == pytest.approx(exp.num_steps / 37)
    assert evaluation.updates == algorithm.learner.updates


def test_a_recording_holds_what_was_lived(tmp_path: Path) -> None:
    algorithm = ppo(env="Pendulum-v1", connectors=("normalize_obs", "rescale_action"), num_envs=3, num_steps=600)
    algorithm.train()
    algorithm.record(tmp_path / "data", 4, seed=5, explore=True)
    recording = Recording.open(tmp_path / "data")
    assert recording.env == "Pendulum-v1"
    assert recording.obs_space == gym.make("Pendulum-v1").observation_space
    assert recording.action_space == algorithm.module.action_space
    assert recording.meta["explore"] is True
    assert recording.meta["seed"] == 5
    assert recording.meta["algorithm"] == "etude.algorithms.ppo:PPO"
    exp = recording.read()
    exp.validate()
    assert exp.num_segments == 4
    assert exp.segments.truncated.all()
    assert set(exp.steps) == {"obs", "action", "reward", "logp"}
    seen = algorithm.connectors.offline(exp)
    with torch.no_grad():
        out = algorithm.module(torch.from_numpy(np.array(seen.steps["obs"])))
        logp = out.logp(torch.from_numpy(np.array(exp.steps["action"])))
    np.testing.assert_allclose(exp.steps["logp"], logp.numpy(), rtol=1e-4, atol=1e-4)
    env: Any = gym.make("Pendulum-v1").unwrapped  # rewards are the env's for the stretched action
    theta = np.arctan2(exp.steps["obs"][:, 1], exp.steps["obs"][:, 0])
    torque = 2 * np.clip(exp.steps["action"][:, 0], -1, 1)
    cost = theta**2 + 0.1 * exp.steps["obs"][:, 2] ** 2 + 0.001 * torque**2
    np.testing.assert_allclose(exp.steps["reward"], -cost, rtol=1e-3, atol=1e-3)
    env.close()


def test_appending_adds_other_episodes(tmp_path: Path) -> None:
    algorithm = ppo()
    for _ in range(3):
        algorithm.record(tmp_path / "data", 4, seed=5, append=True)
    recording = Recording.open(tmp_path / "data")
    assert recording.num_episodes == recording.read().num_segments == 12
    assert not recording.validate().problems


def test_one_env_object() -> None:
    env = gym.make("CartPole-v1")
    algorithm = ppo(env=env, num_envs=1, num_steps=50)
    algorithm.train()
    with pytest.raises(SettingsError, match=r"config.env is one TimeLimit object, which training is in the middle of"):
        algorithm.evaluate(2)
    assert algorithm.evaluate(2, env="CartPole-v1").episodes == 2
    with pytest.raises(SettingsError, match="`evaluation.interval` is 3, but `env` is one TimeLimit object"):
        ppo(env=gym.make("CartPole-v1"), num_envs=1, evaluation_interval=3)
    own = gym.make("CartPole-v1")
    assert [algorithm.evaluate(2, env=own).episodes for _ in range(2)] == [2, 2]
    with pytest.raises(Exception, match="one TimeLimit object can't be 2 envs"):
        ppo(env=env, num_envs=2)


def test_a_vector_env_object_and_a_function_that_makes_one() -> None:
    env = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 5, autoreset_mode=AutoresetMode.SAME_STEP)
    algorithm = ppo(env=env)
    algorithm.train()
    own = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    assert [algorithm.evaluate(7, env=own).episodes for _ in range(2)] == [7, 7]
    algorithm = ppo(env=make_lending, num_envs=4)
    algorithm.train()
    assert algorithm.evaluate(9).episodes == 9


def test_an_env_that_does_not_fit_is_shown() -> None:
    algorithm = ppo()
    with pytest.raises(SettingsError, match="the env Acrobot-v1 does not fit the module: after the connectors"):
        algorithm.evaluate(2, env="Acrobot-v1")
    with pytest.raises(SettingsError, match="`num_episodes` is 0, but must be a whole number of at least 1"):
        algorithm.evaluate(0)


def test_connectors_in_a_config_are_not_shared_by_what_is_made_of_it() -> None:
    normalize = NormalizeObs()
    config = ppo(connectors=(normalize,)).config
    first = PPO(config)
    first.train()
    before = json.dumps(first.connectors.state_dict()["connectors"][1]["state"]["obs"]["mean"].tolist())
    PPO(config)
    after = json.dumps(first.connectors.state_dict()["connectors"][1]["state"]["obs"]["mean"].tolist())
    assert before == after
    assert not normalize.state_dict()


@pytest.mark.parametrize("module", [OwnNet, lambda o, a: OwnNet(o, a, width=8), None])
def test_networks_of_a_users_own(module: Any) -> None:
    algorithm = ppo(module=module)
    algorithm.train()
    assert isinstance(algorithm.module.net, OwnNet) == (module is not None)


def test_an_instance_is_trained_in_place() -> None:
    env = gym.make("CartPole-v1")
    net = OwnNet(env.observation_space, env.action_space)
    before = net.policy.weight.detach().clone()
    algorithm = ppo(module=net)
    algorithm.train()
    assert algorithm.module.net is net
    assert not torch.equal(net.policy.weight, before)


def test_an_instance_is_of_one_run() -> None:
    """As the next run would begin with what the last one learned, and both would change each other's weights."""
    env = gym.make("CartPole-v1")
    net = OwnNet(env.observation_space, env.action_space)
    with pytest.raises(SettingsError):
        ppo(module=net, connectors=(object(),))  # what failed has not taken it
    first = ppo(module=net)
    with pytest.raises(SettingsError, match=r"the network, a OwnNet object, was given to another .*copy.deepcopy"):
        ppo(module=net)
    del first
    gc.collect()
    with pytest.raises(SettingsError, match="was given to another algorithm before"):  # whether it is gone or not
        ppo(module=lambda obs_space, action_space: net)
    again = ppo(module=copy.deepcopy(net))
    assert torch.equal(again.module.net.policy.weight, net.policy.weight)


def test_a_checkpoint_is_not_loaded_into_the_network_of_a_run(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    net = OwnNet(env.observation_space, env.action_space)
    algorithm = ppo(module=net)
    algorithm.save(tmp_path)
    algorithm.train()
    now = net.policy.weight.detach().clone()
    for load in (etude.load, etude.load_policy):
        loaded = load(tmp_path, module=net)
        policy = loaded if isinstance(loaded, etude.Policy) else loaded.policy
        assert not torch.equal(policy.module.net.policy.weight, now)  # the weights that were saved
    assert torch.equal(net.policy.weight, now)


def test_nested_spaces_go_through(tmp_path: Path) -> None:
    algorithm = ppo(env=Switchboard)
    algorithm.train()
    algorithm.record(tmp_path, 3)
    exp = Recording.open(tmp_path).read()
    assert {"obs/panel/lamp", "obs/panel/noise", "obs/picture", "action"} <= set(exp.steps)


def result(**given: Any) -> Result:
    fields: dict[str, Any] = dict.fromkeys(("iteration", "env_steps", "updates", "seconds", "episodes"), 0)
    fields |= {"return_mean": float("nan"), "return_min": 0.0, "return_max": 0.0, "length_mean": 0.0}
    fields |= {"returns_counted": 0, "losses": {}, "metrics": {}, "times": {}, "sample_steps_per_s": 0.0}
    return Result(**fields | given)


@pytest.mark.parametrize(
    ("stop", "given", "met", "used", "now"),
    [
        (Stop(), {}, True, False, False),
        (Stop(return_mean=5), {}, False, False, False),
        (Stop(return_mean=5), {"return_mean": 6.0, "returns_counted": 19}, False, False, False),
        (Stop(return_mean=5), {"return_mean": 5.0, "returns_counted": 20}, True, False, True),
        (Stop(return_mean=5), {"return_mean": 4.9, "returns_counted": 99}, False, False, False),
        (Stop(return_mean=5, env_steps=10), {"env_steps": 10}, False, True, True),
        (Stop(env_steps=10), {"env_steps": 9}, True, False, False),
        (Stop(updates=10), {"updates": 11}, True, True, True),
        (Stop(seconds=1.5), {"seconds": 1.6}, True, True, True),
    ],
)
def test_when_to_stop(stop: Stop, given: dict[str, Any], met: bool, used: bool, now: bool) -> None:
    row = result(**given)
    assert (stop.goals_met(row), stop.budget_used(row), stop.now(row)) == (met, used, now)


def test_fit_ends_with_the_budget() -> None:
    assert ppo(num_steps=100).fit(Stop(env_steps=250)).env_steps == 300


def test_a_goal_over_too_few_episodes_is_refused() -> None:
    with pytest.raises(SettingsError, match="over at least 20 episodes, but results are over 10 only"):
        ppo(window=10).fit(Stop(return_mean=1))


def test_an_algorithm_says_what_it_lacks() -> None:
    class NoLoss(OnPolicyAlgorithm[PPOConfig]):
        pass

    with pytest.raises(NotImplementedError, match=r"NoLoss must define loss\(module, batch\)"):
        NoLoss(ppo().config).train()


def test_an_algorithms_settings_are_its_own_or_inherited() -> None:
    @settings
    class MyConfig(PPOConfig):
        curiosity: float = 0.1

    class Mine(PPO):
        Config = MyConfig

    class Heir(Mine):
        pass

    class Written(OnPolicyAlgorithm[MyConfig]):  # type: ignore[type-var]
        pass

    class Plain(OnPolicyAlgorithm):  # type: ignore[type-arg]
        pass

    assert [cls.Config for cls in (PPO, Mine, Heir, Written, Plain)] == [
        PPOConfig,
        MyConfig,
        MyConfig,
        MyConfig,
        OnPolicyConfig,
    ]
    assert Algorithm.Config is AlgorithmConfig


def test_hooks_are_called() -> None:
    calls: list[str] = []

    class Hooked(PPO):
        def setup(self) -> None:
            super().setup()
            calls.append("setup")

        def after_update(self, env_steps: int) -> None:
            calls.append("after_update")

        def loss(self, module: Any, batch: Any) -> Loss:
            return super().loss(module, batch).log(mine=batch.reward.mean())

    algorithm = Hooked(ppo(env=Echo).config)
    metrics = algorithm.train().metrics
    assert calls == ["setup", "after_update"]
    assert 0 <= metrics["mine"] <= 1


class Sick(Echo):
    """Gives NaN after a few steps."""

    def step(self, action: int) -> Any:
        obs, *rest = super().step(action)
        return (np.full_like(obs, np.nan), *rest)


class Levels(gym.Env[Any, Any]):
    """An env that takes two whole numbers."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(0, 4, (2,), np.int64)


@pytest.mark.parametrize("name", ["PPO", "A2C", "IMPALA", "APPO", "DQN", "QRDQN", "SAC", "TD3"])
def test_integer_boxes_are_refused_alike(name: str) -> None:
    with pytest.raises(SpaceError, match="Box of int64, but only Boxes of floats have an action distribution. Use a"):
        getattr(etude, name)(getattr(etude, f"{name}Config")(env=Levels))


def test_numbers_that_nothing_can_be_learned_from_are_refused() -> None:
    algorithm = PPO(PPOConfig(env=Sick, num_envs=2, num_steps=20))
    with pytest.raises(SpaceError, match=r"env 0: `obs` holds NaN"):
        algorithm.train()
    algorithm = PPO(PPOConfig(env=Sick, num_envs=2, num_steps=20, workers=Workers(check=0)))
    with pytest.raises(SpaceError, match=r"env 0: `obs` holds NaN"):  # numbers are checked at every step
        algorithm.train()


def test_fit_needs_an_end() -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20))
    with pytest.raises(SettingsError, match="fit needs to know when to stop"):
        algorithm.fit(Stop())


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match="`device` is 'nowhere', but modules learn on cpu and cuda only"):
        PPO(PPOConfig(env=Echo, device="nowhere"))


@pytest.mark.parametrize("device", ["mps", "mps:0", "meta", "xpu"])
def test_a_device_that_nothing_can_be_learned_on(device: str) -> None:
    with pytest.raises(SettingsError, match=f"`device` is '{device}'.* Use cpu") as error:
        PPO(PPOConfig(env=Echo, device=device))
    assert ("float64" in str(error.value)) == device.startswith("mps")
    module = make_module(None, gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))
    with pytest.raises(SettingsError, match=f"`device` is '{device}'"):
        ModuleLearner(
            module, lambda module, batch: Loss(policy=batch.reward.mean()), compute=ComputeConfig(device=device)
        )


def test_the_name_is_the_classs_own() -> None:
    class Mine(PPO):
        pass

    assert (PPO.name, Mine.name) == ("ppo", "mine")


class RewardSum(Connector):
    """Counts the rewards that it learned from."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, exp: Experience) -> None:
        self.total += float(exp.steps["reward"].sum())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_learner_connectors_learn_from_each_iteration_and_are_saved(tmp_path: Path) -> None:
    class Counts(PPO):
        def learner_connectors(self) -> list[Any]:
            return [RewardSum(), *super().learner_connectors()]

    algorithm = Counts(PPOConfig(env=Toil, num_envs=2, num_steps=50, seed=1))
    counter = algorithm.learner.only.connectors.connectors[0]
    assert isinstance(counter, RewardSum)
    algorithm.train()
    once = counter.total
    algorithm.train()
    assert once != 0.0
    assert counter.total != once
    other = Counts(PPOConfig(env=Toil, num_envs=2, num_steps=50, seed=1))
    other.set_state(algorithm.get_state())
    assert other.learner.only.connectors.connectors[0].state_dict() == {"total": counter.total}


class Looks(Connector):
    """Keeps what it learned from."""

    def update(self, exp: Experience) -> None:
        self.seen = exp

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_learner_connectors_learn_from_what_others_made_with_the_module() -> None:
    class Looked(PPO):
        def learner_connectors(self) -> list[Any]:
            return [GAE(0.9, 0.0), Looks()]

    algorithm = Looked(PPOConfig(env=Toil, num_envs=2, num_steps=50, seed=1))
    algorithm.train()
    looks = algorithm.learner.only.connectors.connectors[1]
    assert isinstance(looks, Looks)
    exp, value_of = looks.seen, algorithm.module.value_of
    expected = exp.steps["reward"] + 0.9 * value_of(exp.next_obs()) - value_of({"obs": exp.steps["obs"]})
    np.testing.assert_allclose(exp.steps["advantage"], expected, rtol=1e-4)


def test_learner_connectors_may_not_change_what_the_module_sees() -> None:
    class Wrong(PPO):
        def learner_connectors(self) -> list[Any]:
            return [NormalizeObs(), *super().learner_connectors()]

    with pytest.raises(SettingsError, match="belongs in the setting `connectors`"):
        Wrong(PPOConfig(env="CartPole-v1", num_envs=2))


def test_learner_connectors_that_look_back_need_whole_episodes() -> None:
    class LooksBack(Connector):
        context = 2

    class Wrong(PPO):
        def learner_connectors(self) -> list[Any]:
            return [*super().learner_connectors(), LooksBack()]

    with pytest.raises(SettingsError, match="looks_back needs the 2 steps before a segment, but .* collect whole"):
        Wrong(PPOConfig(env="CartPole-v1", num_envs=2))
    Wrong(PPOConfig(env=Echo, num_envs=2, num_steps=20, whole_episodes=True)).train()


def test_several_modules_for_one_agent_without_a_name_need_module_of() -> None:
    with pytest.raises(EtudeError, match=r"\['a', 'b'\], but none for the env's agent, which has no name: set"):
        PPO(PPOConfig(env="CartPole-v1", modules=("a", "b"), num_envs=2))


def test_settings_are_not_replaced_during_a_run() -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20))
    algorithm.train()
    before, algorithm.config = algorithm.config, dataclasses.replace(algorithm.config, lr=0.0)
    with pytest.raises(SettingsError, match=r"`config` was replaced after .* etude.load\(folder, lr=1e-4\)"):
        algorithm.train()
    algorithm.config = before
    algorithm.train()


def test_a_loss_that_is_not_a_number_stops_training() -> None:
    class Bad(PPO):
        def loss(self, module: Any, batch: Any) -> Loss:
            return Loss(**super().loss(module, batch).parts, odd=torch.tensor(float("nan")))

    with pytest.raises(EtudeError, match="module 'main': 10 gradient steps in a row .*the loss part `odd` = nan"):
        Bad(PPOConfig(env=Echo, num_envs=2, num_steps=20, minibatch_size=10, epochs=6)).train()


def test_an_algorithm_that_can_not_be_made_closes_its_envs() -> None:
    closed = []

    class Closing(Echo):
        def close(self) -> None:
            closed.append(self)

    class Refusing(Connector):
        def spaces(self, obs_space: Any, action_space: Any) -> Any:
            raise SpaceError("not these")

    with pytest.raises(SpaceError):
        PPO(PPOConfig(env=Closing, num_envs=3, connectors=[Refusing]))
    assert len(closed) == 3


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's, of the observations that NaN actions lead to
def test_a_module_that_gives_nan_is_named_not_the_env() -> None:
    class Broken(torch.nn.Module):
        def __init__(self, obs_space: Any, action_space: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(float("nan")))

        def forward(self, obs: torch.Tensor) -> Output:
            return Output(dist_inputs=obs[:, :1].repeat(1, 2) * self.weight, value=obs[:, 0])

    with pytest.raises(ModuleError, match="the module returned `dist_inputs` that is not finite"):
        PPO(PPOConfig(env="Pendulum-v1", module=Broken, num_envs=2, num_steps=20)).train()


def test_a_budget_that_is_used_up_trains_no_more() -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20))
    assert algorithm.fit(Stop(env_steps=0)).env_steps == 0
    assert algorithm.fit(Stop(env_steps=20)).updates > 0
    assert algorithm.fit(Stop(env_steps=20)).env_steps == 20


def test_a_goal_that_another_env_met_is_not_taken_for_met(tmp_path: Path) -> None:
    algorithm = PPO(PPOConfig(env=Echo, num_envs=2, num_steps=20))
    met = algorithm.fit(Stop(return_mean=-1e9))
    algorithm.save(tmp_path / "run")
    resumed = etude.load(tmp_path / "run", env=Echo)
    assert resumed.fit(Stop(return_mean=met.return_mean)).env_steps > met.env_steps


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": -1}, "`seed` is -1, but must be at least 0"),
        ({"lr": float("nan")}, "PPOConfig.lr is nan, expected"),
        ({"lr": -1e-3}, "a schedule is a number from 0 on"),
        ({"value_weight": float("inf")}, "PPOConfig.value_weight is inf, expected float that is finite"),
        ({"connectors": ["gae"]}, "where gae has no effect"),
    ],
)
def test_settings_that_can_not_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PPO(PPOConfig(env=Echo, **given))


def test_seeds_and_budgets_below_zero() -> None:
    with pytest.raises(SettingsError, match="a seed must be .*at least 0, not -1"):
        PPO(PPOConfig(env=Echo)).evaluate(1, seed=-1)
    with pytest.raises(SettingsError, match="`env_steps` is -4"):
        Stop(env_steps=-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"network": NetworkConfig(recurrent_size=8)}, "`network.recurrent_size` is 8, but has no effect, as "),
        (
            {"sequences": SequenceConfig(max_len=8)},
            "`sequences.max_len` is 8, but has no effect, as `network.",
        ),
        (
            {"optimizer": OptimizerConfig(grad_clip=None, grad_clip_by="norm")},
            "`optimizer.grad_clip_by` is 'norm', but has no effect, as `optimizer.grad_clip` is None",
        ),
    ],
)
def test_a_setting_without_the_one_that_it_needs_warns(given: dict[str, Any], said: str) -> None:
    config = PPOConfig(env="CartPole-v1", **given)
    with pytest.warns(UserWarning, match=re.escape(said)) as warned:
        PPO(config).close()
    assert len(warned) == 1
    PPO(dataclasses.replace(config, module=OwnNet)).close()  # which may be recurrent


def test_other_algorithms_have_settings_that_need_others_too() -> None:
    target = TargetConfig(tau=0.5)
    assert APPOConfig(env="CartPole-v1", target=target).without_effect() == [
        "`target.tau` is 0.5, but has no effect, as `target.interval` is None."
    ]
    assert APPOConfig(env="CartPole-v1", target=dataclasses.replace(target, interval=1)).without_effect() == []
    given = {"lambda_": 0.5, "value_weight": 3.0, "average_rate": 0.5, "max_weight": 2.0}
    assert MARWILConfig(data="data", **given).without_effect() == []
    assert len(MARWILConfig(data="data", beta=0.0, **given).without_effect()) == 4


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (PPOConfig, {"minibatch_size": 32, "num_minibatches": 4}, "`minibatch_size` is 32, but must be left out, or"),
        (SACConfig, {"temperature": 0.1, "target_entropy": -1.0}, "`target_entropy` is -1.0, but must be none where"),
        (DQNConfig, {"prioritized": True, "priority_beta": 2.0}, "`replay.priority_beta` is 2.0, but must be between"),
        (DQNConfig, {"epsilon": ((0, 3.0), (9, 0.1))}, r"`epsilon` is \(\(0, 3.0\).*, but must be between 0 and 1"),
    ],
)
def test_settings_that_exclude_each_other_or_are_out_of_range(make: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make(env="CartPole-v1", **given)


def test_defaults_without_the_setting_that_they_need_do_not_warn() -> None:
    config = DQNConfig(env="CartPole-v1", replay=ReplayConfig(capacity=100), network=NetworkConfig())
    assert config.without_effect() == []
    changed = dataclasses.replace(config, replay=ReplayConfig(capacity=100, priority_alpha=0.5))
    assert len(changed.without_effect()) == 1
    assert (
        dataclasses.replace(config, replay=dataclasses.replace(changed.replay, prioritized=True)).without_effect() == []
    )
