# SPDX-License-Identifier: Apache-2.0
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces
from PIL import Image
from shown_data import episode, write

from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source
from etude.viewer import RecordingView, figures
from etude.viewer.views import compare_column, first_rows


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    lengths = [5, 3, 8, 4]
    pieces = [episode(i, length, terminated=i != 2) for i, length in enumerate(lengths)]
    return RecordingView(Recording.open(write(tmp_path_factory.mktemp("shown") / "data", pieces)))


def test_the_summary_says_what_there_is(view):
    found = view.summary()
    assert (found["episodes"], found["steps"], found["terminated"], found["unfinished"]) == (4, 20, 3, 1)
    assert (found["return"]["min"], found["return"]["max"], found["return"]["mean"]) == (3, 8, 5)
    assert found["images"] == ["obs/camera"]
    assert found["bytes"] == sum(file.stat().st_size for file in view.recording.files)


def test_episodes_are_sorted_and_filtered_by_the_language_of_where(view):
    assert view.list()["episode_id"] == ["e0", "e1", "e2", "e3"]
    found = view.list("length > 3 and mean(obs/speed[0]) < 0.3".replace("obs/speed", "`obs/speed`"), "return", True)
    assert (found["episode_id"], found["return"], found["found"], found["of"]) == (["e0", "e3"], [5.0, 4.0], 2, 4)
    assert view.list(sort="length")["length"] == [3, 4, 5, 8]
    assert view.list("return > 1000")["episode_id"] == []


def test_a_list_is_sorted_before_it_is_cut_off(view, monkeypatch):
    monkeypatch.setattr("etude.viewer.views.MAX_EPISODES", 2)
    found = view.list(sort="return", descending=True)
    assert (found["return"], found["found"]) == ([8.0, 5.0], 4)


@pytest.mark.parametrize(("where", "sort", "word"), [("retrun > 1", "", "retrun"), ("", "reward", "can't be sorted")])
def test_what_can_not_be_asked_of_episodes_is_said(view, where, sort, word):
    with pytest.raises(SettingsError, match=word):
        view.list(where, sort)


def test_an_episode_comes_with_all_its_steps_wherever_they_are(tmp_path):
    # The second piece of e0 is in another file, behind e1.
    whole = episode(0, 9)
    first, second = whole.split(4)
    first.segments.terminated[:] = False
    path = write(tmp_path / "data", [first, episode(1, 3), second])
    (agent,) = RecordingView(Recording.open(path)).episode("e0")["agents"]
    assert agent["steps"] == 9
    assert agent["terminated"]
    np.testing.assert_allclose(agent["curves"]["obs/speed[0]"], np.arange(9) / 10)
    assert agent["curves"]["action"] == [t % 3 for t in range(9)]


def test_agents_of_an_episode_stand_beside_each_other(tmp_path):
    path = write(tmp_path / "data", [episode(0, 4, agent="a"), episode(0, 6, agent="b", reward=2.0)])
    view = RecordingView(Recording.open(path))
    assert [(one["agent"], one["steps"]) for one in view.episode("e0")["agents"]] == [("a", 4), ("b", 6)]
    assert view.list()["return"] == [16.0]
    assert view.summary()["agents"] == ["a", "b"]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_frames_are_what_was_observed_and_the_final_one_is_the_last(view):
    for t in range(9):
        image = pixels(view.frame("e2", 0, "obs/camera", t))
        assert image.shape == (12, 16, 3)
        assert image[0, 0].tolist() == [10 * t, 2, 0]
    with pytest.raises(DataError, match="no step 9"):
        view.frame("e2", 0, "obs/camera", 9)
    with pytest.raises(DataError, match="no agent 1"):
        view.frame("e2", 1, "obs/camera", 0)
    with pytest.raises(DataError, match="holds no images"):
        view.frame("e2", 0, "reward", 0)
    with pytest.raises(DataError, match="no episode 'e9'"):
        view.episode("e9")


def test_a_frame_is_read_from_the_part_that_has_it_alone(tmp_path, monkeypatch):
    pieces = episode(0, 9).split(4)
    pieces[0].segments.terminated[:] = False
    recording, read = Recording.open(write(tmp_path / "data", pieces)), []
    part = recording.part

    def noted(k, columns=None, **how):
        read.extend([k] if "obs/camera" in (columns or ()) else [])
        return part(k, columns, **how)

    monkeypatch.setattr(recording, "part", noted)
    view = RecordingView(recording)
    for t in (2, 3, 9, 5):
        assert pixels(view.frame("e0", 0, "obs/camera", t))[0, 0].tolist() == [10 * t, 0, 0]
    assert read == [0, 1]


def test_long_episodes_are_drawn_with_fewer_points(view, monkeypatch):
    monkeypatch.setattr("etude.viewer.views.MAX_POINTS", 3)
    (agent,) = view.episode("e2")["agents"]
    assert (agent["steps"], agent["stride"], agent["curves"]["obs/speed[1]"]) == (8, 3, pytest.approx([0, -0.3, -0.6]))


def test_figures_of_several_recordings_share_their_bins(view, tmp_path):
    other = RecordingView(Recording.open(write(tmp_path / "data", [episode(7, 12, reward=0.5)])))
    (returns,) = compare_column([view, other], "return")
    assert returns["edges"][0] == 3
    assert returns["edges"][-1] == 8
    assert [sum(some) for some in returns["counts"]] == [4, 1]
    first, second = compare_column([view, other], "obs/speed")
    assert (first["name"], second["name"]) == ("obs/speed[0]", "obs/speed[1]")
    assert first["statistics"][1]["mean"] == pytest.approx(np.mean(np.arange(12) / 10))
    (action,) = compare_column([view, other], "action")
    taken = np.concatenate([np.arange(n) % 3 for n in (5, 3, 8, 4)])
    assert action["labels"] == ["0", "1", "2"]
    assert action["counts"] == [np.bincount(taken).tolist(), [4, 4, 4]]
    with pytest.raises(DataError, match="no column `speed`"):
        compare_column([view, other], "speed")


def test_a_column_that_one_recording_lacks_has_no_figures_there(view, tmp_path):
    table = {"episode_id": ["a", "a"], "obs": [1.0, 2.0], "action": [0, 1], "reward": [0.0, 1.0], "note": ["x", "y"]}
    table["terminated"] = [False, True]
    names = {"info/note" if name == "note" else name: name for name in table}
    log = RecordingView(Recording.open(Source(pa.table(table), columns=names)))
    (note,) = compare_column([view, log], "info/note")
    assert note["statistics"][0] is None
    assert note["labels"] == ["x", "y"]
    assert note["counts"] == [[0, 0], [1, 1]]
    assert log.episode(log.list()["episode_id"][0])["agents"][0]["texts"] == {"info/note": ["x", "y"]}


def test_names_are_shown_in_place_of_numbers():
    table = {"episode_id": ["a"] * 3, "obs": ["wet", "dry", "dry"], "action": ["left", "stay", "left"]}
    table |= {"reward": [0.0, 1.0, 2.0], "terminated": [False, False, True]}
    view = RecordingView(Recording.open(Source(pa.table(table), columns={name: name for name in table})))
    (action,) = compare_column([view], "action")
    assert (action["labels"], action["counts"]) == (["left", "stay"], [[2, 1]])
    (agent,) = view.episode(view.list()["episode_id"][0])["agents"]
    assert agent["texts"] == {"obs": ["wet", "dry", "dry"], "action": ["left", "stay", "left"]}
    assert [(row["obs"], row["action"]) for row in first_rows(view.recording, 2)] == [("wet", "left"), ("dry", "stay")]
    assert view.describe()["action"] == {"steps": 3, "missing": 0, "distinct": 2, "counts": {"left": 2, "stay": 1}}


def test_figures_of_large_columns_are_made_of_parts_from_all_over(tmp_path, monkeypatch):
    path = write(tmp_path / "data", [episode(i, 10, reward=i) for i in range(8)])
    view = RecordingView(Recording.open(path))
    parts = view.recording.num_parts
    monkeypatch.setattr("etude.viewer.views.SAMPLED_STEPS", 20)
    seen = set(view.sample("reward").tolist())
    assert parts == 8
    assert seen == {0.0, 4.0}
    assert view.describe()["reward"]["steps"] == 80
    monkeypatch.setattr("etude.viewer.views.DESCRIBED_BYTES", 0)
    assert view.describe()["reward"]["steps"] == 20


def test_the_final_image_is_counted_where_all_observations_are_images(tmp_path):
    images = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.ones((1, 12, 16, 3), np.uint8)
    for known in (True, False):
        steps = {"obs": images[:3], "action": np.zeros(3, np.int64), "reward": np.zeros(3)}
        segments = Segments.of(1, episode_id=["e"], terminated=[not known], truncated=[known], has_final_obs=[known])
        exp = Experience(steps, np.array([0, 3]), segments, {"obs": images[3:]})
        space = spaces.Box(0, 255, (12, 16, 3), np.uint8)
        with RecordingWriter(tmp_path / str(known), obs_space=space, action_space=spaces.Discrete(2)) as writer:
            writer.write(exp)
        view = RecordingView(Recording.open(tmp_path / str(known)))
        (agent,) = view.episode("e")["agents"]
        assert agent["frames"] == 3 + known


def test_figures_of_episodes_are_theirs_though_steps_have_a_column_of_that_name(tmp_path):
    pieces = [episode(i, 3, reward=i).with_steps(**{"return": np.full(3, -1.0)}) for i in range(4)]
    view = RecordingView(Recording.open(write(tmp_path / "data", pieces)))
    assert view.sample("return").tolist() == [0.0, 3.0, 6.0, 9.0]
    assert view.describe()["return"]["mean"] == -1.0


def test_large_integers_are_told_apart():
    assert figures.statistics(np.arange(2**53, 2**53 + 9))["distinct"] == 9


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.bool_, np.float32, np.float16])
def test_statistics_of_numbers_of_all_kinds(dtype: Any) -> None:
    few = np.array([0, 1, 1, 1], dtype)
    found = figures.statistics(few)
    assert (found["min"], found["max"], found["mean"], found["std"]) == (
        0,
        1,
        0.75,
        pytest.approx(np.std([0, 1, 1, 1])),
    )
    if np.dtype(dtype).itemsize == 8:
        ends = np.iinfo(dtype)
        found = figures.statistics(np.array([ends.max, ends.max - 1, ends.max - 2], dtype))
        assert (found["min"], found["max"], found["std"]) == (ends.max - 2, ends.max, pytest.approx(np.std([0, 1, 2])))
        both = figures.statistics(np.array([ends.min, ends.max], dtype))
        assert (both["min"], both["max"], both["std"]) == (ends.min, ends.max, 2.0**63)


def test_what_is_left_out_is_left_out_of_all_columns(tmp_path):
    pieces = [episode(i, 5, reward=i) for i in range(3)]
    spoiled = pieces[1].with_steps(reward=np.array([1, np.nan, 1, 1, 1], pieces[1].steps["reward"].dtype))
    path = write(tmp_path / "data", [pieces[0], spoiled, pieces[2]])
    view = RecordingView(Recording.open(path, on_bad="skip"))
    found = view.describe()
    assert {figure["steps"] for name, figure in found.items() if name not in view.images} == {10}
    assert all(found[name]["steps"] <= 10 for name in view.images)  # steps, not pixels
    assert view.summary()["steps"] == 10
    assert {len(view.sample(name)) for name in view.recording.columns} == {10}


def test_infinity_is_shown(tmp_path):
    piece = episode(0, 3, reward=1.0).with_steps(score=np.array([1.0, np.inf, -np.inf]))
    view = RecordingView(Recording.open(write(tmp_path / "data", [piece])))
    assert view.describe()["score"]["infinite"] == 2
    assert [row["score"] for row in first_rows(view.recording, 3)] == [1.0, "inf", "-inf"]


def test_statistics_and_histograms_leave_out_what_is_missing():
    values = np.array([1.0, np.nan, np.inf, 3.0])
    assert figures.statistics(values) == {
        "steps": 4, "missing": 1, "infinite": 1, "distinct": 2, "min": 1.0, "max": 3.0, "mean": 2.0, "std": 1.0,
    }  # fmt: skip
    assert sum(figures.histogram([values])["counts"][0]) == 2
    assert figures.statistics(np.array([np.nan]))["mean"] is None
    assert figures.histogram([np.array([], np.float32)])["counts"] == [[0]]
    largest = np.array([1.0, 2.0, np.finfo(np.float64).max, np.finfo(np.float64).min])  # such as "no reading"
    assert figures.statistics(largest)["max"] == largest[2]
    assert figures.statistics(largest)["std"] == pytest.approx(largest[2] / 2**0.5)
    assert sum(figures.histogram([largest])["counts"][0]) == 4
    texts = np.array(["b", None, "a", "b"], object)
    assert figures.histogram([texts]) == {"labels": ["b", "a"], "counts": [[2, 1]]}
    assert figures.statistics(texts) == {"steps": 4, "missing": 1, "distinct": 2, "counts": {"b": 2, "a": 1}}
    assert figures.plain(values) == [1.0, None, None, 3.0]


def test_histograms_of_flags_and_of_the_largest_whole_numbers() -> None:
    flags = np.array([True, False, True])
    assert figures.histogram([flags]) == {"labels": ["False", "True"], "counts": [[1, 2]]}
    lacking = np.zeros(0)  # of a recording without the column
    assert figures.histogram([flags, lacking]) == {"labels": ["False", "True"], "counts": [[1, 2], [0, 0]]}
    ends = np.iinfo(np.int64)
    found = figures.histogram([np.array([ends.min, 0, ends.max])])
    assert (len(found["edges"]), sum(found["counts"][0])) == (figures.NUM_BINS + 1, 3)


@pytest.mark.parametrize(
    ("space", "is_image"),
    [
        (spaces.Box(0, 255, (84, 84), np.uint8), True),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), True),
        (spaces.Box(0, 1, (16, 16, 3), np.float32), True),
        (spaces.Box(-1, 1, (16, 16, 3), np.float32), False),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), False),
        (spaces.Box(0, 255, (84,), np.uint8), False),
        (spaces.Discrete(3), False),
    ],
)
def test_what_can_be_looked_at(space, is_image):
    assert figures.is_image(space) is is_image


def test_images_of_every_layout_become_the_picture_that_they_are():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)
    gray = image[..., 0]
    np.testing.assert_array_equal(pixels(figures.png(image)), image)
    np.testing.assert_array_equal(pixels(figures.png(np.moveaxis(image, -1, 0))), image)
    np.testing.assert_array_equal(pixels(figures.png(gray)), gray)
    np.testing.assert_array_equal(pixels(figures.png(gray[..., None])), gray)
    stack = rng.integers(0, 256, (5, 10, 12), dtype=np.uint8)
    np.testing.assert_array_equal(pixels(figures.png(stack)), stack[-1])
    np.testing.assert_array_equal(pixels(figures.png(stack[:4])), stack[3])  # not colours and opacity
    np.testing.assert_array_equal(pixels(figures.png(np.dstack([image, np.full_like(gray, 255)]))), image)
    np.testing.assert_array_equal(pixels(figures.png(gray / np.float32(255))), gray)


def test_the_first_rows_hold_what_each_step_has(view):
    rows = first_rows(view.recording, 6, ["obs", "reward"])
    assert [(row["episode_id"], row["t"], row["terminated"]) for row in rows[3:]] == [
        ("e0", 3, False), ("e0", 4, True), ("e1", 0, False),
    ]  # fmt: skip
    assert rows[3]["obs/camera"] == "12x16x3 uint8"
    assert rows[3]["obs/speed"] == pytest.approx([0.3, -0.3])
    assert len(first_rows(view.recording, 1000)) == 20
