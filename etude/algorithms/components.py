# SPDX-License-Identifier: Apache-2.0
"""Components: the named parts of an algorithm's state."""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from etude.errors import CheckpointError, EtudeError
from etude.learners import ModuleLearner
from etude.modules.module import load_weights
from etude.policies import Policy

if TYPE_CHECKING:
    from etude.algorithms.base import Algorithm

MODULES: Final = "modules/"
"""What the names of components begin with that hold weights."""

_COUNTERS = ("iteration", "env_steps", "agent_steps", "episodes", "faulty_episodes", "seconds")

Names: TypeAlias = str | Collection[str] | None
"""A component such as ``modules/p1``, or what several begin with, such as ``modules``; or some of these."""


class Component(NamedTuple):
    """A part of the state: how it is had, as plain data, arrays and tensors that nothing else holds, and put back."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def components_of(name: str, policy: Policy, learner: ModuleLearner) -> dict[str, Component]:
    """Those of one module, called ``name``.

    ``modules/NAME``: ``weights``, and their ``seq_no``: the gradient steps that this run had made with them (for
    `Runner.take_weights`; whoever takes the weights goes on with a count of its own). ``optimizers/NAME``: of each
    optimizer. ``learners/NAME``: counts of gradient steps, and the random stream. ``connectors/NAME``: what those to
    the ``env`` and those of the ``learner`` have learned.
    """

    def connectors() -> dict[str, Any]:
        return {"env": policy.connectors.state_dict(), "learner": learner.connectors.state_dict()}

    def set_connectors(state: Mapping[str, Any]) -> None:
        if state["env"] is not None:  # version 1 has none where a recording was not opened yet
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


def shared_components(algorithm: "Algorithm[Any]") -> dict[str, Component]:
    """Those that every algorithm has: of its modules, of what it records, its counts and its figures."""
    own = [components_of(name, algorithm.policies[name], own) for name, own in algorithm.learner.modules.items()]
    recorder, figures = algorithm.recorder, algorithm.figures

    def set_counters(counters: Mapping[str, Any]) -> None:
        found = {name: counters[name] for name in _COUNTERS}
        found = {name: (float if name == "seconds" else operator.index)(value) for name, value in found.items()}
        for name, value in found.items():
            setattr(algorithm, name, value)

    recorded = Component(
        lambda: recorder.state_dict(algorithm), lambda state: recorder.load_state_dict(algorithm, state)
    )
    return {name: component for parts in own for name, component in parts.items()} | {
        **({"recorder": recorded} if recorder.is_on else {}),
        "counters": Component(lambda: {name: getattr(algorithm, name) for name in _COUNTERS}, set_counters),
        "figures": Component(figures.state_dict, figures.load_state_dict),
    }


def chosen(there: Iterable[str], components: Names = None, not_components: Names = None) -> list[str]:
    """Those of the components ``there`` that ``components`` names (None: all) and ``not_components`` does not.

    Raises:
        CheckpointError: one of the names is none of these, and none of them begins with it.
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
    """Put those components back that ``state`` has.

    Raises:
        CheckpointError: ``state`` has one that is not here (before anything is changed), or does not fit what is here.
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
