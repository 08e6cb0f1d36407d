# SPDX-License-Identifier: Apache-2.0
"""Experience with values that say where they belong: obs is [episode, t, ...], so that a shifted index shows."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.experience import Experience, Segments
from etude.recordings import Header, RecordingWriter

OBS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = gym.spaces.Discrete(1000)


def numbered(lengths: list[int], first: int = 0, **segments: Any) -> Experience:
    """Episodes of these lengths, whole unless told otherwise; episode i is called ``e<first + i>``."""
    count = len(lengths)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    episode = np.repeat(np.arange(first, first + count), lengths)
    t_start = np.asarray(segments.get("t_start", np.zeros(count)), np.int64)
    t = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - t_start, lengths)
    obs = np.stack([episode, t, episode * 1000 + t], axis=1).astype(np.float32)
    last = t_start + np.asarray(lengths)
    final = np.stack([np.arange(first, first + count), last, np.arange(first, first + count) * 1000 + last], axis=1)
    known = {
        "episode_id": [f"e{first + i}" for i in range(count)],
        "terminated": np.arange(first, first + count) % 2 == 0,
    }
    known["truncated"] = ~known["terminated"]
    return Experience(
        {"obs": obs, "action": (t % 7).astype(np.int64), "reward": episode + t / 1000},
        offsets,
        Segments.of(count, **(known | segments)),
        {"obs": final.astype(np.float32)},
    )


def record(path: Any, *parts: Experience, **options: Any) -> None:
    """Write parts one after the other."""
    with RecordingWriter(path, obs_space=OBS, action_space=ACTION, env="Numbered-v0", **options) as writer:
        for part in parts:
            writer.write(part)


def record_format_1(path: Any, *parts: Experience, rows_per_file: int = 10**6, meta: Any = None) -> None:
    """As `record`, in format 1 and by pyarrow alone: what Etude wrote before 0.2, with lookback."""
    said = {**Header(OBS, ACTION, "Numbered-v0", meta or {}).to_json(), "version": 1}
    Path(path).mkdir(parents=True)
    rest, files = Experience.concat(parts), {}
    while rest.num_steps:
        exp, rest = rest.split(min(rows_per_file, rest.num_steps))
        file = Path(path) / f"part-{len(files):05d}.parquet"
        pq.write_table(_table_1(exp).replace_schema_metadata({b"etude:recording": json.dumps(said)}), file)
        files[file.name] = {"rows": exp.num_steps, "bytes": file.stat().st_size}
    totals = {"files": len(files), "rows": sum(entry["rows"] for entry in files.values())}
    (Path(path) / "recording.json").write_text(json.dumps({**said, "totals": totals, "files": files}))


def _table_1(exp: Experience) -> pa.Table:
    marks = np.full(exp.num_steps, None, object)
    marks[exp.offsets[:-1]] = exp.segments.lookback
    table = exp.to_table()
    table = table.drop_columns([name for name in ("lookback",) if name in table.column_names])
    at = table.column_names.index("segment")
    table = table.set_column(at, pa.field("lookback", pa.int32()), pa.array(marks, pa.int32()))
    fields = [f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


def assert_same(a: Experience, b: Experience) -> None:
    """Equal bit for bit, but for final observations that are not known."""
    assert list(a.steps) == list(b.steps)
    for name in a.steps:
        assert a.steps[name].dtype == b.steps[name].dtype
        np.testing.assert_array_equal(a.steps[name], b.steps[name])
    np.testing.assert_array_equal(a.offsets, b.offsets)
    for name in a.segments.__slots__:
        np.testing.assert_array_equal(getattr(a.segments, name), getattr(b.segments, name), err_msg=name)
    assert set(a.final_obs) == set(b.final_obs)
    for name in a.final_obs:
        known = a.segments.has_final_obs
        np.testing.assert_array_equal(a.final_obs[name][known], b.final_obs[name][known])
