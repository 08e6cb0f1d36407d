# SPDX-License-Identifier: Apache-2.0
"""Replay: steps added and batches drawn, beside SB3's buffer and, where it can be imported, TorchRL's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks import sb3
from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from etude import Experience, Segments
from etude.experience import Priorities, Replay

BATCH, LENGTH = 256, 32
EPISODE = 200
UNIFORM_REACH, PRIORITIZED_REACH = 3.0, 2.0
SB3, TORCHRL, TAKE = "SB3 ReplayBuffer", "TorchRL", "np.take of 5 columns"

Columns = dict[str, NDArray[Any]]


def rows(options: Options) -> Iterator[Row]:
    """Uniform and prioritized batches, sequences, and single steps added."""
    num_steps = 100_000 if options.quick else 1_000_000
    exp = _steps(num_steps)
    stored = f"from {num_steps // 1000}k steps"
    peers, missing = _torchrl(exp)

    works = {ETUDE: _sampling(exp, None), TAKE: _taking(exp), SB3: sb3.replaying(_columns(exp), BATCH)}
    works |= _named(peers, "uniform")
    yield _row(f"replay: uniform batches of {BATCH} {stored}", works, options, Reach(UNIFORM_REACH, SB3), missing)

    works = {ETUDE: _sampling(exp, Priorities()), **_named(peers, "prioritized")}
    reach = Reach(PRIORITIZED_REACH, TORCHRL) if TORCHRL in works else None
    yield _row(f"replay: prioritized batches of {BATCH} {stored}", works, options, reach, missing)

    works = {ETUDE: _sampling(exp, Priorities(), updates=True), **_named(peers, "updated")}
    reach = Reach(PRIORITIZED_REACH, TORCHRL) if TORCHRL in works else None
    work = f"replay: prioritized batches of {BATCH} {stored}, new priorities after each"
    yield _row(work, works, options, reach, missing)

    works = {ETUDE: _sequences(exp), **_named(peers, "sequences")}
    work = f"replay: {BATCH // LENGTH} sequences of {LENGTH} {stored}"
    yield _row(work, works, options, Reach(1.0, TORCHRL) if TORCHRL in works else None, missing)

    note = "Etude finds the episode that each goes on with; SB3 is given next_obs with it"
    yield _row("replay: one step at a time added, when full", _adding(), options, None, note)


def _row(work: str, works: dict[str, Work], options: Options, reach: Reach | None, note: str) -> Row:
    rates = race(works, options)
    kinds: dict[str, Any] = {ETUDE: "etude", SB3: "peer", TORCHRL: "peer"}
    return Row(
        work, STEPS_A_SECOND, [Figure(name, rates[name], kinds.get(name, "limit")) for name in works], reach, note
    )


def _named(peers: dict[str, Work], which: str) -> dict[str, Work]:
    return {TORCHRL: peers[which]} if which in peers else {}


def _steps(num: int) -> Experience:
    """Steps such as CartPole's, in episodes of 200 that end one way or the other in turns."""
    rng, episodes = np.random.default_rng(0), num // EPISODE
    steps = {
        "obs": rng.random((num, 4), np.float32),
        "action": rng.integers(2, size=num),
        "reward": np.ones(num, np.float32),
    }
    terminated = np.arange(episodes) % 2 == 0
    ids = [f"e{i}" for i in range(episodes)]
    segments = Segments.of(episodes, episode_id=ids, terminated=terminated, truncated=~terminated)
    return Experience(
        steps, np.arange(episodes + 1) * EPISODE, segments, {"obs": rng.random((episodes, 4), np.float32)}
    )


def _columns(exp: Experience) -> Columns:
    done = exp.at_ends(exp.segments.done)
    return {**exp.steps, "next_obs": exp.next_obs()["obs"], "done": done}


def _sampling(exp: Experience, priorities: Priorities | None, *, updates: bool = False) -> Work:
    replay = Replay(exp.num_steps, priorities=priorities, seed=0)
    replay.add(exp)
    priority = np.random.default_rng(1).random(exp.num_steps)
    if priorities is not None:
        replay.update_priorities(np.arange(exp.num_steps), priority)

    def work() -> int:
        for _ in range(10):
            batch = replay.sample(BATCH)
            if updates:
                replay.update_priorities(batch["index"], priority[:BATCH])
        return 10 * BATCH

    return work


def _taking(exp: Experience) -> Work:
    columns, rng = _columns(exp), np.random.default_rng(0)

    def work() -> int:
        for _ in range(10):
            drawn = (rng.random(BATCH) * exp.num_steps).astype(np.int64)
            _ = {name: column.take(drawn, axis=0) for name, column in columns.items()}
        return 10 * BATCH

    return work


def _sequences(exp: Experience) -> Work:
    replay = Replay(exp.num_steps, seed=0)
    replay.add(exp)
    return lambda: sum(replay.sample_sequences(BATCH // LENGTH, LENGTH).num_steps for _ in range(10))


def _adding() -> dict[str, Work]:
    """A step of one env to each, over and over."""
    num = 10_000
    exp = _steps(num)
    singles = list(exp.cut(1))
    replay = Replay(num, seed=0)
    replay.add(exp)
    buffer = ReplayBuffer(num, Box(-np.inf, np.inf, (4,), np.float32), Discrete(2), "cpu")
    columns = _columns(exp)
    bare = [{name: column[i : i + 1] for name, column in columns.items()} for i in range(num)]

    def etude() -> int:
        for single in singles:
            replay.add(single)
        return num

    def other() -> int:
        for step in bare:
            buffer.add(step["obs"], step["next_obs"], step["action"], step["reward"], step["done"], [{}])
        return num

    return {ETUDE: etude, SB3: other}


def _torchrl(exp: Experience) -> tuple[dict[str, Work], str]:
    """TorchRL's buffers by what they do, and a note where they can't be had."""
    try:
        import torch
        from tensordict import TensorDict
        from torchrl.data import (
            LazyTensorStorage,
            SliceSampler,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )
    except ImportError:
        return {}, "TorchRL can't be imported here"
    num = exp.num_steps
    steps = {name: torch.from_numpy(column) for name, column in _columns(exp).items()}
    episode = torch.from_numpy(exp.segment_of_step())
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(num), batch_size=BATCH)
    uniform.extend(TensorDict(steps, [num]))
    sampler = SliceSampler(slice_len=LENGTH, traj_key="episode", cache_values=True)
    slices = TensorDictReplayBuffer(storage=LazyTensorStorage(num), sampler=sampler, batch_size=BATCH)
    slices.extend(TensorDict({**steps, "episode": episode}, [num]))
    works = {"uniform": _drawing(uniform), "sequences": _drawing(slices)}
    try:
        prioritized = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(num), batch_size=BATCH
        )
    except RuntimeError:
        return works, "TorchRL's sum tree is built for another version of torch than is here"
    prioritized.extend(TensorDict(steps, [num]))
    priority = torch.rand(num)
    prioritized.update_priority(torch.arange(num), priority)

    def updated() -> int:
        for _ in range(10):
            batch = prioritized.sample()
            prioritized.update_priority(batch["index"], priority[:BATCH])
        return 10 * BATCH

    return {**works, "prioritized": _drawing(prioritized), "updated": updated}, ""


def _drawing(buffer: Any) -> Work:
    def work() -> int:
        for _ in range(10):
            buffer.sample()
        return 10 * BATCH

    return work
