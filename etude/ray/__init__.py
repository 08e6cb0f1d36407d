# SPDX-License-Identifier: Apache-2.0
"""The Ray engine: runners, learners and the offline pipeline on a Ray cluster, and tuning with Ray Tune."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.ray.trainable import Shared, Trainable
    from etude.ray.tuning import resume_tuning, tune

__all__ = ["Shared", "Trainable", "resume_tuning", "tune"]

_HOME_OF = {
    "Shared": "etude.ray.trainable",
    "Trainable": "etude.ray.trainable",
    "resume_tuning": "etude.ray.tuning",
    "tune": "etude.ray.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'etude.ray' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)  # lazily, as importing Tune takes half a second
