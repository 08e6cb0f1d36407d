# SPDX-License-Identifier: Apache-2.0
"""Where Ray is not installed, its tests are left out, and say why."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

HIDDEN = """
import sys
from importlib.machinery import PathFinder

class Hidden:
    def find_spec(name, path=None, target=None):
        if name == "ray":  # as if it were not installed; the folder tests/ray might be taken for it
            return PathFinder.find_spec(name, [path for path in sys.path if "site-packages" not in path])

sys.meta_path = [Hidden, *(finder for finder in sys.meta_path if finder is not PathFinder), Other := type(
    "Other", (), {"find_spec": lambda name, *more: None if name == "ray" else PathFinder.find_spec(name, *more)})]
import pytest
sys.exit(pytest.main(["tests/ray", "tests/cli/test_cli_tune.py::test_trials_from_the_command_line_and_the_best_one_plays",
                      "-rs", "-p", "no:cacheprovider"]))
"""


def test_tests_of_the_ray_engine_are_skipped() -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
