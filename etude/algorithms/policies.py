# SPDX-License-Identifier: Apache-2.0
"""Make the policies of an algorithm, and the parts of their learners, from the settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import nn

from etude.algorithms.config import ActingConfig, AlgorithmConfig, ModuleLike, TrainedLike, schedules_in
from etude.connectors import ClipAction, LiftAdvantages, NormalizeAdvantages, Pipeline, RescaleAction
from etude.envs import Arena
from etude.errors import ModuleError, SettingsError
from etude.learners import Schedule, seeded
from etude.modules import Module
from etude.policies import Policy
from etude.runners import Episode, ModuleOf
from etude.spaces import Space, Spaces

MAIN = "main"
"""The id of the only module, if ``modules`` is not set."""


def make_policy(
    config: AlgorithmConfig,
    make_module: Callable[[Space, Space], Module],
    spaces: Spaces,
    seed: np.random.SeedSequence,
    own: Iterable[Any] = (),
) -> Policy:
    """Make a policy: a module with the connectors of the settings and of the algorithm.

    Args:
        config: The settings.
        make_module: Makes the module, given the observation and action spaces on its side of the connectors.
        spaces: The observation and action spaces on the env's side.
        seed: Seed of the weights.
        own: The algorithm's connectors.

    Raises:
        SettingsError: a connector is in the wrong place.
    """
    connectors = Pipeline([*config.connectors, *own]).copy()  # the config's connectors may be used elsewhere, too
    if not any(isinstance(c, ClipAction | RescaleAction) for c in connectors.connectors):
        connectors.add(ClipAction(), at=0)  # a Gaussian ignores the bounds of its Box
    for connector in connectors.connectors:
        if connector.uses_module or isinstance(connector, LiftAdvantages | NormalizeAdvantages):
            raise SettingsError(
                f"`connectors` are applied between env and module, where {connector.name} has no effect: return it "
                "from the algorithm's learner_connectors()."
            )
        if connector.hindsight and isinstance(config, ActingConfig):
            raise SettingsError(
                f"{connector.name} says of each step what is known only when the episode has ended, as in a recording: "
                "only offline algorithms can use it."
            )
    with seeded(int(seed.generate_state(1)[0]), "cpu"):
        seen, acted = connectors.spaces(*spaces)
        module = make_module(seen, acted)
    if not isinstance(module, Module):
        raise ModuleError(
            f"make_module returned a {type(module).__name__}: it must return a Module, such as "
            "super().make_module(given, obs_space, action_space)."
        )
    return Policy(module.to(config.compute.device), connectors, obs_space=spaces[0], action_space=spaces[1])


_OWNERS: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""The algorithm that each network belongs to, or belonged to, if that is gone."""


def own_networks(owner: Any, policies: Mapping[str, Policy]) -> None:
    """Register ``owner`` as the algorithm that the networks of these policies belong to."""
    for policy in policies.values():
        _OWNERS[policy.module.net] = ref(owner)


def is_of_another(owner: Any, net: nn.Module) -> bool:
    """Whether a network belongs to another algorithm than ``owner``."""
    return net in _OWNERS and _OWNERS[net]() is not owner


def check_owner(owner: Any, net: nn.Module) -> None:
    """Raise a SettingsError if a network belongs to another algorithm than ``owner``."""
    if is_of_another(owner, net):
        raise SettingsError(
            f"the network, a {type(net).__name__} object, was given to another algorithm before, which trains it in "
            "place: give a class or a function that makes a new one, or copy.deepcopy(network), which starts from its "
            "weights as they are now."
        )


def check_apart(policies: Mapping[str, Policy], modules_to_train: TrainedLike | None) -> None:
    """Check that no module changes when another one is trained. Modules that are all trained may share layers.

    Raises:
        SettingsError: two modules have the same network object, or share a parameter that needs a gradient although
            they are not always trained together.
    """
    owners: dict[nn.Parameter, str] = {}
    for name, policy in policies.items():
        for parameter in policy.module.parameters():
            if not parameter.requires_grad:
                continue
            other = owners.setdefault(parameter, name)
            if other == name:
                continue
            net = f"a {type(policy.module.net).__name__} object"
            if policies[other].module.net is policy.module.net:
                raise SettingsError(
                    f"the modules {other!r} and {name!r} have the same network, {net}: give a class or a function that "
                    "makes one for each, or copies (copy.deepcopy). Agents that should share a network share a module."
                )
            if modules_to_train is not None and (
                callable(modules_to_train) or (name in modules_to_train) != (other in modules_to_train)
            ):
                raise SettingsError(
                    f"the modules {other!r} and {name!r} share layers, but are not always trained together "
                    "(`modules_to_train`): each would change with the other. Give each its own layers, for one a copy "
                    "(copy.deepcopy); or freeze the shared ones, with requires_grad_(False)."
                )


def schedules_of_losses(config: AlgorithmConfig) -> dict[str, Schedule]:
    """The schedules of numbers that losses read, by setting."""
    given = schedules_in(config).items()
    return {name: value for name, value in given if isinstance(value, tuple) and name not in _NOT_OF_LOSSES}


_RATES = {
    "optimizer.actor_lr": "actor",
    "optimizer.critic_lr": "critic",
    "temperature_lr": "temperature",
    "penalty.alpha_lr": "alpha",
}
"""Settings of separate learning rates, and the names of their optimizers."""

WEIGHTS_OF_LOSSES = ("temperature", "alpha")
"""The optimizers of loss weights that are either fixed by a setting or learned. A run may be loaded with or without
them."""

_NOT_OF_LOSSES = {"lr", *_RATES, "epsilon", "replay.priority_beta"}
"""Schedules that no loss reads."""


def learning_rates(
    config: AlgorithmConfig, given: Schedule | Mapping[str, Schedule], groups: Mapping[str, Any] | None, algorithm: str
) -> Schedule | Mapping[str, Schedule]:
    """The learning rate of each optimizer. Separate rates for parts of a single optimizer are left to `ModuleLearner`.

    Args:
        config: The settings, which may include separate rates such as `actor_lr`.
        given: The rate of optimizers that have no separate one.
        groups: The parameters of each named optimizer; None: there is a single optimizer.
        algorithm: The algorithm's name, for messages.

    Raises:
        SettingsError: a rate is set for an optimizer that does not exist.
    """
    own = {_RATES[setting]: rate for setting, rate in schedules_in(config).items() if setting in _RATES}
    if isinstance(given, Mapping) or not own or (groups is None and own.keys() <= {"actor", "critic"}):
        return given
    for setting, optimizer in _RATES.items():
        if optimizer in own and optimizer not in (groups or {}):
            raise SettingsError(
                f"`{setting}` is set, but with these settings {algorithm} learns no {optimizer}: leave it out."
            )
    return {name: own.get(name, given) for name in groups or {}}


def learner_pipeline(connectors: list[Any], module: Module, config: AlgorithmConfig) -> Pipeline:
    """Make the pipeline of the learner's connectors.

    Raises:
        SettingsError: they change the spaces that the module sees, or need steps that they do not get.
    """
    if not isinstance(connectors, list | tuple):
        raise SettingsError(f"learner_connectors returned a {type(connectors).__name__}: it must return a list.")
    pipeline = Pipeline(connectors)
    spaces = (module.obs_space, module.action_space)
    if pipeline.spaces(*spaces) != spaces:
        raise SettingsError(
            f"learner_connectors {pipeline.connectors} change the spaces that the module sees: what stands between "
            "env and module belongs in the setting `connectors`."
        )
    for connector in pipeline.connectors:
        if isinstance(config, ActingConfig) and not config.trajectories.whole_episodes and connector.context:
            raise SettingsError(
                f"{connector.name} needs the {connector.context} steps before a segment, but the learner's connectors "
                "get segments as they were collected, which may begin in the middle of an episode: put it into the "
                "setting `connectors`, or collect whole episodes (trajectories.whole_episodes)."
            )
    return pipeline


def modules_given(config: AlgorithmConfig) -> dict[str, ModuleLike | None]:
    """The user's network of each module, or None, by module id."""
    if config.agents.modules is None:
        return {MAIN: config.module}
    if isinstance(config.agents.modules, Mapping):
        return dict(config.agents.modules)
    return dict.fromkeys(config.agents.modules)


def spaces_in(
    arena: Arena, module_ids: list[str], module_of: ModuleOf | None, before: Mapping[str, Spaces] | None = None
) -> dict[str, Spaces]:
    """The spaces of each module on the env's side: those of the agents that it acts for in the first episodes.

    A module that acts for no agent there has the spaces that all agents have or, if these differ, those that it had
    ``before``.

    Raises:
        SettingsError: a module acts for no agent in the first episodes and had no spaces before, and the agents' spaces
            differ.
    """
    spaces = [(kind.obs_space, kind.action_space) for kind in arena.kinds]
    if len(module_ids) == 1 and module_of is None:
        return {module_ids[0]: spaces[0]}
    of_slot = {slot: own for kind, own in zip(arena.kinds, spaces, strict=True) for slot in kind.slots}
    found: dict[Any, Spaces] = {}
    for slot, agent in enumerate(arena.agents):
        env = int(arena.env_of[slot])
        named = agent if module_of is None else module_of(agent, Episode(f"0-{env}-0", env, 0))
        found.setdefault(named, of_slot[slot])
    by_function = sorted(map(str, found))
    for module_id in module_ids:
        if module_id in found:
            continue
        if len(spaces) == 1:
            found[module_id] = spaces[0]
        elif before is not None and module_id in before:
            found[module_id] = before[module_id]
        else:
            raise SettingsError(
                f"module {module_id!r} acts for no agent in the first episodes, and agents have different spaces: its "
                f"own are unknown. Let `module_of` name it there; it named {by_function}."
            )
    return {module_id: found[module_id] for module_id in module_ids}


def spawned(seeds: np.random.SeedSequence, name: str) -> np.random.SeedSequence:
    """A module's own random stream, which does not depend on the other modules."""
    return np.random.SeedSequence([*np.atleast_1d(seeds.generate_state(4)).tolist(), *name.encode()])
