# SPDX-License-Identifier: Apache-2.0
"""What is said of envs with the API of the old Gym: once, in short, and what to do."""

import logging
from typing import Any

import numpy as np
import old_gym_envs as envs
import pytest
from pool_envs import copies_of

from etude.envs import Workers, make_arena
from etude.errors import EnvError

MODES: list[dict[str, Any]] = [{}, {"num_workers": 2, "mode": "thread"}, {"num_workers": 2}]


def error_of(env: Any, workers: dict[str, Any]) -> str:
    """What ends a run in an env."""
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        arena = make_arena(env, 2, Workers(**workers))
        try:
            arena.reset(seed=1)
            for _ in range(12):
                for turn in arena.recv():
                    if turn.waits:
                        arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
        finally:
            arena.close()
    return str(caught.value)


@pytest.mark.parametrize("workers", MODES, ids=["sync", "thread", "process"])
@pytest.mark.parametrize(
    ("env", "found"),
    [
        ("BareReset", "its reset returned one ndarray"),
        ("LongReset", "its reset returned one ndarray"),
        ("NoSeed", "its reset takes no `seed`"),
        ("FourValues", "its step returned 4 values"),
        ("NoValue", "its step returned one NoneType"),
        ("limited", "expected 5, got 4"),
        ("counted", "(expected 2)"),
    ],
)
def test_the_old_api_is_named_with_what_to_do(
    env: str, found: str, workers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    envs.MADE.clear()
    text = error_of(f"old_gym_envs:{env}", workers)
    assert found in text
    for words in ("(obs, info)", "five values", "(obs, reward, terminated, truncated, info)", "shimmy"):
        assert words in text
    assert "Traceback" not in text
    assert "\n" not in text
    assert not [record for record in caplog.records if record.name.startswith("etude")]
    assert len(envs.MADE) <= 2, "it was not tried again"


@pytest.mark.parametrize("workers", MODES, ids=["sync", "thread", "process"])
def test_rewards_that_are_arrays(workers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    text = error_of("old_gym_envs:ArrayReward", workers)
    assert "`reward` is array([1.])" in text
    assert "not a finite number. Return one float from step" in text
    assert "float(reward[0])" in text
    assert "\n" not in text
    assert not [record for record in caplog.records if record.name.startswith("etude")]


def test_what_inherits_from_nothing() -> None:
    text = error_of("old_gym_envs:NotInherited", {})
    assert "NotInherited is not an env" in text
    for words in ("gymnasium.Env", "(obs, info)", "five values", "shimmy"):
        assert words in text


def test_mistakes_of_an_envs_own_stay_its_own() -> None:
    text = error_of("old_gym_envs:Unpacks", {})
    assert "shimmy" not in text
    assert "ValueError: not enough values to unpack (expected 5, got 4)" in text
    assert "old_gym_envs.py" in text
    assert "worker.py" not in text


def test_an_env_that_can_never_begin_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Never(envs.Plain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise ConnectionError("no licence")

    arena = copies_of(Never, Workers(), 2)
    arena.reset(seed=1)
    with pytest.raises(EnvError, match=r"(?s)6 failures .*failed in a reset:.*ConnectionError: no licence$"):
        arena.recv()
    assert not [record for record in caplog.records if "Traceback" in record.getMessage()]
    arena.close()
