# SPDX-License-Identifier: Apache-2.0
"""Learners: from Experience or batches to new weights."""

from etude.learners.batch import Batch
from etude.learners.clipping import ClipBy
from etude.learners.learner import Learner, ModulesToTrain
from etude.learners.loss import Loss
from etude.learners.module_learner import LossFn, ModuleLearner, Precision, ScheduleBy, check_device
from etude.learners.replay_dataset import ReplayDataset
from etude.learners.schedules import Schedule, check_schedule, points_of, value_at
from etude.learners.seeding import seeded
from etude.learners.updates import Update, mean_of
from etude.modules.module import load_weights

__all__ = [
    "Batch",
    "ClipBy",
    "Learner",
    "Loss",
    "LossFn",
    "ModuleLearner",
    "ModulesToTrain",
    "Precision",
    "ReplayDataset",
    "Schedule",
    "ScheduleBy",
    "Update",
    "check_device",
    "check_schedule",
    "load_weights",
    "mean_of",
    "points_of",
    "seeded",
    "value_at",
]
