# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SettingsError
from etude.recordings.expressions import MAX_LENGTH, Expression

FIGURES = {
    "return": np.array([1.0, 5.0, -2.0, 5.0]),
    "length": np.array([10, 20, 30, 40]),
    "done": np.array([True, True, False, True]),
    "episode_id": np.array(["a", "b", "c", "d"], object),
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("return > 0", "abd"),
        ("return == 5 and length < 40", "b"),
        ("not done or return < 2", "ac"),
        ("10 < length <= 30", "bc"),
        ("-return * 2 + 1 >= length - 30", "abc"),
        ("abs(return) == 2", "c"),
        ("length / 0 > 1", "abcd"),
        ("length // 20 % 2 == 0", "ad"),
        ("episode_id == 'b' or episode_id == \"return\"", "b"),
        ("done == True", "abd"),
        ("length != 20", "acd"),
        ("2 > 1", "abcd"),
        ("  (\n return > 0 )", "abd"),
    ],
)
def test_what_holds(text, kept):
    expression = Expression(text)
    expression.check_names(FIGURES, [])
    assert "".join(FIGURES["episode_id"][expression(FIGURES)]) == kept


def test_reductions_over_columns():
    expression = Expression("mean(reward) > 1 and any(obs[1] < `obs/x y`) and 3 > max(abs(reward) - 1)")
    assert expression.columns == ["reward", "obs", "obs/x y", "reward"]
    assert expression.names == set()
    columns = {"reward": np.array([1, -2]), "obs": np.array([[9.0, 1.0], [9.0, 4.0]]), "obs/x y": np.array([2.0, 3.0])}
    values = {text: expression.of_steps(r, columns).tolist() for text, r in expression.reductions.items()}
    assert list(values.values()) == [[1, -2], [1, 0], [0, 1]]
    worth = {text: np.array(v) for text, v in zip(values, ([2.0, 0.5], [True, True], [0.0, 0.0]), strict=True)}
    assert expression(worth).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("return >", r"can't be read .invalid syntax"),
        ("__import__('os').system('x') == 0", r"holds `__import__\('os'\).system\('x'\)`, which can't stand there"),
        ("return.real > 0", r"holds `return_.real`"),
        ("[r for r in return]", "can't"),
        ("(lambda: 1)() == 1", "can't stand there"),
        ("open('x') == 1", "can't stand there"),
        ("return ** 9 > 1", r"holds `return_ \*\* 9`"),
        ("obs[0] > 1", r"holds `obs\[0\]`"),
        ("mean(mean(reward)) > 1", r"holds `mean\(reward\)`"),
        ("return in (1, 2)", "can't stand there"),
        ("mean(reward, 2) > 1", "can't stand there"),
        ("'a' 'b" + "c" * MAX_LENGTH + "'", "letters, but may have 2,000"),
        ("(" * 900 + "1" + ")" * 900, "can't be read"),
        ("a := 3", "can't be read"),
    ],
)
def test_what_is_no_such_expression(text, message):
    with pytest.raises(SettingsError, match=message):
        Expression(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrun > 1", r"names `retrun`. Figures are return, length, done, episode_id; nearest: `return`"),
        ("reward > 1", r"names `reward`, which each step has: say what of it, such as mean\(reward\)"),
        ("mean(rewards) > 1", r"names the column `rewards`. There are reward, obs; nearest: `reward`"),
        ("mean(length) > 1", r"names the column `length`"),
    ],
)
def test_names_that_are_not_there(text, message):
    with pytest.raises(SettingsError, match=message):
        Expression(text).check_names(FIGURES, ["reward", "obs"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length + 1", "gives numbers, not yes or no"),
        ("'a'", "gives numbers, not yes or no"),
        ("length and done", "can't be worked out: `and`, `or` and `not` take comparisons"),
        ("not length", "can't be worked out: `and`, `or`"),
        ("episode_id > 3", "can't be worked out: text is compared with numbers"),
        ("length > 'a'", "can't be worked out: text is compared with numbers"),
        ("length + 'a' > 3", "can't be worked out: text is no number"),
        ("episode_id + 1 > 3", "can't be worked out"),
        ("abs('a') > 3", "can't be worked out"),
    ],
)
def test_what_makes_no_sense(text, message):
    with pytest.raises(SettingsError, match=message):
        Expression(text)(FIGURES)


def test_rows_of_several_numbers():
    expression = Expression("max(obs) > 1 and max(obs[5]) > 1 and max(who) > 1")
    columns = {"obs": np.zeros((2, 3)), "who": np.array(["a", None], object)}
    many, far, words = expression.reductions.values()
    for reduction, message in ((many, r"each step has \[3\] of it"), (far, "out of bounds"), (words, "worked out")):
        with pytest.raises(SettingsError, match=message):
            expression.of_steps(reduction, columns)


@given(st.text(alphabet="return()length<>=!+-*/%.'\"`[] andotmi059_:,", max_size=60))
def test_any_text_ends_in_an_answer_or_a_settings_error(text):
    try:
        expression = Expression(text)
        expression.check_names(FIGURES, [])
        assert expression(FIGURES).shape == (4,)
    except SettingsError:
        pass
