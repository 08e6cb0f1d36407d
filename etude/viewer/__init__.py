# SPDX-License-Identifier: Apache-2.0
"""A page in the browser that shows recordings: figures, histograms, episodes, and one episode step by step."""

from etude.viewer.pages import PageServer, save_page
from etude.viewer.views import RecordingView

__all__ = ["PageServer", "RecordingView", "save_page"]
