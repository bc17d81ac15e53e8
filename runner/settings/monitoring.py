"""Settings of monitoring: watchdog, spikes, samples, norms, histograms, W&B.

They never change what a run computes.
"""

from collections.abc import Mapping
import dataclasses

from paxon.sharding import checks

# Levels of `layers.summaries`.
MAX_SUMMARY_LEVEL = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
  """When a step counts as hanging: after the larger of both limits.

  Attributes:
    min_seconds: Seconds without a finished step.
    factor: Multiple of the median time of recent steps.
    end_factor: Multiple of that limit after which `runner.main` ends the
      process, so that a cluster or `--max_restarts` restarts it; None for
      never.
    slow_seconds: Least number of seconds before it does so in the first step
      and while it saves a checkpoint.
  """

  min_seconds: float = 300.0
  factor: float = 20.0
  end_factor: float | None = 4.0
  slow_seconds: float = 3600.0

  def __post_init__(self) -> None:
    checks.check_positive(self, "min_seconds", "factor", "slow_seconds")
    checks.check_interval(self, "[1, inf)", "end_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeSettings:
  """When a value is a spike; `runner.monitoring.spikes` has the formula.

  Attributes:
    window: Number of preceding steps to compare with.
    min_steps: With fewer steps, only non-finite values count.
    num_deviations: Robust standard deviations above the median.
    loss_factor: Multiple of the median that is always a spike of the loss.
    grad_norm_factor: The same for the gradient norm.
  """

  window: int = 200
  min_steps: int = 50
  num_deviations: float = 10.0
  loss_factor: float = 1.5
  grad_norm_factor: float = 10.0

  def __post_init__(self) -> None:
    checks.check_positive(self, "window", "min_steps", "num_deviations")
    if self.min_steps > self.window:
      raise ValueError(
        f"SpikeSettings.min_steps ({self.min_steps}) must be at most window"
        f" ({self.window})."
      )
    checks.check_interval(self, "(1, inf)", "loss_factor", "grad_norm_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringSettings:
  """Configurable monitoring of a training run.

  Attributes:
    watchdog: When to dump all stacks of a hanging run; None for never.
    spikes: When to report a spike of the loss or gradient norm; None for never.
    replay_every_steps: Every how many steps one is computed twice, from the
      same state, and compared bit by bit, to find devices that compute wrong
      values; None for never.
    norm_groups: Groups of variables whose norms are metrics: regular
      expressions over logical names, by group name. An empty mapping makes one
      group per top-level module; None makes none.
    histogram_every_steps: Interval of histograms of the variables, which
      TensorBoard shows, or None.
    histogram_names: Regular expression of the logical names of the variables
      with histograms; it must match the whole name. None for all.
    summary_level: Level up to which layers record summaries, from 0.
    sample_every_steps: Interval of samples during training; None draws them at
      its end only.
    wandb_project: Weights & Biases project; None disables it.
    wandb_entity: Weights & Biases user or team; None for the account's default.
    mlflow_experiment: Name of an MLflow experiment; None disables MLflow.
    mlflow_tracking_uri: MLflow server or folder; None for MLflow's default,
      such as the environment variable `MLFLOW_TRACKING_URI`.
  """

  watchdog: WatchdogSettings | None = dataclasses.field(
    default_factory=WatchdogSettings
  )
  spikes: SpikeSettings | None = dataclasses.field(
    default_factory=SpikeSettings
  )
  replay_every_steps: int | None = None
  norm_groups: Mapping[str, str] | None = None
  histogram_every_steps: int | None = None
  histogram_names: str | None = None
  summary_level: int = 0
  sample_every_steps: int | None = None
  wandb_project: str | None = None
  wandb_entity: str | None = None
  mlflow_experiment: str | None = None
  mlflow_tracking_uri: str | None = None

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "replay_every_steps", "histogram_every_steps", "sample_every_steps"
    )
    if not 0 <= self.summary_level <= MAX_SUMMARY_LEVEL:
      raise ValueError(
        "MonitoringSettings.summary_level must be from 0 to"
        f" {MAX_SUMMARY_LEVEL}, got {self.summary_level}."
      )
    if self.histogram_names is not None and self.histogram_every_steps is None:
      raise ValueError(
        f"MonitoringSettings.histogram_names ({self.histogram_names!r})"
        " requires histogram_every_steps."
      )
    self._check_service("wandb_project", "wandb_entity")
    self._check_service("mlflow_experiment", "mlflow_tracking_uri")

  def _check_service(self, name: str, option: str) -> None:
    """Checks the name of a metrics service, and its option."""
    (_, value), (_, other) = checks.get_values(self, name, option)
    if value is not None and not value.strip():
      raise ValueError(
        f"MonitoringSettings.{name} must not be empty; None disables it."
      )
    if other is not None and value is None:
      raise ValueError(
        f"MonitoringSettings.{option} ({other!r}) requires {name}."
      )
