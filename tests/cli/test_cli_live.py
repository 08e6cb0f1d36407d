# SPDX-License-Identifier: Apache-2.0
import io
import math
from contextlib import closing

import pytest
from rich.console import Console

from etude.algorithms import Result, Stop
from etude.algorithms import progress as live


def result(**values):
    zero = {
        "iteration": 1, "env_steps": 0, "updates": 0, "seconds": 0.0, "episodes": 0, "return_mean": math.nan,
        "return_min": math.nan, "return_max": math.nan, "length_mean": math.nan, "returns_counted": 0, "losses": {},
        "metrics": {}, "times": {}, "sample_steps_per_s": 0.0,
    }  # fmt: skip
    return Result(**{**zero, **values})


FULL = {"returns_counted": 3, "return_mean": 12.34, "return_min": 1.0, "return_max": 20.0, "losses": {"policy": 0.1234}}


def test_a_line_holds_what_there_is():
    shown = live.figures(result(env_steps=2048, updates=16, seconds=1.26, sample_steps_per_s=1e5, **FULL))
    assert [*shown] == ["return", "steps", "updates", "losses", "seconds"]
    assert shown["return"] == "12.3 (1 … 20)"
    assert {"2,048,", "100,000/s"} <= {*shown["steps"].split()}
    assert [*live.figures(result(updates=16, losses={"imitation": 1.0}))] == ["updates", "losses", "seconds"]


def test_several_modules_or_agents_are_told_apart_and_faults_are_told():
    several = {"agent_returns": {"a": 1.0, "b": 2.0, "c": 1234.5}}
    assert live.figures(result(**FULL, **several))["agents"] == "a 1.0, b 2.0, c 1,234.5"
    both = live.figures(result(**FULL, **several, module_returns={"red": 3.0, "blue": 4.0}))
    assert (both["modules"], "agents" in both) == ("red 3.0, blue 4.0", False)
    one = result(**FULL, agent_returns={"a": 1.0}, module_returns={"main": 1.0})
    assert not {"agents", "modules", "faulty episodes"} & live.figures(one).keys()
    many = result(**FULL, agent_returns={f"a{i}": float(i) for i in range(9)})
    assert live.figures(many)["agents"].endswith("a5 5.0 and 3 more")
    assert live.figures(result(faulty_episodes=2))["faulty episodes"] == "2"


def test_what_callbacks_logged_is_shown_and_times_of_phases_are_not():
    ms = {"env": 0.5, "observe": 0.01, "infer": 0.25, "act": 0.001, "note": 0.125}
    custom = {"tail": {"mean": 1234.5678, "min": -1.0, "max": 1e6}}
    shown = live.figures(result(turn_ms=ms, custom=custom))
    assert shown["tail"] == "1,234.6 (-1 … 1e+06)"
    assert not any("infer" in text for text in shown.values())  # they are in the metrics


def test_lines_are_throttled_but_the_last_is_always_there(capsys):
    view = live.View("ppo on X", Stop(), quiet=False)
    for updates in range(50):
        view.show(result(updates=updates))
    view.close()
    lines = capsys.readouterr().err.splitlines()
    assert "ppo on X" in lines[0]
    assert lines[1].startswith("updates 0 ")
    assert lines[-1].startswith("updates 49 ")
    assert len(lines) < 10
    quiet = live.View("ppo on X", Stop(), quiet=True)
    quiet.show(result(updates=1))
    quiet.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stop", "first", "last", "share"),
    [
        (Stop(), {}, {}, None),
        (Stop(updates=10), {}, {"updates": 5}, 0.5),
        (Stop(updates=10, env_steps=100, seconds=8.0), {}, {"updates": 5, "env_steps": 60, "seconds": 1.0}, 0.6),
        (Stop(return_mean=110.0), {"return_mean": 10.0}, {"return_mean": 35.0}, 0.25),
        (Stop(return_mean=110.0), {"return_mean": 10.0}, {"return_mean": -35.0}, 0.0),
        (Stop(return_mean=110.0), {}, {}, None),
        (Stop(return_mean=110.0, updates=8), {}, {"updates": 2}, 0.25),
        (Stop(return_mean=5.0), {"return_mean": 10.0}, {"return_mean": 10.0}, 1.0),
        (Stop(updates=10), {}, {"updates": 50}, 1.0),
    ],
)
def test_progress_is_the_nearest_of_goal_and_budgets(stop, first, last, share):
    assert live.progress(stop, result(**first), result(**last)) == share


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.7, "1:00"), (61, "1:01"), (3725, "1:02:05")])
def test_clocks(seconds, text):
    assert live.clock(seconds) == text


def drawn(view):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(view.picture())
    return console.file.getvalue()


def on_terminal(monkeypatch):
    """Make standard error one. Not a fixture: pytest replaces the stream between setup and call."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)


def test_the_picture_on_a_terminal(monkeypatch, capsys):
    on_terminal(monkeypatch)
    with closing(live.View("ppo on X", Stop(updates=100), quiet=False)) as view:
        assert "ppo on X: getting ready" in drawn(view)
        view.show(result(updates=10, **FULL))
        view.show(result(updates=40, **{**FULL, "return_mean": 99.0}))
        text = drawn(view)
    for words in ("ppo on X", "99.0 (1 … 20)", "policy 0.123", "40%", "━", "left"):
        assert words in text
    assert "99.0 (1 … 20)" in capsys.readouterr().err, "the last picture stays"
    with closing(live.View("bc", Stop(), quiet=False)) as endless:
        endless.show(result(updates=1))
        assert "so far" in drawn(endless)


def test_a_gauge_shows_its_share_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    on_terminal(monkeypatch)
    with live.gauge("fitting") as show:
        show(0.25)
    shown = capsys.readouterr().err
    assert "fitting" in shown
    assert "━" in shown
    assert "25%" in shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    now = iter([0.0, 2.0, 11.0, 12.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(now))
    with live.gauge("fitting") as show:
        for share in (0.1, 0.5, 0.6):
            show(share)
    assert capsys.readouterr().err.splitlines() == ["fitting", "fitting: 50%, 11 s, about 11 s left"]
    monkeypatch.undo()
    with live.gauge("fitting", quiet=True) as show:
        show(0.5)
    assert capsys.readouterr().err == ""


# -- several runs -----------------------------------------------------------------------------------------------------


def pictured(board):
    console = Console(file=io.StringIO(), width=120)
    console.print(board.picture())
    return console.file.getvalue().splitlines()


def test_a_row_for_each_run_and_very_many_are_counted():
    board = live.Board("ppo on X, 40 seeds", [f"seed-{i}" for i in range(40)], Stop(env_steps=100), quiet=True)
    board.open()
    for name in ("seed-30", "seed-31"):
        board.begin(name)
    board.show("seed-30", result(env_steps=25, updates=3, **FULL))
    board.end("seed-0", result(env_steps=100, updates=9, **FULL), "done")
    board.end("seed-1", None, "failed")
    lines = pictured(board)
    rows = {line.split()[0]: line for line in lines[1:-1]}
    assert (len(rows), {"seed-30", "seed-31"} <= rows.keys()) == (24, True)  # those that go on are always there
    assert "training  return 12.3  steps 25   updates 3" in rows["seed-30"]
    assert "25%" in rows["seed-30"]
    assert "done" in rows["seed-0"]
    assert "failed" in rows["seed-1"]
    assert lines[-1].startswith("1 done, 1 failed, 36 waiting, 1 training, 1 starting, ")
    board.close()


def test_lines_of_several_runs_name_theirs(capsys):
    board = live.Board("ppo on X", ["a", "b"], Stop(), quiet=False)
    board.open()
    for updates in range(50):
        board.show("a", result(updates=updates))
        board.show("b", result(updates=updates))
    board.end("b", result(updates=50), "done")
    board.close()
    lines = capsys.readouterr().err.splitlines()
    assert [lines[0], lines[1], lines[-1]] == ["training ppo on X", "a  updates 0", "b  done  updates 50"]
    assert len(lines) < 8  # and no more than about one a second
