# SPDX-License-Identifier: Apache-2.0
"""Convert trees of plain data to JSON and a file of arrays, and back, exactly.

JSON contains None, bools, numbers, strings, lists and dicts with string keys directly. Everything else is an object
whose special key ``"$"`` names its kind: ``{"$": "tuple", "items": [...]}``, ``{"$": "array", "name": "module/w",
...}``. Nothing that is read back can run code.

The arrays are in a safetensors file (https://huggingface.co/docs/safetensors): the length of the header as 8 bytes,
little-endian; the header, a JSON object of ``{"dtype", "shape", "data_offsets"}`` by name; the arrays' bytes. They are
written directly from memory, and read one at a time.
"""

import base64
import io
import json
import math
import reprlib
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import CheckpointError
from etude.files import AnyPath, put

if TYPE_CHECKING:
    import torch

Tree: TypeAlias = Any
"""A nested dict, list or tuple of None, bool, int, float, str, bytes, NumPy arrays and scalars, and torch tensors."""

MANIFEST = "checkpoint.json"
"""The file of a checkpoint that contains the JSON, and names the other files."""

KIND = "$"
_JSON_INT = 2**63  # beyond this, other JSON readers lose digits
_RESERVED = "__metadata__"  # reserved by safetensors
_DTYPES = {"BOOL": np.dtype(bool)} | {
    f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}")
    for kind, sizes in (("u", (1, 2, 4, 8)), ("i", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALTERED = "its content does not match its checksum"
_LONGEST_HEADER = 100_000_000  # as in safetensors' own reader
_TORCH_NATIVE = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))
_TORCH_RAW = frozenset(("bfloat16", "complex32", "complex64", "complex128", "uint16", "uint32", "uint64")) | frozenset(
    f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
)
_PLAIN_KINDS = "biufcSUMmV"  # kinds of NumPy's dtypes: all but objects


class Encoder:
    """Converts trees to JSON data; arrays found on the way are collected in ``arrays``, C-contiguous, by name.

    Args:
        arrays_allowed: Whether the tree may contain arrays and tensors.
    """

    def __init__(self, *, arrays_allowed: bool = True) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._arrays_allowed = arrays_allowed
        self._inside: set[int] = set()
        """The ids of the containers that are being encoded."""

    def encode(self, node: Tree, path: str = "") -> Any:
        """Convert ``node`` to JSON data.

        Raises:
            CheckpointError: something in the tree is not plain data; the message names its path and type.
        """
        kind = type(node)
        if node is None or kind is bool or kind is str:
            return node
        if kind is int:
            return node if -_JSON_INT <= node < _JSON_INT else {KIND: "int", "hex": hex(node)}
        if kind is float:
            if np.isfinite(node):
                return node
            return {KIND: "float", "shown": str(node), "hex": struct.pack("<d", node).hex()}
        if kind is bytes:
            return {KIND: "bytes", "base64": base64.b64encode(node).decode()}
        if kind is list or kind is tuple or isinstance(node, Mapping):
            return self._container(node, path)
        if kind is np.ndarray or kind is np.memmap:  # other subclasses contain more than their numbers
            return self._array(node, path)
        if isinstance(node, np.generic):
            return self._scalar(node, path)
        torch = sys.modules.get("torch")  # there is no tensor without it
        if torch is not None and isinstance(node, torch.Tensor):
            return self._tensor(node, path)
        raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold")

    def _container(self, node: Any, path: str) -> Any:
        if id(node) in self._inside:
            raise _refusal(path, f"a {type(node).__name__} that contains itself")
        self._inside.add(id(node))
        try:
            if isinstance(node, list | tuple):
                items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(node)]
                return items if isinstance(node, list) else {KIND: "tuple", "items": items}
            if all(type(key) is str for key in node) and KIND not in node:
                return {key: self.encode(value, f"{path}/{key}") for key, value in node.items()}
            items = [[self.encode(k, f"{path}/<key>"), self.encode(v, f"{path}/{k}")] for k, v in node.items()]
            return {KIND: "dict", "items": items}
        finally:
            self._inside.discard(id(node))

    def _array(self, array: NDArray[Any], path: str) -> Any:
        if array.dtype == object:
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(array.reshape(-1).tolist())]
            return {KIND: "objects", "shape": list(array.shape), "items": items}
        if array.dtype.hasobject or array.dtype.names:
            raise _refusal(path, f"an array of dtype {array.dtype}, which a checkpoint can't hold")
        if array.dtype in _NAMES and array.dtype.isnative:
            return {KIND: "array", "name": self._keep(array, path)}
        raw = np.frombuffer(array.tobytes(), np.uint8)
        return {KIND: "array", "name": self._keep(raw, path), "dtype": array.dtype.str, "shape": list(array.shape)}

    def _scalar(self, scalar: np.generic, path: str) -> Any:
        if scalar.dtype.hasobject or scalar.dtype.names:
            raise _refusal(path, f"a NumPy scalar of dtype {scalar.dtype}, which a checkpoint can't hold")
        return {KIND: "scalar", "shown": str(scalar), "dtype": scalar.dtype.str, "hex": scalar.tobytes().hex()}

    def _tensor(self, tensor: "torch.Tensor", path: str) -> Any:
        import torch

        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _refusal(path, f"a tensor that is not dense ({tensor.layout}, {tensor.device})")
        dtype = str(tensor.dtype).removeprefix("torch.")
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _TORCH_NATIVE:
            return {KIND: "tensor", "name": self._keep(host.numpy(), path)}
        if dtype not in _TORCH_RAW:
            raise _refusal(path, f"a tensor of {dtype}, which a checkpoint can't hold")
        raw = host.reshape(-1).view(torch.uint8).numpy()
        return {KIND: "tensor", "name": self._keep(raw, path), "dtype": dtype, "shape": list(tensor.shape)}

    def _keep(self, array: NDArray[Any], path: str) -> str:
        if not self._arrays_allowed:
            raise _refusal(path, "an array, which does not belong in a checkpoint's metadata")
        base = path.strip("/").encode("utf-8", "replace").decode() or "root"
        name, n = base, 1
        while name in self.arrays or name == _RESERVED:
            n += 1
            name = f"{base}~{n}"
        self.arrays[name] = np.require(array, requirements="C") if array.ndim else array
        return name


def decode(data: Any, arrays: Mapping[str, NDArray[Any]]) -> Tree:
    """The inverse of `Encoder.encode`. Tensors are returned on the CPU, without gradients; mappings as dicts.

    Raises:
        CheckpointError: the data was not made by `Encoder`, or an array is missing.
    """
    if isinstance(data, list):
        return [decode(item, arrays) for item in data]
    if not isinstance(data, dict):
        return data
    if KIND not in data:
        return {key: decode(value, arrays) for key, value in data.items()}
    reader = _READERS.get(data[KIND]) if isinstance(data[KIND], str) else None
    if reader is None:
        raise CheckpointError(
            f"the checkpoint holds an unknown kind of value, {reprlib.repr(data[KIND])}: it is broken or newer."
        )
    try:
        return reader(data, arrays)
    except (CheckpointError, OSError, RecursionError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint is broken at {reprlib.repr(data)}: {type(error).__name__}: {error}. Restore it from a "
            "copy."
        ) from error


def _read_objects(data: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    out = np.empty(len(data["items"]), object)
    for i, item in enumerate(data["items"]):
        out[i] = decode(item, arrays)
    return out.reshape(data["shape"])


def _read_array(data: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    array = arrays[data["name"]]
    if "dtype" in data:
        return _from_bytes(array.tobytes(), data["dtype"], data["shape"])
    return array if array.flags.writeable else array.copy()


def _read_tensor(data: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> "torch.Tensor":
    import torch

    array = arrays[data["name"]]
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if "dtype" not in data:
        return tensor
    if data["dtype"] not in _TORCH_RAW:
        raise ValueError(f"{data['dtype']!r} is not a dtype")
    dtype: torch.dtype = getattr(torch, data["dtype"])
    if not tensor.numel():
        return torch.empty(_of_nothing(data["shape"]), dtype=dtype)
    return tensor.view(dtype).reshape(data["shape"])


def _from_bytes(data: bytes, dtype_name: str, shape: Sequence[int]) -> NDArray[Any]:
    if not isinstance(dtype_name, str):
        raise ValueError(f"{dtype_name!r} is not a dtype")
    dtype = np.dtype(dtype_name)
    if dtype.kind not in _PLAIN_KINDS or dtype.hasobject or dtype.names:
        raise ValueError(f"dtype {dtype_name!r} is not plain")
    if data:
        return np.ndarray(shape, dtype, buffer=bytearray(data))
    return np.zeros(shape if not dtype.itemsize else _of_nothing(shape), dtype)


def _of_nothing(shape: Sequence[int]) -> Sequence[int]:
    if math.prod(shape):
        raise ValueError(f"there is no data for the shape {shape}")
    return shape


_READERS: dict[str, Callable[[dict[str, Any], Mapping[str, NDArray[Any]]], Tree]] = {
    "int": lambda data, _: int(data["hex"], 16),
    "float": lambda data, _: struct.unpack("<d", bytes.fromhex(data["hex"]))[0],
    "bytes": lambda data, _: base64.b64decode(data["base64"], validate=True),
    "tuple": lambda data, arrays: tuple(decode(item, arrays) for item in data["items"]),
    "dict": lambda data, arrays: {decode(k, arrays): decode(v, arrays) for k, v in data["items"]},
    "objects": _read_objects,
    "array": _read_array,
    "scalar": lambda data, _: _from_bytes(bytes.fromhex(data["hex"]), data["dtype"], ())[()],
    "tensor": _read_tensor,
}


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"can't save `{path.strip('/') or 'the tree'}`: it is {what}. Turn it into numbers, strings, arrays, lists, "
        "tuples or dicts of these first."
    )


# -- the file of arrays ------------------------------------------------------------------------------------------------


def write_arrays(path: AnyPath, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Write C-contiguous arrays of native dtypes to a new file, without copying the numbers.

    Returns:
        The description of the file in a manifest, for `Arrays`: its name as ``file``, its size as ``bytes``, the CRC-32
        of the header with its length as ``header``, and those of the arrays, by name, as ``crc32``.
    """
    ordered = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # this aligns each array
    buffers = [arrays[name].reshape(-1).view(np.uint8).data for name in ordered]
    header: dict[str, Any] = {}
    end = 0
    for key, buffer in zip(ordered, buffers, strict=True):
        begin, end = end, end + len(buffer)
        shape, dtype = arrays[key].shape, _NAMES[arrays[key].dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with ThreadPoolExecutor(1) as pool:  # neither checksums nor writes hold the interpreter lock
        sums = pool.map(zlib.crc32, buffers)
        put(path, [head, *buffers])
        crc32 = dict(zip(ordered, sums, strict=True))
    return {"file": path.name, "bytes": len(head) + end, "header": zlib.crc32(head), "crc32": crc32}


class Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of an open safetensors file, each read and checked against its checksum on access.

    Args:
        file: The file.
        state: Its description in the manifest; see `write_arrays`.
        name: The name of the file in messages.

    Raises:
        CheckpointError: the file is not what the manifest says.
    """

    def __init__(self, file: BinaryIO, state: Mapping[str, Any], name: str) -> None:
        self._file, self._name = file, name
        size = file.seek(0, io.SEEK_END)
        if size != state["bytes"]:
            raise self._broken(f"it has {size:,} bytes, but {MANIFEST} says {state['bytes']:,}")
        file.seek(0)
        self._sums: Mapping[str, int] = state["crc32"]
        length = self._file.read(8)
        self._start = 8 + int.from_bytes(length, "little")
        text = self._file.read(min(self._start, _LONGEST_HEADER) - 8)
        if zlib.crc32(length + text) != state["header"]:
            raise self._broken(_ALTERED)
        try:
            header = json.loads(text).items()
            self._entries = {key: _entry(value, size - self._start) for key, value in header if key != _RESERVED}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header can't be read ({type(error).__name__}: {error})") from error

    def __getitem__(self, name: str) -> NDArray[Any]:
        dtype, shape, begin = self._entries[name]
        array = np.empty(shape, dtype)
        buffer = array.reshape(-1).view(np.uint8).data
        self._file.seek(self._start + begin)
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if count < len(buffer) or zlib.crc32(buffer) != self._sums.get(name):
            raise self._broken(_ALTERED)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is broken: {what}. Restore it from a copy.")


def _entry(value: Mapping[str, Any], size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The dtype, the shape and the first byte of an array, in a file with ``size`` bytes of arrays."""
    dtype, (begin, end) = _DTYPES[value["dtype"]], map(int, value["data_offsets"])
    shape = tuple(int(n) for n in value["shape"])
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError("a shape does not fit its bytes")
    if not 0 <= begin <= end <= size:
        raise ValueError("an array is outside of the file")
    return dtype, shape, begin
