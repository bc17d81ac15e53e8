"""The first batches of a job's inputs, printed (`--mode=inspect_input`)."""

from paxon.inputs import base_input, batch_text
from paxon.runner import job as job_lib
from paxon.runner import user_error

# Of each split.
_NUM_BATCHES = 2


def run(job: job_lib.Job) -> int:
  """Prints the first batches of all splits, as if there were one host."""
  for split, source in job.inputs.items():
    try:
      source.check_readable()
    except ValueError as error:
      raise user_error.UserError(f"the split {split!r}: {error}") from error
    print(
      f"{split}: {type(source).__name__}, global_batch_size"
      f" {source.global_batch_size}, length {source.length}"
    )
    for number in range(_NUM_BATCHES):
      batch = _next(source, split, number)
      if batch is None:
        print(f"the split ends after {number} batches")
        break
      text = batch_text.describe(source, batch, number=number)
      print(text, flush=True)
  return 0


def _next(
  source: base_input.BaseInput, split: str, number: int
) -> base_input.Batch | None:
  """Returns the next batch, None at the end."""
  try:
    return source.get_next()
  except Exception as error:
    if isinstance(error, ValueError):
      raise user_error.UserError(f"the split {split!r}: {error}") from error
    if not base_input.is_end(error):
      raise
  if not number:
    raise user_error.UserError(f"The split {split!r} has no batch.")
  return None
