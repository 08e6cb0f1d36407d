# SPDX-License-Identifier: Apache-2.0
"""What users type to export a policy."""

import json

import pytest
from cli_runs import trained

from etude.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("export") / "run")


def test_a_run_is_exported(run, tmp_path, capsys):
    to = tmp_path / "new folder" / "policy.pt2"
    assert main(["export", str(run), "--to", str(to)]) == 0
    assert capsys.readouterr() == (f"exported to {to}\n", f"exporting {run}\n")
    assert to.stat().st_size > 0
    assert main(["export", str(run), "--to", str(to), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(run), "to": str(to)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--to", "policy.bin"], "`to` is 'policy.bin', but must end in .onnx or .pt2"),
        (["{run}"], "to"),
        (["{run}", "--to", "p.pt2", "--policy", "red"], "has no policy 'red'"),
        (["{none}", "--to", "p.pt2"], "none"),
    ],
)
def test_what_is_wrong_is_told(run, tmp_path, capsys, words, said):
    assert main(["export", *(word.format(run=run, none=tmp_path / "none") for word in words)]) == 2
    assert said in capsys.readouterr().err
