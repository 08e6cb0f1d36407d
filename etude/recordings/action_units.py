# SPDX-License-Identifier: Apache-2.0
"""The units of recorded actions: the env's, or the policy's, before connectors or RLlib map them to the env's bounds.

Recordings with actions in different units are not joined.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeGuard

from gymnasium.spaces import Box

from etude import columns as col
from etude.errors import SpaceError
from etude.spaces import Space, leaf_dtype, leaves, map_leaves, space_from_json, space_to_json

ACTIONS: Final = "actions"
"""The key in ``header.meta`` of a note on actions in unknown units: one of the next two texts."""
BY_RLLIB: Final = "as the policy gave them: RLlib may have mapped them to the env's bounds after recording"
REWRITTEN: Final = "as the files hold them: another tool has dropped what says whether connectors mapped them"
AS_THE_ENV_GOT: Final = "those that the env got"


def env_action_space(meta: Mapping[str, Any]) -> Any:
    """The env's action space as JSON data, if recorded actions were mapped to it; by module id if several differ.

    None if the env got the actions as they are recorded.
    """
    found = meta.get(col.ENV_ACTION_SPACE)
    spaces = list(found.values()) if _is_by_module(found) else []
    return spaces[0] if spaces and all(space == spaces[0] for space in spaces) else found


def _is_by_module(found: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(found, Mapping) and "type" not in found


def of_modules(names: Iterable[str], meta: Mapping[str, Any], action_space: Space) -> dict[str, Any]:
    """The metadata of a recording of the modules ``names``, from that of all modules of a run.

    If connectors map the actions of some, the env's space of the others is the recorded one, ``action_space``.
    """
    found, connectors, own = meta.get(col.ENV_ACTION_SPACE), meta.get("connectors"), dict(meta)
    if _is_by_module(found) and isinstance(connectors, Mapping):
        there = [name for name in names if name in connectors]  # not those that were removed from the run
        own[col.ENV_ACTION_SPACE] = {name: found.get(name, space_to_json(action_space)) for name in there} or found
        own["connectors"] = {name: connectors[name] for name in there}
    return own


def are_unsure(space: Space, meta: Mapping[str, Any]) -> bool:
    """Whether it is unknown if actions of ``space`` are in the env's units."""
    is_noted = meta.get(ACTIONS) in (BY_RLLIB, REWRITTEN)
    boxes = [leaf for leaf in leaves(space, col.ACTION).values() if isinstance(leaf, Box) and leaf.dtype.kind == "f"]
    return is_noted and any(not box.is_bounded() or box != before_mapping(box) for box in boxes)


def is_space(data: Any, space: Space) -> bool:
    """Whether JSON data describes a space, perhaps with names."""
    try:
        return space_from_json(data) == space
    except SpaceError:  # another tool's key of this name
        return False


def units(space: Space, meta: Mapping[str, Any]) -> str:
    """The units of actions of ``space``, in words. Equal units have equal words."""
    if (outside := env_action_space(meta)) is not None and not is_space(outside, space):
        return f"as they were before connectors mapped them to {in_words(outside)}"
    return str(meta[ACTIONS]) if are_unsure(space, meta) else AS_THE_ENV_GOT


def before_mapping(space: Space) -> Space:
    """The space of actions that RLlib maps to the bounds of ``space``: from -1 to 1 (its ``normalize_actions``)."""

    def mapped(_: str, leaf: Space) -> Space:
        is_mapped = isinstance(leaf, Box) and leaf.dtype.kind == "f" and leaf.is_bounded()
        return Box(-1, 1, leaf.shape, leaf_dtype(leaf).type) if is_mapped else leaf

    return map_leaves(space, mapped, col.ACTION)


def in_words(outside: Any) -> str:
    """A space that is given as JSON data, or those of several modules by id."""
    try:
        found = [outside] if "type" in outside else list(outside.values())
        return " or ".join(dict.fromkeys(" ".join(str(space_from_json(one)).split()) for one in found))  # NumPy pads
    except (SpaceError, AttributeError, TypeError):  # another tool's key of this name
        return str(outside)
