# SPDX-License-Identifier: Apache-2.0
"""Sources of the user's own: against what the files were made of."""

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, validate
from etude.recordings.formats import custom
from etude.recordings.formats.custom import (
    Fitter,
    LineCounts,
    decoded,
    parts_of,
    read_binary,
    read_text,
    spans_of,
    text_rows,
)

NUMBERS, CHOICES = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(3)
SPACES = {"obs_space": NUMBERS, "action_space": CHOICES}
PAIR = spaces.Dict({"place": NUMBERS, "mode": spaces.Discrete(2)})


def line_of(episode: int, length: int) -> str:
    obs = [[episode, t / 8] for t in range(length + 1)]
    return json.dumps({"obs": obs, "action": [t % 3 for t in range(length)], "reward": [float(episode)] * length})


def parsed(row: Any) -> Any:
    return {**json.loads(row.data), "terminated": True}


def everything(source: Any) -> Experience:
    recording = Recording.open(source, on_bad=None)
    loaded = [recording.part(k) for k in range(recording.num_parts)]
    assert [exp.num_steps for exp in loaded] == [recording.part(k).num_steps for k in range(recording.num_parts)]
    assert [recording.part(k, ()).num_steps for k in range(recording.num_parts)] == [exp.num_steps for exp in loaded]
    exp = Experience.concat(loaded)
    exp.validate()
    return exp


def test_lines_become_episodes_in_order(tmp_path: Path) -> None:
    lengths = [1 + i % 7 for i in range(500)]
    (tmp_path / "a.txt").write_text("".join(line_of(i, n) + "\n" for i, n in enumerate(lengths[:300])))
    (tmp_path / "b.txt").write_text("\r\n".join(line_of(i + 300, n) for i, n in enumerate(lengths[300:])))
    exp = everything(read_text(tmp_path, parsed, **SPACES))
    assert exp.lengths.tolist() == lengths
    assert exp.steps["obs"].tolist() == [[i, t / 8] for i, n in enumerate(lengths) for t in range(n)]
    assert exp.final_obs["obs"].tolist() == [[i, n / 8] for i, n in enumerate(lengths)]
    assert exp.steps["action"].tolist() == [t % 3 for n in lengths for t in range(n)]
    assert exp.steps["obs"].dtype == np.float32
    assert exp.steps["action"].dtype == np.int64
    assert exp.segments.terminated.all()
    assert exp.segments.episode_id[[0, 299, 300, 499]].tolist() == ["a.txt:0", "a.txt:299", "b.txt:0", "b.txt:199"]


@given(st.lists(st.text(st.sampled_from("aé\r\n"), max_size=9), max_size=20), st.integers(1, 9), st.randoms())
def test_lines_are_cut_as_python_cuts_them_whatever_the_parts(texts: list[str], budget: int, random: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom, "_BLOCK", 4)
        path = Path(folder) / "text"
        path.write_bytes("".join(texts).encode())
        parts = parts_of(spans_of([path], "line"), budget, cut=True)
        counts = LineCounts()
        random.shuffle(parts)
        rows = [decoded(r) for part in parts for spans in part for (r,) in text_rows(spans, "line", counts)]
        lines = path.read_bytes().decode().split("\n")
        wanted = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    assert {row.number: row.data for row in rows} == dict(enumerate(wanted))
    assert len(rows) == len(wanted)


def test_a_large_text_comes_in_parts_of_bounded_size(tmp_path: Path) -> None:
    lines = [line_of(i % 5, 300) for i in range(400)]
    (tmp_path / "log").write_text("\n".join(lines))
    recording = Recording.open(read_text(tmp_path / "log", parsed, **SPACES), on_bad=None)
    assert recording.num_parts > 1
    assert all(recording.part(k).num_steps <= 70_000 for k in range(recording.num_parts))
    assert sum(recording.part(k).num_steps for k in range(recording.num_parts)) == 400 * 300


def test_images_of_a_folder_become_one_episode(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frames = {f"run-{e}": rng.integers(0, 256, (5 + e, 8, 9, 3), np.uint8) for e in range(3)}
    for name, images in frames.items():
        (tmp_path / name).mkdir()
        for t, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / name / f"{t:03}-{t % 3}.png")

    def episode(rows: Any) -> Any:
        images = [np.asarray(Image.open(io.BytesIO(row.data))) for row in rows]
        return {"obs": np.stack(images), "action": [int(row.path[-5]) for row in rows[:-1]], "truncated": True}

    box = spaces.Box(0, 255, (8, 9, 3), np.uint8)
    source = read_binary(tmp_path, episode, obs_space=box, action_space=CHOICES, env="Camera-v0", together="folder")
    recording = Recording.open(source)
    exp = recording.read()
    assert (recording.env, recording.format, recording.num_episodes) == ("Camera-v0", "custom-binary", 3)
    assert [name.split("/")[-1] for name in exp.segments.episode_id] == list(frames)
    for segment, images in zip(exp, frames.values(), strict=True):
        assert np.array_equal(np.concatenate([segment.steps["obs"], segment.final_obs["obs"]]), images)
        assert segment.steps["action"].tolist() == [t % 3 for t in range(len(images) - 1)]
    batches = [batch["obs"].shape for batch in recording.batches(4, epochs=1)]
    assert batches == [(4, 8, 9, 3)] * 3 + [(3, 8, 9, 3)]


def test_a_function_may_give_experience_several_or_nothing(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())

    def made(row: Any) -> Any:
        if row.data == b"a":
            return None
        if row.data == b"b":
            segments = Segments.of(1, episode_id=["own"], truncated=True, has_final_obs=False)
            steps = {"obs": np.ones((4, 2)), "action": np.array([0, 1, 2, 0], np.int8), "speed": np.arange(4.0)}
            return Experience(steps, np.array([0, 4]), segments, {"obs": np.full((1, 2), np.nan)})
        one = {"obs": np.zeros((2, 2)), "action": [1, 1], "speed": [1, 2], "final_obs": [5, 6]}
        return [one, {**one, "t_start": 2, "agent_id": "x", "terminated": [False, True]}]

    exp = everything(read_binary([tmp_path / n for n in "abc"], made, **SPACES))
    assert exp.lengths.tolist() == [4, 2, 2]
    assert exp.segments.episode_id.tolist() == ["own", "c-0", "c-1"]
    assert exp.segments.agent_id.tolist() == [None, None, "x"]
    assert exp.segments.t_start.tolist() == [0, 0, 2]
    assert exp.segments.has_final_obs.tolist() == [False, True, True]
    assert exp.segments.terminated.tolist() == [False, False, True]
    assert exp.steps["speed"].tolist() == [0, 1, 2, 3, 1, 2, 1, 2]
    assert exp.final_obs["obs"][1:].tolist() == [[5, 6], [5, 6]]


def test_parts_of_nested_observations_are_columns() -> None:
    fitter = Fitter(PAIR, CHOICES)
    obs = {"place": np.zeros((3, 2)), "mode": [0, 1, 0]}
    (exp,) = fitter.fitted({"obs": obs, "action": [0, 0]}, "e")
    (same,) = fitter.fitted({"obs/place": np.zeros((3, 2)), "obs/mode": [0, 1, 0], "action": [0, 0]}, "e")
    assert exp.steps["obs/mode"].tolist() == same.steps["obs/mode"].tolist() == [0, 1]
    assert exp.final_obs["obs/mode"].tolist() == [0]
    for bad in (
        {"obs": {"place": np.zeros((3, 2))}},
        {"obs": np.zeros((2, 2))},
        {"obs": obs, "final_obs": np.zeros(2)},
    ):
        with pytest.raises(DataError, match=r"gave `obs` without the parts of its space: obs/mode, obs/place"):
            fitter.fitted({"action": [0, 0], **bad}, "e")


@pytest.mark.parametrize("parts", [([0, 1],), ([0, 1], [1, 1], [2, 2])])
def test_a_tuple_has_as_many_parts_as_its_space(parts: tuple[Any, ...]) -> None:
    fitter = Fitter(spaces.Tuple((CHOICES, CHOICES)), CHOICES)
    with pytest.raises(DataError, match=rf"gave `obs` with {len(parts)} parts, but its space has 2: Tuple\(Discrete"):
        fitter.fitted({"obs": parts, "action": [0]}, "e")


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)])
def test_rewards_of_one_number_each_are_flat(shape: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first")
    episode = {"obs": np.zeros((3, 2)), "action": np.zeros(3, np.int64), "reward": np.ones(shape), "terminated": True}
    box = spaces.Box(-1, 1, (2,), np.float64)
    source = read_text(tmp_path / "a", lambda _: episode, obs_space=box, action_space=CHOICES)
    if shape == (3, 2):
        with pytest.raises(DataError, match=r"gave `reward` with rows of shape \[2\], not one number each"):
            everything(source)
    else:
        assert everything(source).returns().tolist() == [3]


def test_ids_are_texts_and_none_is_no_id() -> None:
    given = {**GOOD, "episode_id": None, "agent_id": 3, "module_id": None, "t_start": np.int32(5)}
    (exp,) = Fitter(NUMBERS, CHOICES).fitted(given, "e")
    segments = exp.segments
    assert [segments.episode_id[0], segments.agent_id[0], segments.module_id[0]] == ["e", "3", None]
    assert segments.t_start.tolist() == [5]
    (exp,) = Fitter(NUMBERS, CHOICES).fitted({**GOOD, "t_start": np.array(3)}, "e")
    assert exp.segments.t_start.tolist() == [3]


GOOD = {"obs": np.zeros((2, 2)), "action": [0, 2], "speed": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "gave a int, not an Experience, a dict of columns, or a list"),
        ({"obs": [[0, 0]]}, "gave the columns obs, but `obs` and `action` are needed"),
        (
            {**GOOD, "obs": np.zeros((2, 3))},
            r"column `obs` as float64 \[3\] a step, not float32 \[2\] a step",
        ),
        ({**GOOD, "obs": [[0, 0], [0, 1e300]]}, r"`obs` with 1e\+300 in it, which does not fit float32 \[2\] a step"),
        ({**GOOD, "action": [0.5, 1]}, r"column `action` as float64 \[\] a step, not int64 \[\]"),
        ({**GOOD, "action": [0, 3]}, r"the column `action` with 3 in it, which is outside of Discrete\(3\)"),
        ({**GOOD, "action": [0, 1, 2, 0]}, "gave `obs` with 2 rows, but there are 4 actions"),
        ({**GOOD, "speed": 3}, "gave `speed` as a single number"),
        ({**GOOD, "speed": ["a", "b"]}, "gave `speed` as <U1, not numbers"),
        ({**GOOD, "obs": [[0, 0], [0]]}, "gave `obs`, which is not an array of numbers of one shape"),
        ({**GOOD, "next_obs": np.zeros((2, 2))}, r"name that is reserved for recordings\. Give `obs` one row more"),
        ({**GOOD, "terminated": [True, False]}, "gave `terminated` true at step 0 of 2"),
        ({**GOOD, "terminated": [True] * 3}, r"gave `terminated` as '\[True, True, True\]': give true or false"),
        ({**GOOD, "terminated": "no"}, "gave `terminated` as <U2, not numbers"),
        ({**GOOD, "terminated": [False, [True]]}, "gave `terminated`, which is not an array of numbers"),
        ({**GOOD, "episode_id": ["x"]}, r"gave `episode_id` as \"\['x'\]\": give one text for the whole episode"),
        ({**GOOD, "agent_id": ["x", "y"]}, r"gave `agent_id` as .*: give one text for the whole episode"),
        ({**GOOD, "module_id": np.zeros(2)}, r"gave `module_id` as .*: give one text for the whole episode"),
        ({**GOOD, "t_start": "e2"}, "gave `t_start` as 'e2': give the number of the first step, from 0"),
        ({**GOOD, "t_start": None}, "gave `t_start` as 'None': give the number"),
        ({**GOOD, "t_start": 2**70}, "gave `t_start` as '1180591620717411303424': give the number"),
        ({**GOOD, "t_start": 0.5}, "gave `t_start` as '0.5': give the number"),
        ({k: v for k, v in GOOD.items() if k != "speed"}, "gave no column `speed`; wanted are obs, action, speed"),
        ({**GOOD, "angle": [1, 2]}, "gave the column `angle`; wanted are obs, action, speed"),
    ],
)
def test_what_does_not_fit_is_told_by_column_found_and_wanted(given: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first\nsecond\nthird")
    source = read_text(tmp_path / "a", lambda row: given if row.number == 1 else GOOD, **SPACES)
    recording = Recording.open(source, on_bad=None)
    with pytest.raises(DataError, match=message) as told:
        recording.part(0)
    assert f"{tmp_path / 'a'}, row 1: to_experience gave" in str(told.value)


def test_an_integer_too_large_for_its_column_is_told() -> None:
    fitter = Fitter(spaces.Box(0, 255, (1,), np.uint8), CHOICES)
    with pytest.raises(DataError, match=r"gave the column `obs` with 256 in it, which does not fit uint8 \[1\] a step"):
        fitter.fitted({"obs": [[0], [256]], "action": [0, 0]}, "e")


def test_a_source_is_called_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(line_of(0, 3))
    recording = Recording.open(read_text(path, parsed, **SPACES))
    assert str(recording.path) == recording.info()["path"] == str(path)
    assert str(recording.validate()) == f"{path}: 1 file, 3 rows, 1 episode: no problems."


def test_an_error_of_the_function_names_file_and_row_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"{line_of(0, 3)}\nnot JSON\n{line_of(1, 3)}")
    recording = Recording.open(read_text(path, parsed, **SPACES))
    with pytest.raises(DataError, match="row 1: to_experience raised JSONDecodeError: Expecting value") as told:
        recording.read()
    assert isinstance(told.value.__cause__, json.JSONDecodeError)
    (problem,) = Recording.open(read_text(path, parsed, **SPACES)).validate().problems
    assert (problem.kind, problem.row, problem.file, problem.repairable) == ("unreadable", 1, str(path), True)


def test_lines_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(line_of(0, 3).encode() + b"\nab\xff\n" + line_of(1, 3).encode())
    source = read_text(path, parsed, **SPACES)
    with pytest.raises(DataError, match=r"a.txt, row 1: is not UTF-8 text \(byte 2 of the line is 0xff\)"):
        Recording.open(source, on_bad=None).part(0)
    assert [p.row for p in validate(source).problems] == [1]


def test_problems_are_found_and_placed(tmp_path: Path) -> None:
    episodes = [
        {"episode_id": "x", "terminated": True},
        {"episode_id": "x", "terminated": True},
        {},
        {"obs": [[0, np.nan]] * 2, "terminated": True},
    ]
    path = tmp_path / "a"
    path.write_text("a\n" * len(episodes))
    recording = Recording.open(read_text(path, lambda row: {**GOOD, **episodes[row.number]}, **SPACES), on_bad=None)
    found = [(problem.kind, problem.row) for problem in recording.validate().problems]
    assert found == [("nan", 3), ("no_final_obs", 2), ("duplicate", 1)]


def test_wrong_arguments_and_empty_places_are_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="to_experience is 3: give a function"):
        read_text(tmp_path, 3, **SPACES)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="together is 'row'; known are 'line' and 'file'"):
        read_text(tmp_path, parsed, together="row", **SPACES)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="there is no file here"):
        Recording.open(read_text(tmp_path, parsed, **SPACES))
    (tmp_path / "a").write_text("x\n")
    (tmp_path / ".hidden").write_text("x\n")
    with pytest.raises(DataError, match=r"to_experience gave no steps for any row of 1 file"):
        Recording.open(read_text(tmp_path, lambda row: None, **SPACES))


def test_all_lines_of_a_file_at_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{i} {i % 3}\n" for i in range(4)))

    def made(rows: Any) -> Any:
        numbers = np.array([row.data.split() for row in rows], int)
        assert [row.number for row in rows] == [0, 1, 2, 3]
        return {"obs": np.stack([numbers[:, 0]] * 2, 1), "action": numbers[:, 1]}

    exp = everything(read_text(tmp_path, made, together="file", **SPACES))
    assert exp.segments.episode_id.tolist() == ["a", "b"]
    assert exp.steps["action"].tolist() == [0, 1, 2, 0] * 2
    assert not exp.segments.has_final_obs.any()


def test_the_whole_is_read_with_one_call_a_row_and_a_first_batch_with_few(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(row: Any) -> Any:
        calls.append(row.number)
        return parsed(row)

    path = tmp_path / "a"
    path.write_text("".join(line_of(i, 300) + "\n" for i in range(900)))
    source = read_text(path, counted, **SPACES)
    exp = Recording.open(source).read()
    assert exp.num_steps == 900 * 300
    assert exp.steps["obs"][:, 0].tolist() == np.repeat(np.arange(900), 300).tolist()
    assert calls == [0, *range(900)]  # the first tells what columns there are
    calls.clear()
    recording = Recording.open(source)
    next(iter(recording.batches(64, shuffle=False, buffer_size=1000, prefetch=0)))
    assert len(calls) < 700


def test_files_may_lie_in_a_bucket(s3: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8)
    for t, frame in enumerate(frames):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        with s3.system.open_output_stream(f"{s3.url.removeprefix('s3://')}/drive-0/{t}.png") as out:
            out.write(file.getvalue())

    def drive(rows: Any) -> Any:
        images = [np.asarray(Image.open(io.BytesIO(row.data))) for row in rows]
        return {"obs": np.stack(images), "action": [0] * 3, "terminated": True}

    box = spaces.Box(0, 255, (5, 6, 3), np.uint8)
    source = read_binary(f"{s3.url}/**/*.png", drive, obs_space=box, action_space=CHOICES, together="folder")
    exp = Recording.open(source).read()
    assert np.array_equal(np.concatenate([exp.steps["obs"], exp.final_obs["obs"]]), frames)
    assert exp.segments.episode_id[0].endswith("drive-0")
    source = read_binary(s3.url, drive, obs_space=box, action_space=CHOICES, together="folder", filesystem=s3.system)
    assert Recording.open(source).part(0).num_steps == 3


def test_rows_that_fail_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(["no JSON", line_of(0, 3), "no JSON", line_of(1, 3)]))
    recording = Recording.open(read_text(path, parsed, **SPACES), on_bad="skip")
    assert recording.read().steps["obs"][:, 0].tolist() == [0] * 3 + [1] * 3
    assert recording.left_out == {"unreadable": 2}
    with pytest.raises(DataError, match=r"a\.txt, row 0: to_experience raised JSONDecodeError"):
        Recording.open(read_text(path, parsed, **SPACES)).read()


def test_a_function_that_always_fails_is_told_at_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails(row: Any) -> Any:
        calls.append(row.number)
        return {}["speed"]

    (tmp_path / "a").write_text("x\n" * 1000)
    with pytest.raises(DataError, match="row 0: to_experience raised KeyError: 'speed'") as told:
        Recording.open(read_text(tmp_path / "a", fails, **SPACES))
    assert isinstance(told.value.__cause__, KeyError)
    assert len(calls) < 50


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf1 2\n3 4\n")
    seen = []

    def convert(row: Any) -> dict[str, Any]:
        seen.append(row.data)
        steps = np.array(row.data.split(), np.float32)
        return {"obs": steps[:, None], "action": np.zeros(len(steps), int), "terminated": True}

    space: dict[str, Any] = {"obs_space": spaces.Box(0, 9, (1,)), "action_space": spaces.Discrete(2)}
    recording = Recording.open(read_text(tmp_path / "a.txt", convert, **space))
    assert recording.read().steps["obs"].ravel().tolist() == [1, 2, 3, 4]
    assert "\ufeff" not in "".join(seen)
