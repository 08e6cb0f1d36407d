# SPDX-License-Identifier: Apache-2.0
"""Off-policy evaluation: estimate the return of a policy from episodes that another policy played."""

from etude.evaluation.estimators import Estimate, OffPolicyEvaluation
from etude.evaluation.evaluate import METHODS, OffPolicyEvaluationConfig, evaluate_each_on, evaluate_on
from etude.evaluation.fqe import FQEConfig

__all__ = [
    "METHODS",
    "Estimate",
    "FQEConfig",
    "OffPolicyEvaluation",
    "OffPolicyEvaluationConfig",
    "evaluate_each_on",
    "evaluate_on",
]
