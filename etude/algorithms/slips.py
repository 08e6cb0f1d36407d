# SPDX-License-Identifier: Apache-2.0
"""Error messages for calls that other libraries accept and Etude does not, with what to write instead."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import gymnasium as gym

from etude.algorithms.config import ActingConfig, AlgorithmConfig
from etude.errors import SettingsError, UnknownNameError
from etude.policies.policy import ACT_ELSEWHERE
from etude.settings import difference, has_other_values, nearest, other_names, own_paths, shown

F = TypeVar("F", bound=Callable[..., Any])


def arguments_checked(method: F) -> F:
    """Decorate an algorithm's method: wrong arguments raise a SettingsError that says what to write instead."""
    signature = inspect.signature(method)
    is_constructor = method.__name__ == "__init__"

    @functools.wraps(method)
    def checked(*given: Any, **named: Any) -> Any:
        if not given or not hasattr(type(given[0]), method.__name__):
            raise SettingsError(
                f"{method.__name__}() is a method of an algorithm object, such as algorithm = "
                "PPO(PPOConfig(env='CartPole-v1')). To create one from a checkpoint, write etude.load(path)."
            )
        if is_constructor:
            _check_config(type(given[0]), given[1:], named)
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise SettingsError(_wrong_call(given, named, method.__name__, signature, str(error))) from None
        return method(*given, **named)

    return cast(F, checked)


def _check_config(cls: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise a SettingsError if an algorithm is given anything but an object of its settings class."""
    wanted: type[AlgorithmConfig] = cls.Config
    first = given[0] if given else named.get("config")
    if isinstance(first, wanted) and len(given) <= 1 and named.keys() <= {"config", "saved_spaces"}:
        return
    name, kind = cls.__name__, wanted.__name__
    if isinstance(first, AlgorithmConfig) and not isinstance(first, wanted):
        raise SettingsError(f"{name} takes a {kind}, not a {type(first).__name__}.")
    settings: dict[str, Any] = dict(first) if isinstance(first, Mapping) else {}
    main = "data" if "data" in {field.name for field in dataclasses.fields(wanted)} else "env"
    meant = {}
    envs = [value for value in given if not (isinstance(value, str) and value.endswith("Policy"))]
    if envs and not isinstance(envs[-1], Mapping | AlgorithmConfig | type | None):
        is_env = hasattr(envs[-1], "step") or (isinstance(envs[-1], str) and envs[-1] in gym.registry)
        if is_env and main == "data":
            meant[main] = "..."
        settings["env" if is_env else main] = envs[-1]  # PPO("CartPole-v1"), PPO("MlpPolicy", env), BC("data")
    settings |= {key: value for key, value in named.items() if key not in ("config", "saved_spaces")}
    known = {field.name for field in dataclasses.fields(wanted)} | own_paths(cls.Config).keys()
    for key, value in settings.items():
        own = next((own for own in (key, *other_names(key)) if own in known), None)
        if own is not None:
            meant[own] = _short(value) if own == key or not has_other_values(own, key) else "..."
    written = ", ".join(f"{own}={value}" for own, value in meant.items())
    raise SettingsError(f"{name} takes one argument, its settings, a {kind}: write {name}({kind}({written or '...'})).")


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) < 40 and not text.startswith("<") else "..."


def _wrong_call(
    given: tuple[Any, ...], named: Mapping[str, Any], name: str, signature: inspect.Signature, error: str
) -> str:
    owner = type(given[0]).__name__
    if name == "learn":  # other libraries' name for `fit`
        error = "it takes the name of a module, and a batch to learn from"
    if name in ("fit", "iterate", "train", "learn"):
        return f"{owner}.{name}: {error}. {how_to_train(given[0], [*given[1:], *named.values()])}"
    takes = [p.name for p in signature.parameters.values() if p.name != "self"]
    unknown = [key for key in named if key not in takes]
    same = [(key, own) for key in unknown for own in other_names(key) if own in takes]
    hint = f" Here it is `{same[0][1]}`.{difference(*same[0])}" if same else ""
    return f"{owner}.{name}: {error}. It takes {', '.join(takes) or 'no arguments'}.{hint}"


def how_to_train(algorithm: Any, values: Any = ()) -> str:
    """How to train for a number of steps: the first whole number above 0 in ``values``, or 10,000."""
    budget = "env_steps" if isinstance(algorithm.config, ActingConfig) else "updates"
    numbers = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    number = int(next((v for v in numbers if v > 0 and float(v).is_integer()), 10_000))
    return f"To train for {number:,} {budget.replace('_', ' ')}, write fit(Stop({budget}={number:_}))."


_ACTING = (
    "In your own loop, algorithm.policy.act(obs) returns actions; if there are several modules, use "
    "algorithm.policies[name].act(obs). To play whole episodes, call evaluate() or record()"
)
_NETWORK = "The network and its spaces are algorithm.module; where there are several, algorithm.policies[name].module"
_LOADING = "load(path) loads a checkpoint's state; etude.load(path) creates the algorithm from one"

_EXPORT = (
    "algorithm.policy.export('policy.onnx') writes the policy for other programs; if there are several modules, it is "
    "algorithm.policies[name].export. save(path) writes a checkpoint"
)

_ATTRIBUTES = {
    f"act {ACT_ELSEWHERE}": _ACTING,
    "get_policy model net network actor q_net policy_net agent actor_critic": _NETWORK,
    "restore load_checkpoint from_checkpoint load_model set_parameters load_state_dict": _LOADING,
    "save_model save_checkpoint save_to_path": "save(path) writes a checkpoint",
    "export export_model export_onnx to_onnx save_policy export_policy_model": _EXPORT,
    "stop shutdown cleanup": "close() ends what the algorithm has started",
    "num_timesteps timesteps total_timesteps num_env_steps": "The steps sampled so far are algorithm.env_steps",
    "get_parameters get_weights state_dict": "The weights are module.state_dict(); all of the state is get_state()",
    "test eval play rollout enjoy evaluate_policy": "evaluate() plays whole episodes and reports their returns",
    "env get_env envs vec_env": "The env that was given is algorithm.config.env",
    "replay_buffer buffer memory": "The replay of DQN and SAC is algorithm.replay",
    "optimizer optimizers": "The optimizers are algorithm.learner.only.optimizers",
    "logger set_logger": "fit() and iterate() return results; etude.metrics has writers for them",
}
"""Names in other libraries' algorithms, and Etude's counterparts."""


def no_such_attribute(algorithm: Any, name: str) -> UnknownNameError:
    """Make the error for an attribute that an algorithm does not have."""
    owner = type(algorithm).__name__
    if algorithm.is_policy_alone:
        return UnknownNameError(
            f"{owner} has no `{name}` here: load_policy makes the policy alone, without `setup`. Take what acting "
            "needs from `self.config`, or use etude.load, which makes the whole algorithm."
        )
    hint = next((hint for names, hint in _ATTRIBUTES.items() if name in names.split()), None)
    if name in ("learn", "train_model", "run"):
        hint = how_to_train(algorithm).rstrip(".")
    if hint is None:
        near = nearest(name, [own for own in dir(type(algorithm)) if own[0] != "_"])
        hint = f"Nearest: `{near}`" if near else "All attributes are listed on the documentation's page API"
    return UnknownNameError(f"{owner} has no `{name}`. {hint}.")
