"""`tools/ckpt import-pax`: a run directory from a checkpoint of Pax.

The variables, the step, the optimizer's state where the optimizer is the same,
and the moving average become a checkpoint of ours, from which training resumes.
Arrays are read, converted and written one by one.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import ctypes
import dataclasses
import functools
import itertools
import math
import os

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner import files, run_dir, units, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  lazy_array,
  stored_checkpoint,
  text_table,
)
from paxon.runner.configuration import overrides, resolving
from paxon.runner.session import run_files, session
from paxon.sharding import initialization, variables
from paxon.tools import command_line
from paxon.tools.pax_checkpoints import (
  name_map,
  optimizer_slots,
  pax_files,
  variable_plan,
)

_VARIABLES = "mdl_vars."
_STEP = "step"
# To the name of the built-in map.
_FORMATS = {
  "pax": "praxis",
  **{name: name for name in ("orbax", "maxtext", "dcp", "megatron")},
}
# Formats whose norms store their scale, not the scale minus one.
_DIRECT = ("dcp", "megatron")
# Of `mallopt`, in malloc.h.
_M_MMAP_THRESHOLD = -3
_MAX_GROUPS = 12
# Values of a block of zeros.
_ZEROS = 1 << 22
_SCALES = {"direct": True, "minus_one": False, None: None}
# Parts of Praxis's models that `exact` adds to the experiments of Pax.
_EXACT = ("per_dim_scale", "logits_ffn.bias")


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status.

  Raises:
    user_error.UserError: An argument is wrong, or the checkpoint does not fit
      the experiment.
  """
  given, rest = overrides.split_arguments(argv)
  arguments = _parser().parse_args(rest)
  source, step = command_line.parse_place(arguments.source)
  target, at = command_line.parse_place(arguments.to)
  files.check_store(target)
  checkpoints = target / run_dir.CHECKPOINTS
  # Remains of an interrupted import are replaced.
  has_any = checkpoints.is_dir() and any(
    pax_files.to_step(each) is not None for each in checkpoints.iterdir()
  )
  is_file = any(
    each.exists() and not each.is_dir() for each in (target, checkpoints)
  )
  if at is not None or has_any or is_file:
    raise user_error.UserError(
      f"--to must be the directory of a run without checkpoints, got"
      f" {arguments.to}."
    )
  found, rules = _open(arguments, source, step)
  resolved = resolving.resolve(arguments.exp, given, packages=("paxon.tasks",))
  # Names and shapes do not depend on the mesh, and this machine has no other.
  resolved.config.mesh = "data=-1"
  job = resolving.build(resolved.config)
  opened = session.open_session(job, devices=jax.devices()[:1])
  importer = _Importer(
    opened,
    found,
    rules,
    norm_scale=arguments.norm_scale,
    has_direct_scales=arguments.format in _DIRECT,
    variables_only=arguments.variables_only,
  )
  for line in importer.describe():
    print(line, flush=True)
  if arguments.dry_run:
    return 0
  _return_freed_memory()
  importer.write(checkpoints)
  for text, affected in (
    ("chunks that are not stored were read as zeros", found.filled),
    ("arrays have values that are NaN or infinite", found.non_finite),
  ):
    if affected:
      print(f"warning: {text}: {_collapse(sorted(affected), found.arrays)}")
  run_files.store_settings(arguments.exp, given, target)
  size = units.size(importer.nbytes)
  print(
    f"wrote {len(importer.reads)} arrays, {size}, to"
    f" {os.fspath(checkpoints / str(importer.step))}; checksums verified"
  )
  return 0


def _open(
  arguments: argparse.Namespace, source: epath.Path, step: int | None
) -> tuple[pax_files.PaxCheckpoint, list[name_map.Rule]]:
  """Returns the checkpoint and the map of its names."""
  map_file = None if arguments.map is None else epath.Path(arguments.map)
  format_name = _FORMATS[arguments.format]
  rules = name_map.read(map_file, format_name=format_name)
  found = pax_files.open_checkpoint(
    source,
    step=step,
    allow_non_finite=arguments.allow_non_finite,
    is_pax=arguments.format == "pax",
  )
  scans = name_map.read_scans(map_file, format_name=format_name)
  found = dataclasses.replace(
    found, arrays=pax_files.move_layers_first(found.arrays, scans)
  )
  return found, rules


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "import-pax",
    "Converts a checkpoint of Pax, or of another trainer, to a run directory.",
  )
  parser.add_argument(
    "source",
    metavar="SRC[@STEP]",
    help="job_log_dir of Pax, a directory of checkpoints, or one checkpoint",
  )
  parser.add_argument(
    "--exp",
    required=True,
    help="experiment; --fdl.NAME=VALUE overrides its fields",
  )
  parser.add_argument(
    "--to", metavar="RUN", required=True, help="run directory to make"
  )
  parser.add_argument(
    "--format",
    choices=list(_FORMATS),
    default="pax",
    help="what wrote SRC; dcp is torch.distributed.checkpoint with names of"
    " torchtitan or Hugging Face, megatron its format torch_dist; orbax is any"
    " tree of it, and needs --map",
  )
  parser.add_argument(
    "--map",
    metavar="FILE",
    help="TOML file of names that are tried before the built-in ones",
  )
  parser.add_argument(
    "--norm_scale",
    choices=[each for each in _SCALES if each],
    help="how norms store their scale; default: minus_one with a bias (layer"
    " norms), direct without (RMS norms)",
  )
  parser.add_argument(
    "--allow_non_finite",
    action="store_true",
    help="import arrays with values that are NaN or infinite, with a warning",
  )
  parser.add_argument(
    "--variables_only",
    action="store_true",
    help="import at step 0 with a new optimizer state",
  )
  parser.add_argument(
    "--dry_run", action="store_true", help="report only, write nothing"
  )
  return parser


class _Importer:
  """A checkpoint of Pax as a state of an experiment."""

  def __init__(
    self,
    opened: session.Session,
    source: pax_files.PaxCheckpoint,
    rules: Sequence[name_map.Rule],
    *,
    norm_scale: str | None,
    has_direct_scales: bool,
    variables_only: bool,
  ) -> None:
    """Plans the import.

    Raises:
      user_error.UserError: The checkpoint does not fit the experiment.
    """
    self._opened = opened
    self._source = source
    self._specs: list[variables.VariableSpec] = jax.tree.leaves(
      opened.state_specs
    )
    values = {
      name.removeprefix(_VARIABLES): array
      for name, array in source.arrays.items()
      if name.startswith(_VARIABLES)
    }
    self._norms_given = norm_scale is not None
    direct_scale = _SCALES[norm_scale]
    if direct_scale is None and has_direct_scales:
      direct_scale = True
    self._norms_known = direct_scale is not None
    self._plan = variable_plan.make(
      [s for s in self._specs if stored_checkpoint.is_variable(s.name)],
      values,
      rules,
      direct_scale=direct_scale,
    )
    self.reads: dict[str, optimizer_slots.Read] = {
      name: functools.partial(each.read, values, dtype=each.spec.dtype)
      for name, each in self._plan.assignments.items()
    }
    self._used = {
      _VARIABLES + name
      for each in self._plan.assignments.values()
      for name in each.names
    }
    self._lines: tuple[str, ...] = ()
    self.step = 0
    if variables_only:
      self._lines = ("optimizer: not imported (--variables_only), step 0",)
    else:
      self._add_state()
    initial = [spec for spec in self._specs if spec.name not in self.reads]
    if any(spec.name.startswith("opt_state/") for spec in initial):
      optimizer_slots.check_starts_from_zero(
        opened.job.task.only_learner.optimizer
      )
    for spec in initial:
      self.reads[spec.name] = functools.partial(
        self._read_initial, spec, values
      )

  @property
  def nbytes(self) -> int:
    """The size of all arrays in bytes."""
    return sum(
      int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in self._specs
    )

  def _add_state(self) -> None:
    """Adds the step, the optimizer's state and the average."""
    arrays = self._source.arrays
    self.step = self._source.step
    if _STEP in arrays:
      self.step = int(arrays[_STEP].read().reshape(-1)[0])
      self._used.add(_STEP)
    imported = optimizer_slots.plan(
      self._specs,
      arrays,
      self._plan.assignments,
      learner=self._opened.job.task.only_learner,
    )
    self.reads |= imported.reads
    self._used |= imported.used
    self._lines = imported.lines

  def _read_initial(
    self, spec: variables.VariableSpec, values: variable_plan.Arrays
  ) -> np.ndarray | lazy_array.Blocks:
    """Returns the step, or the initial value of what has no source."""
    name = spec.name
    if name == _STEP:
      return np.full((), self.step, spec.dtype)
    if stored_checkpoint.is_variable(name):
      return _make_initial(spec, self._opened.job.seed)
    average = self._opened.job.task.only_learner.average
    _, is_average, variable = name.partition("average/")
    has_source = is_average and variable in self.reads
    if has_source and average is not None and not average.debias:
      # An average starts with the parameters.
      if variable in self._plan.assignments:
        each = self._plan.assignments[variable]
        return each.read(values, dtype=spec.dtype)
      value = self.reads[variable]()
      assert isinstance(value, np.ndarray)
      return value.astype(spec.dtype)
    return _make_zeros(spec)

  def describe(self) -> Iterator[str]:
    """Yields lines about imported and unused arrays."""
    source, plan = self._source, self._plan
    version = "no metadata"
    if source.version is not None:
      version = f"version {source.version:g}"
    size = units.size(sum(array.nbytes for array in source.arrays.values()))
    yield (
      f"{os.fspath(source.path)}: {source.kind}, {version},"
      f" {len(source.arrays)} arrays, {size}"
    )
    count = len(plan.assignments) + len(plan.initial)
    yield f"variables: {len(plan.assignments)} of {count}"
    yield from self._lines
    yield f"step: {self.step:,}; the data starts at its beginning"
    if self.step not in (0, self._source.step):
      yield f"warning: the name of the checkpoint has step {source.step:,}"
    yield from self._describe_norms()
    yield from self._describe_dtypes()
    if plan.initial:
      yield f"initial values: {', '.join(plan.initial)}"
    for line in plan.ambiguous:
      yield f"warning: {line}"
    yield from self._describe_unused()

  def _describe_norms(self) -> Iterator[str]:
    """Yields a line about the scales of norms, whose kind is not stored."""
    minus_one, direct = (
      sorted(
        _VARIABLES + name
        for each in self._plan.assignments.values()
        if each.direct_scale is is_direct
        for name in each.names
      )
      for is_direct in (False, True)
    )
    texts = []
    if minus_one:
      texts.append(f"{len(minus_one)} scales minus one")
      texts[-1] += "" if self._norms_known else ", as layer norms with a bias"
    if direct:
      texts.append(f"{len(direct)} direct scales")
      if not self._norms_known:
        texts[-1] += (
          ", as RMS norms, because they have no bias (layer norms need"
          " --norm_scale=minus_one):"
          f" {_collapse(direct, self._source.arrays)}"
        )
    if texts:
      given = " (--norm_scale)" if self._norms_given else ""
      yield f"norms: {'; '.join(texts)}{given}"

  def _describe_dtypes(self) -> Iterator[str]:
    changes: dict[str, int] = {}
    for each in self._plan.assignments.values():
      (name, *_) = each.names
      before = self._source.arrays[_VARIABLES + name].dtype
      after = jnp.dtype(each.spec.dtype)
      if before != after:
        key = f"{before.name} to {after.name}"
        changes[key] = changes.get(key, 0) + 1
    for key, count in changes.items():
      yield f"dtypes: {count} variables from {key}"

  def _describe_unused(self) -> Iterator[str]:
    arrays = self._source.arrays
    unused = [name for name in arrays if name not in self._used]
    model = [name for name in unused if name.startswith(_VARIABLES)]
    if model:
      hint = ""
      if any(part in name for part in _EXACT for name in model):
        hint = " (experiments of Pax have them with --fdl.exact=true)"
      yield (
        f"warning: {len(model)} arrays of the model are not used, so its"
        f" results differ from Pax's{hint}: {_collapse(model, arrays)}"
      )
    others = [name for name in unused if not name.startswith(_VARIABLES)]
    if others:
      yield f"not used: {_collapse(others, arrays)}"

  def write(self, checkpoints: epath.Path) -> None:
    """Writes the checkpoint and compares its checksums.

    Raises:
      user_error.UserError: It cannot be written, or an array cannot be read.
    """
    tree = [
      lazy_array.LazyArray(
        shape=spec.shape, dtype=spec.dtype, read=self.reads[spec.name]
      )
      for spec in self._specs
    ]
    try:
      with checkpointer.Checkpointer(checkpoints, lazy=True) as target:
        target.save(self.step, tree, specs=self._specs, data={})
        target.wait()
        target.verify(self.step)
    except checkpointer.SaveError as error:
      cause = error.__cause__
      while cause is not None and not isinstance(cause, user_error.UserError):
        cause = cause.__cause__ or cause.__context__
      raise cause or user_error.UserError(str(error)) from error


def _return_freed_memory() -> None:
  """Makes the C library give freed buffers of arrays back at once.

  It would keep those of TensorStore, which are several times as large as a
  block. Only glibc has the function.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is not None:
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _make_zeros(spec: variables.VariableSpec) -> lazy_array.Blocks:
  """Returns zeros in blocks, since the whole array may not fit in memory."""
  chunks = list(spec.shape)
  for axis in range(len(chunks)):
    while chunks[axis] > 1 and math.prod(chunks) > _ZEROS:
      chunks[axis] = -(-chunks[axis] // 2)

  def read() -> Iterator[tuple[lazy_array.Region, np.ndarray]]:
    ranges = [
      [slice(i, min(i + step, size)) for i in range(0, size, step)]
      for size, step in zip(spec.shape, chunks, strict=True)
    ]
    for region in itertools.product(*ranges):
      yield region, np.zeros([x.stop - x.start for x in region], spec.dtype)

  return lazy_array.Blocks(
    shape=spec.shape, dtype=spec.dtype, chunks=tuple(chunks), read=read
  )


def _make_initial(spec: variables.VariableSpec, seed: int) -> np.ndarray:
  return np.asarray(
    initialization.initial_values({spec.name: spec}, seed)[spec.name]
  )


def _collapse(
  names: Sequence[str], among: Mapping[str, pax_files.PaxArray]
) -> str:
  """Returns the stored names of arrays in as few groups as possible."""

  def to_path(name: str) -> str:
    stored = among[name].name if name in among else name
    return stored.replace(".", "/")

  groups = text_table.collapse_names(
    map(to_path, names), among=map(to_path, among)
  )
  shown = [
    group.label.replace("/", ".")
    + (f" ({len(group.names)})" if len(group.names) > 1 else "")
    for group in groups[:_MAX_GROUPS]
  ]
  rest = sum(len(group.names) for group in groups[_MAX_GROUPS:])
  if rest:
    shown.append(f"and {rest} more")
  return ", ".join(shown)
