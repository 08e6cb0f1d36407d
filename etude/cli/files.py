# SPDX-License-Identifier: Apache-2.0
"""Settings from files, and JSON on standard output."""

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import SettingsError
from etude.urls import is_url, redacted


def read_settings(path: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        SettingsError: there is no such file, it is of another kind or can't be parsed, or is no mapping.
    """
    if is_url(path):
        raise SettingsError(
            f"can't read the settings {redacted(path)}: copy the file to this machine, and give its path."
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"can't read the settings {path}: {reason}.") from error
    if Path(path).suffix not in (".yaml", ".yml", ".json"):
        raise SettingsError(f"can't read the settings {path}: its name must end in .yaml, .yml or .json.")
    import yaml

    try:
        if path.endswith(".json"):
            found = json.loads(text, object_pairs_hook=_once)
        else:
            found = yaml.load(text, _loader())
    except _TwiceError as error:
        raise SettingsError(f"{path} has `{error}` twice: leave one of them out.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} can't be parsed: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError(f"{path} must hold settings by name, such as `num_envs: 8`, each on a line.")
    return found


class _TwiceError(Exception):
    """A key is there twice."""


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


@functools.cache
def _loader() -> Any:
    """YAML's safe loader, which takes the last of equal keys, made to refuse them."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    return Loader


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")  # which escapes what is not ASCII
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """JSON data; numbers that JSON has no word for (NaN, infinities) become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
