# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases and MLflow as places that metrics go to. Each is imported when it is first used."""

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from etude.errors import DataError, SettingsError
from etude.metrics.sinks import Failures, scalars

_BATCH = 1000  # metrics in a request, the most that MLflow's REST API takes


class WandB:
    """A run of Weights & Biases. Where it goes is for the variables that W&B reads: WANDB_PROJECT, WANDB_MODE, ...

    Numbers stand over ``step``, the step that `write` is given, which may go back, as where a killed run goes on.

    Args:
        name: Of the run; W&B draws one where None.
        folder: Where W&B keeps its files; a folder ``wandb`` is made in it.
        settings: Of ``wandb.init``, such as ``project`` or ``mode``.

    Raises:
        SettingsError: wandb is not installed.
        DataError: the run can't be begun.
    """

    def __init__(self, name: str | None = None, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        wandb = tracker("wandb")
        self._failures = Failures("metrics to wandb")
        with _started("wandb"):
            self.run = wandb.init(
                name=name, dir=None if folder is None else os.fspath(folder), reinit="create_new", **settings
            )
            self.run.define_metric("step", hidden=True)
            self.run.define_metric("*", step_metric="step")
        self._open = True

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers of ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: this is the first write that fails.
        """
        with self._failures.noted():
            self.run.log({**dict(scalars(metrics)), "step": int(step)})

    def close(self) -> None:
        """End the run, once all has been handed over; a second time does nothing.

        Raises:
            DataError: some writes failed, or the run could not be ended.
        """
        if self._open:
            self._open = False
            try:
                self.run.finish()
            except Exception as error:  # noqa: BLE001 - raised in the next line
                self._failures.add(error)
            self._failures.raise_at_close()


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say.

    Args:
        name: Of the run; MLflow draws one where None.

    Raises:
        SettingsError: mlflow is not installed.
        DataError: the run can't be begun.
    """

    def __init__(self, name: str | None = None) -> None:
        self._mlflow = tracker("mlflow")
        self._failures = Failures("metrics to mlflow")
        with _started("mlflow"):
            self._client = self._mlflow.MlflowClient()
            self.run_id: str = self._client.create_run(self._experiment(), run_name=name).info.run_id
        self._open = True

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers of ``metrics`` at ``step`` (env steps, or updates offline).

        Names have ``_`` in place of characters that MLflow does not take.

        Raises:
            DataError: this is the first write that fails.
        """
        now = int(1000 * time.time())
        made = self._mlflow.entities.Metric
        with self._failures.noted():
            found = [made(re.sub(r"[^\w\-./ :]", "_", name), value, now, int(step)) for name, value in scalars(metrics)]
            for i in range(0, len(found), _BATCH):
                self._client.log_batch(self.run_id, metrics=found[i : i + _BATCH])

    def close(self) -> None:
        """End the run; a second time does nothing.

        Raises:
            DataError: some writes failed, or the run could not be ended.
        """
        if self._open:
            self._open = False
            try:
                self._client.set_terminated(self.run_id)
            except Exception as error:  # noqa: BLE001 - raised in the next line
                self._failures.add(error)
            self._failures.raise_at_close()

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))


@contextmanager
def _started(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"metrics can't go to {name} ({type(error).__name__}: {error}): check its settings and the network, or "
            "leave it out."
        ) from error


def tracker(name: str) -> ModuleType:
    """The package ``wandb`` or ``mlflow``.

    Raises:
        SettingsError: it is not installed, or can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(f"metrics can't go to {name} ({error}): pip install 'etude[{name}]'.") from error
