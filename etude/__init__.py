# SPDX-License-Identifier: Apache-2.0
"""Etude: reinforcement learning, online and offline, from one kind of data.

Names are imported when they are first used, so that ``import etude`` is quick and reading data does not load torch.
"""

# ruff: noqa: E402
import os
import sys

# For ``python -m etude``, Python puts the current folder first, and a file in it, perhaps a stranger's, would stand in
# for a library of its name: it goes before anything else is imported.
_is_command = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("etude", "-metude")
if _is_command and sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]:
    del sys.path[0]

import ast
import importlib
import pkgutil
from typing import Any

from etude.settings import settings  # at once: the module of that name would hide it as soon as it is imported

__version__ = "0.1.0"


def _names_in(stub: str) -> dict[str, str]:
    """The module that each public name of a file comes from; with ``import *``, all names that are imported there."""
    found: dict[str, str] = {}
    for node in ast.parse(pkgutil.get_data("etude", stub) or b"").body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("etude."):
            module = str(node.module)
            for alias in node.names:
                inner = _names_in(f"{module.partition('.')[2]}/__init__.py") if alias.name == "*" else [alias.name]
                found |= dict.fromkeys(inner, module)
    return found


_HOME_OF = _names_in("__init__.pyi")
"""The module that each public name is from: they are listed in ``__init__.pyi``, those of algorithms in
``algorithms/__init__.py``, and nowhere else."""

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "ray":  # a folder, which only those need who have Ray
        return importlib.import_module("etude.ray")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
