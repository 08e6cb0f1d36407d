# SPDX-License-Identifier: Apache-2.0
"""The two policies of an off-policy evaluation: the target policy, which is evaluated, and the behaviour policy, which
played."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.task import TaskModule
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.errors import SettingsError
from etude.evaluation.episodes import check_column_finite
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.learners import Loss, ModuleLearner, seeded
from etude.learners.batch import PaddedSequences
from etude.modules import Module, Output, make_module
from etude.recordings.batches import Groups, RowPool, batches_of, rows_of
from etude.spaces import leaves

Floats: TypeAlias = NDArray[np.float64]
Chunks: TypeAlias = Callable[[], Iterator[Experience]]
"""Makes one pass over whole episodes, as the target policy's module sees them."""

FORWARD_ROWS: Final = 4_096
FORWARD_BYTES: Final = 16 * 2**20
"""As much goes through a module at once."""
FORWARD_SEGMENTS: Final = 64
"""Through a recurrent one, whose segments are padded to the longest of these."""
BUFFER_BYTES: Final = 256 * 2**20
"""Rows that take more than this together are shuffled within as much; others are kept, and shuffled whole."""
FIT_STEPS, FIT_BATCH_SIZE, FIT_LR = 2_000, 256, 1e-3


class TargetPolicy:
    """What a module, behind its connectors, would have done in recorded episodes.

    Args:
        module: What acts.
        connectors: What stands between env and module.
        explore: It draws its actions; else it takes the most likely ones.

    Raises:
        SettingsError: a connector shows something else in recordings than while acting.
    """

    def __init__(self, module: Module, connectors: Pipeline, *, explore: bool) -> None:
        if connectors.hindsight:
            raise SettingsError(
                "what this policy would have done can't be said of recorded episodes: one of its connectors "
                f"({', '.join(c.name for c in connectors.connectors if c.hindsight)}) shows there what was known only "
                "when they had ended. Let it play instead."
            )
        self.module = module
        self.explore = explore
        self._connectors = connectors

    def connected(self, exp: Experience) -> Experience:
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

    def logp(self, episodes: Experience) -> Floats:
        """``[num_steps]``: the log-probability of each recorded action; -inf where the policy never takes it.

        Raises:
            SettingsError: the policy is deterministic, and its actions have no density.
        """
        out = np.empty(episodes.num_steps)
        action = col.subtree(episodes.steps, col.ACTION)
        for rows, output in self._outputs(episodes):
            out[rows] = self._logp_of(output, self._tensors(action, rows))
        return out

    def _logp_of(self, output: Output, action: dict[str, torch.Tensor]) -> Floats:
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

    def _outputs(self, episodes: Experience) -> Iterator[tuple[NDArray[np.int64], Output]]:
        """Rows, and what the module says of them ``[n, ...]``."""
        obs = col.subtree(episodes.steps, col.OBS)
        if not self.module.recurrent:
            for start, size in _slices(obs):
                rows = np.arange(start, start + size)
                with torch.inference_mode():
                    output = self.module(self.module.obs_from(self._tensors(obs, rows)))
                yield rows, output
            return
        order = np.argsort(-episodes.lengths, kind="stable")
        for first in range(0, len(order), FORWARD_SEGMENTS):
            which = order[first : first + FORWARD_SEGMENTS]
            rows = ranges(episodes.offsets[:-1][which], episodes.lengths[which])
            zeros = self.module.initial_state().items()
            state = {name: torch.zeros(len(which), *part.shape, device=self.module.device) for name, part in zeros}
            sequences = PaddedSequences(episodes.lengths[which], state, self.module.device)
            with torch.inference_mode():
                yield rows, sequences.forward(self.module, self._tensors(obs, rows))

    def _tensors(self, columns: Columns, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        device = self.module.device
        return {name: torch.from_numpy(column.take(rows, axis=0)).to(device) for name, column in columns.items()}

    @property
    def has_choices(self) -> bool:
        """Whether actions are those of a Discrete space, whose probabilities the net says."""
        return isinstance(self.module.action_space, spaces.Discrete) and not isinstance(self.module, TaskModule)

    def choices(self, obs: Columns) -> NDArray[np.float32]:
        """float32 ``[rows, n]``: the probability of each action of a Discrete space.

        Raises:
            SettingsError: the net says none.
        """
        space = self.module.action_space
        assert isinstance(space, spaces.Discrete)
        out = np.zeros((rows_of(obs), int(space.n)), np.float32)
        for start, size in _slices(obs):
            rows = np.arange(start, start + size)
            with torch.inference_mode():
                _, inputs = self.module(self.module.obs_from(self._tensors(obs, rows))).bound()
                if self.explore:
                    each = torch.arange(out.shape[1], device=inputs.device).expand(size, -1).T + int(space.start)
                    logps = [self.module.dist.logp(inputs, {col.ACTION: action}) for action in each]
                    out[rows] = torch.stack(logps, 1).exp().float().cpu().numpy()
                    continue
            best = self.module.dist.act(inputs.float().cpu().numpy(), None)[col.ACTION] - int(space.start)
            out[rows, best.astype(np.int64)] = 1.0
        return out

    def draws(self, obs: Columns, num: int, rng: np.random.Generator) -> list[Columns]:
        """``num`` actions for each observation: columns ``[rows, ...]``; one, where it does not explore."""
        actor, slices = self.module.actor(explore=self.explore), _slices(obs)
        found: list[Columns] = []
        for _ in range(num if self.explore else 1):
            actor.start(rng, slices[0][1])
            acted = [actor.step({n: c[start : start + size] for n, c in obs.items()})[0] for start, size in slices]
            found.append({name: np.concatenate([part[name] for part in acted]) for name in acted[0]})
        return found


def _slices(columns: Columns) -> list[tuple[int, int]]:
    """Starts and lengths of as many rows as may go through a module at once."""
    num, row_bytes = rows_of(columns), sum(int(column[:1].nbytes) for column in columns.values())
    step = max(1, min(FORWARD_ROWS, FORWARD_BYTES // max(1, row_bytes)))
    return [(start, min(step, num - start)) for start in range(0, num, step)]


# -- the behaviour policy --------------------------------------------------------------------------------------------


def recorded_logp(episodes: Experience, where: str) -> Floats:
    """``[num_steps]``: the log-probabilities of the actions as they were recorded in ``where``.

    Raises:
        DataError: one of them is not finite.
    """
    remedy = (
        "an action that was taken has a finite log-probability. Mend it, leave the episode out, or let the policy be "
        "estimated (behaviour='fit')."
    )
    check_column_finite(episodes, col.LOGP, where, remedy)
    logp: Floats = episodes.steps[col.LOGP].astype(np.float64)
    return logp


def fitted_behaviour(target: TargetPolicy, chunks: Chunks, seed: int) -> TargetPolicy:
    """A network of the built-in kind, fitted to the recorded actions by maximum likelihood.

    To fit it to the very data that is weighed is no fault, but makes the weights better (Hanna, Niekum & Stone 2019,
    "Importance sampling policy evaluation with an estimated behavior policy").

    Args:
        target: Whose observations and actions it sees.
        chunks: The episodes.
        seed: Of weights and order.
    """
    given = target.module
    with seeded(seed, "cpu"):
        module = make_module(None, given.obs_space, given.action_space, value=False).to(given.device)
    learner = ModuleLearner(
        module,
        lambda module, batch: Loss(imitation=-module(batch.obs).logp(batch.action).mean()),
        name="behaviour",
        lr=FIT_LR,
        device=given.device,
        seed=seed,
    )
    names = [*leaves(given.obs_space, col.OBS), *leaves(given.action_space, col.ACTION)]
    batches = shuffled_rows(
        lambda: ({name: exp.steps[name] for name in names} for exp in chunks()), FIT_BATCH_SIZE, seed
    )
    learner.update_from(islice(batches, FIT_STEPS))
    module.eval()
    return TargetPolicy(module, Pipeline(), explore=True)


def shuffled_rows(
    passes: Callable[[], Iterator[Columns]], batch_size: int, seed: int, buffer_bytes: int = BUFFER_BYTES
) -> Iterator[Columns]:
    """Endless batches of exactly ``batch_size`` rows in random order, each row once a pass.

    Args:
        passes: Makes one pass over the rows, chunk by chunk, always in the same order.
        batch_size: Rows in a batch, at least 1.
        seed: The order depends on this alone.
        buffer_bytes: About as much is held in memory. Rows that fit in are made once.
    """
    held: list[Any] = []
    size = 0
    for chunk in passes():
        held.append(chunk)
        size += sum(column.nbytes for column in chunk.values())
        if size > buffer_bytes:
            break
    rows = sum(map(rows_of, held))
    if size > buffer_bytes:
        held.clear()
        groups = Groups(lambda _: passes(), 1, rows + 1, lambda: 0)
    else:
        groups = Groups(lambda _: (held.pop(0) for _ in range(len(held))), 1, rows, lambda: 0)
    return batches_of(groups, RowPool, batch_size, buffer_size=rows, seed=seed)
