# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of algorithms: the named components of the state, and how they are written and read."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from etude.checkpoints import Where, load_meta, load_tree, save_tree
from etude.checkpoints.codec import Encoder
from etude.errors import CheckpointError, EtudeError
from etude.learners import ModuleLearner
from etude.modules.module import load_weights
from etude.policies import Policy
from etude.urls import redacted

MODULES: Final = "modules/"
"""Prefix of components that hold weights."""

Names: TypeAlias = str | Collection[str] | None
"""A component such as ``modules/p1``, a prefix of several such as ``modules``, or a collection of these."""


class Component(NamedTuple):
    """A part of the state: ``get`` returns it as plain data, arrays and tensors that nothing else holds; ``set``
    restores it."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def components_of(name: str, policy: Policy, learner: ModuleLearner) -> dict[str, Component]:
    """The components of the module called ``name``.

    ``modules/NAME``: ``weights``, and their ``seq_no``, the number of gradient steps that this run had made (for
    `Runner.take_weights`; a run that loads only the weights keeps its own count). ``optimizers/NAME``: the state of
    each optimizer. ``learners/NAME``: counts of gradient steps, and the random stream. ``connectors/NAME``: what the
    connectors to the ``env`` and those of the ``learner`` have learned.
    """

    def connectors() -> dict[str, Any]:
        return {"env": policy.connectors.state_dict(), "learner": learner.connectors.state_dict()}

    def set_connectors(state: Mapping[str, Any]) -> None:
        if state["env"] is not None:  # version 1 has None if the recording had not been opened
            policy.connectors.load_state_dict(state["env"])
        learner.connectors.load_state_dict(state["learner"])

    return {
        f"{MODULES}{name}": Component(
            lambda: {"weights": _weights(learner), "seq_no": learner.updates},
            lambda state: load_weights(learner.module, state["weights"]),
        ),
        f"optimizers/{name}": Component(
            lambda: {name: optimizer.state_dict() for name, optimizer in learner.optimizers.items()},
            lambda state: _set_optimizers(learner, state),
        ),
        f"learners/{name}": Component(
            lambda: {key: value for key, value in learner.state_dict().items() if key not in ("module", "optimizers")},
            lambda state: learner.load_state_dict({**learner.state_dict(), **state}),
        ),
        f"connectors/{name}": Component(connectors, set_connectors),
    }


def chosen(there: Iterable[str], components: Names = None, not_components: Names = None) -> list[str]:
    """The components in ``there`` that ``components`` names (None: all) and ``not_components`` does not.

    Raises:
        CheckpointError: a name is neither a component nor a prefix of one.
    """
    names = list(there)

    def meant(given: Names) -> set[str]:
        found: set[str] = set()
        for wanted in [given] if isinstance(given, str) else given or ():
            some = {name for name in names if f"{name}/".startswith(f"{wanted.rstrip('/')}/")}
            if not some:
                raise CheckpointError(f"there is no component `{wanted}`: there are {', '.join(names)}.")
            found |= some
        return found

    kept = set(names) if components is None else meant(components)
    kept -= meant(not_components)
    return [name for name in names if name in kept]


def put_back(parts: Mapping[str, Component], state: Mapping[str, Any]) -> None:
    """Restore the components in ``state``.

    Raises:
        CheckpointError: ``state`` has a component that does not exist here (raised before any change) or does not fit.
    """
    unknown = [name for name in state if name not in parts]
    if unknown:
        raise CheckpointError(
            f"the state has the components {', '.join(unknown)}, which are not here; here are {', '.join(parts)}. "
            "Choose with components=... or not_components=..., or use an algorithm with the same modules."
        )
    for name, component in parts.items():
        if name in state:
            try:
                component.set(state[name])
            except KeyError as error:
                raise CheckpointError(
                    f"the component `{name}` of the state holds no {error}: it was saved by another version of "
                    "Etude, or with other settings."
                ) from error
            except EtudeError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"the component `{name}` of the state does not fit ({type(error).__name__}: {error}): it is "
                    "broken, or was saved by another version of Etude or with other settings."
                ) from error


def _weights(learner: ModuleLearner) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in learner.module.state_dict().items()}


def _set_optimizers(learner: ModuleLearner, state: Mapping[str, Any]) -> None:
    for name, optimizer in learner.optimizers.items():
        try:
            optimizer.load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the state of optimizer `{name}` is of other parameters or of another optimizer: the checkpoint is of "
                f"another module ({str(error).splitlines()[0]})."
            ) from error


_log = logging.getLogger("etude.algorithms")


def write_components(
    path: Where, parts: Mapping[str, Component], meta: Mapping[str, Any], told: Mapping[str, str]
) -> dict[str, BaseException]:
    """Write a checkpoint of these components, and return the errors of those that can't be saved and are left out.

    Args:
        path: Its folder or URL.
        parts: The components.
        meta: Metadata to store with them. Its ``left_out`` is set to the components left out and why.
        told: Components left out of the previous checkpoint and why; these are not warned about again.

    Raises:
        Exception: weights can't be read.
        CheckpointError: the folder can't be written.
    """
    state, failures = _savable(parts)
    left_out = {name: reason_of(error) for name, error in failures.items()}
    save_tree(path, state, meta={**meta, "left_out": left_out})
    for name, reason in left_out.items():
        if told.get(name) != reason:
            _log.warning("The checkpoint %s was saved without `%s`: %s", redacted(os.fspath(path)), name, reason)
    return failures


def _savable(parts: Mapping[str, Component]) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """The components, and the errors of those that can't be saved; errors of weights are raised."""
    kept: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}
    for name, component in parts.items():
        try:
            part = component.get()
            if name == "runner":
                failures |= _take_out_callbacks(part)
            if (error := _refusal(part)) and name == "runner" and part.get("arena") and _refusal(part["arena"]):
                part["arena"] = {"how": "new episodes", "why": reason_of(error)}
                error = _refusal(part)
            if error:
                raise error
            kept[name] = part
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a user's code, which may raise anything: everything else is still saved
            if name.startswith(MODULES):
                raise
            failures[name] = error
    return kept, failures


def _take_out_callbacks(runner: dict[str, Any]) -> dict[str, BaseException]:
    """Remove callbacks whose state can't be saved from the runner's state; return the errors by callback."""
    called = runner.get("callbacks")
    if not called:
        return {}
    failures: dict[str, BaseException] = {name: CheckpointError(why) for name, why in called.pop("left_out").items()}
    failures |= {name: error for name, state in called["callbacks"] if (error := _refusal(state))}
    called["callbacks"] = [pair for pair in called["callbacks"] if pair[0] not in failures]
    return {f"callbacks/{name}": error for name, error in failures.items()}


def _refusal(part: Any) -> BaseException | None:
    """Why a part can't be saved; None if it can."""
    try:
        Encoder().encode(part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a CheckpointError, or one of the part's own
        return error
    return None


def reason_of(error: BaseException) -> str:
    """The reason why something can't be saved, as text."""
    return str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"


def read_components(path: Where, components: Names, not_components: Names) -> tuple[dict[str, Any], dict[str, Any]]:
    """Components of a checkpoint, and the settings that it was saved with, as plain data.

    Raises:
        CheckpointError: the folder is not an algorithm's checkpoint, is broken, or has no such components.
    """
    meta = load_meta(path)
    if not (isinstance(meta, dict) and "algorithm" in meta and isinstance(meta.get("config"), dict)):
        raise CheckpointError(f"{redacted(os.fspath(path))} is a checkpoint, but not of an algorithm.")
    state, _ = load_tree(path, lambda there: chosen(there, components, not_components))
    if not isinstance(state, dict):
        raise CheckpointError(f"{redacted(os.fspath(path))} is a checkpoint, but not of an algorithm.")
    return state, meta["config"]
