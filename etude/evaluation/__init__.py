# SPDX-License-Identifier: Apache-2.0
"""Off-policy evaluation: what a policy is worth, from episodes that another one played."""

from etude.evaluation.evaluate import METHODS, OffPolicyEvaluationConfig, evaluate_each_on, evaluate_on
from etude.evaluation.fqe import FQEConfig
from etude.evaluation.result import Estimate, OffPolicyEvaluation

__all__ = [
    "METHODS",
    "Estimate",
    "FQEConfig",
    "OffPolicyEvaluation",
    "OffPolicyEvaluationConfig",
    "evaluate_each_on",
    "evaluate_on",
]
