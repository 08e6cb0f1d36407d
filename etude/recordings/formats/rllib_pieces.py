# SPDX-License-Identifier: Apache-2.0
"""One RLlib episode as flat columns of one length, in the dtypes that hold for the whole recording."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.rllib_documents import Episode, Spaces, flat, info_columns

Schema: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and the shape of a row of each column."""


@dataclasses.dataclass(slots=True)
class Piece:
    """One agent's episode, flat."""

    episode: Episode
    num: int
    steps: Columns
    final: Columns
    t_start: int
    ends: tuple[bool, bool]
    """Terminated, truncated."""


def piece_of(episode: Episode, names: Sequence[str], spaces: Spaces, schema: Schema) -> Piece:
    """The columns ``names`` of an episode, in the dtypes and shapes that they have everywhere.

    Raises:
        DataError: a column is not there, has other entries than there are actions, or other shapes or numbers.
    """
    num = num_steps(episode)
    check_clock(episode, num)
    found = step_columns(episode, spaces, {name.split(col.SEPARATOR)[0] for name in names})
    infos = info_columns(episode.buffers.get(col.INFO)) if any(col.is_under(n, col.INFO) for n in names) else {}
    final: Columns = {}
    steps: Columns = {}
    for name in names:
        dtype, shape = schema[name]
        if col.is_under(name, col.INFO):
            column = infos.get(name)
            if column is None or len(column) != num or column.shape[1:] != shape:
                column = np.full((num, *shape), np.nan, dtype)
        elif name == col.ENV_T:
            column = _clock(episode, num)
        elif name in found:
            column = found[name]
        else:
            raise DataError(f"it has no `{name}`, which other episodes have; read without that column")
        if col.is_under(name, col.OBS):
            _check_length(name, len(column), num + 1, num)
            column = words.cast(column, dtype, shape, name)
            steps[name], final[name] = column[:-1], column[-1:]
            continue
        _check_length(name, len(column), num, num)
        steps[name] = words.cast(column, dtype, shape, name)
    ends = (episode.flag("is_terminated"), episode.flag("is_truncated"))
    return Piece(episode, num, steps, final, episode.t_started, ends)


def check_clock(episode: Episode, num: int) -> None:
    """Raise a DataError where the episode that it shares with others tells of more or fewer observations of it."""
    if episode.plain.get("is_whole"):
        told, there = 0 if episode.env_t is None else len(episode.env_t), num + 1
        if told != there and (num or told > 1):
            raise DataError(f"`env_t_to_agent_t` tells of {told} observations, but there are {there}: some were lost")


def num_steps(episode: Episode) -> int:
    """The steps of an episode, by its actions."""
    buffer = episode.buffers.get(col.ACTION)
    if buffer is None:
        raise DataError("it has no `actions`")
    data: Any = buffer.data
    whole = buffer.finalized or not isinstance(data, list)
    while whole and isinstance(data, dict | list | tuple) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    if not isinstance(data, list | np.ndarray) or (isinstance(data, np.ndarray) and data.ndim == 0):
        raise DataError("its `actions` are no list")
    return max(0, len(data) - buffer.lookback)


def step_columns(episode: Episode, spaces: Spaces, roots: set[str] | None = None) -> Columns:
    """The columns of all buffers but the infos; observations have one more row than the rest."""
    for root in (col.OBS, col.ACTION, col.REWARD):
        if root not in episode.buffers:
            raise DataError(f"it has no `{root}`")
    columns: Columns = {}
    for root, buffer in episode.buffers.items():
        if root != col.INFO and (roots is None or root in roots or root.split(col.SEPARATOR)[0] in roots):
            columns |= flat(buffer, root, spaces)
    for name, leaf in spaces.leaves.items():
        if name in columns:
            words.check_leaf(columns[name], leaf, name)
    return columns


def _check_length(name: str, found: int, wanted: int, num: int) -> None:
    if found != wanted:
        raise DataError(f"`{name}` has {found} entries, but with {num} actions it needs {wanted}")


def _clock(episode: Episode, num: int) -> NDArray[np.int64]:
    clock = episode.env_t
    if clock is None or len(clock) < num:
        raise DataError(f"`env_t_to_agent_t` tells {0 if clock is None else len(clock)} of its {num} steps")
    return clock[:num].astype(np.int64)
