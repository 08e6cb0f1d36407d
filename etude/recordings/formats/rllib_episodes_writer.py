# SPDX-License-Identifier: Apache-2.0
"""Writes what RLlib reads with ``input_read_episodes=True``: Parquet files with a msgpack document an episode.

The documents are as RLlib's own recorder writes them: a list with an entry for each step. What a module put out goes
under RLlib's names (``logp`` is ``action_logp``), and infos to where RLlib has them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.experience import Experience
from etude.recordings.formats.msgpack_writer import entries, list_header, list_of, map_header, packed
from etude.recordings.formats.parquet_files import ParquetFolder
from etude.recordings.formats.rllib_names import extras, infos_of, outputs
from etude.recordings.formats.rllib_spaces import map_of
from etude.recordings.layout import Header
from etude.spaces import Nester

ITEM: Final = "item"
GROUP_BYTES: Final = 8 << 20
"""Documents of about this size make a row group, which Ray reads whole."""


class RLlibEpisodesWriter:
    """Writes whole episodes that are done, a segment each: RLlib refuses others.

    Args:
        folder: Where to; it is there.
        header: What is written.
        columns: The step columns; all of numbers.
    """

    whole_episodes = True
    keeps_time = True
    needs_final_obs = True

    def __init__(self, folder: Path, header: Header, columns: list[str]) -> None:
        self.notes: list[str] = []
        self._files = ParquetFolder(folder)
        self._nesters = {
            col.OBS: Nester(header.obs_space, col.OBS),
            col.ACTION: Nester(header.action_space, col.ACTION),
        }
        by_root = {col.OBS: header.obs_space, col.ACTION: header.action_space}
        self._extras = extras(columns, by_root)
        self._spaces = {root: packed(map_of(space)) for root, space in by_root.items()}
        self._reward_space = packed(map_of(_REWARDS))
        self._documents: list[bytes] = []
        self._size = 0

    def write(self, exp: Experience) -> None:
        """Take these episodes."""
        for document in self._documents_of(exp):
            self._documents.append(document)
            self._size += len(document)
            if self._size >= GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        """Put everything on the disk."""
        self._flush()
        self._files.close()

    def _flush(self) -> None:
        if self._documents:
            self._files.add(pa.table({ITEM: pa.array(self._documents, pa.binary())}))
            self._documents, self._size = [], 0

    def _documents_of(self, exp: Experience) -> Iterator[bytes]:
        obs = entries(self._nesters[col.OBS](_with_finals(exp)))
        actions = entries(self._nesters[col.ACTION](exp.steps))
        rewards = entries(exp.steps[col.REWARD], plain=True)
        infos = infos_of(exp.steps)
        after = entries(infos) if infos else None
        more = {name: entries(tree) for name, tree in outputs({n: exp.steps[n] for n in self._extras}).items()}
        for i in range(exp.num_segments):
            start, stop = int(exp.offsets[i]), int(exp.offsets[i + 1])
            own = slice(start, stop)
            extra = map_header(len(more)) + b"".join(
                packed(name) + _buffer(list_of(rows[own]), _NOTHING) for name, rows in more.items()
            )
            said = [b"\x80"] * (stop - start) if after is None else [after[own].tobytes()]
            yield b"".join(
                [
                    _start_of(exp, i),
                    packed("observations") + _buffer(list_of(obs[start + i : stop + i + 1]), self._spaces[col.OBS]),
                    packed("actions") + _buffer(list_of(actions[own]), self._spaces[col.ACTION]),
                    packed("rewards") + _buffer(list_of(rewards[own]), self._reward_space),
                    packed("infos") + _buffer(b"".join([list_header(stop - start + 1), b"\x80", *said]), _NOTHING),
                    packed("extra_model_outputs") + (extra if more else _NOTHING),
                    _end_of(exp, i),
                    packed("_observation_space") + self._spaces[col.OBS],
                    packed("_action_space") + self._spaces[col.ACTION],
                    _CLOSING,
                ]
            )


def _start_of(exp: Experience, i: int) -> bytes:
    segments = exp.segments
    head = {
        "id_": segments.episode_id[i],
        "agent_id": segments.agent_id[i],
        "module_id": segments.module_id[i],
        "multi_agent_episode_id": None,
    }
    return map_header(18) + _items(head)


def _end_of(exp: Experience, i: int) -> bytes:
    segments = exp.segments
    t_start = int(segments.t_start[i])
    tail = {
        "is_terminated": segments.terminated[i],
        "is_truncated": segments.truncated[i],
        "t_started": t_start,
        "t": t_start + int(exp.lengths[i]),
    }
    return _items(tail)


def _items(values: dict[str, Any]) -> bytes:
    return b"".join(packed(key) + packed(value) for key, value in values.items())


_NOTHING: Final = packed(None)
_CLOSING: Final = _items({"_start_time": 0.0, "_last_step_time": 0.0, "custom_data": {}})
_REWARDS: Final = spaces.Box(-np.inf, np.inf, (), np.float32)
"""RLlib's space of rewards."""


def _buffer(data: bytes, space: bytes) -> bytes:
    """A list of an episode as RLlib keeps it; ``data`` and ``space`` are msgpack already."""
    return map_header(4) + packed("data") + data + _items({"lookback": 0, "finalized": False}) + packed("space") + space


def _with_finals(exp: Experience) -> Columns:
    """The observations of each episode and the one after its last step: ``[num_steps + num_segments, ...]``."""
    rows = exp.num_steps + exp.num_segments
    ends = exp.offsets[1:] + np.arange(exp.num_segments)
    inside = np.ones(rows, bool)
    inside[ends] = False
    out: Columns = {}
    for name, final in exp.final_obs.items():
        column: NDArray[Any] = np.empty((rows, *final.shape[1:]), final.dtype)
        column[inside], column[ends] = exp.steps[name], final
        out[name] = column
    return out
