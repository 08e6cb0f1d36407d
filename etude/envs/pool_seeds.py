# SPDX-License-Identifier: Apache-2.0
"""The seeds of a pool's envs: each env's own, however many workers there are."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Seeds:
    """Derives seeds by ``np.random.SeedSequence``.

    Env ``i`` is first seeded with that of ``SeedSequence(seed).spawn(num_envs)[i]``, as 31 bits. Made again for the
    n-th time, it gets that of ``SeedSequence(seed, spawn_key=(i, n))``, so that it does not meet what broke it again.
    """

    def __init__(self, num_envs: int) -> None:
        self._entropy: Any = np.random.SeedSequence().entropy
        self._made_again = np.zeros(num_envs, np.int64)

    def start(self, seed: int) -> NDArray[np.int64]:
        """``[num_envs]``: the seeds of all envs."""
        self._entropy = seed
        self._made_again[:] = 0
        return np.array([self._of(env) for env in range(len(self._made_again))])

    def again(self, env: int) -> int:
        """The seed of ``env`` that is made again."""
        self._made_again[env] += 1
        return self._of(env, int(self._made_again[env]))

    def _of(self, *key: int) -> int:
        return int(np.random.SeedSequence(self._entropy, spawn_key=key).generate_state(1)[0] >> 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain data; goes into `load_state_dict`."""
        return {"entropy": str(self._entropy), "made_again": self._made_again.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._entropy = int(state["entropy"])
        self._made_again[:] = state["made_again"]
