"""A tiny sharded program, and what the compilers for H200 and TPUs make of it.

`python -m paxon.runner.plan.testing TARGET FILE` writes the text without what
the parser does not read; the files in `testdata` were made so.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp

from paxon.runner.plan import target as targets
from paxon.runner.plan import topology
from paxon.sharding import mesh as meshes

LAYERS, WIDTH, ROWS = 3, 512, 2048

_TESTDATA = pathlib.Path(__file__).parent / "testdata"
_UNREAD = re.compile(
  r", (?:metadata=\{[^}]*\}|use_global_device_ids=true|stack_frame_id=\d+)"
)
_CONFIG = re.compile(r", backend_config=(\{.*\})$", re.MULTILINE)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"\d+"\}')


def trace(mesh: jax.sharding.Mesh) -> jax.stages.Traced:
  """Traces the gradient of a loop of layers.

  Kernels are split over `fsdp`, rows over `data` and `fsdp`.
  """

  def loss(weights, rows):
    def layer(rows, kernel):
      return jnp.tanh(rows @ kernel), None

    return jnp.sum(jax.lax.scan(layer, rows, weights)[0].astype(jnp.float32))

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


def compiled(target: targets.Target, mesh: str) -> jax.stages.Compiled:
  """Compiles it; the target's variables must be set."""
  devices = topology.devices(target)
  built = meshes.make_mesh(meshes.MeshSpec.parse(mesh), devices=devices)
  return topology.compile_for(target, trace(built), built)


def shortened(text: str) -> str:
  """Returns a compiled text without what the parser does not read."""

  def config(match: re.Match[str]) -> str:
    trips = _TRIPS.search(match[1])
    return f", backend_config={{{trips[0]}}}" if trips else ""

  return _CONFIG.sub(config, _UNREAD.sub("", text))


def stored(name: str) -> str:
  """Returns a text of `testdata`."""
  return (_TESTDATA / name).read_text()


def main(arguments: list[str]) -> int:
  """Compiles for a target and writes the shortened text."""
  target, mesh, file = arguments
  text = compiled(targets.parse(target), mesh).as_text() or ""
  pathlib.Path(file).write_text(shortened(text))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
