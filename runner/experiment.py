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
from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import copy
import math
import types
from typing import Any, ClassVar, Literal, TypeVar

import fiddle as fdl

from paxon.inputs import base_input
from paxon.quantization import matmuls, recipes
from paxon.quantization import rules as rules_of_quantization
from paxon.runner import job as job_lib
from paxon.runner import knobs as knobs_lib
from paxon.runner import task as task_lib
from paxon.runner.configuration import tree
from paxon.runner.settings import compiler, monitoring, training
from paxon.runner.settings import expected_kernels as expected_kernels_lib
from paxon.runner.settings import generation as generation_lib
from paxon.sharding import rule_sets
from paxon.sharding import rules as rules_lib

# Not `typing.Self`, which the shape checker of the tests cannot read.
_Self = TypeVar("_Self", bound="Experiment")

_TRAIN = "train"
_BATCH, _PER_DEVICE = knobs_lib.BATCH, knobs_lib.PER_DEVICE
# Without it, autotuning decides whether GPUs run fp8 and int8 kernels.
_QUANTIZED_OPTION_SET = "cublas_products"
_MUTABLE = (list, dict, set)
_COVERED = (
  matmuls.ATTENTION_PROJECTIONS,
  matmuls.FEED_FORWARD,
  matmuls.EXPERTS,
)


class Experiment(abc.ABC):
  """Base class of experiments.

  Subclasses declare knobs as annotated attributes and implement `task` and
  `datasets`. Knobs are read as attributes of the instance; None means unset.

  Attributes:
    num_train_steps: The step at which training ends.
    num_epochs: Passes over the training data; sets `num_train_steps`. All
      examples are read once to count the batches.
    global_batch_size: Sequences in a training batch, over all devices.
    per_device_batch_size: Sequences per device of `mesh`, whose sizes must be
      fixed; sets `global_batch_size`. May be a fraction, such as 0.25.
    checkpoint_every_steps: Interval of checkpoints; None for one at the end.
    eval_every_steps: Interval of evaluations; None for one at the end.
    summary_every_steps: Interval of training summaries.
    seed: Seed of initial values, random keys and data order.
    mesh: Sizes of the mesh axes, such as `fsdp=4,tensor=2`; one may be -1 (all
      remaining devices). `auto` chooses a mesh when the run starts.
    rules: Name of a set of sharding rules, see `sharding.rule_sets`.
    decode_mesh: Mesh for sampling, over the same devices (so without `dcn.`);
      None for `mesh`.
    decode_rules: Rules for sampling, such as `weight_stationary`, or `rules`.
    prompts: Prompts to continue at the end of training and by `--mode=decode`
      without `--prompt`; '' begins a document. Without this and the next four
      knobs there are no samples at the end of training.
    max_new_tokens: Maximum number of tokens generated for each prompt.
    num_samples: Continuations of each prompt; more than 1 needs `temperature`.
    temperature: Divides the logits; 0 always selects the most likely token.
    top_k: Samples from the k most likely tokens only; needs `temperature`.
    top_p: Samples from the fewest tokens with this probability; as `top_k`.
    min_p: Removes tokens less likely than this times the most likely one.
    repetition_penalty: Above 1 avoids tokens of the prompt or continuation.
    beam_size: Searches for the most likely text; not with `temperature`.
    draft_tokens: Tokens that are drafted for each step (speculative decoding).
    draft_run: Run of a draft model; None looks drafts up in the text so far.
    stop: Texts that end a continuation.
    dtype: Compute dtype of modules that leave it unset, not of parameters.
    kv_cache: Storage format of KV caches that leave it unset, see
      `layers.attention.quantized_rows`; None stores keys and values unchanged.
      Training does not depend on it, so it can be set for `--mode=decode` only.
    compiler_options: XLA options by name, see `Job.compiler_options`.
    compiler_option_sets: Names of sets of XLA options in `settings.compiler`,
      such as `async_collectives`.
    pgle: `auto` or the path of a profile, see `Job.pgle`.
    non_finite: Policy for a loss, gradient or state of training that is not
      finite: `stop` ends the run with an error, `roll_back` restores the newest
      checkpoint and continues with later data, `skip` makes no update (it
      cannot change when a run resumes), `ignore` trains on.
    quantization: Recipe of attention projections and feed-forward layers, such
      as `fp8` or `int8`, see `quantization.recipes`; None computes in `dtype`.
      `int8:convert` quantizes the weights of a trained run for `int8:serve`.
      Override `quantization_rules` to cover other layers.
    quantization_monitor: Whether training reports the shares of values that
      quantization clips or flushes to zero, at the cost of one pass over each
      operand. It cannot change when a run resumes.
    trainable: Regular expressions of the whole names of the variables to train,
      such as `.*/attention/.*`; the others have no gradient and no optimizer
      state. None trains all.
    frozen: Patterns of variables to freeze, also among those of `trainable`.
    lora_rank: Rank of adapters of attention projections and dense feed-forward
      layers, which alone are trained unless `trainable` is set, or None.
    lora_experts: Whether each expert of a mixture has adapters, too.
    lora_alpha: Factor of the adapters times the rank; None is `lora_rank`.
    lora_kind: Form of the adapters, see `quantization.lora`.
    lora_matmuls: Matmuls with an adapter, such as `query`; None is all.
    frozen_storage: Storage of frozen variables: `dtype` (the knob); or that
      of kernels of experts and adapted layers (`quantization.stored_kernels`).
    name: Name in reports; default: the class name.
  """

  num_train_steps: int
  num_epochs: int | None = None
  global_batch_size: int
  per_device_batch_size: float | None = None
  checkpoint_every_steps: int | None = None
  eval_every_steps: int | None = None
  summary_every_steps: int = 10
  seed: int = 0
  mesh: str = "data=-1"
  rules: str = rule_sets.DEFAULT
  decode_mesh: str | None = None
  decode_rules: str | None = None
  prompts: tuple[str, ...] | None = None
  max_new_tokens: int | None = None
  num_samples: int | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  beam_size: int | None = None
  draft_tokens: int | None = None
  draft_run: str | None = None
  stop: tuple[str, ...] | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  kv_cache: Literal["int8", "fp8", "int4"] | None = None
  compiler_options: Mapping[str, compiler.Value] = types.MappingProxyType({})
  compiler_option_sets: tuple[str, ...] = ()
  pgle: str | None = None
  non_finite: Literal["stop", "roll_back", "skip", "ignore"] = "stop"
  quantization: str | None = None
  quantization_monitor: bool = False
  trainable: tuple[str, ...] | None = None
  frozen: tuple[str, ...] = ()
  lora_rank: int | None = None
  lora_alpha: float | None = None
  lora_kind: Literal["lora", "rslora", "dora"] = "lora"
  lora_matmuls: tuple[str, ...] | None = None
  lora_experts: bool = False
  frozen_storage: Literal["dtype", "nf4", "int8", "int4", "fp8"] | None = None

  name: ClassVar[str] = ""
  # Knobs that hold a path or pattern of files. Relative ones are stored as
  # absolute, so that a run can be resumed from any directory.
  path_knobs: ClassVar[tuple[str, ...]] = ()

  _knobs: ClassVar[Mapping[str, knobs_lib.Knob]] = {}
  _given: dict[str, Any]
  _read: set[str] | None

  def __init_subclass__(cls, **kwargs: object) -> None:
    """Checks the knobs of a new experiment class; raises KnobError."""
    super().__init_subclass__(**kwargs)
    if "job" in vars(cls):
      raise knobs_lib.KnobError(
        f"{cls.__name__}.job: job() must not be overridden, because it checks"
        " that every knob is read; override adjust(config) instead."
      )
    if "name" not in vars(cls):
      cls.name = cls.__name__
    cls._knobs = knobs_lib.collect(cls, root=Experiment)

  def __init__(self, **given: object) -> None:
    """Creates the experiment with these values of knobs; raises KnobError."""
    cls, known = type(self), type(self)._knobs
    values = {}
    for name, value in given.items():
      if name not in known:
        raise knobs_lib.unknown(cls, name, known)
      values[name] = knobs_lib.value(cls, known[name], value)
    derived = knobs_lib.resolve_exclusive(cls, known, values)
    for name, knob in known.items():
      if name in derived:
        continue
      if knob.default is knobs_lib.REQUIRED and name not in values:
        raise knobs_lib.KnobError(
          f"{cls.__name__}.{name} has no value; set it in a subclass, or pass"
          f" {name}=..."
        )
    object.__setattr__(self, "_given", values)
    object.__setattr__(self, "_read", None)

  def __getattribute__(self, name: str) -> Any:
    """Returns an attribute; records reads of knobs."""
    if name.startswith("_") or name not in type(self)._knobs:
      return object.__getattribute__(self, name)
    if self._read is not None:
      self._read.add(name)
    knob = type(self)._knobs[name]
    if name == _BATCH and self.per_device_batch_size is not None:
      value = self._count_sequences(self.per_device_batch_size)
    elif name in self._given:
      value = self._given[name]
    elif isinstance(knob.default, property):
      value = object.__getattribute__(self, name)
      value = knobs_lib.value(type(self), knob, value)
    else:
      value = knob.default
    # A list that a caller changes must not change the class.
    return copy.deepcopy(value) if isinstance(value, _MUTABLE) else value

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

  def __setattr__(self, name: str, value: object) -> None:
    """Raises AttributeError: experiments are immutable."""
    raise AttributeError(
      f"{type(self).__name__} is immutable; use replace({name}=...)."
    )

  def __repr__(self) -> str:
    given = ", ".join(f"{name}={v!r}" for name, v in self._given.items())
    return f"{type(self).__name__}({given})"

  @classmethod
  def knobs(cls) -> Mapping[str, knobs_lib.Knob]:
    """Returns the knobs by name, knobs of bases first."""
    return cls._knobs

  @classmethod
  def import_path(cls) -> str:
    """Returns the name of this class as `--exp` takes it."""
    return f"{cls.__module__}.{cls.__qualname__}"

  def given_knobs(self) -> dict[str, Any]:
    """Returns the knobs that this object was given, by name."""
    return dict(self._given)

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
    try:
      return generation_lib.from_knobs(
        {name: getattr(self, name) for name in generation_lib.KNOBS}
      )
    except ValueError as error:
      raise knobs_lib.KnobError(f"{type(self).__name__}.{error}") from None

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
    choice = self._quantization_choice()
    if choice is None:
      return ()
    return (rules_of_quantization.Rule(_COVERED, choice.recipe),)

  def adapter_rules(self) -> Sequence[Any]:
    """Returns the `lora.LoraRule` of layers, by default of the knobs.

    Raises KnobError if these are not valid.
    """
    from paxon.quantization import lora  # Few users of this module need it.

    if (rank := self.lora_rank) is None:
      return ()
    try:
      adapter = lora.Lora(
        rank=rank, alpha=self.lora_alpha, kind=lora.Kind(self.lora_kind)
      )
      covered = [_COVERED[:2], _COVERED[2:]][: 1 + self.lora_experts]
      return tuple(
        lora.LoraRule(each, adapter, self.lora_matmuls) for each in covered
      )
    except ValueError as error:
      raise knobs_lib.KnobError(f"{type(self).__name__}: {error}") from None

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

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:  # noqa: B027
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
      for field in ("trainable", "frozen"):
        if patterns := getattr(self, field):
          setattr(config, field, patterns)
      if programs := self.programs():
        config.programs = programs
      self.adjust(config)
      self._adapt(config)
      self._quantize(config)
      if rewrites.set_dtype(config.task, self._peek("dtype")):
        read.add("dtype")
      kv_cache = self._peek("kv_cache")
      if kv_cache and rewrites.set_kv_cache_storage(config.task, kv_cache):
        read.add("kv_cache")
    self._check_read(read)
    _check_unnamed_modules(config)
    return config

  def _quantization_choice(self) -> recipes.Choice | None:
    """Returns the parsed knob `quantization`; None if it is unset."""
    text = self.quantization
    if text is None:
      return None
    try:
      return recipes.parse(text)
    except ValueError as error:
      raise knobs_lib.KnobError(
        f"{type(self).__name__}.quantization = {text!r}: {error}"
      ) from None

  def _quantize(self, config: fdl.Config[job_lib.Job]) -> None:
    choice, rules = self._quantization_choice(), self.quantization_rules()
    if not rules and choice is None:
      return
    from paxon.runner.configuration import rewrites

    if rules:
      rewrites.quantize(config, rules, monitor=self.quantization_monitor)
    if choice is not None and choice.mode is not recipes.Mode.TRAIN:
      rewrites.serve_quantized_weights(config)
      config.weights = self.quantization
    elif rules:
      sets = config.compiler_option_sets
      config.compiler_option_sets = (*sets, _QUANTIZED_OPTION_SET)

  def _adapt(self, config: fdl.Config[job_lib.Job]) -> None:
    rules, storage = self.adapter_rules(), self.frozen_storage
    if storage is not None:
      config.frozen_dtype = self.dtype
    from paxon.runner.configuration import rewrites

    rewrites.use_ghost_norms(config)
    choice = self._quantization_choice()
    if choice is not None and choice.mode is not recipes.Mode.TRAIN:
      config.merges_adapters = bool(rules)
      return
    rewrites.adapt_job(config, rules, storage=storage)

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
      raise knobs_lib.KnobError(f"{type(self).__name__}: {error}") from None

  def _peek(self, name: str) -> Any:
    """Returns a knob's value without recording a read."""
    read, value = self._read, None
    object.__setattr__(self, "_read", None)
    try:
      value = getattr(self, name)
    finally:
      object.__setattr__(self, "_read", read)
    return value

  @contextlib.contextmanager
  def _tracked_reads(self) -> Generator[set[str], None, None]:
    read: set[str] = set()
    object.__setattr__(self, "_read", read)
    try:
      yield read
    finally:
      object.__setattr__(self, "_read", None)

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
      base = Experiment.__annotations__
      untouched = (
        name in base
        and name not in self._given
        and knob.default is vars(Experiment).get(name, knobs_lib.REQUIRED)
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
