# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from connector_cases import OBS_SPACES, episodes
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.connectors import Inputs, NormalizeObs
from etude.connectors.observations import Moments
from etude.errors import CheckpointError, DataError, SettingsError
from etude.experience import Experience, Segments

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTION = spaces.Discrete(2)


def plain(obs: np.ndarray, **segments: object) -> Experience:
    n = len(obs)
    ids = Segments.of(1, episode_id=["e"], **segments)  # type: ignore[arg-type]
    return Experience({"obs": obs, "reward": np.zeros(n)}, np.array([0, n]), ids, {"obs": obs[-1:] * 0})


def online(connector: NormalizeObs, obs: np.ndarray) -> np.ndarray:
    n = len(obs)
    inputs = Inputs(np.arange(n), {"obs": obs}, np.zeros(n, bool), {"action": np.zeros(n, int)}, np.zeros(n))
    return connector.online(inputs).obs["obs"]


@settings(max_examples=50)
@given(
    values=hnp.arrays(np.float64, st.tuples(st.integers(1, 40), st.just(2)), elements=st.floats(-1e3, 1e3)),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    far=st.sampled_from([0.0, 1e6]),
)
def test_moments_of_batches_are_those_of_the_whole(values: np.ndarray, cuts: list[int], far: float) -> None:
    moments = Moments((2,))
    for part in np.split(values + far, sorted(min(c, len(values)) for c in cuts)):
        moments.add(part)
    assert moments.count == len(values)
    np.testing.assert_allclose(moments.mean, (values + far).mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(moments.deviation(), np.sqrt((values + far).var(axis=0) + 1e-8), rtol=1e-6, atol=1e-6)


def test_what_comes_out_has_mean_0_and_deviation_1() -> None:
    rng = np.random.default_rng(0)
    obs = (rng.normal(size=(5_000, 2)) * [3, 0.01] + [100, -2]).astype(np.float32)
    connector = NormalizeObs()
    space, action_space = connector.spaces(BOX, ACTION)
    connector.update(plain(obs[:3_000]))
    connector.update(plain(obs[3_000:]))
    out = online(connector, obs)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(out.std(axis=0), 1, atol=1e-3)
    assert space == spaces.Box(-10, 10, (2,), np.float32)
    assert action_space is ACTION


def test_before_the_first_update_only_the_clipping_works() -> None:
    connector = NormalizeObs(clip=2)
    connector.spaces(BOX, ACTION)
    np.testing.assert_array_equal(online(connector, np.float32([[1.5, 7], [-3, 0]])), [[1.5, 2], [-2, 0]])


def test_statistics_are_frozen_between_updates() -> None:
    connector = NormalizeObs()
    connector.spaces(BOX, ACTION)
    connector.update(plain(np.float32([[0, 0], [2, 4]])))
    once = online(connector, np.float32([[2, 4]]))
    connector.offline(plain(np.float32([[50, 50]])))
    np.testing.assert_array_equal(online(connector, np.float32([[2, 4]])), once)
    np.testing.assert_allclose(once, 1, atol=1e-6)


def test_lookback_is_not_counted_twice() -> None:
    exp = episodes([6, 3])
    whole, pieces = NormalizeObs(), NormalizeObs()
    for connector, data in ((whole, exp), (pieces, exp.cut(2, lookback=2))):
        connector.spaces(BOX, ACTION)
        connector.update(data)
    assert whole.state_dict()["obs"]["count"] == pieces.state_dict()["obs"]["count"] == 9
    np.testing.assert_allclose(whole.state_dict()["obs"]["mean"], pieces.state_dict()["obs"]["mean"])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_integers_are_normalised_too(dtype: type) -> None:
    rng = np.random.default_rng(0)
    obs = (rng.integers(0, 200, size=(5_000, 2)) // [1, 20]).astype(dtype)
    connector = NormalizeObs()
    space, _ = connector.spaces(spaces.Box(0, 200, (2,), dtype), ACTION)
    assert space == spaces.Box(-10, 10, (2,), np.float32)
    connector.update(plain(obs))
    out = online(connector, obs)
    assert out.dtype == np.float32
    wide = obs.astype(np.float64)
    np.testing.assert_allclose(out, (wide - wide.mean(axis=0)) / wide.std(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(connector.offline(plain(obs)).steps["obs"], out)


def test_what_it_does_not_change_need_not_be_finite() -> None:
    connector = NormalizeObs()
    connector.spaces(spaces.Dict({"x": BOX}), ACTION)
    obs, other = np.ones((4, 2), np.float32), np.full((4, 2), np.nan, np.float32)
    exp = plain(obs)
    final = {"obs/x": obs[-1:], "obs/other": other[-1:]}
    steps = {"obs/x": obs, "obs/other": other, "reward": np.zeros(4)}
    connector.update(Experience(steps, exp.offsets, exp.segments, final))
    assert connector.state_dict()["obs/x"]["count"] == 4
    with pytest.raises(DataError, match=r"final_obs `obs/x` holds nan"):
        connector.update(Experience(steps, exp.offsets, exp.segments, final | {"obs/x": other[-1:]}))


def test_pictures_of_bytes_are_left_as_they_are() -> None:
    connector = NormalizeObs()
    cameras = {
        f"camera{i}": spaces.Box(0, 255, s, np.uint8) for i, s in enumerate([(8, 8, 1), (30, 30), (4, 84, 84, 3)])
    }
    few = {name: part for name, part in OBS_SPACES["dict"].spaces.items() if name != "camera"}
    space, _ = connector.spaces(spaces.Dict({**few, **cameras}), ACTION)
    assert {name: space[name] for name in cameras} == cameras
    assert space["mode"] == OBS_SPACES["dict"]["mode"]
    assert list(connector.state_dict()) == ["obs/joints"]


def test_far_off_float64_keeps_its_digits() -> None:
    connector = NormalizeObs()
    connector.spaces(spaces.Box(-np.inf, np.inf, (1,), np.float64), ACTION)
    obs = np.array([[1e9], [1e9 + 2]])
    connector.update(plain(obs))
    np.testing.assert_allclose(online(connector, obs), [[-1], [1]], atol=1e-5)


def test_nan_is_named_and_spoils_nothing() -> None:
    connector = NormalizeObs()
    connector.spaces(BOX, ACTION)
    obs = np.zeros((4, 2), np.float32)
    obs[2, 1] = np.nan
    with pytest.raises(DataError, match=r"column `obs` holds nan in component 1 at segment 0 .* t 2"):
        connector.update(plain(obs))
    assert connector.state_dict()["obs"]["count"] == 0


def test_state_of_other_observations_is_refused() -> None:
    connector, other = NormalizeObs(), NormalizeObs()
    connector.spaces(BOX, ACTION)
    other.spaces(spaces.Box(-1, 1, (3,), np.float32), ACTION)
    with pytest.raises(CheckpointError, match=r"normalize_obs are of \{'obs': \(3,\)\}, but the observations are"):
        connector.load_state_dict(other.state_dict())


def test_clip_must_be_positive() -> None:
    with pytest.raises(SettingsError, match=r"NormalizeObs\.clip must be above 0, not -1"):
        NormalizeObs(clip=-1)
