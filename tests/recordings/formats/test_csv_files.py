# SPDX-License-Identifier: Apache-2.0
"""CSV files as people have them: empty cells, other separators, no rows."""

import gzip
import json
from pathlib import Path

import pytest

from etude.errors import DataError
from etude.recordings import Recording, Source, cache, guess_columns, validate

MAP = {"obs": "speed", "action": "command", "episode_id": "trip", "t": "tick", "terminated": "last-row"}
LINES = ["trip,tick,speed,command", "a,0,0.5,left", "a,1,0.25,right", "b,0,1.5,left"]


@pytest.fixture(params=["in memory", "converted"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a text file is read: into memory, or by way of the cache."""
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    if request.param == "converted":
        monkeypatch.setattr(cache, "LEAST_BYTES", 0)


def written(folder: Path, lines: list[str], name: str = "log.csv") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


# -- empty cells ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("blank", ["", "  ", '""', "NaN", "nan"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b,1,2.5,{}", r"log\.csv, row 3: column `command` is empty"),
        ("{},1,2.5,left", r"log\.csv, row 3: column `episode_id` is empty"),
    ],
)
def test_an_empty_cell_among_texts_is_missing(blank: str, row: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, [*LINES, row.format(blank)])
    with pytest.raises(DataError, match=message):
        Recording.open(Source(path, MAP)).read()
    facts = guess_columns(path).found["command" if row.startswith("b") else "trip"]
    assert (facts.missing, facts.distinct) == (1, 2)


@pytest.mark.usefixtures("kept")
def test_an_empty_cell_in_a_column_that_is_not_mapped_is_no_text(tmp_path: Path) -> None:
    notes = ["note", "fast", "", " "]
    path = written(tmp_path, [f"{line},{note}" for line, note in zip(LINES, notes, strict=True)])
    assert Recording.open(Source(path, MAP)).read().steps["note"].tolist() == ["fast", None, None]
    assert guess_columns(path).found["note"].examples == ("fast",)


@pytest.mark.usefixtures("kept")
def test_the_cell_that_makes_a_column_of_numbers_text_is_named(tmp_path: Path) -> None:
    scores = ["score", "1", "-0.5", "n/k"]
    path = written(tmp_path, [f"{line},{score}" for line, score in zip(LINES, scores, strict=True)])
    with pytest.raises(DataError, match=r"log\.csv, row 2: column `score` is of type string, for instance 'n/k', not"):
        Recording.open(Source(path, MAP | {"reward": "score"}))


# -- separators -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("header", ["trip{}tick{}speed{}command", 'trip{}"tick"{}speed{}"command"'])
def test_other_separators_are_found_in_the_header(mark: str, header: str, tmp_path: Path) -> None:
    rows = [line.replace(",", mark) for line in LINES[1:]]
    exp = Recording.open(Source(written(tmp_path, [header.format(mark, mark, mark), *rows]), MAP)).read()
    assert exp.steps["obs"].tolist() == [0.5, 0.25, 1.5]
    assert exp.steps["action"].tolist() == [0, 1, 0]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_decimal_commas_between_semicolons(name: str, tmp_path: Path) -> None:
    lines = ["trip;tick;speed;command", "a;0;-0,5;left, or so", "a;1;12,25;right", "b;0;3;right", "b;1;1,5e-3;right"]
    text = ("\ufeff" + "\r\n".join(lines) + "\r\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    exp = Recording.open(Source(tmp_path / name, MAP)).read()
    assert exp.steps["obs"].tolist() == [-0.5, 12.25, 3.0, 0.0015]


@pytest.mark.parametrize(
    ("lines", "columns"),
    [
        (["x;y,z", "1,2"], ["x;y", "z"]),
        (['"x;y;z",u', "1,2"], ["x;y;z", "u"]),
        (["x", "1"], ["x"]),
        (["trip;km/h, mean;command", "a;1;left"], ["trip", "km/h, mean", "command"]),
    ],
)
def test_the_separator_is_what_the_header_has_most_of(lines: list[str], columns: list[str], tmp_path: Path) -> None:
    assert list(guess_columns(written(tmp_path, lines)).found) == columns


def test_more_decimal_points_than_commas_are_points(tmp_path: Path) -> None:
    lines = ["trip;tick;speed;command", "a;0;-0.5;1,5", "a;1;12.25;2", "b;0;3.5;1,5"]
    exp = Recording.open(Source(written(tmp_path, lines), MAP)).read()
    assert exp.steps["obs"].tolist() == [-0.5, 12.25, 3.5]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    path = written(tmp_path, ["x;y", "1,000;a", "2,500;b"])
    assert guess_columns(path).found["x"].type == "string"


# -- nothing in it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"log\.csv: can't be read \(Empty CSV file"),
        ("\n\n", r"log\.csv: can't be read \(.*Empty CSV file"),
        ("trip,tick,speed,command\n", r"log\.csv: has no rows, only the names of its columns \(trip, tick, speed"),
        ("trip,tick\n1,2\n3\n", r"log\.csv: can't be read \(.*Expected 2 columns, got 1"),
    ],
)
def test_a_file_that_holds_no_rows_says_so(text: str, message: str, described: bool, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        Recording.open(Source(tmp_path / "log.csv", MAP) if described else tmp_path / "log.csv")


# -- encodings --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
def test_a_file_that_is_not_utf_8_is_an_error_and_its_texts_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("\n".join([*LINES, "b,1,2.5,läft"]).encode("latin-1"))  # as many bytes as `left`
    with pytest.raises(DataError, match=r"log\.csv: can't be read \(column `command` is not UTF-8 text: save the file"):
        Recording.open(Source(path, MAP))
    path.write_text("\n".join(LINES), encoding="utf-16")
    with pytest.raises(DataError, match=r"log\.csv: can't be read \(it has zero bytes, as UTF-16 has: save the file"):
        Recording.open(Source(path, MAP))


@pytest.mark.usefixtures("kept")
def test_a_byte_order_mark_is_no_part_of_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text('[{"trip": "a", "tick": 0, "speed": 0.5, "command": "left"}]', encoding="utf-8-sig")
    assert Recording.open(Source(path, MAP)).read().steps["obs"].tolist() == [0.5]


@pytest.mark.usefixtures("kept")
def test_files_of_json_lines_without_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"trip": "a", "tick": 0, "speed": 0.5, "command": "left"}\n')
    (tmp_path / "b.jsonl").write_text("\n\n")
    assert Recording.open(Source(tmp_path, MAP)).num_steps == 1
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match=r"b\.jsonl: can't be read \(it is empty\)\. Repair it, restore it"):
        Recording.open(Source(tmp_path, MAP))


@pytest.mark.usefixtures("kept")
def test_a_list_of_objects_has_the_keys_of_all_of_them(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"trip": "a", "tick": k, "speed": k / 2, "command": "go"} for k in range(2)]
    path = tmp_path / "log.json"
    path.write_text(json.dumps([rows[0], rows[1] | {"score": 1.5}]))
    assert guess_columns(path).found["score"].missing == 1
    with pytest.raises(DataError, match=r"log\.json, row 0: column `reward` holds NaN"):
        Recording.open(Source(path, MAP | {"reward": "score"})).read()
    for name, value in (("command", 7), ("speed", 2**70)):
        path.write_text(json.dumps([rows[0], rows[1] | {name: value}]))
        with pytest.raises(DataError, match=rf"log\.json: can't be read \(column `{name}`: "):
            Recording.open(Source(path, MAP))


def test_an_episode_does_not_end_in_two_ways_at_its_last_row(tmp_path):
    (tmp_path / "log.csv").write_text("speed,command,trip\n1.5,0,a\n2.5,1,a\n")
    columns = {"obs": "speed", "action": "command", "episode_id": "trip"} | dict.fromkeys(
        ("terminated", "truncated"), "last-row"
    )
    with pytest.raises(DataError, match="terminated and truncated are both last-row, but an episode ends in one way"):
        Recording.open(Source(tmp_path / "log.csv", columns))


@pytest.mark.parametrize("broken", ["day-0.csv", "day-2.csv"])
def test_one_file_that_cant_be_read_does_not_cost_the_others(tmp_path: Path, broken: str) -> None:
    for day in range(3):
        rows = "".join(f"{day},{t},{day * 10 + t},1,0.5,{int(t == 3)}\n" for t in range(4))
        (tmp_path / f"day-{day}.csv").write_text("day,t,x,a,r,end\n" + rows)
    (tmp_path / broken).write_text("day,t,x,a,r,end\n0,0,0,1,0.5,0\n0,1")
    names = {"obs": "x", "action": "a", "reward": "r", "terminated": "end", "episode_id": "day", "t": "t"}
    with pytest.raises(DataError, match=broken):
        Recording.open(Source(tmp_path, names))
    for on_bad in ("skip", "repair"):
        recording = Recording.open(Source(tmp_path, names), on_bad=on_bad)
        assert [name in broken for name in recording.read().segments.episode_id] == [False, False]
        assert (recording.met, recording.unread_parts) == ({"unreadable": 1}, 1)
    report = validate(Source(tmp_path, names))
    assert [(problem.kind, problem.file) for problem in report.errors] == [("unreadable", str(tmp_path / broken))]
    assert report.rows == 8


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_ids_are_texts_whatever_they_look_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, in_blocks: bool
) -> None:
    if in_blocks:
        monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    ids = ["2024-01-01", "2024-01-01 00:00:00", "2024-01-02"]
    rows = [{"day": day, "x": float(t), "a": t, "end": t == 1} for day in ids for t in range(2)]
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        path.write_text("day,x,a,end\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if kind == "jsonl" else json.dumps(rows))
    names = {"obs": "x", "action": "a", "terminated": "end", "episode_id": "day"}
    recording = Recording.open(Source(path, names))
    assert recording.read().segments.episode_id.tolist() == ids
    assert recording.read(filter="episode_id == '2024-01-01'").num_steps == 2
