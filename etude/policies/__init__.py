# SPDX-License-Identifier: Apache-2.0
"""Policies: a module and the connectors around it, which act together."""

from etude.policies.policy import Choice, Policy, PolicyLike, PolicyState

__all__ = ["Choice", "Policy", "PolicyLike", "PolicyState"]
