# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest
from cli_runs import trained

import etude
from etude.cli.main import COMMANDS, main

ETUDE = [sys.executable, "-c", "import sys; from etude.cli.main import main; sys.exit(main())"]


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"etude {etude.__version__}\n"


def test_an_unknown_command_is_named_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: etude has no command `trian`. Nearest: `train`. All commands: etude --help\n")


@pytest.mark.parametrize(
    ("args", "never"),
    [(["--help"], "torch tyro rich numpy pydantic gymnasium"), (["data", "info", "--help"], "torch matplotlib")],
)
def test_a_command_imports_only_what_it_needs(args, never):
    code = f"""
import sys
from etude.cli.main import main
try:
    main({args!r})
except SystemExit:
    pass
print("loaded:", *({never!r}.split() & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_what_can_not_be_encoded_is_no_error(tmp_path):
    out = trained(tmp_path / "run")
    done = subprocess.run(
        [*ETUDE, "evaluate", str(out), "--episodes", "2"],
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ? " in done.stdout


def test_another_broken_pipe_than_that_of_the_reader_is_not_hidden(monkeypatch):
    def broken(args):
        raise BrokenPipeError("an env's process is gone")

    monkeypatch.setattr("etude.cli.main._dispatch", broken)
    with pytest.raises(BrokenPipeError, match="an env's process"):
        main(["train"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("args", [["presets", "--json"], ["presets"]])
def test_output_that_can_not_be_written_is_told_in_a_line(args):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*ETUDE, *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "error: can't write to standard output: No space left on device.\n"


def test_help_has_no_colors_where_none_are_wanted():
    texts = []
    for wish in ({}, {"NO_COLOR": "1"}):
        ours, theirs = os.openpty()
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm", **wish}
        done = subprocess.Popen([*ETUDE, "presets", "--help"], stdout=theirs, env=env)
        assert done.wait(timeout=300) == 0
        os.close(theirs)
        texts.append(os.read(ours, 1_000_000))
        os.close(ours)
    assert [b"\x1b[" in text for text in texts] == [True, False]


def test_a_reader_that_has_had_enough_is_no_error():
    child = subprocess.Popen(
        [*ETUDE, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (1, b"")


# -- the folder that one works in ---------------------------------------------------------------------------------


@pytest.fixture
def downloaded(tmp_path):
    """A folder with a run and with files of a stranger, some of which are named as libraries are."""
    trained(tmp_path / "run")
    touch = "import pathlib; pathlib.Path(__file__).with_suffix('.touched').touch()\n"
    for name in ("yaml", "rich", "matplotlib", "tyro", "torch", "typing", "decimal", "json", "theirs"):
        (tmp_path / f"{name}.py").write_text(touch)
    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\ndef make():\n    return gym.make('CartPole-v1', max_episode_steps=9)\n"
    )
    return tmp_path


STARTS = [
    pytest.param(["-m", "etude"], id="python -m etude"),
    pytest.param(["-P", *ETUDE[1:]], id="the script", marks=pytest.mark.slow),
]
"""A script has its own folder first on the path."""


@pytest.mark.parametrize("start", STARTS)
def test_nothing_in_the_folder_that_one_works_in_is_imported_unless_it_is_named(downloaded, start):
    def run(*words):
        path = os.path.dirname(os.path.dirname(etude.__file__))
        env = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *start, *words], cwd=downloaded, env=env, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stderr

    assert run("plot", "run", "--to", "curves.png") == (0, "")
    assert run("evaluate", "run", "--episodes", "1") == (0, "")
    assert not list(downloaded.glob("*.touched"))
    for name in ("yaml", "rich", "matplotlib", "tyro", "torch", "typing", "decimal", "json"):
        (downloaded / f"{name}.py").unlink()
    assert run("evaluate", "run", "--env", "mine:make", "--episodes", "1") == (0, "")


def test_what_is_named_and_not_there_is_told(downloaded, preloaded):
    for name in ("yaml", "rich", "matplotlib", "tyro", "torch", "typing", "decimal", "json"):
        (downloaded / f"{name}.py").unlink()
    done = preloaded.run(ETUDE[2], "evaluate", "run", "--env", "theirs:make", "--episodes", "1", cwd=downloaded)
    assert done.returncode == 2
    assert "theirs:make" in done.stderr
