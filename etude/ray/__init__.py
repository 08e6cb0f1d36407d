# SPDX-License-Identifier: Apache-2.0
"""The Ray engine: runners, learners and the offline pipeline on a Ray cluster, and tuning with Ray Tune."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.ray.trainable import Shared, Trainable
    from etude.ray.tuning import resume_tuning, tune

__all__ = ["Shared", "Trainable", "resume_tuning", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etude.ray' has no attribute {name!r}")
    home = "trainable" if name in ("Shared", "Trainable") else "tuning"
    return getattr(importlib.import_module(f"etude.ray.{home}"), name)  # lazily, as importing Tune takes half a second
