# SPDX-License-Identifier: Apache-2.0
"""Guesses at what the columns of tables are, for tables of several kinds that people have."""

import datetime
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from etude.cli.flags import TableOptions, parse_words
from etude.errors import DataError
from etude.recordings import Guess, Recording, Source, guess_columns
from etude.recordings.formats import guessing

NOON = datetime.datetime(2026, 3, 1, 12)


def trips(**more: Any) -> dict[str, Any]:
    """Two trips of three steps."""
    plain = {
        "trip": ["a", "a", "a", "b", "b", "b"],
        "tick": [0, 1, 2, 0, 1, 2],
        "speed": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        "load": [1.5, 0.5, 1.5, 0.5, 1.5, 0.5],
        "command": ["go", "stop", "go", "stop", "go", "go"],
        "score": [0.0, 1.0, 0.5, 1.0, 0.5, 0.0],
        "p": [0.5, 0.25, 0.5, 0.25, 0.5, 0.5],
    }
    return {name: values for name, values in (plain | more).items() if values is not None}


TABLES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "trips": (
        trips(),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["obs is all that is left", "no column says where episodes end"],
    ),
    "of runs": (
        trips(trip=None, run=trips()["trip"]),
        "obs=speed,load action=command reward=score episode_id=run t=tick propensity=p terminated=last-row",
        ["obs is all that is left", "no column says where episodes end"],
    ),
    "with Unix times, and a flag of another name": (
        trips(
            tick=None,
            ts=[1772323260, 1772323200, 1772323320, 1772323999, 1772323500, 1772323600],
            arrived=["no", "no", "yes", "yes", "no", "no"],
        ),
        "obs=speed,load action=command reward=score episode_id=trip t=ts propensity=p done=arrived",
        ["`arrived` is set in the last row of each episode alone", "obs is all that is left"],
    ),
    "with the next value of each": (
        trips(next_speed=[0.2, 0.3, 0.4, 0.5, 0.6, 0.7], load_next=[0.5, 1.5, 1.5, 1.5, 0.5, 1.5]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p next_obs=next_speed,load_next "
        "terminated=last-row",
        ["obs is all that is left (speed, load): leave out", "no column says where episodes end"],
    ),
    "with the next value of one": (
        trips(next_speed=[0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["(speed, load): leave out", "no numbers: next_speed", "no column says where episodes end"],
    ),
    "with a column of times of another name": (
        trips(tick=None, charted=[NOON + datetime.timedelta(hours=k) for k in (2, 0, 1, 3, 5, 4)]),
        "obs=speed,load action=command reward=score episode_id=trip t=charted propensity=p terminated=last-row",
        ["`charted` is the only column of times: rows are put in its order", "obs is all", "no column says"],
    ),
    "with a count that is called like an action": (
        trips(tick=None, command=None, decision=[0, 1, 2] * 2, route=["go", "stop", "go", "stop", "go", "go"]),
        "obs=speed,load action=route reward=score episode_id=trip t=decision propensity=p terminated=last-row",
        ["`decision` counts the rows of each `trip`: taken for the step", "no column is named", "obs is", "no column"],
    ),
    "with a time of the trip": (
        trips(tick=None, begun=[NOON] * 3 + [NOON + datetime.timedelta(days=1)] * 3),
        "obs=speed,load action=command reward=score episode_id=trip propensity=p terminated=last-row",
        ["obs is all", "left out of obs", "rows are taken as they stand", "no column says"],
    ),
    "with trips of several vans, at other times": (
        trips(
            trip=[1] * 6, van=["a", "b", "a", "b", "a", "b"], tick=None, when=[f"2026-03-01 08:0{k}" for k in range(6)]
        ),
        "obs=speed,load,van action=command reward=score episode_id=trip t=when propensity=p terminated=last-row",
        ["obs is all", "rows of one `trip` have different `van`: map episode_id=van,trip if each", "no column says"],
    ),
    "with trips of several vans": (
        trips(trip=[1] * 6, van=["a", "a", "a", "b", "b", "b"]),
        "obs=speed,load,van action=command reward=score episode_id=van,trip t=tick propensity=p terminated=last-row",
        ["obs is all", "have the same `trip`, `tick`, but never of the same `van`: both", "no column says"],
    ),
    "a game of two players in turn": (
        trips(trip=None, game_id=[1, 1, 1, 1, 2, 2], player=[0, 1, 0, 1, 0, 1], tick=None, turn=[0, 1, 2, 3, 0, 1]),
        "obs=speed,load action=command reward=score episode_id=game_id agent_id=player t=turn propensity=p "
        "terminated=last-row",
        ["obs is all that is left", "no column says where episodes end"],
    ),
    "the player of a row is missing": (
        trips(trip=None, game_id=[1, 1, 1, 1, 2, 2], player=["a", "b", None, "b", "a", "b"]),
        "obs=speed,load action=command reward=score episode_id=game_id agent_id=player t=tick propensity=p "
        "terminated=last-row",
        ["obs is all that is left", "no column says where episodes end", "`player` is empty in 1 row"],
    ),
    "offers to players": (
        trips(trip=None, tick=None, player=[3, 1, 2, 1, 3, 2]),
        "obs=speed,load,player action=command reward=score propensity=p terminated=every-row",
        ["obs is all that is left", "nothing tells episodes apart"],
    ),
    "an uneven count of seconds": (
        trips(tick=[3, 10, 90, 5, 6, 31]),
        "obs=speed,load action=command reward=score episode_id=trip propensity=p terminated=last-row",
        ["`tick` rises unevenly", "left out, as the rows of each episode are in order"],
    ),
    "an uneven count of seconds, out of order": (
        trips(tick=[90, 10, 3, 5, 6, 31]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["`tick` rises unevenly, like a time, so it does not number the steps: turn it into times"],
    ),
    "a few steps are missing": (
        trips(tick=[0, 1, 2, 0, 1, 7]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["obs is all that is left"],
    ),
    "an action and an observation are missing": (
        trips(command=["go", "stop", None, None, "go", "go"], load=[1.5, 0.5, None, 0.5, 1.5, 0.5]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["`command` is empty in 2 rows, which is an error", "`load` is empty in 1 row,"],
    ),
    "a flag that is also set elsewhere": (
        trips(arrived=[False, True, True, False, False, True]),
        "obs=speed,load,arrived action=command reward=score episode_id=trip t=tick propensity=p terminated=last-row",
        ["obs is all that is left", "no column says where episodes end"],
    ),
    "with a flag, and named parts": (
        trips(state_speed=[0.1] * 3 + [0.2] * 3, speed=None, load=None, done=[False, False, True] * 2, p=None),
        "obs=state_speed action=command reward=score episode_id=trip t=tick done=done",
        [],
    ),
    "in other words": (
        {
            "EpisodeId": [7, 7, 8, 8],
            "timestamp": [NOON + datetime.timedelta(minutes=m) for m in (0, 1, 0, 1)],
            "x0": [0.5, 1.5, 0.5, 1.5],
            "x1": [1, 2, 3, 4],
            "next_x0": [1.5, 2.5, 1.5, 2.5],
            "next_x1": [2, 3, 4, 5],
            "Action": [0.5, -0.5, 0.25, 1.0],
            "Reward": [1, 0, 1, 0],
            "is_terminal": [0, 1, 0, 1],
        },
        "obs=x0,x1 action=Action reward=Reward episode_id=EpisodeId t=timestamp terminated=is_terminal "
        "next_obs=next_x0,next_x1",
        [],
    ),
    "a bandit": (
        {
            "shown at": [NOON + datetime.timedelta(minutes=m) for m in range(6)],
            "user_id": list("uvwxyz"),
            "age": [20, 30, 40, 50, 60, 30],
            "offer": ["none", "coupon", "none", "coupon", "none", "none"],
            "clicked": [True, False, True, False, False, True],
            "propensity": [0.5] * 6,
            "version": [3] * 6,
        },
        "obs=age action=offer reward=clicked propensity=propensity terminated=every-row",
        ["obs is all that is left (age)", "shown at, user_id, version", "each row is taken for one (a bandit)"],
    ),
    "a bandit whose rows have ids": (
        {"session": list("abcdef"), "obs": [[0.0, 1.0]] * 6, "arm": [0, 1, 2, 0, 1, 2], "reward": [0.0, 1.0] * 3},
        "obs=obs action=arm reward=reward episode_id=session terminated=every-row",
        ["no column is named like a step or a time"][:0],
    ),
    "t starts anew": (
        {"t": [0, 1, 0, 1, 2], "obs": [0.5, 1.5, 2.5, 3.5, 4.5], "a": [1, 0, 1, 0, 1], "r": [1.0, 0.0, 1.0, 0.0, 1.0]},
        "obs=obs action=a reward=r t=t terminated=last-row",
        ["one begins where `t` falls"],
    ),
    "nothing is called so": (
        {"u": [0.5, 1.5, 2.5], "v": [1.5, 2.5, 3.5]},
        "obs=u,v action=COLUMN terminated=every-row",
        ["no column is named like an action: say which it is", "no column is named like a reward", "each row"],
    ),
    "called so, but other values": (
        trips(p=[0.5, -2.0, 3.0, 0.5, 0.5, 0.5], tick=[-1] * 6),
        "obs=speed,load,p action=command reward=score episode_id=trip terminated=last-row",
        [
            "`p` is named like a propensity, but does not hold probabilities",
            "`tick` is named like a t, but does not hold whole numbers",
            "rows are taken as they stand",
        ],
    ),
    "people who leave": (
        {
            "user_id": list("uuuvv"),
            "when": ["11/24/2026 3:15 PM", "11/24/2026 3:16 PM", "11/25/2026 9:00 AM", "11/2/2026", "11/3/2026"],
            "age": [20, 20, 20, 30, 30],
            "offer": ["none", "coupon", "none", "coupon", "none"],
            "spent": [0.5, 1.5, 0.0, 2.0, 1.0],
            "reward": [0, 1, 0, 1, 0],
            "churned": ["no", "no", "yes", "No", "YES"],
            "prob": [0.5] * 5,
        },
        "obs=age,spent action=offer reward=reward episode_id=user_id t=when terminated=churned propensity=prob",
        ["the rows of each `user_id` are taken for an episode"],
    ),
    "dates that could be two": (
        trips(tick=None, date=["1/2/2026", "1/3/2026", "1/4/2026"] * 2, done=["n", "n", "y"] * 2),
        "obs=speed,load action=command reward=score episode_id=trip t=date:month-first propensity=p done=done",
        ["no row of `date` tells whether the month or the day is first: or date:day-first"],
    ),
    "two could be": (
        trips(choice=["x", "y"] * 3, done=[False, False, True] * 2, tick=[0, 1, 1, 0, 1, 2]),
        "obs=speed,load action=command reward=score episode_id=trip t=tick done=done propensity=p",
        ["action could also be `choice`", "several rows have the same `trip`, `tick`"],
    ),
    "actions of several columns": (
        {"x1": [0.5, 1.5], "Action 1": [0.1, 0.2], "Action 2": [1.0, 2.0], "reward": [1.0, 0.0], "done": [False, True]},
        "obs=x1 'action=Action 1,Action 2' reward=reward done=done",
        [],
    ),
    "names with commas and spaces": (
        {"obs": [0.5, 1.5], "action": [0, 1], "my score": [1.0, 2.0], "reward": [1.0, 0.0], "done": [True, True]},
        "obs=obs action=action reward=reward done=done",
        [],
    ),
}


def test_both_flags_of_rlds_are_taken() -> None:
    """`is_last` is also set where an episode is truncated, and `is_terminal` is not."""
    table = pa.table(trips(is_last=[0, 0, 1, 0, 0, 1], is_terminal=[0, 0, 1, 0, 0, 0]))
    guess = guess_columns(table)
    assert (guess.columns["done"], guess.columns["terminated"]) == ("is_last", "is_terminal")


def test_an_id_that_ends_with_the_flag_is_the_episodes() -> None:
    """The rows of two trips alternate, so that the flag alone would mix them."""
    mixed: dict[str, list[Any]] = {
        "cycle_id": ["a", "b", "a", "b", "a", "b"],
        "temp": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        "action": [0, 1, 0, 1, 0, 1],
        "reward": [0.0, 1.0, 0.5, 1.0, 0.5, 0.0],
        "done": [False, False, False, False, True, True],
    }
    guess = guess_columns(pa.table(mixed))
    assert guess.columns["episode_id"] == "cycle_id"
    named = {"job" if name == "cycle_id" else name: values for name, values in mixed.items()}
    assert guess_columns(pa.table(named)).columns["episode_id"] == "job"
    assert any("each `cycle_id` ends with `done`" in reason for reason in guess.unsure)
    guess = guess_columns(pa.table(mixed | {"done": [False, True, False, False, True, True]}))
    assert "episode_id" not in guess.columns
    assert any("if rows of different `cycle_id` are mixed" in reason for reason in guess.unsure)
    guess = guess_columns(pa.table(mixed | {"done": [False, False, False, False, True, False]}))
    assert any("map episode_id=cycle_id" in reason for reason in guess.unsure)


def hourly(key: str, names: Sequence[Any] = ("north", "south", "west"), days: int = 10) -> dict[str, Any]:
    """The rows of three stations, hour by hour. Each day of a station is an episode."""
    hours = np.repeat(np.arange(24 * days), len(names))
    station = np.tile(np.arange(len(names)), 24 * days)
    rng = np.random.default_rng(0)
    return {
        key: [names[k] for k in station],
        "hour": hours % 24,
        "level": rng.normal(size=len(hours)),
        "action": rng.integers(0, 3, len(hours)),
        "reward": (hours // 24 * len(names) + station).astype(float),  # the number of the episode
        "done": hours % 24 == 23,
    }


def remedied(table: dict[str, Any], key: str, guess: Guess) -> Recording:
    """What is read after making an id as docs/your-data.md shows."""
    assert f"make an id of `{key}` and the number of its episode" in guess.unsure[0]
    df = pd.DataFrame(table)
    flags = [df[name] for name in guessing.FLAGS if name in table]
    end = np.any([flag.isin(["Yes"]) if flag.dtype.kind not in "bf" else flag.astype(bool) for flag in flags], axis=0)
    ends = pd.Series(end)
    df["episode"] = df[key].astype(str) + "-" + (ends.groupby(df[key]).cumsum() - ends).astype(str)
    columns = {name: own for name, own in guess.columns.items() if name != "obs"}
    return Recording.open(Source(df, {**columns, "obs": "level", "episode_id": "episode"}), on_bad=None)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("station", ("north", "south", "west")),
        ("station_id", ("north", "south", "west")),
        ("user_id", ("north", "south", "west")),
        ("site id", (7, 8, 9)),
    ],
)
def test_rows_of_several_episodes_are_seen_to_be_mixed(key: str, names: Sequence[Any]) -> None:
    table = hourly(key, names)
    guess = guess_columns(pa.table(table))
    assert guess.columns["episode_id"] == "COLUMN"  # so that the words can't be pasted as they are
    assert f"rows of different `{key}` are mixed" in guess.unsure[0]
    exp = remedied(table, key, guess).read()
    assert exp.lengths.tolist() == [24] * 10 * len(names)
    assert exp.segments.terminated.all()
    assert sorted(exp.returns().tolist()) == [24.0 * k for k in range(10 * len(names))]


@pytest.mark.parametrize("kind", ["words", "two flags", "fractions", "one hour missing", "many of any length"])
def test_mixed_rows_are_seen_with(kind: str) -> None:
    table = hourly("station")
    done = table["done"]
    if kind == "words":
        table["done"] = np.where(done, "Yes", "no")
    elif kind == "two flags":
        table |= {"terminated": done & (table["reward"] % 2 == 0), "truncated": done & (table["reward"] % 2 == 1)}
        del table["done"]
    elif kind == "fractions":
        table["done"] = done.astype(float)
    elif kind == "one hour missing":
        table = {name: np.delete(np.array(values), 100) for name, values in table.items()}
    else:
        rng = np.random.default_rng(1)
        ends = [np.append(rng.random(150) < 0.05, True) for _ in range(8)]
        table = hourly("station", [f"s{k}" for k in range(8)], 7)
        table = {name: values[: 151 * 8] for name, values in table.items()} | {"done": np.stack(ends, 1).ravel()}
    guess = guess_columns(pa.table(table))
    assert guess.columns["episode_id"] == "COLUMN"
    flags = [str(value) for name in guessing.FLAGS for value in table.get(name, ())]
    exp = remedied(table, "station", guess).read()
    finished = exp.segments.terminated | exp.segments.truncated
    assert finished.sum() == sum(value in ("True", "Yes", "1.0") for value in flags)
    assert (~finished).sum() <= 3  # at most one for each station


def test_mixed_rows_that_break_off_are_told_of() -> None:
    table = {name: values[:-30] for name, values in hourly("station").items()}
    (said,) = (reason for reason in guess_columns(pa.table(table)).unsure if "alone tells episodes apart" in reason)
    assert "if rows of different `station` are mixed, map an episode_id" in said


@pytest.mark.parametrize("lengths", ["equal", "any"])
@pytest.mark.parametrize("key", ["weather", "station_id", "gear"])
def test_a_flag_that_alone_tells_episodes_apart_is_told_of(key: str, lengths: str) -> None:
    """Rows of one, which change nothing but an observation: that they are mixed is not shown."""
    rng = np.random.default_rng(0)
    ends = rng.random(720) < 0.05 if lengths == "any" else np.arange(720) % 24 == 23
    names = (1, 2, 3) if key == "gear" else ("dry", "wet", "snow")
    table = hourly(key) | {key: [names[k] for k in rng.integers(0, 3, 720)], "done": ends}
    guess = guess_columns(pa.table(table))
    assert "episode_id" not in guess.columns
    (said,) = (reason for reason in guess.unsure if "`done` alone tells episodes apart" in reason)
    assert ("several machines or people" if key == "gear" else f"different `{key}`") in said
    assert not any("are mixed, and" in reason for reason in guess.unsure)
    del table[key], table["hour"]  # only fractions are left
    assert not any("alone" in reason for reason in guess_columns(pa.table(table)).unsure)


@pytest.mark.parametrize("key", ["mode", "gear", "time"])
def test_a_time_that_starts_again_does_not_order_the_rows_of_several_episodes(key: str) -> None:
    rng = np.random.default_rng(0)
    table = {
        "x0": rng.normal(size=400),
        key: [("low", "high", "mid")[k] for k in rng.integers(0, 3, 400)] if key == "mode" else rng.integers(1, 6, 400),
        "action": rng.integers(0, 3, 400),
        "reward": rng.normal(size=400),
        "t": np.arange(400) % 20,
        "done": np.arange(400) % 20 == 19,
    }
    guess = guess_columns(pa.table(table))
    assert "episode_id" not in guess.columns
    assert not any("are mixed, and" in reason for reason in guess.unsure)


@pytest.mark.parametrize("done", ["always", "where the country changes"])
def test_nothing_is_mixed_where_only_ends_change_a_column(done: str) -> None:
    table = {
        "obs": np.arange(60) * 0.5,
        "country": [("nl", "de", "at")[k // 20] for k in range(60)],
        "action": np.arange(60) % 2,
        "reward": np.ones(60),
        "done": np.ones(60, bool) if done == "always" else np.arange(60) % 20 == 19,
    }
    assert not any("mixed" in reason for reason in guess_columns(pa.table(table)).unsure)


def test_a_person_with_several_ends_is_no_episode() -> None:
    table = pa.table(hourly("user_id"))
    by_user = table.sort_by("user_id")
    guess = guess_columns(by_user)
    assert "episode_id" not in guess.columns
    assert not any("`user_id` are mixed" in reason for reason in guess.unsure)  # each user's rows are together
    source = Source(by_user, {name: own for name, own in guess.columns.items() if name != "obs"} | {"obs": "level"})
    assert Recording.open(source).read().lengths.tolist() == [24] * 30


@pytest.mark.parametrize(
    ("score", "is_total"),
    [
        (lambda k: 2.0 * (k % 10), True),
        (lambda k: float(k % 10 // 5), False),  # a goal reached, and held
        (lambda k: float(k % 10 == 9), False),
        (lambda k: 1.0, False),
        (lambda k: float(k * 7 % 10), False),
    ],
)
def test_a_total_is_told_from_rewards(score: Callable[[int], float], is_total: bool) -> None:
    table = {
        "game_id": [k // 10 for k in range(60)],
        "obs": np.arange(60) * 0.5,
        "action": np.arange(60) % 2,
        "score": [score(k) for k in range(60)],
    }
    unsure = guess_columns(pa.table(table)).unsure
    assert any("`score` never falls within an episode: if it is" in each for each in unsure) is is_total


def test_rows_of_a_person_are_put_in_order_of_times_as_text() -> None:
    """As texts, 10/1/2026 comes before 9/30/2026."""
    table = {
        "user_id": list("uuvv"),
        "date": ["9/30/2026", "10/1/2026", "9/29/2026", "10/2/2026"],
        "obs": [0.5, 1.5, 2.5, 3.5],
        "action": [0, 1, 0, 1],
        "reward": [0.0, 1.0, 0.0, 1.0],
        "done": [False, True, False, True],
    }
    guess = guess_columns(pa.table(table))
    assert guess.columns["episode_id"] == "user_id"


@pytest.mark.parametrize("kind", TABLES)
def test_the_guess_and_what_is_not_sure(kind: str) -> None:
    columns, words, unsure = TABLES[kind]
    guess = guess_columns(pa.table(columns))
    assert sorted(shlex.split(guess.words)[1:]) == sorted(shlex.split(words))
    assert all(any(text in reason for reason in guess.unsure) for text in unsure), guess.unsure
    assert bool(guess.unsure) == bool(unsure), guess.unsure
    assert list(guess.found) == list(columns)
    assert guess.rows == len(next(iter(columns.values())))


@pytest.mark.parametrize("kind", [kind for kind in TABLES if "COLUMN" not in TABLES[kind][1]])
def test_the_words_can_be_pasted(kind: str) -> None:
    table = pa.table(TABLES[kind][0])
    guess = guess_columns(table)
    words = parse_words(TableOptions.__annotations__["columns"], shlex.split(guess.words)[1:], "columns", {})
    source = TableOptions(columns=words).described(table)
    assert source.columns == guess.columns
    told = ("two could be", "a few steps are missing", "an uneven count of seconds, out of order")
    if kind not in (*told, "an action and an observation are missing", "the player of a row is missing"):
        assert Recording.open(source).read().num_steps == guess.rows


def test_a_flag_is_found_in_the_first_rows_of_a_larger_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = trips(arrived=[False, False, True] * 2)
    monkeypatch.setattr(guessing, "MOST_ROWS", 5)  # the last row of the second trip is not looked at
    assert guess_columns(pa.table(ended)).columns["done"] == "arrived"
    elsewhere = trips(arrived=[False, True, True, False, False, True])
    assert guess_columns(pa.table(elsewhere)).columns["terminated"] == "last-row"


@pytest.mark.parametrize("kind", ["steps", "even steps", "seconds"])
def test_steps_of_a_shuffled_table_are_not_taken_for_times(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rng = np.random.default_rng(0)
    ticks = {
        "steps": np.arange(100),
        "even steps": np.arange(0, 200, 2),
        "seconds": np.sort(rng.choice(4000, 100, replace=False)),
    }
    columns = {"trip": np.repeat(np.arange(20), 100), "tick": np.tile(ticks[kind], 20), "x": rng.random(2000)}
    table = pa.table(columns | {"action": rng.integers(0, 2, 2000)}).take(rng.permutation(2000))
    monkeypatch.setattr(guessing, "MOST_ROWS", 300)  # the other steps are not looked at
    guess = guess_columns(table)
    assert guess.columns["t"] == "tick"
    assert any("rises unevenly" in line for line in guess.unsure) == (kind == "seconds")


def test_neither_rows_nor_their_order_change_it() -> None:
    table = pa.table(trips())
    order = np.random.default_rng(0).permutation(6)
    assert guess_columns(table.take(order)).columns == guess_columns(table).columns


def test_columns_with_odd_names_are_written_so_that_they_are_read() -> None:
    table = pa.table({"x,y": [0.5, 1.5], "it's": [1.5, 0.5], "action": [0, 1], "reward": [1.0, 0.0], "done": [1, 1]})
    guess = guess_columns(table)
    words = parse_words(TableOptions.__annotations__["columns"], shlex.split(guess.words)[1:], "columns", {})
    assert TableOptions(columns=words).described(table).columns["obs"] == ("x,y", "it's")


def test_without_rows() -> None:
    with pytest.raises(DataError, match="the table: has no rows"):
        guess_columns(pa.table({"a": pa.array([], pa.int64())}))


ODD = {
    "float16": pa.array([0.5, 1.5], pa.float16()),
    "decimal": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
    "nothing": pa.nulls(2),
    "missing": pa.array([None, 1.5]),
    "lists": pa.array([[1, 2], [3]]),
    "structs": pa.array([{"a": 1}, {"a": 2}]),
    "bytes": pa.array([b"a", b"b"]),
    "late": pa.array([2**62, 2**62], pa.timestamp("s")),
    "large": pa.array([2**64 - 1, 0], pa.uint64()),
    "maps": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("name", ["t", "done", "reward", "p", "logp", "episode_id", "action", "obs", "x1", "other"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_columns_are_guessed_or_refused(kind: str, name: str) -> None:
    try:
        guess = guess_columns(pa.table({name: ODD[kind], "a": [0, 1]}))
    except DataError:
        return
    assert guess.words
    assert set(guess.found) == {name, "a"}
