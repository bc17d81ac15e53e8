"""Measures the import of a checkpoint of Pax: memory, and speed against `cp`.

  python -m paxon.tools.benchmarks.pax_import --gigabytes=2

The checkpoint is made of random numbers, an LmCloud model with the state of
Adam in arrays of TensorStore, as paxml writes them. Memory is the peak of the
importing process beyond that of the import of a small checkpoint, as a multiple
of the largest array; speed is without the time that import takes.

With `--constant`, all values are equal, and the chunks of an array are links to
one file. So the source takes almost no space, nor does the result on a file
system that compresses, such as btrfs; `cp` is not measured.
"""

import argparse
from collections.abc import Mapping, Sequence
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorstore as ts

from paxon.runner import units
from paxon.tools.pax_checkpoints import testing

_EXPERIMENT = "tasks.lm.params.lm_cloud.LmCloudSpmd"
_GIGABYTE = 10**9
# The learner's state is of this length; the third is Adam's.
_CHAIN = 4
_ADAM = 2
_STEP = 100
# Prints its peak memory at last. That which `wait4` returns would include the
# memory of this process.
_CHILD = """
import pathlib, sys, time
from paxon.tools.checkpoints import ckpt_main
status = ckpt_main.main(sys.argv[1:])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
peak = [line for line in lines if line.startswith("VmHWM")]
print(*peak, time.process_time())
sys.exit(status)
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the measurements and returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--gigabytes", type=float, default=2.0)
  parser.add_argument("--embed_dim", type=int, default=1024)
  parser.add_argument("--vocab_size", type=int, default=32_000)
  parser.add_argument(
    "--shards", type=int, default=8, help="chunks of each array"
  )
  parser.add_argument(
    "--constant", action="store_true", help="write constant arrays"
  )
  parser.add_argument("--folder", help="of the files; default: a temporary one")
  options = parser.parse_args(argv)
  if options.gigabytes <= 0 or options.embed_dim % 128:
    parser.error(
      "--gigabytes must be positive and --embed_dim a multiple of 128"
    )
  layer = 12 * options.embed_dim**2
  values = options.gigabytes * _GIGABYTE / 12
  rest = options.vocab_size * options.embed_dim
  num_layers = max(1, round((values - rest) / layer))
  with tempfile.TemporaryDirectory(dir=options.folder) as name:
    folder = pathlib.Path(name)
    small = _find_shapes(layers=1, embed=128, vocab=256)
    _write(folder / "small", small)
    base, started, started_cpu = _import(folder, "small", small)
    shapes = _find_shapes(
      layers=num_layers, embed=options.embed_dim, vocab=options.vocab_size
    )
    size = _write(
      folder / "large",
      shapes,
      shards=options.shards,
      is_constant=options.constant,
    )
    largest = 4 * max(map(math.prod, shapes.values()))
    copied = None
    if not options.constant:
      start = time.perf_counter()
      subprocess.run(
        ["cp", "-r", folder / "large", folder / "copy"], check=True
      )
      # Imports reach the disk, too.
      subprocess.run(["sync"], check=True)
      copied = time.perf_counter() - start
      subprocess.run(["rm", "-r", folder / "copy"], check=True)
    peak, seconds, cpu = _import(folder, "large", shapes)
  print(
    f"{units.size(size)} in {3 * len(shapes)} arrays, the largest"
    f" {units.size(largest)}"
  )
  print(
    f"peak memory: {units.size(peak - base)} beyond {units.size(base)},"
    f" {(peak - base) / largest:.2f} x the largest array"
  )
  speed = size / max(seconds - started, 1e-3) / 1e6
  print(
    f"speed: {speed:.0f} MB/s after a start of {started:.0f} s"
    + (f", cp {size / copied / 1e6:.0f} MB/s" if copied else "")
    + f"; {(cpu - started_cpu) * 1e9 / size:.1f} s of CPU per GB"
  )
  return 0


def _find_shapes(
  *, layers: int, embed: int, vocab: int
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the variables of an LmCloud model."""
  sizes = testing.Sizes(
    layers=1, embed=embed, heads=embed // 128, head_dim=128, mlp=4 * embed
  )
  layer = testing.make_layer(sizes, np.random.default_rng(0))
  prefix = "lm.transformer.repeat.sub.x_layers_0."
  return {
    **{f"{prefix}{k}": (layers, *v.shape) for k, v in layer.items()},
    "lm.final_ln.scale": (embed,),
    "lm.final_ln.bias": (embed,),
    "lm.softmax.logits_ffn.linear.w": (embed, vocab),
    "lm.softmax.logits_ffn.bias.b": (vocab,),
  }


def _write(
  folder: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  shards: int = 2,
  is_constant: bool = False,
) -> int:
  """Writes a checkpoint array by array; returns the size of its arrays."""
  items = folder / f"checkpoint_{_STEP:08d}" / "state"
  items.mkdir(parents=True)
  rng = np.random.default_rng(0)
  testing.write_array(items, "zarr", "step", np.asarray(_STEP, np.uint32))
  total = 0
  for name, shape in shapes.items():
    is_stacked = ".repeat." in name
    group = f"p#{shape[0]}#i-1" if is_stacked else "no_prefix"
    for slot in ("mdl_vars", "m", "v"):
      head = slot
      if slot != "mdl_vars":
        head = f"opt_states_0.{group}_{_ADAM}.{slot}"
      total += 4 * math.prod(shape)
      path = items / f"{head}.params.{name}"
      if is_constant:
        _write_constant(path, shape, shards=shards)
      else:
        value = rng.random(shape, dtype=np.float32)
        testing.write_array(items, "zarr", path.name, value, shards=shards)
    for index in range(_CHAIN):
      path = items / f"opt_states_0.{group}_{index}.count"
      if not path.exists():
        count = np.full(shape[:is_stacked], _STEP, np.int32)
        testing.write_array(items, "zarr", path.name, count)
  return total


def _write_constant(
  path: pathlib.Path, shape: tuple[int, ...], *, shards: int
) -> None:
  """Writes an array whose chunks are links to the file of the first one."""
  chunks = list(shape)
  for i, size in enumerate(shape):
    if size % shards == 0:
      chunks[i] = size // shards
      break
  store = ts.open(
    {
      "driver": "zarr",
      "kvstore": {"driver": "file", "path": f"{path}/"},
      "metadata": {
        "shape": shape,
        "chunks": chunks,
        "dtype": "<f4",
        "compressor": {"id": "zstd", "level": 1},
      },
    },
    create=True,
  ).result()
  region = tuple(slice(0, size) for size in chunks)
  store[region].write(np.full(chunks, 0.01, np.float32)).result()
  grid = [a // b for a, b in zip(shape, chunks, strict=True)]
  names = [".".join(map(str, index)) for index in np.ndindex(*grid)]
  for name in names[1:]:
    (path / name).hardlink_to(path / names[0])


def _import(
  folder: pathlib.Path, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, float, float]:
  """Imports a checkpoint; returns its peak memory, seconds and CPU seconds."""
  embed, vocab = shapes["lm.softmax.logits_ffn.linear.w"]
  layers = shapes["lm.transformer.repeat.sub.x_layers_0.layer_norm.scale"][0]
  knobs = {
    "num_layers": layers,
    "embed_dim": embed,
    "vocab_size": vocab,
    "exact": "true",
  }
  options = [
    *("import-pax", str(folder / name), f"--exp={_EXPERIMENT}"),
    f"--to={folder / f'run_{name}'}",
    *(f"--fdl.{knob}={value}" for knob, value in knobs.items()),
  ]
  start = time.perf_counter()
  printed = subprocess.run(
    [sys.executable, "-c", _CHILD, *options],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  seconds = time.perf_counter() - start
  *lines, peak = printed.splitlines()
  print("\n".join(lines))
  _, kilobytes, _, cpu = peak.split()
  return 1024 * int(kilobytes), seconds, float(cpu)


if __name__ == "__main__":
  sys.exit(main())
