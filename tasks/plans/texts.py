"""Texts of compiled training steps that are stored for tests of `runner/plan`.

  tools/python -m paxon.tasks.plans.texts            prints their names
  tools/python -m paxon.tasks.plans.texts 'v5e_*'    makes these again

Each is compiled for absent devices by a process with the target's variables,
and stored in `runner/plan/testdata` without what plans do not read. A text
belongs to versions of JAX and the compiler; those in `jax_0_11` are made by a
Python with JAX 0.11. The small programs of `runner.plan.testing` are made by
that module.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import fnmatch
import gzip
import os
import pathlib
import subprocess
import sys
from typing import Final

import jax

from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import child_process, testing, topology
from paxon.runner.plan import target as targets
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib

_PARAMS: Final = "tasks.lm.params."
_CLOUD: Final = f"{_PARAMS}lm_cloud.LmCloudSpmd2B"
_LLAMA: Final = f"{_PARAMS}llama.Llama2_7B"
_KERNELS: Final = "runner.planning.kernel_experiments"
_SPLASH: Final = f"{_KERNELS}.ExpectsSplash"
_MIXTURE: Final = f"{_KERNELS}.HasMixture"
_CUDNN: Final = "layers.attention.cudnn_attention"
_ONE: Final = "--one"
# Also made with JAX 0.11, which has other compilers.
NEWER: Final = ("h200_1x8_fsdp", "h200_1x8_fp8", "v5e_2x4_splash")


@dataclasses.dataclass(frozen=True)
class Text:
  """A stored text.

  Attributes:
    name: Path of its file in `runner/plan/testdata`, without `.txt.gz`.
    target: Value of `--target`.
    experiment: Value of `--exp`.
    knobs: Values of knobs.
  """

  name: str
  target: str
  experiment: str
  knobs: Mapping[str, str]

  @property
  def path(self) -> pathlib.Path:
    """Path of its file."""
    return testing.TESTDATA / f"{self.name}.txt.gz"

  def compile(self) -> str:
    """Returns the compiled text; the target's variables must be set."""
    target = targets.parse(self.target)
    given = [overrides_lib.Override(*item) for item in self.knobs.items()]
    job = resolving.build(resolving.resolve(self.experiment, given).config)
    session = session_lib.open_session(job, devices=topology.devices(target))
    compiled = topology.compile_for(
      target,
      compiled_steps.trace_train_step(session),
      session.layout.mesh,
      given=job.compiler_options,
      sets=job.compiler_option_sets,
    )
    return testing.shorten(compiled.as_text() or "")


def _cloud(
  name: str, target: str, mesh: str, *, batch: int, layers: int, **knobs: str
) -> Text:
  knobs |= {"mesh": mesh, "global_batch_size": f"{batch}"}
  return Text(name, target, _CLOUD, {"num_layers": f"{layers}"} | knobs)


def _layout(name: str, **knobs: str) -> Text:
  """A layout of `estimate/known_orders_test`."""
  given = {
    "num_layers": "3",
    "global_batch_size": "16",
    "attention_kernel": f"{_CUDNN}.cudnn",
    "remat_policy": "None",
    "mesh": "fsdp=16",
  }
  return Text(f"layouts/{name}", "h200:2x8", _LLAMA, given | knobs)


def _texts() -> Iterator[Text]:
  yield _cloud("h200_1x8_fsdp", "h200:1x8", "fsdp=8", batch=64, layers=4)
  yield _cloud("h200_1x8_tensor", "h200:1x8", "tensor=8", batch=8, layers=4)
  yield _cloud("v5e_4x4_fsdp", "v5e:4x4", "fsdp=16", batch=128, layers=18)
  yield _cloud("v5e_2x4_tensor", "v5e:2x4", "tensor=8", batch=8, layers=2)
  for name, target in (("v6e_2x4", "v6e:2x4"), ("v7x_2x2x1", "v7x:2x2x1")):
    yield _cloud(f"{name}_fsdp", target, "fsdp=8", batch=64, layers=4)
    yield _cloud(f"{name}_tensor", target, "tensor=8", batch=8, layers=2)
  for name, target in (
    ("v5e_2x4", "v5e:2x4"),
    ("v6e_2x4", "v6e:2x4"),
    ("v7x_2x2x1", "v7x:2x2x1"),
  ):
    knobs = {"mesh": "data=8", "num_layers": "3"}
    yield Text(f"{name}_splash", target, _SPLASH, knobs)
  yield _cloud(
    "h200_1x8_fp8",
    "h200:1x8",
    "fsdp=8",
    batch=64,
    layers=4,
    quantization="fp8",
  )
  yield _cloud(
    "h200_1x8_pipelined",
    "h200:1x8",
    "stage=4,fsdp=2",
    batch=64,
    layers=8,
    num_stages="4",
    num_pipeline_microbatches="8",
  )
  knobs = {"mesh": "expert=8", "global_batch_size": "32", "bound": "1.5"}
  yield Text("h200_1x8_mixture", "h200:1x8", _MIXTURE, knobs)
  knobs = {"mesh": "expert=4,fsdp=4", "global_batch_size": "64"}
  yield Text("v5e_4x4_mixture", "v5e:4x4", _MIXTURE, knobs)
  yield _layout("fsdp")
  yield _layout("tensor", mesh="tensor=16")
  yield _layout("fsdp2_tensor8", mesh="fsdp=2,tensor=8")
  yield _layout("fsdp8_tensor2", mesh="fsdp=8,tensor=2")
  yield _layout("remat", remat_policy="layers.remat.save_nothing")
  yield _layout("cudnn", attention_kernel=f"{_CUDNN}.one_document")
  yield _layout("batch64", global_batch_size="64")
  yield _layout("microbatches", global_batch_size="64", num_microbatches="4")
  yield _layout("data_short", mesh="data=16", length="256")
  yield _layout("fsdp_short", length="256")


TEXTS: Final = {text.name: text for text in _texts()}


def texts() -> dict[str, Text]:
  """Returns the texts that this version of JAX makes, by name."""
  if jax.__version_info__ < (0, 11):
    return TEXTS
  newer = {f"jax_0_11/{name}": TEXTS[name] for name in NEWER}
  return {n: dataclasses.replace(t, name=n) for n, t in newer.items()}


def main(arguments: list[str]) -> int:
  """Lists the texts, or makes those whose names match a pattern."""
  if arguments[:1] == [_ONE]:
    text = texts()[arguments[1]]
    text.path.parent.mkdir(exist_ok=True)
    # Without a time, so that an equal text is an equal file.
    text.path.write_bytes(gzip.compress(text.compile().encode(), mtime=0))
    return 0
  if not arguments:
    print("\n".join(texts()))
  wanted = [
    name
    for name in texts()
    if any(fnmatch.fnmatch(name, pattern) for pattern in arguments)
  ]
  for name in wanted:
    print(f"{name} ...", flush=True)
    target = targets.parse(texts()[name].target)
    done = subprocess.run(
      [sys.executable, "-m", "paxon.tasks.plans.texts", _ONE, name],
      env=child_process.environment(target, is_compiled=True),
      check=False,
    )
    if done.returncode:
      return done.returncode
  return 0 if wanted or not arguments else os.EX_USAGE


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
