# SPDX-License-Identifier: Apache-2.0
"""Etude: reinforcement learning, online and offline, from one kind of data.

Names are imported on first use, so that ``import etude`` is fast and reading data does not load torch.
"""

# ruff: noqa: E402
import os
import sys

# ``python -m etude`` puts the current folder first on the path, so a file in it could replace a library of the same
# name. The folder is removed before anything else is imported.
_is_command = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("etude", "-metude")
if _is_command and sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]:
    del sys.path[0]

import ast
import importlib
import pkgutil
from typing import Any

from etude.settings import settings, suggestion  # now: the first import of the module would hide the function

__version__ = "0.1.0"


def _names_in(stub: str) -> dict[str, str]:
    """Map each public name imported in a stub file to its module; ``import *`` adds all names of that package."""
    found: dict[str, str] = {}
    for node in ast.parse(pkgutil.get_data("etude", stub) or b"").body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("etude."):
            module = str(node.module)
            for alias in node.names:
                inner = _names_in(f"{module.partition('.')[2]}/__init__.py") if alias.name == "*" else [alias.name]
                found |= dict.fromkeys(inner, module)
    return found


_HOME_OF = _names_in("__init__.pyi")
"""The module of each public name. They are listed only in ``__init__.pyi`` and, for algorithms, in
``algorithms/__init__.py``."""

_PARTS = {part.name for part in pkgutil.iter_modules(__path__) if part.ispkg}
"""The packages, such as ``metrics``; ``ray`` needs Ray."""

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"etude.{name}")
    if name not in _HOME_OF:
        nearest = "" if name.startswith("_") else suggestion(name, __all__)  # slow, and many tools ask for such names
        raise AttributeError(f"module 'etude' has no attribute {name!r}.{nearest}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
