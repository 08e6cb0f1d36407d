# SPDX-License-Identifier: Apache-2.0
"""An algorithm's checkpoint, and what an algorithm takes from one; for a new algorithm from one, see `etude.load`."""

import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from etude.algorithms import saving
from etude.algorithms.components import MODULES, Names, chosen
from etude.algorithms.result import Result
from etude.checkpoints import Where, load_meta, load_tree, save_tree
from etude.checkpoints.codec import Encoder
from etude.errors import CheckpointError, EtudeError
from etude.spaces import space_to_json
from etude.urls import redacted

if TYPE_CHECKING:
    from etude.algorithms.base import Algorithm

_log = logging.getLogger("etude.algorithms")


def save_state(
    algorithm: "Algorithm[Any]", path: Where, components: Names, not_components: Names, result: Result | None
) -> None:
    """See `Algorithm.save`."""
    config = algorithm.config
    saved = {field.name: saving.to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    saved["engine"] = "local" if config.engine == "local" else "ray"  # for readers: an engine is given when loading
    state, failures = _savable_components(algorithm, components, not_components)
    left_out = {name: _reason(error) for name, error in failures.items()}
    meta = {
        "algorithm": saving.name_of(type(algorithm)),
        "config": saved,
        "config_class": saving.name_of(type(config)),
        "spaces": {name: [space_to_json(space) for space in pair] for name, pair in algorithm.spaces.items()},
        "iteration": algorithm.iteration,
        "env_steps": algorithm.env_steps,
        "updates": algorithm.updates,
        "time": time.time(),
        "result": None if result is None else result.to_dict(),
        "left_out": left_out,
    }
    save_tree(path, state, meta=meta)
    for name, reason in left_out.items():
        if algorithm.left_out.get(name) != reason:
            _log.warning("The checkpoint %s was saved without `%s`: %s", redacted(os.fspath(path)), name, reason)
    algorithm.left_out = left_out
    if "recorder" in failures:  # recorded steps may be lost
        raise failures["recorder"]


def _savable_components(
    algorithm: "Algorithm[Any]", components: Names, not_components: Names
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """The components, and the errors of those that can't be saved; those of weights are raised."""
    kept: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    algorithm.pull_learners()
    parts = algorithm.components()
    for name in chosen(parts, components, not_components):
        try:
            part = parts[name].get()
            if name == "runner":
                failures |= _take_out_callbacks(part)
            if (error := _refusal(part)) and name == "runner" and part.get("arena") and _refusal(part["arena"]):
                part["arena"] = {"how": "new episodes", "why": _reason(error)}
                error = _refusal(part)
            if error:
                raise error
            kept[name] = part
        except Exception as error:
            if name.startswith(MODULES):
                raise
            failures[name] = error
    return kept, failures


def _take_out_callbacks(runner: dict[str, Any]) -> dict[str, Exception]:
    """Take callbacks whose state can't be saved out of the runner's; the errors by their names."""
    called = runner.get("callbacks")
    if not called:
        return {}
    failures: dict[str, Exception] = {name: CheckpointError(why) for name, why in called.pop("left_out").items()}
    failures |= {name: error for name, state in called["callbacks"] if (error := _refusal(state))}
    called["callbacks"] = [pair for pair in called["callbacks"] if pair[0] not in failures]
    return {f"callbacks/{name}": error for name, error in failures.items()}


def _refusal(part: Any) -> Exception | None:
    """Why a part can't be saved; None if it can."""
    try:
        Encoder().encode(part)
    except Exception as error:  # noqa: BLE001  a CheckpointError, or one of the part's own
        return error
    return None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"


def take_state(algorithm: "Algorithm[Any]", path: Where, components: Names, not_components: Names) -> None:
    """See `Algorithm.load`."""
    meta = load_meta(path)
    if not (isinstance(meta, dict) and "algorithm" in meta and isinstance(meta.get("config"), dict)):
        raise CheckpointError(f"{redacted(os.fspath(path))} is a checkpoint, but not of an algorithm.")
    state, _ = load_tree(path, lambda there: chosen(there, components, not_components))
    path = redacted(os.fspath(path))  # for messages
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is a checkpoint, but not of an algorithm.")
    saving.drop_other_episodes(state, meta["config"], algorithm.config.env)
    before = algorithm.get_state([name for name in state if name in algorithm.components()])
    try:
        with saving.what_fits(path):
            algorithm.set_state(state)
    except BaseException:
        algorithm.set_state(before)  # all or nothing
        raise
