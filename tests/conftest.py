# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: property tests draw the same examples each time and know no deadline on a busy machine."""

import hypothesis

hypothesis.settings.register_profile("etude", deadline=None, derandomize=True)
hypothesis.settings.load_profile("etude")
