# SPDX-License-Identifier: Apache-2.0
"""Gradient steps of IQL, CQL and TD3+BC, 2x256, batch 256, beside d3rlpy's where it is there; and their returns.

d3rlpy asks for an old Gymnasium, and works with the present one: ``pip install --no-deps d3rlpy``, then gym,
dataclasses-json, structlog, tqdm and scikit-learn.
"""

import importlib.util
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, Work, milliseconds, race
from benchmarks.marwil import mixed
from etude import SAC, NetworkConfig, Recording, SACConfig
from etude.algorithms import CQL, IQL, TD3BC, CQLConfig, IQLConfig, TD3BCConfig
from etude.algorithms.offline import OfflineAlgorithm

PENDULUM = "Pendulum-v1"
BATCH, UPDATES = 256, 20
COMPILED, EVERY, PEER = "Etude, compile=True", "Etude, gradient through all actions", "d3rlpy"
REACH = 1 / 2
RETURN_UPDATES = 3_000
HIDDEN = (256, 256)
KINDS: dict[str, tuple[str, type[OfflineAlgorithm[Any]], type[Any], str]] = {
    "IQL": (PENDULUM, IQL, IQLConfig, "IQLConfig"),
    "CQL": (PENDULUM, CQL, CQLConfig, "CQLConfig"),
    "TD3+BC": (PENDULUM, TD3BC, TD3BCConfig, "TD3PlusBCConfig"),
    "CQL of Discrete actions": (ENV, CQL, CQLConfig, "DiscreteCQLConfig"),
}


def rows(options: Options) -> Iterator[Row]:
    """A gradient step of each with getting its batch, d3rlpy's on a batch at hand; CQL with a fixed alpha in both."""
    has_peer = importlib.util.find_spec("d3rlpy") is not None
    for name, (env, cls, config, peer) in KINDS.items():
        data = recorded(options) if env == PENDULUM else mixed(options)
        works = {ETUDE: _steps(cls(config(data=str(data), **_settings(cls, env))))}
        begin = time.perf_counter()
        works[COMPILED] = _steps(cls(config(data=str(data), compile=True, **_settings(cls, env))))
        works[COMPILED]()
        seconds = time.perf_counter() - begin
        if name == "CQL":
            works[EVERY] = _steps(cls(config(data=str(data), gradient_actions=None, **_settings(cls, env))))
        if has_peer:
            works[PEER] = _peer_steps(_peer(peer), data)
        times = milliseconds(race(works, options))
        note = _returns(name, data, 100 if options.quick else RETURN_UPDATES)
        others = [
            Figure(other, times[other], "peer" if other == PEER else "limit")
            for other in (EVERY, PEER)[:2]
            if other in times
        ]
        work = f"{name} gradient step, 2x256, batch {BATCH}, {env}"
        reach = Reach(REACH, PEER) if has_peer else None
        yield Row(work, "ms", [Figure(ETUDE, times[ETUDE], "etude"), *others], reach, note)
        compiled = [Figure(ETUDE, times[COMPILED], "etude"), *others]
        yield Row(
            f"{work}, compile=True", "ms", compiled, reach, f"the first updates, with compiling, took {seconds:.0f} s"
        )


def recorded(options: Options) -> Path:
    """A recording of Pendulum, 20,000 steps: while SAC learned it for 6,000 steps, half of what it then was."""
    path = options.folder / "pendulum"
    if not path.exists():
        small = NetworkConfig(hidden=(64, 64), activation="relu")
        settings: dict[str, Any] = {"batch_size": 128, "lr": 2e-3, "tau": 0.01, "gamma": 0.98, "network": small}
        sac = SAC(SACConfig(env=PENDULUM, seed=0, num_envs=4, updates_per_step=0.5, **settings))
        for i in range(2 if options.quick else 6):
            sac.train()
            sac.record(path, 16, seed=i, explore=True, append=True)
        sac.close()
    return path


def _settings(cls: type[Any], env: str, seed: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = {"mode": "materialize_data", "batch_size": BATCH, "updates_per_iteration": UPDATES}
    shape: dict[str, Any] = {"separate": True} if cls is IQL else {}
    given |= {"seed": seed, "network": NetworkConfig(hidden=HIDDEN, activation="relu", **shape)}
    return given | ({"tau": 0.005} if env == PENDULUM else {"tau": 0.005, "alpha": 1.0})


def _steps(algorithm: OfflineAlgorithm[Any]) -> Work:
    def work() -> int:
        algorithm.train()
        return UPDATES

    return work


def _peer(name: str, seed: int = 0) -> Any:
    """An algorithm of d3rlpy at the same settings; Discrete targets are copied there, as often as ours move by 1."""
    import d3rlpy
    import structlog
    from d3rlpy.models.encoders import VectorEncoderFactory

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    d3rlpy.seed(seed)
    shape = VectorEncoderFactory(list(HIDDEN))
    if name == "DiscreteCQLConfig":
        given: dict[str, Any] = {"encoder_factory": shape, "learning_rate": 3e-4, "target_update_interval": 200}
    else:
        given = {"actor_encoder_factory": shape, "critic_encoder_factory": shape}
        given |= {"actor_learning_rate": 3e-4, "critic_learning_rate": 3e-4}
    given |= {"IQLConfig": {"value_encoder_factory": shape}, "CQLConfig": {"alpha_learning_rate": 0.0}}.get(name, {})
    return getattr(d3rlpy.algos, name)(batch_size=BATCH, **given).create(device="cpu")


def _peer_data(data: Path, *, scaled: bool) -> Any:
    """The recording as its dataset; actions brought to [-1, 1] from Pendulum's bounds."""
    from d3rlpy.dataset import MDPDataset

    exp = Recording.open(data).read()
    action = exp.steps["action"].reshape(len(exp.steps["action"]), -1)
    return MDPDataset(
        observations=exp.steps["obs"],
        actions=np.clip(action / 2, -1, 1) if scaled else action,
        rewards=exp.steps["reward"].astype(np.float32),
        terminals=exp.at_ends(exp.segments.terminated).astype(np.float32),
        timeouts=exp.at_ends(~exp.segments.terminated).astype(np.float32),
    )


def _peer_steps(algorithm: Any, data: Path) -> Work:
    from d3rlpy.torch_utility import TorchMiniBatch

    dataset = _peer_data(data, scaled="Discrete" not in type(algorithm).__name__)
    algorithm.build_with_dataset(dataset)
    batches = [
        TorchMiniBatch.from_batch(
            dataset.sample_transition_batch(BATCH), gamma=0.99, compute_returns_to_go=False, device="cpu"
        )
        for _ in range(UPDATES)
    ]

    def work() -> int:
        for i, batch in enumerate(batches):
            algorithm.impl.update(batch, i)
        return UPDATES

    return work


def _returns(name: str, data: Path, updates: int, seeds: int = 1) -> str:
    """The mean returns of 20 episodes after as many gradient steps, by seed."""
    env, cls, config, peer = KINDS[name]
    found: dict[str, list[float]] = {ETUDE: [], PEER: []}
    for seed in range(seeds):
        algorithm = cls(config(data=str(data), **_settings(cls, env, seed)))
        for _ in range(updates // UPDATES):
            algorithm.train()
        found[ETUDE].append(algorithm.evaluate(20, env=env, seed=100).return_mean)
        if importlib.util.find_spec("d3rlpy") is not None:
            other = _peer(peer, seed)
            dataset = _peer_data(data, scaled=env == PENDULUM)
            other.build_with_dataset(dataset)
            for _ in range(updates):
                other.update(dataset.sample_transition_batch(BATCH))
            found[PEER].append(_played(lambda obs, other=other: other.predict(obs[None])[0], env))
    said = [f"{who} {', '.join(format(value, '.0f') for value in values)}" for who, values in found.items() if values]
    return f"mean return of 20 episodes after {updates:,} updates, by seed: {'; '.join(said)}"


def _played(act: Callable[[Any], Any], env_id: str) -> float:
    env, returns = gym.make(env_id), []
    for episode in range(20):
        obs, _ = env.reset(seed=100 + episode)
        total, over = 0.0, False
        while not over:
            action = act(obs)
            obs, reward, terminated, truncated, _ = env.step(2 * action if env_id == PENDULUM else int(action))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)
