# SPDX-License-Identifier: Apache-2.0
"""What people write who know other libraries: an EtudeError that says what to write here."""

import copy
import dataclasses
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

import etude
from etude import PPO, PPOConfig, Stop
from etude.errors import EtudeError, ModuleError, SettingsError
from etude.runners.callbacks import callback_from

SMALL = {"env": "CartPole-v1", "num_envs": 2, "num_steps": 64, "minibatch_size": 64, "epochs": 1, "seed": 1}


@pytest.fixture(scope="module")
def ppo():
    algorithm = PPO(PPOConfig(**SMALL))
    yield algorithm
    algorithm.close()


def said(call, *facts):
    with pytest.raises(EtudeError) as caught:
        call()
    for fact in facts:
        assert fact in str(caught.value), str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("make", "written"),
    [
        (lambda: PPO("CartPole-v1"), "PPO(PPOConfig(env='CartPole-v1'))"),
        (lambda: PPO(env="CartPole-v1"), "PPO(PPOConfig(env='CartPole-v1'))"),
        (lambda: PPO(env="CartPole-v1", learning_rate=0.01), "PPO(PPOConfig(env='CartPole-v1', lr=0.01))"),
        (lambda: PPO("MlpPolicy", "CartPole-v1", verbose=1, n_envs=4), "PPOConfig(env='CartPole-v1', num_envs=4)"),
        (lambda: PPO({"env": "CartPole-v1"}), "PPO(PPOConfig(env='CartPole-v1'))"),
        (lambda: PPO(gym.make("CartPole-v1")), "PPO(PPOConfig(env="),
        (lambda: PPO(None), "PPOConfig"),
        (lambda: PPO(), "PPOConfig"),
        (lambda: PPO(PPOConfig), "PPOConfig("),
        (lambda: PPO(etude.DQNConfig(env="CartPole-v1")), "DQNConfig"),
        (lambda: PPO(PPOConfig(env="CartPole-v1"), verbose=1), "PPOConfig("),
        (lambda: etude.BC(PPOConfig(env="CartPole-v1")), "BCConfig"),
        (lambda: etude.SAC("Pendulum-v1"), "SAC(SACConfig(env='Pendulum-v1'))"),
        (lambda: etude.BC("CartPole-v1"), "BC(BCConfig(data=..., env='CartPole-v1'))"),
        (lambda: etude.BC(gym.make("CartPole-v1")), "BC(BCConfig(data=..., env=...))"),
        (lambda: etude.BC("runs/demo"), "BC(BCConfig(data='runs/demo'))"),
        (lambda: etude.AWAC(data="d", lam=0.3), "AWACConfig(data='d', beta=...)"),
        (lambda: PPO(env="CartPole-v1", lam=0.9), "PPOConfig(env='CartPole-v1', lambda_=0.9)"),
        (lambda: etude.SAC(env="Pendulum-v1", target_update_interval=1), "SACConfig(env='Pendulum-v1', tau=...)"),
        (lambda: etude.SAC(env="Pendulum-v1", tau=0.01), "SACConfig(env='Pendulum-v1', tau=0.01)"),
        (lambda: etude.BC(data="d", materialize_data=True), "BCConfig(data='d', mode=...)"),
    ],
)
def test_algorithms_are_made_of_their_settings(make, written):
    assert isinstance(said(make, written), SettingsError)


def test_an_own_algorithm_may_take_more_than_its_settings():
    class Taught(PPO):
        def __init__(self, config, teacher):
            self.teacher = teacher
            super().__init__(config)

    class Ready(PPO):
        def __init__(self):
            super().__init__(PPOConfig(**SMALL))

    assert Taught(PPOConfig(**SMALL), "me").teacher == "me"
    assert Ready().config.num_envs == 2
    assert PPO(config=PPOConfig(**SMALL)).config.seed == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda ppo: ppo.fit(10_000),
        lambda ppo: ppo.fit(stop=10_000),
        lambda ppo: ppo.fit(1e4),
        lambda ppo: ppo.fit(-5),
        lambda ppo: ppo.fit(total_timesteps=10_000),
        lambda ppo: ppo.fit(env_steps=10_000),
        lambda ppo: list(ppo.iterate(10_000)),
        lambda ppo: ppo.train(10_000),
        lambda ppo: ppo.train(total_timesteps=10_000),
        lambda ppo: ppo.learn(10_000),
        lambda ppo: ppo.learn(total_timesteps=10_000),
    ],
)
def test_how_long_to_train_is_said_by_a_stop(ppo, call):
    said(lambda: call(ppo), "fit(Stop(env_steps=10_000))")
    assert ppo.env_steps == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda ppo: ppo.fit(),
        lambda ppo: ppo.fit(None),
        lambda ppo: ppo.fit(Stop),
        lambda ppo: ppo.fit(Stop()),
        lambda ppo: ppo.fit({"env_steps": 100}),
        lambda ppo: list(ppo.iterate(0)),
    ],
)
def test_without_a_stop_nothing_begins(ppo, call):
    said(lambda: call(ppo), "Stop(")
    assert ppo.env_steps == 0


def test_replay_and_offline_algorithms_say_how_they_train(tmp_path, ppo):
    dqn = etude.DQN(etude.DQNConfig(env="CartPole-v1", num_envs=2, seed=1))
    said(lambda: dqn.learn(500), "fit(Stop(env_steps=")
    assert dqn.updates == 0
    ppo.record(tmp_path / "data", 2, seed=1)
    bc = etude.BC(etude.BCConfig(data=str(tmp_path / "data"), seed=1))
    said(lambda: bc.fit(500), "fit(Stop(updates=500))")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *[(name, "algorithm.policy.act(obs)") for name in ("predict", "act", "compute_single_action", "get_action")],
        *[(name, "evaluate()") for name in ("predict", "rollout")],
        *[(name, "algorithm.module") for name in ("get_policy", "model")],
        *[(name, "etude.load(path)") for name in ("restore", "load_checkpoint")],
        *[(name, "algorithm.policy.export(") for name in ("export", "save_policy")],
        ("save_checkpoint", "save(path)"),
        ("num_timesteps", "env_steps"),
        ("evalute", "`evaluate`"),
    ],
)
def test_what_others_have_is_named_by_what_is_here(ppo, name, instead):
    error = said(lambda: getattr(ppo, name), "PPO", f"`{name}`", instead)
    assert isinstance(error, AttributeError)
    assert not hasattr(ppo, name)


def test_what_an_attribute_lacks_inside_is_not_hidden(ppo):
    class Broken(PPO):
        @property
        def mine(self):
            return self.config.no_such_thing

    broken = Broken(PPOConfig(**SMALL))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = broken.mine
    with pytest.raises(AttributeError, match="_private"):
        _ = ppo._private
    assert copy.copy(ppo).config is ppo.config


@pytest.mark.parametrize("path", ["runs/p", 5])
def test_load_on_the_class_names_the_function(path):
    said(lambda: PPO.load(path), "etude.load(")
    said(lambda: PPO.load(path, env="CartPole-v1"), "etude.load(")
    said(lambda: PPO.load(), "etude.load(")
    said(lambda: PPO.evaluate(10), "evaluate()", "PPO(PPOConfig(")


def test_wrong_arguments_of_methods_are_named_with_the_right_ones(ppo):
    said(lambda: ppo.evaluate(n_eval_episodes=3), "n_eval_episodes", "`num_episodes`")
    said(lambda: ppo.evaluate(3, deterministic=True), "deterministic", "`explore`. It is the opposite")
    said(lambda: ppo.evaluate("CartPole-v1"), "'CartPole-v1'", "env=")
    said(lambda: ppo.record("data"), "num_episodes")
    said(lambda: ppo.save(), "path")


class Loss(PPO):
    """Gives back what `made` makes of PPO's loss."""

    made = None

    def loss(self, module, batch):
        return type(self).made(super().loss(module, batch), module(batch.obs))


def with_loss(made, **settings):
    algorithm = type("Mine", (Loss,), {"made": staticmethod(made)})(PPOConfig(**(SMALL | settings)))
    try:
        return algorithm.train()
    finally:
        algorithm.close()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (lambda loss, output: {"policy": loss.total}, ["dict", "Loss(**"]),
        (lambda loss, output: None, ["None", "return"]),
        (lambda loss, output: loss.total.item(), ["float", "scalar tensor"]),
        (lambda loss, output: (loss.total, {}), ["tuple", "scalar tensor"]),
        (lambda loss, output: etude.Loss(policy=output.value), ["`policy`", "(64,)", "mean"]),
        (lambda loss, output: output.value, ["(64,)", "mean"]),
        (lambda loss, output: etude.Loss(policy="low"), ["`policy`", "str"]),
    ],
)
def test_what_a_loss_returns_is_checked(made, facts, compiled):
    error = said(lambda: with_loss(made, compile=compiled), "loss", *facts)
    assert isinstance(error, ModuleError)


def test_a_loss_without_a_gradient_is_named():
    said(lambda: with_loss(lambda loss, output: etude.Loss(policy=loss.total.detach())), "gradient", "detach")
    said(lambda: with_loss(lambda loss, output: etude.Loss(policy=0.0)), "gradient")


def test_a_scalar_tensor_is_a_loss_of_one_part():
    plain, alone = with_loss(lambda loss, output: loss), with_loss(lambda loss, output: loss.total)
    assert alone.losses.keys() == {"loss"}
    assert alone.losses["loss"] == pytest.approx(sum(plain.losses.values()), rel=1e-6)
    assert alone.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # of torch about itself, while it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_can_be_logged_and_be_parts(compiled):
    result = with_loss(
        lambda loss, output: etude.Loss(policy=loss.total, extra=0.5).log(
            x=1.0, y=np.float64(2.0), n=3, t=torch.tensor(4.0), f=np.float32(0.25)
        ),
        compile=compiled,
    )
    assert result.losses["extra"] == 0.5
    assert [result.metrics[name] for name in "xyntf"] == [1.0, 2.0, 3.0, 4.0, 0.25]


def test_a_loss_that_takes_the_wrong_arguments_is_named_when_it_is_given():
    class Mine(PPO):
        def loss(self, batch):
            return None

    said(lambda: Mine(PPOConfig(**SMALL)), "Mine.loss", "(module, batch)")
    said(lambda: etude.Loss(torch.tensor(1.0)), "Loss(policy=")


def test_settings_of_other_kinds_come_with_what_to_write():
    said(lambda: PPOConfig(network={"hidden": [64, 64]}), "network", "NetworkConfig(hidden=[64, 64])")
    said(lambda: PPOConfig(connectors="normalize_obs"), "connectors", "Write ['normalize_obs'].")
    said(lambda: PPOConfig(workers=2), "workers", "Workers(num_workers=2)")
    said(lambda: PPOConfig(record="data"), "record", "RecordConfig(path='data')")
    said(lambda: etude.NetworkConfig(hidden="64,64"), "hidden", "(64, 64)")
    said(lambda: etude.NetworkConfig(hidden=64), "hidden", "Write [64].")
    said(lambda: PPOConfig(network={"net_arch": [9, 9], "activation_fn": 1}), "(hidden=[9, 9], activation=...)")
    for slip in ("lin_1e-3", lambda progress: 1e-3 * progress):
        said(lambda slip=slip: PPOConfig(lr=slip), "points over steps, such as [[0, 3e-4], [100000, 0.0]]")
    said(lambda: PPOConfig(lr="3e-4"), "lr", "0.0003")


class VecEnv:
    """As Stable-Baselines3's: no gymnasium.Env, and many steps at once."""

    num_envs = 2

    def reset(self):
        return np.zeros((2, 4), np.float32)

    def step(self, actions):
        return np.zeros((2, 4), np.float32), np.zeros(2), np.zeros(2, bool), [{}, {}]


class VecNormalize(VecEnv):
    pass


def make_normalized():
    return VecNormalize()


@pytest.mark.parametrize("kind", [VecEnv, VecNormalize])
def test_a_vector_env_of_stable_baselines_is_named(ppo, kind):
    facts = [kind.__name__, "Stable-Baselines3", "num_envs", "normalize_obs"]
    said(lambda: PPOConfig(env=kind()), *facts)
    said(lambda: ppo.evaluate(2, env=kind()), *facts)
    said(lambda: etude.make_arena(kind(), 2), *facts)
    said(lambda: PPO(PPOConfig(**(SMALL | {"env": make_normalized}))), "VecNormalize", *facts[1:])


class Flagged(etude.Callback):
    on_gpu = True


class Misspelt(etude.Callback):
    def on_epsiode_end(self, episode):
        raise NotImplementedError


def test_other_slips_of_newcomers(tmp_path, ppo):
    said(lambda: etude.BC("data/expert"), "BC(BCConfig(data='data/expert'))")
    said(lambda: etude.preset(PPO, "CartPole-v1"), "given by its name, such as 'ppo'")
    said(lambda: PPOConfig(env="CartPole-v1", callbacks=etude.Callback), "Write [Callback].")
    assert isinstance(callback_from(Flagged), Flagged)
    for callback in (Misspelt, Misspelt()):
        said(
            lambda callback=callback: PPO(PPOConfig(**SMALL, callbacks=(callback,))).train(),
            "`on_epsiode_end`",
            "`on_episode_end`",
        )
    said(lambda: PPOConfig(env="CartPole-v1", target_kl=1), "Here it is: `kl_target` (target KL divergence")
    said(lambda: etude.AWACConfig(data="x", lam=1), "`beta`")
    said(lambda: etude.IQLConfig(data="x", materialize_data=True), "`reading.mode`")
    said(lambda: etude.SACConfig(env="Pendulum-v1", target_update_interval=1), "`tau`")
    assert "env=..." in str(said(lambda: ppo.evaluate("Pendulum-v1")))
    assert "env=..." not in str(said(lambda: ppo.evaluate(0)))
    box = gym.spaces.Box(-1, 1, (2,))
    with etude.RecordingWriter(tmp_path / "data", obs_space=box, action_space=box) as writer:
        said(lambda: writer.write({"obs": np.zeros((3, 2))}), "takes an Experience, not a dict", "Source")


def test_stop_and_configs_know_the_names_of_other_libraries():
    for name in ("total_timesteps", "timesteps_total", "total_steps"):
        said(lambda name=name: Stop(**{name: 10}), "`env_steps`")
        said(lambda name=name: PPOConfig(**{name: 10}), "fit(Stop(env_steps=")
    for name, instead in {
        "normalize": "normalize_obs and normalize_reward",
        "frame_stack": "frame_stack:4",
        "env_wrapper": "a function that makes the wrapped env as `env`",
    }.items():
        said(lambda name=name: PPOConfig(**{name: 1}), instead)


@pytest.mark.parametrize(
    ("config", "name", "ours"),
    [
        (etude.CQLConfig, "conservative_weight", "penalty.alpha"),
        (etude.CQLConfig, "n_steps_per_epoch", "updates_per_iteration"),
        (etude.CQLConfig, "observation_scaler", "connectors"),
        (etude.IQLConfig, "weight_temp", "beta"),
        (etude.IQLConfig, "dataset_num_iters_per_learner", "updates_per_iteration"),
        (etude.IQLConfig, "shuffle_buffer_size", "reading.buffer_size"),
        (etude.DecisionTransformerConfig, "context_size", "context_length"),
        (etude.TD3Config, "update_actor_interval", "policy_delay"),
        (PPOConfig, "num_gpus_per_learner", "compute.device"),
        (PPOConfig, "batch_mode", "trajectories.whole_episodes"),
    ],
)
def test_settings_of_rllib_and_d3rlpy_name_those_here(config, name, ours):
    said(lambda: config(**{name: 1}), f"Here it is: `{ours}`")


def test_settings_can_not_be_changed_or_built_as_those_of_other_libraries():
    config = PPOConfig(**SMALL)
    error = said(lambda: setattr(config, "lr", 0.1), "dataclasses.replace(config, lr=0.1)")
    assert isinstance(error, dataclasses.FrozenInstanceError)
    said(lambda: setattr(config, "grad_clip", 0.1), "dataclasses.replace(config, grad_clip=0.1)")
    said(lambda: setattr(config, "learning_rate", 0.1), "Here it is: `lr`")
    said(lambda: config.learning_rate, "Here it is: `lr`")
    said(lambda: config.grad_clip, "`optimizer.grad_clip`")
    for name in ("environment", "training", "env_runners", "build", "copy"):
        error = said(lambda name=name: getattr(config, name), f"`{name}`", "PPOConfig(env=...)", "dataclasses.replace")
        assert isinstance(error, AttributeError)
        assert not hasattr(config, name)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config  # noqa: S301


def nothing():
    gym.make("CartPole-v1")


def a_class():
    return CartPoleEnv


class NoSpace(gym.Env):
    observation_space = 4
    action_space = gym.spaces.Discrete(2)


class ClassOfSpace(NoSpace):
    observation_space = gym.spaces.Box


def test_what_makes_no_env_is_named():
    said(lambda: PPO(PPOConfig(**(SMALL | {"env": nothing}))), "returns nothing", "`return`")
    said(lambda: PPO(PPOConfig(**(SMALL | {"env": a_class}))), "returns the class CartPoleEnv, not an object")
    said(lambda: PPO(PPOConfig(**(SMALL | {"env": NoSpace}))), "the space of `obs` is 4", "gymnasium.spaces")
    said(lambda: PPO(PPOConfig(**(SMALL | {"env": ClassOfSpace}))), "Box'>: it must be an object")


def test_arenas_runners_and_losses_name_what_they_were_given(ppo):
    said(lambda: etude.make_arena("CartPole-v1", "2"), "num_envs", "'2'")
    said(lambda: etude.make_arena("CartPole-v1", 2, 2), "`workers` is 2", "Workers(num_workers=...)")
    said(lambda: etude.Runner("CartPole-v1", ppo.policy), "make_arena(env, num_envs)")
    said(lambda: etude.Runner(etude.make_arena("CartPole-v1", 2), ppo.policy).collect(num_steps="9"), "not '9'")
    said(lambda: etude.Loss(policy=torch.ones(())).log(x="high"), "`x`", "str")
    said(lambda: etude.Loss(policy=torch.ones(())).log(x=None), "`x`", "NoneType")
    said(lambda: etude.Loss(), "at least one part")
    said(lambda: ppo.fit(Stop(env_steps=64), out=5), "`out` is 5")
    said(lambda: ppo.fit(Stop(env_steps=64), out=""), "`out` is ''")
    said(lambda: ppo.record(5, 3), "path", "5")
