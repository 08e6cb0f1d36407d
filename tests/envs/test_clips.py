# SPDX-License-Identifier: Apache-2.0
"""Frames, the files they go to, and envs that draw them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from PIL import Image, ImageSequence

from etude.envs import registry, render
from etude.envs.render import ClipFile, filmed, parse_size, resized, standard_frame
from etude.errors import DataError, EnvError, SettingsError

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (5, 7, 3), np.uint8)


# -- frames ---------------------------------------------------------------------------------------------------------


def grey(picture):
    return np.repeat(picture[:, :, :1], 3, axis=2)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (PICTURE, PICTURE),
        (PICTURE[::-1, ::2], PICTURE[::-1, ::2]),
        (PICTURE.transpose(2, 0, 1), PICTURE),
        (np.asfortranarray(PICTURE), PICTURE),
        (np.dstack([PICTURE, np.zeros((5, 7), np.uint8)]), PICTURE),
        (np.dstack([PICTURE, np.zeros((5, 7), np.uint8)]).transpose(2, 0, 1), PICTURE),
        (PICTURE[:, :, 0], grey(PICTURE)),
        (PICTURE[:, :, :1], grey(PICTURE)),
        (PICTURE[None, :, :, 0], grey(PICTURE)),
        (PICTURE.astype(np.int64), PICTURE),
        (PICTURE.astype(np.float32), PICTURE),
        (PICTURE.astype(np.float64) / 255, PICTURE),
        (PICTURE.transpose(2, 0, 1).astype(np.float16) / 255, PICTURE),
        (PICTURE.tolist(), PICTURE),
        (Image.fromarray(PICTURE), PICTURE),
        (PICTURE > 127, np.where(PICTURE > 127, 255, 0)),
        (np.zeros((2, 2)), np.zeros((2, 2, 3))),
        (np.ones((2, 2)), np.full((2, 2, 3), 255)),
        (np.ones((2, 2), np.int32), np.ones((2, 2, 3))),
        (np.full((2, 2), 0.5), np.full((2, 2, 3), 128)),  # 127.5, to even
        (np.full((1, 1), 254.4), np.full((1, 1, 3), 254)),
    ],
)
def test_any_form_of_frame_becomes_bytes_of_its_own(given, wanted):
    frame = standard_frame(given)
    np.testing.assert_array_equal(frame, wanted)
    assert (frame.dtype, frame.flags.c_contiguous) == (np.uint8, True)
    assert not np.shares_memory(frame, PICTURE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"render\(\) gave None instead .* make the env with render_mode='rgb_array'"),
        ([PICTURE, PICTURE], r"gave list of shape \(2, 5, 7, 3\), not a frame"),
        ([[1, 2], [3]], "gave list of shape .*, not a frame of numbers"),
        ("a drawing", "gave str of shape .*, not a frame of numbers"),
        (np.zeros((0, 4, 3), np.uint8), r"gave ndarray of shape \(0, 4, 3\), not a frame"),
        (np.zeros(4), r"of shape \(4,\), not a frame of numbers: \[H, W\]"),
        (np.zeros((5, 4, 2)), r"of shape \(5, 4, 2\), not a frame"),
        (np.zeros((1, 3, 4, 4)), r"of shape \(1, 3, 4, 4\), not a frame"),
        (np.array([[0.0, np.nan]]), "a frame of float64 from nan to nan: give 0..255"),
        (np.array([[0.0, np.inf]]), "from 0.0 to inf"),
        (np.array([[-0.5, 0.5]]), "from -0.5 to 0.5"),
        (np.array([[0, 256]]), "a frame of int64 from 0 to 256"),
    ],
)
def test_what_is_no_frame_is_named(given, message):
    with pytest.raises(EnvError, match=message):
        standard_frame(given)


@pytest.mark.parametrize(
    ("size", "wanted"), [("480x320", (480, 320)), (" 4X3 ", (4, 3)), ((8, 9), (8, 9)), (None, None)]
)
def test_sizes(size, wanted):
    assert parse_size(size) == wanted


@pytest.mark.parametrize(
    "size", ["480", "480x", "0x4", "4x9000", "-4x4", "4x4x4", "1e2x4", "", (4,), (4, 0), (4.0, 4), 480]
)
def test_sizes_that_are_none(size):
    with pytest.raises(SettingsError, match="`size` is .*, but must be width and height in pixels, each 1 to 8192"):
        parse_size(size)


def test_a_frame_is_resized_whole_and_undistorted():
    frame = np.full((2, 4, 3), 200, np.uint8)
    frame[0, 0] = 100
    larger = resized(frame, (8, 8))  # twice as large, with two rows of black above and below
    assert larger.shape == (8, 8, 3)
    assert not larger[:2].any()
    assert not larger[6:].any()
    np.testing.assert_array_equal(larger[2:6], frame.repeat(2, axis=0).repeat(2, axis=1))
    smaller = resized(frame, (2, 1))
    np.testing.assert_array_equal(smaller[0, 0], (100 + 3 * 200) / 4)
    np.testing.assert_array_equal(smaller[0, 1], 200)
    assert resized(frame, (4, 2)) is frame


# -- files ----------------------------------------------------------------------------------------------------------


def moving(n, height=40, width=60):
    """A red square that wanders over blue, in big blocks that any codec keeps."""
    frames = np.zeros((n, height, width, 3), np.uint8)
    frames[:] = (20, 40, 180)
    for i in range(n):
        frames[i, 8:24, i : i + 16] = (220, 30, 30)
    return frames


def write(path, frames, fps=25.0):
    with ClipFile(path, fps) as file:
        for frame in frames:
            file.write(frame)
    return file


def read(path):
    """What ffmpeg itself finds in a video: facts, and frames."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    said = done.stderr.decode()
    codec, pixels, width, height = re.search(r"Video: (\w+).*?(yuv\w+).*? (\d+)x(\d+)", said).groups()
    fps, hours, minutes, seconds = (
        *re.search(r"([\d.]+) fps", said).groups(),
        *re.search(r"Duration: (\d+):(\d+):([\d.]+)", said).groups(),
    )
    facts = Facts(codec, pixels, float(fps), 3600 * int(hours) + 60 * int(minutes) + float(seconds))
    return facts, np.frombuffer(done.stdout, np.uint8).reshape(-1, int(height), int(width), 3)


class Facts(NamedTuple):
    codec: str
    pixels: str
    fps: float
    seconds: float


@pytest.mark.parametrize(("kind", "codec"), [(".mp4", "h264"), (".webm", "vp9")])
@pytest.mark.parametrize("fps", [25.0, 12.5])
def test_a_video_holds_the_frames(tmp_path, kind, codec, fps):
    frames = moving(30)
    path = tmp_path / "new" / "folder" / f"clip{kind}"
    assert write(path, frames, fps).num_frames == 30
    facts, seen = read(path)
    assert facts == (codec, "yuv420p", fps, pytest.approx(30 / fps, abs=0.05))
    assert seen.shape == frames.shape
    assert np.abs(seen.astype(int) - frames).mean() < 6
    for frame, i in ((seen[0], 0), (seen[29], 29)):  # in their order
        np.testing.assert_allclose(frame[12:20, i + 4 : i + 12].mean(axis=(0, 1)), (220, 30, 30), atol=10)
        np.testing.assert_allclose(frame[30:].mean(axis=(0, 1)), (20, 40, 180), atol=10)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", [".mp4", ".webm"])
def test_odd_sides_gain_a_black_row_and_column(tmp_path, kind):
    write(tmp_path / f"clip{kind}", np.full((3, 31, 45, 3), 200, np.uint8))
    _, seen = read(tmp_path / f"clip{kind}")
    assert seen.shape == (3, 32, 46, 3)
    np.testing.assert_allclose(seen[:, :28, :42], 200, atol=10)


@pytest.mark.parametrize("fps", [10.0, 30.0, 100.0])
def test_a_gif_holds_the_frames_exactly(tmp_path, fps):
    frames = moving(20)
    frames[7] = frames[6]  # nothing changes here
    frames[9, -1, -1] = 7  # only a corner does
    path = tmp_path / "clip.gif"
    write(path, frames, fps)
    with Image.open(path) as image:
        assert (image.size, image.n_frames, image.info["loop"]) == ((60, 40), 19, 0)  # equal frames are one
        times, seen = [], []
        for frame in ImageSequence.Iterator(image):
            times.append(frame.info["duration"])
            seen.append(np.asarray(frame.convert("RGB")))
    np.testing.assert_array_equal(seen, np.delete(frames, 7, axis=0))
    assert times[6] > times[5]
    assert sum(times) == {10.0: 2000, 30.0: 670, 100.0: 400}[fps]  # hundredths of a second; at least two a frame
    assert os.listdir(tmp_path) == ["clip.gif"]


def test_many_colours_in_a_gif_become_the_nearest(tmp_path):
    y, x = np.mgrid[:64, :64] * 4
    frame = np.stack([y, x, (x + y) // 2], axis=2).astype(np.uint8)
    write(tmp_path / "clip.GIF", [frame])
    with Image.open(tmp_path / "clip.GIF") as image:
        seen = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(seen - frame).mean() < 8


@pytest.mark.parametrize("kind", [".mp4", ".gif"])
def test_a_clip_that_is_broken_off_leaves_what_was_there(tmp_path, monkeypatch, kind):
    path = tmp_path / f"clip{kind}"
    path.write_bytes(b"before")
    started = []

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)

    def interrupted():
        with ClipFile(path, 30) as file:
            file.write(PICTURE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [path.name]
    assert len(started) == (kind == ".mp4")
    assert all(process.returncode is not None for process in started)
    with ClipFile(path, 30):
        pass  # no frame was made
    assert path.read_bytes() == b"before"
    write(path, [PICTURE])
    assert path.stat().st_size > 100


def test_ffmpeg_ends_with_a_killed_writer(tmp_path):
    code = (
        "import os, subprocess, sys, numpy as np\nfrom etude.envs.render import ClipFile\nreal = subprocess.Popen\n"
        "def popen(*args, **kwargs):\n    process = real(*args, **kwargs)\n    print(process.pid, flush=True)\n"
        "    return process\n"
        "subprocess.Popen = popen\n"
        f"file = ClipFile({str(tmp_path / 'clip.mp4')!r}, 30).__enter__()\n"
        "file.write(np.zeros((32, 32, 3), np.uint8))\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        pid = int(writer.stdout.readline())
        os.kill(pid, 0)
        writer.kill()
    limit = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and b" Z " not in Path(f"/proc/{pid}/stat").read_bytes():
        assert time.monotonic() < limit, "ffmpeg lives on"
    assert not (tmp_path / "clip.mp4").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip.avi", r"can't be written to .*clip\.avi: its name must end in \.mp4, \.webm or \.gif"),
        ("clip", "its name must end in"),
        ("folder.mp4", r"folder\.mp4, which is a folder: give a file in it"),
    ],
)
def test_names_that_are_no_clips(tmp_path, name, message):
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(SettingsError, match=message):
        ClipFile(tmp_path / name, 30)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1e6, "30"])
def test_rates_that_are_none(tmp_path, fps):
    with pytest.raises(SettingsError, match="`fps` is .*, but must be between 0.01 and 1000 frames a second"):
        ClipFile(tmp_path / "clip.gif", fps)


@pytest.mark.parametrize("kind", [".mp4", ".gif"])
def test_a_place_that_can_not_be_written_to_is_named(tmp_path, kind):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"can't write the clip .*file/clip\{kind}: (Not a directory|File exists)"):
        write(tmp_path / "file" / f"clip{kind}", [PICTURE])


@pytest.mark.parametrize("count", [1, 50])  # few go into the pipe before ffmpeg has ended
def test_what_ffmpeg_says_is_passed_on(tmp_path, monkeypatch, count):
    monkeypatch.setitem(render._CODECS, ".mp4", ["-c:v", "no_such_codec", "-f", "mp4"])
    with pytest.raises(DataError, match=r"can't write the clip .*clip\.mp4: ffmpeg failed: .*no_such_codec"):
        write(tmp_path / "clip.mp4", np.zeros((count, 64, 64, 3), np.uint8))
    assert os.listdir(tmp_path) == []


def test_a_missing_encoder_is_named_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "no-ffmpeg"))
    with pytest.raises(SettingsError, match=r"ffmpeg can't be started: .*no-ffmpeg: No such file"):
        write(tmp_path / "clip.mp4", [PICTURE])
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(
        SettingsError, match=r"pip install '\.\[video\]' in the clone .*\. A \.gif can be written without it"
    ):
        ClipFile(tmp_path / "clip.webm", 30)
    write(tmp_path / "clip.gif", [PICTURE])
    assert os.listdir(tmp_path) == ["clip.gif"]


# -- envs -----------------------------------------------------------------------------------------------------------


class Drawn(gym.Env):
    """Draws the number of its steps, and of its episodes, as grey levels."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012
    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None, length=3):
        self.render_mode = render_mode
        self.length = length
        self.episode, self.t = 0, 0
        self.closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}

    def render(self):
        return np.full((4, 6), 10 * self.episode + self.t, np.uint8)

    def close(self):
        self.closed = True


def film(env, play, **kwargs):
    taken = []
    with filmed(env, lambda frame, begins: taken.append((int(frame[0, 0, 0]), begins)), **kwargs):
        play()
    return taken


def test_an_episode_has_a_frame_more_than_steps():
    env = Drawn("rgb_array")

    def play():
        env.reset()
        env.reset()  # the first one makes no step: no frame
        env.step(0)
        env.step(0)
        env.reset()
        env.step(None)  # takes away an agent that has ended: no frame
        env.step(0)
        env.reset()

    assert film(env, play) == [(20, True), (21, False), (22, False), (30, True), (32, False)]
    assert "step" not in vars(env)
    assert env.reset.__func__ is Drawn.reset


def test_an_object_that_was_changed_gets_its_own_methods_back():
    env = Drawn("rgb_array")
    mine = env.step = lambda action: Drawn.step(env, action)
    assert film(env, lambda: (env.reset(), env.step(0))) == [(10, True), (11, False)]
    assert env.step is mine
    with pytest.raises(ZeroDivisionError):
        film(env, lambda: 1 / 0)
    assert env.step is mine


def test_frames_are_copies_of_what_the_env_draws_into():
    env = Drawn("rgb_array")
    canvas = np.zeros((2, 2, 3), np.uint8)
    env.render = lambda: canvas
    frames = []
    with filmed(env, lambda frame, begins: frames.append(frame)):
        env.reset()
        canvas += 1
        env.step(0)
        canvas += 1
    assert [frame.max() for frame in frames] == [0, 1]


def test_frames_that_change_their_size_are_an_error_unless_a_size_is_given():
    env = Drawn("rgb_array")
    env.render = lambda: np.zeros((4, 6 + env.t, 3), np.uint8)
    with pytest.raises(EnvError, match=r"gave a frame of 7x4 pixels after one of 6x4: give one `size` for all frames"):
        film(env, lambda: (env.reset(), env.step(0)))
    shapes = []
    with filmed(env, lambda frame, begins: shapes.append(frame.shape), size=(6, 4)):
        env.reset()
        env.step(0)
    assert shapes == [(4, 6, 3)] * 2


def test_an_env_that_fails_to_draw_is_named():
    env = Drawn("rgb_array")
    env.render = lambda: 1 / 0
    with pytest.raises(EnvError, match=r"can't be drawn: render\(\) fails with ZeroDivisionError: division"):
        film(env, lambda: env.reset())


def test_what_went_wrong_while_filming_is_told_whatever_others_make_of_it():
    env = Drawn("rgb_array")

    def full(frame, begins):
        raise DataError("the disk is full")

    def play():
        env.reset()
        try:
            env.step(0)
        except DataError as error:
            raise EnvError(f"env 0: {error}") from error

    def filming():
        with filmed(env, full):
            play()

    with pytest.raises(DataError, match="^the disk is full$"):
        filming()


def make_drawn(render_mode):
    return Drawn(render_mode)


def make_undrawn():
    return Drawn()


def fails(render_mode):
    raise RuntimeError("no licence")


def test_envs_of_every_making_draw():
    for env in (
        "CartPole-v1",
        "gymnasium:CartPole-v1",
        Drawn,
        make_drawn,
        "test_clips:make_drawn",
        lambda **kw: Drawn(**kw),
    ):
        made = render.rendering_env(env, "rgb_array")
        made.reset(seed=0)
        assert standard_frame(made.render()).ndim == 3
        made.close()
    mine = Drawn("rgb_array")
    assert render.rendering_env(mine, "rgb_array") is mine
    assert render.rendering_env(lambda: mine, "rgb_array") is mine


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (make_undrawn, r"test_clips:make_undrawn has render_mode None, but 'rgb_array' is needed here \(it knows "
                       r"rgb_array\): make it with .*, or let the function that makes it accept `render_mode`"),
        (Drawn(), r"Drawn has render_mode None, but 'rgb_array' .* make it with render_mode='rgb_array'"),
        (fails, r"fails fails to make an env: RuntimeError: no licence"),
        (SyncVectorEnv([Drawn]), "SyncVectorEnv is a SyncVectorEnv, which can't be shown: give one env"),
        (lambda: SyncVectorEnv([Drawn]), "is a SyncVectorEnv, which can't be shown"),
        (lambda: "text", "is a str, which can't be shown: give one env with reset, step and render"),
        ("CartPol-v1", "no env 'CartPol-v1' is registered .* Nearest: 'CartPole-v1'"),
        ("no_module:env", "can't import the module `no_module`"),
        ("test_clips:no_env", "the module has no `no_env`"),
        ("phys2d/CartPole-v9", "no env 'phys2d/CartPole-v9' is registered"),
    ],
)  # fmt: skip
def test_envs_that_can_not_be_seen_are_named(env, message):
    with pytest.raises(EnvError, match=message):
        render.rendering_env(env, "rgb_array")


def test_an_env_that_has_no_such_mode_is_closed_again():
    made = []

    def factory(render_mode):
        made.append(Drawn())
        return made[0]

    with pytest.raises(EnvError, match="render_mode None"):
        render.rendering_env(factory, "human")
    assert made[0].closed


def test_the_speed_of_an_env():
    assert render.fps_of(Drawn()) == 12
    assert render.fps_of(gym.make("CartPole-v1")) == 50
    assert render.fps_of(object()) == 30


def test_screens_and_their_want(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SettingsError, match="there is no screen here .* make a clip instead, with --to clip.mp4"):
        registry.check_screen()
    with registry.no_screen_needed():
        assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    assert "SDL_VIDEODRIVER" not in os.environ
    monkeypatch.setenv("DISPLAY", ":0")
    registry.check_screen()
    with registry.no_screen_needed():
        assert "SDL_VIDEODRIVER" not in os.environ
    monkeypatch.delenv("DISPLAY")
    monkeypatch.setattr(sys, "platform", "darwin")
    registry.check_screen()
