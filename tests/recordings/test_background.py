# SPDX-License-Identifier: Apache-2.0
"""Threads beside: garbage collection may end a writer in the middle of any call."""

import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from some_recording import ACTION, OBS, numbered

from etude.recordings import Recording, RecordingWriter
from etude.recordings.background import BackgroundThread


def test_functions_run_in_order_in_one_thread_until_it_ends():
    thread, seen = BackgroundThread("some"), []
    futures = [thread.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(5)]
    failing = thread.submit(lambda: 1 // 0)
    thread.end()
    thread.join(60)
    assert seen == [(i, "some") for i in range(5)]
    assert all(future.done() for future in futures)
    assert isinstance(failing.exception(), ZeroDivisionError)


def test_a_writer_may_be_garbage_while_an_executor_is_given_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor holds a lock of all executors then."""

    class Holder:
        def __init__(self) -> None:
            self.writer = RecordingWriter(tmp_path / "r", obs_space=OBS, action_space=ACTION)
            self.writer.write(numbered([4]))
            self.me = self

    plain, armed, done = Future.__init__, [True], threading.Event()

    def collecting(self: Future[int]) -> None:
        if armed and threading.current_thread().name == "gives":
            armed.clear()
            gc.collect()
        plain(self)

    def give(pool: ThreadPoolExecutor) -> None:
        Holder()
        pool.submit(int)
        done.set()

    monkeypatch.setattr(Future, "__init__", collecting)
    pool = ThreadPoolExecutor(1)
    threading.Thread(target=give, args=(pool,), name="gives", daemon=True).start()
    assert done.wait(60)
    pool.shutdown()
    assert not armed
    assert Recording.open(tmp_path / "r").num_steps == 4
