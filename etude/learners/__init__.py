# SPDX-License-Identifier: Apache-2.0
"""Learners: they turn Experience or batches into new weights."""

from etude.learners.batch import Batch
from etude.learners.compiled import LossFn
from etude.learners.learner import (
    ComputeConfig,
    Learner,
    ModuleLearner,
    ModulesToTrain,
    Precision,
    ScheduleBy,
    Update,
    check_device,
    mean_of,
    seeded,
)
from etude.learners.loss import Loss
from etude.learners.optim import ClipBy, OptimizerConfig, Schedule, check_schedule, points_of, value_at
from etude.learners.replay_dataset import ReplayDataset
from etude.modules.module import load_weights

__all__ = [
    "Batch",
    "ClipBy",
    "ComputeConfig",
    "Learner",
    "Loss",
    "LossFn",
    "ModuleLearner",
    "ModulesToTrain",
    "OptimizerConfig",
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
