# SPDX-License-Identifier: Apache-2.0
"""What a policy is worth, from episodes that another one played: off-policy evaluation."""

from etude.evaluation.asked import METHODS
from etude.evaluation.evaluate import evaluate_each_on, evaluate_on
from etude.evaluation.fqe import FQEConfig
from etude.evaluation.result import Estimate, OffPolicyEvaluation

__all__ = ["METHODS", "Estimate", "FQEConfig", "OffPolicyEvaluation", "evaluate_each_on", "evaluate_on"]
