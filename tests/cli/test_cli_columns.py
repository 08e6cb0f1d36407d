# SPDX-License-Identifier: Apache-2.0
"""``--columns``: tables from the shell, from a guess to a policy that answers in words."""

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest

import etude
from etude.cli.main import main
from etude.spaces import NamedDiscrete

COLUMNS = ["obs=speed,weather", "action=command", "reward=score", "episode_id=trip", "t=tick"]
COLUMNS += ["propensity=p", "terminated=last-row"]
CHANCES = {"left": 0.25, "right": 0.25, "stay": 0.5}
Said = pytest.CaptureFixture[str]


def write_log(path: Path, seed: int, trips: int = 40, words: tuple[str, ...] = tuple(CHANCES)) -> Path:
    draw = random.Random(seed)
    rows = ["trip,tick,speed,weather,command,score,p"]
    for trip in range(trips):
        for tick in range(5):
            command = draw.choices(words, [CHANCES[word] for word in words])[0]
            speed, weather = draw.random(), draw.choice(["dry", "wet"])
            rows.append(
                f"s{seed}-{trip},{tick},{speed:.3f},{weather},{command},{int(command == 'left')},{CHANCES[command]}"
            )
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("logs") / "log.csv", 0)


@pytest.fixture(scope="module")
def run(log: Path) -> str:
    out = str(log.parent / "run")
    words = ["--stop.updates", "20", "--hidden", "8", "--seed", "0", "--quiet", "--out", out]
    assert main(["train", "bc", "--data", str(log), "--columns", *COLUMNS, *words]) == 0
    return out


def test_info_guesses_and_the_guess_can_be_pasted(log: Path, capsys: Said) -> None:
    assert main(["data", "info", str(log)]) == 0
    said = capsys.readouterr().out
    assert "a table of 200 rows" in said
    assert "not sure: obs is all that is left (speed, weather)" in said
    line = next(line for line in said.splitlines() if line.strip().startswith("--columns"))
    assert sorted(line.split()[1:]) == sorted(COLUMNS)
    assert main(["data", "info", str(log), *shlex.split(line)]) == 0
    said = capsys.readouterr().out
    assert "40: 40 terminated" in said
    assert "NamedDiscrete(3: left, right, stay)" in said
    assert main(["data", "info", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"]["words"] == line.strip()


@pytest.mark.parametrize(
    "words",
    [["train", "bc", "--data"], ["data", "head"], ["data", "validate"], ["data", "convert", "--to", "x"], ["show"]],
)
def test_nothing_is_guessed_silently(words: list[str], log: Path, capsys: Said) -> None:
    given = [*words[:2], str(log), *words[2:]] if words[0] == "data" else [*words, str(log)]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"{log} is a table with the columns trip, tick, speed" in said
    assert "A guess, for you to check: --columns obs=speed,weather action=command" in said
    assert "not sure: obs is all that is left" in said


@pytest.mark.parametrize("command", ["validate", "head", "describe", "info"])
def test_data_commands_read_tables(command: str, log: Path, capsys: Said) -> None:
    assert main(["data", command, str(log), "--columns", *COLUMNS]) == 0
    said = capsys.readouterr().out
    assert "logp" in said or command == "validate"
    assert command != "head" or any(word in said.splitlines()[1].split() for word in CHANCES)


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        (["convert", "{log}", "{to}"], 200),
        (["filter", "{log}", "{to}", "--min-return", "1"], None),
        (["sample", "{log}", "{to}", "--episodes", "7"], 35),
        (["merge", "{log}", "{log}", "--to", "{to}"], 400),
        (["split", "{log}", "--to-train", "{to}", "--to-validation", "{to}-2"], 180),
    ],
)
def test_data_commands_write_what_they_read(command: list[str], steps: int | None, log: Path, tmp_path: Path) -> None:
    words = [word.format(log=log, to=tmp_path / "new") for word in command]
    assert main(["data", *words, "--columns", *COLUMNS]) == 0
    new = etude.Recording.open(tmp_path / "new")
    assert new.action_space == NamedDiscrete(["left", "right", "stay"])
    assert steps is None or new.num_steps == steps


def test_show_writes_a_page_of_a_table(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["show", str(log), "--columns", *COLUMNS, "--to", str(page)]) == 0
    assert "logp" in page.read_text()


def test_columns_in_a_settings_file_and_several_files(log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "more.csv", 1, words=("left", "stay"))
    named = {name: own.split(",") for name, own in (word.split("=") for word in COLUMNS)}
    columns = {name: own if len(own) > 1 else own[0] for name, own in named.items()}
    settings = {"data": [str(other), str(log)], "columns": columns, "hidden": [8], "stop": {"updates": 2}}
    (tmp_path / "bc.json").write_text(json.dumps(settings))
    assert main(["train", "bc", "--config", str(tmp_path / "bc.json"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    policy = etude.load_policy(tmp_path / "run")
    assert policy.action_space == NamedDiscrete(["left", "right", "stay"])


def test_columns_without_data(capsys: Said) -> None:
    assert main(["train", "bc", "--columns", *COLUMNS]) == 2
    assert "give the table, too, as --data log.csv" in capsys.readouterr().err
    assert main(["data", "info", "x", "--columns", "obs="]) == 2
    assert "`columns` has obs without a column: write obs=NAME" in capsys.readouterr().err
    assert main(["evaluate", "x", "--columns", *COLUMNS]) == 2
    assert "`columns` is for estimates from a recording" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["x"], ["obs: speed", "action"], [""]])
@pytest.mark.parametrize("command", [["data", "info", "x.csv"], ["train", "bc", "--data", "x.csv"]])
def test_columns_that_are_no_pairs(command: list[str], words: list[str], capsys: Said) -> None:
    assert main([*command, "--columns", *words]) == 2
    said = capsys.readouterr().err
    assert f"{command[1]}.columns is {' '.join(words)!r}, expected NAME=VALUE" in said
    assert "obs=speed,load action=command" in said


def test_describe_counts_names(log: Path, capsys: Said) -> None:
    assert main(["data", "describe", str(log), "--columns", *COLUMNS, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["columns"]["action"]["counts"]
    assert (sum(counts.values()), set(counts)) == (200, set(CHANCES))
    assert main(["data", "describe", str(log), "--columns", *COLUMNS]) == 0
    assert ", ".join(f"{name} {count}" for name, count in counts.items()) in capsys.readouterr().out


def test_info_says_which_episodes_are_both_terminated_and_truncated(tmp_path: Path, capsys: Said) -> None:
    rows = ["trip,speed,command,over,cut", "a,0.5,left,no,no", "a,1.5,right,yes,yes", "b,2.5,left,yes,no"]
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    words = ["obs=speed", "action=command", "episode_id=trip", "terminated=over", "truncated=cut"]
    assert main(["data", "info", str(tmp_path / "log.csv"), "--columns", *words]) == 0
    said = capsys.readouterr().out
    assert "2: 2 terminated, 1 truncated, 0 unfinished; 1 both terminated and truncated" in said


def test_the_policy_answers_in_words(run: str) -> None:
    policy = etude.load_policy(run)
    one = {"numbers": np.array([0.5]), "weather": "wet"}
    word = policy.act(one, names=True)
    assert word in CHANCES
    assert policy.action_space.named(policy.act(one)) == word  # type: ignore[attr-defined]
    many = {"numbers": np.array([[0.5], [0.1]]), "weather": np.array(["wet", "dry"])}
    assert policy.act(many, names=True).tolist()[0] == word
    with pytest.raises(etude.EtudeError, match="`obs/weather` of the observation: 'fog' is none of the 2 known names"):
        policy.act(one | {"weather": "fog"})


def test_other_data_have_the_policys_names(run: str, tmp_path: Path, capsys: Said) -> None:
    held_out = write_log(tmp_path / "test.csv", 2, words=("left", "stay"))  # nobody goes right
    words = ["evaluate", run, "--on", str(held_out), "--columns", *COLUMNS, "--methods", "wis"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"]["main"]["episodes"] == 40
    held_out.write_text(held_out.read_text().replace("stay", "jump"))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "`command` holds 'jump', which is none of the 3 names that `action` has here: left, right, stay" in said


def test_a_run_goes_on_with_its_names(run: str, tmp_path: Path) -> None:
    later = write_log(tmp_path / "later.csv", 3, words=("left", "stay"))
    words = ["--columns", *COLUMNS, "--stop.updates", "22", "--quiet", "--out", str(tmp_path / "on")]
    assert main(["train", "bc", "--resume", run, "--data", str(later), *words]) == 0
    assert etude.load_policy(tmp_path / "on").action_space == etude.load_policy(run).action_space


def test_names_are_in_an_exported_policy(run: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "policy.onnx"
    assert main(["export", run, "--to", str(file)]) == 0
    session = onnxruntime.InferenceSession(str(file))
    about = json.loads(session.get_modelmeta().custom_metadata_map["etude"])
    assert about["action_space"]["names"] == ["left", "right", "stay"]
    policy = etude.load_policy(run)
    weather = policy.obs_space["weather"].numbers(["wet", "dry"])  # type: ignore[index]
    (numbers,) = session.run(["action"], {"obs/numbers": np.array([[0.5], [0.1]]), "obs/weather": weather})
    many = {"numbers": np.array([[0.5], [0.1]]), "weather": np.array(["wet", "dry"])}
    assert [about["action_space"]["names"][i] for i in numbers] == policy.act(many, names=True).tolist()


def test_actions_without_names() -> None:
    algo = etude.PPO(etude.PPOConfig(env="CartPole-v1"))
    with pytest.raises(etude.EtudeError, match=r"the actions Discrete\(2\) have no names: leave names=True out"):
        algo.policy.act(np.zeros(4, np.float32), names=True)


def test_info_of_several_folders_is_of_all(log: Path, tmp_path: Path, capsys: Said) -> None:
    rows = log.read_text().splitlines(keepends=True)
    for name, own in (("a", rows[1:100]), ("b", rows[100:150])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text("".join([rows[0], *own]))
    for paths in ([str(tmp_path / "*")], [str(tmp_path / "a"), str(tmp_path / "b")]):
        assert main(["data", "info", *paths, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["table"]["rows"] == 149
