# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
import torch
from connector_cases import episodes
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.connectors import GAE, AdvantageWeights, LiftAdvantages, NormalizeAdvantages
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.modules import NetworkConfig, make_module


class Critic:
    """Its value is ``w * obs``; remembers which observations it was asked for."""

    recurrent = False

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    def value_of(self, columns: dict[str, np.ndarray], state: Any = None) -> np.ndarray:
        self.asked.append(columns["obs"])
        return (columns["obs"] @ [0.7, -0.3]).astype(np.float32)


def naive_gae(exp: Experience, gamma: float, lambda_: float) -> tuple[list[float], list[float]]:
    """Schulman et al. 2016, eq. 11, 12 and 16, as a double loop over segments and steps."""
    critic, advantages, targets = Critic(), [], []
    for segment in exp:
        value = [float(v) for v in critic.value_of({"obs": segment.steps["obs"]})]
        if segment.segments.terminated[0]:
            after = 0.0
        elif segment.segments.has_final_obs[0]:
            after = float(critic.value_of({"obs": segment.final_obs["obs"]})[0])
        else:
            after = value[-1]
        value.append(after)
        for t in range(segment.num_steps):
            total = 0.0
            for k in range(t, segment.num_steps):
                delta = float(segment.steps["reward"][k]) + gamma * value[k + 1] - value[k]
                total += (gamma * lambda_) ** (k - t) * delta
            advantages.append(total)
            targets.append(total + value[t])
    return advantages, targets


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["term", "trunc", "cut", "lost"])), max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
    max_len=st.integers(1, 9),
    lookback=st.integers(0, 3),
    recorded=st.booleans(),
)
def test_against_the_naive_loop(
    ends: list[tuple[int, str]], gamma: float, lambda_: float, max_len: int, lookback: int, recorded: bool
) -> None:
    exp = episodes(
        [n for n, _ in ends],
        terminated=[end == "term" for _, end in ends],
        truncated=[end == "trunc" for _, end in ends],
        has_final_obs=[end != "lost" for _, end in ends],
    ).cut(max_len, lookback=lookback)
    advantages, targets = naive_gae(exp, gamma, lambda_)
    value = Critic().value_of({"obs": exp.steps["obs"]})
    data = exp.with_steps(value=value) if recorded else exp

    out = GAE(gamma, lambda_).offline(data, Critic())  # type: ignore[arg-type]

    np.testing.assert_allclose(out.steps["advantage"], np.array(advantages), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.steps["value_target"], np.array(targets), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(out.steps["value"], value)
    assert {out.steps[name].dtype.name for name in ("advantage", "value_target", "value")} == {"float32"}
    assert "advantage" not in exp.steps


def test_the_module_is_asked_only_for_what_is_needed() -> None:
    exp = episodes([2, 3, 4, 5], terminated=[True, False, False, False], truncated=[False, True, False, False])
    exp = exp.with_steps(value=np.zeros(14, np.float32))
    exp.segments.has_final_obs[3] = False
    critic = Critic()
    GAE().offline(exp, critic)  # type: ignore[arg-type]
    assert len(critic.asked) == 1
    np.testing.assert_array_equal(critic.asked[0], [[1, 3], [2, 4]])


def test_no_module_is_needed_where_all_terminated_and_values_are_recorded() -> None:
    exp = episodes([2], terminated=True)
    out = GAE(1.0, 1.0).offline(exp.with_steps(value=np.float32([5, 7])))
    np.testing.assert_allclose(out.steps["advantage"], [1 - 5, 1 - 7])
    with pytest.raises(DataError, match="needs a module for the values of the steps, which have no column `value`"):
        GAE().offline(exp)
    with pytest.raises(DataError, match=r"of the observations that segments were cut or truncated at: call offline"):
        GAE().offline(episodes([2]).with_steps(value=np.zeros(2)))


def test_settings_are_checked() -> None:
    with pytest.raises(SettingsError, match=r"GAE\.gamma must be between 0 and 1, not 1\.5"):
        GAE(gamma=1.5)
    with pytest.raises(SettingsError, match=r"GAE\.lambda_ must be between 0 and 1, not -1"):
        GAE(lambda_=-1)


def test_normalized_over_trained_steps_only() -> None:
    exp = episodes([6, 4]).cut(3, lookback=2)
    advantage = np.random.default_rng(0).normal(3, 5, exp.num_steps).astype(np.float32)
    trained = exp.trained()
    assert not trained.all()
    advantage[~trained] = 1e6
    out = NormalizeAdvantages().offline(exp.with_steps(advantage=advantage)).steps["advantage"]
    assert out.dtype == np.float32
    own = advantage[trained].astype(float)
    np.testing.assert_allclose(out[trained], (own - own.mean()) / own.std(), rtol=1e-4, atol=1e-5)


def test_normalizing_one_value_none_and_no_column() -> None:
    one = NormalizeAdvantages().offline(episodes([1]).with_steps(advantage=np.float32([4])))
    np.testing.assert_array_equal(one.steps["advantage"], [0])
    none = NormalizeAdvantages().offline(episodes([]).with_steps(advantage=np.zeros(0, np.float32)))
    assert none.num_steps == 0
    with pytest.raises(DataError, match="NormalizeAdvantages needs the column `advantage`"):
        NormalizeAdvantages().offline(episodes([1]))


@pytest.mark.parametrize("mean", [-3.0, 3.0])
def test_lifted_by_the_mean_of_trained_steps_where_it_is_negative(mean: float) -> None:
    exp = episodes([6, 4]).cut(3, lookback=2)
    advantage = np.random.default_rng(0).normal(mean, 1, exp.num_steps).astype(np.float32)
    trained = exp.trained()
    advantage[~trained] = 1e6
    out = LiftAdvantages().offline(exp.with_steps(advantage=advantage)).steps["advantage"]
    own = advantage[trained].astype(float)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[trained], own - own.mean() if mean < 0 else own, rtol=1e-4, atol=1e-5)


def test_lifting_none_and_no_column() -> None:
    none = LiftAdvantages().offline(episodes([]).with_steps(advantage=np.zeros(0, np.float32)))
    assert none.num_steps == 0
    with pytest.raises(DataError, match="LiftAdvantages needs the column `advantage`"):
        LiftAdvantages().offline(episodes([1]))


def test_the_average_of_squared_advantages_leaves_lookback_out() -> None:
    cut = episodes([10, 7]).cut(4, lookback=2)
    rng = np.random.default_rng(0)
    advantage = np.where(cut.trained(), rng.normal(size=cut.num_steps), 1e3).astype(np.float32)
    own = advantage[cut.trained()]
    assert len(own) == 17 < cut.num_steps
    weights = AdvantageWeights(rate=0.5)
    weights.update(cut.with_steps(advantage=advantage))
    first = weights.mean_square
    assert first == pytest.approx(np.square(own).mean())
    weights.update(episodes([]).with_steps(advantage=np.zeros(0, np.float32)))  # of which nothing can be learned
    assert weights.mean_square == first
    weights.update(cut.with_steps(advantage=np.where(cut.trained(), np.float32(0), np.float32(np.nan))))
    assert weights.mean_square == pytest.approx(first / 2)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("lookback", [0, 2])
def test_values_of_a_recurrent_module_are_those_in_its_state(recorded: bool, lookback: int) -> None:
    """Played by hand: the critic's state after a segment is known from nothing but the recorded one before."""
    torch.manual_seed(0)
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    module = make_module(None, space, spaces.Discrete(2), NetworkConfig(hidden=(8,), recurrent="lstm"))
    exp = episodes([4, 1, 6, 3], terminated=[False, False, True, False], has_final_obs=[True, True, True, False])
    names = list(module.initial_state())
    state = {f"state_in/{name}": np.zeros((exp.num_steps, 64), np.float32) for name in names}
    value, following = np.zeros(exp.num_steps, np.float32), np.zeros(exp.num_segments, np.float32)
    with torch.no_grad():
        for i, segment in enumerate(exp):
            begin, seen = int(exp.offsets[i]), [*segment.steps["obs"], segment.final_obs["obs"][0]]
            now = {name: torch.zeros(1, 64) for name in names}
            for t, obs in enumerate(seen):
                out = module(torch.from_numpy(obs.astype(np.float32))[None, None], now)
                assert out.value is not None
                assert out.state is not None
                if t == segment.num_steps:
                    following[i] = out.value
                    break
                for name, part in now.items():
                    state[f"state_in/{name}"][begin + t] = part
                value[begin + t], now = out.value, out.state
    following[2], following[3] = 0, value[-1]
    exp = exp.with_steps(**state)
    if recorded:
        exp = exp.with_steps(value=value)
    cut = exp.cut(3, lookback=lookback)

    out = GAE(0.9, 1.0).offline(cut, module)

    assert cut.num_segments == 6
    for i, segment in enumerate(cut):
        end = segment.segments.t_start[0] + segment.num_steps
        parent = _parent(exp, segment)
        begin = int(exp.offsets[parent])
        is_last = end == exp.lengths[parent]
        total = float(following[parent] if is_last else value[begin + end])
        for t in range(segment.num_steps - 1, -1, -1):
            total = float(segment.steps["reward"][t]) + 0.9 * total
            assert out.steps["value_target"][cut.offsets[i] + t] == pytest.approx(total, rel=1e-4, abs=1e-5)
    if not recorded:
        own = np.concatenate([value[int(exp.offsets[_parent(exp, s)]) + s.t()] for s in cut])
        np.testing.assert_allclose(out.steps["value"], own, atol=1e-6)
    with pytest.raises(DataError, match="there is no column 'state_in/h'"):
        GAE().offline(episodes([2]), module)


def _parent(exp: Experience, piece: Experience) -> int:
    return list(exp.segments.episode_id).index(piece.segments.episode_id[0])
