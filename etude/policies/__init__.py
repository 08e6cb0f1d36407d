# SPDX-License-Identifier: Apache-2.0
"""Policies: a module and the connectors around it, which act together."""

from etude.policies.policy import Policy, PolicyLike, PolicyState

__all__ = ["Policy", "PolicyLike", "PolicyState"]
