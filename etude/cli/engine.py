# SPDX-License-Identifier: Apache-2.0
"""Flags of the ray engine: `--engine ray` and `--ray.*`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from etude.algorithms.ray_config import Ray
from etude.errors import SettingsError
from etude.settings import merged, settings


@settings
class EngineFlags:
    """Settings of the ray engine."""

    short: ClassVar = ("num_runners", "num_learners", "num_evaluation_runners")
    """The settings that have a short name, too; others have it as settings of envs' workers."""

    ray: Ray = Ray()
    """They go with `--engine ray`."""


def with_engine(given: Mapping[str, Any], ray: Mapping[str, Any], before: Any, owner: str) -> dict[str, Any]:
    """Settings of an algorithm with those of its engine, which have flags of their own.

    Args:
        given: The settings that flags give, `engine` perhaps among them.
        ray: The settings of the ray engine that flags give.
        before: The `engine` in a file, or of the run that is resumed; None where neither says anything.
        owner: What the algorithm is called in messages.

    Raises:
        SettingsError: there are settings of the ray engine, but the engine is another.
    """
    engine = given.get("engine", before)
    if ray and engine in (None, "local"):
        name = next(iter(ray))
        raise SettingsError(f"{owner} has `ray.{name}`, but lives on the local engine: add --engine ray.")
    if engine != "ray" and not ray:
        return dict(given)
    there = before if isinstance(before, Mapping) else {}
    both = merged(there, ray)
    return {**given, "engine": both or "ray"}
