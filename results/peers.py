# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3, sb3-contrib and d3rlpy with the settings of presets, through their public classes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

import etude
from etude.envs.registry import env_maker
from etude.learners import points_of
from etude.presets import Preset
from results.runs import EPISODES

Curve = list[tuple[float, float]]


def run(kind: Callable[..., BaseAlgorithm], preset: Preset, stop: Mapping[str, int], seed: int) -> tuple[float, Curve]:
    """Train and evaluate as `results.runs` does with Etude."""
    torch.set_num_threads(1)
    config, steps = preset.config(), stop["env_steps"]
    make, _ = env_maker(preset.env)
    env = _wrapped(make_vec_env(make, config.num_envs, seed=seed), config, training=True)
    network: dict[str, Any] = {
        "net_arch": list(config.network.hidden),
        "activation_fn": _ACTIVATIONS[config.network.activation],
    }
    if preset.algorithm == "ppo":
        network |= {
            "log_std_init": config.network.log_std_init,
            "ortho_init": config.network.weight_init == "orthogonal",
        }
    model = kind(
        _POLICIES.get(kind.__name__, "MlpPolicy"),
        env,
        learning_rate=_schedule(config.lr, steps),
        gamma=config.gamma,
        policy_kwargs=network,
        device="cpu",
        seed=seed,
        **_SETTINGS[preset.algorithm](config, steps),
    )
    curve: Curve = []
    model.learn(steps, callback=_Watch(curve))
    played = _wrapped(make_vec_env(make, 1, seed=1000 + seed), config, training=False)
    if isinstance(played, VecNormalize) and isinstance(env, VecNormalize):
        played.obs_rms = env.obs_rms
    mean, _ = evaluate_policy(model, played, n_eval_episodes=EPISODES, deterministic=True)
    return float(mean), curve  # type: ignore[arg-type]


class _Watch(BaseCallback):
    """Keeps the mean return of the latest 100 episodes, some hundred times in all."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve

    def _on_step(self) -> bool:
        buffer = self.model.ep_info_buffer
        if (
            buffer
            and self.num_timesteps >= (self.curve[-1][0] if self.curve else 0) + self.model._total_timesteps / 200
        ):
            self.curve.append((self.num_timesteps, float(np.mean([episode["r"] for episode in buffer]))))
        return True


def _wrapped(env: VecEnv, config: Any, *, training: bool) -> VecEnv:
    names = [str(name).partition(":")[0] for name in config.connectors]
    if not {"normalize_obs", "normalize_reward"} & {*names}:
        return env
    reward = "normalize_reward" in names and training
    return VecNormalize(env, training, "normalize_obs" in names, reward, gamma=config.gamma)


def _schedule(schedule: Any, steps: int) -> Any:
    """A schedule of Etude's, over env steps, as one of theirs, over what is left of the run."""
    x, y = zip(*points_of(schedule), strict=True)
    return float(y[0]) if len(x) == 1 else lambda left: float(np.interp((1 - left) * steps, x, y))


def _ppo(config: Any, steps: int) -> dict[str, Any]:
    return {
        "n_steps": config.num_steps // config.num_envs,
        "batch_size": config.minibatch_size,
        "n_epochs": config.epochs,
        "gae_lambda": config.lambda_,
        "clip_range": _schedule(config.clip, steps),
        "clip_range_vf": config.value_clip,
        "ent_coef": config.entropy_weight,
        "vf_coef": config.value_weight,
        "max_grad_norm": config.optimizer.grad_clip,
        "target_kl": config.kl_target,
    }


def _replay(config: Any) -> dict[str, Any]:
    return {
        "buffer_size": config.replay.capacity,
        "learning_starts": config.replay.learning_starts,
        "batch_size": config.batch_size,
    }


def _dqn(config: Any, steps: int) -> dict[str, Any]:
    (_, first), (until, last) = points_of(config.epsilon)
    return _replay(config) | {
        "train_freq": config.num_steps,
        "gradient_steps": round(config.num_steps * config.updates_per_step),
        "target_update_interval": round(config.target.interval / config.updates_per_step),
        "exploration_fraction": until / steps,
        "exploration_initial_eps": first,
        "exploration_final_eps": last,
    }


def _sac(config: Any, steps: int) -> dict[str, Any]:
    return _replay(config) | {"tau": config.tau}


def _td3(config: Any, steps: int) -> dict[str, Any]:
    shape = gym.make(config.env).action_space.shape
    return _replay(config) | {
        "tau": config.tau,
        "action_noise": NormalActionNoise(np.zeros(shape), np.full(shape, config.action_noise)),
        "policy_delay": config.policy_delay,
        "target_policy_noise": config.target_noise,
        "target_noise_clip": config.target_noise_clip,
    }


def _recurrent_ppo(*args: Any, **settings: Any) -> BaseAlgorithm:
    from sb3_contrib import RecurrentPPO

    return RecurrentPPO(*args, **settings)


_recurrent_ppo.__name__ = "RecurrentPPO"
_POLICIES: Final = {"RecurrentPPO": "MlpLstmPolicy"}
_ACTIVATIONS: Final = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
_SETTINGS: Final = {"ppo": _ppo, "dqn": _dqn, "sac": _sac, "td3": _td3}
_KINDS: Final = {"ppo": PPO, "dqn": DQN, "sac": SAC, "td3": TD3}


def offline(preset: Preset, stop: Mapping[str, int], seed: int, data: Sequence[str]) -> tuple[float, Curve]:
    """Train d3rlpy's IQL or TD3+BC on recordings with actions in [-1, 1], and evaluate."""
    import d3rlpy
    from d3rlpy.models.encoders import VectorEncoderFactory

    d3rlpy.seed(seed)
    config = preset.config()
    shape = VectorEncoderFactory(list(config.network.hidden), activation=config.network.activation)
    given: dict[str, Any] = {"actor_encoder_factory": shape, "critic_encoder_factory": shape}
    given |= {"actor_learning_rate": _rate(config.lr), "critic_learning_rate": _rate(config.lr), "gamma": config.gamma}
    if preset.algorithm == "iql":
        given |= {"value_encoder_factory": shape, "expectile": config.expectile, "weight_temp": config.beta}
        kind = d3rlpy.algos.IQLConfig
    else:
        given |= {"alpha": config.alpha, "observation_scaler": d3rlpy.preprocessing.StandardObservationScaler()}
        kind = d3rlpy.algos.TD3PlusBCConfig
    learner = kind(batch_size=config.batch_size, **given).create(device="cpu")
    exp = etude.Recording.open(list(data)).read()
    dataset = d3rlpy.dataset.MDPDataset(
        observations=exp.steps["obs"].astype(np.float32),
        actions=exp.steps["action"],
        rewards=exp.steps["reward"].astype(np.float32),
        terminals=exp.at_ends(exp.segments.terminated).astype(np.float32),
        timeouts=exp.at_ends(~exp.segments.terminated).astype(np.float32),
    )
    learner.build_with_dataset(dataset)
    if learner.observation_scaler is not None:
        learner.observation_scaler.fit_with_transition_picker(dataset.episodes, dataset.transition_picker)
    make, _ = env_maker(preset.env)
    curve: Curve = []
    parts = 10
    for part in range(parts):
        for _ in range(stop["updates"] // parts):
            learner.update(dataset.sample_transition_batch(config.batch_size))
        last = part == parts - 1
        reached = _mean_return(learner, make(), EPISODES if last else 10, seed)
        curve.append((stop["updates"] * (part + 1) / parts, reached))
    return curve[-1][1], curve


def _rate(schedule: Any) -> float:
    """The learning rate at the start: d3rlpy has no schedules."""
    return float(points_of(schedule)[0][1])


def _mean_return(learner: Any, env: Any, episodes: int, seed: int) -> float:
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=1000 * seed + episode)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(learner.predict(obs[None].astype(np.float32))[0])
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


RUN: Final[dict[str, Callable[[Preset, Mapping[str, int], int, Any], tuple[float, Curve]]]] = {
    "sb3": lambda preset, stop, seed, _: run(_KINDS[preset.algorithm], preset, stop, seed),
    "sb3-contrib": lambda preset, stop, seed, _: run(_recurrent_ppo, preset, stop, seed),
    "d3rlpy": offline,
}
