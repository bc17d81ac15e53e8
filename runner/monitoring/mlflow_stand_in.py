"""A stand-in for the package `mlflow` in tests: its client keeps runs."""

import types
from typing import Any


class Mlflow(types.ModuleType):
  """The part of `mlflow` that a writer uses.

  Attributes:
    runs: The runs by id, with `experiment`, `name`, `params`, `metrics` and
      `status`.
    error: Raised by the next calls, or None.
  """

  class MlflowException(Exception):  # noqa: N818
    """As MLflow's own."""

  def __init__(self) -> None:
    super().__init__("mlflow")
    self.runs: dict[str, Any] = {}
    self.experiments: dict[str, str] = {}
    self.error: Exception | None = None
    self.uris: list[str | None] = []
    self.exceptions = self
    self.entities = types.SimpleNamespace(
      Metric=lambda key, value, timestamp, step: types.SimpleNamespace(
        key=key, value=value, timestamp=timestamp, step=step
      ),
      Param=lambda key, value: (key, value),
    )

  def MlflowClient(self, tracking_uri: str | None = None) -> "Mlflow":  # noqa: N802
    """Returns a client."""
    self.uris.append(tracking_uri)
    return self

  def _check(self) -> None:
    if self.error is not None:
      raise self.error

  def get_experiment_by_name(self, name: str) -> Any:
    """Returns an experiment, or None."""
    self._check()
    if name not in self.experiments:
      return None
    return types.SimpleNamespace(experiment_id=self.experiments[name])

  def create_experiment(self, name: str) -> str:
    """Returns the id of a new experiment."""
    return self.experiments.setdefault(name, str(len(self.experiments)))

  def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
    """Starts a run."""
    new = f"run-{len(self.runs)}"
    self.runs[new] = types.SimpleNamespace(
      experiment=experiment_id,
      name=run_name,
      params={},
      metrics=[],
      status="RUNNING",
    )
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=new))

  def update_run(self, run_id: str, status: str | None = None) -> None:
    """Changes the status of a run."""
    self._check()
    self.runs[run_id].status = status

  def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
    """Stores metrics and parameters, at most as many as MLflow takes."""
    self._check()
    assert len(metrics) <= 1000
    assert len(params) <= 100
    assert all(len(value) <= 6000 for _, value in params)
    self.runs[run_id].metrics += metrics
    self.runs[run_id].params.update(params)

  def set_terminated(self, run_id: str) -> None:
    """Ends a run."""
    self._check()
    self.runs[run_id].status = "FINISHED"
