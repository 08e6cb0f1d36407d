# SPDX-License-Identifier: Apache-2.0
"""Save and load state: atomically, with checksums and without pickle."""

from etude.checkpoints.codec import MANIFEST, Tree
from etude.checkpoints.tree import (
    Where,
    copy_tree,
    folder_at,
    has_manifest,
    load_meta,
    load_tree,
    remove_tree,
    replace_meta,
    save_tree,
    state_name,
)

__all__ = [
    "MANIFEST",
    "Tree",
    "Where",
    "copy_tree",
    "folder_at",
    "has_manifest",
    "load_meta",
    "load_tree",
    "remove_tree",
    "replace_meta",
    "save_tree",
    "state_name",
]
