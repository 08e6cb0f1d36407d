# SPDX-License-Identifier: Apache-2.0
"""Statistics, histograms and counts of columns, and images as PNG, all as plain data for a page."""

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude.spaces import Space

Values: TypeAlias = NDArray[Any]

MAX_PARTS: Final = 32
"""The largest number of components of a vector that are shown: the first ones of a longer vector."""
MAX_LABELS: Final = 40
"""The largest number of labels with counts. Whole numbers in a wider range are shown as a histogram with edges; of
texts, only the most frequent are shown."""
NUM_BINS: Final = 40
_SMALLEST_IMAGE: Final = 8


def scalars(name: str, values: Values) -> dict[str, Values]:
    """Split ``values`` ``[steps, ...]`` into columns ``[steps]``, one per component.

    Returns:
        The columns by name: ``name`` itself for ``[steps]``, else ``obs[0]``, ``obs[1]``, ..., at most `MAX_PARTS`.
    """
    if values.ndim == 1:
        return {name: values}
    flat = values.reshape(len(values), -1)
    return {f"{name}[{i}]": flat[:, i] for i in range(min(flat.shape[1], MAX_PARTS))}


def statistics(values: Values) -> dict[str, Any]:
    """Summarise ``[n]`` numbers or texts.

    Returns:
        ``steps``, ``missing`` and ``distinct``: how many values there are, how many of them are missing (NaN or None),
        and how many different ones. For numbers also ``infinite``, how many are infinite; and ``min``, ``max``,
        ``mean`` and ``std`` of the finite values (None if no value is finite). For texts also ``counts``: how often the
        most frequent ones occur.
    """
    if values.dtype == object:
        counts = Counter(str(value) for value in values.tolist() if value is not None)
        missing, most = len(values) - counts.total(), dict(counts.most_common(MAX_LABELS))
        return {"steps": len(values), "missing": missing, "distinct": len(counts), "counts": most}
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        missing = int(np.isnan(numbers).sum())
    else:
        finite, missing = values.astype(np.uint8) if values.dtype == bool else values, 0
    out: dict[str, Any] = {"steps": len(values), "missing": missing, "infinite": len(values) - len(finite) - missing}
    out["distinct"] = len(np.unique(finite))
    if not len(finite):
        return out | dict.fromkeys(("min", "max", "mean", "std"))
    low, high = finite.min().item(), finite.max().item()
    if finite.dtype.kind == "f":
        scale = 2.0 ** max(np.frexp(max(-low, high))[1] - 500, 0)  # some columns mark missing values with the largest
        scaled = finite / scale
        return out | {"min": low, "max": high, "mean": float(scaled.mean()) * scale, "std": float(scaled.std()) * scale}
    above = (finite.astype(np.uint64) - finite.min().astype(np.uint64)).astype(np.float64)  # modulo 2 ** 64
    return out | {"min": low, "max": high, "mean": low + float(above.mean()), "std": float(above.std())}


def histogram(columns: Sequence[Values]) -> dict[str, Any]:
    """Count how often values occur in each of several columns ``[n]`` of numbers or texts, with the same bins.

    Returns:
        ``labels`` if the columns hold texts, or whole numbers in a small range; otherwise ``edges``, one more than
        there are bins. In both cases also ``counts``: for each column, a list with one count per label or bin. NaN,
        infinity and None are not counted.
    """
    if any(values.dtype == object for values in columns):
        each = [Counter(str(value) for value in values.tolist() if value is not None) for values in columns]
        labels = [label for label, _ in sum(each, Counter[str]()).most_common(MAX_LABELS)]
        return {"labels": labels, "counts": [[counter[label] for label in labels] for counter in each]}
    finite = [values[np.isfinite(values.astype(np.float64))] for values in columns]
    some = [np.unique(values) for values in finite if len(values)]
    distinct = np.unique(np.concatenate(some)) if some else np.zeros(0)
    is_whole = all(values.dtype.kind in "biu" for values in some or finite)
    if is_whole and (not some or int(distinct[-1]) - int(distinct[0]) < MAX_LABELS):  # as Python's: none overflows
        counts = [[int((values == one).sum()) for one in distinct] for values in finite]
        return {"labels": [str(one) for one in distinct.tolist()], "counts": counts}
    low, high = (float(distinct[0]), float(distinct[-1])) if len(distinct) else (0.0, 0.0)
    # Halved first, because the range between the largest floats would overflow.
    edges = np.linspace(low / 2, high / 2, NUM_BINS + 1) * 2 if low < high else np.array([low - 0.5, low + 0.5])
    return {"edges": edges.tolist(), "counts": [np.histogram(values, edges)[0].tolist() for values in finite]}


def plain(values: Values) -> list[Any]:
    """Convert ``[n]`` values to a list that JSON can store: NaN and infinity become None, objects become text."""
    if values.dtype == object:
        return [None if value is None else str(value) for value in values.tolist()]
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [value if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]


def is_image(leaf: Space) -> bool:
    """Whether the values of a space are images: uint8, or float from 0 to 1.

    Their shape is ``[H, W]``, or has a third axis, first or last, for channels or stacked frames.
    """
    if not isinstance(leaf, spaces.Box) or len(leaf.shape) not in (2, 3):
        return False
    is_scaled = leaf.dtype.kind == "f" and bool(np.all(leaf.low >= 0) and np.all(leaf.high <= 1))
    return (leaf.dtype == np.uint8 or is_scaled) and sorted(leaf.shape)[-2] >= _SMALLEST_IMAGE


def png(image: Values) -> bytes:
    """Encode an image as PNG.

    Args:
        image: ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``; uint8, or float from 0 to 1. With 3 channels it has colours;
            otherwise it is a stack of frames, and the last frame is encoded. The fourth of 4 channels is opacity, and
            left out, if it is at its largest everywhere.
    """
    from PIL import Image  # slow to import

    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[0] < pixels.shape[-1]:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 4 and bool((pixels[..., -1] == 255).all()):
        pixels = pixels[..., :3]
    if pixels.ndim == 3 and pixels.shape[-1] != 3:
        pixels = pixels[..., -1]
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, format="PNG")
    return out.getvalue()
