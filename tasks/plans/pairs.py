"""Pairs of experiments and targets with golden plans.

The plan of a pair is stored in `files/`, named after the experiment and the
target: `LmCloudSpmd2B.h200_4x8.json`.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import fnmatch
import pathlib
import re
from typing import Final

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import golden, topology
from paxon.runner.plan import target as targets
from paxon.sharding import suggestions

FOLDER: Final = pathlib.Path(__file__).parent / "files"
_PARAMS: Final = "tasks.lm.params."
_QUICKSTART: Final = f"{_PARAMS}quickstart.PythonStdlibLm"
_CLOUD: Final = f"{_PARAMS}lm_cloud.LmCloudSpmd"


@dataclasses.dataclass(frozen=True)
class Pair:
  """An experiment on a target.

  Attributes:
    experiment: Value of `--exp`.
    target: Value of `--target`.
    assigned: Knob values for the target.
    attention: Attention kernel, `cudnn` or `plain`, if there are plans of both.
    quantization: Quantization recipe, if any.
    is_of_kinds: Whether it is one of the two experiments that are planned for
      ten kinds of devices. CI does not compile these.
    is_large: Whether it compiles for minutes. CI does not compile these either.
  """

  experiment: str
  target: str
  assigned: Mapping[str, str] = dataclasses.field(default_factory=dict)
  attention: str = ""
  quantization: str = ""
  is_of_kinds: bool = False
  is_large: bool = False

  @property
  def name(self) -> str:
    """Name of its file, without extension."""
    target = re.sub(r"[^a-z0-9]+", "_", self.target).strip("_")
    variants = filter(None, (self.attention, self.quantization))
    experiment = self.experiment.rpartition(".")[2]
    return ".".join((experiment, target, *variants))

  @property
  def path(self) -> pathlib.Path:
    """Path of its file."""
    return FOLDER / f"{self.name}.json"

  @property
  def overrides(self) -> list[overrides_lib.Override]:
    """Overrides, as on the command line."""
    assigned = dict(self.assigned)
    if self.attention == "plain":
      assigned["attention_kernel"] = "layers.attention.kernels.plain"
    if self.quantization:
      assigned["quantization"] = self.quantization
    return [overrides_lib.Override(*item) for item in assigned.items()]

  @property
  def parsed_target(self) -> targets.Target:
    """The parsed target."""
    return targets.parse(self.target)

  @property
  def missing(self) -> tuple[str, ...]:
    """Distributions that its compiler needs and that are not installed."""
    missing = topology.missing(self.parsed_target)
    if not missing and self.attention == "cudnn":
      return topology.missing_for_cudnn()
    return missing

  def read(self) -> golden.GoldenPlan:
    """Returns the contents of its file.

    Raises:
      UserError: The file does not exist.
    """
    if not self.path.exists():
      raise user_error.UserError(
        f"{self.name} has no file; run `tools/plans --update {self.name}`."
      )
    return golden.from_json(self.path.read_text())


# Kinds of different generations; `absent_hardware_test` compiles for all GPUs.
_KINDS: Final = (
  *("cpu:8", "a100:1x8", "h100:1x8", "h200:1x8", "b200:1x8", "v4:2x2x2"),
  *("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v7x:2x2x1"),
)


def _list_by_kind() -> Iterator[Pair]:
  for target in _KINDS:
    yield Pair(_QUICKSTART, target, {"mesh": "fsdp=-1"}, is_of_kinds=True)
  for target in _KINDS:
    assigned = {"mesh": "fsdp=8", "global_batch_size": "64"}
    yield Pair(f"{_CLOUD}2B", target, assigned, is_of_kinds=True)


def _pairs() -> Iterator[Pair]:
  yield Pair(_QUICKSTART, "cpu:8", {"mesh": "fsdp=-1"})
  yield Pair(_QUICKSTART, "h200:1x8", {"mesh": "fsdp=-1"})
  # Eight sequences per device, as on TPUs; data parallelism between hosts.
  for hosts, gpus in ((1, 1), (1, 8), (4, 8), (64, 8)):
    mesh = f"fsdp={gpus}" + (f",dcn.data={hosts}" if hosts > 1 else "")
    yield Pair(
      f"{_CLOUD}2B",
      f"h200:{hosts}x{gpus}",
      {"mesh": mesh, "global_batch_size": str(8 * hosts * gpus)},
    )
  yield Pair(
    f"{_CLOUD}2B",
    "h200:1x8",
    {"mesh": "fsdp=8", "global_batch_size": "64"},
    quantization="fp8",
  )
  yield Pair(f"{_CLOUD}2B", "v4:2x2x1")
  # CI compiles plain attention too, since cuDNN's library is large.
  gpt2, llama = (
    f"{_PARAMS}{name}" for name in ("gpt2.Gpt2Small124M", "llama.Llama3_8B")
  )
  yield Pair(gpt2, "h200:1x1", attention="cudnn")
  # Half the batch, since plain attention needs more memory.
  yield Pair(gpt2, "h200:1x1", {"global_batch_size": "32"}, attention="plain")
  yield Pair(llama, "h200:1x8", attention="cudnn")
  yield Pair(llama, "h200:1x8", attention="plain")
  # FSDP over hosts too: their network adapters are fast enough.
  yield Pair(
    llama,
    "h200:4x8",
    {"mesh": "fsdp=32", "global_batch_size": "32"},
    attention="cudnn",
  )
  yield Pair(f"{_PARAMS}gpu.PileGLaM64B64E", "h200:64x8", is_large=True)
  yield Pair(f"{_PARAMS}c4_multislice.C4Spmd22BAdam2xv4_128", "v4:2x(4x4x4)")
  yield Pair(f"{_CLOUD}128B", "v4:4x8x8")
  yield Pair(f"{_CLOUD}1024B", "v4:8x16x16")


def _all() -> tuple[Pair, ...]:
  """Pairs, including the kinds that are not planned anyhow."""
  found = {pair.name: pair for pair in _pairs()}
  for pair in _list_by_kind():
    found.setdefault(pair.name, pair)
  return tuple(found.values())


PAIRS: Final = _all()
KINDS: Final = tuple(
  next(pair for pair in PAIRS if pair.name == each.name)
  for each in _list_by_kind()
)


def find(patterns: Iterable[str]) -> list[Pair]:
  """Returns the pairs whose names match one of the patterns.

  Args:
    patterns: Names with * and ?; none selects all pairs.

  Raises:
    UserError: A pattern matches nothing.
  """
  wanted = list(patterns)
  names = [pair.name for pair in PAIRS]
  for pattern in wanted:
    if not fnmatch.filter(names, pattern):
      raise user_error.UserError(
        f"There is no pair {pattern!r}{suggestions.suggest(pattern, names)}"
        " --list prints them."
      )
  return [
    pair
    for pair in PAIRS
    if not wanted or any(fnmatch.fnmatch(pair.name, p) for p in wanted)
  ]
