# SPDX-License-Identifier: Apache-2.0
"""Each return against two oracles: a loop over one episode, and the formula as its paper prints it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.experience.returns import discounted_returns, gae, n_step, vtrace

fractions = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


class Case:
    """Random segments with rewards, values, bootstraps (some 0: terminated) and log ratios."""

    def __init__(self, lengths, seed, dtype=np.float64):
        rng = np.random.default_rng(seed)
        self.offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        n = int(self.offsets[-1])
        self.reward, self.value, self.log_ratio = (rng.normal(size=n).astype(dtype) for _ in range(3))
        terminated = rng.random(len(lengths)) < 0.4
        self.bootstrap = np.where(terminated, 0, rng.normal(size=len(lengths))).astype(dtype)

    def segments(self):
        for i in range(len(self.offsets) - 1):
            rows = slice(self.offsets[i], self.offsets[i + 1])
            yield self.reward[rows], self.value[rows], self.bootstrap[i], self.log_ratio[rows]

    def each(self, naive):
        parts = [naive(*segment) for segment in self.segments()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def both(self, function):
        """What ``function`` gives for NumPy arrays, having checked that tensors give the same and inputs stay."""
        names = ("reward", "value", "bootstrap", "log_ratio")
        given_ = [getattr(self, name).copy() for name in names]
        result = function(*given_)
        for name, array in zip(names, given_, strict=True):
            assert np.array_equal(array, getattr(self, name)), f"{name} was changed"
        tensors = [torch.from_numpy(array) for array in given_]
        from_torch = function(*tensors)
        several = isinstance(result, tuple)
        for a, b in zip(result, from_torch, strict=True) if several else [(result, from_torch)]:
            assert isinstance(b, torch.Tensor)
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-12, atol=1e-12)
        return result


cases = st.builds(Case, st.lists(st.integers(1, 9), max_size=6), st.integers(0, 10**6))
close = {"rtol": 1e-9, "atol": 1e-9}


@given(cases, fractions)
def test_discounted_returns(case, gamma):
    def loop(reward, value, bootstrap, log_ratio):
        out, following = [], bootstrap
        for r in reward[::-1]:
            following = r + gamma * following
            out.insert(0, following)
        return out

    def formula(reward, value, bootstrap, log_ratio):  # Sutton & Barto 2018, 3.8: the sum of gamma^k R[t+k+1]
        n = len(reward)
        return [sum(gamma**k * reward[t + k] for k in range(n - t)) + gamma ** (n - t) * bootstrap for t in range(n)]

    found = case.both(lambda r, v, b, _: discounted_returns(r, b, case.offsets, gamma))
    np.testing.assert_allclose(found, case.each(loop), **close)
    np.testing.assert_allclose(found, case.each(formula), **close)


@given(cases, fractions, fractions)
def test_gae(case, gamma, lambda_):
    def loop(reward, value, bootstrap, log_ratio):
        out, advantage, following = [], 0.0, bootstrap
        for r, v in zip(reward[::-1], value[::-1], strict=True):
            advantage = r + gamma * following - v + gamma * lambda_ * advantage
            out.insert(0, advantage)
            following = v
        return out

    def formula(reward, value, bootstrap, log_ratio):
        """Schulman et al. 2016, eq. 16: (1 - lambda) (A(1) + lambda A(2) + ...), with A(k) of eq. 14.

        Past the end of the segment all A(k) are the same, so that their weights add up to lambda^(rest - 1).
        """
        values, n = np.append(value, bootstrap), len(reward)

        def k_step(t, k):
            return -value[t] + sum(gamma**i * reward[t + i] for i in range(k)) + gamma**k * values[t + k]

        return [
            (1 - lambda_) * sum(lambda_ ** (k - 1) * k_step(t, k) for k in range(1, n - t))
            + lambda_ ** (n - t - 1) * k_step(t, n - t)
            for t in range(n)
        ]

    advantage, target = case.both(lambda r, v, b, _: gae(r, v, b, case.offsets, gamma, lambda_))
    np.testing.assert_allclose(advantage, case.each(loop), **close)
    np.testing.assert_allclose(advantage, case.each(formula), **close)
    np.testing.assert_allclose(target, advantage + case.value, **close)


@given(cases, st.integers(1, 12), fractions)
def test_n_step(case, n, gamma):
    sums = n_step(case.reward, case.offsets, n, gamma)
    for i in range(len(case.offsets) - 1):
        for t in range(case.offsets[i], case.offsets[i + 1]):
            last = min(t + n, case.offsets[i + 1]) - 1
            assert (sums.last[t], sums.steps[t]) == (last, last - t + 1)
            expected = sum(gamma ** (k - t) * case.reward[k] for k in range(t, last + 1))
            assert sums.reward[t] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(
    cases, fractions, st.sampled_from([0.7, 1.0, 2.0]), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.8, 1.0])
)
def test_vtrace(case, gamma, rho_bar, c_bar, lambda_):
    def formula(reward, value, bootstrap, log_ratio):
        """Espeholt et al. 2018, eq. 1:

        v_s = V(x_s) + the sum over t of gamma^(t-s) (product of c_i, s <= i < t) delta_t.
        """
        n, values = len(reward), np.append(value, bootstrap)
        ratio = np.exp(log_ratio)
        rho, c = np.minimum(rho_bar, ratio), lambda_ * np.minimum(c_bar, ratio)
        delta = [rho[t] * (reward[t] + gamma * values[t + 1] - values[t]) for t in range(n)]
        return [value[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)]

    def loop(reward, value, bootstrap, log_ratio):  # remark 1 of the paper: the same, recursively
        out, following, target = [], bootstrap, bootstrap
        for r, v, w in zip(reward[::-1], value[::-1], np.exp(log_ratio[::-1]), strict=True):
            delta = min(rho_bar, w) * (r + gamma * following - v)
            target = v + delta + gamma * lambda_ * min(c_bar, w) * (target - following)
            out.insert(0, target)
            following = v
        return out

    def policy_gradient(reward, value, bootstrap, log_ratio):  # section 4.2: rho_s (r_s + gamma v_{s+1} - V(x_s))
        target = np.append(formula(reward, value, bootstrap, log_ratio), bootstrap)
        return np.minimum(rho_bar, np.exp(log_ratio)) * (reward + gamma * target[1:] - value)

    found = case.both(
        lambda r, v, b, w: vtrace(r, v, b, w, case.offsets, gamma, rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_)
    )
    np.testing.assert_allclose(found.value_target, case.each(formula), **close)
    np.testing.assert_allclose(found.value_target, case.each(loop), **close)
    np.testing.assert_allclose(found.advantage, case.each(policy_gradient), **close)


@given(cases, fractions)
def test_vtrace_on_policy_is_the_lambda_one_return(case, gamma):
    found = vtrace(case.reward, case.value, case.bootstrap, np.zeros_like(case.value), case.offsets, gamma)
    expected = discounted_returns(case.reward, case.bootstrap, case.offsets, gamma)
    np.testing.assert_allclose(found.value_target, expected, **close)


def test_terminated_truncated_and_cut_segments_differ_by_their_bootstrap():
    """Three segments with the same steps; what follows is worth 0, 10 and 10 (cut: the value of what goes on)."""
    offsets = np.array([0, 2, 4, 6])
    reward, value = np.ones(6), np.zeros(6)
    bootstrap = np.array([0.0, 10.0, 10.0])
    expected = [1.5, 1, 4, 6, 4, 6]
    assert discounted_returns(reward, bootstrap, offsets, 0.5).tolist() == expected
    assert gae(reward, value, bootstrap, offsets, 0.5, 1.0)[0].tolist() == expected
    assert vtrace(reward, value, bootstrap, value, offsets, 0.5).value_target.tolist() == expected


def test_a_cut_changes_no_return_where_the_bootstrap_is_what_followed():
    case = Case([40], 5)
    whole = discounted_returns(case.reward, case.bootstrap, case.offsets, 0.97)
    cut = np.array([0, 13, 27, 40])
    pieces = discounted_returns(case.reward, np.append(whole[[13, 27]], case.bootstrap), cut, 0.97)
    np.testing.assert_allclose(whole, pieces, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_have_the_dtype_of_the_rewards(dtype):
    case = Case([3, 4], 1, dtype)
    found = [
        discounted_returns(case.reward, case.bootstrap, case.offsets, 0.9),
        *gae(case.reward, case.value, case.bootstrap, case.offsets, 0.9, 0.9),
        n_step(case.reward, case.offsets, 3, 0.9).reward,
        *vtrace(case.reward, case.value, case.bootstrap, case.log_ratio, case.offsets, 0.9),
    ]
    assert {array.dtype for array in found} == {np.dtype(dtype)}


def test_ratios_beyond_all_floats_are_capped():
    case = Case([3, 2], 2)
    case.log_ratio[:] = [200, -200, 0, 1e4, -1e4]
    found = case.both(lambda r, v, b, w: vtrace(r, v, b, w, case.offsets, 0.9))
    assert np.isfinite(found.value_target).all()
    case.log_ratio[:] = [0, -200, 0, 0, -1e4]
    again = vtrace(case.reward, case.value, case.bootstrap, case.log_ratio, case.offsets, 0.9)
    assert found.value_target.tolist() == again.value_target.tolist()
