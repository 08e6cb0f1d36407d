# SPDX-License-Identifier: Apache-2.0
"""Sinks that can't write: the first call that notices raises, later ones are counted, and `close` says how many."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from etude.errors import DataError
from etude.metrics import JSONLines, TensorBoard, writers
from etude.metrics.writers import MLflow, WandB


def make(kind, folder):
    return TensorBoard(folder) if kind is TensorBoard else JSONLines(folder / "metrics.jsonl")


def write(sink, step):
    args = (step,) if isinstance(sink, TensorBoard) else ()
    sink.write({"step": step, "name": "x" * 100}, *args)


def steps_in(folder):
    """What is there, by the readers of others."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jsonl":
            found += [json.loads(line)["step"] for line in path.read_text().splitlines()]
        else:
            found += [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    return found


def write_until_it_raises(sink, steps):
    """The step whose write raised."""
    for step in steps:
        try:
            write(sink, step)
        except DataError as error:
            return step, str(error)
    raise AssertionError("nothing was raised")


def failed_at_close(sink):
    with pytest.raises(DataError) as caught:
        sink.close()
    sink.close()
    return str(caught.value), int(re.search(r"[\d,]+|\ba\b", str(caught.value))[0].replace("a", "1").replace(",", ""))


KINDS = [JSONLines, TensorBoard]


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_folder_is_an_error_once_and_again_at_close(tmp_path, kind):
    folder = tmp_path / "run"
    sink = make(kind, folder)
    for step in range(3):
        write(sink, step)
    assert steps_in(folder) == [0, 1, 2]
    shutil.rmtree(folder)
    step, said = write_until_it_raises(sink, range(3, 9))
    assert step == 3
    assert str(folder) in said
    assert "deleted" in said
    for more in range(7):
        write(sink, more)
    said, failed = failed_at_close(sink)
    assert str(folder) in said
    assert failed == step - 3 + 1 + 7
    assert not folder.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_loses_what_does_not_fit_and_nothing_else(tmp_path, kind):
    code = f"""
import re, resource
from etude.errors import DataError
from etude.metrics import JSONLines, TensorBoard
from test_failing_sinks import make, write
from pathlib import Path
sink, raised = make({kind.__name__}, Path({str(tmp_path)!r})), []
def go(steps):
    for step in steps:
        try:
            write(sink, step)
        except DataError as error:
            raised.append(str(error))
go(range(20))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
go(range(20, 3000))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
go(range(3000, 6000))
try:
    sink.close()
except DataError as error:
    print(len(raised), "File too large" in raised[0], re.search("[0-9,]+", str(error))[0].replace(",", ""))
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    raised, reason, failed = done.stdout.split()
    assert (raised, reason) == ("1", "True"), done.stdout
    there = steps_in(tmp_path)
    assert len(there) + int(failed) == 6000
    assert there == sorted(set(there))
    assert there[:20] == list(range(20))
    assert there[-3000:] == list(range(3000, 6000))
    assert int(failed) > 2850


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_sink_can_hold_is_named(tmp_path, kind):
    sink = make(kind, tmp_path)
    args = (1,) if kind is TensorBoard else ()
    if kind is JSONLines:
        with pytest.raises(DataError, match="set"):
            sink.write({"a": {1, 2}}, *args)
        assert failed_at_close(sink)[1] == 1
    else:
        sink.write({"a": {1, 2}}, *args)
        sink.close()


def test_a_failure_that_nobody_asked_for_is_said_at_the_end(tmp_path):
    code = f"""
import shutil
from etude.metrics import TensorBoard
board = TensorBoard({str(tmp_path / "tb")!r})
shutil.rmtree({str(tmp_path / "tb")!r})
open({str(tmp_path / "tb")!r}, "w").close()
board.write({{"a": 1}}, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "TensorBoard events" in done.stderr
    assert str(tmp_path / "tb") in done.stderr


class Service:
    """Stands for a tracker's package and its client; its server can't be reached after the start."""

    def init(self, **settings):
        return self

    info = property(lambda self: self)
    run_id = experiment_id = "1"

    def create_run(self, experiment, run_name):
        return self

    def get_experiment_by_name(self, name):
        return self

    def log(self, *args, **kwargs):
        raise ConnectionError("no route to host")

    log_batch = log
    finish = define_metric = lambda self, *args, **kwargs: None
    set_terminated = log


@pytest.mark.parametrize("kind", [WandB, MLflow])
def test_a_tracker_that_can_not_be_reached_says_so_once_and_at_close(monkeypatch, kind):
    service = Service()
    if kind is MLflow:
        service = SimpleNamespace(MlflowClient=Service, entities=SimpleNamespace(Metric=lambda *args: args))
    monkeypatch.setitem(sys.modules, kind.__name__.lower(), service)
    sink = kind("mine")
    with pytest.raises(DataError, match="no route to host"):
        sink.write({"a": 1}, 1)
    sink.write({"a": 1}, 2)
    said, failed = failed_at_close(sink)
    assert "no route to host" in said
    assert failed == (2 if kind is WandB else 3), "the end of the run could not be said either"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_can_not_be_closed_is_an_error_of_close(tmp_path, monkeypatch, kind):
    sink = make(kind, tmp_path)
    write(sink, 1)

    def refuse(file):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(writers.AppendFile, "close", refuse)
    said, _ = failed_at_close(sink)
    assert "Disk quota exceeded" in said
    assert str(tmp_path) in said


class Faulty(Service):
    """Neither begins nor ends a run."""

    def __init__(self, begins=False):
        self.begins = begins

    def init(self, **settings):
        if not self.begins:
            raise ConnectionError("no route to host")
        return self

    def create_run(self, experiment, run_name):
        return self.init()

    def finish(self):
        raise BrokenPipeError("the service has ended")


@pytest.mark.parametrize("kind", [WandB, MLflow])
def test_a_tracker_that_can_not_be_reached_at_the_start_is_a_data_error(monkeypatch, kind):
    service = Faulty() if kind is WandB else SimpleNamespace(MlflowClient=Faulty)
    monkeypatch.setitem(sys.modules, kind.__name__.lower(), service)
    with pytest.raises(DataError, match=f"{kind.__name__.lower()}.*no route to host"):
        kind("mine")


def test_a_run_of_wandb_that_can_not_be_ended_is_an_error_of_close(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Faulty(begins=True))
    said, failed = failed_at_close(WandB("mine"))
    assert "the service has ended" in said
    assert failed == 1


def test_what_is_no_number_counts_as_a_failed_write_of_tensorboard(tmp_path):
    board = TensorBoard(tmp_path)
    with pytest.raises(DataError, match="TensorBoard events"):
        board.write({"a": 10**400}, 1)
    board.write({"a": 1.0}, 2)
    _, failed = failed_at_close(board)
    assert failed == 1
    assert 2 in steps_in(tmp_path)
