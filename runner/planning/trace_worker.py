"""The process that traces changes: `python -m ...plan.trace_worker REQUEST FD`.

Its input has one JSON list of overrides a line; for each it writes a line of
JSON to the file descriptor, the plan that is not compiled or why there is none.
It ends with its input. One process for all, because starting JAX takes longer
than a trace.
"""

import json
import os
import pathlib
import sys
from typing import Any

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.planning import measure


def main(arguments: list[str]) -> int:
  """Answers until the input ends."""
  request = json.loads(pathlib.Path(arguments[0]).read_text())
  with os.fdopen(int(arguments[1]), "w") as output:
    for line in sys.stdin:
      output.write(json.dumps(_answer(request, json.loads(line))) + "\n")
      output.flush()
  return 0


def _answer(
  request: dict[str, Any], more: list[dict[str, str]]
) -> dict[str, str]:
  overrides = [
    overrides_lib.Override(**fields)
    for fields in [*request["overrides"], *more]
  ]
  resolved = None
  try:
    resolved = resolving.resolve(request["experiment"], overrides)
    plan = measure.measure(
      resolving.build(resolved.config),
      targets.parse(request["target"]),
      experiment=request["experiment"],
      is_compiled=False,
    )
    return {"plan": result.to_json((plan,))}
  except Exception as error:
    message = str(error) if isinstance(error, user_error.UserError) else None
    if message is None and resolved is not None:
      message = resolving.explain_error(error, resolved.config)
    if message is None:
      # One change that meets a bug does not lose the others.
      message = f"{type(error).__name__}: {error}"
    return {"error": message}


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
