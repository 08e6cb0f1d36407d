# SPDX-License-Identifier: Apache-2.0
"""Rows of RLlib's tables, written and read."""

import numpy as np
import pyarrow as pa
from some_rllib import tensor, write_table

from etude.experience import Experience
from etude.recordings import Recording


def rows_of(lengths, seed=0):
    """Rows of whole episodes: obs and new_obs ``[N, 3]``, the rest ``[N]``; every second one is truncated."""
    rng = np.random.default_rng(seed)
    rows = {name: [] for name in ("eps_id", "obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "t")}
    for i, n in enumerate(lengths):
        obs = rng.standard_normal((n + 1, 3)).astype(np.float32)
        last = np.arange(n) == n - 1
        rows["eps_id"] += [f"e{seed}-{i}"] * n
        for name, value in {
            "obs": obs[:-1],
            "new_obs": obs[1:],
            "actions": rng.integers(0, 4, n).astype(np.int32),
            "rewards": rng.standard_normal(n),
            "terminateds": last & (i % 2 == 0),
            "truncateds": last & (i % 2 == 1),
            "t": np.arange(n),
        }.items():
            rows[name] += list(value)
    return {name: np.array(values, object if name == "eps_id" else None) for name, values in rows.items()}


def at(rows, index):
    return {name: values[index] for name, values in rows.items()}


def write(path, rows, without=(), **columns):
    given = {
        "eps_id": pa.array(rows["eps_id"].tolist(), pa.string()),
        "agent_id": pa.nulls(len(rows["t"])),
        "obs": tensor(rows["obs"]),
        "new_obs": tensor(rows["new_obs"]),
        **{name: pa.array(rows[name]) for name in ("actions", "rewards", "terminateds", "truncateds")},
        "action_logp": pa.array(np.full(len(rows["t"]), -1.0, np.float32)),
    }
    return write_table(path, {k: v for k, v in (given | columns).items() if k not in without})


def read(path, columns=None):
    """The recording, whatever is there twice, and all of it."""
    recording = Recording.open(path, on_bad=None)
    exp = Experience.concat([recording.part(k, columns) for k in range(recording.num_parts)])
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return recording, exp
