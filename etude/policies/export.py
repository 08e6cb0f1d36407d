# SPDX-License-Identifier: Apache-2.0
"""Export of policies to files that run without Etude: ONNX or torch.export programs, connectors included."""

import contextlib
import copy
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Connector, Inputs, Pipeline, overrides
from etude.connectors.connector import sampled
from etude.errors import ModuleError, SettingsError, how_to_install
from etude.experience.arrays import where_rows, zeros
from etude.modules import Distribution, Module
from etude.modules.module import forward_step
from etude.spaces import Flattener, Space, leaf_dtype, leaf_shape, space_to_json
from etude.urls import is_url, redacted

METADATA: Final = "etude"
"""Key of an exported policy's metadata, which is JSON."""

FIRST: Final = f"{col.STATE_IN}/first"
ROWS: Final = 16
"""Number of observations on which a policy and its torch form are compared."""

TOLERANCE: Final = 1e-5


def advanced(
    connectors: Pipeline,
    inputs: Inputs,
    state: Mapping[str, Any],
    choose: Callable[[Any, Any], tuple[Columns, Columns]],
) -> tuple[Columns, Columns, Columns, dict[str, Any]]:
    """Let a policy with a state make one step, in NumPy or in torch.

    Args:
        connectors: Its connectors.
        inputs: Their inputs. Where an episode begins, the previous action and reward are ignored.
        state: The state before the step, see `Policy.initial_state`.
        choose: Maps the module's observations and its memory to its actions and its other outputs.

    Returns:
        The env's action, the module's, the module's other outputs, and the state after the step.
    """
    first: Any = inputs.first
    memory, before = state.get("memory", {}), inputs.prev_action
    if isinstance(first, Tensor) or first.any():
        memory = {name: where_rows(first, 0.0, part) for name, part in memory.items()}
        inputs.prev_action = {name: where_rows(first, 0, part) for name, part in before.items()}
        inputs.prev_reward = where_rows(first, 0.0, inputs.prev_reward)
    inputs, act = connectors.step_and_act(inputs, state.get("connectors", {}))
    chosen, outputs = choose(inputs.obs, memory)
    acted, kept = act(chosen)
    after = {
        "first": zeros((first.shape[0],), first),
        "action": {name: chosen[name] for name in before},
        "memory": {name: outputs[f"{col.STATE_OUT}{col.SEPARATOR}{name}"] for name in memory},
        "connectors": kept,
    }
    return acted, chosen, outputs, after


class TracedPolicy(nn.Module):
    """`Policy.act` with ``explore=False`` in torch operations only, so that torch can export it.

    It is called with the tensors of `inputs`, in order, and returns those of `outputs`: the columns of the action, then
    the state.

    Args:
        module: The module.
        connectors: The connectors around it.
        obs_space: The env's observation space.
        state: The policy's state at the start of an episode, for one row; {} if it has none.
        takes_reward: Whether it needs the reward of the last step.

    Raises:
        SettingsError: a connector or the distribution has no torch form.
    """

    def __init__(
        self, module: Module, connectors: Pipeline, obs_space: Space, state: Mapping[str, Any], *, takes_reward: bool
    ) -> None:
        super().__init__()
        check_connectors(connectors)
        check_distribution(module.dist)
        self.module = copy.deepcopy(module).cpu().eval().requires_grad_(False)
        self._connectors = connectors.copy()
        self._paths = {f"{col.STATE_IN}/{'/'.join(path)}": path for path, _ in state_leaves(state)}
        self.initial_state: dict[str, NDArray[Any]] = {
            f"{col.STATE_IN}/{'/'.join(path)}": np.asarray(leaf[0]) for path, leaf in state_leaves(state)
        }
        """The state at the start of an episode, for one row, by input name."""
        leaves = Flattener(obs_space, col.OBS).leaves
        self.inputs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in leaves.items()
        }
        """The shape, without the batch axis, and the dtype of each input, by name."""
        self.observed = list(self.inputs)
        if takes_reward:
            self.inputs[col.REWARD] = ((), np.dtype(np.float64))
        self.inputs |= {name: (part.shape, part.dtype) for name, part in self.initial_state.items()}
        self.acted = list(self.module.dist.flatten.leaves)
        self.outputs = [*self.acted, *(_after(name) for name in self.initial_state)]
        """The names of the outputs."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The outputs for the inputs, each ``[B, ...]``."""
        by_name = dict(zip(self.inputs, given, strict=True))
        state = _nested({path: by_name[name] for name, path in self._paths.items()})
        rows = given[0].shape[0]
        first: Any = by_name[FIRST] if FIRST in by_name else torch.ones(rows, dtype=torch.bool)
        reward: Any = by_name.get(col.REWARD, torch.zeros(rows, dtype=torch.float64))
        seen: dict[str, Any] = {name: by_name[name] for name in self.observed}

        def choose(obs: dict[str, Any], memory: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            found = forward_step(self.module, obs, memory)
            return self.module.dist.act(found[col.DIST_INPUTS], None), found

        slots = np.zeros(0, np.int64)  # empty, since the state is passed explicitly
        inputs = Inputs(slots, seen, first, state.get("action", {}), reward)
        acted, _, _, last = advanced(self._connectors, inputs, state, choose)
        after = {f"{col.STATE_IN}/{'/'.join(path)}": leaf for path, leaf in state_leaves(last)}
        return (*(acted[name] for name in self.acted), *(after[name] for name in self.initial_state))

    def samples(self, obs: Mapping[str, NDArray[Any]], num_rows: int) -> tuple[Tensor, ...]:
        """Inputs at the start of an episode, for these observations ``[num_rows, ...]``."""
        found = {name: np.ascontiguousarray(obs[name]) for name in self.observed}
        for name, (shape, dtype) in self.inputs.items():
            start = self.initial_state.get(name, np.zeros(shape, dtype))
            found.setdefault(name, np.repeat(start[None], num_rows, 0))
        return tuple(torch.from_numpy(found[name]) for name in self.inputs)


def check_connectors(connectors: Pipeline) -> None:
    """Raise a SettingsError for a connector without a torch form, with what to do."""
    for connector in connectors.connectors:
        if isinstance(connector, Pipeline):
            check_connectors(connector)
        elif not _has_torch_form(connector):
            raise SettingsError(
                f"the connector `{connector.name}` can't be exported, since it works on NumPy arrays alone. If it "
                "works on torch tensors, too, let its class say so: takes_tensors = True, and if it keeps something "
                "from step to step, a method step (see etude.Connector.step). A function becomes a Connector with "
                "these. Or leave it out, and do its work before or after calling the exported policy."
            )


def check_distribution(dist: Distribution) -> None:
    """Raise a SettingsError for a distribution whose `act` has no torch form, with what to do."""
    try:
        chosen: dict[str, Any] = dist.act(torch.zeros(1, dist.num_inputs), None)
        is_torch, why = all(isinstance(column, Tensor) for column in chosen.values()), "it gives other arrays"
    except Exception as error:  # noqa: BLE001  of the user's code
        is_torch, why = False, f"{type(error).__name__}: {error}"
    if not is_torch:
        raise SettingsError(
            f"the distribution {type(dist).__name__} can't be exported, since its `act` does not work on torch "
            f"tensors ({why}): let `act` give tensors for tensors, computed in torch (see etude.modules.Distribution). "
            "Or export the network (policy.module.net) with torch.export or torch.onnx, and choose actions where it "
            "runs."
        )


def _has_torch_form(connector: Connector) -> bool:
    sees = connector.takes_tensors or not overrides(connector, "online")
    steps = overrides(connector, "step") or (sees and not connector.remembers())
    return steps and (connector.takes_tensors or not overrides(connector, "act"))


def export(
    path: str | os.PathLike[str], traced: TracedPolicy, spaces: tuple[Space, Space], act: Callable[..., Any]
) -> None:
    """Write a policy to a file, replacing an existing one as a whole.

    Args:
        path: The file: ``.onnx``, or ``.pt2`` for `torch.export.load`. Its folder is created if there is none.
        traced: The policy in torch.
        spaces: The env's observation and action spaces.
        act: The policy in NumPy, to compare with: maps columns of observations to columns of actions.

    Raises:
        SettingsError: the path has another suffix or can't be written, or a package is missing.
        ModuleError: torch can't export the network, or its torch form chooses other actions.
    """
    is_path = isinstance(path, str | os.PathLike) and not is_url(os.fspath(path))
    if not is_path or Path(path).suffix not in (".onnx", ".pt2"):
        raise SettingsError(
            "a policy is exported to the path of a file on this machine that ends in .onnx or .pt2, not to "
            f"{redacted(str(path))}."
        )
    path = Path(path)
    if path.suffix == ".onnx":
        _check_packages()
    given = _compared(traced, spaces[0], act)
    names = list(traced.inputs)
    dynamic = {"given": tuple({0: torch.export.Dim.AUTO} for _ in names)}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operation that no other runtime has
    try:
        with torch.no_grad(), _only_errors():
            program = torch.export.export(traced, given, dynamic_shapes=dynamic, strict=False)
            given_names = set(program.graph_signature.user_inputs)
            for node in program.graph.nodes:
                if node.name in given_names and not isinstance(node.meta["val"].shape[0], torch.SymInt):
                    raise ValueError(f"it works with batches of {ROWS} observations alone")
            about = json.dumps(_about(traced, spaces))
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                draft = Path(folder) / path.name
                if path.suffix == ".pt2":
                    torch.export.save(program, draft, extra_files={METADATA: about})
                else:
                    made = torch.onnx.export(
                        program, dynamo=True, input_names=names, output_names=traced.outputs, verbose=False
                    )
                    assert made is not None
                    made.model.metadata_props[METADATA] = about
                    made.save(draft)
                draft.replace(path)
    except OSError as error:
        raise SettingsError(f"{path} can't be written: {error}.") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModuleError(
            f"torch can't export {type(traced.module.net).__name__} ({type(error).__name__}: {reason}). Its forward, "
            "and the connectors of your own, must do the same for all values: no `if` on a tensor, no NumPy."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """Context in which torch warns of nothing, such as of packages that policies don't need. Errors are logged."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"writing ONNX needs the packages onnx and onnxscript ({error}): {how_to_install('export')}. A .pt2 file "
            "needs neither."
        ) from error


def _about(traced: TracedPolicy, spaces: tuple[Space, Space]) -> dict[str, Any]:
    """The metadata of the file."""
    from etude import __version__

    return {
        "format": 1,
        "etude": __version__,
        "obs_space": space_to_json(spaces[0]),
        "action_space": space_to_json(spaces[1]),
        "inputs": [
            {"name": name, "shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in traced.inputs.items()
        ],
        "outputs": list(traced.outputs),
        "state": [
            {"input": name, "output": _after(name), "initial": bool(name == FIRST)} for name in traced.initial_state
        ],
    }


def _compared(traced: TracedPolicy, obs_space: Space, act: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Compare the torch form with the policy on sampled observations; return inputs to trace it with."""
    obs = sampled(obs_space, ROWS)
    if col.OBS_MASK in obs:
        obs[col.OBS_MASK] = np.ones_like(obs[col.OBS_MASK])
    given = traced.samples(obs, ROWS)
    with torch.no_grad():
        found = dict(zip(traced.outputs, traced(*given), strict=True))
    for name, wanted in act(obs).items():
        own = found[name].numpy()
        if own.dtype.kind == "f":
            differ = np.abs(own - wanted) > TOLERANCE * np.maximum(1, np.abs(wanted))
        else:
            differ = own != wanted
        if differ.reshape(ROWS, -1).any(1).sum() > (0 if own.dtype.kind == "f" else ROWS // 4):
            raise ModuleError(
                f"the exported policy would choose other actions than this one: `{name}` differs. A module with an "
                "`actor` of its own, or a distribution whose `act` differs for tensors, can't be exported."
            )
    return given


def _after(name: str) -> str:
    """The name of the output for the state input ``name``."""
    return f"{col.STATE_OUT}{name.removeprefix(col.STATE_IN)}"


def state_leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each leaf of a nested state, after the path of keys that leads to it."""
    for key, part in tree.items():
        if isinstance(part, Mapping):
            yield from state_leaves(part, (*path, key))
        else:
            yield (*path, key), part


def _nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        part = tree
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = leaf
    return tree
