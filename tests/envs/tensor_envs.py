# SPDX-License-Identifier: Apache-2.0
"""Vector envs of torch tensors, and a count of what goes from tensors to the host."""

from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch.overrides import TorchFunctionMode

TO_HOST = ("cpu", "numpy", "__array__", "tolist", "item", "__bool__", "__float__", "__int__", "__index__")


class HostCount(TorchFunctionMode):
    """Counts, while it is entered, the tensors that are turned into something of the host, by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        away = name == "to" and args[0].is_cuda and any(str(arg) == "cpu" for arg in args[1:])
        if (name in TO_HOST and name != "numpy") or away:  # `numpy` alone is of tensors that are there already
            self.counts[str(args[0].dtype), tuple(args[0].shape)] += 1
        elif name == "numpy":
            self.counts["numpy", tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


class AsTensors(VectorWrapper):
    """A vector env of NumPy arrays, in tensors that lend its memory; or, elsewhere than on the CPU, in copies."""

    def __init__(self, env: VectorEnv[Any, Any, Any], device: str = "cpu") -> None:
        super().__init__(env)
        self.device = torch.device(device)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._tensor(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._tensor, value))
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype == object:  # a row of each env that has something to say
            like = next(part for part in value if part is not None)
            return self._tensor(_joined([like if part is None else part for part in value]))
        return torch.from_numpy(value).to(self.device)

    def _array(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._array(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._array, value))
        assert value.device == torch.empty(0, device=self.device).device
        return value.cpu().numpy()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._tensor(self.env.reset(seed=seed, options=None if options is None else self._array(options)))

    def step(self, actions: Any) -> Any:
        return self._tensor(self.env.step(self._array(actions)))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _joined([value[key] for value in values]) for key in values[0]}
    return np.stack(values)


class Follow(VectorEnv[Any, Any, Any]):
    """Choose the action that is shown: 1 for each that is right, else 0. Written in torch, on any device.

    Args:
        num_envs: How many copies.
        mode: Each of Gymnasium's.
        device: Where.
        size: There are so many actions.
        length: Steps of an episode.
    """

    def __init__(
        self,
        num_envs: int = 8,
        mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        device: str = "cpu",
        size: int = 3,
        length: int = 5,
    ) -> None:
        self.num_envs, self.mode, self.size, self.length = num_envs, mode, size, length
        self.metadata = {"autoreset_mode": mode}
        self.device = torch.device(device)
        self.single_observation_space = spaces.Box(0, 1, (size,), np.float32)
        self.single_action_space: Any = spaces.Discrete(size)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(self.device)
        self.t = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.renews = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._show()

    def _show(self) -> torch.Tensor:
        self.wanted = torch.randint(self.size, (self.num_envs,), generator=self.generator, device=self.device)
        return torch.nn.functional.one_hot(self.wanted, self.size).float()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator.manual_seed(seed)
        where = self.renews | True if options is None else options["reset_mask"]
        self.t = torch.where(where, 0, self.t)
        self.renews = self.renews & False
        return self._show(), {}

    def step(self, actions: Any) -> Any:
        assert actions.device == self.t.device
        reward = (actions == self.wanted).float()
        self.t = torch.where(self.renews, 0, self.t + 1)
        over = self.t >= self.length
        obs, info = self._show(), {}
        if self.mode is AutoresetMode.NEXT_STEP:
            self.renews = over
        elif self.mode is AutoresetMode.SAME_STEP:
            info = {"final_obs": obs}
            obs, self.t = self._show(), torch.where(over, 0, self.t)
        even = torch.arange(self.num_envs, device=self.device) % 2 == 0
        return obs, reward, over & even, over & ~even, info
