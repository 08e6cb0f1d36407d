# SPDX-License-Identifier: Apache-2.0
"""The offline pipeline: batches from a stream, with each knob, what it holds in memory, and training from it."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    ETUDE,
    STEPS_A_SECOND,
    Figure,
    Options,
    Reach,
    Row,
    Work,
    expert,
    milliseconds,
    python,
    race,
    race_processes,
)

BATCH, BATCHES = 1024, 256
COLUMNS = ("obs", "action", "reward", "next_obs", "terminated")
GOAL = 5e6
KNOBS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "prefetch=0": {"prefetch": 0},
    "1 thread": {"num_workers": 1},
    "2 threads": {"num_workers": 2},
    "2 processes": {"num_workers": 2, "worker_kind": "processes"},
    "buffer of 16,384": {"buffer_size": 16_384},
    "buffer of 262,144": {"buffer_size": 262_144},
}


def rows(options: Options) -> Iterator[Row]:
    """Streaming, and what it costs."""
    path = synthetic(options, 100_000 if options.quick else 4_000_000)
    yield from _knobs(path, options)
    yield from _memory(options)
    yield from _training(options)


def synthetic(options: Options, num_steps: int) -> Path:
    """A recording of so many steps that look like CartPole's, in episodes of 500."""
    import gymnasium as gym

    from etude.experience import Experience, Segments
    from etude.recordings import RecordingWriter

    path = options.folder / f"steps-{num_steps}"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    box, two = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)
    episodes = 40
    rows = 500 * episodes
    with RecordingWriter(path, obs_space=box, action_space=two) as writer:
        for k in range(num_steps // rows):
            ids = [f"{k}-{i}" for i in range(episodes)]
            steps = {"obs": rng.normal(size=(rows, 4)).astype(np.float32), "action": rng.integers(2, size=rows)}
            steps["reward"] = np.ones(rows)
            segments = Segments.of(episodes, episode_id=ids, truncated=np.ones(episodes, bool))
            final = {"obs": rng.normal(size=(episodes, 4)).astype(np.float32)}
            writer.write(Experience(steps, np.arange(0, rows + 1, 500), segments, final))
    return path


def _knobs(path: Path, options: Options) -> Iterator[Row]:
    from benchmarks.data import scan
    from etude import Recording

    pipelines = {name: _pipeline(path, knobs) for name, knobs in KNOBS.items()}
    bare = "pyarrow scan"
    works: dict[str, Work] = {name: _taking(pipeline.batches()) for name, pipeline in pipelines.items()}
    works[bare] = partial(scan, Recording.open(path).files)
    rates = race(works, options)
    for pipeline in pipelines.values():
        pipeline.close()
    others = [Figure(name, rates[name], "etude") for name in KNOBS if name != "as it is"]
    yield Row(
        "streaming pipeline to shuffled batches of 1,024 (obs, action, reward, next_obs, done), strict",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates["as it is"], "etude"), *others, Figure(bare, rates[bare])],
        Reach(GOAL),
        "every step once an epoch; buffer of 65,536 where nothing else is said",
    )


def _pipeline(path: Path, knobs: dict[str, Any]) -> Any:
    from etude import Recording
    from etude.connectors import Pipeline
    from etude.recordings.pipeline import DataPipeline, Plan, Preparation, Steps

    prepare = Preparation(Pipeline([]), Pipeline([]))
    stored = ("obs", "action", "reward")
    source = Recording.open(path, on_bad="strict")
    plan = Plan(source=source, columns=stored, prepare=prepare, make=Steps(COLUMNS), batch_size=BATCH, **knobs)
    return DataPipeline(plan)


def _taking(batches: Iterator[Any]) -> Work:
    def work() -> int:
        return sum(len(batch["reward"]) for batch in itertools.islice(batches, BATCHES))

    return work


_STREAM = """
import itertools, time
import etude
begin = time.perf_counter()
algorithm = etude.BC(etude.BCConfig(data={path!r}, mode="stream", updates_per_iteration=1, seed=0))
algorithm.train()
print("first", time.perf_counter() - begin)
algorithm.fit(etude.Stop(updates={updates}))
"""


def _memory(options: Options) -> Iterator[Row]:
    sizes = [20_000, 200_000] if options.quick else [100_000, 1_000_000, 10_000_000]
    codes = {
        f"{size // 1000:,}k steps": _STREAM.format(path=str(synthetic(options, size)), updates=size // BATCH)
        for size in sizes
    }
    done = race_processes({name: (lambda _, code=code: python(code)) for name, code in codes.items()}, options)
    memory = {name: [finished.megabytes for finished in processes] for name, processes in done.items()}
    first, *_, last = memory
    yield Row(
        f"BC streaming an epoch of {last}: most memory held",
        "MB",
        [
            Figure(ETUDE, memory[last], "etude"),
            *(Figure(f"Etude, {name}", values, "etude") for name, values in memory.items() if name != last),
        ],
        Reach(1.25, f"Etude, {first}"),
        "importing torch and all else included",
    )


def _training(options: Options) -> Iterator[Row]:
    from etude import BC, MARWIL, BCConfig, MARWILConfig

    data = str(expert(options))
    made = {
        "BC": lambda mode: BC(BCConfig(data=data, mode=mode, updates_per_iteration=20, seed=0)),
        "MARWIL": lambda mode: MARWIL(MARWILConfig(data=data, mode=mode, updates_per_iteration=20, seed=0)),
    }
    for name, make in made.items():
        algorithms = {mode: make(mode) for mode in ("stream", "auto")}
        times = milliseconds(race({mode: _training_of(a) for mode, a in algorithms.items()}, options))
        for algorithm in algorithms.values():
            algorithm.close()
        yield Row(
            f"{name}, a gradient step of 1,024 steps with its data, streaming",
            "ms",
            [Figure(ETUDE, times["stream"], "etude"), Figure("Etude, in memory", times["auto"], "etude")],
            Reach(1.2, "Etude, in memory"),
        )


def _training_of(algorithm: Any) -> Work:
    def work() -> int:
        algorithm.train()
        return 20

    return work
