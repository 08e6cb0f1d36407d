# SPDX-License-Identifier: Apache-2.0
"""A writer that is killed at any moment leaves whole files, and all that it had reported."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from etude.recordings import Recording, validate

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from some_recording import ACTION, OBS, numbered
from etude.recordings import RecordingWriter
writer = RecordingWriter(sys.argv[1], obs_space=OBS, action_space=ACTION, env="Numbered-v0",
                         append=True, max_rows_per_file=300)
first = int(sys.argv[3])
print("ready", flush=True)
while True:
    writer.write(numbered([20, 35, 1], first=first))
    first += 3
    if first % 4 == 0:
        writer.flush()
    print(first, writer.num_steps, flush=True)
"""


def look(folder):
    """Check all that is promised of the folder; the rows in it."""
    rows = {}
    for path in folder.glob("*.parquet"):
        rows[path.name] = pq.read_table(path).num_rows
    if rows:
        assert Recording.open(folder).env == "Numbered-v0"
        exp = Recording.open(folder).read()
        assert exp.num_steps == sum(rows.values())
        assert (exp.lengths == np.resize([20, 35, 1], exp.num_segments)).all()  # whole episodes only
        following = exp.next_obs()["obs"]
        np.testing.assert_array_equal(following[:, 1], exp.steps["obs"][:, 1] + 1)
        assert validate(folder).ok
    return sum(rows.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_at_any_moment(tmp_path):
    folder, first, before = tmp_path / "r", 0, 0
    here = str(Path(__file__).parent)
    for seed in range(12):
        delay = random.Random(seed).expovariate(1 / 0.03)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), here, str(first)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        stop = time.monotonic() + delay
        reported = []
        while time.monotonic() < stop:
            reported.append(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        child.wait()
        child.stdout.close()
        *lines, _torn = ("".join(reported) + rest).split("\n")
        rows = look(folder)
        if lines:
            first, on_disk = map(int, lines[-1].split())
            assert rows >= before + on_disk
        first += 6  # what the killed writer was about to write may or may not be there: take other names
        first -= first % 3
        before = rows
    assert before > 0
    assert len([p for p in folder.iterdir() if p.suffix == ".tmp"]) <= 2
