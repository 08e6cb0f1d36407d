# SPDX-License-Identifier: Apache-2.0
"""Tables as people have them: actions in words, propensities, times, and no flag where episodes end."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from etude.errors import DataError, SpaceError
from etude.recordings import Recording, Source, convert, guess_columns, merge_recordings
from etude.spaces import NamedDiscrete, space_from_json, space_to_json

WORDS = ["stay", "left", "right", "left", "stay", "stay"]
NAMES = ("left", "right", "stay")
MAP = {"obs": "speed", "action": "command", "episode_id": "trip", "t": "t"}

ENDED = MAP | {"terminated": "last-row"}


def table(**more: Any) -> pa.Table:
    plain = {"trip": list("aaabbb"), "t": [0, 1, 2] * 2, "speed": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "command": WORDS}
    return pa.table(plain | more)


def opened(data: Any, more: dict[str, Any] | None = None, **settings: Any) -> Recording:
    ends = {} if (more or {}).keys() & {"done", "truncated"} else {"terminated": "last-row"}
    return Recording.open(Source(data, MAP | ends | (more or {}), **settings))


def words_of(recording: Recording) -> list[str]:
    space = recording.action_space
    assert isinstance(space, NamedDiscrete)
    return list(space.named(recording.read().steps["action"]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_text_becomes_numbers_with_names(kind: pa.DataType) -> None:
    recording = opened(table(command=pa.array(WORDS, pa.string()).cast(kind)))
    assert recording.action_space == NamedDiscrete(NAMES)
    assert recording.read().steps["action"].tolist() == [2, 0, 1, 0, 2, 2]
    assert words_of(recording) == WORDS


FRACTIONS = [f"{k / 8}" for k in range(39)]
WHOLE = [str(k) for k in range(39)]


def many(texts: list[str], column: str) -> pa.Table:
    rows = {
        "trip": ["a"] * len(texts),
        "t": list(range(len(texts))),
        "speed": [0.5] * len(texts),
        "command": [1] * len(texts),
    }
    return pa.table(rows | {column: texts})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([*FRACTIONS, "-"], r"holds numbers, such as '0\.0', but also '-'"),
        ([text.replace(".", ",") for text in FRACTIONS], "holds numbers, such as '0,0'"),
        ([*WHOLE, "2e-3"], "holds numbers, such as '2e-3'"),
        ([f"[{text}, 1.5]" for text in FRACTIONS], r"holds lists, such as '\[0\.0, 1\.5\]'"),
        ([f"[{k} 2 3e-4]" for k in WHOLE], "holds lists"),
        ([f"({text}, 1.5)" for text in FRACTIONS], r"holds lists, such as '\(0\.0, 1\.5\)'"),
        ([f"(({k}, 2), (1e-3, 4))" for k in WHOLE], "holds lists"),
        ([f"(np.float32({text}), nan)" for text in FRACTIONS], "holds lists"),
        ([f"array([{k}, 2])" for k in WHOLE], "holds lists"),
        ([f"array([[{text}],\n [0.5]], dtype=float32)" for text in FRACTIONS], "holds lists"),
    ],
)
def test_text_of_numbers_is_no_name(texts: list[str], message: str) -> None:
    for column in ("speed", "command"):
        with pytest.raises(DataError, match=f"is text that {message}"):
            opened(many(texts, column))
    names = NamedDiscrete(sorted(set(texts)))
    assert opened(many(texts, "command"), action_space=names).action_space == names
    guess = guess_columns(many(texts, "obs"))
    assert any(line.startswith("`obs` is text that holds ") for line in guess.unsure)


@pytest.mark.parametrize(
    "texts",
    [
        *(WHOLE, [*WHOLE, "online"], [*WHOLE, "nan"], [f"({k}, 1)" for k in WHOLE], [f"{k}:30" for k in WHOLE]),
        *(
            [f"({text})" for text in FRACTIONS],
            [f"array({k}, a)" for k in WHOLE],
            [f"(0.0, {text}]" for text in FRACTIONS],
        ),
        *([f"1.{k}.2" for k in WHOLE], [*FRACTIONS[:15], "S"], [f"[{text}]" for text in "abcdefghijklmnopqrst"]),
        *([f"{k}b7" for k in WHOLE], ["0.5", "S", "M", *WHOLE[:2]]),
    ],
)
def test_codes_are_names(texts: list[str]) -> None:
    assert opened(many(texts, "command")).action_space == NamedDiscrete(sorted(texts))


@pytest.mark.parametrize("role", ["propensity", "logp", "reward", "weight"])
def test_numbers_as_text_are_refused_where_numbers_belong(role: str) -> None:
    with pytest.raises(DataError, match=r"row 0: column `p` is of type string, for instance '0\.5', not of numbers"):
        opened(table(p=["0.5"] * 6), {role: "p"}).read()


def test_log_probabilities_as_text_are_found() -> None:
    (found,) = opened(table(logp=["-0.5"] * 6)).validate().warnings
    assert (found.kind, found.column) == ("impossible_logp", "logp")


def test_names_do_not_depend_on_the_order_of_rows_or_files(tmp_path: Path) -> None:
    whole = table()
    for k, part in enumerate((whole.slice(3), whole.slice(0, 3))):
        pq.write_table(part, tmp_path / f"{k}.parquet")
    pyarrow.csv.write_csv(whole.take([5, 2, 0, 4, 1, 3]), tmp_path / "mixed.csv")
    files = [[str(tmp_path / f"{k}.parquet") for k in order] for order in itertools.permutations(range(2))]
    for data in (*files, str(tmp_path / "mixed.csv")):
        recording = opened(data)
        assert recording.action_space == NamedDiscrete(NAMES)
        assert sorted(words_of(recording)) == sorted(WORDS)


def test_dictionaries_of_other_orders_and_plain_text_are_read_together(tmp_path: Path) -> None:
    for name, words in (("0", ["left", "stay", "stay"]), ("1", ["stay", "right", "left"])):
        own = pa.array(words).dictionary_encode() if name == "0" else pa.array(words)
        pq.write_table(
            pa.table({"trip": [name] * 3, "tick": [0, 1, 2], "speed": [0.5] * 3, "command": own}),
            tmp_path / f"{name}.parquet",
        )
    recording = Recording.open(Source(str(tmp_path), ENDED | {"t": "tick"}))
    assert words_of(recording) == ["left", "stay", "stay", "stay", "right", "left"]


def test_other_data_are_read_by_names_that_are_given_and_an_unknown_one_is_an_error() -> None:
    known = NamedDiscrete(NAMES)
    few = opened(table(command=["stay"] * 6), action_space=known)
    assert few.action_space == known
    assert few.read().steps["action"].tolist() == [2] * 6
    with pytest.raises(DataError, match=r"row 4: column `command` holds 'back', which is none of the 3 names that "):
        opened(table(command=[*WORDS[:4], "back", "stay"]), action_space=known).read()
    with pytest.raises(DataError, match=r"`action` is text, but its space, Discrete\(3\), has no names"):
        opened(table(), action_space=spaces.Discrete(3))


def test_text_among_observations_is_a_part_of_its_own_beside_the_vector_of_numbers() -> None:
    columns = table(weather=["dry", "wet", "dry", "dry", "wet", "dry"], load=[1, 2, 3, 4, 5, 6])
    recording = opened(columns, {"obs": ["speed", "weather", "load"]})
    assert recording.obs_space == spaces.Dict(
        [("numbers", spaces.Box(-np.inf, np.inf, (2,), np.float64)), ("weather", NamedDiscrete(["dry", "wet"]))]
    )
    steps = recording.read().steps
    assert steps["obs/numbers"][:2].tolist() == [[0.1, 1.0], [0.2, 2.0]]
    assert steps["obs/weather"].tolist() == [0, 1, 0, 0, 1, 0]


def test_next_observations_share_the_names() -> None:
    columns = table(weather=["dry"] * 6, load=[1] * 6, weather2=["wet"] * 6, load2=[2] * 6)
    recording = opened(columns, {"obs": ["load", "weather"], "next_obs": ["load2", "weather2"]})
    parts = recording.obs_space
    assert isinstance(parts, spaces.Dict)
    assert parts["weather"] == NamedDiscrete(["dry", "wet"])
    assert parts["numbers"].shape == (1,)
    exp = recording.read()
    assert exp.final_obs["obs/weather"].tolist() == [1, 1]
    assert exp.final_obs["obs/numbers"].tolist() == [[2], [2]]


def test_rewards_in_words_stay_an_error() -> None:
    with pytest.raises(DataError, match="not of numbers"):
        opened(table(score=["much"] * 6), {"reward": "score"})


def test_names_survive_conversion_and_must_agree_in_a_merge(tmp_path: Path) -> None:
    kept = convert(opened(table()), str(tmp_path / "a"))
    assert kept.action_space == NamedDiscrete(NAMES)
    assert words_of(Recording.open(str(tmp_path / "a"))) == WORDS
    convert(opened(table(command=["go", "stay", "left"] * 2)), str(tmp_path / "b"))
    with pytest.raises(
        DataError, match=r"NamedDiscrete\(3: go, left, stay\), rather than NamedDiscrete\(3: left, right, stay\)"
    ):
        merge_recordings([Recording.open(str(tmp_path / name)) for name in "ab"], str(tmp_path / "c"))
    with pytest.raises(DataError, match="can't be read as one recording"):
        Recording.open([Source(table(), ENDED), Source(table(command=["go", "stay", "left"] * 2), ENDED)])


@pytest.mark.parametrize("format", ["minari", "lerobot", "rllib-episodes", "rllib-table"])
def test_other_formats_get_the_numbers(format: str, tmp_path: Path) -> None:
    source = Source(table(r=[1.0] * 6), MAP | {"reward": "r", "truncated": "last-row", "next_obs": "speed"})
    new = convert(Recording.open(source), str(tmp_path / "new-v0"), format)
    assert new.action_space == (NamedDiscrete(NAMES) if format == "lerobot" else spaces.Discrete(3))
    assert new.read().steps["action"].tolist() == [2, 0, 1, 0, 2, 2]


# -- propensities, times, ends ---------------------------------------------------------------------------------------


def test_propensities_become_logp() -> None:
    chances = [0.5, 1.0, 0.25, 0.125, 1.0000001, 1e-6]
    recording = opened(table(p=chances), {"propensity": "p"})
    assert np.allclose(recording.read().steps["logp"], [math.log(min(p, 1)) for p in chances])
    assert recording.meta["inferred"]["logp"] == "the logarithm of `p`"


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.1, math.nan])
def test_what_is_no_propensity(wrong: float) -> None:
    with pytest.raises(DataError, match=rf"row 3: column `p` of `propensity` is {wrong}, but the probability"):
        opened(table(p=[0.5, 0.5, 0.5, wrong, 0.5, wrong]), {"propensity": "p"}).read()


def test_a_propensity_of_zero_is_guessed_and_named() -> None:
    chances = table(p=[0.5, 0.5, 0.0, 0.25, 0.0, 1.0])
    guess = guess_columns(chances)
    assert guess.columns["propensity"] == "p"
    assert any("`p` is 0 in 2 rows" in reason for reason in guess.unsure)
    with pytest.raises(
        DataError, match=r"row 2: .*\(2 rows are like it\)\. If it was rounded, write more digits; else"
    ):
        opened(chances, {"propensity": "p"}).read()


def test_propensity_and_logp_are_one_thing() -> None:
    with pytest.raises(DataError, match="`propensity` and `logp` mean the same"):
        opened(table(p=[0.5] * 6), {"propensity": "p", "logp": "p"})


@pytest.mark.parametrize("as_text", [False, True])
def test_times_order_steps(as_text: bool) -> None:
    minutes = [2, 0, 1, 5, 3, 9]
    texts = [f"2026-03-01 08:{m:02}:30" for m in minutes]
    times = pa.array(texts) if as_text else pa.array(texts).cast(pa.timestamp("s"))
    recording = opened(table(t=times))
    assert recording.read().steps["obs"].tolist() == [0.2, 0.3, 0.1, 0.5, 0.4, 0.6]
    assert recording.meta["inferred"]["t"] == "times in the table: steps are numbered from 0"


@pytest.mark.parametrize(
    "times",
    [
        [1772323272, 1772323200, 1772323260, 1772323500, 1772323380, 1772324000],  # Unix times, at no regular distance
        [1772323272123, 1772323200000, 1772323260001, 1772323500000, 1772323380000, 1772324000000],
        [1772323272.5, 1772323200.0, 1772323260.25, 1772323500.0, 1772323380.0, 1772324000.0],
        [0.4, -0.0, 0.05, 1.5, -1.25, 2.0],  # seconds
        [0.4, 0.0, 1e-300, 3.0, -1e-300, 4.0],
        ["2026-03-01 08:02 UTC", "2026-03-01 08:00 UTC", "2026-03-01 08:01Z", "2026-03-01 08:05 GMT",
         "2026-03-01 08:03 UTC", "2026-03-01 08:09 UTC"],
    ],
)  # fmt: skip
def test_times_as_programs_write_them(times: list[Any]) -> None:
    recording = opened(table(t=times))
    assert recording.read().steps["obs"].tolist() == [0.2, 0.3, 0.1, 0.5, 0.4, 0.6]
    assert recording.read().t().tolist() == [0, 1, 2, 0, 1, 2]
    assert recording.meta["inferred"]["t"] == "times in the table: steps are numbered from 0"


def test_numbers_are_times_if_any_file_shows_it(tmp_path: Path) -> None:
    for name, t in (("a", [0, 1, 2]), ("b", [0.0, 0.5, 2.0])):
        part = {"trip": [name] * 3, "speed": [0.1, 0.2, 0.3], "command": ["l", "r", "l"], "t": t}
        pq.write_table(pa.table(part), tmp_path / f"{name}.parquet")
    columns = {"obs": "speed", "action": "command", "episode_id": "trip", "t": "t", "terminated": "last-row"}
    recording = Recording.open(Source(str(tmp_path / "*.parquet"), columns))
    assert recording.read().t().tolist() == [0, 1, 2, 0, 1, 2]


def test_a_time_that_is_not_a_number() -> None:
    with pytest.raises(DataError, match=r"row 2: the column of `t` is nan, which is no time"):
        opened(table(t=pa.array([0.5, 1.5, np.nan, 0.5, 1.5, 2.5])))
    with pytest.raises(DataError, match=r"row 2: .*`t` .*"):
        opened(table(t=pa.array([0.5, 1.5, None, 0.5, 1.5, 2.5])))


def test_indices_are_no_times() -> None:
    recording = opened(table(t=[2.0, 0.0, 1.0, 12.0, 10.0, 11.0]))
    assert recording.read().t().tolist() == [0, 1, 2, 10, 11, 12]


def test_text_that_is_no_time() -> None:
    with pytest.raises(DataError, match=r"text such as 'soon', neither the number of a step nor a time such as"):
        opened(table(t=["soon"] * 6))
    with pytest.raises(DataError, match=r"row 4: .* text such as 'soon', neither"):
        opened(table(t=["0", "1", "2", "0", "soon", "2"]))


@pytest.mark.parametrize(
    "texts",
    [
        ["11/24/2026 3:15 PM", "11/24/2026 12:05 AM", "11/24/2026 12:05 PM", "1/3/2026", "1/2/2026", "12/1/2026 0:30"],
        ["24/11/2026 15:15:30", "24-11-2026 0:05", "24/11/2026 12:05:07.5", "3/1/2026", "2/1/2026", "1/12/2026, 9:30"],
        ["3.11.2026 15:15", "3.11.2026", "3.11.2026 12:00", "2.1.2026", "1.1.2026", "1.2.2026"],
        [
            "2026-11-24T15:15:00Z", "2026-11-24T01:05+01:00", "2026-11-24 13:05+0100", "2026-01-03T00:00:00.5Z",
            "2026-01-03T00:00:00Z", "2026-01-03T00:00:00-01:00",
        ],
        ["2026-11-24T15:15", "2026-11-24 00:05", "2026-11-24T12:05:00", "2026-01-03", "2026-01-02", "2026-02-02"],
    ],
)  # fmt: skip
def test_times_as_people_write_them(texts: list[str]) -> None:
    for source in (table(t=texts), table(t=pa.array(texts).dictionary_encode())):
        assert opened(source).read().steps["obs"].tolist() == [0.2, 0.3, 0.1, 0.5, 0.4, 0.6]


def test_what_is_first_in_a_date_is_shown_by_any_file_or_said() -> None:
    dates = ["5/1/2026", "3/2/2026", "4/2/2026", "1/2/2026", "2/1/2026", "3/3/2026"]
    for order, wanted in (
        ("month-first", [0.2, 0.3, 0.1, 0.4, 0.5, 0.6]),
        ("day-first", [0.1, 0.2, 0.3, 0.5, 0.4, 0.6]),
    ):
        assert opened(table(t=dates), {"t": f"t:{order}"}).read().steps["obs"].tolist() == wanted
    with pytest.raises(
        DataError, match=r"row 0: .*'5/1/2026'. Write t=t:month-first or t=t:day-first; or leave `t` out"
    ):
        opened(table(t=dates))
    with pytest.raises(
        DataError, match=r"row 3: .* `t` is text such as '13/2/2026', neither .* time with the month first"
    ):
        opened(table(t=[*dates[:3], "13/2/2026", *dates[4:]]), {"t": "t:month-first"})
    with pytest.raises(DataError, match=r"with the day first such as 2026-03-01 08:30:00 or 24/3/2026 3:15 PM"):
        opened(table(t=[*dates[:3], "2/13/2026", *dates[4:]]), {"t": "t:day-first"})


def test_one_file_shows_the_order_of_the_dates_of_all(tmp_path: Path) -> None:
    for name, dates in (("a", ["5/1/2026", "3/2/2026"]), ("b", ["1/2/2026", "2/13/2026"])):
        own = {"trip": [name] * 2, "t": dates, "speed": [0.1, 0.2], "command": ["left", "right"]}
        pq.write_table(pa.table(own), tmp_path / f"{name}.parquet")
    exp = Recording.open(Source(str(tmp_path), ENDED)).read()
    assert exp.steps["obs"].tolist() == [0.2, 0.1, 0.1, 0.2]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (2, "2/30/2026"), (2, "1/32/2026"), (2, "0/3/2026"), (2, "2/3/2026 24:00"), (2, "2/3/2026 0:30 PM"),
        (2, "2/3/2026 1:60"), (2, "soon"), (4, "2026-03-01"),
    ],
)  # fmt: skip
def test_dates_that_there_are_not(row: int, text: str) -> None:
    dates = ["2/14/2026"] * 6
    dates[row] = text
    with pytest.raises(
        DataError, match=rf"row {row}: the column `t` of `t` is text such as '{text}', neither .* month first"
    ):
        opened(table(t=dates))


def test_zones_in_some_rows_only() -> None:
    times = ["2026-03-01 08:00", "2026-03-01 09:00", "2026-03-01T10:00Z"] * 2
    with pytest.raises(DataError, match="row 2: .*'2026-03-01T10:00Z', .* written alike in all rows"):
        opened(table(t=times))


@pytest.mark.parametrize(
    ("no", "yes"), [("no", "yes"), ("No", "YES "), ("false", "true"), ("n", "y"), ("F", "T"), ("0", "1")]
)
def test_flags_in_words(no: str, yes: str) -> None:
    segments = opened(table(end=[no, no, yes, no, no, yes]), {"done": "end"}).read().segments
    assert segments.terminated.tolist() == [True, True]
    with pytest.raises(DataError, match="row 4: the column of `done` is 'maybe', not true or false. Write yes and no"):
        opened(table(end=[no, no, yes, no, "maybe", yes]), {"done": "end"})
    with pytest.raises(DataError, match="row 4: column `done` is empty"):
        opened(table(end=[no, no, yes, no, None, yes]), {"done": "end"})


@pytest.mark.parametrize(("flag", "ends"), [("terminated", (2, 0)), ("done", (2, 0)), ("truncated", (0, 2))])
def test_the_last_row_of_each_episode_ends_it(flag: str, ends: tuple[int, int]) -> None:
    for rows in (range(6), (5, 0, 3, 2, 4, 1)):
        segments = opened(table().take(list(rows)), {flag: "last-row"}).read().segments
        assert (segments.terminated.sum(), segments.truncated.sum()) == ends
    gap = opened(table(t=[0, 1, 2, 0, 1, 5]), {"truncated": "last-row", "next_obs": "speed"}).read().segments
    assert gap.truncated.tolist() == [True, False, True]


def test_every_row_of_a_bandits_log_is_an_episode() -> None:
    source = Source(table(), {"obs": "speed", "action": "command", "terminated": "every-row"})
    exp = Recording.open(source).read()
    assert (exp.num_segments, exp.segments.terminated.all(), exp.segments.t_start.max()) == (6, True, 0)
    assert exp.steps["obs"].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_a_column_of_that_name_comes_first() -> None:
    source = Source(table(**{"last-row": [False] * 3 + [True] * 3}), MAP | {"truncated": "last-row"})
    assert Recording.open(source, on_bad=None).read().segments.truncated.tolist() == [False, True, True, True]


# -- the space --------------------------------------------------------------------------------------------------------


def test_a_space_with_names() -> None:
    space = NamedDiscrete(["b", "a"])
    assert space.n == 2
    assert space == space_from_json(space_to_json(space)) == NamedDiscrete(["b", "a"])
    assert space != NamedDiscrete(["a", "b"])
    assert space != spaces.Discrete(2)
    assert spaces.Discrete(2) != space
    assert (space.named(1), space.named([[0], [1]]).tolist()) == ("a", [["b"], ["a"]])
    assert space.numbers("a") == 1
    assert space.numbers(["a", "b"]).tolist() == [1, 0]
    with pytest.raises(SpaceError, match="'c' is none of the 2 known names: b, a"):
        space.numbers(["a", "c"])
    for wrong in ([], ["a", "a"], "ab", [1]):
        with pytest.raises(SpaceError, match="NamedDiscrete"):
            NamedDiscrete(wrong)
    with pytest.raises(SpaceError, match="2 names, not 3"):
        space_from_json(space_to_json(space) | {"n": 3})


HINTS = {"obs": "skill", "action": "hint", "episode_id": "session", "terminated": "last-row"}


@pytest.mark.parametrize("kind", ["csv", "parquet", "pandas", "nullable", "category"])
@pytest.mark.parametrize("columns", [HINTS, HINTS | {"obs": "hint"}, HINTS | {"obs": ["skill", "hint"]}])
def test_whole_numbers_are_names_where_the_space_has_them(kind: str, columns: dict[str, Any], tmp_path: Path) -> None:
    hints = pd.Series([2, 2, 3, 1])
    first = pa.table({"skill": [0.1, 0.2, 0.3], "hint": ["2", "none", "13"], "session": [0, 0, 0]})
    spaces_of = Recording.open(Source(pa.concat_tables([first, first.slice(0, 1)]), columns))
    later = pd.DataFrame({"skill": [0.5] * 4, "hint": hints.replace({1: 13, 3: 13}), "session": [0, 0, 1, 1]})
    later["after"] = later["hint"]
    path: Any = tmp_path / f"later.{kind}"
    if kind == "csv":
        later.to_csv(path, index=False)
    elif kind == "parquet":
        later.to_parquet(path)
    else:
        path = later.convert_dtypes() if kind == "nullable" else later
        path = later.astype({"hint": "category"}) if kind == "category" else path
    given = {"obs_space": spaces_of.obs_space, "action_space": spaces_of.action_space}
    with_next = columns | ({"next_obs": "after"} if columns["obs"] == "hint" else {})
    read = Recording.open(Source(path, with_next, **given)).read()
    assert spaces_of.action_space == NamedDiscrete(["13", "2", "none"])
    for name in ["action", "obs/hint" if "skill" in columns["obs"] else "obs"][: 1 + ("hint" in columns["obs"])]:
        assert read.steps[name].tolist() == [1, 1, 0, 0]
    later["after"] = [2.0, np.nan, 2.0, 3.0]
    if columns["obs"] == "hint":
        with pytest.raises(DataError, match="`after` is of type double, but `obs` has names that are whole numbers"):
            Recording.open(Source(later, with_next, **given))
    with pytest.raises(DataError, match="holds '2', which is none of the 2 names"):
        Recording.open(Source(path, HINTS, action_space=NamedDiscrete(["13", "none"]))).read()


def test_numbers_of_a_recording_are_no_names_that_are_numbers(tmp_path: Path) -> None:
    table = pa.table({"skill": [0.1, 0.2], "hint": [1, 0], "session": [0, 0]})
    convert(Source(table, HINTS), tmp_path / "later")
    with pytest.raises(DataError, match="does not fit the space given"):
        Recording.open(tmp_path / "later", action_space=NamedDiscrete(["0", "1", "none"]))
    read = Recording.open(tmp_path / "later", action_space=NamedDiscrete(["left", "right", "none"])).read()
    assert read.steps["action"].tolist() == [1, 0]


def test_a_number_that_became_text_in_later_data_is_named() -> None:
    columns = HINTS | {"obs": ["skill", "speed"]}
    rows = {"skill": [0.1, 0.2], "speed": [1.0, 2.0], "hint": ["a", "b"], "session": [0, 0]}
    first = Recording.open(Source(pa.table(rows), columns))
    later = pa.table(rows | {"speed": ["1.0", "-"]})
    with pytest.raises(DataError, match="but its space has .* `obs/speed` is text, such as '-'"):
        Recording.open(Source(later, columns, obs_space=first.obs_space, action_space=first.action_space))
