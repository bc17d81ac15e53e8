"""Experiments: complete, named recipes whose variants change only knobs.

```python
class Small(experiment.Experiment):
  num_train_steps = 1000  # A knob of every experiment.
  global_batch_size = 16
  embed_dim: int = 128  # A knob of this one.

  def task(self): ...  # fdl.Config of a Task, made from self.embed_dim, ...
  def datasets(self): ...  # {"train": fdl.Config, "validation": ...}


class Wide(Small):
  embed_dim = 512
```

`Wide().job()` is the resolved configuration of a run: a `fdl.Config[Job]` that
depends on the knobs alone. A name that no class declares cannot be assigned,
and a knob that has no effect on the configuration is an error.
"""

import abc
from collections.abc import Callable, Generator, Mapping
import contextlib
import copy
import types
from typing import Any, ClassVar, Literal, TypeVar

import fiddle as fdl

from paxon.inputs import base_input
from paxon.quantization import products, recipes
from paxon.quantization import rules as rules_of_quantization
from paxon.runner import job as job_lib
from paxon.runner import knobs as knobs_lib
from paxon.runner import task as task_lib
from paxon.runner.configuration import (
  compute_dtype,
  kv_caches,
  quantizing,
  serving_weights,
  tree,
)
from paxon.runner.settings import compiler, monitoring, training
from paxon.runner.settings import expected_kernels as expected_kernels_lib
from paxon.runner.settings import generation as generation_lib
from paxon.sharding import rule_sets
from paxon.sharding import rules as rules_lib

# Not `typing.Self`, which the shape checker of the tests cannot read.
_Self = TypeVar("_Self", bound="Experiment")

_TRAIN = "train"
# Without it, XLA leaves the fp8 and int8 kernels of GPUs to measurements.
_OPTIONS_OF_PRODUCTS = "cublas_products"
_MUTABLE = (list, dict, set)


class Experiment(abc.ABC):
  """The base of all experiments.

  Subclasses declare knobs as annotated attributes and implement `task` and
  `datasets`. A knob is read as an attribute of the instance. `0` and `False`
  are values like any other; what is not set is None.

  Attributes:
    num_train_steps: The step at which training ends.
    global_batch_size: Sequences in a training batch, over all devices.
    checkpoint_every_steps: Interval of checkpoints; None for one at the end.
    eval_every_steps: Interval of evaluations; None for one at the end.
    summary_every_steps: Interval of training summaries.
    seed: Of initial values, random keys and the order of the data.
    mesh: Sizes of the device mesh's axes, such as `fsdp=4,tensor=2`; one `-1`
      takes the devices that are left. `auto` is chosen for the devices when the
      run starts.
    rules: The rule set by name, which says what each axis of the mesh splits:
      see `sharding.rule_sets`.
    decode_mesh: The mesh on which samples are drawn, if not `mesh`: the same
      devices, so without `dcn.`.
    decode_rules: The rule set with which they are drawn, if not `rules`, such
      as `weight_stationary`.
    dtype: What parts compute in that do not say their own `dtype`. Parameters
      stay in theirs.
    kv_cache: How caches of keys and values keep them while decoding, those that
      do not say it themselves: see `layers.attention.quantized_rows`; None
      keeps them as they are. Training does not change, so it can be given to
      `--mode=decode` alone.
    compiler_options: Options of XLA by name, see `Job.compiler_options`.
    compiler_option_sets: Names of `option_sets`, such as `async_collectives`.
    pgle: `auto` compiles GPU programs by a profile of their first steps; or a
      profile's path. See `Job.pgle`.
    quantization: The recipe by name with which the projections of attention and
      the feed-forward layers compute, see `quantization.recipes`: `fp8`,
      `int8`, ...; None computes in `dtype`. With a mode after a colon,
      `int8:convert` and `int8:serve`, for the weights of a trained run
      (`programs.serving`). What else is quantized, and what is not, says
      `quantization_rules`.
    quantization_monitor: Whether training tells the shares of values that
      quantization clips, and flushes to zero, as summaries. It costs a pass
      over each operand, and is fixed for a run.
    name: The experiment's word in reports; by default its class's name.
  """

  num_train_steps: int
  global_batch_size: int
  checkpoint_every_steps: int | None = None
  eval_every_steps: int | None = None
  summary_every_steps: int = 10
  seed: int = 0
  mesh: str = "data=-1"
  rules: str = rule_sets.DEFAULT
  decode_mesh: str | None = None
  decode_rules: str | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  kv_cache: Literal["int8", "fp8", "int4"] | None = None
  compiler_options: Mapping[str, compiler.Value] = types.MappingProxyType({})
  compiler_option_sets: tuple[str, ...] = ()
  pgle: str | None = None
  quantization: str | None = None
  quantization_monitor: bool = False

  name: ClassVar[str] = ""

  _knobs: ClassVar[Mapping[str, knobs_lib.Knob]] = {}
  _given: dict[str, Any]
  _read: set[str] | None

  def __init_subclass__(cls, **kwargs: object) -> None:
    """Checks the knobs of a new experiment class.

    Raises:
      knobs.KnobError: A knob is misspelled or has another type.
    """
    super().__init_subclass__(**kwargs)
    if "job" in vars(cls):
      raise knobs_lib.KnobError(
        f"{cls.__name__}.job: job() is not overridden, because it checks that"
        " every knob is read; change the job in adjust(config)."
      )
    if "name" not in vars(cls):
      cls.name = cls.__name__
    cls._knobs = knobs_lib.collect(cls, root=Experiment)

  def __init__(self, **given: object) -> None:
    """Makes the experiment, with other values for some of its knobs.

    Args:
      **given: Values by knob.

    Raises:
      knobs.KnobError: There is no such knob, a value has another type, or a
        knob without a default is missing.
    """
    cls, known = type(self), type(self)._knobs
    values = {}
    for name, value in given.items():
      if name not in known:
        raise knobs_lib.unknown(cls, name, known)
      values[name] = knobs_lib.value(cls, known[name], value)
    for name, knob in known.items():
      if knob.default is knobs_lib.REQUIRED and name not in values:
        raise knobs_lib.KnobError(
          f"{cls.__name__}.{name} has no value; set it in a subclass, or make"
          f" the experiment with {name}=..."
        )
    object.__setattr__(self, "_given", values)
    object.__setattr__(self, "_read", None)

  def __getattribute__(self, name: str) -> Any:
    """Returns an attribute; notes that a knob was read."""
    if name.startswith("_") or name not in type(self)._knobs:
      return object.__getattribute__(self, name)
    if self._read is not None:
      self._read.add(name)
    knob = type(self)._knobs[name]
    if name in self._given:
      value = self._given[name]
    elif isinstance(knob.default, property):
      value = object.__getattribute__(self, name)
      value = knobs_lib.value(type(self), knob, value)
    else:
      value = knob.default
    # A list that a caller changes must not change the class.
    return copy.deepcopy(value) if isinstance(value, _MUTABLE) else value

  def __setattr__(self, name: str, value: object) -> None:
    """Refuses: knobs are set where the experiment is made."""
    raise AttributeError(
      f"{type(self).__name__} cannot be changed; make another one with"
      f" replace({name}=...)."
    )

  def __repr__(self) -> str:
    given = ", ".join(f"{name}={v!r}" for name, v in self._given.items())
    return f"{type(self).__name__}({given})"

  @classmethod
  def knobs(cls) -> Mapping[str, knobs_lib.Knob]:
    """Returns the knobs by name, those of bases first."""
    return cls._knobs

  @classmethod
  def import_path(cls) -> str:
    """Returns the name that `--exp` finds this class by."""
    return f"{cls.__module__}.{cls.__qualname__}"

  def replace(self: _Self, **given: object) -> _Self:
    """Returns this experiment with other values for some of its knobs.

    Args:
      **given: Values by knob.

    Raises:
      knobs.KnobError: As for making one.
    """
    return type(self)(**{**self._given, **given})

  def shrink(self: _Self) -> _Self:
    """Returns the experiment at toy size, for a smoke run on a CPU.

    Here two steps of at most eight sequences, with an evaluation and a
    checkpoint at each. Subclasses shrink their model's knobs too:
    `return super().shrink().replace(embed_dim=16)`.
    """
    toy: dict[str, object] = {
      "num_train_steps": min(self.num_train_steps, 2),
      "global_batch_size": min(self.global_batch_size, 8),
      "summary_every_steps": 1,
    }
    for interval in ("checkpoint_every_steps", "eval_every_steps"):
      if getattr(self, interval) is not None:
        toy[interval] = 1
    return self.replace(**toy)

  @abc.abstractmethod
  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns what is trained."""

  @abc.abstractmethod
  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns the inputs by split: `train`, and those to evaluate on."""

  def generation(
    self,
  ) -> fdl.Config[generation_lib.GenerationSettings] | None:
    """Returns what to sample at the end of a run; None for nothing."""
    return None

  def early_stopping(
    self,
  ) -> fdl.Config[training.EarlyStopping] | None:
    """Returns when to end before the last step; None for never."""
    return None

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns which checkpoint a new run begins with; None for none."""
    return None

  def baselines(
    self,
  ) -> Callable[[], dict[str, float]] | fdl.Buildable[Any] | None:
    """Returns what computes figures to compare with; None for nothing.

    A configuration is of something callable, or is partial.
    """
    return None

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns the rules from logical axes to mesh axes.

    Raises:
      knobs.KnobError: `rules` names no rule set.
    """
    return self._named_rules(self.rules)

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels_lib.ExpectedKernel], ...]:
    """Returns the kernels that the compiled step must have; none here."""
    return ()

  def quantization_rules(self) -> rules_of_quantization.Rules:
    """Returns which layers are quantized by which recipe.

    Here the projections of attention and the feed-forward layers, experts
    included, as the knob `quantization` says; none without it.

    Raises:
      knobs.KnobError: The knob names no recipe, or no mode.
    """
    choice = self._quantization_choice()
    if choice is None:
      return ()
    covered = (
      products.ATTENTION_PROJECTIONS,
      products.FEED_FORWARD,
      products.EXPERTS,
    )
    return (rules_of_quantization.Rule(covered, choice.recipe),)

  def retention(self) -> fdl.Config[training.Retention]:
    """Returns which checkpoints are kept; here the three newest."""
    return fdl.Config(training.Retention)

  def observability(self) -> fdl.Config[monitoring.MonitoringSettings]:
    """Returns what the training watches beside its figures."""
    return fdl.Config(
      monitoring.MonitoringSettings,
      watchdog=fdl.Config(monitoring.WatchdogSettings),
      spikes=fdl.Config(monitoring.SpikeSettings),
    )

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:  # noqa: B027
    """Changes the finished job in place, for what no other method gives.

    Args:
      config: The whole configuration, before the dtype is set where it is not.
    """

  def job(self) -> fdl.Config[job_lib.Job]:
    """Returns the resolved configuration of a run, the same at every call.

    Raises:
      knobs.KnobError: A knob was read by nothing.
      ValueError: A part of the configuration is missing or not allowed.
    """
    with self._reading() as read:
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
        seed=self.seed,
        retention=self.retention(),
        observability=self.observability(),
        generation=self.generation(),
        baselines=self.baselines(),
      )
      warm_start = self.warm_start()
      # Left unset without one: runs stored before there was the field go on.
      if warm_start is not None:
        config.warm_start = warm_start
      early_stopping = self.early_stopping()
      if early_stopping is not None:
        config.early_stopping = early_stopping
      if self.compiler_options:
        config.compiler_options = dict(self.compiler_options)
      if self.compiler_option_sets:
        config.compiler_option_sets = self.compiler_option_sets
      if self.decode_mesh is not None:
        config.decode_mesh = self.decode_mesh
      if self.decode_rules is not None:
        config.decode_rules = self._named_rules(self.decode_rules)
      if self.pgle is not None:
        config.pgle = self.pgle
      expected_kernels = self.expected_kernels()
      if expected_kernels:
        config.expected_kernels = expected_kernels
      self.adjust(config)
      self._quantize(config)
      if compute_dtype.set_where_unset(config.task, self._given_or("dtype")):
        read.add("dtype")
      kv_cache = self._given_or("kv_cache")
      if kv_cache and kv_caches.set_where_unset(config.task, kv_cache):
        read.add("kv_cache")
    self._check_read(read)
    _check_names(config)
    return config

  def _quantization_choice(self) -> recipes.Choice | None:
    """Returns what the knob `quantization` says; None if it is not set."""
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
    choice = self._quantization_choice()
    rules = self.quantization_rules()
    if rules:
      quantizing.apply(config, rules, monitor=self.quantization_monitor)
    if choice is not None and choice.mode is not recipes.Mode.TRAIN:
      serving_weights.serve(config)
      config.weights = self.quantization
    elif rules:
      sets = config.compiler_option_sets
      config.compiler_option_sets = (*sets, _OPTIONS_OF_PRODUCTS)

  def _named_rules(self, name: str) -> rules_lib.Rules:
    try:
      return rule_sets.named(name)
    except ValueError as error:
      raise knobs_lib.KnobError(f"{type(self).__name__}: {error}") from None

  def _given_or(self, name: str) -> Any:
    """Returns a knob's value without counting as a reader."""
    read, value = self._read, None
    object.__setattr__(self, "_read", None)
    try:
      value = getattr(self, name)
    finally:
      object.__setattr__(self, "_read", read)
    return value

  @contextlib.contextmanager
  def _reading(self) -> Generator[set[str], None, None]:
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
        f"{type(self).__name__}.datasets() must have the split {_TRAIN!r}; it"
        f" has {splits}."
      )
    return {"train_input": datasets.pop(_TRAIN), "eval_inputs": datasets}

  def _check_read(self, read: set[str]) -> None:
    cls = type(self)
    for name, knob in cls._knobs.items():
      if name in read or self._given_or(name) is None:
        continue
      base = Experiment.__annotations__
      untouched = (
        name in base
        and name not in self._given
        and knob.default is vars(Experiment).get(name, knobs_lib.REQUIRED)
      )
      # Nobody asked for the value of a knob that every experiment has.
      if untouched:
        continue
      field = {"dtype": "dtype", "kv_cache": "storage"}.get(name)
      what = (
        f"no part of the task takes it: none has an unset field {field!r}"
        if field
        else "nothing read it while the configuration was built"
      )
      raise knobs_lib.KnobError(
        f"{cls.__name__}.{name} has no effect: {what}. Read self.{name} in"
        " task() or datasets(), or set the knob to None if it allows that."
      )


def _check_names(config: fdl.Config) -> None:
  for path, node in tree.nodes(config):
    if not tree.is_linen(fdl.get_callable(node)):
      continue
    for field in ("name", "parent"):
      if tree.is_set(node, field):
        raise ValueError(
          f"{tree.join(path, field)} is set, which would not name the module's"
          " parameters; the field that holds a module does."
        )
