"""The optimizer's state and the average of a checkpoint of Pax, in ours.

Pax has a list of learners' states. A state is a chain, whose transformations
keep `count` and, for each variable, slots:

  sharded_adam             m, v        bias-corrected
  optax.adam               mu, nu
  sharded_adafactor        m, m_scale, vr, vc, v
  apply_ema_weights        ema

If layers are stacked, a learner's state is a map of `no_prefix` and `p#...`,
which has the stacked variables of one depth and sharding; each has its counts.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from paxon.learners import learner as learner_lib
from paxon.learners.optimizers import adafactor, adamw
from paxon.learners.optimizers import optimizer as optimizers
from paxon.runner import user_error
from paxon.runner.checkpoints import lazy_array
from paxon.sharding import variables
from paxon.tools.pax_checkpoints import pax_files, variable_plan

_SLOT = re.compile(
  r"(?P<head>opt_states.*?)\.(?P<slot>[a-z_]+)"
  r"\.(?P<variable>(?:params|non_trainable)\..+)"
)
_COUNT = ".count"
_EMA = "ema"


Read = Callable[[], np.ndarray | lazy_array.Blocks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
  """Arrays of a training state from those of Pax.

  Attributes:
    reads: Functions that read an array, by our name.
    lines: Lines about the optimizer and the average.
    used: Names of arrays of Pax that are read.
  """

  reads: Mapping[str, Read]
  lines: tuple[str, ...]
  used: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _States:
  """The slots of all learners.

  Attributes:
    slots: By slot and then by the variable's name in Praxis.
    counts: Numbers of updates, by slot.
    counters: Names of all counts.
  """

  slots: Mapping[str, Mapping[str, pax_files.PaxArray]]
  counts: Mapping[str, frozenset[int]]
  counters: tuple[str, ...]

  def find_count(self, slot: str) -> int:
    """Returns the number of updates of a slot.

    Raises:
      _DifferentError: There is none, or several.
    """
    found = self.counts.get(slot, frozenset())
    if len(found) != 1:
      raise _DifferentError(
        f"the numbers of updates of {slot} are {sorted(found) or 'missing'}"
      )
    return next(iter(found))


class _DifferentError(Exception):
  """The state of Pax is not that of our optimizer; the message tells why."""


def plan(
  specs: Sequence[variables.VariableSpec],
  arrays: Mapping[str, pax_files.PaxArray],
  assignments: Mapping[str, variable_plan.Assignment],
  *,
  learner: learner_lib.Learner,
) -> Imported:
  """Returns the functions that read the training state.

  Args:
    specs: Specs of the optimizer's state and of the average.
    arrays: All arrays of the checkpoint.
    assignments: The sources of each variable.
    learner: Our learner.

  Raises:
    user_error.UserError: The average is missing.
  """
  states = _collect(arrays)
  importer = _Importer(states, assignments)
  lines = []
  ours = [spec for spec in specs if spec.name.startswith("opt_state/")]
  try:
    importer.add_optimizer(ours, learner.optimizer)
    count = importer.count
    lines.append(f"optimizer: {importer.kind}, after {count:,} updates")
  except _DifferentError as error:
    importer.reads.clear()
    importer.used.clear()
    lines.append(f"optimizer: its state starts from zero, because {error}")
  average = [spec for spec in specs if spec.name.startswith("average/")]
  if average:
    try:
      importer.add_average(average)
    except _DifferentError as error:
      raise user_error.UserError(
        f"The experiment averages parameters, but {error}; import it with"
        " --fdl.ema_decay=None, or what sets the average."
      ) from error
    lines.append(f"average: EMA, after {states.find_count(_EMA):,} updates")
  return Imported(
    reads=importer.reads, lines=tuple(lines), used=frozenset(importer.used)
  )


def check_starts_from_zero(optimizer: optimizers.Optimizer) -> None:
  """Raises UserError unless the initial state of an optimizer is zero."""
  state = optimizer.transform().init({"matrix": jnp.ones((2, 2))})
  if any(np.any(leaf) for leaf in jax.tree.leaves(state)):
    raise user_error.UserError(
      f"The state of {type(optimizer).__name__} cannot be imported, and it does"
      " not start from zero; import into an experiment with AdamW, and start"
      " another run from it with warm_start()."
    )


class _Importer:
  """Collects the functions that read a training state."""

  def __init__(
    self,
    states: _States,
    assignments: Mapping[str, variable_plan.Assignment],
  ) -> None:
    self.reads: dict[str, Read] = {}
    self.used: set[str] = set()
    self.kind = "none"
    self.count = 0
    self._states = states
    self._assignments = assignments

  def add_optimizer(
    self, specs: Sequence[variables.VariableSpec], optimizer: object
  ) -> None:
    """Adds the arrays of our optimizer's state."""
    slots = self._states.slots
    if isinstance(optimizer, adamw.AdamW):
      if {"m", "v"} <= slots.keys() and "vr" not in slots:
        self._add_adam(specs, optimizer, names=("m", "v"), is_corrected=True)
      elif {"mu", "nu"} <= slots.keys():
        self._add_adam(specs, optimizer, names=("mu", "nu"), is_corrected=False)
      else:
        raise _DifferentError(
          f"the experiment has Adam and {self._describe_slots()}"
        )
    elif isinstance(optimizer, adafactor.Adafactor):
      if not {"vr", "vc", "v"} <= slots.keys():
        raise _DifferentError(
          f"the experiment has Adafactor and {self._describe_slots()}"
        )
      self._add_adafactor(specs, optimizer)
    else:
      raise _DifferentError(
        f"Pax has no state like that of {type(optimizer).__name__}"
      )
    for spec in specs:
      if spec.name not in self.reads:
        if not spec.name.endswith("/count"):
          raise _DifferentError(f"{spec.name} has no counterpart")
        self.reads[spec.name] = functools.partial(
          np.full, spec.shape, self.count, spec.dtype
        )
    self.used.update(self._states.counters)

  def add_average(self, specs: Sequence[variables.VariableSpec]) -> None:
    """Adds the moving average of the parameters."""
    count = self._states.find_count(_EMA)
    for spec in specs:
      name = spec.name.removeprefix("average/")
      if name == "count":
        self.reads[spec.name] = functools.partial(
          np.full, spec.shape, count, spec.dtype
        )
      else:
        self._add(spec, name, _EMA)
    self.used.update(self._states.counters)

  def _describe_slots(self) -> str:
    found = ", ".join(self._states.slots) or "none"
    return f"the checkpoint has the slots {found}"

  def _add_adam(
    self,
    specs: Sequence[variables.VariableSpec],
    optimizer: adamw.AdamW,
    *,
    names: tuple[str, str],
    is_corrected: bool,
  ) -> None:
    self.kind = "Adam"
    self.count = self._states.find_count(names[0])
    for ours, theirs, decay in zip(
      ("mu", "nu"), names, (optimizer.b1, optimizer.b2), strict=True
    ):
      # Ours are divided by this when they are used, Pax's when they are stored.
      factor = 1 - decay**self.count if is_corrected else 1.0
      for spec, name in _select(specs, ours):
        self._add(spec, name, theirs, factor=factor)

  def _add_adafactor(
    self,
    specs: Sequence[variables.VariableSpec],
    optimizer: adafactor.Adafactor,
  ) -> None:
    self.kind = "Adafactor"
    self.count = self._states.find_count("v")
    if optimizer.factoring is not adafactor.Factoring.LAST:
      raise _DifferentError(
        "Adafactor.factoring is not LAST, the dimensions of Pax"
      )
    if optimizer.b1 is not None and not optimizer.momentum_after_rate:
      raise _DifferentError(
        "Adafactor.momentum_after_rate is not set, as the momentum of Pax"
      )
    for spec, name in _select(specs, "row"):
      self._add_mean(spec, name)
    for spec, name in _select(specs, "column"):
      self._add_mean(spec, name)
    for spec, name in _select(specs, "full"):
      if spec.shape == self._assignment(name).spec.shape:
        self._add(spec, name, "v")
      else:
        self._add_zeros(spec)
    for spec, name in _select(specs, "ema"):
      self._add_momentum(spec, name)

  def _add_mean(self, spec: variables.VariableSpec, name: str) -> None:
    """Adds the means over one dimension, or the placeholder of none."""
    assignment = self._assignment(name)
    pattern = assignment.pattern
    offset = 1 if assignment.is_stacked else 0
    dropped = [
      group[0]
      for group, size, whole in zip(
        pattern.outputs,
        spec.shape[offset:],
        assignment.layer_shape,
        strict=True,
      )
      if size != whole
    ]
    flat = [axis for group in pattern.inputs for axis in group]
    if len(assignment.layer_shape) < 2 or len(dropped) != 1:
      self._add_zeros(spec)
      return
    if dropped[0] not in flat[-2:] or any(len(g) > 1 for g in pattern.inputs):
      raise _DifferentError(
        f"the dimensions of {name} over which means are kept are not Pax's"
      )
    slot = "vr" if dropped[0] == flat[-1] else "vc"
    self._add(spec, name, slot, dropped=dropped[0])

  def _add_momentum(self, spec: variables.VariableSpec, name: str) -> None:
    """Adds a momentum, which Pax may store as int8 with scales."""
    assignment = self._assignment(name)
    found = self._find("m", assignment)
    if all(_is_float(array.dtype) for array in found.values()):
      self._add(spec, name, "m")
      return
    scales = self._find("m_scale", assignment)
    wide = {
      key: dataclasses.replace(
        array,
        dtype=np.dtype(np.float32),
        read=functools.partial(
          _dequantize,
          array,
          scales[key],
          len(array.shape) - len(assignment.pattern.inputs),
        ),
      )
      for key, array in found.items()
    }
    self.used.update(x.name for x in (*found.values(), *scales.values()))
    self.reads[spec.name] = functools.partial(
      assignment.read, wide, dtype=spec.dtype, is_value=False
    )

  def _add_zeros(self, spec: variables.VariableSpec) -> None:
    self.reads[spec.name] = functools.partial(np.zeros, spec.shape, spec.dtype)

  def _add(
    self,
    spec: variables.VariableSpec,
    name: str,
    slot: str,
    *,
    factor: float = 1.0,
    dropped: str | None = None,
  ) -> None:
    assignment = self._assignment(name)
    found = self._find(slot, assignment)
    self.used.update(array.name for array in found.values())
    self.reads[spec.name] = functools.partial(
      assignment.read,
      found,
      dtype=spec.dtype,
      factor=factor,
      is_value=slot == _EMA,
      dropped=dropped,
    )

  def _assignment(self, name: str) -> variable_plan.Assignment:
    if name not in self._assignments:
      raise _DifferentError(f"{name} keeps its initial value")
    return self._assignments[name]

  def _find(
    self, slot: str, assignment: variable_plan.Assignment
  ) -> dict[str, pax_files.PaxArray]:
    slots = self._states.slots.get(slot, {})
    missing = [name for name in assignment.names if name not in slots]
    if missing:
      raise _DifferentError(f"the checkpoint has no {slot} of {missing[0]}")
    return {name: slots[name] for name in assignment.names}


def _is_float(dtype: np.dtype) -> bool:
  """Returns whether a dtype is a floating-point one, bfloat16 included."""
  return not np.issubdtype(dtype, np.integer)


def _select(
  specs: Sequence[variables.VariableSpec], slot: str
) -> list[tuple[variables.VariableSpec, str]]:
  """Returns the specs of one slot with the names of their variables."""
  part = f"/{slot}/"
  return [
    (spec, spec.name.partition(part)[2]) for spec in specs if part in spec.name
  ]


def _dequantize(
  array: pax_files.PaxArray,
  scale: pax_files.PaxArray,
  depth: int,
  region: pax_files.Region | None = None,
) -> np.ndarray:
  """Returns the values of int8, whose scales lack a layer's first axis."""
  part = region and (*region[:depth], *region[depth + 1 :])
  scales = np.expand_dims(scale.read(part).astype(np.float32), depth)
  return array.read(region).astype(np.float32) * scales


def _collect(arrays: Mapping[str, pax_files.PaxArray]) -> _States:
  slots: dict[str, dict[str, pax_files.PaxArray]] = {}
  counts: dict[str, set[int]] = {}
  counters = []
  heads: dict[str, set[str]] = {}
  for name, array in arrays.items():
    if matched := _SLOT.fullmatch(name):
      slots.setdefault(matched["slot"], {})[matched["variable"]] = array
      heads.setdefault(matched["head"], set()).add(matched["slot"])
    elif name.startswith("opt_states") and name.endswith(_COUNT):
      counters.append(name)
  for name in counters:
    for slot in heads.get(name.removesuffix(_COUNT), ()):
      found = counts.setdefault(slot, set())
      found.update(map(int, np.unique(arrays[name].read())))
  return _States(
    slots=slots,
    counts={slot: frozenset(found) for slot, found in counts.items()},
    counters=tuple(counters),
  )
