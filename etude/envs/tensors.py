# SPDX-License-Identifier: Apache-2.0
"""TensorArena: vector envs whose observations and actions are torch tensors and stay on their device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.vector import VectorArena
from etude.errors import EnvError, SpaceError
from etude.experience import arrays
from etude.spaces import Space, check_form, in_words, leaf_dtype, leaf_shape


class TensorArena(VectorArena):
    """The copies of a vector env of torch tensors, stepped together on their device. See `VectorArena`.

    At each step, rewards and flags are copied to the host in one transfer; observations and actions stay on the device.
    While observations are checked (see `Workers.check`), they are copied too.
    """

    device: torch.device

    def __init__(self, env: VectorEnv[Any, Any, Any] | Callable[[], Any], num_envs: int = 1, **limits: Any) -> None:
        super().__init__(env, num_envs, **limits)
        self.device = torch.empty(0, device=self.env.device).device  # type: ignore[attr-defined]  # cuda is cuda:0

    @staticmethod
    def _dtype(leaf: Space) -> Any:
        return arrays.tensor_dtype(leaf_dtype(leaf))

    def _fitted(self, name: str, leaf: Space, column: Any) -> Any:
        wanted, shape = self._dtype(leaf), leaf_shape(leaf)
        is_tensor = isinstance(column, torch.Tensor) and column.shape == shape
        if not is_tensor or (column.is_floating_point() and not wanted.is_floating_point):
            found = [str(getattr(column, what, "?")) for what in ("dtype", "shape")]
            raise SpaceError(
                f"`{name}` is a {type(column).__name__} of {found[0]} and shape {found[1]}, but its space "
                f"{in_words(leaf)} needs a tensor of {wanted} and shape {shape}."
            )
        if not wanted.is_floating_point and (self._unchecked or column.device.type == "cpu"):
            check_form(name, leaf, arrays.host(column))
        return column.to(wanted)

    def _begin(self, seed: int | None) -> tuple[Any, Any]:
        obs, info = self._call(self.env.reset, seed=seed)
        for name, value in self._flatten(obs).items():
            if getattr(value, "device", None) != self.device:
                found = f"on {value.device}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise EnvError(
                    f"{type(self.env).__name__} says that its tensors are on {self.device}, but `{name}` is {found}: "
                    "set its attribute `device` to the device of all observations."
                )
        return obs, info

    def _reset_rows(self, rows: NDArray[np.bool_]) -> tuple[Any, Any]:
        mask = torch.from_numpy(rows.copy()).to(self.device)
        given: tuple[Any, Any] = self._call(self.env.reset, options={"reset_mask": mask})
        return given

    def _on_host(self, obs: Any, *rest: Any) -> tuple[Any, ...]:
        reward, terminated, truncated, info = rest
        shape = self._slots.shape
        for name, value in ((col.REWARD, reward), (col.TERMINATED, terminated), (col.TRUNCATED, truncated)):
            is_flag = name != col.REWARD
            fits = isinstance(value, torch.Tensor) and value.shape == shape and not value.is_complex()
            if not fits or (is_flag and value.dtype != torch.bool):
                found = value if not isinstance(value, torch.Tensor) else f"a tensor {arrays.describe(value[None])}"
                raise EnvError(
                    f"`{name}` of {type(self.env).__name__} is {found}, but must be a tensor of {shape[0]} "
                    f"{'bools' if is_flag else 'numbers'}, one for each of the copies."
                )
        dtype = torch.float64 if reward.dtype == torch.float64 else torch.float32
        if not reward.is_floating_point():
            dtype = torch.int64  # exact, and devices without float64 have it
        host = torch.stack([reward.to(dtype), terminated.to(dtype), truncated.to(dtype)]).cpu().numpy()
        if "final_observation" in info:  # Gymnasium's name before 1.0
            info = {"final_obs": info["final_observation"], **info}
        return obs, host[0], host[1] != 0, host[2] != 0, info

    def _final_columns(self, final: Any, rows: NDArray[np.int64]) -> Columns:
        return {name: arrays.take(column, rows) for name, column in self._columns(final).items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`: state in tensors is not captured."""
        return {"how": "new episodes", "why": f"{type(self.env).__name__} is a vector env of torch tensors"}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`: new episodes begin."""
        return f"new episodes: {self.state_dict()['why']}"
