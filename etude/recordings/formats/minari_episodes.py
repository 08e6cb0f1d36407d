# SPDX-License-Identifier: Apache-2.0
"""What Minari's two layouts have in common: episodes by name, columns by path, images packed as JPEG."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from etude.errors import DataError
from etude.files import AnyPath


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of an episode."""

    shape: tuple[int, ...]
    """The shape of a row."""
    dtype: np.dtype[Any]
    rows: int
    """How many rows the episode has of it."""
    image: bool = False
    """Rows are JPEG images."""


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The episodes of a dataset."""

    names: list[str]
    lengths: NDArray[np.int64]
    """The steps of each; there is one more observation."""
    seeds: list[int | None]
    """What the env was reset with."""


class Reader(Protocol):
    """Reads one layout. A column's path is made of Minari's names: ``("observations", "pos")``."""

    def files(self) -> list[AnyPath]:
        """The data files."""

    def where(self, name: str) -> str:
        """An episode in words, for errors."""

    def tuple_member(self, index: int) -> str:
        """The name of a Tuple's part in this layout."""

    def index(self) -> Episodes:
        """The episodes that are there, in order of their numbers."""

    def infos(self, name: str) -> dict[str, Column | None]:
        """The infos of one episode by path; None where one is not made of plain numbers."""

    def column(self, name: str, path: Sequence[str], *, image: bool) -> Column:
        """The shape and dtype of one column's rows in one episode."""

    def read(
        self,
        names: Sequence[str],
        wanted: Mapping[str, tuple[Sequence[str], Column]],
        rows: Mapping[str, Sequence[int]],
    ) -> dict[str, NDArray[Any]]:
        """Columns of some episodes, one after the other; ``rows`` are the rows of each episode in each column."""


def decoded_images(packed: Sequence[bytes], shape: tuple[int, ...], where: str) -> NDArray[np.uint8]:
    """JPEG images as uint8 ``shape``, their number first.

    Raises:
        DataError: there are not so many, or one can't be decoded or has another size.
    """
    if len(packed) != shape[0]:
        raise DataError(f"{where} holds {len(packed)} images, but {shape[0]} go with the other columns.")
    out = np.empty(shape, np.uint8)
    for i, data in enumerate(packed):
        try:
            image = Image.open(io.BytesIO(data), formats=["JPEG"])
            if (image.height, image.width) != shape[1:3]:  # before its pixels take memory
                raise ValueError(f"it is {image.height}x{image.width}, not {'x'.join(map(str, shape[1:3]))}")
            out[i] = np.asarray(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{where}: image {i} can't be decoded as JPEG ({error}).") from error
    return out
