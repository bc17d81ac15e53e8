"""Settings with which the programs of a job are compiled for a target."""

from collections.abc import Mapping

import jax

from paxon.runner.plan import compiled_program
from paxon.runner.plan import target as targets
from paxon.runner.session import session as session_lib
from paxon.sharding import axes
from paxon.sharding import mesh as meshes


def get_compilation(
  session: session_lib.Session, target: targets.Target
) -> compiled_program.Compilation:
  """Returns the settings with which the programs of a job are compiled.

  Args:
    session: The job on the target's devices.
    target: The target.
  """
  job, mesh = session.job, session.layout.mesh
  full = meshes.MeshSpec.parse(job.mesh).resolve(mesh.size)
  return compiled_program.Compilation(
    target=target,
    mesh=mesh,
    dcn=[axis for axis in axes.MESH_AXES if full.dcn[axis] > 1],
    batch_axes=_axes_of_rows(session.batch),
    options=job.compiler_options,
    option_sets=job.compiler_option_sets,
  )


def _axes_of_rows(batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
  """The mesh axes over which a batch is split."""
  found: dict[str, None] = {}
  for array in batch.values():
    spec = getattr(array.sharding, "spec", None) or (None,)
    rows = spec[0] or ()
    found |= dict.fromkeys((rows,) if isinstance(rows, str) else rows)
  return list(found)
