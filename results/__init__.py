# SPDX-License-Identifier: Apache-2.0
"""What the presets reach, beside their sources and other libraries: ``python -m results``."""
