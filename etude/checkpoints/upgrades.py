# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of older versions of the format, brought up to the next one when they are read.

A version is a layout of the manifest and of the states in it. A change of it raises `VERSION` and adds a function
here, and a checkpoint of the version before to ``tests/checkpoints``.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

Document: TypeAlias = dict[str, Any]
"""A manifest as it lies on the disk: ``tree`` and ``meta`` are encoded (see `etude.checkpoints.codec`)."""

VERSION = 5
"""Of the format that is written.

1: one SHA-256 for the whole safetensors file; the state of an algorithm by student.
2: a CRC-32 for each array; the state of an algorithm is a flat dict of components.
3: MARWIL's average is a connector's; offline runs keep the size of their epochs, and have a `mode`.
4: the manifest holds a checksum of itself; of the engine, it only says which one it was.
5: workers have no `max_lead`.
"""


def _from_1(document: Document) -> Document:
    """Students become components; the arrays keep the names that they have in the file."""
    tree, meta = document["tree"], document["meta"]
    if not (isinstance(tree, dict) and isinstance(meta, dict) and "algorithm" in meta and "students" in tree):
        return document
    known = {"students", "figures", "counters", "seed", "runner", "connectors"}
    components = {name: state for name, state in tree.items() if name not in known}
    learners = {name: student["learner"] for name, student in tree["students"].items()}
    if "runner" in tree:
        connectors = [track["connectors"] for track in tree["runner"]["tracks"]]
        tracks = [{k: v for k, v in track.items() if k != "connectors"} for track in tree["runner"]["tracks"]]
        components["runner"] = {**tree["runner"], "tracks": tracks}
    else:  # offline: what they learned from the recording, once they have seen it
        connectors = [tree.get("connectors")]
        components["data"] = {"was_seen": connectors != [None]}
    for (name, learner), of_env in zip(learners.items(), connectors, strict=True):
        components[f"modules/{name}"] = {"weights": learner["module"], "seq_no": learner["updates"]}
        components[f"optimizers/{name}"] = learner["optimizers"]
        of_learner = tree["students"][name]["to_learner"]
        components[f"connectors/{name}"] = {"env": of_env, "learner": of_learner}
        rest = {key: value for key, value in learner.items() if key not in ("module", "optimizers")}
        components[f"learners/{name}"] = rest
    return {**document, "tree": components | {name: tree[name] for name in ("figures", "counters", "seed")}}


def _from_2(document: Document) -> Document:
    """What offline algorithms keep."""
    tree, meta = document["tree"], document["meta"]
    if not (isinstance(tree, dict) and isinstance(meta, dict) and isinstance(meta.get("config"), dict)):
        return document
    tree, config = dict(tree), dict(meta["config"])
    if "in_memory" in config:
        config["mode"] = {True: "materialize_data", False: "stream"}.get(config.pop("in_memory"), "auto")
    if "data" in tree:
        tree["data"] = {**tree["data"], "epochs": {}}
    if "advantages" in tree and config.get("beta"):
        average = tree.pop("advantages")
        learner = {"connectors": [{"name": "gae", "state": {}}]}
        learner["connectors"].append({"name": "advantage_weights", "state": {"mean_square": average}})
        tree["connectors/main"] = {**tree["connectors/main"], "learner": learner}
    tree.pop("advantages", None)
    return {**document, "tree": tree, "meta": {**meta, "config": config}}


def _from_3(document: Document) -> Document:
    """What was said of the engine is not used; all else is laid out alike."""
    return document


def _from_4(document: Document) -> Document:
    """A setting of workers is gone."""
    meta = document["meta"]
    config = meta.get("config") if isinstance(meta, dict) else None
    if not (isinstance(config, dict) and isinstance(config.get("workers"), dict)):
        return document
    workers = {name: value for name, value in config["workers"].items() if name != "max_lead"}
    return {**document, "meta": {**meta, "config": {**config, "workers": workers}}}


UPGRADES: dict[int, Callable[[Document], Document]] = {1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4}
"""What brings a manifest of a version to the next one."""
