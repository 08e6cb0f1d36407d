# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import json
import math

import gymnasium as gym
import numpy as np
import pytest

import etude
from etude.algorithms import PPO, PPOConfig, Stop
from etude.algorithms.comparison import band_of, bootstrap_interval, compare, interquartile_mean, plot_groups, read_runs
from etude.checkpoints import save_tree
from etude.cli.main import main
from etude.errors import DataError, SettingsError


def run(folder, returns, *, algorithm="etude.algorithms.ppo:PPO", env="CartPole-v1", lr=0.1, grad_clip=0.5):
    config = {"env": env, "lr": lr, "optimizer": {"grad_clip": grad_clip}}
    save_tree(folder, {}, meta={"algorithm": algorithm, "config": config})
    rows = [
        {
            "iteration": i + 1,
            "env_steps": 100 * (i + 1),
            "updates": i + 1,
            "return_mean": value,
            "losses": {"policy": -value},
        }
        for i, value in enumerate(returns)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    for seed in range(5):
        run(tmp_path / "ppo" / f"seed-{seed}", [1.0 * seed, 10.0 + seed, 20.0 + seed])
        run(tmp_path / "dqn" / f"seed-{seed}", [0.0, 5.0, 50.0], algorithm="etude.algorithms.dqn:DQN", lr=0.2)
    return tmp_path


@pytest.mark.parametrize("num", [1, 3, 4, 7, 10, 16])
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end(num):
    values = np.random.default_rng(num).normal(size=num)
    inner = sorted(values.tolist())
    for _ in range(math.floor(num / 4)):
        inner.remove(min(inner))
        inner.remove(max(inner))
    assert interquartile_mean(values) == pytest.approx(sum(inner) / len(inner))


def test_the_interval_holds_the_value_as_often_as_it_says():
    # 25 runs of a known distribution, many times over: the mean of it is in about 95 % of the intervals. With so few
    # runs, percentile intervals are a little too narrow.
    rng = np.random.default_rng(0)
    samples = rng.normal(3.0, 2.0, size=(120, 25))
    hits = 0
    for i, sample in enumerate(samples):
        low, high = bootstrap_interval(sample, seed=i)
        hits += low <= 3.0 <= high
    assert 0.88 <= hits / len(samples) <= 0.98


def test_groups_are_compared_with_intervals_and_the_best_is_first(runs):
    best, other = compare([runs / "ppo", runs / "dqn"])
    assert (best.name, best.env, best.num_runs) == ("dqn", "CartPole-v1", 5)
    assert best[3:] == (50.0, 50.0, 50.0, 300.0, 300.0)
    assert not best.is_uneven
    assert other.value == 22.0  # of 20 to 24, 20 and 24 left out
    assert 20.0 <= other.low < 22.0 < other.high <= 24.0


def test_a_run_that_is_given_twice_counts_once(runs):
    (found,) = compare([runs / "ppo", runs / "ppo" / "seed-0", runs / "ppo" / ".." / "ppo"])
    assert (found.num_runs, found[3:]) == (5, compare([runs / "ppo"])[0][3:])


@pytest.mark.parametrize("by", ["algo", "algorithm", "lr", "folder"])
def test_what_the_runs_of_a_group_have_in_common(runs, by):
    groups = compare([runs / "ppo", runs / "dqn"], by=by)
    names = {"lr": ["lr 0.2", "lr 0.1"], "folder": [str(runs / "dqn"), str(runs / "ppo")]}.get(by, ["dqn", "ppo"])
    assert [group.name for group in groups] == names


def test_folders_group_runs_as_they_are_given(runs):
    single = sorted((runs / "ppo").iterdir())[:2]
    groups = compare([*single, runs / "dqn"], by="folder")
    wanted = {str(path): 1 for path in single} | {str(runs / "dqn"): 5}
    assert {group.name: group.num_runs for group in groups} == wanted


def test_nested_settings_group_by_their_own_name_or_path(runs):
    run(runs / "ppo" / "seed-9", [1.0], grad_clip=9.0)
    for by in ("grad_clip", "optimizer.grad_clip"):
        assert {group.name for group in compare([runs / "ppo"], by=by)} == {f"{by} 0.5", f"{by} 9.0"}


def test_envs_are_not_mixed(runs):
    run(runs / "other", [1000.0], env="Ant-v5")
    groups = compare([runs / "ppo", runs / "other"])
    assert [(group.env, group.num_runs) for group in groups] == [("Ant-v5", 1), ("CartPole-v1", 5)]


def test_curves_are_averaged_where_all_runs_have_been(tmp_path):
    found = [run(tmp_path / "a", [0.0, 10.0, 20.0]), run(tmp_path / "b", [10.0, 30.0])]
    band = band_of(read_runs(found, by="algorithm"))
    assert (band.x[0], band.x[-1]) == (100, 200)
    np.testing.assert_allclose(band.value, 5 + (band.x - 100) * 0.15)
    assert band.label == "ppo (2 runs)"
    losses = read_runs(found, by="algorithm", y="losses/policy", x="iteration")
    assert losses[1].y.tolist() == [-10.0, -30.0]
    assert losses[1].x.tolist() == [1, 2]


def test_rows_without_the_figure_are_left_out(tmp_path):
    path = run(tmp_path / "a", [1.0, 2.0])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "env_steps": 300, "return_mean": null}\n')
    (found,) = read_runs([path], by="algorithm")
    assert found.y.tolist() == [1.0, 2.0]


def test_a_clock_that_stands_still_is_told(tmp_path):
    path = run(tmp_path / "a", [1.0])
    (path / "metrics.jsonl").write_text('{"env_steps": 0, "updates": 5, "return_mean": 1.0}\n')
    with pytest.raises(DataError, match="`x` is 0 in all rows"):
        plot_groups([path], tmp_path / "c.png")
    assert plot_groups([path], tmp_path / "c.png", x="updates").exists()


def test_a_run_that_has_diverged_is_told(tmp_path, caplog):
    path = run(tmp_path / "a", [1.0, 2.0])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "env_steps": 300, "return_mean": NaN}\n')
    assert compare([path])[0].value == 2.0
    assert "`return_mean` is not a finite number from env_steps 300 on: the run has diverged" in caplog.text


def test_a_loss_that_became_nan_in_a_run_of_its_own_is_told(tmp_path, caplog):
    class Diverges(PPO):
        def loss(self, module, batch):
            found = super().loss(module, batch)
            return etude.Loss(policy=found.parts["policy"] * (math.nan if self.iteration >= 2 else 1.0))

    config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, epochs=1, minibatch_size=64, seed=1)
    with pytest.raises(etude.EtudeError, match="gradient steps in a row were skipped"):
        Diverges(config).fit(Stop(env_steps=64 * 40), out=tmp_path / "run")
    (found,) = compare([tmp_path / "run"], y="losses/policy")
    assert math.isfinite(found.value)
    assert "`losses/policy` is not a finite number from env_steps" in caplog.text


def test_a_figure_that_is_not_known_at_the_end_has_not_diverged(tmp_path, caplog):
    path = run(tmp_path / "a", [1.0, 2.0])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "env_steps": 300, "return_mean": null, "evaluation": null}\n')
    assert compare([path])[0].value == 2.0
    assert not caplog.text


def test_a_setting_that_two_groups_have_is_not_guessed(tmp_path):
    path = run(tmp_path / "a", [1.0])
    config = {"env": "CartPole-v1", "target": {"interval": 100}, "evaluation": {"interval": 5}}
    save_tree(path, {}, meta={"algorithm": "etude.algorithms.dqn:DQN", "config": config})
    with pytest.raises(
        SettingsError, match=r"`interval` to group runs by may be target.interval or evaluation.interval"
    ):
        compare([path], by="interval")
    assert compare([path], by="evaluation_interval")[0].name == "evaluation_interval 5"


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"y": "retrun_mean"}, DataError, "return_mean"),
        ({"y": "losses/value"}, DataError, "no number"),
        ({"x": "steps"}, SettingsError, "env_steps"),
        ({"by": "learning"}, SettingsError, "no setting `learning`"),
    ],
)
def test_what_can_not_be_asked_is_said(runs, given, error, word):
    with pytest.raises(error, match=word):
        read_runs([runs / "ppo"], **{"by": "algorithm", **given})


def test_folders_without_runs_are_said(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        read_runs([tmp_path], by="algorithm")
    with pytest.raises(DataError, match="no run to compare"):
        read_runs([], by="algorithm")
    apart = [run(tmp_path / "a", [1.0]), run(tmp_path / "b", [2.0])]
    lines = (apart[1] / "metrics.jsonl").read_text().replace('"env_steps": 100', '"env_steps": 900')
    (apart[1] / "metrics.jsonl").write_text(lines)
    with pytest.raises(DataError, match="no time in common"):
        plot_groups(apart, tmp_path / "x.png")


def test_from_the_command_line(runs, tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["plot", str(runs / "ppo"), str(runs / "dqn"), "--by", "algo", "--to", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_text().startswith("<?xml")
    assert main(["compare", str(runs / "ppo"), str(runs / "dqn"), "--by", "lr"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["env", "lr", "runs", "trained", "for", "return_mean", "95", "%", "interval"]
    assert lines[1] == ["CartPole-v1", "lr", "0.2", "5", "300", "env_steps", "50", "50", "…", "50"]
    assert main(["compare", str(runs / "ppo"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["num_runs"] == 5
    assert main(["plot", str(runs / "ppo"), "--y", "losses/policy"]) == 2
    assert "--by" in capsys.readouterr().err


def test_a_run_that_ended_early_is_told_of(runs, capsys):
    path = runs / "ppo" / "seed-2" / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert main(["compare", str(runs / "ppo"), str(runs / "dqn")]) == 0
    out = capsys.readouterr().out
    assert "100 … 300" in out
    assert "ppo: its runs ended between 100 and 300 env_steps" in out
    assert "dqn: its runs" not in out
    assert main(["compare", str(runs / "ppo"), "--x", "iteration"]) == 0
    assert "ended between 1 and 3 iterations" in capsys.readouterr().out
    assert main(["compare", str(runs / "ppo"), "--x", "iteration", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["groups"][0]["first"], found["groups"][0]["last"], found["groups"][0]["x"]) == (1, 3, "iteration")
    assert len(found["uneven"]) == 1


def test_seconds_are_told_in_five_digits(tmp_path, capsys):
    path = run(tmp_path / "ppo", [1.0, 2.0]) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    more = ({"env_steps": 1_234_567, "seconds": 12.3456789 * row["iteration"]} for row in rows)
    path.write_text("".join(json.dumps(row | own) + "\n" for row, own in zip(rows, more, strict=True)))
    assert main(["compare", str(tmp_path), "--x", "seconds"]) == 0
    assert " 24.691 seconds " in capsys.readouterr().out
    assert main(["compare", str(tmp_path)]) == 0
    assert " 1,234,567 env_steps " in capsys.readouterr().out


def test_offline_runs_are_told_of_by_their_updates(tmp_path, capsys):
    for seed in range(2):
        path = run(tmp_path / f"seed-{seed}", [1.0, 2.0], algorithm="etude.algorithms.imitation:BC") / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps(row | {"env_steps": 0, "updates": 7 * row["iteration"]}) + "\n" for row in rows)
        )
    run(tmp_path / "ppo", [1.0, 2.0])
    assert main(["compare", str(tmp_path)]) == 0
    ends = sorted(line.split()[3:5] for line in capsys.readouterr().out.splitlines()[1:])
    assert ends == [["14", "updates"], ["200", "env_steps"]]


def test_runs_of_etude_itself(tmp_path):
    config = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1)
    for seed in (1, 2):
        algorithm = etude.PPO(dataclasses.replace(config, seed=seed))
        algorithm.fit(etude.Stop(env_steps=256), out=tmp_path / f"seed-{seed}", log=("jsonl",))
    (group,) = compare([tmp_path], by="env")
    assert (group.name, group.num_runs) == ("env CartPole-v1", 2)
    assert np.isfinite(group.value)
    plot_groups([tmp_path], tmp_path / "x.png", by="lr", x="updates")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", [functools.partial, lambda make, **given: lambda: make(**given)])
def test_envs_that_were_given_in_python_are_not_mixed_either(tmp_path, kind):
    for i, scale in enumerate((1.0, 100.0)):
        config = PPOConfig(env=kind(scaled, scale=scale), num_envs=2, num_steps=64, epochs=1, seed=1)
        PPO(config).fit(Stop(env_steps=128), out=tmp_path / f"run-{i}", log=("jsonl",))
    assert [group.num_runs for group in compare([tmp_path])] == [1, 1]


def scaled(scale):
    return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: scale * reward)
