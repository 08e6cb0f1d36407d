# SPDX-License-Identifier: Apache-2.0
"""torch.compile in a process in which Mesa draws: two LLVMs that can't be loaded in any order."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import sys
import etude
import etude.errors

def draw():
    import gymnasium
    env = gymnasium.make("HalfCheetah-v5", render_mode="rgb_array")
    env.reset(seed=0)
    env.render()

def train():
    config = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32, minibatch_size=16, epochs=1, compile=True,
                             network=etude.NetworkConfig(hidden=(4,)), threads=1, seed=0)
    algorithm = etude.PPO(config)
    if sys.argv[1] == "between":
        draw()
    assert algorithm.train().losses
    return algorithm

if sys.argv[1] != "between":
    draw()
if sys.argv[1] == "for a GPU":
    import torch
    from etude.learners.compiled import load_triton
    try:
        load_triton(torch.device("cuda"))
    except etude.errors.SettingsError as error:
        print("libLLVM" in open("/proc/self/maps").read(), "with an LLVM that" in str(error) and "trained")
        sys.exit()
train().close()
print("libLLVM" in open("/proc/self/maps").read(), "trained")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Mesa is looked for on Linux")
@pytest.mark.parametrize("drawn", ["before", "between", "for a GPU"])
def test_who_has_drawn_can_compile(drawn: str) -> None:
    if importlib.util.find_spec("mujoco") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("needs MuJoCo to draw, and triton")
    env = os.environ | {"MUJOCO_GL": "egl"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, drawn], capture_output=True, text=True, check=False, timeout=300, env=env
    )
    if "OpenGL" in done.stderr and done.returncode == 1:
        pytest.skip("MuJoCo can't draw here")
    if done.stdout.startswith("False"):
        pytest.skip("here, drawing does not load an LLVM")
    assert (done.returncode, done.stdout.strip()) == (0, "True trained"), done.stderr
