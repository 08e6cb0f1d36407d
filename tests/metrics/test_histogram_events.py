# SPDX-License-Identifier: Apache-2.0
import io

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.errors import DataError
from etude.metrics import TensorBoard


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    return events


def test_histograms_hold_all_numbers(tmp_path):
    values = np.random.default_rng(1).normal(size=1000)
    sink = TensorBoard(tmp_path)
    sink.histogram("spread", values, 10)
    sink.histogram("spread", [3.0, 3.0], 20)
    sink.histogram("spread", [], 30)
    sink.histogram("whole", np.arange(6).reshape(2, 3), 20)
    sink.close()
    events = read(tmp_path)
    first, second = events.Histograms("spread")
    assert (first.step, second.step) == (10, 20)
    found = first.histogram_value
    assert (found.min, found.max, found.num) == (values.min(), values.max(), 1000)
    assert found.sum == pytest.approx(values.sum())
    assert found.sum_squares == pytest.approx((values**2).sum())
    below = 0.0
    for limit, count in zip(found.bucket_limit[:-1], found.bucket[:-1], strict=True):
        below += count
        assert below == np.count_nonzero(values < limit)
    assert sum(found.bucket) == 1000
    assert sum(second.histogram_value.bucket) == 2
    assert events.Histograms("whole")[0].histogram_value.num == 6


def test_pictures_are_shown_as_they_are(tmp_path):
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    sink = TensorBoard(tmp_path)
    sink.image("picture", file.getvalue(), 4)
    sink.close()
    (found,) = read(tmp_path).Images("picture")
    assert (found.step, found.width, found.height) == (4, 7, 5)
    with Image.open(io.BytesIO(found.encoded_image_string)) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)


def test_what_is_no_picture_is_refused(tmp_path):
    sink = TensorBoard(tmp_path)
    for data in (b"", b"GIF8", b"<svg>" * 10):
        with pytest.raises(DataError, match="the image 'x' is neither PNG nor GIF"):
            sink.image("x", data, 1)
    sink.close()
