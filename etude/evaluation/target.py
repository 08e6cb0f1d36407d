# SPDX-License-Identifier: Apache-2.0
"""The policy that is evaluated: what a module, behind its connectors, would have done in recorded episodes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.task_module import TaskModule
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.errors import SettingsError
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.modules import Module, Output
from etude.recordings.pieces import row_bytes
from etude.spaces import leaves

Floats = NDArray[np.float32]

FORWARD_ROWS = 4_096
FORWARD_BYTES = 16 * 2**20
"""As much goes through a module at once."""
FORWARD_SEGMENTS = 64
"""Through a recurrent one, whose segments are padded to the longest of these."""


class Target:
    """A module's policy.

    Args:
        module: What acts.
        connectors: What stands between env and module.
        explore: It draws its actions; else it takes the most likely ones.
    """

    def __init__(self, module: Module, connectors: Pipeline, *, explore: bool) -> None:
        self.module = module
        self.explore = explore
        self._connectors = connectors

    def seen(self, exp: Experience) -> Experience:
        """What the module sees of whole episodes; rewards stay as they were recorded."""
        return self._connectors.offline(exp).with_steps(**{col.REWARD: exp.steps[col.REWARD]})

    def check_density(self) -> None:
        """Raise a SettingsError where no probability of an action is known."""
        boxes = [n for n, leaf in leaves(self.module.action_space, col.ACTION).items() if isinstance(leaf, spaces.Box)]
        if boxes and not self.explore:
            raise SettingsError(
                f"the policy that takes its most likely `{boxes[0]}` has no density, which importance weights need: "
                "let it draw its actions (explore=True), or evaluate by dm and fqe alone."
            )
        if isinstance(self.module, TaskModule):
            raise SettingsError(
                "a Task's own `act` says no probabilities, which the importance weights need: evaluate by dm and fqe "
                "alone."
            )

    def logp(self, seen: Experience) -> NDArray[np.float64]:
        """``[num_steps]``: the log-probability of each recorded action; -inf where the policy never takes it.

        Raises:
            SettingsError: the policy is deterministic, and its actions have no density.
        """
        out = np.empty(seen.num_steps)
        for rows, output, action in self._outputs(seen):
            out[rows] = self._logp_of(output, action)
        return out

    def _logp_of(self, output: Output, action: dict[str, torch.Tensor]) -> NDArray[np.float64]:
        if output.dist_inputs is None:
            raise SettingsError(
                f"{type(self.module.net).__name__} is deterministic: its actions have no probabilities, which the "
                "importance weights need. Evaluate by dm and fqe alone."
            )
        if self.explore:
            return output.logp(self.module.action_from(action)).double().cpu().numpy()
        chosen = self.module.dist.act(output.dist_inputs.float().cpu().numpy(), None)
        same = np.ones(len(output.dist_inputs), bool)
        for name, column in action.items():
            same &= (chosen[name] == column.cpu().numpy()).reshape(len(same), -1).all(1)
        return np.where(same, 0.0, -np.inf)

    def _outputs(self, seen: Experience) -> Iterator[tuple[NDArray[np.int64], Output, dict[str, torch.Tensor]]]:
        """Rows, what the module says of them ``[n, ...]``, and the actions taken there."""
        obs, action = col.subtree(seen.steps, col.OBS), col.subtree(seen.steps, col.ACTION)
        if self.module.recurrent:
            yield from self._over_time(seen, obs, action)
            return
        for start, size in _parts(seen):
            rows = np.arange(start, start + size)
            with torch.inference_mode():
                output = self.module(self.module.obs_from(self._tensors(obs, rows)))
            yield rows, output, self._tensors(action, rows)

    def _over_time(self, seen: Experience, obs: Columns, action: Columns) -> Iterator[Any]:
        order = np.argsort(-seen.lengths, kind="stable")
        for first in range(0, len(order), FORWARD_SEGMENTS):
            which = order[first : first + FORWARD_SEGMENTS]
            lengths, starts = seen.lengths[which], seen.offsets[:-1][which]
            steps = np.arange(int(lengths.max()))
            padded = (starts[:, None] + np.minimum(steps, lengths[:, None] - 1)).reshape(-1)
            valid = np.flatnonzero((steps < lengths[:, None]).reshape(-1))
            shape = (len(which), len(steps))
            with torch.inference_mode():
                columns = {n: c.reshape(*shape, *c.shape[1:]) for n, c in self._tensors(obs, padded).items()}
                output = self.module(self.module.obs_from(columns))
                if output.dist_inputs is not None:
                    output.dist_inputs = output.dist_inputs.reshape(len(padded), -1)[torch.from_numpy(valid)]
            rows = ranges(starts, lengths)
            yield rows, output, self._tensors(action, rows)

    def _tensors(self, columns: Columns, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        device = self.module.device
        return {name: torch.from_numpy(column.take(rows, axis=0)).to(device) for name, column in columns.items()}

    # -- what it would do --------------------------------------------------------------------------------------

    def choices(self, obs: Columns) -> Floats:
        """float32 ``[rows, n]``: the probability of each action of a Discrete space.

        Raises:
            SettingsError: the net says none.
        """
        space = self.module.action_space
        assert isinstance(space, spaces.Discrete)
        num, n = len(next(iter(obs.values()))), int(space.n)
        out = np.zeros((num, n), np.float32)
        for start, size in _parts_of(obs):
            rows = np.arange(start, start + size)
            with torch.inference_mode():
                _, inputs = self.module(self.module.obs_from(self._tensors(obs, rows))).bound()
                if self.explore:
                    all_of_them = torch.arange(n, device=inputs.device).expand(size, n).T + int(space.start)
                    logps = [self.module.dist.logp(inputs, {col.ACTION: a}) for a in all_of_them]
                    out[rows] = torch.stack(logps, 1).exp().float().cpu().numpy()
                    continue
            best = self.module.dist.act(inputs.float().cpu().numpy(), None)[col.ACTION] - int(space.start)
            out[rows, best.astype(np.int64)] = 1.0
        return out

    def draws(self, obs: Columns, num: int, rng: np.random.Generator) -> list[Columns]:
        """``num`` actions for each observation: columns ``[rows, ...]``; one, where it does not explore."""
        actor, parts = self.module.actor(explore=self.explore), _parts_of(obs)
        found: list[Columns] = []
        for _ in range(num if self.explore else 1):
            actor.start(rng, parts[0][1])
            acted = [actor.step({n: c[start : start + size] for n, c in obs.items()})[0] for start, size in parts]
            found.append({name: np.concatenate([part[name] for part in acted]) for name in acted[0]})
        return found

    @property
    def has_choices(self) -> bool:
        """Whether actions are those of a Discrete space, whose probabilities the net says."""
        return isinstance(self.module.action_space, spaces.Discrete) and not isinstance(self.module, TaskModule)


def _parts(exp: Experience) -> list[tuple[int, int]]:
    return _sliced(exp.num_steps, row_bytes(exp))


def _parts_of(columns: Columns) -> list[tuple[int, int]]:
    size = sum(int(column[:1].nbytes) for column in columns.values())
    return _sliced(len(next(iter(columns.values()))), max(1, size))


def _sliced(num: int, size: int) -> list[tuple[int, int]]:
    """Starts and lengths of as many rows as may go through a module at once."""
    step = max(1, min(FORWARD_ROWS, FORWARD_BYTES // size))
    return [(start, min(step, num - start)) for start in range(0, num, step)]
