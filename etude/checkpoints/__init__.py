# SPDX-License-Identifier: Apache-2.0
"""State on disk: atomic, checksummed, free of pickle."""

from etude.checkpoints.codec import Tree
from etude.checkpoints.tree import load_meta, load_tree, save_tree

__all__ = ["Tree", "load_meta", "load_tree", "save_tree"]
