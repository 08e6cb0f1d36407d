# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from etude.checkpoints import get_rng_state, load_tree, rng_from_state, save_tree
from etude.errors import CheckpointError


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_restored_stream_goes_on_where_the_saved_one_stood(tmp_path, kind):
    rng = np.random.Generator(getattr(np.random, kind)(7))
    rng.standard_normal(5, dtype=np.float32)  # leaves half a draw behind
    rng.integers(10, dtype=np.int8)
    save_tree(tmp_path, get_rng_state(rng))
    again = rng_from_state(load_tree(tmp_path)[0])
    assert np.array_equal(rng.integers(1000, size=99, dtype=np.int32), again.integers(1000, size=99, dtype=np.int32))
    assert np.array_equal(rng.random(99), again.random(99))


def test_a_state_does_not_move_with_its_generator():
    rng = np.random.default_rng(0)
    state = get_rng_state(rng)
    first = rng.random()
    assert rng_from_state(state).random() == first


def test_states_that_are_none_are_refused():
    with pytest.raises(CheckpointError, match="of kind 'default_rng'; known are PCG64"):
        rng_from_state({"bit_generator": "default_rng"})
    with pytest.raises(CheckpointError, match="the state of a PCG64 random generator is broken"):
        rng_from_state({"bit_generator": "PCG64", "state": {}})
