# SPDX-License-Identifier: Apache-2.0
import json
import os

import gymnasium as gym
import imageio_ffmpeg
import pytest
from cli_runs import SMALL, trained
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import etude
from etude.cli.main import main
from etude.metrics import read_jsonl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("watch") / "run")


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)


def count_frames(path):
    return imageio_ffmpeg.count_frames_and_secs(str(path))


def make_drawn(render_mode=None):
    return gym.make("CartPole-v1", max_episode_steps=8, render_mode=render_mode)


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif"])
def test_a_clip_in_words_and_as_json(run, tmp_path, capsys, kind):
    to = tmp_path / f"clip.{kind}"
    watch = ["watch", str(run), "--to", str(to), "--episodes", "3", "--seed", "9", "--size", "60x40"]
    assert main([*watch, "--json"]) == 0
    text = capsys.readouterr()
    told = json.loads(text.out)
    assert text.err == ""
    assert main(["evaluate", str(run), "--episodes", "1", "--seed", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["return_mean"] == told["returns"][0]
    assert (told["run"], told["episodes"], told["to"], told["fps"]) == (str(run), 3, str(to), 50.0)
    assert told["frames"] == sum(told["returns"]) + 3
    frames, seconds = count_frames(to)
    assert frames == told["frames"] or (kind == "gif" and frames < told["frames"])  # equal ones in a row are one
    frames = told["frames"]
    assert seconds == pytest.approx(frames / 50, abs=0.1)
    assert main(watch) == 0
    words = capsys.readouterr().out
    assert words.startswith("3 episodes, returned ")
    assert words.endswith(f"{frames} frames, {frames / 50:.1f} s at 50 a second, in {to}\n")
    assert main([*watch, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_another_env_rate_and_chance(run, tmp_path, capsys):
    to = tmp_path / "clip.gif"
    other = ["--env", "test_cli_watch:make_drawn", "--fps", "10"]
    for more in ([], ["--explore"], ["--random"]):
        assert main(["watch", str(run), "--to", str(to), *other, *more]) == 0
        assert capsys.readouterr().out == f"1 episode, returned 8\n9 frames, 0.9 s at 10 a second, in {to}\n"
        with Image.open(to) as image:
            assert (image.size, image.info["duration"] % 100) == ((600, 400), 0)
        assert count_frames(to)[1] == pytest.approx(0.9)


def test_a_run_without_its_env_at_random(run, tmp_path, capsys):
    returns = []
    for seed in ("1", "1", "2"):
        args = ["--to", str(tmp_path / "clip.gif"), "--size", "6x4", "--random", "--episodes", "2", "--seed", seed]
        assert main(["watch", str(run), *args, "--json"]) == 0
        returns.append(json.loads(capsys.readouterr().out)["returns"])
    assert returns[0] == returns[1] != returns[2]
    assert returns[0] == etude.clip(None, "CartPole-v1", episodes=2, seed=1).returns.tolist()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "watch needs either --to clip.mp4, which writes a clip"),
        (["--to", "clip.gif", "--live"], "own window; both were given."),
        (["--live"], "there is no screen here for the env's window"),
        (["--live", "--fps", "3"], "`fps` and `size` are for clips"),
        (["--to", "clip.avi"], "its name must end in .mp4, .webm or .gif"),
        (["--to", "clip.gif", "--size", "big"], "`size` is 'big', but must be width and height in pixels"),
        (["--to", "clip.gif", "--fps", "0"], "`fps` is 0.0, but must be between 0.01 and 1000"),
        (["--to", "clip.gif", "--episodes", "0"], "`episodes` is 0, but must be at least 1"),
        (["--to", "clip.gif", "--env", "cli_runs:make_env"], "cli_runs:make_env has render_mode None, but 'rgb_array'"),
        (["--to", "clip.gif", "--too", "3"], "watch has no setting `too`. Nearest: `to`"),
    ],
)
def test_errors(run, tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", str(run), *args]) == 2
    text = capsys.readouterr()
    assert text.out == ""
    assert message in text.err.replace("\n       ", " ")
    assert os.listdir(tmp_path) == []


def test_the_env_s_own_window(run, preloaded):
    """On a screen that SDL only makes believe."""
    code = "import sys\nfrom etude.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    args = ["watch", str(run), "--live", "--env", "test_cli_watch:make_drawn", "--episodes", "2"]
    env = os.environ | {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYTHONPATH": os.path.dirname(__file__)}
    done = preloaded.run(code, *args, env=env)
    assert (done.returncode, done.stdout) == (0, "2 episodes, returned 8, 8\n"), done.stderr


def test_a_run_that_trains_makes_clips(tmp_path, capsys):
    out = tmp_path / "run"
    train = ["--clip-interval", "2", "--out", str(out), "--stop.updates"]
    assert main([*SMALL, *train, "10"]) == 0  # 2 updates an iteration
    names = ["iteration_000002.gif", "iteration_000004.gif"]
    assert sorted(os.listdir(out / "clips")) == names
    read = EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    rows = read_jsonl(out / "metrics.jsonl")
    images = read.Images("clip")
    assert [image.step for image in images] == [rows[1]["env_steps"], rows[3]["env_steps"]]
    for name, image in zip(names, images, strict=True):
        assert (out / "clips" / name).read_bytes() == image.encoded_image_string
        assert (image.width, image.height) == (320, 240)
    plain = trained(tmp_path / "plain", updates=10)
    for row, other in zip(rows, read_jsonl(plain / "metrics.jsonl"), strict=True):
        assert row["losses"] == other["losses"]  # clips change nothing
    assert main([*SMALL, "--out", str(out), "--stop.updates", "2", "--overwrite", "--quiet"]) == 0
    assert not list(out.rglob("*.gif"))


class Endless(gym.Wrapper):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs * 0, reward, False, False, info


def make_endless(render_mode=None):
    return Endless(make_drawn(render_mode))


@pytest.mark.filterwarnings("ignore")  # of CartPole about what it does not allow
def test_a_clip_of_an_episode_that_never_ends_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.cli.train.CLIP_STEPS", 50)
    args = [*SMALL, "--env", "test_cli_watch:make_endless", "--out", str(tmp_path / "run"), "--stop.updates", "4"]
    assert main([*args, "--clip-interval", "1"]) == 0
    with Image.open(tmp_path / "run" / "clips" / "iteration_000001.gif") as film:
        assert 1 < film.n_frames <= 51


def test_clips_that_can_not_be_made_are_refused_before_training(tmp_path, capsys):
    args = [*SMALL, "--env", "cli_runs:make_env", "--out", str(tmp_path / "run"), "--stop.updates", "4"]
    assert main([*args, "--clip-interval", "1"]) == 2
    assert "cli_runs:make_env has render_mode None" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert main([*args, "--clip-interval", "-1"]) == 2
    assert "`clip_interval` is -1, but must be at least 0" in capsys.readouterr().err


class Tiring(gym.Wrapper):
    """Draws one frame, and then no more."""

    drawn = 0

    def render(self):
        Tiring.drawn += 1
        return super().render() if Tiring.drawn == 1 else None


def make_tiring(render_mode=None):
    return Tiring(make_drawn(render_mode))


def test_a_clip_that_fails_ends_no_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Tiring, "drawn", 0)
    args = [*SMALL, "--env", "test_cli_watch:make_tiring", "--out", str(tmp_path / "run"), "--stop.updates", "4"]
    assert main([*args, "--clip-interval", "2"]) == 0
    assert "no clip of iteration 2: render() gave None" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.gif"))
