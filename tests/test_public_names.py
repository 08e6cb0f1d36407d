# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

import etude


def test_every_public_name_is_there_and_has_one_home() -> None:
    assert {*etude._HOME_OF, "__version__"} == set(etude.__all__) == set(dir(etude))
    for name in etude.__all__:
        assert hasattr(etude, name), name


def test_settings_is_the_decorator_whatever_was_imported_before() -> None:
    code = (
        "import etude, etude.settings; etude.PPO\n"
        "@etude.settings\n"
        "class Config(etude.OnPolicyConfig):\n"
        "    beta: float = 1.0\n"
        "print(Config(beta=2.0).beta)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2.0\n"


@pytest.mark.parametrize(("name", "hint"), [("A3C", " Nearest: `A2C`."), ("Ppo", " Nearest: `PPO`."), ("qwerty", "")])
def test_an_unknown_name_is_told_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(etude, name)
    assert str(caught.value) == f"module 'etude' has no attribute {name!r}.{hint}"
