# SPDX-License-Identifier: Apache-2.0
import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import etude

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_and_has_one_home() -> None:
    assert {*etude._HOME_OF, "__version__"} == set(etude.__all__) == set(dir(etude))
    for name in etude.__all__:
        assert hasattr(etude, name), name


@pytest.mark.parametrize("name", ["metrics.plot_runs", "checkpoints.load_meta", "recordings.formats", "ray.tune"])
def test_packages_are_there_after_importing_etude(name: str) -> None:
    code = f"import etude; print(etude.{name} is not None)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


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


def test_what_is_imported_everywhere_is_declared() -> None:
    """Extras are imported where they are used, inside functions, or in the files that only they have use for."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in declared} | {"etude"}
    owners = packages_distributions()
    for path in (ROOT / "etude").rglob("*.py"):
        if "ray" in path.relative_to(ROOT).parts:
            continue
        for node in ast.parse(path.read_text()).body:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for top in {name.partition(".")[0] for name in found} - sys.stdlib_module_names:
                assert {owner.lower() for owner in owners.get(top, [top])} & names, f"{path} imports {top}"
