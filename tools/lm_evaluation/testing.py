"""A process of a test that answers with others."""

import json
import pathlib
import types

from paxon.runner.configuration import overrides
from paxon.runner.hosts import agreement, joining
from paxon.runner.hosts import testing as forks_lib
from paxon.tools.lm_evaluation import lm_eval_model


def answer(arguments: list[str]) -> int:
  """Answers requests of the harness on a mesh of all devices.

  Args:
    arguments: The folder of the run; the mesh; a file with requests by method,
      JSON; a file that gets the answers; the address, the number of processes
      and that of this one.
  """
  folder, mesh, requests, answers, address, count, index = arguments
  forks_lib.join(address, count, index)
  with joining.exit_together():
    given = overrides.parse_argument(f"--fdl.mesh={mesh}")
    assert given is not None
    opened = lm_eval_model.open_run(folder, [given])
    made = lm_eval_model.Responses(
      opened.generator, max_length=opened.max_length, batch_size=3
    )
    if not agreement.is_first():
      made.follow()
      return 0
    found = {
      method: getattr(made, method)(
        [types.SimpleNamespace(args=tuple(each)) for each in asked]
      )
      for method, asked in json.loads(pathlib.Path(requests).read_text())
    }
    made.close()
    pathlib.Path(answers).write_text(json.dumps(found))
  return 0


if __name__ == "__main__":
  forks_lib.serve({answer.__name__: answer})
