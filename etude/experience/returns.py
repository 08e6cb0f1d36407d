# SPDX-License-Identifier: Apache-2.0
"""Returns and advantages over flat columns with offsets, for segments of any lengths at once.

In all functions, ``bootstrap`` is ``[num_segments]``: the value after each segment's last step. It is the value of
``final_obs`` if the segment was cut or truncated, and 0 if the episode terminated. Arrays are NumPy or torch, of a
float dtype; results have the dtype of the rewards. One kernel, `scan`, computes all recursions over time.
"""

from typing import NamedTuple

import numpy as np

from etude.experience.arrays import Array, Index, copied, library, zeros


def scan(x: Array, decay: Array) -> Array:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` for all t at once, with 0 after the end; overwrites its inputs.

    This is recursive doubling (Blelloch 1990, "Prefix sums and their applications", 1.4): after the k-th pass each
    entry holds the sum over ``2 ** k`` steps. ``decay`` must be 0 at the last step of each segment, which keeps
    segments separate; the passes end as soon as all decays are 0.
    """
    reach = 1
    while reach < len(x):
        x[:-reach] += decay[:-reach] * x[reach:]
        decay[:-reach] = decay[:-reach] * decay[reach:]  # not in place: torch refuses overlapping operands
        decay[-reach:] = 0
        reach *= 2
        if not decay.any():
            break
    return x


def _decays(like: Array, offsets: Index, decay: float | Array) -> Array:
    """``decay`` at every step except the last of each segment, where it is 0."""
    out = zeros(len(like), like)
    out[:] = decay
    out[offsets[1:] - 1] = 0
    return out


def _following(values: Array, bootstrap: Array, offsets: Index) -> Array:
    """The value after each step: ``values`` shifted inside segments, ``bootstrap`` at their ends."""
    following = copied(values)
    following[:-1] = values[1:]
    following[offsets[1:] - 1] = bootstrap
    return following


def discounted_returns(reward: Array, bootstrap: Array, offsets: Index, gamma: float) -> Array:
    """The returns ``G[t] = r[t] + gamma * G[t + 1]``, ``[num_steps]``, with ``bootstrap`` after the end (Sutton & Barto
    2018, 3.9)."""
    x = copied(reward)
    if not len(x):
        return x
    x[offsets[1:] - 1] += gamma * bootstrap
    return scan(x, _decays(x, offsets, gamma))


def gae(
    reward: Array, value: Array, bootstrap: Array, offsets: Index, gamma: float, lambda_: float
) -> tuple[Array, Array]:
    """Generalised advantage estimation: ``(advantage, value_target)``, both ``[num_steps]``.

    ``delta[t] = r[t] + gamma * v[t + 1] - v[t]`` and ``A[t] = delta[t] + gamma * lambda * A[t + 1]`` (Schulman et al.
    2016, "High-dimensional continuous control using generalized advantage estimation", eq. 11, 12 and 16); the value
    target is ``A + v``.

    Args:
        reward: ``[num_steps]``.
        value: ``[num_steps]``: the value of each step's observation.
        bootstrap: ``[num_segments]``, see the module's docstring.
        offsets: int64 ``[num_segments + 1]``.
        gamma: Discount factor, 0 to 1.
        lambda_: 0 (one step, biased) to 1 (Monte Carlo, unbiased).
    """
    if not len(reward):
        return reward, reward
    advantage = reward + gamma * _following(value, bootstrap, offsets) - value
    advantage = scan(advantage, _decays(advantage, offsets, gamma * lambda_))
    return advantage, advantage + value


class NStepSums(NamedTuple):
    """The results of `n_step`, each ``[num_steps]``."""

    reward: Array
    """The discounted sum of the next ``steps`` rewards."""
    steps: Index
    """int64: the number of these rewards: n, or fewer near the segment's end."""
    last: Index
    """int64: the row of the last of these rewards; ``next_obs[last]`` is the observation after it."""


def n_step(reward: Array, offsets: Index, n: int, gamma: float) -> NStepSums:
    """Discounted sums of the next n rewards within segments (Sutton & Barto 2018, 7.1, without the bootstrap term).

    Args:
        reward: ``[num_steps]``.
        offsets: int64 ``[num_segments + 1]``.
        n: The number of rewards, at least 1.
        gamma: Discount factor, 0 to 1.
    """
    num_steps = len(reward)
    rows = np.arange(num_steps)
    ends = np.repeat(offsets[1:], np.diff(offsets))
    last = np.minimum(rows + n, ends) - 1
    total = copied(reward)
    for k in range(1, min(n, num_steps)):
        inside = rows[:-k][rows[:-k] + k < ends[:-k]]
        if not len(inside):
            break
        total[inside] += gamma**k * reward[inside + k]
    return NStepSums(total, last - rows + 1, last)


class VTraceTargets(NamedTuple):
    """The results of `vtrace`, each ``[num_steps]``."""

    value_target: Array
    """``v_s`` of the paper."""
    advantage: Array
    """The advantage for the policy gradient."""


def vtrace(
    reward: Array,
    value: Array,
    bootstrap: Array,
    log_ratio: Array,
    offsets: Index,
    gamma: float,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTraceTargets:
    """V-trace targets and advantages (Espeholt et al. 2018, "IMPALA", eq. 1 and the policy gradient of 4.2).

    Args:
        reward: ``[num_steps]``.
        value: ``[num_steps]``.
        bootstrap: ``[num_segments]``, see the module's docstring.
        log_ratio: ``[num_steps]``: ``log pi(a|x) - log mu(a|x)``, target over behaviour policy.
        offsets: int64 ``[num_segments + 1]``.
        gamma: Discount factor, 0 to 1.
        rho_bar: Cap of the importance weight in delta and in the policy gradient, above 0.
        c_bar: Cap of the trace coefficient, above 0.
        lambda_: Further decay of the trace, 0 to 1 (the paper's remark 2).
    """
    if not len(reward):
        return VTraceTargets(reward, reward)
    highest = float(np.log(max(rho_bar, c_bar)))  # also capped before exp, which could overflow
    ratio = library(log_ratio).exp(log_ratio.clip(max=highest))
    rho, c = ratio.clip(max=rho_bar), lambda_ * ratio.clip(max=c_bar)
    following = _following(value, bootstrap, offsets)
    excess = scan(rho * (reward + gamma * following - value), _decays(value, offsets, gamma * c))
    target = value + excess
    advantage = rho * (reward + gamma * _following(target, bootstrap, offsets) - value)
    return VTraceTargets(target, advantage)
