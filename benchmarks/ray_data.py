# SPDX-License-Identifier: Apache-2.0
"""From Parquet to batches of 1,024 through Ray Data: ours, bare Ray Data, and RLlib's where it can be imported.

Each contender is a process of its own with a cluster of its own. The clock starts with the request, when Ray runs, all
that this process needs is imported, and learners, if there are some, have started: with their own imports behind them.
What was measured is kept beside the recordings, in ``ETUDE_BENCH_KEEP`` where that names a folder: a run that was ended
goes on with what is missing.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ray_rllib
from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, python
from benchmarks.pipeline import synthetic

BATCH = 1024
LOCAL, READ, ACTORS = "Etude, local engine", "Ray Data, read only", "Ray Data, identity in an actor pool"
RLLIB = "RLlib OfflineData"
FIRST = 6.0
ROUNDS = 3
SMALL = 240_000
MEASURED = "measured:"
RLLIB_STEPS = 100_000
"""RLlib takes seconds for 100,000."""

_BEGIN = """
import os, re, threading, time
from pathlib import Path
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 2**20)
peak, done = [0.0], threading.Event()
def processes():
    parents, memory = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            text = path.read_text()
        except OSError:
            continue
        own = int(path.parent.name)
        parents[own] = int(re.search(r"PPid:.(\\d+)", text)[1])
        found = re.search(r"RssAnon:\\s+(\\d+)", text)
        memory[own] = int(found[1]) if found else 0
    for own, used in memory.items():
        parent = own
        while parent not in (0, os.getpid()):
            parent = parents.get(parent, 0)
        yield used if parent else 0
def watch():
    while not done.wait(0.2):
        peak[0] = max(peak[0], sum(processes()) / 2**10)
threading.Thread(target=watch, daemon=True).start()
def tell(batches, rows, begin):
    first, count = None, 0
    for batch in batches:
        first = first or time.perf_counter() - begin
        count += {batch}
        if count >= rows:
            break
    return first, count, time.perf_counter()
PATH, STEPS, NUM, MEASURED = {path!r}, {steps}, {num}, {marker!r}
"""

_END = """
begin, told = run()
first = max(one[0] for one in told)
rate = sum(one[1] for one in told) / (max(one[2] for one in told) - begin)
steady = sum(one[1] for one in told) / (max(one[2] for one in told) - begin - first + 1e-9)
done.set()
print(f"{MEASURED} {first} {rate} {steady} {peak[0]}")
ray.shutdown()
"""

_OURS = """
import etude
from etude.algorithms import Ray
from etude.ray.data import open_shards
config = etude.{kind}Config(data=PATH, mode="stream", batch_size={batch} * max(1, NUM), seed=0)
algorithm = etude.{kind}(config)
@ray.remote(num_cpus=0)
class Learner:
    def __init__(self, spaces):
        import etude.ray.data
        self.algorithm = etude.{kind}(config, saved_spaces=spaces)
    def ready(self):
        return True
    def take(self, shard, rows, begin):
        return tell(etude.ray.data.feeds_of(shard, self.algorithm)["main"].take(10**9), rows, begin)
learners = [Learner.remote(algorithm.module_spaces()) for _ in range(NUM)]
ray.get([learner.ready.remote() for learner in learners])
def run():
    begin = time.perf_counter()
    shards = open_shards(algorithm, Ray(num_learners=NUM))
    taking = [learner.take.remote(shard, STEPS // NUM, begin) for learner, shard in zip(learners, shards)]
    return begin, ray.get(taking)
"""

_LOCAL = """
import etude
algorithm = etude.BC(etude.BCConfig(data=PATH, mode="stream", batch_size={batch}, seed=0))
def run():
    begin = time.perf_counter()
    return begin, [tell(algorithm.opened_feeds()["main"].take(10**9), STEPS, begin)]
"""

_BARE = """
ray.data.DataContext.get_current().enable_progress_bars = False
class Identity:
    def __call__(self, batch):
        return batch
@ray.remote(num_cpus=0)
class Learner:
    def ready(self):
        import ray.data
        return True
    def take(self, split, rows, begin):
        return tell(split.iter_batches(batch_size={batch}, batch_format="numpy"), rows, begin)
learners = [Learner.remote() for _ in range(NUM)]
ray.get([learner.ready.remote() for learner in learners])
def run():
    begin = time.perf_counter()
    found = ray.data.read_parquet(PATH, file_extensions=["parquet"], columns=["obs", "action"])
    if {actors}:
        found = found.map_batches(Identity, compute=ray.data.ActorPoolStrategy(size=1))
    splits = found.streaming_split(NUM, equal=True)
    taking = [learner.take.remote(split, STEPS // NUM - {batch}, begin) for learner, split in zip(learners, splits)]
    return begin, ray.get(taking)
"""

_RLLIB = """
import numpy as np
import gymnasium as gym
from ray.rllib.algorithms.{kind_lower} import {kind}Config
from ray.rllib.core.columns import Columns
from ray.rllib.offline.offline_data import OfflineData
box = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
schema = {Columns.OBS: "obs", Columns.ACTIONS: "action", Columns.REWARDS: "reward", Columns.EPS_ID: "episode_id"}
schema |= {Columns.NEXT_OBS: "obs", Columns.TERMINATEDS: "terminated", Columns.TRUNCATEDS: "truncated"}  # it wants them
config = (
    {kind}Config()
    .environment(observation_space=box, action_space=gym.spaces.Discrete(2))
    .offline_data(
        input_=[str(path) for path in sorted(Path(PATH).glob("*.parquet"))],
        input_read_schema=schema,
        input_read_method_kwargs={"columns": sorted(set(schema.values()))},  # of others, it makes columns, too
        dataset_num_iters_per_learner=1,
        map_batches_kwargs={"concurrency": 1},  # two, as it would take, leave none of 2 CPUs to those that read
    )
    .training(train_batch_size_per_learner={batch})
)
algorithm = config.build_algo()
def run():
    begin = time.perf_counter()
    first, count = None, 0
    while count < STEPS:
        batch = algorithm.offline_data.sample(num_samples={batch}, num_shards=0)
        first = first or time.perf_counter() - begin
        count += batch.env_steps()
    return begin, [(first, count, time.perf_counter())]
"""


def rows(options: Options) -> Iterator[Row]:
    """250k and 10 M steps, to one learner and to two."""
    if not ray_rllib.is_there():
        print(f"ray-data: without {RLLIB}, which can't be imported here", file=sys.stderr)
    keep = os.environ.get("ETUDE_BENCH_KEEP")
    if keep:
        options = dataclasses.replace(options, folder=Path(keep))
        options.folder.mkdir(parents=True, exist_ok=True)
    yield from _module_rows(SMALL if options.quick else 1_000_000, options)
    for steps in [SMALL] if options.quick else [SMALL, 10_000_000]:
        path = synthetic(options, steps)
        for num in (1, 2):
            yield from _rows(path, steps, num, options)


def _module_rows(steps: int, options: Options) -> Iterator[Row]:
    """MARWIL, whose advantages ask the module for values; RLlib's whole epoch, too."""
    codes = {ETUDE: _code(_OURS, "MARWIL")}
    peers = {RLLIB: _code(_RLLIB, "MARWIL")} if ray_rllib.is_there() else {}
    found = _found(synthetic(options, steps), steps, 1, {**codes, **peers}, options, f"marwil-{steps}", steps)
    to = f"{steps / 1e6:g} M steps through Ray Data with a prelearner that asks the module (MARWIL)"
    yield Row(
        f"{to}, an epoch from the first request",
        STEPS_A_SECOND,
        _figures(found, 1),
        Reach(10.0, RLLIB) if peers else None,
    )
    yield Row(f"{to}: first batch", "s", _figures(found, 0), Reach(FIRST))


def _code(code: str, kind: str = "BC") -> str:
    """With the algorithm whose connectors prepare the batches."""
    return code.replace("{kind_lower}", kind.lower()).replace("{kind}", kind)


def _codes(num: int) -> dict[str, str]:
    bare = {READ: _BARE.replace("{actors}", "False"), ACTORS: _BARE.replace("{actors}", "True")}
    peers = (
        {RLLIB: _code(_RLLIB)} if ray_rllib.is_there() and num == 1 else {}
    )  # of 10 M steps, the first batch takes it 7 minutes
    return {ETUDE: _code(_OURS), **({LOCAL: _LOCAL} if num == 1 else {}), **bare, **peers}


def _found(
    path: Path, steps: int, num: int, codes: dict[str, str], options: Options, name: str, most: int = RLLIB_STEPS
) -> dict[str, list[list[float]]]:
    """What was measured, by contender, run by run, and kept; RLlib once, over ``most`` steps."""
    kept = options.folder / f"ray-data-{name}.json"
    found: dict[str, list[list[float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for i in range(1 if options.quick else ROUNDS):
        for who, code in codes.items():
            done = found.setdefault(who, [])
            if len(done) > i or (who == RLLIB and i):
                continue
            done.append(_measured(path, min(steps, most) if who == RLLIB else steps, num, code))
            kept.write_text(json.dumps(found))
    return found


def _rows(path: Path, steps: int, num: int, options: Options) -> Iterator[Row]:
    found = _found(path, steps, num, _codes(num), options, f"{steps}-{num}")
    to = f"{steps / 1e6:g} M steps through Ray Data to {f'{num} learners' if num > 1 else 'a learner'}"
    yield Row(
        f"{to}, an epoch from the first request",
        STEPS_A_SECOND,
        _figures(found, 1),
        Reach(0.8, READ),
        f"batches of 1,024: ours shuffled, Ray Data's not; RLlib's rate is over {RLLIB_STEPS:,} steps",
    )
    yield Row(f"{to}: first batch", "s", _figures(found, 0), Reach(FIRST), "Ray is running; its workers are not warm")
    yield Row(f"{to}: once the first batch is there", STEPS_A_SECOND, _figures(found, 2))
    yield Row(
        f"{to}: most memory of all processes",
        "MB",
        _figures(found, 3),
        note="but the object store, which is 512 MB at most",
    )


def _measured(path: Path, steps: int, num: int, code: str) -> list[float]:
    """Seconds to the first batch, steps a second with and without these, and MB."""
    begin = (
        _BEGIN.replace("{batch}", "len(batch['action'])")
        .replace("{path!r}", repr(str(path)))
        .replace("{steps}", str(steps))
        .replace("{num}", str(num))
        .replace("{marker!r}", repr(MEASURED))
    )
    lines = python(begin + code.replace("{batch}", str(BATCH)) + _END).out.splitlines()
    (line,) = (line for line in lines if line.startswith(MEASURED))  # Ray prints other lines, even after it
    return [float(text) for text in line.split()[1:]]


def _figures(found: dict[str, list[list[float]]], i: int) -> list[Figure]:
    return [
        Figure(name, [run[i] for run in runs], "etude" if not k else "peer" if name == RLLIB else "limit")
        for k, (name, runs) in enumerate(found.items())
    ]
