# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import SettingsError
from etude.experience import Experience, Segments
from etude.recordings.where import MAX_LENGTH, Expression, RowFilter

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
        ("return in (5, 1, -9)", "abd"),
        ("episode_id not in ['a', 'd'] and length / 4 == 7.5", "c"),
        ("length % 0 >= 0 or length // 0 < 0", ""),
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
    values = {text: expression.of_steps(text, columns).tolist() for text in expression.reductions}
    assert list(values.values()) == [[1, -2], [1, 0], [0, 1]]
    worth = {text: np.array(v) for text, v in zip(values, ([2.0, 0.5], [True, True], [0.0, 0.0]), strict=True)}
    assert expression(worth).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("return >", r"can't be read .invalid syntax"),
        ("__import__('os').system('x') == 0", r"holds `__import__\('os'\).system\('x'\)`, which is not allowed there"),
        ("return.real > 0", r"holds `return.real`"),
        ("[r for r in return]", "can't"),
        ("(lambda: 1)() == 1", "is not allowed there"),
        ("`obs/x y`[-1] == return", r"holds `obs/x y\[-1\]`, which is not allowed there"),
        ("sum(return, `x`) > 1", r"holds `sum\(return, x\)`, which is not allowed there"),
        ("open('x') == 1", "is not allowed there"),
        ("return ** 9 > 1", r"holds `return \*\* 9`"),
        ("obs[0] > 1", r"holds `obs\[0\]`"),
        ("mean(mean(reward)) > 1", r"holds `mean\(reward\)`"),
        ("return in 2", "is not allowed there"),
        ("length in (1, 2) < 3", "is not allowed there"),
        ("return in (1, None)", "is not allowed there"),
        ("return in (1, length)", "is not allowed there"),
        ("(1, 2) == return", "is not allowed there"),
        ("mean(reward, 2) > 1", "is not allowed there"),
        ("'a' 'b" + "c" * MAX_LENGTH + "'", "letters, but may have 2,000"),
        ("(" * 900 + "1" + ")" * 900, "can't be read"),
        ("-" * 1900 + "1 < 2", "is nested more than 100 deep"),
        ("not " * 400 + "done", "is nested more than 100 deep"),
        ("+".join(["length"] * 250) + " > 1", "is nested more than 100 deep"),
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
        (
            "reward > 1",
            r"names `reward`, which has a value for each step: reduce it, as in mean\(reward\) or any\(reward == 1\)",
        ),
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
        ("length + 1", "gives numbers, so it is not a condition"),
        ("'a'", "gives numbers, so it is not a condition"),
        ("length and done", "can't be evaluated: `and`, `or` and `not` take comparisons"),
        ("not length", "can't be evaluated: `and`, `or`"),
        ("episode_id > 3", "can't be evaluated: text is compared with numbers"),
        ("length > 'a'", "can't be evaluated: text is compared with numbers"),
        ("length + 'a' > 3", "can't be evaluated: text is not a number"),
        ("episode_id + 1 > 3", "can't be evaluated"),
        ("abs('a') > 3", "can't be evaluated"),
    ],
)
def test_what_makes_no_sense(text, message):
    with pytest.raises(SettingsError, match=message):
        Expression(text)(FIGURES)


def test_rows_of_several_numbers():
    expression = Expression("max(obs) > 1 and max(obs[5]) > 1 and max(who) > 1")
    columns = {"obs": np.zeros((2, 3)), "who": np.array(["a", None], object)}
    many, far, words = expression.reductions
    for reduction, message in (
        (many, r"looks at \[3\] values of each row"),
        (far, "out of bounds"),
        (words, "be evaluated"),
    ):
        with pytest.raises(SettingsError, match=message):
            expression.of_steps(reduction, columns)


@pytest.mark.parametrize("inner", ["({} in (1, 2))", "(1 < {} < 3)"])
def test_what_is_nested_in_the_middle_is_worked_out_once(inner):
    text = "length"
    for _ in range(60):  # or else 2 ** 60 times
        text = inner.format(text)
    Expression(text)(FIGURES)
    exp = Experience({"length": FIGURES["length"]}, np.array([0, 4]), Segments.of(1, episode_id="a"), {})
    RowFilter(text).holds(exp)


ROWS = {
    "i": np.array([0, 1, -7, 2**31, 2**53 + 1, -(2**63), 2**63 - 1, 10]),
    "u": np.array([0, 3, 2**64 - 1, 2**63, 5, 2, 1, 10], np.uint64),
    "b": np.array([7, 255, 0, 1, 200, 2, 3, 4], np.uint8),
    "x": np.array([0.1, -2.5, np.nan, np.inf, -np.inf, 2.0**53, -0.0, 1e300]),
    "h": np.array([0.1, 1e-3, 3, -4, np.nan, 65504, -0.25, 1], np.float32),
    "d": np.array([True, False, False, True, True, True, False, False]),
    "s": np.array(["a", "b", None, "", "ab", "a", "b", "z"], object),
}
numbers = st.one_of(
    st.sampled_from(["i", "u", "b", "x", "h", "d"]),
    st.integers(-20, 20).map(str),
    st.sampled_from([f"{2**53 + 1}", f"{2**63}", "0.1", "1.5", "True", "9007199254740993.0"]),
)
numbers = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(lambda p: f"({' '.join(p)})"),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        inner.map(lambda x: f"-{x}"),
        inner.map(lambda x: f"abs({x})"),
    ),
    max_leaves=5,
)
compared = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
conditions = st.one_of(
    st.tuples(numbers, compared, numbers).map(" ".join),
    st.tuples(numbers, compared, numbers, compared, numbers).map(" ".join),
    st.tuples(numbers, st.sampled_from(["in (1, -7, 0.1)", "not in [0, 10, 255]", "in ()"])).map(" ".join),
    st.sampled_from(["d", "s == 'a'", "s != 'a'", "s in ('b', 'z')", "s not in ['b']", "'a' == s != 'b'"]),
)
conditions = st.recursive(
    conditions,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
        inner.map(lambda x: f"not {x}"),
        inner.map(lambda x: f"({x})"),
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(conditions)
def test_filter_and_where_mean_what_python_means(text):
    """Row by row against Python's own eval; where Python raises ZeroDivisionError there is nothing to compare."""
    wanted = []
    for k in range(8):
        row = {name: values[k].item() if name != "s" else values[k] for name, values in ROWS.items()}
        try:
            wanted.append(bool(eval(text, {"abs": abs}, row)))
        except ZeroDivisionError:
            wanted.append(None)
    of_episodes = Expression(text)(ROWS)
    of_steps = Expression(f"any({text})")
    (reduction,) = of_steps.reductions
    by_reduction = of_steps.of_steps(reduction, ROWS).astype(bool)
    segments = Segments.of(8, episode_id=ROWS["s"], has_final_obs=False)
    exp = Experience({n: v for n, v in ROWS.items() if n != "s"}, np.arange(9), segments, {})
    by_filter = RowFilter(re.sub(r"\bs\b", "episode_id", text) + " and t == 0").holds(exp)
    for k, one in enumerate(wanted):
        assert one in (None, of_episodes[k]), (k, of_episodes)
    assert of_episodes.tolist() == by_reduction.tolist() == by_filter.tolist()


@given(st.text(alphabet="return()length<>=!+-*/%.'\"`[] andotmi059_:,", max_size=60))
def test_any_text_ends_in_an_answer_or_a_settings_error(text):
    try:
        expression = Expression(text)
        expression.check_names(FIGURES, [])
        assert expression(FIGURES).shape == (4,)
    except SettingsError:
        pass
