# SPDX-License-Identifier: Apache-2.0
import gc
import itertools
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import CancelledError

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import numbered, record, record_format_1

from etude.errors import DataError
from etude.recordings import Recording, sample_batches
from etude.recordings.batches import Prefetched

ALL = ["obs", "action", "reward", "next_obs", "terminated", "truncated"]


def ids(batches):
    """The number that each step's observation carries, end to end."""
    return np.concatenate([batch["obs"][:, 2] for batch in batches]).astype(int).tolist()


def check_rows(batch):
    """Every row is one true step: next_obs is of the same episode and one later."""
    obs, following = batch["obs"], batch["next_obs"]
    np.testing.assert_array_equal(following[:, 0], obs[:, 0])
    np.testing.assert_array_equal(following[:, 1], obs[:, 1] + 1)
    np.testing.assert_array_equal(batch["action"], obs[:, 1] % 7)
    np.testing.assert_allclose(batch["reward"], obs[:, 0] + obs[:, 1] / 1000)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    per_file=st.integers(1, 40),
    rows=st.integers(1, 30),
    batch_size=st.integers(1, 25),
    buffer_size=st.integers(1, 100),
    lookback=st.integers(0, 4),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 2),
)
def test_every_step_once_an_epoch_with_its_own_next_obs(
    tmp_path_factory, lengths, per_file, rows, batch_size, buffer_size, lookback, shuffle, prefetch
):
    folder = tmp_path_factory.mktemp("r")
    exp = numbered([n + lookback for n in lengths], lookback=lookback)
    if lookback:  # only format 1 has it
        folder /= "r"
        record_format_1(folder, exp, rows_per_file=per_file)
    else:
        record(folder, exp, max_rows_per_file=per_file)
    for path in folder.glob("*.parquet"):  # row groups that cut through segments, as other tools may leave them
        pq.write_table(pq.read_table(path), path, row_group_size=rows)
    options = {"columns": ALL, "shuffle": shuffle, "buffer_size": buffer_size, "prefetch": prefetch}
    batches = list(Recording.open(folder).batches(batch_size, epochs=3, **options))
    total = sum(lengths)
    assert [len(b["obs"]) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert sum(len(b["obs"]) for b in batches) == 3 * total
    seen, wanted = ids(batches), exp.steps["obs"][exp.trained()][:, 2].astype(int).tolist()
    for epoch in range(3):
        given_order = seen[epoch * total : (epoch + 1) * total]
        assert (sorted(given_order) if shuffle else given_order) == wanted
    last = {int(e): n + lookback - 1 for e, n in enumerate(lengths)}
    for batch in batches:
        check_rows(batch)
        is_last = np.array([last[int(e)] for e in batch["obs"][:, 0]]) == batch["obs"][:, 1]
        np.testing.assert_array_equal(batch["terminated"], is_last & (batch["obs"][:, 0] % 2 == 0))
        np.testing.assert_array_equal(batch["truncated"], is_last & (batch["obs"][:, 0] % 2 == 1))


@pytest.fixture
def recording(tmp_path):
    record(tmp_path, numbered([20] * 30), max_rows_per_file=60)
    return Recording.open(tmp_path)


def test_the_seed_decides_the_order_and_epochs_differ(recording):
    def run(seed, **options):
        return ids(recording.batches(50, seed=seed, epochs=2, buffer_size=100, **options))

    first = run(1)
    assert run(1, prefetch=0) == first
    assert run(2) != first
    assert first[:600] != first[600:]
    assert first[:600] != sorted(first[:600])


@pytest.mark.parametrize("buffer_size", [1, 100, 10_000])
@pytest.mark.parametrize("start", [1, 11, 12, 13, 30])
def test_start_goes_on_where_an_earlier_iterator_was(recording, buffer_size, start):
    def run(**options):
        return ids(itertools.islice(recording.batches(50, seed=3, buffer_size=buffer_size, **options), 10))

    whole = ids(itertools.islice(recording.batches(50, seed=3, buffer_size=buffer_size), start + 10))
    assert run(start=start) == whole[start * 50 :]


def test_the_buffer_mixes_episodes_and_all_fits_in_it(recording):
    batch = next(recording.batches(100, buffer_size=10_000))
    assert len(set(batch["obs"][:, 0])) > 20


def test_batches_never_end_and_are_exact_across_epochs(recording):
    batches = list(itertools.islice(recording.batches(70, columns=["obs"]), 100))
    assert {len(b["obs"]) for b in batches} == {70}
    assert sorted(ids(batches)[:600]) == sorted(ids(batches)[600:1200])


def test_batches_may_be_written_to(recording):
    for shuffle in (True, False):
        for batch in recording.batches(50, shuffle=shuffle, epochs=1, columns=ALL):
            for column in batch.values():
                column[:] = 0
    assert Recording.open(recording.path).read().steps["obs"].any()


def test_the_thread_ends_with_the_iterator(recording):
    for end in ("deleted", "closed", "exhausted"):
        batches = recording.batches(10, epochs=1 if end == "exhausted" else None, prefetch=1)
        next(batches)
        threads = [t for t in threading.enumerate() if t.name.startswith("etude-reader")]
        assert threads
        if end == "closed":
            batches.close()
        elif end == "exhausted":
            list(batches)
        else:
            del batches
            gc.collect()
        for thread in threads:
            thread.join(60)  # it ends by itself
            assert not thread.is_alive()


def test_garbage_collection_does_not_wait_for_threads():
    begun, may_end = threading.Event(), threading.Event()

    def items():
        begun.set()
        may_end.wait(60)  # as long as garbage collection keeps the thread that it waits for from ending, for example
        yield 1

    ahead = Prefetched(items(), 1)
    begun.wait(60)
    thread = next(t for t in threading.enumerate() if t.name.startswith("etude-reader"))
    del ahead
    gc.collect()
    assert thread.is_alive()
    may_end.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_process_ends_although_its_reader_waits_for_ever():
    """As a learner whose cluster is gone, and whose blocks don't come any more."""
    code = (
        "import threading\nfrom etude.recordings.batches import Prefetched\n"
        "def items():\n    yield 1\n    threading.Event().wait()\n"
        "ahead = Prefetched(items(), 1)\nprint(next(ahead))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (out.stdout, out.stderr) == ("1\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("at", ["the second item", "any time"])
def test_ctrl_c_does_not_wait_for_the_reader(at):
    wait = "taken.wait()" if at == "the second item" else "pass"
    code = (
        "import os, signal, threading\nfrom etude.recordings.batches import Prefetched\n"
        "def interrupt(signum, frame):\n"
        "    called = []\n"
        "    while frame is not None:\n        called.append(frame.f_code.co_name)\n        frame = frame.f_back\n"
        "    if 'result' in called:\n"  # the main thread waits for the reader
        "        signal.signal(signal.SIGINT, signal.SIG_IGN)\n        raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGINT, interrupt)\n"  # ignored where the tests run in the background
        "taken = threading.Event()\n"
        # Again and again: a signal just before Python begins to wait is only seen after the wait.
        f"def items():\n    yield 1\n    {wait}\n"
        "    while not threading.Event().wait(0.01):\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "ahead = Prefetched(items(), 1)\n"
        "try:\n    next(ahead)\n    taken.set()\n    next(ahead)\n"
        "except KeyboardInterrupt:\n    print('interrupted', list(ahead), flush=True)\n    os._exit(3)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (out.returncode, out.stdout) == (3, "interrupted []\n")


def test_a_process_with_an_open_iterator_ends(recording):
    code = (
        "from etude.recordings import Recording\n"
        f"b = Recording.open({str(recording.path)!r}).batches(10)\nnext(b)\nprint('done')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (out.stdout, out.stderr) == ("done\n", "")


def test_a_reader_that_fails_is_told_where_the_batch_is_taken(recording):
    path = recording.files[-1]
    data = bytearray(path.read_bytes())
    data[4:700] = bytes(696)
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path.name}: row group 0 can't be read"):
        list(recording.batches(10, epochs=1))


def test_next_obs_that_was_not_recorded_is_named(tmp_path):
    record(tmp_path, numbered([3]), numbered([4], first=2, has_final_obs=False, terminated=False, truncated=True))
    recording = Recording.open(tmp_path)
    assert len(ids(recording.batches(7, epochs=1))) == 7
    with pytest.raises(
        DataError, match=r"part-00000\.parquet, .*row 6: .* is unknown after the last step of episode 'e2'"
    ):
        next(recording.batches(7, columns=["obs", "next_obs"]))
    with pytest.raises(DataError, match=r"part-00000\.parquet: the observation after t 3 of episode 'e2' was not"):
        next(Recording.open(tmp_path, on_bad=None).batches(7, columns=["obs", "next_obs"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"buffer_size": 0}, "buffer_size"),
        ({"start": -1}, "start must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"prefetch": -1}, "`prefetch` must be at least 0, not -1"),
        ({"columns": []}, "`columns` is empty"),
        ({"seed": "a"}, "seed must be a whole number, not 'a'"),
        ({"epochs": -1}, "epochs must be a whole number of at least 0, or None for endless batches, not -1"),
        ({"epochs": 1.0}, "epochs must be a whole number of at least 0, or None for endless batches, not 1.0"),
    ],
)
def test_sizes_out_of_range_are_refused(recording, options, message):
    with pytest.raises(ValueError, match=message):
        recording.batches(**({"batch_size": 3} | options))


def test_unknown_columns_and_no_steps_are_refused(tmp_path, recording):
    with pytest.raises(DataError, match=r"no column `next_ob`; .*Nearest: `next_obs`"):
        recording.batches(3, columns=["next_ob"])
    with pytest.raises(DataError, match="there is no column `actoin`"):
        sample_batches(numbered([3]), 2, columns=["actoin"])
    with pytest.raises(DataError, match="there are no steps to make batches of"):
        next(sample_batches(numbered([]), 2))
    only_lookback = tmp_path / "lookback"
    record_format_1(only_lookback, numbered([3], lookback=3))
    with pytest.raises(DataError, match="there are no steps to make batches of"):
        next(Recording.open(only_lookback).batches(2))


def test_from_memory_every_step_once_an_epoch():
    exp = numbered([20, 7, 30], lookback=[0, 2, 0])
    batches = list(sample_batches(exp, 8, columns=ALL, epochs=4, seed=5))
    assert [len(b["obs"]) for b in batches] == [8] * 27 + [4]
    seen, wanted = ids(batches), sorted(exp.steps["obs"][exp.trained()][:, 2].astype(int).tolist())
    assert all(sorted(seen[i * 55 : (i + 1) * 55]) == wanted for i in range(4))
    assert len({tuple(seen[i * 55 : (i + 1) * 55]) for i in range(4)}) == 4
    for batch in batches:
        check_rows(batch)
    again = ids(itertools.islice(sample_batches(exp, 8, columns=ALL, seed=5, start=10), 5))
    assert again == seen[80:120]


POOLS = []
"""Arrow frees memory in the pool that it came from, perhaps later: a pool that went before it is a crash."""


@pytest.mark.parametrize("work", ["batches", "stream", "info", "validate"])
def test_memory_does_not_grow_with_the_data(tmp_path, work):
    """The peaks of Arrow's and of Python's own memory, while one recording is eight times as large as the other."""

    def peak(folder, episodes):
        rng = np.random.default_rng(0)
        exp = numbered([100] * episodes)
        exp = exp.with_steps(x=rng.normal(size=(exp.num_steps, 50)))
        record(folder, exp, max_rows_per_file=2_000)
        default, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        POOLS.append(pool)
        recording = Recording.open(folder)
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            if work == "batches":
                for _ in recording.batches(100, buffer_size=4_000, epochs=1, prefetch=1):
                    pass
            elif work == "stream":
                for _ in recording.stream(max_rows=500):
                    pass
            else:
                getattr(recording, work)()
            return pool.max_memory(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(default)

    arrow, python = peak(tmp_path / "small", 100)
    large_arrow, large_python = peak(tmp_path / "large", 800)
    size = 800 * 100 * 50 * 8
    assert large_arrow < 1.5 * arrow + 2**20
    assert large_python < 1.5 * python + 2**20
    assert large_arrow + large_python < size / 2


def test_who_waits_for_a_batch_is_woken_where_another_thread_closes():
    def batches(gate):
        gate.wait()
        raise DataError("was closed")
        yield

    def take(ahead):
        with pytest.raises((DataError, StopIteration)):
            next(ahead)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads come to every point between the lines
    try:
        for _ in range(100):
            gate = threading.Event()
            ahead = Prefetched(batches(gate), 1)
            taking = threading.Thread(target=take, args=(ahead,), daemon=True)
            taking.start()
            gate.set()
            ahead.close()
            taking.join(30)
            assert not taking.is_alive()
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", [IndexError, RuntimeError, CancelledError])
def test_what_makes_a_batch_never_ends_them_silently_by_an_error(kind):
    def batches():
        yield 1
        raise kind("a mistake")

    ahead = Prefetched(batches(), 2)
    assert next(ahead) == 1
    with pytest.raises(kind, match="a mistake"):
        next(ahead)
    assert list(ahead) == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_can_be_closed_before_their_end(recording, shuffle):
    batches = recording.batches(10, shuffle=shuffle)
    next(batches)
    batches.close()
    assert list(batches) == []
