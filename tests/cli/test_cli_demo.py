# SPDX-License-Identifier: Apache-2.0
import pytest
from cli_runs import trained

from etude.cli import play
from etude.cli.main import main


def test_plot_draws_one_or_more_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(trained(tmp_path / name, updates=60)) for name in ("a", "b")]
    assert main(["plot", *runs, "--to", "both.png"]) == 0
    assert capsys.readouterr().out == "both.png\n"
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", runs[0]]) == 0
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(("args", "message"), [([], "no run to plot"), (["nowhere"], "nowhere is not a training run")])
def test_what_can_not_be_plotted(capsys, args, message):
    assert main(["plot", *args]) == 2
    assert message in capsys.readouterr().err


def test_the_demo_leaves_everything_in_one_folder_and_can_be_repeated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(play, "GOAL", 60.0)
    monkeypatch.setattr(play, "EPISODES", 20)
    out = tmp_path / "demo"
    for _ in range(2):
        assert main(["demo", "--out", str(out)]) == 0
        said = capsys.readouterr().err
        commands = [line.split()[2] for line in said.splitlines() if line.startswith("$ etude ")]
        assert commands == ["train", "record", "train", "plot"]
        assert sorted(path.name for path in out.glob("[!.]*")) == ["bc", "curves.png", "ppo", "recording"]
