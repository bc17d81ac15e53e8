"""The process that plans: `python -m ...plan.worker REQUEST RESULT`.

A process of its own, because each vendor's compiler needs variables that JAX
reads when it starts, and because a compiler may die of what it is given.
"""

import json
import os
import pathlib
import stat
import sys
import threading

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import refusals, resolving
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.programs.plan import measure


def main(arguments: list[str]) -> int:
  """Reads a request (JSON), plans, and writes the plan or `{"error": text}`."""
  _end_with_parent()
  request_file, result_file = map(pathlib.Path, arguments)
  request = json.loads(request_file.read_text())
  overrides = [overrides_lib.Override(**o) for o in request["overrides"]]
  resolved = None
  try:
    resolved = resolving.resolve(request["experiment"], overrides)
    plan = measure.measure(
      resolving.build(resolved.config),
      targets.parse(request["target"]),
      experiment=request["experiment"],
      overrides=[f"--fdl.{o.path}={o.text}" for o in overrides],
      is_compiled=request["compile"],
    )
    text = result.to_json((plan,))
  except Exception as error:
    message = str(error) if isinstance(error, user_error.UserError) else None
    if message is None and resolved is not None:
      message = refusals.of(error, resolved.config)
    if message is None:
      raise
    text = json.dumps({"error": message})
  result_file.write_text(text)
  return 0


def _end_with_parent() -> None:
  """Ends this process when the one at the other end of its input is gone.

  A compiler that nobody waits for would run on for minutes.
  """
  if not stat.S_ISFIFO(os.fstat(0).st_mode):
    return

  def wait() -> None:
    os.read(0, 1)
    # No cleaning up: a compiler cannot be interrupted.
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
