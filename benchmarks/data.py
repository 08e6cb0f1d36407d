# SPDX-License-Identifier: Apache-2.0
"""Recordings: batches from Parquet and from memory, and what it costs to record."""

import itertools
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import ENV, ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, expert, race

BATCH = 1024
COLUMNS = ("obs", "action", "reward", "next_obs", "terminated")
SCAN, PARQUET_REACH = "pyarrow scan", 5 / 13.5
TAKE, MEMORY_REACH = "np.take of 5 columns", 20 / 80
ALONE, RECORDING_REACH = "sampling alone", 0.9


def parquet(options: Options) -> Iterator[Row]:
    """Shuffled batches of 1,024 from Parquet, on and on; beside reading the same columns in order, unshuffled."""
    from etude import Recording

    recording = Recording.open(expert(options))
    batches = recording.batches(BATCH, columns=COLUMNS)
    rates = race({ETUDE: _taking(batches), SCAN: lambda: scan(recording.files)}, options)
    yield Row(
        "Parquet to shuffled batches of 1,024 (obs, action, reward, next_obs, done)",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(SCAN, rates[SCAN])],
        Reach(PARQUET_REACH, SCAN),
        f"{recording.num_steps:,} steps; buffer of 65,536; every step once an epoch",
    )


def _taking(batches: Iterator[Mapping[str, Any]]) -> Work:
    def work() -> int:
        return sum(len(batch["reward"]) for batch in itertools.islice(batches, 32))

    return work


def scan(files: list[Path]) -> int:
    """Read all columns in order, into contiguous NumPy arrays: next_obs is in them as obs and final_obs."""
    rows = 0
    for path in files:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            for column in table.combine_chunks().columns:
                values = column.chunk(0)
                if pa.types.is_fixed_size_list(values.type):
                    values = values.flatten()
                if pa.types.is_primitive(values.type):
                    values.to_numpy(zero_copy_only=False)
            rows += table.num_rows
    return rows


def memory(options: Options) -> Iterator[Row]:
    """Random batches of 1,024 from 250,000 steps in memory."""
    from benchmarks import sb3
    from etude import Recording
    from etude.recordings import sample_batches

    exp = Recording.open(expert(options)).read()
    columns = {name: exp.steps[name] for name in ("obs", "action", "reward")}
    columns |= {"next_obs": exp.next_obs()["obs"], "done": exp.at_ends(exp.segments.terminated)}
    drawn = np.random.default_rng(0).integers(exp.num_steps, size=(64, BATCH))

    def take() -> int:
        for rows in drawn:
            _ = {name: column.take(rows, axis=0) for name, column in columns.items()}
        return drawn.size

    peer = "SB3 ReplayBuffer"
    works = {
        ETUDE: _taking(sample_batches(exp, BATCH, columns=COLUMNS)),
        TAKE: take,
        peer: sb3.replaying(columns, BATCH),
    }
    rates = race(works, options)
    yield Row(
        f"random batches of 1,024 from {exp.num_steps // 1000}k steps in memory",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(TAKE, rates[TAKE]), Figure(peer, rates[peer], "peer")],
        Reach(MEMORY_REACH, TAKE),
        "Etude's are without replacement, every step once an epoch; np.take's rows are drawn before",
    )


def recording(options: Options) -> Iterator[Row]:
    """Sampling with a writer beside sampling without, the end of the writing included."""
    for num_envs, steps in ((1, 20_000), (8, 200_000), (64, 1_000_000)):
        num_steps = steps // 10 if options.quick else steps
        bare = "bare loop + pyarrow"
        works = {
            ETUDE: _recording(num_envs, num_steps, options.folder / f"recorded-{num_envs}"),
            ALONE: _recording(num_envs, num_steps, None),
        }
        if num_envs == 1:
            works[bare] = partial(_bare_recording, num_steps, options.folder / "bare.parquet")
        rates = race(works, options)
        others = [Figure(name, rates[name]) for name in works if name != ETUDE]
        yield Row(
            f"recording {ENV} to Parquet, {num_envs} env{'s' if num_envs > 1 else ''}",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[ETUDE], "etude"), *others],
            Reach(RECORDING_REACH, ALONE),
            f"{num_steps:,} steps a recording"
            + ("; the bare loop draws nothing and has no value" if num_envs == 1 else ""),
        )

    yield _recorded_expert(options)


def _recorded_expert(options: Options) -> Row:
    """What `etude record` does beside what `etude evaluate` does."""
    import etude

    expert(options)
    algorithm = etude.load(options.folder / "run")
    episodes = 20 if options.quick else 200
    path = options.folder / "recorded-expert"

    def record() -> int:
        shutil.rmtree(path, ignore_errors=True)
        return algorithm.record(path, episodes, seed=1).env_steps

    evaluate = "Algorithm.evaluate"
    rates = race({ETUDE: record, evaluate: lambda: algorithm.evaluate(episodes, seed=1).env_steps}, options)
    return Row(
        f"Algorithm.record of a {ENV} expert, {episodes} episodes",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(evaluate, rates[evaluate])],
        Reach(RECORDING_REACH, evaluate),
    )


def _recording(num_envs: int, num_steps: int, path: Path | None) -> Work:
    """A runner as training uses it, with or without a writer."""
    from benchmarks.sampling import TURNS
    from etude import RecordingWriter, Runner, make_arena
    from etude.modules import make_module

    arena = make_arena(ENV, num_envs)
    kind = arena.kinds[0]
    runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0)
    at_a_time = TURNS[num_envs] * num_envs
    collections = -(-num_steps // at_a_time)

    def alone() -> int:
        return sum(runner.collect(num_steps=at_a_time).num_steps for _ in range(collections))

    def recorded() -> int:
        assert path is not None
        shutil.rmtree(path, ignore_errors=True)
        kept = ("obs", "action", "reward", "logp")
        with RecordingWriter(path, obs_space=kind.obs_space, action_space=kind.action_space, columns=kept) as writer:
            for _ in range(collections):
                writer.write(runner.collect(num_steps=at_a_time))
        return collections * at_a_time

    return alone if path is None else recorded


def _bare_recording(num_steps: int, path: Path) -> int:
    """One plain env, a NumPy policy, lists of what was seen, one Parquet file at the end."""
    from benchmarks.sampling import numpy_policy

    env = gym.make(ENV)
    policy = numpy_policy(1)
    steps: dict[str, list[Any]] = {name: [] for name in ("obs", "action", "reward", "terminated", "truncated")}
    obs, _ = env.reset(seed=0)
    for _ in range(num_steps):
        action = policy(obs[None])[0]
        following, reward, terminated, truncated, _ = env.step(action)
        for name, value in zip(steps, (obs, action, reward, terminated, truncated), strict=True):
            steps[name].append(value)
        obs = env.reset()[0] if terminated or truncated else following
    flat = pa.array(np.stack(steps.pop("obs")).reshape(-1))
    columns = {name: pa.array(np.array(values)) for name, values in steps.items()}
    table = pa.table({"obs": pa.FixedSizeListArray.from_arrays(flat, 4), **columns})
    pq.write_table(table, path, compression="zstd", compression_level=1, use_dictionary=False)
    return num_steps
