"""A tiny sharded program, and what the compilers for H200 and TPUs make of it.

`python -m paxon.runner.plan.testing TARGET FILE` writes the text without what
the parser does not read; the files in `testdata` were made so.
"""

import gzip
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan import hardware, topology
from paxon.runner.plan import target as targets
from paxon.sharding import mesh as meshes

LAYERS, WIDTH, ROWS = 3, 512, 2048

TESTDATA = pathlib.Path(__file__).parent / "testdata"
_UNREAD = re.compile(r",? (?:use_global_device_ids=true|stack_frame_id=\d+)")
_LITERAL = re.compile(r"(constant\(\{)[^()]{500,}(\}\))")
_METADATA = re.compile(r", metadata=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="[^"]*"')
_CONFIG = re.compile(r", backend_config=(\{.*\})$", re.MULTILINE)
# Fields of a back end's configuration that are read.
_READ = (
  re.compile(r'"known_trip_count":\{"n":"\d+"\}'),
  re.compile(r'"fusion_backend_config":\{"kind":"[^"]+"'),
  re.compile(r'"custom_fusion_config":\{"name":"[^"]+"'),
  re.compile(r'"is_sync":(?:true|false)'),
  re.compile(r'"intermediate_tensor_shape":\s*\{[^{}]*\}'),
  re.compile(r'"mask_type":\s*"\w+"'),
  re.compile(r'"sliding_window_length":\s*\d+'),
  re.compile(r'"lhs_contracting_dimensions":\s*\[[^\]]*\]'),
  re.compile(r'"cost_estimate":\s*\{[^{}]*\}'),
)


def target(text: str) -> targets.Target:
  """Returns a target whose compiler is here; skips the test if it is not.

  Bazel brings the compiler for CUDA to every test that names it, so that one
  missing there is a failure. libtpu has a licence of its own and comes with
  `--config=plan` only. PAXON_PLAN_COMPILERS says that both must be here.
  """
  found = targets.parse(text)
  missing = topology.missing(found)
  is_cuda = found.hardware.platform is hardware.Platform.CUDA
  is_needed = "PAXON_PLAN_COMPILERS" in os.environ or (
    is_cuda and "TEST_TARGET" in os.environ
  )
  if missing and not is_needed:
    pytest.skip(f"needs {' and '.join(missing)}: bazel test --config=plan")
  assert not missing, f"the test needs {' and '.join(missing)}"
  return found


def trace(mesh: jax.sharding.Mesh) -> jax.stages.Traced:
  """Traces the gradient of a loop of layers.

  Kernels are split over `fsdp`, rows over `data` and `fsdp`.
  """

  def loss(weights, batch):
    def layer(rows, kernel):
      return jnp.tanh(rows @ kernel), None

    return jnp.sum(jax.lax.scan(layer, batch, weights)[0].astype(jnp.float32))

  weights = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
  rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
  step = jax.jit(jax.grad(loss), out_shardings=weights)
  with jax.set_mesh(mesh):
    return step.trace(
      jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=weights
      ),
      jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=rows),
    )


def compile_for(to: targets.Target, mesh: str) -> jax.stages.Compiled:
  """Compiles it; the target's variables must be set."""
  devices = topology.devices(to)
  built = meshes.make_mesh(meshes.MeshSpec.parse(mesh), devices=devices)
  return topology.compile_for(to, trace(built), built)


def shorten(text: str) -> str:
  """Returns a compiled text without what is not read, and without paths."""

  def config(match: re.Match[str]) -> str:
    kept = [found[0] for found in (r.search(match[1]) for r in _READ) if found]
    # Closed where the pattern ended inside of brackets.
    kept = [part + "}" * (part.count("{") - part.count("}")) for part in kept]
    return f", backend_config={{{','.join(kept)}}}" if kept else ""

  def metadata(match: re.Match[str]) -> str:
    name = _OP_NAME.search(match[1])
    return f", metadata={{{name[0]}}}" if name else ""

  # Tables of files stand before the first computation.
  begin = re.search(r"^(?:ENTRY )?%", text, re.MULTILINE)
  text = "HloModule m\n\n" + text[begin.start() if begin else 0 :]
  text = _CONFIG.sub(config, _LITERAL.sub(r"\1...\2", text))
  return _UNREAD.sub("", _METADATA.sub(metadata, text))


def read_text(name: str) -> str:
  """Returns a text of `testdata`."""
  file = TESTDATA / name
  if file.suffix == ".gz":
    return gzip.decompress(file.read_bytes()).decode()
  return file.read_text()


def main(arguments: list[str]) -> int:
  """Compiles for a target and writes the shortened text."""
  to, mesh, file = arguments
  text = compile_for(targets.parse(to), mesh).as_text() or ""
  pathlib.Path(file).write_text(shorten(text))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
