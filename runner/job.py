"""The root of a resolved configuration: everything that a run needs to know."""

from collections.abc import Callable
import dataclasses

from paxon.inputs import base_input
from paxon.runner import generation_settings
from paxon.runner import task as task_lib
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as rules_lib

_INTERVALS = (
  "checkpoint_every_steps",
  "eval_every_steps",
  "summary_every_steps",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A task with its data, its devices and the length of its training.

  Attributes:
    experiment: The import path of the experiment that made this job.
    task: What is trained.
    train_input: The training batches, which need not end.
    eval_inputs: Finite inputs by the name of their split, each evaluated whole.
    mesh: The device mesh as `sharding.mesh.MeshSpec.parse` reads it.
    rules: From logical axes to mesh axes.
    seed: Of initial values and of every random key of the run.
    num_train_steps: The step at which training ends.
    checkpoint_every_steps: Interval of checkpoints. There is always one at the
      end; `None` means no other.
    eval_every_steps: Interval of evaluations; `None` means only at the end.
    summary_every_steps: Interval of training summaries.
    max_checkpoints: How many of the newest checkpoints are kept.
    generation: What to sample at the end; `None` for nothing.
    baselines: Computes figures to compare `bits_per_byte` with, by name. It
      is called after training and may take seconds. `None` for none.
  """

  experiment: str
  task: task_lib.Task
  train_input: base_input.BaseInput
  eval_inputs: dict[str, base_input.BaseInput]
  num_train_steps: int
  checkpoint_every_steps: int | None = None
  eval_every_steps: int | None = None
  summary_every_steps: int = 10
  mesh: str = ""
  rules: rules_lib.Rules = rules_lib.DEFAULT_RULES
  seed: int = 0
  max_checkpoints: int = 3
  generation: generation_settings.GenerationSettings | None = None
  baselines: Callable[[], dict[str, float]] | None = None

  def __post_init__(self) -> None:
    meshes.MeshSpec.parse(self.mesh)
    for field in (*_INTERVALS, "max_checkpoints"):
      value = getattr(self, field)
      if value is not None and value <= 0:
        raise ValueError(f"Job.{field} must be positive, got {value}.")
    if self.num_train_steps < 0:
      raise ValueError(
        f"Job.num_train_steps must not be negative, got {self.num_train_steps}."
      )
    if "train" in self.eval_inputs:
      raise ValueError(
        "Job.eval_inputs has a split named 'train', which is the name of the"
        " training summaries; choose another name."
      )
    if self.generation is not None and not self.task.generates:
      raise ValueError(
        "Job.generation is set, but the task cannot generate: it needs a"
        " tokenizer, and a model with `prefill` and `decode_step`."
      )
