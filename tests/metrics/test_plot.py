# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from matplotlib import image

from etude.algorithms import PPO, PPOConfig, Stop
from etude.errors import DataError
from etude.metrics import JSONLines, plot_runs, read_jsonl
from etude.metrics.plot import Band, Panel, _curves, _labels, plot_panels


def _run(path, rows):
    sink = JSONLines(path / "metrics.jsonl")
    for row in rows:
        sink.write(row)
    sink.close()
    return path


def _online(path, n=20):
    rows = [
        {"env_steps": i * 100, "updates": i, "return_mean": i * 1.0, "return_min": i - 5.0, "return_max": i + 5.0}
        for i in range(1, n)
    ]
    rows[0]["return_mean"] = math.nan  # no episode has ended yet
    return _run(path, rows)


def _offline(path, n=20):
    return _run(
        path,
        [
            {"updates": i, "losses": {"a": 1 / i}}
            | ({"evaluation": {"return_mean": i, "updates": i}} if i % 5 == 0 else {})
            for i in range(1, n)
        ],
    )


def test_runs_of_all_kinds_make_one_picture(tmp_path):
    bare = _run(tmp_path / "bare", [{"updates": i, "losses": {"a": 1.0, "b": 0.5}} for i in range(1, 9)])
    to = plot_runs([_online(tmp_path / "ppo"), _offline(tmp_path / "bc"), bare], tmp_path / "made" / "curves.png")
    picture = image.imread(to)
    assert picture.shape[1] > picture.shape[0] > 500
    assert picture[..., :3].std() > 0.05, "the picture is empty"
    alone = image.imread(plot_runs([tmp_path / "ppo"], tmp_path / "one.png"))
    assert alone.shape[1] < picture.shape[1]


@pytest.mark.parametrize("name", ["$\\frac$", "a$b^$", "%s{}"])
def test_names_are_drawn_as_they_are(tmp_path, name):
    assert plot_runs([_online(tmp_path / name, 3)], tmp_path / "c.png").stat().st_size > 1000
    band = Band(name, *np.ones((4, 2)))
    text = plot_panels([Panel(name, "env_steps", "return_mean", [band])], tmp_path / "c.svg").read_text()
    assert f"<!-- {name} -->" in text


def test_numbers_too_large_to_draw_are_left_out(tmp_path):
    run = _online(tmp_path / "ppo", 3)
    whole = (run / "metrics.jsonl").read_text()
    huge = "1" + "0" * 400
    (run / "metrics.jsonl").write_text(
        whole + f'{{"env_steps": 900, "return_mean": {huge}, "losses": {{"a": {huge}}}}}\n'
    )
    plot_runs([run], tmp_path / "c.png")


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_other_formats_go_by_the_ending(tmp_path, ending):
    assert plot_runs([_online(tmp_path / "ppo", 3)], tmp_path / f"c.{ending}").stat().st_size > 1000


def test_a_run_of_one_row_can_be_drawn(tmp_path):
    run = _run(tmp_path / "r", [{"env_steps": 5, "return_mean": 3.0}])
    assert plot_runs([run], tmp_path / "c.png").exists()


def test_online_curves_stand_over_env_steps_and_offline_ones_over_updates(tmp_path):
    clock, quantity, (online,) = _curves(_online(tmp_path / "a"), "a")
    assert (clock, quantity) == ("env_steps", "episode return")
    assert online.x.tolist() == [i * 100 for i in range(2, 20)]  # without the row in which no episode had ended
    assert online.low[2] == -1
    assert online.high[2] == 9
    clock, quantity, (offline,) = _curves(_offline(tmp_path / "b"), "b")
    assert (clock, quantity) == ("updates", "episode return")
    assert offline.value.tolist() == [5, 10, 15]
    _, quantity, (bare,) = _curves(_run(tmp_path / "c", [{"updates": 1, "losses": {"a": 1.0, "b": 0.5}}]), "c")
    assert (quantity, bare.value.tolist()) == ("loss", [1.5])


def test_an_evaluation_is_a_second_curve(tmp_path):
    """Rows repeat the latest one until the next; these are a run's."""
    settings = {"num_envs": 2, "num_steps": 32, "epochs": 1, "seed": 1, "evaluation_interval": 2}
    algorithm = PPO(PPOConfig(env="CartPole-v1", evaluation_episodes=2, **settings))
    algorithm.fit(Stop(env_steps=5 * 32), out=tmp_path / "a")
    _, _, (mean, evaluation) = _curves(tmp_path / "a", "a")
    assert (mean.label, evaluation.label) == ("a", "a, evaluation")
    assert mean.x[-1] == 5 * 32
    assert evaluation.x.tolist() == [2 * 32, 4 * 32, 5 * 32]  # the last one when training ends
    rows = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert evaluation.value.tolist() == [rows[i]["evaluation"]["return_mean"] for i in (1, 3, 5)]
    plot_runs([tmp_path / "a"], tmp_path / "c.png")


def test_rows_that_a_resumed_run_wrote_anew_replace_the_old_ones(tmp_path):
    steps = [100, 200, 300, 400, 200, 300, 500]
    rows = [{"env_steps": x, "return_mean": i} for i, x in enumerate(steps)]
    _, _, (curve,) = _curves(_run(tmp_path / "r", rows), "r")
    assert curve.x.tolist() == [100, 200, 200, 300, 500]
    assert curve.value.tolist() == [0, 1, 4, 5, 6]


def test_labels_tell_runs_apart():
    assert _labels(["runs/ppo", "runs/bc/"]) == ["ppo", "bc"]
    assert _labels(["runs/a/ppo", "runs/b/ppo"]) == ["a/ppo", "b/ppo"]
    assert _labels(["runs/a/metrics.jsonl"]) == ["a"]
    assert _labels(["runs/a", "runs/a"]) == ["a", "a"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: None, "is not a training run"),
        (lambda run: run.mkdir(), r"is not a training run: it has no metrics\.jsonl"),
        (
            lambda run: _run(run / "seed-1", []),
            r"is not a training run: .* or several, such as .*run7/\*: it has seed-1\.",
        ),
        (lambda run: _run(run, []), "is empty: the run has not finished its first iteration"),
        (lambda run: _run(run, [{"env_steps": 3}]), "has nothing to plot: no line has env_steps with return_mean"),
        (lambda run: _run(run, [{"return_mean": 3}]), "has nothing to plot"),
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path, make, message):
    make(tmp_path / "run7")
    with pytest.raises(DataError, match=f"run7.*{message}"):
        plot_runs([tmp_path / "run7"], tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_no_run_and_an_unknown_format_are_refused(tmp_path):
    with pytest.raises(DataError, match="no run to plot"):
        plot_runs([], tmp_path / "c.png")
    with pytest.raises(DataError, match=r"can't write the picture .*c\.xyz: .*Give a path that ends in \.png"):
        plot_runs([_online(tmp_path / "ppo", 3)], tmp_path / "c.xyz")
