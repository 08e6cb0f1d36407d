# SPDX-License-Identifier: Apache-2.0
"""State on disk: atomic, checksummed, free of pickle."""

from etude.checkpoints.codec import Tree
from etude.checkpoints.folders import Where
from etude.checkpoints.tree import copy_tree, has_manifest, load_meta, load_tree, remove_tree, save_tree

__all__ = ["Tree", "Where", "copy_tree", "has_manifest", "load_meta", "load_tree", "remove_tree", "save_tree"]
