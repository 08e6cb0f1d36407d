# SPDX-License-Identifier: Apache-2.0
import io

import numpy as np
import pytest
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.envs.render import ClipFile
from etude.errors import DataError
from etude.metrics import TensorBoard


def write_gif(path, frames):
    with ClipFile(path, 10) as file:
        for frame in frames:
            file.write(frame)


def test_clips_are_among_tensorboard_s_images(tmp_path):
    frames = np.zeros((3, 20, 30, 3), np.uint8)
    frames[1:, 5:, 5:] = (200, 10, 10)
    frames[2, 9:] = 255
    sink = TensorBoard(tmp_path / "tb")
    for step, count in ((10, 3), (20, 1)):
        write_gif(tmp_path / "clip.gif", frames[:count])
        sink.write({"a": step}, step)
        sink.video("clip", tmp_path / "clip.gif", step)
    (tmp_path / "clip.gif").unlink()
    sink.close()
    read = EventAccumulator(str(tmp_path / "tb"), size_guidance={"images": 0})
    read.Reload()
    assert read.Tags()["images"] == ["clip"]
    assert [(event.step, event.value) for event in read.Scalars("a")] == [(10, 10), (20, 20)]
    found = read.Images("clip")
    assert [(image.step, image.width, image.height) for image in found] == [(10, 30, 20), (20, 30, 20)]
    with Image.open(io.BytesIO(found[0].encoded_image_string)) as image:
        seen = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    np.testing.assert_array_equal(seen, frames)


def test_what_is_no_gif_is_refused(tmp_path):
    sink = TensorBoard(tmp_path / "tb")
    with pytest.raises(DataError, match=r"can't read the clip .*gone\.gif: No such file"):
        sink.video("clip", tmp_path / "gone.gif", 1)
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0 ftypisom.....")
    with pytest.raises(DataError, match=r"clip\.mp4 is not a GIF, and TensorBoard shows no other clips"):
        sink.video("clip", tmp_path / "clip.mp4", 1)
    sink.close()
    write_gif(tmp_path / "clip.gif", [np.zeros((2, 2, 3), np.uint8)])
    with pytest.raises(ValueError, match="is closed"):
        sink.video("clip", tmp_path / "clip.gif", 1)
