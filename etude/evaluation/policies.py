# SPDX-License-Identifier: Apache-2.0
"""The two policies of an off-policy evaluation: the target policy, which is evaluated, and the behaviour policy, which
played the episodes."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.progress import gauge
from etude.algorithms.task import TaskModule
from etude.columns import Columns
from etude.connectors import Pipeline, RescaleAction
from etude.errors import ModuleError, SettingsError
from etude.evaluation.episodes import value_error
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.learners import ComputeConfig, Loss, ModuleLearner, seeded
from etude.learners.batch import PaddedSequences
from etude.modules import Module, Output, make_module
from etude.recordings.batches import Groups, RowPool, batches_of, rows_of
from etude.recordings.faults import impossible_logp
from etude.spaces import leaves

Floats: TypeAlias = NDArray[np.float64]
Chunks: TypeAlias = Callable[[], Iterator[Experience]]
"""Starts a pass over whole episodes, to which the target policy's connectors have been applied."""

FORWARD_ROWS: Final = 4_096
FORWARD_BYTES: Final = 16 * 2**20
"""The most rows, and bytes, that go through a module at a time."""
FORWARD_SEGMENTS: Final = 64
"""The most segments for a recurrent module, which are padded to the longest of them."""
BUFFER_BYTES: Final = 256 * 2**20
"""Size of the shuffle buffer in bytes. If all rows fit, they are kept in memory and shuffled as a whole."""
FIT_STEPS, FIT_BATCH_SIZE, FIT_LR = 2_000, 256, 1e-3


class TargetPolicy:
    """Computes what a module with its connectors would have done in recorded episodes.

    Args:
        module: The module.
        connectors: The connectors between env and module.
        explore: Whether the policy samples its actions; if False, it takes the most likely ones.
        of_env: Whether recorded actions, and their densities, are in the env's units; see `are_of_env`.

    Raises:
        SettingsError: a connector adds something to recordings that is only known after an episode has ended.
    """

    def __init__(self, module: Module, connectors: Pipeline, *, explore: bool, of_env: bool = False) -> None:
        if connectors.hindsight:
            raise SettingsError(
                "what this policy would have done is not known for recorded episodes: one of its connectors "
                f"({', '.join(c.name for c in connectors.connectors if c.hindsight)}) shows there what was known only "
                "after they had ended. Evaluate it by playing instead."
            )
        self.module = module
        self.explore = explore
        self._connectors = connectors
        self._of_env = of_env

    def connected(self, exp: Experience) -> Experience:
        """Apply the connectors to whole episodes; rewards stay as recorded."""
        exp = self._in_units_of_module(exp) if self._of_env else exp
        return self._connectors.offline(exp).with_steps(**{col.REWARD: exp.steps[col.REWARD]})

    def _in_units_of_module(self, exp: Experience) -> Experience:
        exp = exp.with_steps(**self._connectors.unact(col.subtree(exp.steps, col.ACTION)))
        logp = exp.steps.get(col.LOGP)
        if logp is None or not logp.any():  # 0 throughout: the actions were not sampled
            return exp
        scales = [one.log_scale for one in self._connectors.connectors if isinstance(one, RescaleAction)]
        return exp.with_steps(**{col.LOGP: logp.astype(np.float64) + sum(scales)})

    def check_density(self) -> None:
        """Raise a SettingsError if the policy has no probabilities of actions."""
        boxes = [n for n, leaf in leaves(self.module.action_space, col.ACTION).items() if isinstance(leaf, spaces.Box)]
        if boxes and not self.explore:
            raise SettingsError(
                f"the policy that takes its most likely `{boxes[0]}` has no density, which importance weights need: "
                "let it sample its actions (explore=True), or evaluate by dm and fqe only."
            )
        if isinstance(self.module, TaskModule):
            raise SettingsError(
                "a Task's own `act` gives no probabilities, which the importance weights need: evaluate by dm and fqe "
                "only."
            )

    def logp(self, episodes: Experience) -> Floats:
        """Return the log-probability of each recorded action, ``[num_steps]``; -inf if the policy never takes it.

        Raises:
            SettingsError: the policy is deterministic, so its actions have no density.
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
                "importance weights need. Evaluate by dm and fqe only."
            )
        if self.explore:
            return output.logp(self.module.action_from(action)).double().cpu().numpy()
        chosen = self.module.dist.act(output.dist_inputs.float().cpu().numpy(), None)
        same = np.ones(len(output.dist_inputs), bool)
        for name, column in action.items():
            same &= (chosen[name] == column.cpu().numpy()).reshape(len(same), -1).all(1)
        return np.where(same, 0.0, -np.inf)

    def _outputs(self, episodes: Experience) -> Iterator[tuple[NDArray[np.int64], Output]]:
        """Yield row indices, and the module's output for them ``[n, ...]``."""
        obs = col.subtree(episodes.steps, col.OBS)
        if not self.module.recurrent:
            yield from self._outputs_of_rows(obs)
            return
        order = np.argsort(-episodes.lengths, kind="stable")
        for first in range(0, len(order), FORWARD_SEGMENTS):
            which = order[first : first + FORWARD_SEGMENTS]
            rows = ranges(episodes.offsets[:-1][which], episodes.lengths[which])
            zeros = self.module.initial_state().items()
            state = {name: torch.zeros(len(which), *part.shape, device=self.module.device) for name, part in zeros}
            sequences = PaddedSequences(episodes.lengths[which], state, self.module.device)
            with torch.inference_mode():
                output = sequences.forward(self.module, self._tensors(obs, rows))
                self._check(output)
            yield rows, output

    def _outputs_of_rows(self, obs: Columns) -> Iterator[tuple[NDArray[np.int64], Output]]:
        """Yield the same for single observations."""
        for start, size in _slices(obs):
            rows = np.arange(start, start + size)
            with torch.inference_mode():
                output = self.module(self.module.obs_from(self._tensors(obs, rows)))
                self._check(output)
            yield rows, output

    def _check(self, output: Output) -> None:
        if output.dist_inputs is not None and bool(output.dist_inputs.isnan().any()):
            raise ModuleError(
                f"{type(self.module.net).__name__} gives NaN for recorded observations, so its actions have no "
                "probabilities: look for weights that became NaN in training, or observations that are not scaled."
            )

    def _tensors(self, columns: Columns, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        device = self.module.device
        return {name: torch.from_numpy(column.take(rows, axis=0)).to(device) for name, column in columns.items()}

    @property
    def has_choices(self) -> bool:
        """Whether actions are those of a Discrete space for which the network gives probabilities."""
        return isinstance(self.module.action_space, spaces.Discrete) and not isinstance(self.module, TaskModule)

    def choices(self, obs: Columns) -> NDArray[np.float32]:
        """Return the probability of each action of a Discrete space, float32 ``[rows, n]``.

        Raises:
            SettingsError: the network gives no probabilities.
        """
        space = self.module.action_space
        assert isinstance(space, spaces.Discrete)
        out = np.zeros((rows_of(obs), int(space.n)), np.float32)
        for rows, output in self._outputs_of_rows(obs):
            _, inputs = output.bound()
            if self.explore:
                with torch.inference_mode():
                    each = torch.arange(out.shape[1], device=inputs.device).expand(len(rows), -1).T + int(space.start)
                    logps = [self.module.dist.logp(inputs, {col.ACTION: action}) for action in each]
                    out[rows] = torch.stack(logps, 1).exp().float().cpu().numpy()
            else:
                best = self.module.dist.act(inputs.float().cpu().numpy(), None)[col.ACTION] - int(space.start)
                out[rows, best.astype(np.int64)] = 1.0
        return out

    def draws(self, obs: Columns, num: int, rng: np.random.Generator) -> list[Columns]:
        """Sample ``num`` actions for each observation; only one if the policy does not explore.

        Returns:
            The actions of each draw, columns ``[rows, ...]``.
        """
        actor, slices = self.module.actor(explore=self.explore), _slices(obs)
        found: list[Columns] = []
        for _ in range(num if self.explore else 1):
            actor.start(rng, slices[0][1])
            acted = [actor.step({n: c[start : start + size] for n, c in obs.items()})[0] for start, size in slices]
            found.append({name: np.concatenate([part[name] for part in acted]) for name in acted[0]})
        return found


def _slices(columns: Columns) -> list[tuple[int, int]]:
    """Starts and lengths of ranges of rows that may go through a module at a time."""
    num, row_bytes = rows_of(columns), sum(int(column[:1].nbytes) for column in columns.values())
    step = max(1, min(FORWARD_ROWS, FORWARD_BYTES // max(1, row_bytes)))
    return [(start, min(step, num - start)) for start in range(0, num, step)]


# -- the behaviour policy --------------------------------------------------------------------------------------------


def recorded_logp(episodes: Experience, action_space: spaces.Space[Any], where: str) -> Floats:
    """Return the recorded log-probabilities of the actions, ``[num_steps]``; ``where`` names the data in errors.

    Raises:
        DataError: one of them is not finite, or above 0 though the actions are discrete.
    """
    rows = impossible_logp(episodes, leaves(action_space, col.ACTION))
    if len(rows):
        remedy = (
            "an action that was taken has a finite log-probability, which is at most 0 if the actions are discrete. "
            "Correct it (probabilities of a table are mapped as `propensity`), leave the episode out, or let the "
            "policy be estimated (behaviour='fit')."
        )
        raise value_error(episodes, col.LOGP, int(rows[0]), where, remedy)
    logp: Floats = episodes.steps[col.LOGP].astype(np.float64)
    return logp


def fitted_behaviour(target: TargetPolicy, chunks: Chunks, seed: int, *, quiet: bool = True) -> TargetPolicy:
    """Fit a built-in network to the recorded actions by maximum likelihood.

    Fitting it to the same data that is weighted is not a problem; it improves the weights (Hanna, Niekum & Stone 2019,
    "Importance sampling policy evaluation with an estimated behavior policy").

    Args:
        target: The target policy; the network gets its spaces.
        chunks: The episodes.
        seed: Seed of the initial weights and the order of rows.
        quiet: Whether to hide the progress.
    """
    given = target.module
    with seeded(seed, "cpu"):
        module = make_module(None, given.obs_space, given.action_space, value=False).to(given.device)
    learner = ModuleLearner(
        module,
        lambda module, batch: Loss(imitation=-module(batch.obs).logp(batch.action).mean()),
        name="behaviour",
        lr=FIT_LR,
        compute=ComputeConfig(device=str(given.device)),
        seed=seed,
    )
    names = [*leaves(given.obs_space, col.OBS), *leaves(given.action_space, col.ACTION)]
    with gauge("fitting the behaviour policy", quiet=quiet) as show:

        def batches() -> Iterator[Columns]:
            passes = lambda: ({name: exp.steps[name] for name in names} for exp in chunks())  # noqa: E731
            for i, batch in enumerate(islice(shuffled_rows(passes, FIT_BATCH_SIZE, seed), FIT_STEPS)):
                yield batch
                show((i + 1) / FIT_STEPS)

        learner.update_from(batches())
    module.eval()
    return TargetPolicy(module, Pipeline(), explore=True)


def shuffled_rows(
    passes: Callable[[], Iterator[Columns]], batch_size: int, seed: int, buffer_bytes: int = BUFFER_BYTES
) -> Iterator[Columns]:
    """Iterate endlessly over batches of exactly ``batch_size`` rows in random order, each row once per pass.

    Args:
        passes: Starts a pass over the rows, chunk by chunk, always in the same order.
        batch_size: Rows per batch, at least 1.
        seed: Random seed; equal seeds give the same order.
        buffer_bytes: Approximate size of the buffer. If all rows fit, ``passes`` is called only once.
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
