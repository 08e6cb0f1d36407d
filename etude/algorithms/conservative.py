# SPDX-License-Identifier: Apache-2.0
"""How much all actions of a Box are worth together, estimated from drawn ones."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from etude.algorithms.sac import SoftModule


def soft_maximum(
    soft: SoftModule,
    obs: Mapping[str, Tensor],
    policies: tuple[Tensor, Tensor],
    recorded: Tensor,
    num_actions: int,
    gradient_actions: int | None,
) -> tuple[Tensor, Tensor]:
    """``[2, B]``: log of the integral of exp Q(obs, a) over actions a in [-1, 1], by each critic; and Q(obs, recorded).

    Estimated from actions drawn uniformly and by the policy at ``obs`` and after it, each weighed by its density (Kumar
    et al. 2020, appendix F). The gradient goes through all of them; or through ``gradient_actions``, drawn by their
    shares in the sum: its mean is the same.

    Args:
        soft: The policy and its critics.
        obs: Columns of observations ``[B, *shape]``.
        policies: What the policy's ``dist_inputs`` are for them and for what was observed next, without gradients.
        recorded: The actions that were recorded, ``[B, action_size]``, as critics see them.
        num_actions: How many actions are drawn, of each kind.
        gradient_actions: See above; None is all.
    """
    with torch.no_grad():
        actions, logp = _drawn(soft, policies, num_actions)
    count = actions.shape[1]
    if gradient_actions is None:
        all_values = soft.critic.many(obs, torch.cat((actions, recorded.unsqueeze(1)), 1))
        return (all_values[..., :count] - logp).logsumexp(-1) - math.log(count), all_values[..., count]
    with torch.no_grad():
        values = soft.critic.many(obs, actions) - logp
        chosen = _resampled(values, actions, gradient_actions)
        chosen = torch.cat((chosen, recorded.unsqueeze(1).expand(2, -1, -1, -1)), 2)
    some = soft.critic.many(obs, chosen)
    through = some[..., :gradient_actions].mean(-1)
    return values.logsumexp(-1) - math.log(count) + (through - through.detach()), some[..., gradient_actions]


def _drawn(soft: SoftModule, policies: tuple[Tensor, Tensor], num: int) -> tuple[Tensor, Tensor]:
    """Actions ``[B, 3 * num, action_size]``, and the logarithms of the densities that they were drawn by."""
    both = torch.stack(policies, 1).unsqueeze(2)
    actions, logp = soft.draw(both.expand(-1, -1, num, -1))
    size = len(both)
    uniform = torch.rand(size, num, soft.action_size, device=both.device) * 2.0 - 1.0
    density = torch.full((size, num), -soft.action_size * math.log(2.0), device=both.device)
    return torch.cat((actions.flatten(1, 2), uniform), 1), torch.cat((logp.flatten(1, 2), density), 1)


def _resampled(values: Tensor, actions: Tensor, num: int) -> Tensor:
    """``[2, B, num, action_size]``: actions drawn in proportion to exp of ``values`` ``[2, B, n]``, evenly spaced."""
    shares = values.softmax(-1).cumsum(-1)
    at = (torch.rand(*shares.shape[:-1], 1, device=shares.device) + torch.arange(num, device=shares.device)) / num
    index = torch.searchsorted(shares, at).clamp(max=shares.shape[-1] - 1).unsqueeze(-1)
    return actions.expand(len(values), -1, -1, -1).gather(2, index.expand(-1, -1, -1, actions.shape[-1]))
