# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of SAC with a replay of a million steps: how long they take, and how large they are."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row

PENDULUM = "Pendulum-v1"
LENGTH = 200
"""Of its episodes."""
SB3, SAVE_REACH = "SB3, save and save_replay_buffer", 0.5
FLUSHED = "SB3, then flushed to the disk, as Etude's is"
SB3_LOAD, LOAD_REACH = "SB3, load and load_replay_buffer", 0.5
RAW, SIZE_REACH = "steps, weights and moments as raw numbers", 1.05
WORK = "checkpoint of SAC with a replay of {:,} steps: "


def rows(options: Options) -> Iterator[Row]:
    """Saving and loading in turns, and the size on the disk."""
    import etude
    from etude.files import sync

    steps = 50_000 if options.quick else 1_000_000
    ours, raw = _ours(steps)
    theirs, saved = _theirs(steps), options.folder / "sb3"
    saved.mkdir(exist_ok=True)
    path = options.folder / "checkpoint"

    def save_theirs() -> None:
        theirs.save(saved / "model")
        theirs.save_replay_buffer(saved / "buffer")

    def flush_theirs() -> None:
        save_theirs()
        for file in saved.iterdir():
            sync(file)

    def load_theirs() -> None:
        type(theirs).load(saved / "model", device="cpu").load_replay_buffer(saved / "buffer")

    work = WORK.format(steps)
    times = _in_turns({ETUDE: lambda: ours.save(path), SB3: save_theirs, FLUSHED: flush_theirs}, options)
    figures = [Figure(ETUDE, times[ETUDE], "etude"), *(Figure(name, times[name], "peer") for name in (SB3, FLUSHED))]
    note = "Etude waits until it is on the disk; SB3 by itself does not"
    yield Row(f"{work}save", "ms", figures, Reach(SAVE_REACH, SB3), note)
    times = _in_turns({ETUDE: lambda: etude.load(path).close(), SB3_LOAD: load_theirs}, options)
    figures = [Figure(ETUDE, times[ETUDE], "etude"), Figure(SB3_LOAD, times[SB3_LOAD], "peer")]
    yield Row(f"{work}load", "ms", figures, Reach(LOAD_REACH, SB3_LOAD))
    figures = [Figure(ETUDE, [_megabytes(path)], "etude"), Figure(RAW, [raw]), Figure(SB3, [_megabytes(saved)], "peer")]
    yield Row(f"{work}size", "MB", figures, Reach(SIZE_REACH, RAW), "SB3 keeps the next observations, too")


def _ours(steps: int) -> tuple[Any, float]:
    """SAC with a full replay, and the megabytes of its steps, weights and optimizers."""
    import etude
    from etude.algorithms.sac import SAC, SACConfig
    from etude.experience import Experience, Segments

    algorithm = SAC(SACConfig(env=PENDULUM, seed=0, capacity=steps))
    rng, num = np.random.default_rng(0), steps // LENGTH
    columns = {
        "obs": rng.standard_normal((steps, 3), np.float32),
        "action": rng.standard_normal((steps, 1), np.float32),
        "reward": rng.standard_normal(steps, np.float32),
    }
    final_obs = {"obs": rng.standard_normal((num, 3), np.float32)}
    segments = Segments.of(num, episode_id=[f"{i:016x}-0-{i}" for i in range(num)], truncated=np.ones(num, bool))
    offsets = np.arange(0, steps + 1, LENGTH)
    assert isinstance(algorithm, etude.Algorithm)
    algorithm.replays["main"].add(Experience(columns, offsets, segments, final_obs))
    assert algorithm.replays["main"].num_steps == steps
    state = algorithm.get_state(["modules", "optimizers"])
    tensors = [state["modules/main"]["weights"], *state["optimizers/main"].values()]
    arrays = [*columns.values(), *final_obs.values(), *(tensor for some in tensors for tensor in some.values())]
    flags = steps  # a byte each that says where an episode ends, as a plain table of steps would have it
    return algorithm, (flags + sum(array.nbytes for array in arrays)) / 1e6


def _theirs(steps: int) -> Any:
    """SB3's SAC with a full replay buffer."""
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", PENDULUM, buffer_size=steps, device="cpu", seed=0)
    rng, buffer = np.random.default_rng(0), model.replay_buffer
    assert buffer is not None
    for name in ("observations", "next_observations", "actions"):
        column = getattr(buffer, name)
        column[:] = rng.standard_normal(column.shape, np.float32)
    buffer.rewards[:] = rng.standard_normal(buffer.rewards.shape, np.float32)
    buffer.pos, buffer.full = 0, True
    return model


def _in_turns(works: dict[str, Callable[[], None]], options: Options) -> dict[str, list[float]]:
    """Milliseconds of each, round after round, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(options.rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
