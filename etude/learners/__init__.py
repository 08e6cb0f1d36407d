# SPDX-License-Identifier: Apache-2.0
"""Learners: from Experience or batches to new weights."""

from etude.learners.batch import Batch
from etude.learners.clipping import ClipBy
from etude.learners.learner import Learner, Update, load_weights, seeded
from etude.learners.loss import Loss
from etude.learners.schedules import Schedule, check_schedule, value_at

__all__ = [
    "Batch",
    "ClipBy",
    "Learner",
    "Loss",
    "Schedule",
    "Update",
    "check_schedule",
    "load_weights",
    "seeded",
    "value_at",
]
