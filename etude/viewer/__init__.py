# SPDX-License-Identifier: Apache-2.0
"""A browser page that shows recordings: statistics, histograms, lists of episodes, and single episodes step by step."""

from etude.viewer.pages import PageServer, save_page
from etude.viewer.views import RecordingView

__all__ = ["PageServer", "RecordingView", "save_page"]
