# SPDX-License-Identifier: Apache-2.0
import shutil

import gymnasium as gym
import numpy as np
import pytest
from some_recording import ACTION, OBS, assert_same, numbered

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings import Recording
from etude.recordings.module_writers import ModuleWriters, folders_of

KIND = (OBS, ACTION)
OTHER = (OBS, gym.spaces.Discrete(7))
COLUMNS = ("obs", "action", "reward")


def test_equal_spaces_share_a_recording_and_others_have_folders():
    assert folders_of({"a": KIND, "b": KIND}) == {"a": "", "b": ""}
    names = ["a", "b/c", "..", "", "ü", ".d", "_e"]
    folders = folders_of({name: OTHER if name == "a" else KIND for name in names})
    assert folders == {"a": "a", "b/c": "b%2Fc", "..": "%..", "": "%", "ü": "%C3%BC", ".d": "%.d", "_e": "%_e"}


def test_folders_of_all_modules_are_found(tmp_path):
    kinds = {".d": KIND, "_e": OTHER}
    writers = ModuleWriters(str(tmp_path / "r"), kinds, columns=COLUMNS)
    for name in kinds:
        writers.take({name: numbered([3])}, kinds)
    writers.close()
    with pytest.raises(DataError, match=r"%\.d/.* and .*%_e/.* the `action` space"):
        Recording.open(tmp_path / "r")


def test_what_was_written_after_the_state_is_not_written_again(tmp_path):
    exp = numbered([8, 6, 9])
    first, second, third = (episode.cut(4) for episode in exp)
    how = {"columns": COLUMNS, "layout": "table"}
    writers = ModuleWriters(str(tmp_path / "r"), {"m": KIND}, **how)
    writers.take({"m": first[:1]}, {"m": KIND})
    state = writers.state_dict()
    writers.take({"m": first[1:]}, {"m": KIND})
    writers.take({"m": second[:1]}, {"m": KIND})
    writers.close()
    again = ModuleWriters(str(tmp_path / "r"), {"m": KIND}, state=state, **how)
    for part in (first[1:], exp[1], third):  # the second now comes whole: four of its steps are there
        again.take({"m": part}, {"m": KIND})
    again.close()
    assert_same(Recording.open(tmp_path / "r").read(), exp)


def rows_of(path):
    """The episode and t in each row, as `numbered` writes them, and the number of those that are there twice."""
    obs = Recording.open(path).read().steps["obs"][:, :2]
    return obs, len(obs) - len(np.unique(obs, axis=0))


@pytest.mark.parametrize("ends", ["closed", "killed"])
@pytest.mark.parametrize("layout", ["episodes", "table"])
def test_what_a_run_held_when_it_was_closed_is_not_later_than_its_state(layout, ends, tmp_path):
    exp, path = numbered([8, 6, 9]), str(tmp_path / "r")
    first, second, third = (episode.cut(4) for episode in exp)
    writers = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, layout=layout)
    writers.take({"m": Experience.concat([first[:1], second[:1]])}, {"m": KIND})
    state = writers.state_dict()
    if ends == "killed":
        shutil.copytree(path, tmp_path / "then")
    writers.close()
    if ends == "killed":
        shutil.rmtree(path)
        (tmp_path / "then").rename(path)
    for _ in range(2):  # a run that makes no step changes nothing
        again = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, layout=layout, state=state)
        assert not again.has_later_steps
        again.close()
    again = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, layout=layout, state=state)
    again.go_on(new_episodes=False, other_ids=again.has_later_steps)
    again.take({"m": second[1:]}, {"m": KIND})
    again.take({"m": Experience.concat([first[1:], third])}, {"m": KIND})
    again.close()
    assert rows_of(path)[1] == 0
    found = Recording.open(path).read()
    assert_same(found.select(np.argsort(np.asarray(found.segments.episode_id))), exp)


@pytest.mark.parametrize("later", ["more of one that is held", "another agent in it", "a new one"])
def test_another_course_of_a_run_has_ids_of_its_own(later, tmp_path):
    """The steps that both courses share are there twice: the episodes are whole in both."""
    path, agents = str(tmp_path / "r"), {"agent_id": ["a", "a"]}
    exp = numbered([8, 6], **agents)
    first, second = (episode.cut(4) for episode in exp)
    writers = ModuleWriters(path, {"m": KIND}, columns=COLUMNS)
    writers.take({"m": Experience.concat([first[:1], second[:1]])}, {"m": KIND})
    state = writers.state_dict()
    other = numbered([3], 0 if later == "another agent in it" else 2, agent_id=["b"])
    writers.take({"m": first[1:] if later == "more of one that is held" else other}, {"m": KIND})
    writers.close()
    rows = 12 if later == "more of one that is held" else 11
    assert Recording.open(path).num_steps == rows
    for branch in range(2):
        again = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, state=state)
        assert again.has_later_steps
        again.go_on(new_episodes=False, other_ids=True)
        again.take({"m": Experience.concat([first[1:], second[1:]])}, {"m": KIND})
        again.close()
        recording = Recording.open(path)
        assert recording.num_steps == rows + (branch + 1) * 14
        by_id = {str(one.segments.episode_id[0]): one for one in recording.read().episodes()}
        mine = [one for name, one in by_id.items() if "+" in name]
        assert len(mine) == 2 * (branch + 1)
        for one in mine:
            whole = exp[int(one.steps["obs"][0, 0])]
            assert_same(one, whole.with_segments(episode_id=one.segments.episode_id))


def test_later_steps_in_one_folder_change_the_ids_in_all(tmp_path):
    kinds = {"m": KIND, "n": OTHER}
    exp = numbered([8])[0].cut(4)
    writers = ModuleWriters(str(tmp_path / "r"), kinds, columns=COLUMNS)
    writers.take({"m": exp[:1], "n": exp[:1]}, kinds)
    state = writers.state_dict()
    writers.take({"n": exp[1:]}, kinds)
    writers.close()
    again = ModuleWriters(str(tmp_path / "r"), kinds, columns=COLUMNS, state=state)
    again.go_on(new_episodes=False, other_ids=again.has_later_steps)
    again.take({"m": exp[1:], "n": exp[1:]}, kinds)
    again.close()
    ids = [set(Recording.open(tmp_path / "r" / name).read().segments.episode_id) for name in kinds]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 2


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_the_layout_may_change_when_a_run_resumes(ends, tmp_path):
    exp, path = numbered([8, 6]), str(tmp_path / "r")
    first, second = (episode.cut(4) for episode in exp)
    writers = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, layout="episodes")
    writers.take({"m": first[:1]}, {"m": KIND})
    state = writers.state_dict()
    if ends == "closed":
        writers.close()
    else:
        writers._finish.detach()
        for series in writers._series.values():  # what is held goes nowhere
            series.writer.close()
    for layout, part in (("table", second[:1]), ("episodes", Experience.concat([first[1:], second[1:]]))):
        again = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, layout=layout, state=state)
        assert not again.has_later_steps
        again.take({"m": part}, {"m": KIND})
        state = again.close()
    assert_same(Recording.open(path).read().join(), exp)


def test_a_module_of_other_spaces_can_not_come_later(tmp_path):
    writers = ModuleWriters(str(tmp_path / "r"), {"m": KIND}, columns=COLUMNS)
    writers.take({"late": numbered([3])}, {"late": KIND})
    with pytest.raises(SettingsError, match=r"module 'odd' has the spaces .* let `record.path` name another folder"):
        writers.take({"odd": numbered([3])}, {"odd": OTHER})
    writers.close()
    assert Recording.open(tmp_path / "r").num_steps == 3


def test_a_column_that_is_not_there_is_told(tmp_path):
    writers = ModuleWriters(str(tmp_path / "r"), {"m": KIND}, columns=(*COLUMNS, "logp"))
    with pytest.raises(DataError, match="there is no column `logp`; there are obs, action, reward"):
        writers.take({"m": numbered([3])}, {"m": KIND})
    writers.close()


def test_two_runs_that_write_behind_one_url_keep_all():
    exp, path = numbered([8, 6]), "memory://two-runs/r"
    runs = [ModuleWriters(path, {"m": KIND}, columns=COLUMNS) for _ in range(2)]
    for run in runs:
        run.take({"m": exp[:1]}, {"m": KIND})
    states = [run.state_dict() for run in runs]
    for run in runs:
        run.take({"m": exp[1:]}, {"m": KIND})
        run.close()
    assert (Recording.open(path).num_episodes, Recording.open(path).num_steps) == (4, 28)
    again = ModuleWriters(path, {"m": KIND}, columns=COLUMNS, state=states[0])
    again.take({"m": exp[1:]}, {"m": KIND})  # is there already
    again.close()
    assert Recording.open(path).num_steps == 28
