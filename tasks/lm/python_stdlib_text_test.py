"""Tests for the text of the quickstart."""

from typing import Any

import fiddle as fdl

from paxon.layers.stacks import stack
from paxon.tasks.lm import python_stdlib_text


class _WithoutModel(python_stdlib_text.PythonStdlibText):
  num_layers = 1

  def model(self) -> fdl.Config[Any]:
    """Returns any module that reads the knobs."""
    return fdl.Config(
      stack.Stack,
      blocks=[self.embedding()],
      num_layers=self.num_layers,
      scan=self.scan_layers,
    )


def _job():
  return _WithoutModel().job()


def test_evaluation_counts_every_held_out_byte_once():
  held_out = fdl.build(_job().eval_inputs["validation"])
  counted = sum(int(batch["target_bytes"].sum()) for batch in held_out)
  source = held_out.examples.source.source
  assert counted == sum(len(source[i]) for i in range(len(source)))


def test_training_sees_no_held_out_file():
  job = _job()
  train, held_out = (
    set(fdl.build(config.source).paths)
    for config in (job.train_input, job.eval_inputs["validation"])
  )
  assert train.isdisjoint(held_out)
  assert len(train) > 20 * len(held_out) > 0
