# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint back to the algorithm."""

import typing
from typing import Any

from etude.algorithms import saving
from etude.algorithms.base import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.students import modules_given
from etude.checkpoints import Where, load_tree
from etude.errors import CheckpointError, SettingsError
from etude.spaces import space_from_json


def load(path: Where, **overrides: Any) -> Algorithm[Any]:
    """The algorithm that was saved at ``path``, ready to go on; training's envs are made only once it does.

    Args:
        path: The folder of a checkpoint, or its URL.
        overrides: Settings to be other than they were saved, such as ``env``; needed for those that could not be saved
            (functions without a name). Of settings inside others, some: ``workers={"min_batch": 4}``.

    Raises:
        CheckpointError: the folder is no checkpoint, is broken, names what can't be imported here, or holds only some
            components (see `Algorithm.load`).
        SettingsError: an override is not a setting.
    """
    tree, meta = load_tree(path)
    if not (isinstance(meta, dict) and isinstance(tree, dict) and {"algorithm", "config", "spaces"} <= meta.keys()):
        raise CheckpointError(f"{path} is a checkpoint, but not of an algorithm.")
    name, saved = meta["algorithm"], meta["config"]
    cls = saving.find(str(name), "the algorithm")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise CheckpointError(f"{path} names {name} as its algorithm, which is not one.")
    config = saving.load_config(config_class(cls), saved, overrides)
    for fixed in ("network", "squash"):
        if fixed in overrides and saving.to_plain(getattr(config, fixed)) != saved.get(fixed):
            raise CheckpointError(f"`{fixed}` can't be other than it was saved: the checkpoint is of another module.")
    spaces = {name: (space_from_json(pair[0]), space_from_json(pair[1])) for name, pair in meta["spaces"].items()}
    if spaces.keys() != modules_given(config).keys():
        raise CheckpointError(f"`modules` can't be others than were saved: the checkpoint is of {list(spaces)}.")
    algorithm = cls(config, saved_spaces=spaces)
    saving.drop_other_episodes(tree, saved, config.env)
    try:
        lacks = [part for part in algorithm.components() if part not in tree]
        if lacks:
            raise CheckpointError(
                f"{path} is a part of a checkpoint: it has {', '.join(tree)}, but lacks {', '.join(lacks)}. Make the "
                f"algorithm, as {cls.__name__}(config), and let it take these: algorithm.load(path)."
            )
        algorithm.set_state(tree)
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def config_class(algorithm: type[Algorithm[Any]]) -> type[AlgorithmConfig]:
    """The settings class of an algorithm: what it is generic in."""
    for cls in algorithm.__mro__:
        for base in getattr(cls, "__orig_bases__", ()):
            for argument in typing.get_args(base):
                if isinstance(argument, type) and issubclass(argument, AlgorithmConfig):
                    return argument
    raise SettingsError(f"{algorithm.__name__} does not say its settings: inherit from OnPolicyAlgorithm[YourConfig].")
