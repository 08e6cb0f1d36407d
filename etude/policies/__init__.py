# SPDX-License-Identifier: Apache-2.0
"""Policies: a module and the connectors around it, which act together."""

from etude.policies.policy import Chosen, Policy, PolicyLike, PolicyState

__all__ = ["Chosen", "Policy", "PolicyLike", "PolicyState"]
