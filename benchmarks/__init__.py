# SPDX-License-Identifier: Apache-2.0
"""How fast Etude is, beside bare loops and another library, in one run: ``python -m benchmarks [ROW ...]``."""
