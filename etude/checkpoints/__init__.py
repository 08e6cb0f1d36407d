# SPDX-License-Identifier: Apache-2.0
"""State on disk: atomic, checksummed, free of pickle."""

from etude.checkpoints.codec import Tree
from etude.checkpoints.rng import get_rng_state, rng_from_state
from etude.checkpoints.tree import load_meta, load_tree, save_tree

__all__ = ["Tree", "get_rng_state", "load_meta", "load_tree", "rng_from_state", "save_tree"]
