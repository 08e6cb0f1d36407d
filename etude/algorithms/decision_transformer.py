# SPDX-License-Identifier: Apache-2.0
"""Decision Transformer (Chen et al. 2021, "Decision Transformer: reinforcement learning via sequence modeling", arXiv
2106.01345), learning from a recording."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude import columns as col
from etude.algorithms.config import EvaluationConfig, ModuleLike, OfflineConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.connectors import Connector, History, ReturnToGo
from etude.connectors.connector import PREV_ACTION, column, windows
from etude.connectors.history import ATTENTION_MASK, RETURN_TO_GO, T, one_step
from etude.errors import ModuleError
from etude.experience import Experience
from etude.learners import Batch, Loss, OptimizerConfig, Schedule
from etude.modules import Module, NetworkConfig, Output, make_module
from etude.modules.distributions import distribution_for
from etude.modules.network import ObsEncoder
from etude.settings import FloatAbove0, IntFrom1, Rule, check_rules, settings
from etude.spaces import Flattener, Space, leaf_shape, leaves, map_leaves

_WINDOW = f"window{col.SEPARATOR}"
"""Prefix of the columns with the actions of a window, ``[rows, k, ...]``."""

_BESIDE = (RETURN_TO_GO, PREV_ACTION, T, ATTENTION_MASK)
"""The parts of an observation that the connectors add to the env's."""

_NO_SUCH = "the built-in network is a transformer, which has a shape of its own"


@settings
class DecisionTransformerConfig(OfflineConfig):
    """Settings of Decision Transformer. The recording needs rewards, and each episode up to its end."""

    everyday: ClassVar[tuple[str, ...]] = ("context_length", "target_return")

    architecture_settings: ClassVar[tuple[str, ...]] = (
        *OfflineConfig.architecture_settings,
        *("embedding_size", "num_layers", "num_heads", "max_timestep"),
    )

    context_length: IntFrom1 = 20
    """Steps that the policy sees, the current one included, at least 1. Default: Chen et al. 2021 for locomotion."""

    target_return: float | None = None
    """Target return when acting, in units of reward; None: that of the best recorded episode. It can be changed when a
    run is loaded."""

    return_scale: FloatAbove0 | None = None
    """Divisor of returns before the network sees them, above 0; None: the largest magnitude of a recorded episode's
    return."""

    embedding_size: IntFrom1 = 128
    """Width of the transformer, at least 1, a multiple of `num_heads`. Default: Chen et al. 2021 for locomotion."""

    num_layers: IntFrom1 = 3
    """Layers of the transformer, at least 1. Default: Chen et al. 2021 for locomotion."""

    num_heads: IntFrom1 = 1
    """Attention heads of each layer, at least 1. Default: Chen et al. 2021 for locomotion."""

    dropout: Annotated[float, Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")] = 0.1
    """Dropout rate in training, at least 0 and below 1. Default: Chen et al. 2021."""

    max_timestep: IntFrom1 = 1000
    """Number of time steps with their own embedding, at least 1; later steps of an episode share the last one. Default:
    Chen et al. 2021, the longest episode of their tasks."""

    lr: Schedule = 1e-4
    """Learning rate of Adam, or a schedule: points of (gradient steps, rate) with straight lines between. Default: Chen
    et al. 2021, who warm up to it in the first 100,000 steps."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=0.25)
    """Settings of the optimizer. Default of `grad_clip`: Chen et al. 2021."""

    batch_size: int = 64
    """Windows of `context_length` steps in each batch, at least 1. Default: Chen et al. 2021."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    evaluation: EvaluationConfig = EvaluationConfig(interval=1)
    """Evaluations during training, if an `env` is given."""

    unused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("network.hidden", "network.activation", "network.separate", "network.weight_init"),
            *("network.log_std_init", "network.state_dependent_std", "network.recurrent", "network.recurrent_size"),
        ),
        _NO_SUCH,
    ) | dict.fromkeys(("sequences.max_len", "sequences.burn_in"), "it learns from windows of `context_length` steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self, embedding_size=(self.embedding_size % self.num_heads == 0, "a multiple of `num_heads`"))


class DecisionTransformer(OfflineAlgorithm[DecisionTransformerConfig]):
    """Imitates recorded actions given the return that followed them, and acts with a given target return."""

    name = "decision_transformer"

    def module_connectors(self) -> list[Any]:
        """The connectors that add the return to go and the last steps."""
        config = self.config
        return [ReturnToGo(config.target_return, config.return_scale), History(config.context_length)]

    def learner_connectors(self) -> list[Any]:
        """The connector that adds the actions of each window."""
        return [ActionWindows(self.config.context_length)]

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a module of a `ReturnTransformer`, or of the user's network."""
        make = given if given is not None else partial(ReturnTransformer, config=self.config)
        return make_module(make, obs_space, action_space, squash=bool(self.config.network.squash))

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The negative log-likelihood of the recorded actions, averaged over all steps of the windows.

        For a user's network, it is averaged over the last step of each window.
        """
        names = list(leaves(module.action_space, col.ACTION))
        if not isinstance(module.net, ReturnTransformer) or any(_WINDOW + name not in batch for name in names):
            return Loss(policy=-batch.forward(module).logp(batch.action).mean())
        inputs = module.net.dist_inputs(batch.obs).flatten(0, 1)
        action = {name: batch[_WINDOW + name].flatten(0, 1) for name in names}
        if module.mask is not None:
            inputs = module.mask.apply(inputs, batch[_WINDOW + col.OBS_MASK].flatten(0, 1))
        there = batch.obs[ATTENTION_MASK].flatten().float()
        return Loss(policy=-(module.dist.logp(inputs, action) * there).mean() / self.mean_over_learners(there))


class ActionWindows(Connector):
    """Adds the actions of the last ``k`` steps for the loss, the newest last: ``window/action...`` ``[rows, k, ...]``,
    and the action masks, if there are any: ``window/obs/action_mask``.

    Steps before the episode's first repeat its first action and mask.

    Args:
        k: Number of steps, at least 1.
    """

    needs = (col.ACTION,)

    def __init__(self, k: int) -> None:
        self.k = k
        self.context = k - 1

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Add the windows, within segments."""
        rows, starts = np.arange(exp.num_steps), exp.offsets[:-1].repeat(exp.lengths)
        names = [*col.under(exp.steps, col.ACTION), *col.under(exp.steps, col.OBS_MASK)]
        found = {n: column(exp, n, "ActionWindows") for n in names}
        return exp.with_steps(**{_WINDOW + n: windows(c, c, rows, starts, self.k) for n, c in found.items()})


class ReturnTransformer(nn.Module):
    """A causal transformer over the last steps, with three tokens each: previous action, return to go, observation.

    The output at an observation's token gives the action there. It attends to no later token, and to none before the
    episode. An embedding of the step's index in the episode is added to its tokens.

    Args:
        obs_space: The observation space that `History` returns, after `ReturnToGo`.
        action_space: The action space.
        config: The shape.

    Raises:
        ModuleError: the observations lack what these connectors add.
    """

    def __init__(self, obs_space: Space, action_space: Space, config: DecisionTransformerConfig) -> None:
        super().__init__()
        parts = dict(obs_space.spaces) if isinstance(obs_space, spaces.Dict) else {}
        if missing := [name for name in _BESIDE if name not in parts]:
            raise ModuleError(f"observations have no part `{missing[0]}`, which return_to_go and history give.")
        width, dist = config.embedding_size, distribution_for(action_space, squash=bool(config.network.squash))
        own = {name: part for name, part in parts.items() if name not in _BESIDE}
        one = map_leaves(spaces.Dict(list(own.items())), lambda name, leaf: one_step(leaf), col.OBS)
        self._flatten = Flattener(one, col.OBS)
        network: NetworkConfig = config.network
        self.encoder = ObsEncoder(one, network.conv, network.conv_width)
        self.observation = nn.Linear(self.encoder.width, width)
        self.action = nn.Linear(leaf_shape(parts[PREV_ACTION])[-1], width)
        self.return_to_go = nn.Linear(1, width)
        self.timestep = nn.Embedding(config.max_timestep, width)
        nn.init.normal_(self.timestep.weight, std=0.02)  # so that steps beyond all recorded episodes resemble others
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            width, config.num_heads, 4 * width, config.dropout, "relu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, dist.num_inputs)
        self.heads = config.num_heads

    def forward(self, obs: Any) -> Output:
        """The output at the newest step: ``dist_inputs`` ``[B, n]``."""
        return Output(self.dist_inputs(obs)[:, -1])

    def dist_inputs(self, obs: Any) -> Tensor:
        """The outputs at all steps, ``[B, k, n]``, for tensors ``[B, ...]`` nested as in the observation space."""
        there = obs[ATTENTION_MASK].bool()
        size, k = there.shape
        time = self.timestep(obs[T].clamp(max=self.timestep.num_embeddings - 1).long())
        encoded = self.encoder(self._flatten({name: part for name, part in obs.items() if name not in _BESIDE}))
        tokens = [self.action(obs[PREV_ACTION]), self.return_to_go(obs[RETURN_TO_GO]), self.observation(encoded)]
        x = torch.stack([token + time for token in tokens], 2).reshape(size, 3 * k, -1)
        x = self.layers(self.dropout(self.norm(x)), self._hidden(there))
        out: Tensor = self.head(x[:, 2::3])
        return out

    def _hidden(self, there: Tensor) -> Tensor:
        """Attention mask, bool ``[B * heads, 3k, 3k]``: True where a token must not attend (last axis). Each attends to
        itself."""
        length = 3 * there.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=there.device).triu(1)
        itself = torch.eye(length, dtype=torch.bool, device=there.device)
        hidden = (later | ~there.repeat_interleave(3, 1)[:, None]) & ~itself
        return hidden.repeat_interleave(self.heads, 0)
