# SPDX-License-Identifier: Apache-2.0
import dataclasses
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SettingsError
from etude.settings import check_range, defaults, field_docs, from_dict, nearest, settings


@settings
class Inner:
    """Settings inside settings."""

    width: int = 8
    """Units. Of a layer."""


@settings
class Base:
    """What both have."""

    seed: int = 0
    """Seed of
    everything."""


@settings
class Outer(Base):
    """Settings for these tests."""

    lr: float = 3e-4
    """Learning rate, above 0. From nowhere."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths."""
    kind: Literal["a", "b"] = "a"
    """Which."""
    cap: float | None = None
    """Cap; None is none."""
    inner: Inner = dataclasses.field(default_factory=Inner)
    """More."""
    env: str
    """The env."""


def test_settings_are_frozen_and_by_keyword():
    made = Outer(env="x")
    assert (made.lr, made.inner.width) == (3e-4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0
    with pytest.raises(SettingsError, match=r"Outer takes its settings by name, as in Outer\(seed=...\)"):
        Outer("x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "x", "lr": "fast"}, r"Outer.lr is 'fast', expected float"),
        ({"env": "x", "inner": {"width": 3}}, r"Outer.inner is \{'width': 3\}, expected .*Inner"),
        ({"env": "x", "seed": True}, r"Outer.seed is True, expected int"),
        ({"env": "x", "hidden": 64}, r"Outer.hidden is 64, expected tuple\[int, \.\.\.\]"),
        ({"env": "x", "kind": "c"}, r"Outer.kind is 'c', expected Literal"),
        ({"env": "x", "sed": 1}, r"Outer has no setting `sed`. Nearest: `seed`"),
        ({}, r"Outer needs a value for `env`"),
    ],
)
def test_settings_made_in_python_are_checked(given, message):
    with pytest.raises(SettingsError, match=message):
        Outer(**given)


def test_lists_are_taken_for_tuples_and_ints_for_floats():
    made = Outer(env="x", hidden=[1, 2], lr=1)
    assert made.hidden == (1, 2)
    assert isinstance(made.lr, float)
    assert Outer(env="x", seed=np.int64(3)).seed == 3


def test_docs_and_defaults_of_fields_are_found_inherited_ones_too():
    docs = field_docs(Outer)
    assert docs["seed"] == "Seed of everything."
    assert docs["lr"].startswith("Learning rate")
    assert set(docs) == {"seed", "lr", "hidden", "kind", "cap", "inner", "env"}
    assert defaults(Outer)["inner"] == Inner()
    assert "env" not in defaults(Outer)


def test_classes_without_source_have_no_docs():
    made = dataclasses.make_dataclass("Made", [("a", int, 1)])
    assert field_docs(made) == {}


@given(
    st.fixed_dictionaries(
        {"env": st.text()},
        optional={
            "lr": st.floats(allow_nan=False, allow_infinity=False),
            "hidden": st.lists(st.integers(), max_size=3),
            "kind": st.sampled_from("ab"),
            "cap": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "inner": st.fixed_dictionaries({"width": st.integers()}),
        },
    )
)
def test_mappings_become_settings(values):
    made = from_dict(Outer, values, owner="test")
    for key, value in values.items():
        found = getattr(made, key)
        expected = Inner(**value) if key == "inner" else tuple(value) if key == "hidden" else value
        assert found == expected
    assert from_dict(Outer, {"env": "x", "inner": made.inner}, owner="test").inner is made.inner
    assert dataclasses.asdict(made) == dataclasses.asdict(from_dict(Outer, dataclasses.asdict(made), owner="test"))


def test_numbers_in_text_are_read():
    assert from_dict(Outer, {"env": "x", "lr": "1e-3"}, owner="t").lr == 1e-3  # YAML reads 1e-3 as text
    with pytest.raises(SettingsError, match=r"t\.lr is inf, expected float that is finite"):
        from_dict(Outer, {"env": "x", "lr": "inf"}, owner="t")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1}, r"ppo has no setting `lrr`\. Nearest: `lr` \(learning rate, above 0, default 3e-4\)\."),
        ({"hidde-n": 1}, r"ppo has no setting `hidde-n`\. Nearest: `hidden`"),
        ({"zzz": 1}, r"ppo has no setting `zzz`\.$"),
        ({"inner": {"widht": 1}}, r"ppo\.inner has no setting `widht`\. Nearest: `width` \(units, default 8\)"),
        ({"lr": "fast"}, r"ppo\.lr is 'fast', expected float: input should be a valid number"),
        ({"kind": "c"}, r"ppo\.kind is 'c', expected Literal\['a', 'b'\]: input should be 'a' or 'b'"),
        ({"hidden": [1, "x"]}, r"ppo\.hidden is \[1, 'x'\], expected tuple\[int, \.\.\.\]"),
        ({"inner": 3}, r"ppo\.inner is 3, expected settings of Inner: give its fields by name"),
        ({}, r"ppo needs a value for `env`"),
    ],
)
def test_what_does_not_fit_is_named_with_the_nearest_right_name(values, message):
    full = values if not values else {"env": "x", **values}
    with pytest.raises(SettingsError, match=message):
        from_dict(Outer, full, owner="ppo")


def test_ranges_name_the_first_setting_that_breaks_its_rule():
    check_range("ppo", lr=(True, "above 0"))
    with pytest.raises(SettingsError, match=r"^ppo\.clip must be between 0 and 1\.$"):
        check_range("ppo", lr=(True, "above 0"), clip=(False, "between 0 and 1"), seed=(False, "0 or more"))


def test_nearest_names():
    assert nearest("gama", ["gamma", "lambda_"]) == "gamma"
    assert nearest("q", ["gamma", "lambda_"]) is None
