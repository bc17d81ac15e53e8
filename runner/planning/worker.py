"""The process that plans: `python -m ...plan.worker REQUEST RESULT`.

A process of its own, because each vendor's compiler needs variables that JAX
reads when it starts, and because a compiler may die of what it is given.
"""

import json
import pathlib
import sys

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.planning import lifeline, measure


def main(arguments: list[str]) -> int:
  """Reads a request (JSON), plans, and writes the plan or `{"error": text}`."""
  lifeline.end_with_parent()
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
      message = resolving.explain_error(error, resolved.config)
    if message is None:
      raise
    text = json.dumps({"error": message})
  result_file.write_text(text)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
