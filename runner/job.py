"""Root of a resolved configuration: everything that defines a run."""

from collections.abc import Callable, Mapping
import dataclasses
import itertools
from typing import Any

from paxon.inputs import base_input
from paxon.quantization import recipes as recipes_lib
from paxon.runner import task as task_lib
from paxon.runner.settings import compiler, monitoring, training
from paxon.runner.settings import expected_kernels as expected_kernels_lib
from paxon.runner.settings import generation as generation_lib
from paxon.sharding import checks, suggestions, variables
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as rules_lib

_INTERVALS = (
  "checkpoint_every_steps",
  "local_checkpoint_every_steps",
  "eval_every_steps",
  "summary_every_steps",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A task with its data, devices and training length.

  Attributes:
    experiment: Import path of the experiment that created this job.
    task: Model, learner and metrics.
    train_input: Training batches; may be endless.
    eval_inputs: Finite evaluation inputs by split.
    num_train_steps: Step at which training ends.
    batch_ramp: Smaller training batches at the start: pairs of a step and the
      global batch size up to it, such as `((1000, 64), (3000, 128))`. Later
      steps have the size of `train_input`.
    checkpoint_every_steps: Interval of checkpoints; None saves only at the end.
    local_checkpoint_every_steps: Interval of checkpoints on local disks of the
      hosts (`checkpoints.local_tier`), or None.
    eval_every_steps: Interval of evaluations; None evaluates only at the end.
    summary_every_steps: Interval of training summaries.
    mesh: Device mesh in the form of `sharding.mesh.MeshSpec.parse`, or `auto`.
    rules: Sharding rules from logical axes to mesh axes.
    partitioner: `(spec, mesh sizes) -> mesh axes of each dimension`, for each
      array of the train state, by the `VariableSpec` of it; None leaves an
      array to the rules. Sampling and serving use the rules.
    decode_mesh: Mesh for sampling over the same devices; None for `mesh`.
      Requires `generation`. Predictions for metrics use `mesh`.
    decode_rules: Sharding rules for sampling; None for `rules`.
    seed: Seed of initial values and all random keys.
    retention: Which checkpoints are kept.
    warm_start: Initial values for a run without a checkpoint of its own.
    early_stopping: When training ends before its last step; None for never.
    non_finite: Policy of training for NaNs.
    observability: Monitoring of the training run.
    generation: Prompts to sample at the end, or None.
    programs: Each a `settings.programs.Program`; run during training, see
      `runner.training.programs`.
    baselines: Computes values to compare `bits_per_byte` with, by name. Called
      after training; may take seconds.
    run_files: Folders to copy to the run directory when training starts, by
      their names there.
    compiler_options: XLA options for compiled steps, on top of
      those of `plan.compiler_options`. Options of other platforms
      (`xla_gpu_...` on a TPU) are ignored.
    compiler_option_sets: Names of sets of XLA options in `settings.compiler`;
      each applies to the hardware that it lists.
    pgle: Profile-guided compilation on GPUs: `auto` profiles some of the first
      steps, a path reads an existing profile; None disables it.
    weights: Storage of weights covered by quantization rules: `int8:convert`
      quantizes a checkpoint, `int8:serve` uses the result; None trains.
    trainable: Regular expressions of the logical names of the variables to
      train; None trains all. Each must match a whole name.
    frozen: Regular expressions of the variables that are not trained, also
      among those of `trainable`.
    merges_adapters: Whether `weights` are those of a model whose adapters are
      merged.
    notes: Lines to print when training starts, about what the settings do not
      cover.
    frozen_dtype: Dtype in which frozen floating-point variables are stored;
      None is their own.
    expected_kernels: Kernels that the compiled training step must use; plans
      and runs fail otherwise.
  """

  experiment: str
  task: task_lib.Task
  train_input: base_input.BaseInput
  eval_inputs: dict[str, base_input.BaseInput]
  num_train_steps: int
  batch_ramp: tuple[tuple[int, int], ...] = ()
  checkpoint_every_steps: int | None = None
  local_checkpoint_every_steps: int | None = None
  eval_every_steps: int | None = None
  summary_every_steps: int = 10
  mesh: str = ""
  rules: rules_lib.Rules = rules_lib.DEFAULT_RULES
  partitioner: variables.Partitioner | None = None
  decode_mesh: str | None = None
  decode_rules: rules_lib.Rules | None = None
  seed: int = 0
  retention: training.Retention = dataclasses.field(
    default_factory=training.Retention
  )
  warm_start: training.WarmStart | None = None
  early_stopping: training.EarlyStopping | None = None
  non_finite: training.NonFinite = dataclasses.field(
    default_factory=training.NonFinite
  )
  observability: monitoring.MonitoringSettings = dataclasses.field(
    default_factory=monitoring.MonitoringSettings
  )
  generation: generation_lib.GenerationSettings | None = None
  programs: tuple[Any, ...] = ()
  baselines: Callable[[], dict[str, float]] | None = None
  run_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  compiler_options: Mapping[str, compiler.Value] = dataclasses.field(
    default_factory=dict
  )
  compiler_option_sets: tuple[str, ...] = ()
  pgle: str | None = None
  weights: str | None = None
  trainable: tuple[str, ...] | None = None
  frozen: tuple[str, ...] = ()
  frozen_dtype: str | None = None
  merges_adapters: bool = False
  notes: tuple[str, ...] = ()
  expected_kernels: tuple[expected_kernels_lib.ExpectedKernel, ...] = ()

  def __post_init__(self) -> None:
    if self.mesh != meshes.AUTO:
      meshes.MeshSpec.parse(self.mesh)
    if self.decode_mesh is not None:
      meshes.MeshSpec.parse(self.decode_mesh)
    checks.check_positive(self, *_INTERVALS)
    checks.check_non_negative(self, "num_train_steps", "seed")
    # Step counts are int32, and random keys have 32-bit seeds.
    for field, value, limit in (
      ("num_train_steps", self.num_train_steps, 31),
      ("seed", self.seed, 32),
    ):
      if value >= 2**limit:
        raise ValueError(
          f"Job.{field} must be less than 2**{limit}, got {value}."
        )
    self._check_local_checkpoints()
    self._check_batch_ramp()
    if self.weights is not None:
      serves = (recipes_lib.Mode.SERVE, recipes_lib.Mode.CONVERT)
      if recipes_lib.parse(self.weights).mode not in serves:
        raise ValueError(
          "Job.weights must end with ':serve' or ':convert', or be None for"
          f" training, got {self.weights!r}."
        )
    compiler.check_options(self.compiler_options)
    compiler.check_sets(self.compiler_option_sets)
    if "train" in self.eval_inputs:
      raise ValueError(
        "Job.eval_inputs: the split name 'train' is reserved for training"
        " summaries; choose another name."
      )
    if self.programs:
      from paxon.runner.settings import programs  # Few jobs need it.

      programs.check(self.programs, self.eval_inputs)
    for split, source in self.eval_inputs.items():
      if source.is_endless and source.eval_loop_num_batches is None:
        raise ValueError(
          f"Job.eval_inputs[{split!r}] is endless; set its num_epochs to 1, or"
          " eval_loop_num_batches."
        )
    rule = self.early_stopping
    if rule is not None:
      self._check_metric("Job.early_stopping", rule.metric, rule.split)
    if self.retention.metric is not None:
      self._check_metric(
        "Retention.best", self.retention.metric, self.retention.split
      )
    for field, value in checks.get_values(self, "decode_mesh", "decode_rules"):
      if self.generation is None and value is not None:
        raise ValueError(f"Job.{field} requires Job.generation, which is None.")
    if self.generation is not None and not self.task.generates:
      raise ValueError(
        "Job.generation requires a model with `prefill` and `decode_step`, and"
        f" {type(self.task.model).__name__} is not one."
      )

  def make_batch_size_schedule(self) -> Callable[[int], int]:
    """Returns the global batch size by training step, the first being 1."""
    ramp, rest = self.batch_ramp, self.train_input.global_batch_size

    def batch_size(step: int) -> int:
      return next((size for last, size in ramp if step <= last), rest)

    return batch_size

  def count_sequences(self) -> int:
    """Returns the number of sequences of all training batches."""
    total = begin = 0
    rest = (self.num_train_steps, self.train_input.global_batch_size)
    for last, size in (*self.batch_ramp, rest):
      end = max(begin, min(last, self.num_train_steps))
      total, begin = total + (end - begin) * size, end
    return total

  @property
  def inputs(self) -> dict[str, base_input.BaseInput]:
    """All inputs by split, with the training input as `train`."""
    return {"train": self.train_input, **self.eval_inputs}

  @property
  def batch_sizes(self) -> tuple[int, ...]:
    """All global batch sizes of training, in order."""
    ramp = (size for _, size in self.batch_ramp)
    return (*ramp, self.train_input.global_batch_size)

  def _check_batch_ramp(self) -> None:
    if not self.batch_ramp:
      return
    steps = (0, *(step for step, _ in self.batch_ramp))
    sizes = (0, *self.batch_sizes)
    for what, values in (("steps", steps), ("batch sizes", sizes)):
      if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(
          f"Job.batch_ramp must have increasing positive {what}, below those of"
          f" train_input, got {self.batch_ramp} before"
          f" {self.train_input.global_batch_size}."
        )
    if not self.train_input.is_resizable:
      raise ValueError(
        "Job.batch_ramp needs a train_input whose positions are the same for"
        " any batch size, such as PackedInput, got"
        f" {type(self.train_input).__name__}."
      )
    for name, value in (
      ("task.learner.privacy", self.task.learner.privacy),
      ("task.reward", self.task.reward),
    ):
      if value is not None:
        raise ValueError(
          f"Job.batch_ramp and {name} are both set; set one of them."
        )

  def _check_local_checkpoints(self) -> None:
    local, other = (
      self.local_checkpoint_every_steps,
      self.checkpoint_every_steps,
    )
    if local is not None and other is not None and local >= other:
      raise ValueError(
        "Job.local_checkpoint_every_steps must be less than"
        f" checkpoint_every_steps ({other}), got {local}."
      )

  def close(self) -> None:
    """Stops the background workers of the inputs; they can be read again."""
    for source in self.inputs.values():
      source.close()

  def _check_metric(self, what: str, metric: str, split: str | None) -> None:
    """Checks that an evaluation computes the metric that a setting uses."""
    if self.eval_every_steps is None:
      raise ValueError(
        f"{what} requires evaluations; set Job.eval_every_steps."
      )
    if split not in self.eval_inputs:
      hint = suggestions.suggest(split or "", self.eval_inputs)
      raise ValueError(
        f"{what} uses the metric {metric!r}, but Job.eval_inputs has no split"
        f" {split!r}{hint}"
      )
