"""How a process of several ends, whatever happened to it."""

from collections.abc import Iterator
import contextlib
import sys
import traceback

import jax

from paxon.runner import user_error
from paxon.runner.hosts import failures, joining

_WRONG_USE = 2
_LOST = 1
_INTERRUPTED = 130


@contextlib.contextmanager
def together() -> Iterator[None]:
  """The program of a process that has joined; all of them leave together.

  An error ends this process within the context, because Python's own end would
  wait for the others. With one process nothing is done.
  """
  if not jax.distributed.is_initialized():
    yield
    return
  try:
    yield
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    joining.abandon(_WRONG_USE)
  except KeyboardInterrupt:
    joining.abandon(_INTERRUPTED)
  except BaseException as error:
    if failures.is_loss(error):
      print(_loss(error), file=sys.stderr)
    else:
      traceback.print_exc()
    joining.abandon(_LOST)
  joining.leave()


def _loss(error: BaseException) -> str:
  lines = str(error).splitlines()
  return (
    f"Process {jax.process_index()} of {jax.process_count()} ends, because"
    f" another one was lost ({lines[0][:200] if lines else error!r}). The"
    " newest checkpoint stays; start all processes again with the same"
    " command, or let --max_restarts do it."
  )
