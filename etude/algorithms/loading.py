# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint back to the algorithm."""

import logging
import os
from typing import Any

from etude.algorithms import saving
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.policies import modules_given
from etude.checkpoints import Where, load_tree
from etude.errors import CheckpointError, SpaceError
from etude.settings import placed
from etude.spaces import Spaces, leaves, space_from_json
from etude.urls import redacted

_log = logging.getLogger("etude.algorithms")


def load(path: Where, *, trust: bool = False, **overrides: Any) -> Algorithm[Any]:
    """The algorithm that was saved at ``path``, ready to go on; training's envs are made only once it does.

    Nothing that the checkpoint names is imported or called, but classes that Etude ships, ids in Gymnasium's registry,
    and classes of this program that inherit from `Algorithm`, `Connector`, `Callback` or `PreLearner`. What else it
    names is given here, as ``env=...``, ``module=...``. It runs on this machine, unless an ``engine`` is given.

    Args:
        path: The folder of a checkpoint, or its URL.
        trust: Import and call whatever the checkpoint names. This runs code from the file: only for checkpoints whose
            origin you trust as you would trust a program.
        overrides: Settings to be other than they were saved, such as ``env``; needed for those that name code of your
            own, or that could not be saved (functions without a name). Of settings inside others, some:
            ``workers={"min_batch": 4}``.

    Raises:
        CheckpointError: the folder is no checkpoint, is broken, names what is not given, or holds only some components
            (see `Algorithm.load`).
        SettingsError: an override is not a setting.
    """
    tree, meta = load_tree(path)
    path = redacted(os.fspath(path))  # for messages
    if not (isinstance(tree, dict) and isinstance(meta, dict) and {"algorithm", "config", "spaces"} <= meta.keys()):
        raise CheckpointError(f"{path} is a checkpoint, but not of an algorithm.")
    cls = _algorithm_class(str(meta["algorithm"]), path, trust=trust)
    saved, spaces, left_out = meta["config"], _spaces(meta["spaces"], path), meta.get("left_out") or {}
    if not (isinstance(saved, dict) and isinstance(left_out, dict)):
        raise CheckpointError(f"{path} is broken: its `config` is no mapping of settings, or its `left_out` is none.")
    try:
        config = saving.load_config(_config_class(cls, meta, trust=trust), saved, overrides, trust=trust)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    given = placed(type(config), overrides, type(config).__name__)
    if "network" in given and saving.to_plain(config.network) != saved.get("network"):
        raise CheckpointError("`network` can't be other than it was saved: the checkpoint is of another module.")
    if spaces.keys() != modules_given(config).keys():
        raise CheckpointError(f"`modules` can't be others than were saved: the checkpoint is of {list(spaces)}.")
    with saving.what_fits(path):
        algorithm = cls(config, saved_spaces=spaces)
    saving.drop_other_episodes(tree, saved, config.env)
    try:
        lacks = [part for part in algorithm.components() if part not in tree and part not in left_out]
        if lacks:
            raise CheckpointError(
                f"{path} is a part of a checkpoint: it has {', '.join(tree)}, but lacks {', '.join(lacks)}. Make the "
                f"algorithm, as {cls.__name__}(config), and let it take these: algorithm.load(path)."
            )
        for part, reason in left_out.items():
            _log.warning("The checkpoint %s was saved without `%s` (%s): it begins anew.", path, part, reason)
        with saving.what_fits(path):
            algorithm.set_state(tree)
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def _spaces(saved: Any, path: Where) -> dict[str, Spaces]:
    """The spaces of each module, as a checkpoint says."""
    try:
        made = {name: (space_from_json(obs), space_from_json(action)) for name, (obs, action) in saved.items()}
        for pair in made.values():
            for space in pair:
                leaves(space, "space")
        return made
    except (SpaceError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken: its `spaces` can't be read ({error}).") from error


def _algorithm_class(name: str, path: Where, *, trust: bool) -> type[Algorithm[Any]]:
    cls = saving.known_class(name, Algorithm)
    if cls is None and trust:
        cls = saving.imported(name, "the algorithm")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise CheckpointError(
            f"{path} names {name} as its algorithm, which is not one that is known here. Nothing that a checkpoint "
            "names is imported: import the module that defines it before you load, or load with trust=True (--trust), "
            "which runs code from the file."
        )
    return cls


def _config_class(cls: type[Algorithm[Any]], meta: dict[str, Any], *, trust: bool) -> type[AlgorithmConfig]:
    """The class of the saved settings: that of the algorithm, or one that inherits from it."""
    name = str(meta.get("config_class", saving.name_of(cls.Config)))
    found: Any = cls.Config if name == saving.name_of(cls.Config) else saving.known_class(name, cls.Config)
    if found is None and trust:
        found = saving.imported(name, "the settings")
    if not (isinstance(found, type) and issubclass(found, cls.Config)):
        raise CheckpointError(
            f"its settings are of {name}, which is not known here: import the module that defines it before you load, "
            f"or load with trust=True (--trust), which runs code from the file. A class {cls.__name__} that says "
            f"`Config = {name.rpartition(':')[2]}` is found by its own name."
        )
    return found
