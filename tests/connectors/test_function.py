# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
from connector_cases import OBS_SPACES
from gymnasium import spaces

from etude.connectors import FunctionConnector, Inputs
from etude.errors import SpaceError

ACTION = spaces.Discrete(2)
BOX = spaces.Box(-1, 1, (3,), np.float32)


def test_the_space_is_found_by_calling() -> None:
    def view(obs: dict[str, Any]) -> dict[str, Any]:
        return {
            "half": obs["camera"][:, ::2, ::2],
            "mode": obs["mode"],
            "parts": (obs["joints"] > 0, obs["joints"].sum(axis=1)),
        }

    connector = FunctionConnector(view)
    space, action_space = connector.spaces(OBS_SPACES["dict"], ACTION)
    assert action_space is ACTION
    assert space == spaces.Dict(
        [
            ("half", spaces.Box(0, 255, (2, 2, 1), np.uint8)),
            ("mode", spaces.Dict({"gear": spaces.Discrete(3)})),
            ("parts", spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-np.inf, np.inf, (), np.float32)])),
        ]
    )
    assert connector.name == "view"
    assert repr(connector) == "view"


def test_sampling_leaves_the_spaces_own_random_numbers_alone() -> None:
    one, two = (spaces.Box(-1, 1, (3,), np.float32, seed=4) for _ in range(2))
    FunctionConnector(np.tanh).spaces(one, ACTION)
    np.testing.assert_array_equal(one.sample(), two.sample())


def test_any_callable_has_a_name() -> None:
    assert FunctionConnector(np.tanh).name == "tanh"
    assert FunctionConnector(type("Warp", (), {"__call__": lambda self, obs: obs})()).name == "Warp"


def writes(obs: Any) -> Any:
    obs *= 2
    return obs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda obs: obs["x"], r"`<lambda>` fails on 2 samples of Box\(.*: IndexError"),
        (writes, r"`writes` writes to its input `obs`: let it return a copy"),
        (lambda obs: obs.sum(), r"gives float32 as `obs` for 2 observations; expected a NumPy array"),
        (lambda obs: obs[0], r"gives float32\[3\] as `obs` for 2 observations"),
        (lambda obs: {"a": obs, "b": obs.astype(str)}, r"gives <U.*\[2, 3\] as `obs/b`"),
        (lambda obs: None, r"gives NoneType as `obs` for 2 observations"),
    ],
)
def test_functions_that_will_not_do(function: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        FunctionConnector(function).spaces(BOX, ACTION)


def test_a_wrong_number_of_rows_is_seen_at_run_time_too() -> None:
    connector = FunctionConnector(lambda obs: np.zeros((2, 1), np.float32))
    connector.spaces(BOX, ACTION)
    obs = np.zeros((5, 3), np.float32)
    with pytest.raises(SpaceError, match="gives 2 rows as `obs` for 5"):
        connector.online(Inputs(np.arange(5), {"obs": obs}, np.zeros(5, bool), {}, np.zeros(5)))
