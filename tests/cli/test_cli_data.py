# SPDX-License-Identifier: Apache-2.0
import json
import shutil

import pytest
from cli_runs import trained

from etude.cli.main import main


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run = trained(folder / "run")
    assert main(["record", str(run), "--episodes", "4", "--to", str(folder / "rec"), "--quiet", "--seed", "1"]) == 0
    return folder / "rec"


def test_info_in_words_and_as_json(recording, capsys):
    assert main(["data", "info", str(recording), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["env"], found["agents"]) == (4, "CartPole-v1", [])
    assert main(["data", "info", str(recording)]) == 0
    words = capsys.readouterr().out
    for text in (
        str(recording),
        "CartPole-v1",
        f"steps      {found['env_steps']:,}",
        "Discrete(2)",
        " reward",
    ):
        assert text in words


def test_a_recording_without_a_fault(recording, capsys):
    assert main(["data", "validate", str(recording)]) == 0
    assert "4 episodes: no problems." in capsys.readouterr().out
    (file,) = recording.glob("*.parquet")
    assert main(["data", "validate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_a_fault_is_reported_with_its_file(recording, tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(recording, cut)
    (file,) = cut.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["data", "validate", str(cut)]) == 1
    assert file.name in capsys.readouterr().out
    assert main(["data", "validate", str(cut), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["file"] == str(file)
    assert main(["data", "info", str(cut)]) == 2
    assert file.name in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "validate"])
def test_where_there_is_nothing(tmp_path, capsys, command):
    assert main(["data", command, str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'}: there is no such" in capsys.readouterr().err
    assert main(["data", command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    assert main(["data"]) == 0
    assert "validate" in capsys.readouterr().out
    assert main(["data", "inof"]) == 2
    assert "etude data has no command `inof`. Nearest: `info`." in capsys.readouterr().err
    assert main(["data", "zzz"]) == 2
    assert "There are info, validate." in capsys.readouterr().err
    assert main(["data", "info"]) == 2
    assert "info needs a value for `path`" in capsys.readouterr().err
