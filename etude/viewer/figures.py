# SPDX-License-Identifier: Apache-2.0
"""Figures of columns: statistics, histograms and counts, and images as PNG, all as plain data for a page."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude.spaces import Space

Values: TypeAlias = NDArray[Any]

MAX_PARTS: Final = 32
"""The numbers of a vector that are shown; of longer ones, the first."""
MOST_COUNTED: Final = 40
"""Whole numbers in a wider range than this are shown as a histogram; of texts, so many, the most frequent."""
NUM_BINS: Final = 40
_SMALLEST_IMAGE: Final = 8
_CHANNELS: Final = (1, 3, 4)


def scalars(name: str, values: Values) -> dict[str, Values]:
    """``values`` ``[steps, ...]`` as columns of one value a step (``obs[0]``), at most `MAX_PARTS`."""
    if values.ndim == 1:
        return {name: values}
    flat = values.reshape(len(values), -1)
    return {f"{name}[{i}]": flat[:, i] for i in range(min(flat.shape[1], MAX_PARTS))}


def statistics(values: Values) -> dict[str, Any]:
    """Of ``[n]`` numbers or texts: how many there are, are missing (NaN or None) and differ; of numbers, also min, max,
    mean and std (float, None where there is no finite one)."""
    if values.dtype == object:
        there = [value for value in values.tolist() if value is not None]
        return {"steps": len(values), "missing": len(values) - len(there), "distinct": len({str(v) for v in there})}
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    out: dict[str, Any] = {"steps": len(values), "missing": int(np.isnan(numbers).sum())}
    out["distinct"] = len(np.unique(finite))
    with np.errstate(over="ignore", invalid="ignore"):  # of the largest numbers, such as those that stand for "none"
        found = np.array([finite.min(), finite.max(), finite.mean(), finite.std()] if len(finite) else [np.nan] * 4)
    return out | dict(zip(("min", "max", "mean", "std"), plain(found), strict=True))


def histogram(columns: Sequence[Values]) -> dict[str, Any]:
    """How often values occur in each of several columns ``[n]``, of numbers or of texts.

    Returns:
        ``labels`` with ``counts`` for each column, where it holds texts, or whole numbers in a small range; else
        ``edges`` (one more than bins) with ``counts``. NaN, infinity and None are left out.
    """
    if any(values.dtype == object for values in columns):
        each = [Counter(str(value) for value in values.tolist() if value is not None) for values in columns]
        labels = [label for label, _ in sum(each, Counter[str]()).most_common(MOST_COUNTED)]
        return {"labels": labels, "counts": [[counter[label] for label in labels] for counter in each]}
    finite = [values[np.isfinite(values.astype(np.float64))] for values in columns]
    distinct = np.unique(np.concatenate([np.unique(values) for values in finite])) if finite else np.zeros(0)
    is_whole = all(values.dtype.kind in "biu" for values in finite)
    if is_whole and (not len(distinct) or distinct[-1] - distinct[0] < MOST_COUNTED):
        counts = [[int((values == one).sum()) for one in distinct] for values in finite]
        return {"labels": [str(one) for one in distinct.tolist()], "counts": counts}
    low, high = (float(distinct[0]), float(distinct[-1])) if len(distinct) else (0.0, 0.0)
    # Halved, so that the width of the largest numbers is one.
    edges = np.linspace(low / 2, high / 2, NUM_BINS + 1) * 2 if low < high else np.array([low - 0.5, low + 0.5])
    return {"edges": edges.tolist(), "counts": [np.histogram(values, edges)[0].tolist() for values in finite]}


def plain(values: Values) -> list[Any]:
    """``[n]`` values as JSON has them: NaN and infinity are None, other things than numbers are text."""
    if values.dtype == object:
        return [None if value is None else str(value) for value in values.tolist()]
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [value if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]


def is_image(leaf: Space) -> bool:
    """Whether values of a space can be looked at: ``[H, W]``, or with channels or a stack of frames first or last."""
    if not isinstance(leaf, spaces.Box) or len(leaf.shape) not in (2, 3):
        return False
    is_scaled = leaf.dtype.kind == "f" and bool(np.all(leaf.low >= 0) and np.all(leaf.high <= 1))
    return (leaf.dtype == np.uint8 or is_scaled) and sorted(leaf.shape)[-2] >= _SMALLEST_IMAGE


def png(image: Values) -> bytes:
    """An image ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]`` of uint8, or of floats from 0 to 1, as a PNG.

    Of a stack of frames (other than 1, 3 or 4 channels), it is the last.
    """
    from PIL import Image  # takes a while

    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[0] < pixels.shape[-1]:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] not in _CHANNELS[1:]:
        pixels = pixels[..., -1]
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, format="PNG")
    return out.getvalue()


def of_episodes(figures: Mapping[str, Values], rows: Values) -> dict[str, list[Any]]:
    """The figures of some episodes, as columns of plain values."""
    return {name: plain(values[rows]) for name, values in figures.items()}
