"""A process of a test that serves with others."""

import pathlib
from typing import Any

from etils import epath

from paxon.runner.endpoint import serve as serve_lib
from paxon.runner.endpoint import testing
from paxon.runner.hosts import joining
from paxon.runner.hosts import testing as forks_lib


def serve(arguments: list[str]) -> int:
  """Serves a run on a mesh of all devices.

  Args:
    arguments: The folder of the run; the mesh; a file that gets the port; the
      address, the number of processes and that of this one.
  """
  folder, mesh, port, address, count, index = arguments
  forks_lib.join(address, count, index)
  options = serve_lib.Options(
    port=0, slots=testing.SLOTS, context=testing.CONTEXT
  )

  def write_port(server: Any) -> None:
    path = pathlib.Path(port)
    part = path.with_suffix(".part")
    part.write_text(f"{server.port}")
    part.rename(path)

  with joining.exit_together():
    return serve_lib.run(
      testing.make_job(mesh=mesh),
      epath.Path(folder),
      options,
      when_ready=write_port,
    )


if __name__ == "__main__":
  forks_lib.serve({serve.__name__: serve})
