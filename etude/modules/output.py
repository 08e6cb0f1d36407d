# SPDX-License-Identifier: Apache-2.0
"""What a module's forward returns."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from etude.errors import ModuleError
from etude.modules.distributions import Distribution


@dataclass(slots=True)
class Output:
    """What a module says about a batch of observations: all of it optional, so that a critic or a policy alone fits."""

    dist_inputs: Tensor | None = None
    """``[B, dist.num_inputs]`` (``[B, T, ...]`` where recurrent): logits, or means and log standard deviations."""
    value: Tensor | None = None
    """``[B]``: the expected return; a net may give ``[B, 1]``."""
    state: dict[str, Tensor] | None = None
    """What a recurrent module carries to the next step, each ``[B, ...]``."""
    dist: Distribution | None = None
    """What `dist_inputs` parameterise; bound by `Module.forward`."""

    def logp(self, action: Any) -> Tensor:
        """``[B]``: the log-probability of actions, tensors nested as in the action space."""
        dist, inputs = self.bound()
        return dist.logp(inputs, dist.flatten(action))

    def entropy(self) -> Tensor:
        """``[B]``: the entropy of the action distribution."""
        dist, inputs = self.bound()
        return dist.entropy(inputs)

    def kl(self, other_dist_inputs: Tensor) -> Tensor:
        """``[B]``: KL(other || self); for the other's inputs as recorded, from the behaviour to the current policy."""
        dist, inputs = self.bound()
        return dist.kl(other_dist_inputs, inputs)

    def needed_value(self, net: nn.Module) -> Tensor:
        """The value.

        Raises:
            ModuleError: ``net``, whose output this is, gives none.
        """
        if self.value is None:
            raise ModuleError(
                f"{type(net).__name__} gives no values, which are needed here: return Output(value=...) from its "
                "forward."
            )
        return self.value

    def bound(self) -> tuple[Distribution, Tensor]:
        """The distribution and its inputs.

        Raises:
            ModuleError: one of them is missing.
        """
        if self.dist_inputs is None:
            raise ModuleError(
                "the module's forward gave no `dist_inputs`, so its actions have no probabilities: return "
                "Output(dist_inputs=...) from forward."
            )
        if self.dist is None:
            raise ModuleError(
                "this Output has no distribution: it came straight from a net. Wrap the net by `make_module`, and call "
                "the Module."
            )
        return self.dist, self.dist_inputs
