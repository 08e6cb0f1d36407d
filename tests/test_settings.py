# SPDX-License-Identifier: Apache-2.0
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import ALGORITHMS, BCConfig, DQNConfig, PPOConfig, SACConfig, Stop
from etude.errors import SettingsError
from etude.settings import (
    FloatAbove0,
    IntFrom1,
    Rule,
    check_arguments,
    check_range,
    check_rules,
    choice,
    defaults,
    field_docs,
    fitting,
    from_dict,
    leaves_of,
    merged,
    nearest,
    own_paths,
    settings,
    typed,
)


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


@settings
class Crew:
    """Settings with a main one."""

    main_setting: ClassVar[str] = "size"

    size: int = 0
    """How many."""
    limit: float | None = None
    """Seconds."""


@settings
class Whole:
    """Settings with others that may not be there."""

    crew: Crew = Crew()
    """One."""
    more: Crew | None = None
    """Perhaps another."""
    inner: Inner | None = None
    """Without a main one."""
    nets: tuple[str, ...] | Mapping[str, type | None] | None = None
    """By name, or only names."""
    quick: bool = False
    """Or not."""
    check: int | Literal["always"] = 10
    """Steps."""


def test_settings_are_frozen_and_by_keyword():
    made = Outer(env="x")
    assert (made.lr, made.inner.width) == (3e-4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0
    with pytest.raises(SettingsError, match=r"Outer takes keyword arguments only, as in Outer\(seed=...\)"):
        Outer("x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("width", r"Outer has attributes, not items: write config\.inner\.width\."),
        ("lr", r"write config\.lr\."),
        (0, r"Outer has no setting `0`"),
        ("learning_rate", r"Outer has no setting `learning_rate`. Here it is: `lr`"),
    ],
)
def test_settings_are_no_items(name, message):
    with pytest.raises(SettingsError, match=message):
        Outer(env="x")[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "x", "lr": "fast"}, r"Outer.lr is 'fast', expected float"),
        ({"env": "x", "inner": {"width": 3}}, r"Outer.inner is \{'width': 3\}, expected .*Inner"),
        ({"env": "x", "seed": True}, r"Outer.seed is True, expected int"),
        ({"env": "x", "hidden": 64}, r"Outer.hidden is 64, expected tuple\[int, \.\.\.\]"),
        ({"env": "x", "kind": "c"}, r"Outer.kind is 'c', expected 'a' \| 'b'"),
        ({"env": "x", "sed": 1}, r"Outer has no setting `sed`. Nearest: `seed`"),
        ({"env": "x", "inner.width": 1}, r"Outer has no setting `inner.width`. Write `width`, its own name\."),
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Outer(env="x", lr=np.float32(0.5)).lr == 0.5


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
    with pytest.raises(SettingsError, match=r"t\.lr is 'inf', expected float that is finite"):
        from_dict(Outer, {"env": "x", "lr": "inf"}, owner="t")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1}, r"ppo has no setting `lrr`\. Nearest: `lr` \(learning rate, above 0, default 3e-4\)\."),
        ({"hidde-n": 1}, r"ppo has no setting `hidde-n`\. Nearest: `hidden`"),
        ({"zzz": 1}, r"ppo has no setting `zzz`\.$"),
        ({"inner": {"widht": 1}}, r"ppo\.inner has no setting `widht`\. Nearest: `width` \(units, default 8\)"),
        ({"lr": "fast"}, r"^ppo\.lr is 'fast', expected float\.$"),
        ({"kind": "c"}, r"^ppo\.kind is 'c', expected 'a' \| 'b'\.$"),
        ({"hidden": [1, "x"]}, r"ppo\.hidden is \[1, 'x'\], expected tuple\[int, \.\.\.\]"),
        ({"inner": 3}, r"ppo\.inner is 3, expected Inner: give its fields by name"),
        ({}, r"ppo needs a value for `env`"),
    ],
)
def test_what_does_not_fit_is_named_with_the_nearest_right_name(values, message):
    full = values if not values else {"env": "x", **values}
    with pytest.raises(SettingsError, match=message):
        from_dict(Outer, full, owner="ppo")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ((IntFrom1, "4"), r"^Clip\.k is '4', expected int\. Write 4\."),
        ((IntFrom1, 2.5), r"^Clip\.k is 2\.5, expected int"),
        ((IntFrom1, 0), r"^Clip\.k must be at least 1, not 0\.$"),
        ((FloatAbove0, float("nan")), r"^Clip\.k is nan, expected float that is finite"),
        ((FloatAbove0, -float("inf")), r"^Clip\.k must be above 0, not -inf\.$"),
        ((str, 3), r"^Clip\.k is 3, expected str"),
    ],
)
def test_arguments_are_checked_for_type_and_range(argument, message):
    check_arguments(
        "Clip", n=(IntFrom1, np.int64(1)), clip=(FloatAbove0, float("inf")), rate=(FloatAbove0, 1), s=(str, "")
    )
    with pytest.raises(SettingsError, match=message):
        check_arguments("Clip", n=(IntFrom1, 1), k=argument)


def test_ranges_name_the_first_setting_that_breaks_its_rule():
    check_range("ppo", lr=(True, "above 0"))
    with pytest.raises(SettingsError, match=r"^ppo\.clip must be between 0 and 1\.$"):
        check_range("ppo", lr=(True, "above 0"), clip=(False, "between 0 and 1"), seed=(False, "0 or more"))


def test_settings_are_found_by_what_other_libraries_call_them():
    theirs = {
        PPOConfig: "learning_rate=lr batch_size=minibatch_size n_steps=num_steps n_envs=num_envs n_epochs=epochs "
        "gae_lambda=lambda_ clip_range=clip clip_param=clip ent_coef=entropy_weight entropy_coeff=entropy_weight "
        "vf_coef=value_weight max_grad_norm=optimizer.grad_clip target_kl=kl_target train_batch_size=num_steps "
        "num_sgd_iter=epochs net_arch=network.hidden env_id=env discount=gamma learning-rate=lr",
        DQNConfig: "learning_rate=lr buffer_size=replay.capacity minibatch_size=batch_size target_update_interval="
        "target.interval exploration_final_eps=epsilon n_steps=n_step gradient_steps=updates_per_step",
        SACConfig: "ent_coef=temperature alpha=temperature polyak=tau replay_size=replay.capacity "
        "alpha_lr=temperature_lr policy_lr=optimizer.actor_lr q_lr=optimizer.critic_lr",
        BCConfig: "learning_rate=lr dataset=data n_eval_episodes=evaluation.episodes",
        Stop: "total_timesteps=env_steps timesteps=env_steps reward_threshold=return_mean",
    }
    for cls, pairs in theirs.items():
        for pair in pairs.split():
            other, _, ours = pair.partition("=")
            with pytest.raises(SettingsError, match=rf"`{other}`\. .*`{ours}`"):
                typed(cls, {other: 1}, owner="some")
            with pytest.raises(SettingsError, match=rf"`{other}`\. .*`{ours}`"):
                cls(**{other: 1})


def test_a_choice_names_what_was_mistyped_or_all():
    names = ["ppo", "sac", "td3_bc", "plot"]
    assert [choice(name, names) for name in ("poo", "PPO", "sca")] == ["Nearest: `ppo`."] * 2 + ["Nearest: `sac`."]
    for name in ("a2c", "td3", "export", "rainbow", ""):
        assert choice(name, names) == "There are ppo, sac, td3_bc, plot."


def test_nearest_names():
    assert nearest("gama", ["gamma", "lambda_"]) == "gamma"
    assert nearest("q", ["gamma", "lambda_"]) is None
    assert nearest("Gamma", ["lambda_", "GAMMA"]) == "GAMMA"
    assert nearest("a3c", ["sac", "a2c"]) == "a2c"
    assert nearest("Cart-v5", ["Cart-v0", "Cart-v1"]) == "Cart-v1"
    assert nearest("", []) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"crew": 3}, {"crew": Crew(size=3)}),
        ({"crew": "3"}, {"crew": Crew(size=3)}),
        ({"crew": {"limit": "1.5"}}, {"crew": Crew(limit=1.5)}),
        ({"more": 2}, {"more": Crew(size=2)}),
        ({"more": {"size": 2, "limit": None}}, {"more": Crew(size=2)}),
        ({"more": None}, {"more": None}),
        ({"more": Crew(size=4)}, {"more": Crew(size=4)}),
        ({"inner": {"width": 9}}, {"inner": Inner(width=9)}),
    ],
)
def test_settings_inside_others_are_made_of_mappings_and_of_plain_values(values, expected):
    assert from_dict(Whole, values, owner="whole") == Whole(**expected)


def test_some_settings_stay_mappings_until_all_are_there():
    found = typed(Whole, {"crew": 3, "more": {"limit": "2"}, "check": "5"}, owner="whole")
    assert found == {"crew": {"size": 3}, "more": {"limit": 2.0}, "check": 5}
    assert typed(Whole, found, owner="whole") == found
    assert merged(found, {"crew": {"limit": 1.0}, "check": "always"}) == {
        "crew": {"size": 3, "limit": 1.0}, "more": {"limit": 2.0}, "check": "always",
    }  # fmt: skip


@settings
class Rates:
    """How fast."""

    own_names: ClassVar[Mapping[str, str]] = {"eps": "adam_eps"}

    eps: float = 1e-8
    """Small, at least 0."""
    limit: float | None = 1.0
    """At most this."""

    def __post_init__(self) -> None:
        check_rules(self, "rates", eps=(self.eps >= 0, "at least 0"))


@settings
class Nesting:
    """Settings with others that have names of their own."""

    rates: Rates = Rates(eps=1e-5)
    """Of all."""
    crew: Crew = Crew(limit=3.0)
    """Of whom `limit` is a name that `rates` has, too."""
    lr: float = 0.1
    """Rate."""


def test_a_nested_setting_may_be_given_by_its_own_name():
    assert own_paths(Nesting) == {"adam_eps": ("rates", "eps"), "size": ("crew", "size")}
    expected = Nesting(rates=Rates(eps=0.5), crew=Crew(size=2, limit=3.0))
    assert Nesting(adam_eps=0.5, size=2) == expected  # the others are those of the whole
    for values in ({"adam_eps": "0.5", "size": "2"}, {"rates": {"eps": 0.5}, "size": 2}, {"adam_eps": 0.5, "crew": 2}):
        assert from_dict(Nesting, values, owner="some") == expected
    assert typed(Nesting, {"adam_eps": 0.5}, owner="some") == {"rates": {"eps": 0.5}}
    assert typed(Nesting, {"size": 2, "crew": {"limit": 1}}, owner="some") == {"crew": {"size": 2, "limit": 1.0}}


def test_own_names_count_more_than_settings_given_whole_so_that_one_can_be_replaced():
    made = Nesting(rates=Rates(eps=0.5, limit=None), adam_eps=0.25)
    assert made == Nesting(rates=Rates(eps=0.25, limit=None))
    assert dataclasses.replace(made, adam_eps=0.125).rates == Rates(eps=0.125, limit=None)
    assert from_dict(Nesting, {"rates": Rates(limit=None), "adam_eps": 1}, owner="some").rates == Rates(
        eps=1.0, limit=None
    )


def test_what_is_wrong_with_a_nested_setting_is_said_with_its_path():
    wrong = {
        r"^Nesting\.rates\.eps is 'small', expected float\.": {"adam_eps": "small"},
        r"^`rates\.eps` is -1\.0, but must be at least 0\.": {"adam_eps": -1},
        r"^Nesting has no setting `limit`\. Nearest: `(rates|crew)\.limit`": {"limit": 2.0},
        r"^Nesting has no setting `eps`\. Nearest: `rates\.eps` \(small, at least 0, default 1e-5\)": {"eps": 2.0},
        r"^Nesting has no setting `adam_esp`\. Nearest: `rates\.eps`": {"adam_esp": 2.0},
    }
    for message, values in wrong.items():
        with pytest.raises(SettingsError, match=message):
            Nesting(**values)
    with pytest.raises(SettingsError, match=r"^some has `adam_eps` and `rates\.eps`, which are the same setting"):
        from_dict(Nesting, {"adam_eps": 1.0, "rates": {"eps": 2.0}}, owner="some")
    with pytest.raises(SettingsError, match=r"^Nesting\.rates is 3, expected Rates"):
        Nesting(rates=3, adam_eps=1.0)


@pytest.mark.parametrize("annotated", [True, False])
def test_a_field_that_would_hide_a_nested_setting_is_refused(annotated):
    def define():
        @settings
        class More(Nesting):
            """A default that would change nothing."""

            if annotated:
                adam_eps: float = 1.0
            else:
                adam_eps = 1.0

    with pytest.raises(SettingsError, match=r"More has a field `adam_eps`, .* Nesting's `rates\.eps`.*`rates: R"):
        define()


def test_each_algorithm_has_at_most_30_settings_the_others_nested():
    for name, cls in ALGORITHMS.items():
        assert len(dataclasses.fields(cls.Config)) <= 30, name


def test_leaves_know_where_they_are():
    assert [".".join(leaf.path) for leaf in leaves_of(Whole)][:3] == ["crew.size", "crew.limit", "more"]
    assert leaves_of(Whole)[1].owner is Crew
    assert leaves_of(Whole)[1].about == "seconds, default None"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crew": "many"}, r"^whole\.crew\.size is 'many', expected int\.$"),
        ({"crew": True}, r"^whole\.crew\.size is True, expected int, not true or false\.$"),
        ({"more": {"sise": 1}}, r"whole\.more has no setting `sise`\. Nearest: `size` \(how many, default 0\)"),
        ({"inner": 3}, r"whole\.inner is 3, expected Inner: give its fields by name"),
        ({"limt": 3}, r"whole has no setting `limt`\. Nearest: `crew\.limit` \(seconds, default None\)"),
        (
            {"nets": {"a": 3}},
            r"whole\.nets is \{'a': 3\}, expected tuple\[str, \.\.\.\] \| Mapping\[str, type \| None\]",
        ),
        ({"nets": {1: int}}, r"whole\.nets is \{1: "),
        ({"nets": [1]}, r"whole\.nets is \[1\]"),
        ({"quick": "perhaps"}, r"whole\.quick is 'perhaps', expected bool"),
        ({"quick": 1}, r"whole\.quick is 1, expected bool"),
        ({"check": "never"}, r"whole\.check is 'never', expected int \| 'always'\."),
        ({"check": False}, r"whole\.check is False, expected int \| 'always', not true or false"),
        ({"check": [1, True]}, r"whole\.check is \[1, True\], expected int \| 'always', not true or false"),
    ],
)
def test_what_is_wrong_further_inside(values, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(Whole, values, owner="whole")


def test_mappings_of_names():
    assert from_dict(Whole, {"nets": {"a": int, "b": None}}, owner="whole").nets == {"a": int, "b": None}
    assert from_dict(Whole, {"nets": ["a", "b"]}, owner="whole").nets == ("a", "b")
    assert Whole(nets={"a": int}).nets == {"a": int}
    with pytest.raises(SettingsError, match=r"Whole\.nets is \{'a': 3\}"):
        Whole(nets={"a": 3})


@pytest.mark.parametrize(
    ("hint", "text", "expected"),
    [
        (int, "12", 12),
        (int, "1e6", 1_000_000),
        (int, 4e3, 4000),
        (int, str(2**64 - 1), 2**64 - 1),
        (float, "3", 3.0),
        (bool, "Yes", True),
        (bool, "off", False),
        (tuple[int, ...], ["1", "2"], (1, 2)),
        (Mapping[str, float], {"a": "1"}, {"a": 1.0}),
    ],
)
def test_what_text_means(hint, text, expected):
    found = fitting(hint, text, "x", text=True)
    assert found == expected
    assert type(found) is type(expected)
    with pytest.raises(SettingsError, match="^x is "):
        fitting(hint, text, "x")


@pytest.mark.parametrize(("hint", "text"), [(int, "1.5"), (int, "inf"), (int, 1.5), (float, "nan"), (bool, "1")])
def test_text_that_means_something_else(hint, text):
    with pytest.raises(SettingsError, match="^x is "):
        fitting(hint, text, "x", text=True)


@settings
class Ranges:
    """Settings with rules."""

    num: IntFrom1 = 1
    """How many."""
    limit: FloatAbove0 | Literal["auto"] | None = None
    """At most this."""
    pair: Annotated[tuple[int, int], Rule(lambda pair: pair[0] < pair[1], "two numbers in rising order")] = (0, 1)
    """From and to."""


@settings
class Outside:
    """Settings that contain others with rules."""

    ranges: Ranges = Ranges()
    """Of all."""


@settings
class Wider(Ranges):
    """Another default, and another type, of settings with rules."""

    num: int | None = 3
    """How many."""


@settings
class Beyond(Ranges):
    """A default that breaks the rule."""

    num: int = 0
    """How many."""


@pytest.mark.parametrize(("kind", "default"), [(float, None), (bool, 1), (str, 3), (int, "a"), (tuple[int, ...], 1)])
def test_a_default_of_another_type_is_refused(kind, default):
    made = settings(type("Own", (Ranges,), {"__annotations__": {"aim": kind}, "aim": default}))
    with pytest.raises(SettingsError, match=f"^the default of Own.aim is {default!r}, expected {kind.__name__}"):
        made(num=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ranges(num=0), "`num` is 0, but must be at least 1."),
        (lambda: Ranges(limit=0), "`limit` is 0.0, but must be above 0, or 'auto', or none."),
        (lambda: Ranges(pair=[2, 1]), "`pair` is (2, 1), but must be two numbers in rising order."),
        (lambda: Outside(num=0), "`ranges.num` is 0, but must be at least 1."),
        (
            lambda: dataclasses.replace(Outside(), limit=-1.0),
            "`ranges.limit` is -1.0, but must be above 0, or 'auto', or",
        ),
        (lambda: from_dict(Outside, {"ranges": {"num": "0"}}, owner="some"), "`ranges.num` is 0, but must be at least"),
        (lambda: Wider(num=0), "`num` is 0, but must be at least 1."),
        (Beyond, "`num` is 0, but must be at least 1."),
    ],
)
def test_the_rule_of_an_annotation_is_checked(make, message):
    with pytest.raises(SettingsError) as error:
        make()
    assert str(error.value).startswith(message)


def test_what_an_annotation_allows_beside_its_rule_is_fine():
    assert Ranges(limit=None).limit is None
    assert Ranges(limit="auto").limit == "auto"
    assert Wider(num=None).num is None
    assert Wider().num == 3
    assert [leaf.hint for leaf in leaves_of(Ranges)][:2] == [int, float | Literal["auto"] | None]
