# SPDX-License-Identifier: Apache-2.0
import asyncio
import collections
import gc
import itertools
import os
import signal
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_jobs import blocked_signals, dies_at_5, fails_at_5, fails_in_two_words, fails_locked, square
from some_recording import ACTION, OBS, numbered, record

from etude.connectors import ClipAction, FrameStack, NormalizeObs, Pipeline
from etude.errors import DataError, EtudeError, SettingsError
from etude.experience import Experience
from etude.recordings import Recording
from etude.recordings.files import DataFile
from etude.recordings.pipeline import Cuts, DataPipeline, InMemory, LoadWorkers, Plan, Preparation, Steps, with_context

LENGTHS = [1, 9, 30, 4, 200, 17, 2, 60, 33, 120]
NUM_STEPS = sum(LENGTHS)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A recording of ten episodes in several files of at most 50 rows, which cut the longer ones."""
    path = tmp_path_factory.mktemp("pipeline") / "data"
    record(path, numbered(LENGTHS), max_rows_per_file=50)
    found = Recording.open(path)
    assert found.num_parts > 8
    return found


def untouched() -> Preparation:
    return Preparation(Pipeline([]), Pipeline([]))


def make(source: Any, size: float, make: Any = None, prepare: Preparation | None = None, **how: Any) -> DataPipeline:
    how = {"buffer_size": 64, "seed": 3} | how
    make = make or Steps(("obs", "action"))
    return DataPipeline(Plan(source=source, prepare=prepare or untouched(), make=make, batch_size=size, **how))


def taken(pipeline: DataPipeline, num: int, start: int = 0) -> list[Any]:
    batches = pipeline.batches(start)
    try:
        return [next(batches) for _ in range(num)]
    finally:
        pipeline.close()


def steps(batches: list[Any]) -> list[tuple[float, float]]:
    columns = [batch.steps if isinstance(batch, Experience) else batch for batch in batches]
    return [tuple(row[:2].tolist()) for batch in columns for row in batch["obs"]]


EVERY = sorted((float(i), float(t)) for i, length in enumerate(LENGTHS) for t in range(length))


@pytest.mark.parametrize("how", [{}, {"num_workers": 3}, {"prefetch": 0}, {"buffer_size": 10_000}, {"buffer_size": 1}])
def test_every_step_comes_once_an_epoch(recording: Recording, how: dict[str, Any]) -> None:
    size = 14  # of 476 steps, which are 34 batches
    batches = taken(make(recording, size, **how), 2 * NUM_STEPS // size)
    assert {len(batch["obs"]) for batch in batches} == {size}
    found = steps(batches)
    assert sorted(found[:NUM_STEPS]) == EVERY
    assert sorted(found[NUM_STEPS:]) == EVERY
    assert found[:NUM_STEPS] != found[NUM_STEPS:]


@pytest.mark.parametrize(
    "how", [{"num_workers": 1}, {"num_workers": 4}, {"num_workers": 2, "worker_kind": "processes"}, {"prefetch": 0}]
)
def test_the_order_depends_on_the_seed_alone(recording: Recording, how: dict[str, Any]) -> None:
    expected = steps(taken(make(recording, 20), 50))
    assert steps(taken(make(recording, 20, **how), 50)) == expected
    if "worker_kind" not in how:  # processes take seconds to start
        assert steps(taken(make(recording, 20, seed=4, **how), 50)) != expected


@pytest.mark.parametrize(
    ("roots", "connectors", "wanted"),
    [
        (("obs", "action"), [], False),
        (("obs", "action"), ["clip_action"], False),
        (("obs", "action"), ["frame_stack"], True),
        (("obs", "action", "next_obs"), [], True),
    ],
)
def test_what_follows_segments_is_decoded_only_where_it_is_asked_for(
    recording: Recording, roots: Any, connectors: list[str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = collections.Counter[str]()
    original = DataFile.read_group
    monkeypatch.setattr(DataFile, "read_group", lambda *args: read.update(args[2]) or original(*args))
    pipeline = Pipeline([{"frame_stack": FrameStack(2), "clip_action": ClipAction()}[name] for name in connectors])
    pipeline.spaces(OBS, ACTION)
    taken(make(recording, 14, Steps(roots), Preparation(pipeline, Pipeline([]))), NUM_STEPS // 14)
    assert read["obs"] > 0
    assert (read["final_obs"] > 0) == wanted


@pytest.mark.parametrize("hold", [True, False])
def test_memory_gives_what_the_disk_gives(recording: Recording, hold: bool) -> None:
    source = InMemory(recording.read(), 10_000 if hold else 50)
    found = steps(taken(make(source, NUM_STEPS // 4, hold_prepared=hold), 4))
    assert sorted(found) == EVERY


@pytest.mark.parametrize("start", [1, 10, 33, 40, 80])
def test_goes_on_where_a_run_before_stood(recording: Recording, start: int) -> None:
    first = make(recording, 14)
    expected = steps(taken(first, start + 5))[14 * start :]
    size = first.epoch_size if start > 34 else None  # within the first epoch, it need not be known
    assert steps(taken(make(recording, 14, epoch_size=size), 5, start)) == expected
    assert first.epoch_size in (NUM_STEPS, None)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_sequences_come_whole_and_each_once_an_epoch(recording: Recording, burn_in: int) -> None:
    pipeline = make(InMemory(recording.read()), 5, Cuts(8, burn_in), by_segments=True, hold_prepared=True)
    num = sum(-(-length // 8) for length in LENGTHS)
    batches = taken(pipeline, num // 5)
    seen = collections.Counter[tuple[float, float]]()
    for batch in batches:
        assert len(batch) == 5
        for exp in batch:
            lookback = int(exp.segments.lookback[0])
            first = exp.steps["obs"][0, :2]
            assert lookback == min(burn_in, first[1] + lookback)
            assert (np.diff(exp.steps["obs"][:, 1]) == 1).all()
            assert 1 <= exp.num_steps - lookback <= 8
            seen.update((float(row[0]), float(row[1])) for row in exp.steps["obs"][lookback:])
    assert max(seen.values()) == 1
    assert set(seen) <= set(EVERY)
    assert pipeline.epoch_size == num


@pytest.mark.parametrize("start", [0, 1, 7, 30, 100])
def test_batches_may_have_a_fraction_of_a_segment_on_average(recording: Recording, start: int) -> None:
    source, num = recording.read(), sum(-(-length // 8) for length in LENGTHS)

    def pipeline() -> DataPipeline:
        return make(InMemory(source), 2.56, Cuts(8), by_segments=True, epoch_size=num if start else None)

    batches = taken(pipeline(), 150)
    assert [len(batch) for batch in batches] == np.diff(np.floor(2.56 * np.arange(151))).tolist()
    together = Experience.concat(batches)
    assert len(together) == 2.56 * 150 > 5 * num
    for first in range(0, len(together) - num, num):
        assert sorted(steps([together[first : first + num]])) == EVERY
    assert steps(taken(pipeline(), 50, start)) == steps(batches[start : start + 50])


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), cut=st.integers(1, 12), context=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_what_connectors_can_not_know_is_not_trained_on(lengths: list[int], cut: int, context: int) -> None:
    """A frame stack of cut segments equals that of the whole episodes wherever it is trained on."""
    whole, stack = numbered(lengths), FrameStack(context + 1)
    stack.spaces(OBS, ACTION)
    expected = {(row[0], row[1]): seen for row, seen in zip(whole.steps["obs"], offline(stack, whole), strict=True)}
    pieces = with_context(whole.cut(cut), context)
    seen = offline(stack, pieces)
    trained = pieces.trained()
    for row, own in zip(pieces.steps["obs"][trained], seen[trained], strict=True):
        np.testing.assert_array_equal(own, expected[row[0], row[1]])
    lost = sum(
        min(context, len(range(at, min(at + cut, length)))) for length in lengths for at in range(cut, length, cut)
    )
    assert whole.num_steps - trained.sum() == lost


def offline(stack: FrameStack, exp: Experience) -> Any:
    return stack.offline(exp).steps["obs"]


def test_steps_that_cannot_be_trained_on_are_counted(recording: Recording) -> None:
    stack = Pipeline(["frame_stack:3"])
    stack.spaces(recording.obs_space, recording.action_space)
    pipeline = make(recording, 10, prepare=Preparation(stack, Pipeline([])))
    taken(pipeline, 60)
    cuts = sum((recording.part(k).segments.t_start > 0).sum() for k in range(recording.num_parts))
    assert cuts > 3
    assert 0 < pipeline.left_out <= 2 * cuts
    assert pipeline.epoch_size == NUM_STEPS - pipeline.left_out


def test_connectors_are_applied_by_all_workers_alike(recording: Recording) -> None:
    def filtered() -> Preparation:
        connectors = Pipeline([NormalizeObs()])
        connectors.spaces(recording.obs_space, recording.action_space)
        prepare = Preparation(connectors, Pipeline([]))
        for k in range(recording.num_parts):
            prepare.learn(0, recording.part(k))
        return prepare

    batches = [taken(make(recording, 28, prepare=filtered(), num_workers=n), 17) for n in (0, 2)]
    for a, b in zip(*batches, strict=True):
        np.testing.assert_array_equal(a["obs"], b["obs"])
    obs = np.concatenate([batch["obs"] for batch in batches[0]])
    np.testing.assert_allclose(obs.mean(0), 0, atol=1e-3)


def test_time_is_told_layer_by_layer(recording: Recording) -> None:
    pipeline = make(recording, 14, num_workers=2)
    taken(pipeline, 34)
    assert pipeline.spent.rows >= NUM_STEPS
    assert all(seconds > 0 for seconds in pipeline.spent.seconds.values()), pipeline.spent
    assert pipeline.spent.bytes > 0


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "kind"), [(0, "threads"), (3, "threads"), (2, "processes")])
@pytest.mark.usefixtures("forked_loaders")
def test_loaders_give_everything_in_order_and_errors_where_they_belong(workers: int, kind: Any) -> None:
    loaders = LoadWorkers(square, workers, kind)
    assert list(loaders.done(range(20))) == [n * n for n in range(20)]
    loaders.close()
    broken = LoadWorkers(fails_at_5, workers, kind)
    found = []
    with pytest.raises(DataError, match="part 5 is broken"):
        found.extend(broken.done(range(9)))
    broken.close()


class Ends(NormalizeObs):
    """A connector that ends what runs it, in the manner of code that was not written for threads."""

    kind: type[BaseException] = SystemExit

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        raise self.kind("out of fuel")


class IsCancelled(Ends):
    kind = asyncio.CancelledError


class Stops(Ends):
    kind = StopIteration


@pytest.mark.parametrize(
    ("connector", "flow"),
    [
        *itertools.product([Ends, IsCancelled, Stops], [{}, {"num_workers": 2}, {"hold_prepared": True}]),
        (Ends, {"num_workers": 1, "worker_kind": "processes"}),
    ],
)
@pytest.mark.usefixtures("forked_loaders")
def test_whatever_a_connector_raises_is_an_error_and_hangs_nobody(
    recording: Recording, flow: dict[str, Any], connector: type[Ends]
) -> None:
    pipeline = make(recording, 14, prepare=Preparation(Pipeline([connector()]), Pipeline([])), **flow)
    name = connector.kind.__name__
    kind, message = DataError, f"{name}: out of fuel"
    if connector is Stops:  # Python's own words, for a StopIteration in a generator
        kind, message = RuntimeError, name
    with pytest.raises(kind, match=message):
        taken(pipeline, 1)


def test_a_source_that_ends_its_thread_hangs_nobody(recording: Recording) -> None:
    class Source:
        is_in_memory, columns, num_parts = False, recording.columns, 9

        def part(self, k: int, columns: Any = None, *, finals: bool = True, next_obs: bool = False) -> Experience:
            if k == 4:
                sys.exit("the plant is closed")
            return recording.part(k, columns)

        def counts(self, k: int) -> None: ...
        def count(self, k: int, counts: Any) -> None: ...

    with pytest.raises(DataError, match="SystemExit: the plant is closed"):
        taken(make(Source(), 14, buffer_size=30), 100)


@pytest.mark.usefixtures("forked_loaders")
def test_a_worker_process_that_dies_is_an_error_that_says_so() -> None:
    loaders = LoadWorkers(dies_at_5, 2, "processes")
    with pytest.raises(EtudeError, match="a worker process that loads data died: it was killed, perhaps for lack"):
        list(loaders.done(range(9)))
    loaders.close()


def test_ctrl_c_can_not_end_a_worker_process_that_is_starting() -> None:
    loaders = LoadWorkers(blocked_signals, 1, "processes")
    assert list(loaders.done(range(1))) == [[signal.SIGINT]]
    loaders.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_worker_processes_import_nothing_from_the_folder_that_one_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("enum", "selectors", "signal", "pickle", "etude"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.touched').touch()\n")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    loaders = LoadWorkers(square, 1, "processes")
    assert list(loaders.done(range(3))) == [0, 1, 4]
    loaders.close()
    assert not list(tmp_path.glob("*.touched"))
    assert dict(os.environ) == before


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(
    ("job", "match"), [(fails_in_two_words, "TwoWordsError: out of order"), (fails_locked, "LockedError: no key")]
)
def test_an_error_that_no_other_process_can_read_is_told_with_its_traceback(job: Any, match: str) -> None:
    loaders = LoadWorkers(job, 1, "processes")
    with pytest.raises(DataError, match=rf"(?s)in a worker process: {match}\n.*loader_jobs.py.*raise \w+Error"):
        list(loaders.done(range(3)))
    loaders.close()


def test_a_crew_holds_few_ahead() -> None:
    asked: list[int] = []

    def note(number: int) -> int:
        asked.append(number)
        return number

    loaders = LoadWorkers(note, 2, "threads")
    done = loaders.done(range(100))
    assert next(done) == 0
    assert len(asked) <= 4
    loaders.close()


def test_threads_end_with_their_pipeline(recording: Recording) -> None:
    before = threading.active_count()
    pipeline = make(recording, 14, num_workers=2)
    batches = pipeline.batches()
    next(batches)
    assert threading.active_count() > before
    pipeline.close()
    assert threading.active_count() == before
    forgotten = make(recording, 14, num_workers=2)
    batches = forgotten.batches()
    next(batches)
    own = [t for t in threading.enumerate() if t.name.startswith("etude-")]
    del forgotten, batches, pipeline
    gc.collect()
    for thread in own:
        thread.join(60)
    assert own
    assert threading.active_count() == before


def test_what_processes_can_not_be_sent_is_named(recording: Recording) -> None:
    own = Preparation(Pipeline([]), Pipeline([]), own=lambda exp, connect: connect(exp))
    with pytest.raises(SettingsError, match="num_workers are processes, but this can't be sent"):
        make(recording, 4, prepare=own, num_workers=1, worker_kind="processes")


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_stays_within_the_bound_whatever_the_size_of_the_data(workers: int, tmp_path: Path) -> None:
    """The data is ten times what the pipeline may hold."""
    rows, buffer, part = 240_000, 2_000, 2_000
    exp = numbered([100] * (rows // 100))
    exp = exp.with_steps(x=np.zeros((rows, 50)))
    row = 50 * 8 + 3 * 4 + 8 + 8
    bound = (2 * (buffer + part) + (workers + 2) * part + 4 * buffer) * row  # as the page on the pipeline says, in rows
    record(tmp_path, exp, max_rows_per_file=part)
    pipeline = make(Recording.open(tmp_path), 100, Steps(("x", "obs")), buffer_size=buffer, num_workers=workers)
    del exp
    before, most_arrow = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for _ in itertools.islice(pipeline.batches(), rows // 200):
            most_arrow = max(most_arrow, pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1] + most_arrow
    finally:
        tracemalloc.stop()
        pipeline.close()
    assert peak < bound + 2**20, (peak, bound)
    assert rows * row >= 10 * bound


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, {"num_workers": 1, "worker_kind": "processes"}])
@pytest.mark.usefixtures("forked_loaders")
def test_what_was_left_out_as_bad_is_counted_once_wherever_it_was_read(how: dict[str, Any], tmp_path: Path) -> None:
    exp = numbered([20] * 10)
    exp.steps["obs"][[3, 44, 130], 1] = np.nan
    record(tmp_path, exp, max_rows_per_file=40)
    source = Recording.open(tmp_path, on_bad="skip")
    batches = taken(make(source, 20, **how), 3 * 7)
    assert source.left_out == {"nan": 60}
    assert len({row[0] for row in steps(batches)}) == 7


def test_batches_are_brought_to_the_device_ahead_of_the_learner(recording: Recording) -> None:
    moving: list[str] = []

    def to_device(batch: Any) -> Any:
        moving.append(threading.current_thread().name)
        return {name: torch.from_numpy(column) for name, column in batch.items()}

    flow = {"buffer_size": 64, "seed": 3}
    plan = Plan(source=recording, prepare=untouched(), make=Steps(("obs", "action")), batch_size=20, **flow)
    moved = DataPipeline(plan, to_device=to_device)
    there = taken(moved, 30)
    assert all(isinstance(column, torch.Tensor) for batch in there for column in batch.values())
    assert steps(there) == steps(taken(make(recording, 20), 30))
    assert {name.partition("_")[0] for name in moving} == {"etude-reader"}
