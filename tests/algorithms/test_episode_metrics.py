# SPDX-License-Identifier: Apache-2.0
"""What results say of episodes and of where the time goes; callbacks of algorithms, from settings to TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from many_agent_envs import TwoJobs
from some_envs import Numbered, length_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_saving import facts, ppo
from toy_envs import Echo

import etude
from etude.algorithms import BC, PPO, BCConfig, PPOConfig
from etude.cli.main import main
from etude.connectors import NormalizeObs
from etude.errors import CheckpointError, SettingsError
from etude.metrics import read_jsonl
from etude.runners import Callback, RunningEpisode


class Tail(Callback):
    """Logs what an episode returned after a step, ``scale`` times; and pictures of it."""

    def __init__(self, after: int = 3, scale: float = 1.0) -> None:
        self.after, self.scale = after, scale
        self.episodes = 0

    def on_episode_step(self, episode: RunningEpisode) -> None:
        if episode.t > self.after:
            episode.data["tail"] = episode.data.get("tail", 0.0) + episode.reward

    def on_episode_end(self, episode: RunningEpisode) -> None:
        self.episodes += 1
        episode.log("tail", self.scale * episode.data.get("tail", 0.0))
        episode.log("count", self.episodes)
        episode.log("even" if episode.number % 2 == 0 else "odd", episode.t)
        episode.log_histogram("rewards", [episode.return_so_far] * 2)
        episode.log_media("square", np.zeros((4, 4, 3), np.uint8))

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episodes = state["episodes"]


class Gathers(Callback):
    """Keeps all episodes' figures."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def on_episode_end(self, episode: RunningEpisode) -> None:
        self.returns.append(episode.return_so_far)
        self.lengths.append(episode.t)


def make_numbered() -> Numbered:
    return Numbered(1)


SMALL = {"env": make_numbered, "num_envs": 1, "num_steps": 30, "minibatch_size": 15, "epochs": 1, "seed": 1}


# -- figures of episodes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", ["window", "ema"])
def test_figures_are_those_of_the_latest_episodes(smoothing: Any) -> None:
    gathers = Gathers()
    algorithm = PPO(PPOConfig(**SMALL, callbacks=(gathers, Tail(after=0, scale=2.0)), window=6, smoothing=smoothing))
    seen = []
    for _ in range(6):
        result = algorithm.train()
        done = algorithm.episodes
        seen += gathers.lengths[len(seen) : done]
        returns, lengths = np.array(gathers.returns[:done]), np.array(gathers.lengths[:done], float)
        assert lengths.tolist() == [length_of(1, episode) for episode in range(done)]
        for name, values in (("return", returns), ("length", lengths)):
            found = {what: getattr(result, f"{name}_{what}") for what in ("mean", "min", "max")}
            assert found == pytest.approx(naive(values, smoothing))
        assert result.returns_counted == min(done, 6)
        assert result.custom["tail"] == pytest.approx(naive(2 * returns, smoothing))
        assert result.custom["count"]["max"] == done
        assert result.custom["odd"] == pytest.approx(naive(lengths[1::2], smoothing))
        assert 0 < result.duration_min < result.duration_max < 10
        assert result.duration_mean > 0
    assert done > 30


def naive(values: Any, smoothing: str) -> dict[str, float]:
    """Over six episodes."""
    last = values[-6:]
    weights = np.ones(len(last)) if smoothing == "window" else (1 - 2 / 7) ** np.arange(len(values))[::-1]
    mean = float(weights @ (last if smoothing == "window" else values) / weights.sum())
    return {"mean": mean, "min": float(last.min()), "max": float(last.max())}


def test_agents_and_modules_have_their_own_figures() -> None:
    result = PPO(PPOConfig(**{**SMALL, "env": TwoJobs, "modules": ("echo", "aim"), "num_envs": 2})).train()
    assert result.episodes == 2
    for name in ("agent_returns", "module_returns"):
        least, mean, most = (getattr(result, f"{name}{ending}") for ending in ("_min", "", "_max"))
        assert set(least) == set(mean) == set(most) == {"echo", "aim"}
        assert all(least[key] < mean[key] < most[key] for key in least)
    assert sum(result.agent_returns.values()) == pytest.approx(result.return_mean)


def test_before_any_episode_has_ended_there_are_no_figures() -> None:
    result = ppo(env=Echo, num_steps=10, callbacks=(Tail,)).train()
    assert result.custom == {}
    assert math.isnan(result.duration_mean)
    assert math.isnan(result.length_max)


def test_connectors_report_themselves() -> None:
    algorithm = ppo(env=Echo, connectors=("normalize_obs",))
    assert algorithm.train().metrics["normalize_obs/count"] == 203
    assert algorithm.train().metrics["normalize_obs/count"] == 406
    assert {name for name in ppo(env=Echo).train().metrics if "/" in name} == {
        "parameters/trainable",
        "parameters/frozen",
        "grad_norm/policy",
        "grad_norm/value",
    }

    class Counts(NormalizeObs):
        def metrics(self) -> dict[str, float]:
            return {**super().metrics(), "clip": self.clip}

    assert ppo(env=Echo, connectors=(Counts(clip=3.0),)).train().metrics["counts/clip"] == 3.0


# -- where the time goes --------------------------------------------------------------------------------------------


def test_the_phases_of_a_turn_add_up_to_the_time_of_sampling() -> None:
    algorithm = ppo(connectors=("normalize_obs", "clip_action"), num_steps=2000)
    algorithm.train()
    result = algorithm.train()
    assert set(result.turn_ms) == {"env", "observe", "infer", "act", "note"}
    turns = 2000 / 5
    assert all(ms > 0 for name, ms in result.turn_ms.items() if name != "act")  # discrete actions are not clipped
    total = sum(result.turn_ms.values()) * turns / 1000
    assert 0.3 * result.times["sample"] < total <= result.times["sample"] * 1.01


def test_times_of_a_turn_are_of_the_iteration_or_a_moving_average() -> None:
    from etude.algorithms.results import RunningStats

    plain, smooth = RunningStats(3, "window"), RunningStats(3, "ema")
    for one in (plain, smooth):
        one.add_turns({"env": 1.0}, 10)
    assert plain.fields()["turn_ms"] == smooth.fields()["turn_ms"] == {"env": 100.0}
    for one in (plain, smooth):
        one.add_turns({"env": 1.4, "render": 0.2}, 30)
    assert plain.fields()["turn_ms"] == pytest.approx({"env": 20.0, "render": 10.0})
    assert smooth.fields()["turn_ms"] == pytest.approx({"env": (0.5 * 100 + 20) / 1.5, "render": 10.0})
    for one in (plain, smooth):
        one.add_turns({"env": 1.4, "render": 0.2}, 30)
    assert plain.fields()["turn_ms"] == pytest.approx({"env": 20.0, "render": 10.0})
    other = RunningStats(3, "ema")
    other.load_state_dict(smooth.state_dict())
    assert other.fields()["turn_ms"] == smooth.fields()["turn_ms"]


def test_callbacks_and_drawing_are_told_apart() -> None:
    class Draws(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            assert episode.render() is None

    class Drawn(Echo):
        def render(self) -> None:
            np.linalg.inv(np.eye(300))

    result = ppo(env=Drawn, callbacks=(Draws,)).train()
    assert result.turn_ms["render"] > result.turn_ms["callbacks"] > 0


# -- from settings to files -----------------------------------------------------------------------------------------


def test_a_run_with_callbacks_is_resumed_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    algorithm = ppo(callbacks=(Tail(after=5, scale=0.5), "test_episode_metrics:Gathers", Gathers))
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    expected = [facts(algorithm.train()) for _ in range(3)]
    loaded = etude.load(tmp_path)
    tail, by_name, by_class = loaded.config.callbacks
    assert (tail.after, tail.scale, by_name, by_class) == (5, 0.5, "test_episode_metrics:Gathers", Gathers)
    assert [facts(loaded.train()) for _ in range(3)] == expected
    assert loaded.callbacks[0].episodes == algorithm.callbacks[0].episodes  # type: ignore[attr-defined]
    assert "tail" in json.loads(expected[-1])["custom"]
    without = etude.load(tmp_path, callbacks=())
    assert without.train().episodes == json.loads(expected[0])["episodes"]


def test_callbacks_that_cannot_be_kept_must_be_given_again(tmp_path: Path) -> None:
    class Local(Callback):
        pass

    algorithm = ppo(callbacks=(Local(),))
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"`callbacks` was .*Local.*, which can't be kept .*callbacks=\.\.\.\)"):
        etude.load(tmp_path)
    etude.load(tmp_path, callbacks=(Local(),)).train()


@pytest.mark.parametrize("given", [3, print, "nowhere:Class"])
def test_what_is_no_callback_is_refused_early(given: Any) -> None:
    with pytest.raises(SettingsError, match="callback"):
        ppo(callbacks=(given,))


def test_evaluations_have_callbacks_of_their_own() -> None:
    training, evaluating = Gathers(), Gathers()
    algorithm = ppo(env=Echo, callbacks=(training,))
    algorithm.train()
    count = len(training.returns)
    evaluation = algorithm.evaluate(30, seed=1, callbacks=(evaluating, Tail(after=0)))
    assert len(training.returns) == count
    assert len(evaluating.returns) == 30
    assert evaluation.custom["tail"]["mean"] == pytest.approx(np.mean(evaluating.returns))
    assert evaluation.custom["tail"]["min"] == evaluation.return_min
    assert evaluation.custom["tail"]["max"] == evaluation.return_max
    assert algorithm.evaluate(2).custom == {}


def test_offline_they_are_called_in_evaluations(tmp_path: Path) -> None:
    ppo(env=Echo).record(tmp_path / "data", 5, seed=1)
    gathers = Gathers()
    config = BCConfig(
        data=str(tmp_path / "data"),
        env=Echo,
        evaluation_episodes=4,
        evaluation_interval=2,
        updates_per_iteration=2,
        callbacks=(gathers, Tail),
    )
    algorithm = BC(config)
    assert algorithm.train().custom == {}
    result = algorithm.train()
    assert len(gathers.returns) == 4
    assert result.custom["count"] == {"mean": 2.5, "min": 1.0, "max": 4.0}
    assert result.turn_ms == {}
    algorithm.train()
    assert algorithm.train().custom["count"]["max"] == 8
    assert list(algorithm.media) == ["square"]
    assert len(algorithm.histograms["rewards"]) == 8


def test_from_the_command_line_into_metrics_and_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    out = tmp_path / "run"
    settings = tmp_path / "settings.yaml"
    settings.write_text("callbacks: ['test_episode_metrics:Tail']\nsmoothing: ema\n")
    # so many steps that in each iteration some episode ends, whatever the actions are
    flags = ["--num-envs", "2", "--num-steps", "400", "--epochs", "1", "--stop.env-steps", "1200", "--seed", "1"]
    assert (
        main(["train", "ppo", "--env", "CartPole-v1", "--config", str(settings), "--out", str(out), *flags, "--quiet"])
        == 0
    )
    row = read_jsonl(out / "metrics.jsonl")[-1]
    assert row["custom"]["tail"]["mean"] == pytest.approx(row["return_mean"] - 3)
    assert set(row["turn_ms"]) == {"env", "observe", "infer", "act", "note", "callbacks"}
    assert row["length_max"] >= row["length_mean"]
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    assert {"custom/tail/mean", "turn_ms/infer", "duration_mean"} <= set(events.Tags()["scalars"])
    assert events.Tags()["histograms"] == ["custom/rewards"]
    assert [image.step for image in events.Images("custom/square")] == [400, 800, 1200]
    count = sum(event.histogram_value.num for event in events.Histograms("custom/rewards"))
    assert count == 2 * row["episodes"]
    again = ["train", "ppo", "--resume", str(out), "--callbacks", "test_episode_metrics:Gathers", "--quiet"]
    assert main([*again, "--stop.env-steps", "1600"]) == 0
    rows = read_jsonl(out / "metrics.jsonl")
    assert rows[-1]["custom"]["tail"] == row["custom"]["tail"]
    with pytest.raises(SystemExit):
        main(["train", "ppo", "--help-all"])
