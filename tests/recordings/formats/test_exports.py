# SPDX-License-Identifier: Apache-2.0
"""Random logs, exported in the ways that people export them, are read as what was logged."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from etude.recordings import Recording, Source

IDS = {
    "number": lambda i: {"trip": 7 * i + 3},
    "text": lambda i: {"trip": f"trip-{i}"},
    "digits": lambda i: {"trip": f"{i:03d}"},
    "date": lambda i: {"trip": str((NOON + pd.Timedelta(days=i)).date())},
    "two columns": lambda i: {"trip": i // 2, "van": f"van-{i % 2}"},
}
TIMES = {
    "index": lambda t, when: t,
    "index from 1": lambda t, when: t + 1,
    "fraction": lambda t, when: t / 2 + 0.25,
    "time": lambda t, when: when,
    "time of a zone": lambda t, when: when.tz_localize("Europe/Berlin"),
    "ISO": lambda t, when: when.isoformat(),
    "slashes": lambda t, when: when.strftime("%Y/%m/%d %H:%M"),
    "day first": lambda t, when: when.strftime("%d.%m.%Y %H:%M"),
    "milliseconds": lambda t, when: int(when.timestamp() * 1000),
}
ENDS = {
    "both": ["terminated", "truncated"],
    "terminated": ["terminated"],
    "number": ["terminated"],
    "word": ["terminated"],
    "last row": [],
}
ACTIONS = ["number", "text", "fraction", "columns", "list"]
OBS = ["columns", "list", "with text"]
KINDS = ["pandas", "nullable", "polars", "arrow", "csv", "semicolons", "json lines", "parquet", "files", "folders"]
NOON = pd.Timestamp("2026-03-01 12:00")
WORDS = ["left", "right", "stay"]


def logged(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Episodes: the truth."""
    lengths = rng.integers(1, 9, rng.integers(2, 9))
    return [
        {
            "obs": rng.normal(size=(length + 1, 2)).round(3),
            "choice": rng.integers(0, 3, length),
            "command": rng.normal(size=(length, 2)).round(3),
            "reward": rng.normal(size=length).round(2),
            "p": rng.uniform(0.1, 1, length).round(3),
            "terminated": bool(rng.random() < 0.6),
            "begin": NOON + pd.Timedelta(minutes=int(rng.integers(0, 6000))),
        }
        for length in lengths
    ]


def observed(values: Any, how: str) -> dict[str, Any]:
    """An observation as columns."""
    if how == "list":
        return {"all": values.tolist()}
    second = WORDS[int(abs(values[1]) * 10) % 3] if how == "with text" else values[1]
    return {"first": values[0], "second": second}


def exported(
    episodes: list[dict[str, Any]], how: dict[str, str], has_next: bool
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rows, and what their columns are."""
    rows = []
    for i, episode in enumerate(episodes):
        last = len(episode["reward"]) - 1
        for t in range(last + 1):
            row = IDS[how["id"]](i) | {"episode": i, "r": episode["reward"][t], "p": episode["p"][t], "note": "x"}
            if how["time"] != "none":
                row["when"] = TIMES[how["time"]](t, episode["begin"] + t * pd.Timedelta(minutes=5))
            row |= observed(episode["obs"][t], how["obs"])
            if has_next:
                row |= {f"next_{name}": value for name, value in observed(episode["obs"][t + 1], how["obs"]).items()}
            number, (x, y) = int(episode["choice"][t]), episode["command"][t]
            row |= {
                "number": {"act": number},
                "text": {"act": WORDS[number]},
                "fraction": {"act": x},
                "columns": {"act_x": x, "act_y": y},
                "list": {"act": [x, y]},
            }[how["action"]]
            ends, terminated = t == last, episode["terminated"] or how["ends"] != "both"
            row |= {
                "both": {"terminated": ends and terminated, "truncated": ends and not terminated},
                "terminated": {"terminated": ends},
                "number": {"terminated": int(ends)},
                "word": {"terminated": "yes" if ends else "no"},
                "last row": {},
            }[how["ends"]]
            rows.append(row)
    table = pd.DataFrame(rows)
    obs = list(observed(episodes[0]["obs"][0], how["obs"]))
    columns: dict[str, Any] = {"obs": obs if len(obs) > 1 else obs[0], "reward": "r", "propensity": "p"}
    columns["episode_id"] = [*IDS[how["id"]](0)] if how["id"] == "two columns" else "trip"
    columns["action"] = ["act_x", "act_y"] if how["action"] == "columns" else "act"
    columns |= {name: name for name in ENDS[how["ends"]]} or {"terminated": "last-row"}
    if how["time"] != "none":
        columns["t"] = "when:day-first" if how["time"] == "day first" else "when"
    if has_next:
        columns["next_obs"] = [f"next_{name}" for name in obs] if len(obs) > 1 else f"next_{obs[0]}"
    return table, columns


def in_order(table: pd.DataFrame, rng: np.random.Generator, has_time: bool) -> pd.DataFrame:
    """The rows in an order that keeps that of each episode, unless a time tells it."""
    how = rng.choice(["as they are", "mixed", "shuffled" if has_time else "mixed"])
    if how == "as they are":
        return table
    if how == "shuffled":
        return table.sample(frac=1, random_state=int(rng.integers(1000)))
    keys = rng.random(len(table))
    for i in table["episode"].unique():
        own = (table["episode"] == i).to_numpy()
        keys[own] = np.sort(keys[own])
    return table.iloc[np.argsort(keys)]


def stored(table: pd.DataFrame, kind: str, path: Path, rng: np.random.Generator) -> Any:
    """The table, as a kind of file or in memory."""
    if kind in ("csv", "semicolons") and any(isinstance(value, list) for value in table.iloc[0]):
        kind = "parquet"
    text, parquet, count = path / "log.csv", path / "log.parquet", min(3, len(table))
    if kind == "csv":
        table.to_csv(text, index=bool(rng.random() < 0.3))
    elif kind == "semicolons":
        table.to_csv(text, index=False, sep=";", decimal=",")
    elif kind == "json lines":
        table.to_json(path / "log.jsonl", orient="records", lines=True, date_format="iso")
    elif kind == "parquet":
        table.to_parquet(parquet)
    elif kind == "files":
        for i, rows in enumerate(np.array_split(np.arange(len(table)), count)):
            table.iloc[rows].to_parquet(path / f"log-{i}.parquet")
    elif kind == "folders":
        table.assign(part=np.arange(len(table)) * count // len(table)).to_parquet(path, partition_cols=["part"])
    else:
        plain = table.reset_index(drop=True)
        return {
            "pandas": lambda: table,
            "nullable": table.convert_dtypes,
            "polars": lambda: pl.from_pandas(plain),
            "arrow": lambda: pa.Table.from_pandas(table),
        }[kind]()
    return path


def flat(recording: Recording, columns: Any, name: str) -> list[list[Any]]:
    """The rows of an observation, with texts in place of the numbers of names."""
    if f"{name}/second" not in columns:
        return np.asarray(columns[name]).tolist()
    words = recording.obs_space["second"].names  # type: ignore[index]
    pairs = zip(columns[f"{name}/numbers"], columns[f"{name}/second"], strict=True)
    return [[float(number[0]), words[int(word)]] for number, word in pairs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_a_log_is_read_as_it_was_logged(kind: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    episodes, has_next = logged(rng), bool(rng.random() < 0.5)
    how = {"id": [*IDS], "time": [*TIMES, "none"], "ends": [*ENDS], "action": ACTIONS, "obs": OBS}
    chosen = {name: str(rng.choice(ways)) for name, ways in how.items()}
    table, columns = exported(episodes, chosen, has_next)
    table = in_order(table, rng, chosen["time"] != "none").drop(columns="episode")
    recording = Recording.open(Source(stored(table, kind, tmp_path, rng), columns))
    read = recording.read()
    steps, segments = read.steps, read.segments
    actions = np.asarray(steps["action"]).reshape(read.num_steps, -1).tolist()
    if chosen["action"] == "text":
        actions = [[recording.action_space.names[number]] for (number,) in actions]  # type: ignore[attr-defined]
    obs = flat(recording, steps, "obs")
    nexts = flat(recording, read.next_obs(), "obs") if has_next else obs
    found, begin = [], 0
    for length, terminated, truncated in zip(read.lengths, segments.terminated, segments.truncated, strict=True):
        own = slice(begin, begin + int(length))
        chances = np.exp(steps["logp"][own]).round(3).tolist()
        found.append(
            (
                obs[own],
                actions[own],
                steps["reward"][own].tolist(),
                chances,
                nexts[own],
                bool(terminated),
                bool(truncated),
            )
        )
        begin += int(length)
    wanted = []
    for episode in episodes:
        seen = [[*observed(values, chosen["obs"]).values()] for values in episode["obs"]]
        seen = [row[0] for row in seen] if chosen["obs"] == "list" else seen
        numbers, commands = episode["choice"].tolist(), episode["command"].tolist()
        acted = {
            "number": [[number] for number in numbers],
            "text": [[WORDS[number]] for number in numbers],
            "fraction": [[x] for x, _ in commands],
        }.get(chosen["action"], commands)
        terminated = episode["terminated"] or chosen["ends"] != "both"
        nexts = seen[1:] if has_next else seen[:-1]
        wanted.append(
            (seen[:-1], acted, episode["reward"].tolist(), episode["p"].tolist(), nexts, terminated, not terminated)
        )

    def key(episode: Any) -> Any:
        return episode[0][0][0], episode[2]

    assert sorted(found, key=key) == sorted(wanted, key=key)
