"""What a training run watches: the part `observability` of a job."""

from collections.abc import Mapping
import dataclasses

from paxon.runner.monitoring import spikes as spikes_lib
from paxon.runner.monitoring import watchdog as watchdog_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The parts that can be chosen; the others are always there.

  Nothing here changes what a run computes.

  Attributes:
    watchdog: When to dump all stacks; None for never.
    spikes: What counts as a jump of the loss; None for no reports.
    norm_groups: Groups of variables whose norms are metrics: regular
      expressions over logical names, by the group's name. Empty groups by the
      modules at the top; None for no groups.
    wandb_project: Where Weights & Biases lists the run; None does not send.
    wandb_entity: The user or team there; None is the account's default.
  """

  watchdog: watchdog_lib.WatchdogSettings | None = dataclasses.field(
    default_factory=watchdog_lib.WatchdogSettings
  )
  spikes: spikes_lib.SpikeSettings | None = dataclasses.field(
    default_factory=spikes_lib.SpikeSettings
  )
  norm_groups: Mapping[str, str] | None = None
  wandb_project: str | None = None
  wandb_entity: str | None = None

  def __post_init__(self) -> None:
    if self.wandb_project is not None and not self.wandb_project.strip():
      raise ValueError(
        "Settings.wandb_project must not be empty; None does not send."
      )
    if self.wandb_entity is not None and self.wandb_project is None:
      raise ValueError(
        f"Settings.wandb_entity ({self.wandb_entity!r}) has no meaning without"
        " wandb_project."
      )
