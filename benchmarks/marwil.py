# SPDX-License-Identifier: Apache-2.0
"""Updates of MARWIL with advantages of their own, beside the bare gradient step and, where it is there, RLlib."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from torch.nn import functional as F

from benchmarks import nets
from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, Work, expert, milliseconds, race
from etude import MARWIL, PPO, Experience, MARWILConfig, PPOConfig, Recording, load
from etude.recordings import sample_segments

STEPS, UPDATES, MAX_LEN = 2048, 20, 128
BARE, RLLIB = "bare step, one batch", "RLlib's learner, its data at hand"
REACH, BARE_REACH = 0.2, 1.6


def rows(options: Options) -> Iterator[Row]:
    """A gradient step on 2,048 steps of a mixed recording: getting them, GAE by the network as it is, loss, Adam."""
    data = mixed(options)
    compiled = "Etude, compile=True"
    works = {ETUDE: _etude(str(data), compile=False), BARE: _bare(), compiled: _etude(str(data), compile=True)}
    if importlib.util.find_spec("ray") is not None:
        works[RLLIB] = _rllib(Recording.open(data).read(), quick=options.quick)
    times = milliseconds(race(works, options))
    others, reach = [Figure(BARE, times[BARE])], Reach(BARE_REACH, BARE)
    if RLLIB in times:
        others.append(Figure(RLLIB, times[RLLIB], "peer"))
        reach = Reach(REACH, RLLIB)
    work = "MARWIL update of 2,048 steps of a mixed recording, with fresh GAE, 2x64"
    yield Row(work, "ms", [Figure(ETUDE, times[ETUDE], "etude"), *others], reach)
    yield Row(f"{work}, compile=True", "ms", [Figure(ETUDE, times[compiled], "etude"), *others], reach)


def mixed(options: Options) -> Path:
    """A recording of 10 episodes of a CartPole expert, 5,000 steps, and 2,500 of a beginner, about 55,000."""
    path = options.folder / "mixed"
    if not path.exists():
        expert(options)
        load(options.folder / "run").record(path, 10, seed=1)
        PPO(PPOConfig(env=ENV, seed=0)).record(path, 2500, seed=2, explore=True, append=True)
    return path


def _etude(data: str, *, compile: bool) -> Work:
    algorithm = MARWIL(
        MARWILConfig(
            data=data,
            mode="auto",
            batch_size=STEPS,
            updates_per_iteration=UPDATES,
            max_segment_length=MAX_LEN,
            compile=compile,
            seed=0,
        )
    )

    def work() -> int:
        algorithm.train()
        return UPDATES

    return work


def _bare() -> Work:
    """The gradient step alone, with weights and value targets that are there."""
    net = nets.seeded_net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(STEPS, 4, generator=generator)
    action = torch.randint(2, (STEPS,), generator=generator)
    weight, target = torch.rand(2, STEPS, generator=generator)

    def work() -> int:
        for _ in range(UPDATES):
            logits, value = net(obs)
            policy = (weight * F.cross_entropy(logits, action, reduction="none")).mean()
            optimizer.zero_grad()
            (policy + F.mse_loss(value, target)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return UPDATES

    return work


def _rllib(exp: Experience, *, quick: bool) -> Work:
    """Its learner's update from episodes in memory: GAE by its connectors, then the gradient step."""
    from ray.rllib.algorithms.marwil import MARWILConfig as TheirConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    config = TheirConfig().environment(ENV)
    config = config.training(beta=1.0, lr=1e-3, gamma=0.99, grad_clip=0.5, train_batch_size_per_learner=STEPS)
    config.lambda_ = 1.0
    model = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    learner: Any = config.rl_module(model_config=model).build_learner(env=gym.make(ENV))
    segments = sample_segments(exp, STEPS, MAX_LEN, columns=("obs", "action", "reward"))
    ready = [_episodes(next(segments)) for _ in range(40 if quick else 400)]  # an update spoils its episodes

    def work() -> int:
        episodes = ready.pop() if ready else _episodes(next(segments))
        learner.update(episodes=episodes, timesteps={"num_env_steps_sampled_lifetime": 0})
        return 1

    return work


def _episodes(batch: Experience) -> list[Any]:
    """The segments as RLlib's episodes."""
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    episodes = []
    for segment in batch:
        episode = SingleAgentEpisode(
            observations=[*segment.steps["obs"], *segment.final_obs["obs"]],
            actions=segment.steps["action"].tolist(),
            rewards=segment.steps["reward"].tolist(),
            terminated=bool(segment.segments.terminated[0]),
            truncated=not segment.segments.terminated[0],
            len_lookback_buffer=0,
        )
        episode.to_numpy()
        episodes.append(episode)
    return episodes
