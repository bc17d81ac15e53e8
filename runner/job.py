"""The root of a resolved configuration: everything that a run needs to know."""

from collections.abc import Callable, Mapping
import dataclasses

from paxon.inputs import base_input
from paxon.quantization import recipes as recipes_lib
from paxon.runner import task as task_lib
from paxon.runner.settings import compiler, monitoring, training
from paxon.runner.settings import expected_kernels as expected_kernels_lib
from paxon.runner.settings import generation as generation_lib
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as rules_lib
from paxon.sharding import suggestions

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
    mesh: The device mesh as `sharding.mesh.MeshSpec.parse` reads it; `auto` is
      chosen before a program starts.
    rules: From logical axes to mesh axes.
    decode_mesh: The mesh on which samples are drawn, if it is another one: the
      same devices with other axes. It needs `generation`; predictions that an
      input's metrics want are made as evaluation is laid out.
    decode_rules: The rules for samples, if they are others; likewise.
    seed: Of initial values and of every random key of the run.
    num_train_steps: The step at which training ends.
    checkpoint_every_steps: Interval of checkpoints. There is always one at the
      end; `None` means no other.
    eval_every_steps: Interval of evaluations; `None` means only at the end.
    summary_every_steps: Interval of training summaries.
    retention: Which checkpoints are kept; the others are deleted.
    warm_start: Where the first values come from, if the run has no checkpoint
      of its own yet; `None` for initial values.
    early_stopping: When to end before the last step; `None` for never.
    observability: What the training watches beside its figures.
    generation: What to sample at the end; `None` for nothing.
    baselines: Computes figures to compare `bits_per_byte` with, by name. It
      is called after training and may take seconds. `None` for none.
    compiler_options: Options of XLA for the compiled steps, beside or instead
      of `compiler_options.DEFAULTS`; those of another platform
      (`xla_gpu_...` on a TPU) are left out.
    compiler_option_sets: Sets of options by name, see `option_sets`; each
      gives a device what it has for that kind.
    pgle: Whether GPU programs are compiled by a profile of themselves: `auto`
      profiles some of the first steps, a path is a profile of before; `None`
      for no profile. See `programs.profile_guided`.
    weights: How weights are stored that quantization rules cover: `int8:serve`
      uses those of few bits that `int8:convert` makes of a checkpoint; `None`
      as trained. See `programs.serving`.
    expected_kernels: Kernels that the compiled training step must have; a plan
      and a run that have others are refused.
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
  decode_mesh: str | None = None
  decode_rules: rules_lib.Rules | None = None
  seed: int = 0
  retention: training.Retention = dataclasses.field(
    default_factory=training.Retention
  )
  warm_start: training.WarmStart | None = None
  early_stopping: training.EarlyStopping | None = None
  observability: monitoring.MonitoringSettings = dataclasses.field(
    default_factory=monitoring.MonitoringSettings
  )
  generation: generation_lib.GenerationSettings | None = None
  baselines: Callable[[], dict[str, float]] | None = None
  compiler_options: Mapping[str, compiler.Value] = dataclasses.field(
    default_factory=dict
  )
  compiler_option_sets: tuple[str, ...] = ()
  pgle: str | None = None
  weights: str | None = None
  expected_kernels: tuple[expected_kernels_lib.ExpectedKernel, ...] = ()

  def __post_init__(self) -> None:
    if self.mesh != meshes.AUTO:
      meshes.MeshSpec.parse(self.mesh)
    if self.decode_mesh is not None:
      meshes.MeshSpec.parse(self.decode_mesh)
    for field in _INTERVALS:
      value = getattr(self, field)
      if value is not None and value <= 0:
        raise ValueError(f"Job.{field} must be positive, got {value}.")
    if self.num_train_steps < 0:
      raise ValueError(
        f"Job.num_train_steps must not be negative, got {self.num_train_steps}."
      )
    # Steps are counted in int32, and keys are made of 32 bits.
    for field, limit in (("num_train_steps", 31), ("seed", 32)):
      if getattr(self, field) >= 2**limit:
        raise ValueError(
          f"Job.{field} must be less than 2**{limit}, got"
          f" {getattr(self, field)}."
        )
    if self.seed < 0:
      raise ValueError(f"Job.seed must not be negative, got {self.seed}.")
    if self.weights is not None:
      serves = (recipes_lib.Mode.SERVE, recipes_lib.Mode.CONVERT)
      if recipes_lib.parse(self.weights).mode not in serves:
        raise ValueError(
          "Job.weights must end with ':serve' or ':convert', got"
          f" {self.weights!r}; training is None."
        )
    compiler.check_options(self.compiler_options)
    compiler.check_sets(self.compiler_option_sets)
    if "train" in self.eval_inputs:
      raise ValueError(
        "Job.eval_inputs has a split named 'train', which is the name of the"
        " training summaries; choose another name."
      )
    for split, source in self.eval_inputs.items():
      if source.is_endless and source.eval_loop_num_batches is None:
        raise ValueError(
          f"Job.eval_inputs[{split!r}] never ends, so it cannot be evaluated;"
          " set its num_epochs to 1, or eval_loop_num_batches."
        )
    rule = self.early_stopping
    if rule is not None:
      self._check_watched("Job.early_stopping", rule.metric, rule.split)
    if self.retention.metric is not None:
      self._check_watched(
        "Retention.best", self.retention.metric, self.retention.split
      )
    for field in ("decode_mesh", "decode_rules"):
      if self.generation is None and getattr(self, field) is not None:
        raise ValueError(
          f"Job.{field} is set, but Job.generation is None, so no samples are"
          " drawn; leave it unset, or say what to generate."
        )
    if self.generation is not None and not self.task.generates:
      raise ValueError(
        "Job.generation is set, but the task cannot generate: it needs a"
        " tokenizer, and a model with `prefill` and `decode_step`."
      )

  def close(self) -> None:
    """Ends what its inputs have running; they may be read again."""
    for source in (self.train_input, *self.eval_inputs.values()):
      source.close()

  def _check_watched(self, what: str, metric: str, split: str | None) -> None:
    """Checks the metric of an evaluation on which something depends."""
    if self.eval_every_steps is None:
      raise ValueError(
        f"{what} needs evaluations to decide on; set Job.eval_every_steps."
      )
    if split not in self.eval_inputs:
      hint = suggestions.suggest(split or "", self.eval_inputs)
      raise ValueError(
        f"{what} has the metric {metric!r}, but Job.eval_inputs has no split"
        f" {split!r}{hint}"
      )
