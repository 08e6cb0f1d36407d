# SPDX-License-Identifier: Apache-2.0
"""Where Ray is not installed, its tests are left out, and say why."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CODE = """
import sys, sysconfig
from importlib.machinery import PathFinder

class Uninstalled:
    # Of what is called ray, only what lies elsewhere is found, as the folder tests/ray would be.
    def find_spec(name, path=None, target=None):
        if name == "ray":
            places = [place for place in sys.path if place not in sysconfig.get_paths().values()]
            found = PathFinder.find_spec(name, places)
            if found is None:
                raise ModuleNotFoundError(name=name)
            return found

sys.meta_path.insert(0, Uninstalled)
import pytest
files = ["tests/ray", "tests/cli/test_cli_tune.py", "-m", ""]
sys.exit(pytest.main([*files, "-rs", "-p", "no:cacheprovider", "-k", "not without_ray"]))
"""


def test_tests_of_the_ray_engine_are_skipped() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    files = len(list((ROOT / "tests" / "ray").glob("test_*.py")))
    assert f"SKIPPED [{files}] tests/ray/conftest.py" in done.stdout
    assert ": the ray engine needs Ray: pip install 'etude[ray]'" in done.stdout
    assert "test_cli_tune.py" in done.stdout
