# SPDX-License-Identifier: Apache-2.0
"""From Parquet to batches of 1,024 through Ray Data: ours, bare Ray Data, and RLlib's where it is installed."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, python
from benchmarks.pipeline import synthetic

BATCH = 1024
LOCAL, READ, ACTORS = "Etude, local engine", "Ray Data, read only", "Ray Data, identity in an actor pool"
FIRST = 6.0

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
PATH, STEPS, NUM = {path!r}, {steps}, {num}
"""

_END = """
begin, told = run()
first = max(one[0] for one in told)
rate = sum(one[1] for one in told) / (max(one[2] for one in told) - begin)
steady = sum(one[1] for one in told) / (max(one[2] for one in told) - begin - first + 1e-9)
done.set()
print(first, rate, steady, peak[0])
ray.shutdown()
"""

_OURS = """
import etude
from etude.algorithms.engines import Ray
from etude.ray.data import open_feeds, open_shards
config = etude.BCConfig(data=PATH, mode="stream", batch_size={batch} * max(1, NUM), seed=0)
algorithm = etude.BC(config)
@ray.remote(num_cpus=0)
class Learner:
    def __init__(self, shard, spaces):
        self.feed = shard.feeds(etude.BC(config, saved_spaces=spaces))["main"]
    def take(self, rows, begin):
        return tell(self.feed.take(10**9), rows, begin)
def run():
    begin = time.perf_counter()
    if not NUM:
        return begin, [tell(open_feeds(algorithm, Ray())["main"].take(10**9), STEPS, begin)]
    shards = open_shards(algorithm, Ray(num_learners=NUM))
    learners = [Learner.remote(shard, algorithm.module_spaces()) for shard in shards]
    return begin, ray.get([learner.take.remote(STEPS // NUM, begin) for learner in learners])
"""

_LOCAL = """
import etude
algorithm = etude.BC(etude.BCConfig(data=PATH, mode="stream", batch_size={batch}, seed=0))
def run():
    begin = time.perf_counter()
    return begin, [tell(algorithm._opened()["main"].take(10**9), STEPS, begin)]
"""

_BARE = """
ray.data.DataContext.get_current().enable_progress_bars = False
class Identity:
    def __call__(self, batch):
        return batch
@ray.remote(num_cpus=0)
def take(split, rows, begin):
    return tell(split.iter_batches(batch_size={batch}, batch_format="numpy"), rows, begin)
def run():
    begin = time.perf_counter()
    found = ray.data.read_parquet(PATH, file_extensions=["parquet"], columns=["obs", "action"])
    if {actors}:
        found = found.map_batches(Identity, compute=ray.data.ActorPoolStrategy(size=1))
    if not NUM:
        return begin, [tell(found.iter_batches(batch_size={batch}, batch_format="numpy"), STEPS, begin)]
    splits = found.streaming_split(NUM, equal=True)
    return begin, ray.get([take.remote(split, STEPS // NUM - {batch}, begin) for split in splits])
"""


def rows(options: Options) -> Iterator[Row]:
    """250k and 10 M steps, to this process, and to two learners."""
    for steps in [240_000] if options.quick else [240_000, 10_000_000]:
        path = synthetic(options, steps)
        for num in (0, 2):
            yield from _one(path, steps, num, options)


def _one(path: Path, steps: int, num: int, options: Options) -> Iterator[Row]:
    bare = {READ: _BARE.replace("{actors}", "False"), ACTORS: _BARE.replace("{actors}", "True")}
    codes = {ETUDE: _OURS, **({} if num else {LOCAL: _LOCAL}), **bare}
    found: dict[str, list[list[float]]] = {name: [] for name in codes}
    for _ in range(1 if options.quick else 3):
        for name, code in codes.items():
            count = "len(batch['action'])"
            begin = (
                _BEGIN.replace("{batch}", count)
                .replace("{path!r}", repr(str(path)))
                .replace("{steps}", str(steps))
                .replace("{num}", str(num))
            )
            out = python(begin + code.replace("{batch}", str(BATCH)) + _END).out
            found[name].append([float(text) for text in out.split()[-4:]])
    to = f"{steps / 1e6:g} M steps through Ray Data to {'this process' if not num else f'{num} learners'}"
    yield Row(
        f"{to}, an epoch from the first request",
        STEPS_A_SECOND,
        _figures(found, 1),
        Reach(0.8, READ),
        "batches of 1,024: ours shuffled, Ray Data's not",
    )
    yield Row(f"{to}: first batch", "s", _figures(found, 0), Reach(FIRST), "Ray is running; its workers are not warm")
    yield Row(f"{to}: once the first batch is there", STEPS_A_SECOND, _figures(found, 2))
    yield Row(
        f"{to}: most memory of all processes",
        "MB",
        _figures(found, 3),
        note="but the object store, which is 512 MB at most",
    )


def _figures(found: dict[str, list[list[float]]], i: int) -> list[Figure]:
    return [
        Figure(name, [run[i] for run in runs], "etude" if "Etude" in name else "limit") for name, runs in found.items()
    ]
