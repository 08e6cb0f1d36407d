# SPDX-License-Identifier: Apache-2.0
"""The state of simulators written in C and C++: MuJoCo, and the Arcade Learning Environment (ALE).

A simulator is an attribute of an env. Its state is captured as arrays and bytes, and restored in the simulator of a new
env of the same kind. The env imports both packages; this module never does.
"""

import hashlib
import hmac
import math
import os
import pathlib
import secrets
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.files import publish_new

State = dict[str, Any]


class Simulator(NamedTuple):
    """The functions that capture and restore the state of one kind of simulator."""

    get: Callable[[Any], State]
    """Raises ValueError if a part of the state can't be captured."""
    put: Callable[[Any, State], None]
    """Raises ValueError if the state does not fit."""


def simulator(value: Any) -> Simulator | None:
    """The functions for ``value``; None if it is not a known simulator."""
    kind = type(value)
    return _KNOWN.get(f"{getattr(kind, '__module__', '')}:{kind.__qualname__}")


def arrays_of(struct: Any) -> dict[str, NDArray[Any]]:
    """The arrays that a simulator shows as attributes, by name."""
    found = {}
    for name in dir(struct):
        if not name.startswith("_") and isinstance(value := getattr(struct, name, None), np.ndarray):
            found[name] = value
    return found


# -- MuJoCo ---------------------------------------------------------------------------------------------------------

_LARGEST: Final = 1e10
"""MuJoCo's ``mjMAXVAL``: it resets a simulation with larger numbers."""
_NONE: Final = np.empty(0)


def _mujoco() -> Any:
    return sys.modules["mujoco"]


def _pack(arrays: Mapping[str, NDArray[np.float64]]) -> State:
    numbers = [array.reshape(-1) for array in arrays.values()]
    return {"names": ",".join(arrays), "numbers": np.concatenate([_NONE, *numbers])}


def _unpack(state: State, arrays: Mapping[str, NDArray[np.float64]]) -> None:
    """Write the result of `_pack` into arrays of the same names and sizes."""
    numbers = np.asarray(state["numbers"], np.float64)
    if state["names"] != ",".join(arrays) or numbers.shape != (sum(array.size for array in arrays.values()),):
        raise ValueError("the MuJoCo state does not fit a new env")
    begin = 0
    for array in arrays.values():
        array[...] = numbers[begin : begin + array.size].reshape(array.shape)
        begin += array.size


def _model_numbers(model: Any) -> dict[str, NDArray[np.float64]]:
    """The model's arrays that an env may change between episodes, to place a goal or randomise masses for example."""
    arrays = arrays_of(model) | {f"opt.{name}": array for name, array in arrays_of(model.opt).items()}
    return {
        name: array
        for name, array in arrays.items()
        if array.dtype == np.float64 and array.flags.writeable and not name.startswith("hfield_")
    }


def _model_state(model: Any) -> State:
    """The numbers of the model that an env may change, and a checksum of the whole model."""
    mujoco = _mujoco()
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return {"crc32": zlib.crc32(buffer.data), **_pack(_model_numbers(model))}


def _set_model(model: Any, state: State) -> None:
    if not np.all(np.isfinite(np.asarray(state["numbers"], np.float64))):
        raise ValueError("the MuJoCo model holds numbers that are not finite")
    _unpack(state, _model_numbers(model))
    if _model_state(model)["crc32"] != state["crc32"]:
        raise ValueError("the MuJoCo model differs in a new env")


def _check_kind(data: Any) -> None:
    """Raise a ValueError if MuJoCo is too old, or its integration state is incomplete for this model or contains memory
    indices."""
    if not hasattr(data, "model"):
        raise ValueError(f"MuJoCo {_mujoco().__version__} can't save its state; 3.1 and newer can")
    model = data.model
    if getattr(data, "history", _NONE).size or getattr(data, "plugin_state", _NONE).size:
        raise ValueError("its MuJoCo model has delays or plugins, whose state can't be restored safely")
    if model.opt.enableflags & getattr(_mujoco().mjtEnableBit, "mjENBL_SLEEP", 0):
        raise ValueError("its MuJoCo model lets bodies sleep, which is not in the state that MuJoCo gives")


def _data_numbers(data: Any) -> dict[str, NDArray[np.float64]]:
    """The arrays whose sizes depend on the model, not on the constraints that are active at the moment."""
    bare = arrays_of(_mujoco().MjData(data.model))
    return {
        name: array
        for name, array in arrays_of(data).items()
        if array.dtype == np.float64 and array.size and name in bare and bare[name].shape == array.shape
    }


def _data_state(data: Any) -> State:
    """The integration state and all other numbers, because envs may read some that date from the previous step."""
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
        raise ValueError("the MuJoCo state holds numbers that are too large for MuJoCo")
    mujoco.mj_setState(data.model, data, integration, kind)
    mujoco.mj_forward(data.model, data)  # finds the contacts
    _unpack(state, _data_numbers(data))


# -- ALE ------------------------------------------------------------------------------------------------------------

_NOOP: Final = 0
_UNLIKELY: Final = 1e-9
_GAME: Final = slice(28, 64)
"""The position of the game's checksum in a serialised state, after seven numbers of four bytes."""


def _ale_state(ale: Any) -> State:
    """ALE's serialised state with a signature (`_signature`), and digests of its next frames.

    The serialised state lacks one thing: the action of the previous frame, which the emulator repeats with
    ``repeat_action_probability``. The next frames show which action it was.
    """
    state = ale.cloneSystemState()
    data, frames = state.serialize(), _next_frames(ale, state)
    found = _go_on(ale, state, frames, ("state",))  # restores the previous action, which `_next_frames` changed
    if not found:
        raise ValueError("the emulator does not show which action it would repeat")
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
    _next_frames(ale, state)  # the screen depends a little on the frames drawn before
    if not _go_on(ale, state, stored["next"], ("state", "screen")):
        raise ValueError("the emulator does not continue as before")


def _go_on(ale: Any, state: Any, expected: State, parts: tuple[str, ...]) -> bool:
    """Restore ``state`` with the previous action for which the next frames equal ``expected``; False if none does."""
    count = _most_repeats(ale)
    for action in ale.getLegalActionSet() if count else [_NOOP]:
        _act(ale, action, count)
        frames = _next_frames(ale, state)
        if all(frames[part] == expected[part] for part in parts):
            _act(ale, action, count)
            ale.restoreSystemState(state)
            return True
    return False


def _most_repeats(ale: Any) -> int:
    """The number of frames after which the previous action is no longer repeated; 0 if actions never are."""
    repeats = ale.getFloat("repeat_action_probability")
    return math.ceil(math.log(_UNLIKELY) / math.log(repeats)) if 0 < repeats < 1 else 0


def _act(ale: Any, action: Any, count: int) -> None:
    for _ in range(count):
        ale.act(action)


def _next_frames(ale: Any, state: Any) -> State:
    """Digests of the frames after ``state``, for as long as the previous action may be repeated. Ends in ``state``."""
    states, screens = hashlib.sha256(), hashlib.sha256()
    try:
        ale.restoreSystemState(state)
        for _ in range(_most_repeats(ale) or 4):
            states.update(str(ale.act(_NOOP)).encode() + ale.cloneSystemState().serialize())
            screens.update(ale.getScreen().data)
    finally:
        ale.restoreSystemState(state)
    return {"state": states.digest(), "screen": screens.digest()}


def _ale_version() -> str:
    return str(sys.modules["ale_py"].__version__)


def _signature(version: str, data: bytes) -> bytes:
    """A signature that shows that this user has saved ``data``.

    ALE reads a serialised state without any checks, so a manipulated one could run code. It is therefore only given
    states with this user's signature.
    """
    return hmac.digest(_secret(), version.encode() + b" " + data, "sha256")


def _secret() -> bytes:
    """A random key that only this user can read, in a file."""
    try:
        folder = pathlib.Path(os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state") / "etude"
        path = folder / "signing-key"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"signing-key.{secrets.token_hex(8)}"
            with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
            try:
                publish_new(new, path)
            except FileExistsError:  # another process was faster
                new.unlink()
        secret = path.read_bytes()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"there is no place for the key to sign its state ({error})") from error
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{path} is broken: remove it to get a new key")
    return secret


_SECRET_BYTES: Final = 32


_KNOWN: Final = {
    "mujoco._structs:MjModel": Simulator(_model_state, _set_model),
    "mujoco._structs:MjData": Simulator(_data_state, _set_data),
    "ale_py._ale_py:ALEInterface": Simulator(_ale_state, _set_ale),
}
