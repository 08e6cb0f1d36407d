# SPDX-License-Identifier: Apache-2.0
"""Loading of algorithms and policies from checkpoints."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from etude.algorithms import saving
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.checkpoint import MODULES, chosen, what_fits
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.policies import modules_given
from etude.checkpoints import Where, load_meta, load_tree
from etude.errors import CheckpointError, SettingsError, SpaceError
from etude.learners import check_device
from etude.policies import Policy
from etude.settings import choice, merged, nested_by_name, other_names, own_paths
from etude.spaces import Spaces, leaves, space_from_json
from etude.urls import redacted

T = TypeVar("T")

_log = logging.getLogger("etude.algorithms")


def load(path: Where, *, trust: bool = False, **overrides: Any) -> Algorithm[Any]:
    """Load the algorithm that was saved at ``path``; its training envs are made only when it trains.

    Nothing that the checkpoint names is imported or called, except classes that Etude ships, ids in Gymnasium's
    registry, and classes of this program that inherit from `Algorithm`, `Connector`, `Callback` or `PreLearner`. Pass
    everything else that it names here, as ``env=...``, ``module=...``. It runs on this machine unless an ``engine`` is
    given.

    Args:
        path: The folder of a checkpoint, or its URL.
        trust: Import and call whatever the checkpoint names. This runs code from the file: use it only for checkpoints
            whose origin you trust as you would trust a program.
        overrides: Settings that differ from the saved ones, such as ``env``. Required for those that name your own code
            or could not be saved (functions without a name). For a group of settings, give some of them:
            ``workers={"min_batch": 4}``.

    Raises:
        CheckpointError: the folder is not a checkpoint, is broken, names code that is not given, or holds only some
            components (see `Algorithm.load`).
        SettingsError: an override is not a setting.
    """
    tree, meta = load_tree(path)
    path = redacted(os.fspath(path))  # for messages
    cls, saved, spaces = _described(meta if isinstance(tree, dict) else None, path, trust=trust)
    left_out = meta.get("left_out") or {}
    config = _config(_config_class(cls, meta, path, trust=trust), saved, overrides, path, trust=trust)
    if config.seed != saved.get("seed"):
        raise SettingsError(
            f"`seed` is {config.seed}, but the run was saved with {saved.get('seed')}, and goes on with its random "
            "streams, whatever the seed: leave it out, or train a new run with it."
        )
    if spaces.keys() != modules_given(config).keys():
        raise CheckpointError(f"`modules` can't be others than were saved: the checkpoint is of {list(spaces)}.")
    with what_fits(path):
        algorithm = cls(config, saved_spaces=spaces)
    # where an algorithm runs and records does not change what it learns
    names = sorted({field.name for field in dataclasses.fields(config)} - {"engine", "record"})
    changes = _changes(config, saved, names, also_new=True)
    algorithm.recorder.has_new_settings = bool(changes)
    saving.drop_other_episodes(tree, saved, config.env)
    try:
        lacks = [part for part in algorithm.components() if part not in tree and part not in left_out]
        if lacks:
            raise CheckpointError(
                f"{path} is a part of a checkpoint: it has {', '.join(tree)}, but lacks {', '.join(lacks)}. Make the "
                f"algorithm, as {cls.__name__}(config), and let it take these: algorithm.load(path)."
            )
        for part, reason in left_out.items():
            _log.warning("The checkpoint %s was saved without `%s` (%s): it starts anew.", path, part, reason)
        try:
            with what_fits(path):
                algorithm.set_state(tree)
        except CheckpointError as error:
            if not changes:
                raise
            raise CheckpointError(f"{error} Settings that differ from the saved ones: {', '.join(changes)}.") from error
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def _changes(
    config: AlgorithmConfig, saved: Mapping[str, Any], names: Iterable[str], *, also_new: bool = False
) -> list[str]:
    """The settings among ``names`` that differ from the saved ones, by path.

    A checkpoint of an older version may lack some nested settings. With ``also_new``, these count if they differ from
    their defaults.
    """
    found = []
    for name in names:
        now, was = saving.to_plain(getattr(config, name)), saved.get(name)
        if saving.is_plain(now) and saving.is_plain(was):
            found += [f"`{name}.{inner}`" for inner in was if inner in now and now[inner] != was[inner]]
            if also_new:
                default = saving.to_plain(getattr(type(config), name, None))
                usual = default if saving.is_plain(default) else {}
                found += [f"`{name}.{i}`" for i in now if i not in was and now[i] != usual.get(i)]
        elif now != was:
            found.append(f"`{name}`")
    return found


def load_settings(path: Where, *, trust: bool = False, **overrides: Any) -> AlgorithmConfig:
    """Load the settings of the run that was saved at ``path``; arguments and errors are those of `load`."""
    meta, shown = load_meta(path), redacted(os.fspath(path))
    cls, saved, _ = _described(meta, shown, trust=trust)
    return _config(_config_class(cls, meta, shown, trust=trust), saved, overrides, shown, trust=trust)


def _config(
    cls: type[AlgorithmConfig], saved: Mapping[str, Any], overrides: Mapping[str, Any], path: str, *, trust: bool
) -> AlgorithmConfig:
    try:
        config = saving.load_config(cls, saved, overrides, trust=trust)
        with what_fits(path):
            _check_weights(config, saved, overrides)
        return config
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_weights(config: AlgorithmConfig, saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a module's weights would mean something else with these settings."""
    cls = type(config)
    owner = cls.__name__
    given = nested_by_name(cls, overrides, owner)
    if given.keys().isdisjoint((*cls.architecture_settings, "agents")):
        return
    saved = nested_by_name(cls, saved, owner)
    before, now = (saved.get("agents") or {}).get("overrides") or {}, config.agents.overrides or {}
    for module_id in modules_given(config):
        own = config.with_overrides(module_id, now.get(module_id, {}))
        was = merged(saved, nested_by_name(cls, before.get(module_id, {}), owner))
        if differ := _changes(own, was, cls.architecture_settings):
            raise CheckpointError(f"{differ[0]} can't be other than it was saved: the checkpoint is of another module.")


_NOT_OF_POLICIES = ("env", "engine", "data", "prelearner", "callbacks", "record", "workers", "compute")
"""Settings that don't affect policies; code that they name is not needed to load one."""


def load_policy(
    path: Where, policy_id: str | None = None, *, device: str = "cpu", trust: bool = False, **overrides: Any
) -> Policy:
    """Load a policy that was saved at ``path``, for `Policy.act`: needs no env, optimizer, replay buffer or recording.

    Only the weights and the connectors' learned state are read. As in `load`, nothing that the checkpoint names is
    imported or called: pass your own network as ``module=...`` and your own connectors as ``connectors=...``.

    Args:
        path: The folder of a run or of a checkpoint, or its URL.
        policy_id: The policy's module id; None: the only one.
        device: The module's device, such as ``cpu`` or ``cuda:0``.
        trust: Import and call what the checkpoint names. This runs code from the file: use it only for checkpoints
            whose origin you trust as you would trust a program.
        overrides: Settings of its algorithm that differ from the saved ones: ``module``, ``connectors``, or one that
            affects how a policy acts, such as the ``target_return`` of `DecisionTransformer`.

    Raises:
        CheckpointError: the folder is not a checkpoint, is broken, or names code that is not given.
        SettingsError: there are several policies and no id is given, there is none of this id, or an override is not a
            setting.
    """
    check_device(device)
    meta = load_meta(path)
    shown = redacted(os.fspath(path))
    algorithm, saved, spaces = _described(meta, shown, trust=trust)
    if policy_id is None and len(spaces) > 1:
        raise SettingsError(
            f"{shown} has the policies {', '.join(spaces)}: say which, as "
            f"etude.load_policy(path, {next(iter(spaces))!r}), or --policy on the command line."
        )
    name = next(iter(spaces)) if policy_id is None else policy_id
    if name not in spaces:
        raise SettingsError(f"{shown} has no policy {name!r}. {choice(str(name), spaces)}")
    cls: Any = _config_class(algorithm, meta, shown, trust=trust)
    known = {field.name for field in dataclasses.fields(cls)} | own_paths(cls).keys()
    if unknown := [key for key in overrides if known.isdisjoint((key, *other_names(key)))]:
        owner = f"the policy of {shown} is of {algorithm.__name__}, which"
        raise SettingsError(f"{owner} has no setting `{unknown[0]}`. {choice(unknown[0], sorted(known))}")
    config = _config_of_policy(cls, saved, overrides, name, shown, trust=trust)
    try:
        tree, _ = load_tree(path, lambda there: chosen(there, (f"{MODULES}{name}", f"connectors/{name}")))
    except CheckpointError as error:
        raise CheckpointError(f"{shown} lacks what a policy needs: {error}") from error
    with what_fits(shown):
        weights = tree[f"{MODULES}{name}"]["weights"]
        policy = algorithm.only_policy(config, spaces[name], int(meta.get("env_steps", 0)), weights)
        learned = tree[f"connectors/{name}"]["env"]
        if learned is not None:
            policy.connectors.load_state_dict(learned)
    policy.module.to(device).eval()
    return policy


def _config_of_policy(
    cls: type[AlgorithmConfig],
    saved: Mapping[str, Any],
    overrides: Mapping[str, Any],
    name: str,
    path: str,
    *,
    trust: bool,
) -> AlgorithmConfig:
    """The settings of a run with this policy alone; those that don't affect it have their defaults."""
    kept = nested_by_name(cls, saved, cls.__name__)
    agents, given = kept.pop("agents", None) or {}, dict(overrides)
    with what_fits(f"`config/agents` of {path}"):
        kept = merged(kept, nested_by_name(cls, (agents.get("overrides") or {}).get(name) or {}, cls.__name__))
        if isinstance(modules := agents.get("modules"), dict):
            kept["module"] = modules[name]
    kept = {key: value for key, value in kept.items() if key not in _NOT_OF_POLICIES}
    if "data" in {field.name for field in dataclasses.fields(cls)}:
        given.setdefault("data", ())  # else an env would be required
    return _config(cls, kept, given, path, trust=trust)


def _described(meta: Any, path: str, *, trust: bool) -> tuple[type[Algorithm[Any]], dict[str, Any], dict[str, Spaces]]:
    """What a checkpoint says about its algorithm: the class, the saved settings, and the spaces by module id."""
    if not (isinstance(meta, dict) and {"algorithm", "config", "spaces"} <= meta.keys()):
        raise CheckpointError(f"{path} is a checkpoint, but not of an algorithm.")
    cls = _known_class(str(meta["algorithm"]), Algorithm, path, "its algorithm", trust=trust)
    saved, spaces = meta["config"], _spaces(meta["spaces"], path)
    if not (isinstance(saved, dict) and isinstance(meta.get("left_out") or {}, dict)):
        raise CheckpointError(f"{path} is broken: its `config` or its `left_out` is not a mapping.")
    return cls, saved, spaces


def _spaces(saved: Any, path: Where) -> dict[str, Spaces]:
    """The spaces of each module in a checkpoint."""
    try:
        made = {name: (space_from_json(obs), space_from_json(action)) for name, (obs, action) in saved.items()}
        for pair in made.values():
            for space in pair:
                leaves(space, "space")
        if not made:
            raise ValueError("there are none")
        return made
    except (SpaceError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken: its `spaces` can't be read ({error}).") from error


def _config_class(cls: type[Algorithm[Any]], meta: dict[str, Any], path: str, *, trust: bool) -> type[AlgorithmConfig]:
    """The class of the saved settings: the algorithm's, or one that inherits from it."""
    name = str(meta.get("config_class", saving.name_of(cls.Config)))
    if name == saving.name_of(cls.Config):
        return cls.Config
    hint = f" A class {cls.__name__} that says `Config = {name.rpartition(':')[2]}` is found by its own name."
    return _known_class(name, cls.Config, path, "its settings", hint, trust=trust)


def _known_class(name: str, base: type[T], path: str, what: str, hint: str = "", *, trust: bool) -> type[T]:
    """The class of this name, which must be ``base`` or inherit from it; imported only if the file is trusted."""
    found: Any = saving.known_class(name, base)
    if found is None and trust:
        found = saving.imported(name, what)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise CheckpointError(
            f"{path} names {name} as {what}, which is not one that is known here. Nothing that a checkpoint names is "
            "imported: import the module that defines it before you load"
            + (", which is the script that saved it" if name.startswith("__main__:") else "")
            + f", or load with trust=True (--trust), which runs code from the file.{hint}"
        )
    return found
