# SPDX-License-Identifier: Apache-2.0
"""Exported policies against `Policy.act`, run by onnxruntime in a process that can import neither Etude nor torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from etude.policies import Policy
from etude.spaces import Flattener, Nester

SIZES, STEPS = (1, 4), 4

CHILD = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("etude", "torch"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Blocked())
import numpy as np, onnxruntime
for line in sys.stdin:
    folder = line.strip()
    session = onnxruntime.InferenceSession(folder + "/policy.onnx", providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["etude"])
    given = np.load(folder + "/given.npz")
    found = {}
    for size in (1, 4):
        feed = {i["name"]: np.zeros((size, *i["shape"]), i["dtype"]) for i in about["inputs"]}
        for part in about["state"]:
            feed[part["input"]][...] = part["initial"]
        for t in range(4):
            if t == 2 and size == 4 and about["state"]:
                feed["state_in/first"][1] = True
            for i in about["inputs"]:
                if not i["name"].startswith("state_in/"):
                    feed[i["name"]] = given[f"{size}:{t}:{i['name']}"]
            out = dict(zip(about["outputs"], session.run(about["outputs"], feed)))
            for part in about["state"]:
                feed[part["input"]] = out[part["output"]]
            found |= {f"{size}:{t}:{name}": out[name] for name in out if not name.startswith("state_out/")}
    np.savez(folder + "/found.npz", **found)
    print("done", flush=True)
"""


class OnnxAlone:
    """The process, which lasts as long as a ``with`` block."""

    def __enter__(self) -> "OnnxAlone":
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def check(self, policy: Policy, folder: Path) -> None:
        """Export a policy to a folder; fail where the file chooses otherwise, for single observations or a batch, over
        some steps, one of which begins another episode in one row."""
        policy.export(folder / "policy.onnx")
        rng = np.random.default_rng(1)
        given: dict[str, np.ndarray] = {}
        wanted: dict[str, np.ndarray] = {}
        for size in SIZES:
            state = policy.initial_state(size)
            for t in range(STEPS):
                obs, reward = flat_samples(policy.obs_space, size, rng), rng.normal(size=size)
                given |= {f"{size}:{t}:{name}": column for name, column in obs.items()} | {f"{size}:{t}:reward": reward}
                first = np.arange(size) == 1 if t == 2 and size == 4 else None
                nested = Nester(policy.obs_space, "obs")(obs)
                action, state = policy.act(nested, state, reward=reward, first=first)
                columns = Flattener(policy.action_space, "action")(action)
                wanted |= {f"{size}:{t}:{name}": column for name, column in columns.items()}
        np.savez(folder / "given.npz", **given)
        self._run(folder)
        with np.load(folder / "found.npz") as found:
            assert set(found) == set(wanted)
            for name, action in wanted.items():
                assert found[name].dtype == action.dtype
                np.testing.assert_allclose(found[name], action, rtol=1e-5, atol=1e-5)

    def _run(self, folder: Path) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.process.stderr.read()


def flat_samples(space: Any, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """``size`` drawn observations as flat columns; masks allow the first and the last action at least."""
    space.seed(int(rng.integers(1000)))
    flatten = Flattener(space, "obs")
    drawn = [flatten(space.sample()) for _ in range(size)]
    found = {name: np.stack([np.asarray(one[name]) for one in drawn]) for name in flatten.leaves}
    if "obs/action_mask" in found:
        found["obs/action_mask"][:, [0, -1]] = 1
    return found
