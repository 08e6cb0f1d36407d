# SPDX-License-Identifier: Apache-2.0
"""Learner: one or many modules, each with its own loss and optimizers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar

from torch import nn

from etude.errors import DataError, EtudeError
from etude.experience import Experience
from etude.experience.arrays import Array
from etude.learners.module_learner import ModuleLearner
from etude.learners.optimizers import MakeOptimizer
from etude.learners.schedules import Schedule
from etude.learners.updates import Update, mean_of

T = TypeVar("T")

ModulesToTrain: TypeAlias = Collection[str] | Callable[[str, Any], bool]
"""Ids of modules; or a function ``(module_id, batch) -> bool``, where ``batch`` is what the module is to learn from."""


class Learner:
    """Trains one or many modules, by a `ModuleLearner` each. They share nothing: what one does never depends on others.

    Args:
        modules: The learner of each module, by the module's id.
        modules_to_train: Which of them are trained; None is all. Asked at every update.
    """

    def __init__(
        self, modules: Mapping[str, ModuleLearner] | None = None, *, modules_to_train: ModulesToTrain | None = None
    ) -> None:
        self.modules = dict(modules or {})
        self.modules_to_train = modules_to_train

    @property
    def only(self) -> ModuleLearner:
        """The learner of the only module.

        Raises:
            EtudeError: there are several, or none.
        """
        if len(self.modules) != 1:
            raise EtudeError(f"there are the modules {sorted(self.modules)}: say which, as learner.modules[name].")
        return next(iter(self.modules.values()))

    @property
    def updates(self) -> int:
        """Gradient steps over the lifetime, of all modules."""
        return sum(learner.updates for learner in self.modules.values())

    # -- modules ------------------------------------------------------------------------------------------------

    def add_module(self, module_id: str, learner: ModuleLearner) -> None:
        """Train a further module from now on.

        Raises:
            EtudeError: there is one of this id.
        """
        if module_id in self.modules:
            raise EtudeError(f"there is a module {module_id!r} already: remove it first, or choose another id.")
        self.modules[module_id] = learner

    def remove_module(self, module_id: str) -> ModuleLearner:
        """Train a module no more. What the others do stays the same, to the last bit.

        Raises:
            EtudeError: there is none of this id.
        """
        self._check([module_id])
        return self.modules.pop(module_id)

    def register_optimizer(
        self,
        module_id: str,
        name: str,
        optimizer: MakeOptimizer | None,
        params: Sequence[nn.Parameter],
        lr: Schedule,
    ) -> None:
        """Give some parameters of a module an optimizer; see `ModuleLearner.register_optimizer`."""
        self._check([module_id])
        self.modules[module_id].register_optimizer(name, optimizer, params, lr)

    def _check(self, module_ids: Iterable[str]) -> None:
        unknown = sorted(set(module_ids) - self.modules.keys())
        if unknown:
            raise EtudeError(f"there is no module {', '.join(map(repr, unknown))}: there are {sorted(self.modules)}.")

    # -- updates ------------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Set all learning rates to their schedules' values after ``env_steps`` over the lifetime of the run."""
        for learner in self.modules.values():
            learner.set_env_steps(env_steps)

    def chosen(self, parts: Mapping[str, T]) -> dict[str, T]:
        """What is to be trained on of ``parts``, by module.

        Raises:
            DataError: a part is of no module here.
            EtudeError: ``modules_to_train`` names one that is not here.
        """
        if not parts.keys() <= self.modules.keys():
            raise DataError(
                f"the batch is of the modules {sorted(parts)}, but the learner has {sorted(self.modules)}: let "
                "`module_of` name these, or add the others."
            )
        which = self.modules_to_train
        if which is None:
            return dict(parts)
        if callable(which):
            return {module_id: part for module_id, part in parts.items() if which(module_id, part)}
        self._check(which)
        return {module_id: part for module_id, part in parts.items() if module_id in which}

    def update(self, parts: Mapping[str, Experience], **how: Any) -> dict[str, Update]:
        """Update each module from its Experience; ``how`` is as for `ModuleLearner.update`.

        Raises:
            DataError: see `chosen`.
        """
        return {name: self.modules[name].update(exp, **how) for name, exp in self.chosen(parts).items()}

    def update_from(
        self, batches: Iterable[Mapping[str, Array] | Mapping[str, Mapping[str, Array]]], num_iters: int | None = None
    ) -> dict[str, Update]:
        """Update once from each batch: columns ``[B, ...]`` by module; or plain columns, where there is one module.

        Args:
            batches: Endless or not.
            num_iters: At most so many; None is all of them.

        Raises:
            DataError: see `chosen`.
            ModuleError: a module is recurrent, and such batches have no order in time.
        """
        given = iter(batches) if num_iters is None else islice(batches, num_iters)
        updates: dict[str, list[Update]] = {}
        for batch in given:
            if not all(isinstance(part, Mapping) for part in batch.values()):
                plain: Iterable[Any] = chain([batch], given)
                return {name: self.modules[name].update_from(plain) for name in self.chosen({self.only.name: batch})}
            parts: Mapping[str, Any] = batch
            for name, columns in self.chosen(parts).items():
                updates.setdefault(name, []).append(self.modules[name].update_from([columns]))
        return {name: mean_of(several) for name, several in updates.items()}

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of each module; see `ModuleLearner.state_dict`."""
        return {module_id: learner.state_dict() for module_id, learner in self.modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._check(state)
        for module_id, own in state.items():
            self.modules[module_id].load_state_dict(own)
