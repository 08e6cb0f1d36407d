# SPDX-License-Identifier: Apache-2.0
"""Checks an Etude that was installed from a wheel; `make wheel` runs it in a fresh environment."""

import subprocess
import sys
import tempfile
from pathlib import Path

import etude

package = Path(etude.__file__).parent
assert package.is_relative_to(sys.prefix), f"this is not what was installed: {package}"
for name in ("py.typed", "__init__.pyi", "viewer/page.html"):
    assert (package / name).is_file(), f"the wheel lacks {name}"

command = Path(sys.executable).with_name("etude")
with tempfile.TemporaryDirectory() as folder:
    run, data, page = (str(Path(folder) / name) for name in ("run", "data", "page.html"))
    for words in (
        ["--version"],
        [
            "train",
            "ppo",
            "--env",
            "CartPole-v1",
            "--num-envs",
            "2",
            "--stop.env-steps",
            "4096",
            "--out",
            run,
            "--quiet",
        ],
        ["record", run, "--episodes", "2", "--to", data],
        ["show", data, "--to", page],
    ):
        subprocess.run([command, *words], check=True)
print("the wheel is fine")
