# SPDX-License-Identifier: Apache-2.0
"""DQN and SAC: an env step with its update, beside Stable-Baselines3 at equal settings."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from stable_baselines3 import DQN as PeerDQN
from stable_baselines3 import SAC as PeerSAC

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, Work, milliseconds, race
from etude import DQN, SAC, DQNConfig, NetworkConfig, SACConfig

COMPILED, PEER = "Etude, compile=True", "SB3"
REACH = 1 / 1.5
ROUND, STEPS = 16, 256
"""Env steps between gradient steps, of which there are as many; and those of a piece of work."""
DQN_STEPS, SAC_STEPS = 12_000, 6_000
"""After which returns are compared."""


def rows(options: Options) -> Iterator[Row]:
    """DQN on CartPole, SAC on Pendulum; the returns of both after as many steps."""
    returns = _returns(_dqn, _peer_dqn, DQN_STEPS // (20 if options.quick else 1), 1 if options.quick else 3)
    yield from _rows(f"DQN on {ENV}: env step and update, 2x64, batch 64", _dqn(0), _peer_dqn(0), options, returns)
    returns = _returns(etude_sac, peer_sac, SAC_STEPS // (20 if options.quick else 1), 1 if options.quick else 2)
    for hidden, batch, note in (((64, 64), 128, returns), ((256, 256), 256, "")):
        yield from _rows(
            f"SAC on Pendulum-v1: env step and update, 2x{hidden[0]}, batch {batch}",
            etude_sac(0, hidden, batch),
            peer_sac(0, hidden, batch),
            options,
            note,
        )


def _rows(work: str, own: Any, peer: Any, options: Options, note: str) -> Iterator[Row]:
    compiled = type(own)(dataclasses.replace(own.config, compile=True))
    begin = time.perf_counter()
    works = {COMPILED: _etude_steps(compiled)}
    seconds = time.perf_counter() - begin
    times = milliseconds(race(works | {ETUDE: _etude_steps(own), PEER: _peer_steps(peer)}, options))
    about = f"{ROUND} steps, then {ROUND} updates; the same in both"
    for name, title, more in (
        (ETUDE, work, note),
        (COMPILED, f"{work}, compile=True", f"the first updates, with compiling, took {seconds:.0f} s"),
    ):
        figures = [Figure(ETUDE, times[name], "etude"), Figure(PEER, times[PEER], "peer")]
        yield Row(title, "ms", figures, Reach(REACH, PEER), f"{about}; {more}" if more else about)
    own.close()
    compiled.close()


def _etude_steps(algorithm: DQN | SAC) -> Work:
    while not algorithm.updates:
        algorithm.train()

    def work() -> int:
        algorithm.train()
        return STEPS

    return work


def _peer_steps(model: PeerDQN | PeerSAC) -> Work:
    model.learn(2 * STEPS)

    def work() -> int:
        model.learn(STEPS, reset_num_timesteps=False)
        return STEPS

    return work


def _returns(own: Callable[[int], Any], peer: Callable[[int], Any], steps: int, seeds: int) -> str:
    """The mean returns of the last 20 episodes after as many steps, by seed."""
    found: dict[str, list[float]] = {ETUDE: [], PEER: []}
    for seed in range(seeds):
        algorithm = own(seed)
        while algorithm.env_steps < steps:
            result = algorithm.train()
        found[ETUDE].append(result.return_mean)
        algorithm.close()
        model = peer(seed)
        model.learn(steps)
        episodes = [episode["r"] for episode in model.ep_info_buffer][-20:]
        found[PEER].append(statistics.mean(episodes))
    said = [f"{name} {', '.join(format(value, '.0f') for value in values)}" for name, values in found.items()]
    return f"mean return of 20 episodes after {steps:,} steps, by seed: {'; '.join(said)}"


def _dqn(seed: int) -> DQN:
    return DQN(
        DQNConfig(
            env=ENV,
            seed=seed,
            num_envs=1,
            num_steps=ROUND,
            iteration_steps=STEPS,
            updates_per_step=1.0,
            learning_starts=STEPS,
            batch_size=64,
            n_step=1,
            double=False,
            target_interval=200,
            lr=1e-3,
            epsilon=0.1,
            network=NetworkConfig(hidden=(64, 64), activation="relu", separate=False),
        )
    )


def _peer_dqn(seed: int) -> PeerDQN:
    return PeerDQN(
        "MlpPolicy",
        ENV,
        seed=seed,
        train_freq=ROUND,
        gradient_steps=ROUND,
        learning_starts=STEPS,
        buffer_size=100_000,
        batch_size=64,
        target_update_interval=200,
        learning_rate=1e-3,
        exploration_initial_eps=0.1,
        exploration_final_eps=0.1,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
    )


def etude_sac(seed: int, hidden: tuple[int, int] = (64, 64), batch_size: int = 128) -> SAC:
    """SAC on Pendulum."""
    return SAC(
        SACConfig(
            env="Pendulum-v1",
            seed=seed,
            num_steps=ROUND,
            iteration_steps=STEPS,
            learning_starts=STEPS,
            batch_size=batch_size,
            lr=1e-3,
            network=NetworkConfig(hidden=hidden, activation="relu"),
        )
    )


def peer_sac(seed: int, hidden: tuple[int, int] = (64, 64), batch_size: int = 128) -> PeerSAC:
    """Stable-Baselines3's SAC at the same settings."""
    return PeerSAC(
        "MlpPolicy",
        "Pendulum-v1",
        seed=seed,
        train_freq=ROUND,
        gradient_steps=ROUND,
        learning_starts=STEPS,
        batch_size=batch_size,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": list(hidden)},
        device="cpu",
    )
