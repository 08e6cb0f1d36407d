# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics to Weights & Biases and MLflow. Each package is imported when it is first used."""

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from etude.errors import DataError, SettingsError, how_to_install
from etude.metrics.writers import Sink, scalars

_BATCH = 1000  # metrics per request, the maximum of MLflow's REST API


class WandB(Sink):
    """Writes metrics to a run of Weights & Biases, configured by W&B's variables: WANDB_PROJECT, WANDB_MODE, ...

    Metrics are plotted over the ``step`` passed to `write`, which may decrease, for example after a killed run is
    resumed.

    Args:
        name: The name of the run; if None, W&B generates one.
        folder: The folder of W&B's files, in which a folder ``wandb`` is made.
        settings: Arguments of ``wandb.init``, such as ``project`` or ``mode``.

    Raises:
        SettingsError: wandb is not installed.
        DataError: the run can't be started.
    """

    def __init__(self, name: str | None = None, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__("metrics to wandb")
        wandb = tracker("wandb")
        with _started("wandb"):
            self.run = wandb.init(
                name=name, dir=None if folder is None else os.fspath(folder), reinit="create_new", **settings
            )
            self.run.define_metric("step", hidden=True)
            self.run.define_metric("*", step_metric="step")

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers in ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: this is the first write that fails.
        """
        with self._writing():
            self.run.log({**scalars(metrics), "step": int(step)})

    def _finish(self) -> None:
        self.run.finish()


class MLflow(Sink):
    """Writes metrics to a run of MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

    Args:
        name: The name of the run; if None, MLflow generates one.

    Raises:
        SettingsError: mlflow is not installed.
        DataError: the run can't be started.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__("metrics to mlflow")
        self._mlflow = tracker("mlflow")
        with _started("mlflow"):
            self._client = self._mlflow.MlflowClient()
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self.run_id: str = self._client.create_run(str(experiment_id), run_name=name).info.run_id

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers in ``metrics`` at ``step`` (env steps, or updates offline).

        Characters in names that MLflow does not accept are replaced by ``_``.

        Raises:
            DataError: this is the first write that fails.
        """
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        with self._writing():
            found = [
                metric(re.sub(r"[^\w\-./ :]", "_", name), value, now, int(step))
                for name, value in scalars(metrics).items()
            ]
            for i in range(0, len(found), _BATCH):
                self._client.log_batch(self.run_id, metrics=found[i : i + _BATCH])

    def _finish(self) -> None:
        self._client.set_terminated(self.run_id)


@contextmanager
def _started(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"metrics can't go to {name} ({type(error).__name__}: {error}): check its settings and the network, or "
            "don't use it."
        ) from error


def tracker(name: str) -> ModuleType:
    """Import the package ``wandb`` or ``mlflow``.

    Raises:
        SettingsError: it is not installed, or can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(f"metrics can't go to {name} ({error}): {how_to_install(name)}.") from error
