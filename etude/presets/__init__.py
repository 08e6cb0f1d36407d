# SPDX-License-Identifier: Apache-2.0
"""Presets: settings that are known to work for a task. Each is a YAML file in this folder, with its source.

To add one, add its file, ``ALGORITHM-TASK.yaml``, with ``algorithm``, ``env``, ``settings``, ``stop``, ``source`` and
``published``.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from etude.algorithms import ALGORITHMS, AlgorithmConfig
from etude.display import short
from etude.errors import SettingsError
from etude.settings import choice, from_dict, nearest

RESULTS = "results.json"
"""The file with the results of presets, by name; ``make results`` writes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings that are known to work for an algorithm on a task."""

    name: str
    """Its name, such as ``ppo-HalfCheetah-v5``."""
    algorithm: str
    """A key of `etude.ALGORITHMS`."""
    env: str
    """The task, as `AlgorithmConfig.env` takes it."""
    settings: Mapping[str, Any]
    """Settings that differ from the algorithm's defaults, in the form of a settings file."""
    stop: Mapping[str, Any]
    """The fields of a `Stop`: the length of run that these settings are meant for."""
    source: str
    """The source of these settings, and what was changed."""
    published: str = ""
    """The results that the source reports."""
    reached: Mapping[str, Any] | None = None
    """Their results here: ``returns``, one for each seed; ``env_steps`` or ``updates``, the length of a run; and
    ``seconds``, its duration, None if not known. None: not run."""

    def __repr__(self) -> str:
        return short(self, self.algorithm, env=self.env)

    def config(self) -> AlgorithmConfig:
        """The settings, with the env."""
        values = {"env": self.env, **self.settings}
        config: AlgorithmConfig = from_dict(ALGORITHMS[self.algorithm].Config, values, owner=self.algorithm)
        return config

    def to_yaml(self) -> str:
        """A settings file of it, for ``etude train --config``."""
        values = {"env": self.env, **self.settings, "stop": self.stop}
        text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
        return f"# {self.algorithm}. {self.source}\n{text}"


@functools.cache
def _all() -> tuple[Preset, ...]:
    folder = resources.files(__name__)
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    order = list(ALGORITHMS)
    found = []
    for file in folder.iterdir():
        if file.name.endswith(".yaml"):
            name, values = file.name.removesuffix(".yaml"), yaml.safe_load(file.read_text(encoding="utf-8"))
            found.append(Preset(name=name, reached=results.get(name), **values))
    return tuple(sorted(found, key=lambda preset: (order.index(preset.algorithm), preset.env)))


def find_presets(algorithm: str | None = None) -> list[Preset]:
    """The presets that come with Etude, of one algorithm or of all, in the order of `etude.ALGORITHMS`.

    Raises:
        SettingsError: there is no such algorithm.
    """
    if not isinstance(algorithm, str | None):
        raise SettingsError(f"an algorithm is given by its name, such as 'ppo', not as {algorithm!r}.")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise SettingsError(f"there is no algorithm `{algorithm}`. {choice(algorithm, ALGORITHMS)}")
    return [preset for preset in _all() if algorithm in (None, preset.algorithm)]


def find_preset(algorithm: str, env: str) -> Preset:
    """The preset of an algorithm for a task.

    Raises:
        SettingsError: there is none; the nearest is named.
    """
    envs = {preset.env: preset for preset in find_presets(algorithm)}
    if env in envs:
        return envs[env]
    near = nearest(env, envs)
    hint = f"Nearest: {near}." if near else f"It has them for {', '.join(envs) or 'no env'}."
    raise SettingsError(f"{algorithm} has no preset for {env}. {hint} All of them: etude presets")


def preset(algorithm: str, env: str, /, **changes: Any) -> AlgorithmConfig:
    """Settings that are known to work: ``etude.PPO(etude.preset("ppo", "HalfCheetah-v5", seed=1))``.

    `find_presets` gives their sources.

    Args:
        algorithm: Its name, such as ``ppo``.
        env: The task, such as ``HalfCheetah-v5`` or ``atari:Pong``.
        changes: Settings that differ from the preset, as the algorithm's config takes them. ``env`` may be an env of
            your own that is like the task.

    Raises:
        SettingsError: there is no preset for these, the nearest is named; or a change is no setting of the algorithm.
    """
    return dataclasses.replace(find_preset(algorithm, env).config(), **changes)
