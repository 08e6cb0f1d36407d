# SPDX-License-Identifier: Apache-2.0
"""Formats are read as they are where Ray is not: its Arrow types would be made of what is read, or refuse to be."""

import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

NAMES = ("ArrowTensorType", "ArrowTensorTypeV2", "ArrowVariableShapedTensorType")


@pytest.fixture(autouse=True)
def without_types_of_ray() -> Iterator[None]:
    """Tests of the ray engine may have run in this process before."""
    there = sys.modules.get("ray.data._internal.tensor_extensions.arrow")
    kinds = [] if there is None else [getattr(there, name) for name in NAMES if hasattr(there, name)]
    taken = []
    for kind in kinds:
        made = kind(pa.int64(), 1) if "Variable" in kind.__name__ else kind((1,), pa.int64())
        try:
            pa.unregister_extension_type(made.extension_name)
        except KeyError:
            continue
        taken.append(made)
    yield
    for made in taken:
        pa.register_extension_type(made)
