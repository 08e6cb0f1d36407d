# SPDX-License-Identifier: Apache-2.0
"""RLlib's layouts, written naively: a Python object for each step, as RLlib's own recorder does."""

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BOX = gym.spaces.Box(-10, 10, (3,), np.float32)
NESTED = gym.spaces.Dict({"mode": gym.spaces.Discrete(4), "pos": BOX})
PAIR = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (1,), np.float32)])


def coded(value: Any) -> Any:
    """A value as msgpack-numpy writes it."""
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    if isinstance(value, dict):
        return {key: coded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [coded(v) for v in value]
    return value


def array_text(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()


def space_map(space: gym.Space) -> dict[str, Any]:
    if isinstance(space, gym.spaces.Box):
        low, high = array_text(space.low), array_text(space.high)
        return {"space": "box", "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.str}
    if isinstance(space, gym.spaces.Discrete):
        return {"space": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiDiscrete):
        return {"space": "multi-discrete", "nvec": array_text(space.nvec), "dtype": space.dtype.str}
    if isinstance(space, gym.spaces.MultiBinary):
        return {"space": "multi-binary", "n": space.n}
    if isinstance(space, gym.spaces.Tuple):
        return {"space": "tuple", "spaces": [space_map(s) for s in space.spaces]}
    return {"space": "dict", "spaces": {k: space_map(s) for k, s in space.spaces.items()}}


def buffer(data: Any, space: gym.Space | None = None, finalized: bool = False, lookback: int = 0) -> dict[str, Any]:
    return {
        "data": coded(data),
        "lookback": lookback,
        "finalized": finalized,
        "space": None if space is None else space_map(space),
    }


def episode(steps: int, obs: gym.Space = BOX, action: gym.Space = PAIR, *, name: str = "e0", **changes: Any) -> Any:
    """The state of an episode with samples of the spaces, and what it holds as plain lists."""
    obs.seed(steps), action.seed(steps)
    observations = [obs.sample() for _ in range(steps + 1)]
    actions = [action.sample() for _ in range(steps)]
    rewards = [i / 3 for i in range(steps)]
    logp = [np.float32(-i) for i in range(steps)]
    state: dict[str, Any] = {
        "id_": name,
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": buffer(observations, obs),
        "actions": buffer(actions, action),
        "rewards": buffer(rewards),
        "infos": buffer([{"fuel": i / 2, "note": "x"} for i in range(steps + 1)]),
        "extra_model_outputs": {
            "action_logp": buffer(logp),
            "weights_seq_no": buffer([7] * steps),
            "state_out": buffer([{"h": np.full((1, 2), i, np.float32)} for i in range(steps)]),
        },
        "is_terminated": coded(np.bool_(True)),
        "is_truncated": coded(np.bool_(False)),
        "t_started": 0,
        "t": steps,
        "_observation_space": space_map(obs),
        "_action_space": space_map(action),
        "_start_time": 1.5,
        "custom_data": {},
    }
    return state | changes, {"obs": observations, "action": actions, "reward": rewards, "logp": logp}


def write_items(path: Path, items: list[Any]) -> Path:
    raw = [item if isinstance(item, bytes) else msgpack.packb(item) for item in items]
    pq.write_table(pa.table({"item": pa.array(raw, pa.binary())}), path)
    return path


def tensor(values: np.ndarray, kind: str = "ray.data.arrow_tensor_v2") -> tuple[pa.Field, pa.Array]:
    """A column of Ray's tensor type, by its storage; name it with ``.with_name``."""
    flat = values.reshape(len(values), -1)
    offsets = np.arange(len(values) + 1) * flat.shape[1]
    array = pa.LargeListArray.from_arrays(offsets, pa.array(flat.reshape(-1)))
    shape = str(list(values.shape[1:])).encode()
    metadata = {b"ARROW:extension:name": kind.encode(), b"ARROW:extension:metadata": shape}
    return pa.field("", array.type, metadata=metadata), array


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    """Columns as Arrow arrays, or fields with their arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = [
        (v[0].with_name(k), v[1]) if isinstance(v, tuple) else (pa.field(k, v.type), v) for k, v in columns.items()
    ]
    table = pa.Table.from_arrays([array for _, array in pairs], schema=pa.schema([field for field, _ in pairs]))
    pq.write_table(table, path)
    return path


def packed(pickle: bytes) -> str:
    """A pickle as RLlib packs it."""
    return base64.b64encode(pa.Codec("lz4").compress(pickle, asbytes=True)).decode()


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes with a few of them changed, cut out or doubled."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(len(out))), int(rng.integers(5))
        if kind == 0:
            out[at] = int(rng.integers(256))
        elif kind == 1:
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del out[at : at + int(rng.integers(1, 9))]
        elif kind == 3:
            out[at : at + 4] = b"\xff\xff\xff\xff"
        else:
            out[at:at] = out[at : at + 8]
        if not out:
            break
    return bytes(out)
