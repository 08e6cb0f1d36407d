# SPDX-License-Identifier: Apache-2.0
"""Etude."""

__version__ = "0.1.0"
