# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

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
