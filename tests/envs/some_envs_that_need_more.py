# SPDX-License-Identifier: Apache-2.0
"""Envs of a package that is not installed."""

import no_such_module  # noqa: F401
