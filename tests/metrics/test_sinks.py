# SPDX-License-Identifier: Apache-2.0
import json
import math
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.errors import DataError
from etude.metrics import JSONLines, TensorBoard, cut_jsonl, read_jsonl


def test_lines_come_back_in_order(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JSONLines(path)
    sink.write({"env_steps": 10, "return_mean": 1.5, "losses": {"policy": np.float32(0.5)}, "note": 'a "b"\n'})
    sink.write({"env_steps": np.int64(20), "return_mean": torch.tensor(2.0), "flag": True, "none": None, "l": [1, 2.5]})
    assert len(read_jsonl(path)) == 2, "a line must be readable while the file is open"
    sink.close()
    sink.close()
    assert read_jsonl(path) == [
        {"env_steps": 10, "return_mean": 1.5, "losses": {"policy": 0.5}, "note": 'a "b"\n'},
        {"env_steps": 20, "return_mean": 2.0, "flag": True, "none": None, "l": [1, 2.5]},
    ]


def _refuse(constant):
    raise AssertionError(f"{constant} is not standard JSON")


@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_lines_are_standard_json_even_for_numbers_that_are_not_finite(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("lines") / "m.jsonl"
    sink = JSONLines(path)
    sink.write({"values": values})
    sink.close()
    read = json.loads(path.read_text(), parse_constant=_refuse)["values"]
    assert read == [None if math.isnan(v) else v for v in values]


@pytest.mark.parametrize("torn", [b'{"a": 2, "b', b"{", b"\xff\xfe", b'"a'])
def test_a_torn_last_line_is_left_out_and_taken_off(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    assert read_jsonl(path) == [{"a": 1}]
    sink = JSONLines(path)
    sink.write({"a": 3})
    sink.close()
    assert read_jsonl(path) == [{"a": 1}, {"a": 3}]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]
    sink = JSONLines(path)
    sink.write({"a": 3})
    sink.close()
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2 is not a JSON object: 'nonsense'\. Remove the line"):
        read_jsonl(path)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b'}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2 is not a JSON object"):
        read_jsonl(path)
    cut_jsonl(path, 3)


def test_whole_numbers_too_large_for_a_float_are_infinite(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1' + b"0" * 400 + b', "b": -1' + b"0" * 5000 + b', "c": 9007199254740993}\n')
    assert read_jsonl(path) == [{"a": np.inf, "b": -np.inf, "c": 9007199254740993}]


def test_missing_metrics_are_named(tmp_path):
    with pytest.raises(DataError, match=r"can't read the metrics .*gone\.jsonl: No such file"):
        read_jsonl(tmp_path / "gone.jsonl")


def test_every_line_written_before_a_kill_is_there(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys\nfrom etude.metrics.writers import JSONLines\n"
        f"sink = JSONLines({str(path)!r})\n"
        "for i in range(10**9):\n    sink.write({'i': i})\n    print(i, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        seen = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        child.wait()
    rows = [row["i"] for row in read_jsonl(path)]
    assert rows[:20] == seen
    assert rows == list(range(len(rows)))


def _scalars(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_the_events_back(tmp_path):
    sink = TensorBoard(tmp_path / "tb")
    for i in range(50):
        sink.write(
            {
                "return_mean": i / 4,
                "losses": {"policy": -i, "value": np.float32(i)},
                "t": torch.tensor(1.5),
                "env": "X",
            },
            step=i * 100,
        )
    sink.write({"return_mean": math.nan, "seconds": 2**40}, step=10**12)
    sink.close()
    sink.close()
    read = _scalars(tmp_path / "tb")
    assert set(read) == {"return_mean", "losses/policy", "losses/value", "t", "seconds"}
    assert read["losses/policy"] == [(i * 100, -i) for i in range(50)]
    assert read["return_mean"][:-1] == [(i * 100, i / 4) for i in range(50)]
    assert math.isnan(read["return_mean"][-1][1])
    assert read["seconds"] == [(10**12, 2**40)]


def test_tensorboard_gets_an_evaluation_once(tmp_path):
    sink = TensorBoard(tmp_path / "tb")
    for step, updates in enumerate([None, 4, 4, 4, 8, 8]):
        own = {} if updates is None else {"return_mean": 1.5, "updates": updates}
        sink.write({"return_mean": 0.0, "evaluation": own}, step)
    sink.close()
    read = _scalars(tmp_path / "tb")
    assert read["evaluation/return_mean"] == [(1, 1.5), (4, 1.5)]
    assert len(read["return_mean"]) == 6


def test_two_runs_in_one_folder_are_two_files(tmp_path):
    for step in (1, 2):
        sink = TensorBoard(tmp_path)
        sink.write({"a": step}, step)
        sink.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_events_of_lost_iterations_are_shown_no_more(tmp_path):
    sink = TensorBoard(tmp_path)
    for step in (10, 20, 30, 40):
        sink.write({"a": step}, step)  # then the run is killed, and resumed from step 20
    resumed = TensorBoard(tmp_path, resumed_at=20)
    for step in (32, 50):
        resumed.write({"a": step + 0.5}, step)
    assert _scalars(tmp_path) == {"a": [(10, 10.0), (20, 20.0), (32, 32.5), (50, 50.5)]}


def test_events_of_a_process_that_forgets_to_close_are_written(tmp_path):
    code = f"from etude.metrics import TensorBoard\nt = TensorBoard({str(tmp_path)!r})\nt.write({{'a': 4}}, 2)\n"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert _scalars(tmp_path) == {"a": [(2, 4)]}


def test_a_file_that_can_not_be_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "x" * 300)  # longer than a file's name may be
    with pytest.raises(DataError, match=r"can't write TensorBoard events to .*: File name too long"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("happens", ["removed", "moved", "made anew"])
def test_a_folder_that_goes_away_is_an_error_at_the_next_write(tmp_path, happens):
    folder = tmp_path / "run"
    metrics = JSONLines(folder / "metrics")
    metrics.write({"a": 1})
    if happens == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    if happens == "made anew":
        folder.mkdir()
        (folder / "metrics").write_text("a\n")
    with pytest.raises(DataError, match="deleted or replaced"):
        metrics.write({"a": 2})
    metrics.write({"a": 3, "b": 4})  # an error is raised once, and again at the end, with how many writes failed
    with pytest.raises(DataError, match="2 writes of .* failed"):
        metrics.close()
    if happens == "made anew":
        assert (folder / "metrics").read_text() == "a\n"


def test_a_folder_of_events_that_goes_away_is_an_error(tmp_path):
    board = TensorBoard(tmp_path / "run")
    board.write({"a": 1}, 1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(DataError, match="deleted or replaced"):
        board.write({"a": 2}, 2)
    with pytest.raises(DataError, match="deleted or replaced"):
        board.close()


def test_cutting_leaves_other_lines_as_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_jsonl(path, 3)
    assert not path.exists()
    kept = [b'{"note": "no iteration"}', b'{"iteration": 1, "return_mean": null}', b'{"iteration":  2}', b"", b"[3]"]
    path.write_bytes(b"\n".join([*kept, b'{"iteration": 3}', b'{"iteration": 40}', b'{"iter']))
    cut_jsonl(path, 2)
    assert path.read_bytes() == b"\n".join([*kept, b'{"iter'])
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't write metrics to .*metrics.jsonl: (Not a directory|File exists)"):
        JSONLines(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(DataError, match="can't write TensorBoard events to .*: (Not a directory|File exists)"):
        TensorBoard(tmp_path / "file" / "x")


def test_writing_to_a_closed_sink_is_refused(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.close()
    with pytest.raises(ValueError, match="is closed"):
        sink.write({"a": 1}, 1)


def test_the_sinks_import_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys\nfrom etude.metrics import JSONLines, TensorBoard\n"
        "heavy = {'torch', 'tensorflow', 'matplotlib', 'tensorboard', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"t = TensorBoard({str(tmp_path)!r})\nt.write({{'a': 1}}, 1)\nt.close()\n"
        "assert not (heavy - {'tensorboard'}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
