# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from gymnasium import spaces

from etude.errors import EnvError, ModuleError
from etude.modules.actors import RandomModule

SEEN = spaces.Box(-1, 1, (2,), np.float32)


def drawn(action_space, rows, obs_space=SEEN, obs=None, seed=0, explore=True):
    actor = RandomModule(obs_space, action_space).actor(explore=explore)
    actor.start(np.random.default_rng(seed), rows)
    action, extras = actor.step({"obs": np.zeros((rows, 2), np.float32)} if obs is None else obs)
    assert extras == {}
    return action


@pytest.mark.parametrize("explore", [True, False])
def test_choices_are_equally_likely(explore):
    space = spaces.Tuple(
        [spaces.Discrete(4, start=-1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Box(1, 3, (2,))]
    )
    rows = 6000
    action = drawn(space, rows, explore=explore)
    tolerance = 5 * np.sqrt(rows)  # more than five standard deviations of any count
    np.testing.assert_allclose(np.bincount(action["action/0"] + 1), [rows / 4] * 4, atol=tolerance)
    for column, n in ((0, 2), (1, 3)):
        np.testing.assert_allclose(np.bincount(action["action/1"][:, column]), [rows / n] * n, atol=tolerance)
    np.testing.assert_allclose(action["action/2"].mean(axis=0), [0.5, 0.5], atol=0.05)
    box = action["action/3"]
    np.testing.assert_allclose(np.histogram(box[:, 0], 4, (1, 3))[0], [rows / 4] * 4, atol=tolerance)
    assert abs(np.corrcoef(box.T)[0, 1]) < 0.1
    for i in range(20):
        assert space.contains(tuple(action[f"action/{part}"][i] for part in range(4)))


def test_bounds_that_are_open_are_as_gymnasium_samples_them():
    box = drawn(spaces.Box(np.array([-np.inf, 2], np.float32), np.inf), 4000)["action"]
    np.testing.assert_allclose(box.mean(axis=0), [0, 3], atol=0.1)  # normal; exponential above its bound
    assert box[:, 1].min() >= 2


def test_a_mask_is_kept_to():
    seen = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    mask = np.array([[1, 0, 1]] * 900 + [[0, 1, 0]] * 100, np.int8)
    action = drawn(spaces.Discrete(3), 1000, seen, {"obs/action_mask": mask})["action"]
    np.testing.assert_allclose(np.bincount(action[:900], minlength=3), [450, 0, 450], atol=100)
    assert (action[900:] == 1).all()
    with pytest.raises(EnvError, match="allows nothing in row 1 of 2"):
        drawn(spaces.Discrete(3), 2, seen, {"obs/action_mask": np.array([[1, 1, 1], [0, 0, 0]], np.int8)})


def test_equal_seeds_draw_equally():
    space = spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Box(0, 1, (3,))})
    one, same, other = (drawn(space, 5, seed=seed) for seed in (1, 1, 2))
    for name in ("action/a", "action/b"):
        np.testing.assert_array_equal(one[name], same[name])
        assert (one[name] != other[name]).any()


def test_it_must_be_started():
    with pytest.raises(ModuleError, match="was not started"):
        RandomModule(SEEN, spaces.Discrete(2)).actor(explore=True).step({"obs": np.zeros((1, 2), np.float32)})


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (spaces.Dict({"a": spaces.Discrete(9, start=3), "b": spaces.Box(-3, 1, (2,))}), 9 * 4.0**2),
        (spaces.MultiBinary([2, 3]), 2**6),
        (spaces.MultiDiscrete([3, 5]), 15),
    ],
)
def test_each_action_has_its_share_of_the_space_as_probability(space, size):
    actor = RandomModule(SEEN, space).actor(explore=True)
    actor.start(np.random.default_rng(0), 3)
    action, _ = actor.step({"obs": np.zeros((3, 2), np.float32)})
    np.testing.assert_allclose(actor.logp(None, action), [-np.log(size)] * 3, rtol=1e-6)


def test_without_bounds_or_with_masks_probabilities_are_unknown():
    unbounded = RandomModule(SEEN, spaces.Box(-np.inf, 1, (1,))).actor(explore=True)
    seen = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    masked = RandomModule(seen, spaces.Discrete(3)).actor(explore=True)
    assert unbounded.logp(None, {"action": np.zeros((2, 1), np.float32)}) is None
    assert masked.logp(None, {"action": np.zeros(2, np.int64)}) is None
