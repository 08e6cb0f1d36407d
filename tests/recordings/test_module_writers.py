# SPDX-License-Identifier: Apache-2.0
import gymnasium as gym
import pytest
from some_recording import ACTION, OBS, assert_same, numbered

from etude.errors import DataError, SettingsError
from etude.recordings import Recording
from etude.recordings.module_writers import ModuleWriters, folders_of

KIND = (OBS, ACTION)
OTHER = (OBS, gym.spaces.Discrete(7))
COLUMNS = ("obs", "action", "reward")


def test_equal_spaces_share_a_recording_and_others_have_folders():
    assert folders_of({"a": KIND, "b": KIND}) == {"a": "", "b": ""}
    names = ["a", "b/c", "..", "", "ü"]
    folders = folders_of({name: OTHER if name == "a" else KIND for name in names})
    assert folders == {"a": "a", "b/c": "b%2Fc", "..": "%..", "": "%", "ü": "%C3%BC"}


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
