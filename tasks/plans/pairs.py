"""Pairs of experiments and targets with golden plans.

A pair's file lies in `files/`; its name is made of the experiment's class and
the target: `LmCloudSpmd2B.h200_4x8.json`.
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


@dataclasses.dataclass(frozen=True)
class Pair:
  """An experiment on a target.

  Attributes:
    experiment: As `--exp` takes it.
    target: As `--target` takes it.
    assigned: Knobs that the target asks for; what else is the experiment's.
    attention: Whose kernel computes attention, where there are two: `cudnn` or
      `plain`.
    quantization: The recipe of its products, if it has one.
  """

  experiment: str
  target: str
  assigned: Mapping[str, str] = dataclasses.field(default_factory=dict)
  attention: str = ""
  quantization: str = ""

  @property
  def name(self) -> str:
    """The name of its file, without the ending."""
    target = re.sub(r"[^a-z0-9]+", "_", self.target).strip("_")
    variants = filter(None, (self.attention, self.quantization))
    experiment = self.experiment.rpartition(".")[2]
    return ".".join((experiment, target, *variants))

  @property
  def path(self) -> pathlib.Path:
    """Its file."""
    return FOLDER / f"{self.name}.json"

  @property
  def overrides(self) -> list[overrides_lib.Override]:
    """The assignments, as the command line would make them."""
    assigned = dict(self.assigned)
    if self.attention == "plain":
      assigned["attention_kernel"] = "layers.attention.kernels.plain"
    if self.quantization:
      assigned["quantization"] = self.quantization
    return [overrides_lib.Override(*item) for item in assigned.items()]

  @property
  def parsed_target(self) -> targets.Target:
    """The target."""
    return targets.parse(self.target)

  @property
  def missing(self) -> tuple[str, ...]:
    """The distributions that its compiler lacks here."""
    missing = topology.missing(self.parsed_target)
    if not missing and self.attention == "cudnn":
      return topology.missing_for_cudnn()
    return missing

  def read(self) -> golden.GoldenPlan:
    """Returns the contents of its file.

    Raises:
      UserError: There is no file.
    """
    if not self.path.exists():
      raise user_error.UserError(
        f"{self.name} has no file; run `tools/plans --update {self.name}`."
      )
    return golden.from_json(self.path.read_text())


def _pairs() -> Iterator[Pair]:
  yield Pair(
    f"{_PARAMS}quickstart.PythonStdlibLm", "cpu:8", {"mesh": "fsdp=-1"}
  )
  yield Pair(
    f"{_PARAMS}quickstart.PythonStdlibLm", "h200:1x8", {"mesh": "fsdp=-1"}
  )
  cloud = f"{_PARAMS}lm_cloud.LmCloudSpmd"
  # Eight rows a device, as on TPUs. Hosts share their gradients only.
  for hosts, gpus in ((1, 1), (1, 8), (4, 8), (64, 8)):
    mesh = f"fsdp={gpus}" + (f",dcn.data={hosts}" if hosts > 1 else "")
    yield Pair(
      f"{cloud}2B",
      f"h200:{hosts}x{gpus}",
      {"mesh": mesh, "global_batch_size": str(8 * hosts * gpus)},
    )
  yield Pair(
    f"{cloud}2B",
    "h200:1x8",
    {"mesh": "fsdp=8", "global_batch_size": "64"},
    quantization="fp8",
  )
  yield Pair(f"{cloud}2B", "v4:2x2x1")
  # cuDNN's library is large, so CI compiles these with plain attention too.
  gpt2, llama = (
    f"{_PARAMS}{name}" for name in ("gpt2.Gpt2Small124M", "llama.Llama3_8B")
  )
  yield Pair(gpt2, "h200:1x1", attention="cudnn")
  # Whose logits take more memory: half of the rows.
  yield Pair(gpt2, "h200:1x1", {"global_batch_size": "32"}, attention="plain")
  yield Pair(llama, "h200:1x8", attention="cudnn")
  yield Pair(llama, "h200:1x8", attention="plain")
  # Split over hosts as well: their adapters are fast enough.
  yield Pair(
    llama,
    "h200:4x8",
    {"mesh": "fsdp=32", "global_batch_size": "32"},
    attention="cudnn",
  )
  yield Pair(f"{_PARAMS}c4_multislice.C4Spmd22BAdam2xv4_128", "v4:2x(4x4x4)")
  yield Pair(f"{cloud}128B", "v4:4x8x8")
  yield Pair(f"{cloud}1024B", "v4:8x16x16")


PAIRS: Final = tuple(_pairs())


def find(patterns: Iterable[str]) -> list[Pair]:
  """Returns the pairs whose names match one of the patterns.

  Args:
    patterns: Names with * and ?; none means every pair.

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
