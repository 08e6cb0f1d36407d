# SPDX-License-Identifier: Apache-2.0
"""The state of simulators that are written in C and C++: MuJoCo, and the Arcade Learning Environment (ALE).

A simulator is an attribute of an env. Its state is taken as arrays and bytes, and put into the simulator of a new env
of the same making; both packages are imported by the env, never here.
"""

import hashlib
import hmac
import math
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

State = dict[str, Any]


class Simulator(NamedTuple):
    """How the state of one kind of simulator is taken and put back."""

    get: Callable[[Any], State]
    """Raises ValueError where a part of it can't be had."""
    put: Callable[[Any, State], None]
    """Raises ValueError where the state does not fit."""
    arrays: Callable[[Any], list[NDArray[Any]]]
    """The arrays that lie in its memory: a view of one of them is right once the state was put back."""


def simulator(value: Any) -> Simulator | None:
    """How to deal with ``value``; None if it is no simulator that is known here."""
    return _KNOWN.get(f"{getattr(type(value), '__module__', '')}:{type(value).__qualname__}")


def _arrays_of(struct: Any) -> dict[str, NDArray[Any]]:
    found = {}
    for name in dir(struct):
        if not name.startswith("_") and isinstance(value := getattr(struct, name, None), np.ndarray):
            found[name] = value
    return found


# -- MuJoCo ---------------------------------------------------------------------------------------------------------

_LARGEST: Final = 1e10
"""MuJoCo's ``mjMAXVAL``: it does not go on from larger numbers."""
_NONE: Final = np.empty(0)


def _mujoco() -> Any:
    return sys.modules["mujoco"]


def _pack(arrays: Mapping[str, NDArray[np.float64]]) -> State:
    numbers = [array.reshape(-1) for array in arrays.values()]
    return {"names": ",".join(arrays), "numbers": np.concatenate([_NONE, *numbers])}


def _unpack(state: State, arrays: Mapping[str, NDArray[np.float64]]) -> None:
    """Write what `_pack` has made into arrays of the same names and sizes."""
    numbers = np.asarray(state["numbers"], np.float64)
    if state["names"] != ",".join(arrays) or numbers.shape != (sum(array.size for array in arrays.values()),):
        raise ValueError("the MuJoCo state does not fit a new env")
    begin = 0
    for array in arrays.values():
        array[...] = numbers[begin : begin + array.size].reshape(array.shape)
        begin += array.size


def _model_numbers(model: Any) -> dict[str, NDArray[np.float64]]:
    """Those that an env may change from episode to episode, as to place a goal or to randomise masses."""
    arrays = _arrays_of(model) | {f"opt.{name}": array for name, array in _arrays_of(model.opt).items()}
    return {
        name: array
        for name, array in arrays.items()
        if array.dtype == np.float64 and array.flags.writeable and not name.startswith("hfield_")
    }


def _model_state(model: Any) -> State:
    """What an env may change of the model, and a checksum of all of it."""
    mujoco = _mujoco()
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return {"crc32": zlib.crc32(buffer.data), **_pack(_model_numbers(model))}


def _set_model(model: Any, state: State) -> None:
    if not np.all(np.isfinite(np.asarray(state["numbers"], np.float64))):
        raise ValueError("the MuJoCo model holds numbers that are not finite")
    _unpack(state, _model_numbers(model))
    if _model_state(model)["crc32"] != state["crc32"]:
        raise ValueError("the MuJoCo model is another one in a new env")


def _check_kind(data: Any) -> None:
    """Raise a ValueError where MuJoCo's integration state is not all there is, or holds indices into memory."""
    model = data.model
    if getattr(data, "history", _NONE).size or getattr(data, "plugin_state", _NONE).size:
        raise ValueError("its MuJoCo model has delays or plugins, whose state can't be put back safely")
    if model.opt.enableflags & getattr(_mujoco().mjtEnableBit, "mjENBL_SLEEP", 0):
        raise ValueError("its MuJoCo model lets bodies sleep, which is not in the state that MuJoCo gives")


def _data_numbers(data: Any) -> dict[str, NDArray[np.float64]]:
    """The arrays whose size is the model's, not that of the constraints which happen to be active."""
    bare = _arrays_of(_mujoco().MjData(data.model))
    return {
        name: array
        for name, array in _arrays_of(data).items()
        if array.dtype == np.float64 and array.size and name in bare and bare[name].shape == array.shape
    }


def _data_state(data: Any) -> State:
    """The integration state, and all other numbers: an env may read some that are of the step before."""
    _check_kind(data)
    mujoco = _mujoco()
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, integration, kind)
    return {"version": mujoco.__version__, "integration": integration, **_pack(_data_numbers(data))}


def _set_data(data: Any, state: State) -> None:
    _check_kind(data)
    mujoco = _mujoco()
    if state["version"] != mujoco.__version__:
        raise ValueError(f"the state is of MuJoCo {state['version']}, but {mujoco.__version__} is installed")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.asarray(state["integration"], np.float64)
    if integration.shape != (mujoco.mj_stateSize(data.model, kind),):
        raise ValueError("the MuJoCo state has another size than that of a new env")
    if not np.all(np.abs(integration) <= _LARGEST):
        raise ValueError("the MuJoCo state holds numbers that MuJoCo does not go on from")
    mujoco.mj_setState(data.model, data, integration, kind)
    mujoco.mj_forward(data.model, data)  # finds the contacts
    _unpack(state, _data_numbers(data))


# -- ALE ------------------------------------------------------------------------------------------------------------

_NOOP: Final = 0
_UNLIKELY: Final = 1e-9
_GAME: Final = slice(28, 64)
"""Where the checksum of the game lies in a serialised state, behind its first seven numbers of four bytes."""


def _ale_state(ale: Any) -> State:
    """What ALE serialises, with a signature (`_signature`), and what it does in the next frames.

    One thing is not in a serialised state: the action of the frame before, which the emulator repeats now and then
    (``repeat_action_probability``). What happens next tells which one it was.
    """
    state = ale.cloneSystemState()
    data, frames = state.serialize(), _next_frames(ale, state)
    found = _go_on(ale, state, frames, ("state",))  # to look ahead has changed the action of the frame before
    if not found:
        raise ValueError("the emulator does not tell which action it would repeat")
    version = _ale_version()
    return {"version": version, "data": data, "signature": _signature(version, data), "next": frames}


def _set_ale(ale: Any, stored: State) -> None:
    version, data = _ale_version(), stored["data"]
    if stored["version"] != version:
        raise ValueError(f"the emulator's state is of ale-py {stored['version']}, but {version} is installed")
    if not hmac.compare_digest(stored["signature"], _signature(version, data)):
        raise ValueError("the emulator's state was saved by another user or on another machine")
    if ale.cloneSystemState().serialize()[_GAME] != data[_GAME]:
        raise ValueError("the emulator's state is of another game")
    state = sys.modules["ale_py"].ALEState(data)
    _next_frames(ale, state)  # what it draws depends a little on the frames that it drew before
    if not _go_on(ale, state, stored["next"], ("state", "screen")):
        raise ValueError("the emulator does not go on as it did")


def _go_on(ale: Any, state: Any, expected: State, parts: tuple[str, ...]) -> bool:
    """Put ``state`` back, with that action of the frame before with which the next frames are as ``expected``."""
    repeats = ale.getFloat("repeat_action_probability")
    for action in ale.getLegalActionSet() if 0 < repeats < 1 else [_NOOP]:
        _act_before(ale, action, repeats)
        frames = _next_frames(ale, state)
        if all(frames[part] == expected[part] for part in parts):
            _act_before(ale, action, repeats)
            ale.restoreSystemState(state)
            return True
    return False


def _act_before(ale: Any, action: Any, repeats: float) -> None:
    """Let ``action`` be that of the frame before: often enough that it is not another one which is repeated."""
    if 0 < repeats < 1:
        for _ in range(math.ceil(math.log(_UNLIKELY) / math.log(repeats))):
            ale.act(action)


def _next_frames(ale: Any, state: Any) -> State:
    """Digests of what the emulator does after ``state``, for as long as it may repeat the action before; it is put
    back to ``state``."""
    repeats = ale.getFloat("repeat_action_probability")
    count = math.ceil(math.log(_UNLIKELY) / math.log(repeats)) if 0 < repeats < 1 else 4
    states, screens = hashlib.sha256(), hashlib.sha256()
    try:
        ale.restoreSystemState(state)
        for _ in range(count):
            states.update(str(ale.act(_NOOP)).encode() + ale.cloneSystemState().serialize())
            screens.update(ale.getScreen().data)
    finally:
        ale.restoreSystemState(state)
    return {"state": states.digest(), "screen": screens.digest()}


def _ale_version() -> str:
    return str(sys.modules["ale_py"].__version__)


def _signature(version: str, data: bytes) -> bytes:
    """Tells that this user has saved ``data``.

    ALE reads a serialised state without any checks, so that one made by a stranger could run code. Only what bears a
    signature of this user is ever given to it.
    """
    return hmac.digest(_secret(), version.encode() + b" " + data, "sha256")


def _secret() -> bytes:
    """A random number that only this user knows, in a file of their own."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "etude"
        path = folder / "signing-key"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"signing-key.{secrets.token_hex(8)}"
            with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
            try:
                os.link(new, path)
            except FileExistsError:  # another process was quicker
                pass
            finally:
                new.unlink()
        secret = path.read_bytes()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"there is no place for the key that its state would be signed with ({error})") from error
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{path} is broken: remove it, and a new key is made")
    return secret


_SECRET_BYTES: Final = 32


def _no_arrays(value: Any) -> list[NDArray[Any]]:
    return []


def _all_arrays(value: Any) -> list[NDArray[Any]]:
    return list(_arrays_of(value).values())


_KNOWN: Final = {
    "mujoco._structs:MjModel": Simulator(_model_state, _set_model, _all_arrays),
    "mujoco._structs:MjData": Simulator(_data_state, _set_data, _all_arrays),
    "ale_py._ale_py:ALEInterface": Simulator(_ale_state, _set_ale, _no_arrays),
}
