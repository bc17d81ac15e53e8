"""`docs/experiments.md`: what each experiment takes, by closed forms.

  tools/python -m paxon.tasks.experiments_page             compares
  tools/python -m paxon.tasks.experiments_page --update    writes the page

Parameters, FLOPs and memory follow from shapes, rules and the mesh; what a plan
predicts, and what others have measured, is read from `docs/plan_accuracy.md`.
"""

from collections.abc import Sequence
import dataclasses
import math
import pathlib
import re
import sys
from typing import Final

import fiddle as fdl
import jax
import numpy as np

from paxon.learners import adafactor
from paxon.pipeline import spmd_pipeline
from paxon.pipeline import stages as stages_lib
from paxon.runner import job
from paxon.sharding import axes, variables
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as rules_lib
from paxon.tasks import golden

PAGE: Final = "docs/experiments.md"
ACCURACY: Final = "docs/plan_accuracy.md"
MEND: Final = "tools/python -m paxon.tasks.experiments_page --update"
_ROOT: Final = pathlib.Path(__file__).parent.parent
_PARAMS: Final = "paxon.tasks.lm.params."
_GIB: Final = 2**30
_COLUMNS: Final = (
  "experiment",
  "parameters",
  "FLOPs a step",
  "devices",
  "mesh",
  "rows x length",
  "state",
  "layer inputs",
  "predicted MFU",
  "published MFU",
)
_HEADER: Final = f"""\
# Experiments

Made by `{MEND}`; a test compares.

FLOPs are those of a step on all devices: 6 for each parameter in a matrix
product and each token, and `12 L N H T^2` a row for attention, with every key
of every query counted. Memory is that of one device: `state`, the parameters
and the optimizer's moments in float32; `layer inputs`, what the layers save for
the backward pass if they save nothing else: of each layer its input, or of a
stage of a pipeline its input in each tick, bubbles too. What else a step takes,
a plan says: [plans.md](plans.md) has those of some, and `--mode=plan` makes
that of any.

`predicted MFU` is the plan's estimate, and the bound that no program can beat,
of [plan_accuracy.md](plan_accuracy.md); `published MFU` is Pax's own figure, or
another's of the same model. Nothing here was run at its size.

A `stage` in a mesh is of a pipeline. An experiment that needs a package answers
so in one line. Names in Pax and MaxText are in
[migrating_from_pax.md](migrating_from_pax.md).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
  """What an experiment takes.

  Attributes:
    parameters: How many are trained.
    flops: Of a step, on all devices.
    devices: How many the mesh has at least.
    state: Bytes of parameters and moments on a device.
    layer_inputs: Bytes of the inputs of layers, or stages, on a device.
  """

  parameters: int
  flops: int
  devices: int
  state: float
  layer_inputs: float


def figures(config: fdl.Config[job.Job]) -> Figures:
  """Returns what an experiment's configuration takes, by closed forms."""
  specs = [s for s in jax.tree.leaves(golden.specs_of(config)) if s.trainable]
  spec = meshes.MeshSpec.parse(config.mesh)
  sizes = {
    axis: max(spec.ici.get(axis, 1), 1) * max(spec.dcn.get(axis, 1), 1)
    for axis in axes.MESH_AXES
  }
  optimizer = fdl.get_callable(config.task.learner.optimizer)
  copies = 2 if optimizer is adafactor.Adafactor else 3
  state = 0.0
  for one in specs:
    share = _share(one.axes, config.rules, sizes)
    state += copies * one.dtype.itemsize * math.prod(one.shape) * share
  return Figures(
    parameters=sum(math.prod(one.shape) for one in specs),
    flops=_flops(config, specs),
    devices=math.prod(sizes.values()),
    state=state,
    layer_inputs=_layer_inputs(config, sizes),
  )


def page() -> str:
  """Returns the text of the page."""
  lines = [_HEADER]
  by_module: dict[str, list[str]] = {}
  for name in golden.names():
    module, _, cls = name.removeprefix(_PARAMS).rpartition(".")
    by_module.setdefault(module, []).append(cls)
  predictions = _predictions()
  for module, classes in by_module.items():
    lines += [f"\n## tasks.lm.params.{module}\n"]
    lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    rows = [_row(f"{_PARAMS}{module}.{cls}", predictions) for cls in classes]
    lines += [_line(cells) for _, cells in sorted(rows, key=lambda r: r[0])]
  return "\n".join(lines) + "\n"


def _row(
  name: str, predictions: dict[str, tuple[str, str]]
) -> tuple[tuple[int, str], Sequence[str]]:
  """Returns what a row is sorted by, and its cells."""
  config, missing = golden.resolved(name)
  cls = name.rpartition(".")[2]
  if config is None:
    empty = ["-"] * (len(_COLUMNS) - 2)
    return (2**62, cls), [f"`{cls}`", f"needs `{missing}`", *empty]
  found = figures(config)
  data = config.train_input
  cells = [
    f"`{cls}`",
    _short(found.parameters, ("", "K", "M", "G", "T")),
    _short(found.flops, ("", "K", "M", "G", "T", "P", "E", "Z")),
    f"{found.devices:,}",
    config.mesh,
    f"{data.global_batch_size:,} x {data.length:,}",
    f"{found.state / _GIB:.3g} GiB",
    f"{found.layer_inputs / _GIB:.3g} GiB",
    *predictions.get(name.removeprefix("paxon."), ("-", "-")),
  ]
  return (found.parameters, cls), cells


def _flops(
  config: fdl.Buildable, specs: Sequence[variables.VariableSpec]
) -> int:
  """Returns the model's FLOPs of a step, all keys of all queries counted."""
  data, model = config.train_input, config.task.model
  tied = getattr(model, "head", None) is None
  products = 0
  for one in specs:
    name = one.name.removeprefix("params/")
    is_table = name in ("embedding/table", "position_embedding/table")
    is_head = name.startswith("head/") or (tied and name == "embedding/table")
    in_stack = name.startswith("stack/") and one.regularized
    if in_stack or is_head or not (is_table or name.startswith("stack/")):
      products += math.prod(one.shape) if one.regularized else 0
  tokens = data.global_batch_size * data.length
  attention = 0
  for block in getattr(model.stack, "blocks", ()):
    width = block.attention.num_heads * block.attention.head_dim
    attention += 12 * model.stack.num_layers * width * data.length * tokens
  return 6 * products * tokens + attention


def _layer_inputs(config: fdl.Buildable, sizes: dict[str, int]) -> float:
  data, model = config.train_input, config.task.model
  names = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
  entries = data.global_batch_size * data.length * model.embedding.embed_dim
  dtype = getattr(model.embedding, "dtype", None) or np.float32
  # Every row passes through every stage, whichever one it began with.
  share = _share(names, config.rules, {**sizes, axes.STAGE: 1})
  batches = _kept_batches(model.stack, data.global_batch_size, sizes)
  return batches * entries * np.dtype(dtype).itemsize * share


def _kept_batches(
  stack: fdl.Buildable, rows: int, sizes: dict[str, int]
) -> float:
  """Returns how many inputs a device keeps, in those of a whole batch."""
  if fdl.get_callable(stack) is not spmd_pipeline.PipelinedStack:
    return float(getattr(stack, "num_layers", None) or len(stack.parts))
  number = stack.num_microbatches or rows // stack.microbatch_size
  table = stages_lib.Ticks(
    num_stages=stack.num_stages,
    num_microbatches=number,
    num_repeats=stack.circular_repeats,
  )
  stages = stack.num_stages / sizes[axes.STAGE]
  # What does not divide into groups comes after the stages.
  rest = stack.num_layers % len(stack.blocks)
  return stages * table.num_ticks / number + rest


def _share(
  names: Sequence[str | None], rules: rules_lib.Rules, sizes: dict[str, int]
) -> float:
  """Returns which part of an array a device has."""
  spec = rules_lib.to_partition_spec(names, rules=rules)
  split = [axis for entry in spec for axis in rules_lib.as_tuple(entry)]
  return 1 / math.prod(sizes[axis] for axis in split)


def _predictions() -> dict[str, tuple[str, str]]:
  """Returns what is predicted and published, by the name of an experiment."""
  text = (_ROOT / ACCURACY).read_text()
  found = {}
  for cells in re.findall(r"^\| (\S+ \| `.*) \|$", text, re.MULTILINE):
    name, target, published, _, bound, _, estimate, *_ = cells.split(" | ")
    command = re.search(rf"^- {name}: `--exp=(\S+) (.*?)`", text, re.MULTILINE)
    if command is not None:
      knobs = re.findall(r"--fdl\.\S+", command[2])
      where = " with ".join([target, *(f"`{knob}`" for knob in knobs)])
      found[command[1]] = (
        f"{estimate}, at most {bound}, on {where}",
        published,
      )
  return found


def _short(number: float | int, units: Sequence[str]) -> str:
  """Returns a number with three digits and a unit."""
  for unit in units[:-1]:
    if number < 999.5:
      return f"{number:.3g} {unit}".rstrip()
    number /= 1000
  return f"{number:.3g} {units[-1]}"


def _line(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
  """Compares or writes; returns 1 where the page is not what it should be."""
  path = _ROOT / PAGE
  if list(argv) == ["--update"]:
    path.write_text(page())
    print(f"written: {PAGE}")
    return 0
  if path.exists() and path.read_text() == page():
    return 0
  print(f"{PAGE} is not what experiments are; run {MEND}", file=sys.stderr)
  return 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
