# SPDX-License-Identifier: Apache-2.0
"""An algorithm's checkpoint, and what an algorithm takes from one; for a new algorithm from one, see `etude.load`."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from etude.algorithms import saving
from etude.algorithms.components import Names, chosen
from etude.algorithms.result import Result
from etude.checkpoints import Where, load_meta, load_tree, save_tree
from etude.errors import CheckpointError
from etude.spaces import space_to_json

if TYPE_CHECKING:
    from etude.algorithms.base import Algorithm


def save_state(
    algorithm: "Algorithm[Any]", path: Where, components: Names, not_components: Names, result: Result | None
) -> None:
    """See `Algorithm.save`."""
    config = algorithm.config
    meta = {
        "algorithm": saving.name_of(type(algorithm)),
        "config": {field.name: saving.to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)},
        "spaces": {name: [space_to_json(space) for space in pair] for name, pair in algorithm.spaces.items()},
        "iteration": algorithm.iteration,
        "env_steps": algorithm.env_steps,
        "updates": algorithm.updates,
        "time": time.time(),
        "result": None if result is None else result.to_dict(),
    }
    save_tree(path, algorithm.get_state(components, not_components), meta=meta)


def take_state(algorithm: "Algorithm[Any]", path: Where, components: Names, not_components: Names) -> None:
    """See `Algorithm.load`."""
    if not {"algorithm", "config"} <= set(load_meta(path) or ()):
        raise CheckpointError(f"{path} is a checkpoint, but not of an algorithm.")
    state, meta = load_tree(path, lambda there: chosen(there, components, not_components))
    saving.drop_other_episodes(state, meta["config"], algorithm.config.env)
    before = algorithm.get_state([name for name in state if name in algorithm.components()])
    try:
        algorithm.set_state(state)
    except BaseException:
        algorithm.set_state(before)  # all or nothing
        raise
