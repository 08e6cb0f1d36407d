# SPDX-License-Identifier: Apache-2.0
"""TaskModule: a user's net, which acts and learns by the methods of a `Task`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude.columns import ACTION, Columns
from etude.errors import ModuleError
from etude.learners import seeded
from etude.modules import Actor, Module
from etude.modules.acting import as_tensor
from etude.spaces import Flattener, leaf_dtype, leaf_shape

if TYPE_CHECKING:
    from etude.algorithms.task import Task


class TaskModule(Module):
    """A net that a `Task` lets act by its `act`, and trains by its `forward` and `loss`.

    Args:
        made: The net with its spaces. What it returns, and whether it has a memory, is for the task to know.
        task: Whose it is.
    """

    def __init__(self, made: Module, task: "Task[Any]") -> None:
        super().__init__(made.net, made.obs_space, made.action_space, made.dist)
        self._state = {}
        self.mask = None
        self._task = task

    @property
    def own_loss(self) -> Callable[[Module, Any], Any] | None:
        """The task's, unless the net brings one along."""
        return super().own_loss or self._task.loss_of

    def actor(self, *, explore: bool) -> Actor:
        """The task's `act`, ``optimal`` where it does not explore."""
        return TaskActor(self, self._task, optimal=not explore)


class TaskActor:
    """Acts by `Task.act`. What that draws from torch's random stream depends on the runner's seed alone."""

    def __init__(self, module: TaskModule, task: "Task[Any]", *, optimal: bool) -> None:
        self._module = module
        self._task = task
        self._optimal = optimal
        self._flatten = Flattener(module.action_space, ACTION)
        self._device = module.device
        self._rng = np.random.default_rng(0)

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._rng, self._device = rng, self._module.device

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; nothing but the action is recorded.

        Raises:
            ModuleError: what `act` returned does not fit the action space.
        """
        num = len(next(iter(obs.values())))
        with torch.inference_mode(), seeded(int(self._rng.integers(2**63)), self._device):
            tensors = {name: as_tensor(column).to(self._device) for name, column in obs.items()}
            tensors = {name: c.float() if c.dtype == torch.float64 else c for name, c in tensors.items()}
            action = self._task.act(self._module.net, self._module.obs_from(tensors), self._optimal)
            return self._columns(action, num), {}

    def _columns(self, action: Any, num: int) -> Columns:
        try:
            found = self._flatten(action)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._misfit(f"is a {type(action).__name__} without {error}") from None
        return {name: self._column(name, value, num) for name, value in found.items()}

    def _column(self, name: str, value: Any, num: int) -> NDArray[Any]:
        leaf = self._flatten.leaves[name]
        shape, dtype = (num, *leaf_shape(leaf)), leaf_dtype(leaf)
        if not isinstance(value, torch.Tensor):
            raise self._misfit(f"has a {type(value).__name__} as `{name}`: it must be a tensor")
        if tuple(value.shape) != shape:
            raise self._misfit(f"has shape {tuple(value.shape)} as `{name}` for {num} observations: it must be {shape}")
        array: NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise self._misfit(f"has dtype {array.dtype} as `{name}`: it must be {dtype}")
        return array.astype(dtype, copy=False)

    def _misfit(self, what: str) -> ModuleError:
        return ModuleError(
            f"the action that {type(self._task).__name__}.act returned {what}. The action space is "
            f"{self._module.action_space}: return tensors, nested as it is, with a row for each observation."
        )

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`: the probabilities of what `act` does are its own."""
        return None
