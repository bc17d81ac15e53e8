"""Experiments: named training recipes, varied by knobs.

```python
class Small(experiment.Experiment):
  num_train_steps = 1000  # A knob of all experiments.
  global_batch_size = 16
  embed_dim: int = 128  # A new knob.

  def task(self): ...  # fdl.Config of a Task, made from self.embed_dim, ...
  def datasets(self): ...  # {"train": fdl.Config, "validation": ...}


class Wide(Small):
  embed_dim = 512
```

`Wide().job()` is the resolved configuration of a run: a `fdl.Config[Job]` that
depends on the knobs only. Undeclared knobs and knobs without effect are errors.
"""

import abc
from collections.abc import Callable, Sequence
import inspect
import math
from typing import Any, ClassVar, Literal, TypeVar

import fiddle as fdl

from paxon.inputs import base_input
from paxon.quantization import rules as rules_of_quantization
from paxon.runner import job as job_lib
from paxon.runner import knobs as knobs_lib
from paxon.runner import task as task_lib
from paxon.runner.configuration import tree
from paxon.runner.settings import adapters as adapters_lib
from paxon.runner.settings import compiler, monitoring, training
from paxon.runner.settings import expected_kernels as expected_kernels_lib
from paxon.runner.settings import generation as generation_lib
from paxon.runner.settings import quantization as quantization_lib
from paxon.sharding import rule_sets
from paxon.sharding import rules as rules_lib

# Not `typing.Self`, which the shape checker of the tests cannot read.
_Self = TypeVar("_Self", bound="Experiment")

_TRAIN = "train"
_BATCH, _PER_DEVICE = knobs_lib.BATCH, knobs_lib.PER_DEVICE


class Experiment(
  generation_lib.GenerationKnobs,
  quantization_lib.QuantizationKnobs,
  adapters_lib.AdapterKnobs,
  compiler.CompilerKnobs,
  abc.ABC,
):
  """Base class of experiments.

  Subclasses declare knobs as annotated attributes and implement `task` and
  `datasets`. Knobs are read as attributes of the instance; None means unset.
  The knobs of a feature are declared by its group, a base of this class; `main
  --help --exp=NAME` lists all of them.

  Attributes:
    num_train_steps: The step at which training ends.
    num_epochs: Passes over the training data; sets `num_train_steps`. All
      examples are read once to count the batches.
    global_batch_size: Sequences in a training batch, over all devices.
    per_device_batch_size: Sequences per device of `mesh`, whose sizes must be
      fixed; sets `global_batch_size`. May be a fraction, such as 0.25.
    checkpoint_every_steps: Interval of checkpoints; None for one at the end.
    local_checkpoint_every_steps: Interval of further checkpoints in
      `--local_checkpoint_dir`, smaller than `checkpoint_every_steps`.
    eval_every_steps: Interval of evaluations; None for one at the end.
    summary_every_steps: Interval of training summaries.
    seed: Seed of initial values, random keys and data order.
    mesh: Sizes of the mesh axes, such as `fsdp=4,tensor=2`; one may be -1 (all
      remaining devices). `auto` chooses a mesh when the run starts.
    rules: Name of a set of sharding rules, see `sharding.rule_sets`.
    decode_mesh: Mesh for sampling, over the same devices (so without `dcn.`);
      None for `mesh`.
    decode_rules: Rules for sampling, such as `weight_stationary`, or `rules`.
    dtype: Compute dtype of modules that leave it unset, not of parameters.
    non_finite: Policy for a loss, gradient or state of training that is not
      finite: `stop` ends the run with an error, `roll_back` restores the newest
      checkpoint and continues with later data, `skip` makes no update (it
      cannot change when a run resumes), `ignore` trains on.
    name: Name in reports; default: the class name.
  """

  num_train_steps: int
  num_epochs: int | None = None
  global_batch_size: int
  per_device_batch_size: float | None = None
  checkpoint_every_steps: int | None = None
  local_checkpoint_every_steps: int | None = None
  eval_every_steps: int | None = None
  summary_every_steps: int = 10
  seed: int = 0
  mesh: str = "data=-1"
  rules: str = rule_sets.DEFAULT
  decode_mesh: str | None = None
  decode_rules: str | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  non_finite: Literal["stop", "roll_back", "skip", "ignore"] = "stop"
  name: ClassVar[str] = ""
  # Knobs that hold a path or pattern of files. Relative ones are stored as
  # absolute, so that a run can be resumed from any directory.
  path_knobs: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls, **kwargs: object) -> None:
    """Checks the knobs of a new experiment class; raises KnobError."""
    if "job" in vars(cls):
      raise knobs_lib.KnobError(
        f"{cls.__name__}.job: job() must not be overridden, because it checks"
        " that every knob is read; override adjust(config) instead."
      )
    if "name" not in vars(cls):
      cls.name = cls.__name__
    super().__init_subclass__(**kwargs)

  def _get_knob(self, name: str) -> Any:
    if name == _BATCH and self.per_device_batch_size is not None:
      return self._count_sequences(self.per_device_batch_size)
    return super()._get_knob(name)

  def _count_sequences(self, per_device: float) -> int:
    """Returns the sequences of a batch with this number per device."""
    # Loads jax, which many users of this module do not need.
    from paxon.sharding import mesh as mesh_lib

    text = self.mesh
    where = f"{type(self).__name__}.{_PER_DEVICE}"
    sizes = [-1]
    if text.strip() != mesh_lib.AUTO:
      spec = mesh_lib.MeshSpec.parse(text)
      sizes = [*spec.ici.values(), *spec.dcn.values()]
    if -1 in sizes:
      raise knobs_lib.KnobError(
        f"{where} requires a mesh of fixed sizes, such as fsdp=8, got"
        f" mesh={text}; or set {_BATCH}."
      )
    devices = math.prod(sizes)
    count = per_device * devices
    if count < 1 or not float(count).is_integer():
      raise knobs_lib.KnobError(
        f"{where} ({per_device}) times the {devices} devices of mesh={text}"
        f" must be a positive whole number, got {count:g}."
      )
    return int(count)

  @classmethod
  def import_path(cls) -> str:
    """Returns the name of this class as `--exp` takes it."""
    return f"{cls.__module__}.{cls.__qualname__}"

  def replace(self: _Self, **given: object) -> _Self:
    """Returns a copy with other values for some knobs, or raises KnobError."""
    kept = dict(self._given)
    for pair in knobs_lib.EXCLUSIVE:
      for one, other in (pair, pair[::-1]):
        if given.get(one) is not None:
          kept.pop(other, None)
    return type(self)(**{**kept, **given})

  def shrink(self: _Self) -> _Self:
    """Returns the experiment at toy size, for a smoke test on a CPU.

    By default two steps of at most eight sequences, each with an evaluation and
    a checkpoint. Subclasses shrink the model too:
    `return super().shrink().replace(embed_dim=16)`.
    """
    toy: dict[str, object] = {
      _PER_DEVICE: None,
      "num_train_steps": 2 if self.num_epochs else min(self.num_train_steps, 2),
      "global_batch_size": min(self.global_batch_size, 8),
      "summary_every_steps": 1,
    }
    for interval in ("checkpoint_every_steps", "eval_every_steps"):
      if getattr(self, interval) is not None:
        toy[interval] = 1
    return self.replace(**toy)

  @abc.abstractmethod
  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model, learner and metrics."""

  @abc.abstractmethod
  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns the inputs by split: `train`, and all evaluation splits."""

  def generation(self) -> fdl.Config[generation_lib.GenerationSettings] | None:
    """Returns prompts and sampler; None for no samples at the end of a run.

    By default those of the knobs, and None if no knob is set.

    Raises:
      knobs.KnobError: `top_k`, `top_p` or `min_p` is set without
        `temperature`.
    """
    return generation_lib.from_knobs(
      self.get_group(generation_lib.GenerationKnobs)
    )

  def early_stopping(self) -> fdl.Config[training.EarlyStopping] | None:
    """Returns when training ends before its last step; None for never."""
    return None

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the checkpoint that initializes a new run, or None."""
    return None

  def programs(self) -> tuple[fdl.Config[Any], ...]:
    """Returns the programs of training; see `runner.training.programs`."""
    return ()

  def run_files(self) -> dict[str, str]:
    """Returns folders to copy to the run directory, by their names there."""
    return {}

  def baselines(
    self,
  ) -> Callable[[], dict[str, float]] | fdl.Buildable[Any] | None:
    """Returns a function (or its config) of baseline metrics, or None."""
    return None

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns the rules from logical axes to mesh axes."""
    return self._named_rules(self.rules)

  def partitioner(self) -> Callable[..., Any] | fdl.Buildable[Any] | None:
    """Returns `Job.partitioner` (or its config); None leaves all to rules."""
    return None

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels_lib.ExpectedKernel], ...]:
    """Returns kernels that the compiled step must use; none by default."""
    return ()

  def quantization_rules(self) -> rules_of_quantization.Rules:
    """Returns which layers are quantized, with which recipe.

    By default attention projections and feed-forward layers (experts included)
    use the recipe of the knob `quantization`; raises KnobError if it is wrong.
    """
    return quantization_lib.make_rules(
      self.get_group(quantization_lib.QuantizationKnobs)
    )

  def adapter_rules(self) -> Sequence[Any]:
    """Returns the `lora.LoraRule` of layers, by default of the knobs.

    Raises KnobError if these are not valid.
    """
    return adapters_lib.make_rules(self.get_group(adapters_lib.AdapterKnobs))

  def retention(self) -> fdl.Config[training.Retention]:
    """Returns which checkpoints are kept; by default the newest three."""
    return fdl.Config(training.Retention)

  def observability(self) -> fdl.Config[monitoring.MonitoringSettings]:
    """Returns the monitoring of the training run."""
    return fdl.Config(
      monitoring.MonitoringSettings,
      watchdog=fdl.Config(monitoring.WatchdogSettings),
      spikes=fdl.Config(monitoring.SpikeSettings),
    )

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Changes the job in place, before quantization and dtypes are set."""

  def job(self) -> fdl.Config[job_lib.Job]:
    """Returns the resolved configuration of a run, the same at every call.

    Raises:
      knobs.KnobError: A knob has no effect.
      ValueError: The configuration is incomplete or not valid.
    """
    if self.num_epochs is not None:
      from paxon.runner import epochs

      return epochs.make_job(self, self.num_epochs)
    # Loads jax and layers, which many users of this module do not need.
    from paxon.runner.configuration import rewrites

    with self._tracked_reads() as read:
      decode_rules = self.decode_rules
      config = fdl.Config(
        job_lib.Job,
        experiment=self.import_path(),
        task=self._checked_task(),
        **self._inputs(),
        num_train_steps=self.num_train_steps,
        checkpoint_every_steps=self.checkpoint_every_steps,
        eval_every_steps=self.eval_every_steps,
        summary_every_steps=self.summary_every_steps,
        mesh=self.mesh,
        rules=self.sharding_rules(),
        decode_mesh=self.decode_mesh,
        decode_rules=(
          None if decode_rules is None else self._named_rules(decode_rules)
        ),
        seed=self.seed,
        retention=self.retention(),
        warm_start=self.warm_start(),
        early_stopping=self.early_stopping(),
        observability=self.observability(),
        generation=self.generation(),
        baselines=self.baselines(),
        run_files=self.run_files(),
        compiler_options=dict(self.compiler_options),
        compiler_option_sets=self.compiler_option_sets,
        pgle=self.pgle,
        expected_kernels=self.expected_kernels(),
      )
      self._set_non_finite(config)
      self._set_optional(config)
      self.adjust(config)
      adapter_rules = self.adapter_rules()
      if self.frozen_storage is not None:
        config.frozen_dtype = self.dtype
      adapters = self.get_group(adapters_lib.AdapterKnobs)
      quantization = self.get_group(quantization_lib.QuantizationKnobs)
      rewrites.adapt_job(config, adapter_rules, adapters, quantization)
      rewrites.quantize_job(config, self.quantization_rules(), quantization)
      if rewrites.set_dtype(config.task, self._peek("dtype")):
        read.add("dtype")
      kv_cache = self._peek("kv_cache")
      if kv_cache and rewrites.set_kv_cache_storage(config.task, kv_cache):
        read.add("kv_cache")
    self._check_read(read)
    _check_unnamed_modules(config)
    return config

  def _set_optional(self, config: fdl.Config[job_lib.Job]) -> None:
    """Sets fields only if they have a value, which keeps dumps short."""
    for field, value in (
      ("trainable", self.trainable),
      ("frozen", self.frozen),
      ("local_checkpoint_every_steps", self.local_checkpoint_every_steps),
      ("programs", self.programs()),
      ("partitioner", self.partitioner()),
    ):
      if value:
        setattr(config, field, value)

  def _set_non_finite(self, config: fdl.Config[job_lib.Job]) -> None:
    policy = self.non_finite
    if policy == "skip":
      from paxon.runner.configuration import rewrites

      rewrites.skip_non_finite(config)
    elif policy != "stop":
      config.non_finite = fdl.Config(
        training.NonFinite, policy=training.NonFinitePolicy(policy)
      )

  def _named_rules(self, name: str) -> rules_lib.Rules:
    try:
      return rule_sets.find_rules(name)
    except ValueError as error:
      raise knobs_lib.make_error(self, f": {error}") from None

  def _checked_task(self) -> fdl.Config[task_lib.Task]:
    task = self.task()
    if not isinstance(task, fdl.Buildable):
      raise ValueError(
        f"{type(self).__name__}.task() must return a fdl.Config of a Task, got"
        f" {type(task).__name__}."
      )
    return task

  def _inputs(self) -> dict[str, Any]:
    datasets = dict(self.datasets())
    if _TRAIN not in datasets:
      splits = ", ".join(map(repr, datasets)) or "nothing"
      raise ValueError(
        f"{type(self).__name__}.datasets() must have the split {_TRAIN!r}, got"
        f" {splits}."
      )
    return {"train_input": datasets.pop(_TRAIN), "eval_inputs": datasets}

  def _check_read(self, read: set[str]) -> None:
    cls = type(self)
    for name, knob in cls._knobs.items():
      if name in read or self._peek(name) is None:
        continue
      base = inspect.getattr_static(Experiment, name, knobs_lib.REQUIRED)
      untouched = (
        name in Experiment.knobs()
        and name not in self._given
        and knob.default is base
      )
      if untouched:  # A base knob at its default.
        continue
      field = {"dtype": "dtype", "kv_cache": "storage"}.get(name)
      what = (
        f"no module of the task has an unset field {field!r}"
        if field
        else "task() and datasets() do not read it"
      )
      raise knobs_lib.KnobError(
        f"{cls.__name__}.{name} has no effect: {what}. Read self.{name} in"
        " task() or datasets(), or set the knob to None if its type allows it."
      )


def _check_unnamed_modules(config: fdl.Config) -> None:
  for path, node in tree.nodes(config):
    if not tree.is_linen(fdl.get_callable(node)):
      continue
    for field in ("name", "parent"):
      if tree.is_set(node, field):
        raise ValueError(
          f"{tree.join(path, field)} must not be set: the name of a module is"
          " the field that holds it."
        )
