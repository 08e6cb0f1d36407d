# SPDX-License-Identifier: Apache-2.0
"""What a real notebook shows; runs where nbclient and ipykernel are."""

import os
import sys

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = [
    """
import etude
small = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=1)
etude.PPO(small).fit(etude.Stop(env_steps=256), progress=True)
""",
    """
runs = etude.fit_seeds(small, 2, stop=etude.Stop(env_steps=256), out="runs", progress=True)
""",
    """
def make():
    import gymnasium
    return gymnasium.make("CartPole-v1")

try:
    etude.fit_seeds(etude.PPOConfig(env=make), 2, stop=etude.Stop(env_steps=256), out="others")
except etude.SettingsError as error:
    print(error)
""",
]


def test_pictures_and_tables_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    one, seeds, refused = [cell.outputs for cell in notebook.cells]
    assert [out.output_type for out in one] == ["display_data", "execute_result"]
    assert "ppo on CartPole-v1" in one[0].data["text/plain"]
    assert "256, " in one[0].data["text/html"]
    assert one[1].data["text/html"].startswith("<table><caption>Result</caption>")
    assert "seed-2  done" in seeds[0].data["text/plain"]
    assert "defined in this interactive session" in refused[0].text
