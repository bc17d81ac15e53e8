"""Tests of programs that run during training."""

import dataclasses
import json
from typing import ClassVar

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import text_evaluation
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import session as session_lib
from paxon.runner.training import decode_programs, programs, testing, train


class _StopError(Exception):
  """Ends a run, as a signal would."""


@dataclasses.dataclass(kw_only=True)
class Norm:
  """Writes the norm of the parameters; may end the process at a step."""

  name: str = "norm"
  every_steps: int | None = 3
  dies_at: ClassVar[int | None] = None

  def run(self, context):
    """Returns the norm; appends the step to a file."""
    if context.step == self.dies_at:
      raise _StopError
    with (context.run_dir / "norms.txt").open("a") as file:
      file.write(f"{context.step} {int(context.is_last)}\n")
    leaves = jax.tree.leaves(context.state.variables)
    total = sum(float(np.sum(np.square(np.asarray(x)))) for x in leaves)
    return {"squared": total}


def _draw(logits, key):
  """A sampler without settings for each prompt."""
  return jax.random.categorical(key, logits).astype(np.int32)


class Small(testing.TinyLm):
  """Trains 8 steps; decodes prompts at every fourth."""

  num_train_steps = 8
  checkpoint_every_steps = 3
  eval_every_steps = None
  prompts = None
  max_new_tokens = 4
  num_layers = 1
  prompt_file: str = ""

  def generation(self):
    """Returns settings with a function as the sampler."""
    config = super().generation()
    config.sampler = _draw
    return config

  def programs(self):
    """Returns both programs."""
    decode = fdl.Config(
      programs.DecodeFile, path=self.prompt_file, every_steps=4
    )
    other = fdl.Config(
      programs.DecodeFile,
      path=self.prompt_file,
      name="other",
      every_steps=8,
      seed=3,
      tf_record=True,
    )
    return (fdl.Config(Norm), decode, other)


@pytest.fixture(name="prompts", scope="module")
def _prompts(tmp_path_factory):
  path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
  lines = [{"prompt": "def ", "reference": "x"}, {"prompt": "x = "}]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def _train(folder, **knobs):
  folder.mkdir(exist_ok=True)
  config = Small(**knobs).job()
  train.run(fdl.build(config), config, epath.Path(folder))


def _records(folder, split):
  records = metrics_file.read(epath.Path(folder / "metrics.jsonl"))
  return {r.step: dict(r.values) for r in records if r.split == split}


@dataclasses.dataclass(kw_only=True, eq=False)
class Scored(text_evaluation.TextWindows):
  """A split without metrics of texts."""

  needs_scores: ClassVar[bool] = True
  needs_predictions: ClassVar[bool] = False

  def text_metrics(self):
    """Returns a collector."""
    return self


@pytest.mark.parametrize(
  ("split", "rolls", "message"),
  [
    ("valid", False, "no evaluation split 'valid'; did you mean 'validation'"),
    ("validation", False, "'validation' has no text_metrics, .*: PackedInput"),
    ("scored", True, "'scored' must have reset_for_eval"),
    ("scored", False, "no metric of 'scored' requires generated texts"),
  ],
)
def test_splits_without_texts_are_an_error(split, rolls, message):
  job, _ = testing.make(max_new_tokens=4)
  batches = 1 if rolls else None
  source = Scored(
    global_batch_size=8,
    length=4,
    ids=np.arange(9, dtype=np.int32),
    stride=4,
    reset_for_eval=not rolls,
    eval_loop_num_batches=batches,
  )
  inputs = {**job.eval_inputs, "scored": source}
  job = dataclasses.replace(job, eval_inputs=inputs)
  session = session_lib.open_session(job)
  with pytest.raises(user_error.UserError, match=message):
    decode_programs.DecodeSplit(split=split).check(session)


@pytest.mark.nightly
def test_programs_run_at_their_steps_and_resume(tmp_path, prompts, monkeypatch):
  whole, resumed = tmp_path / "whole", tmp_path / "resumed"
  _train(whole, prompt_file=prompts)
  norms = (whole / "norms.txt").read_text().split("\n")[:-1]
  assert norms == ["3 0", "6 0", "8 1"]
  assert _records(whole, "norm").keys() == {3, 6, 8}
  decoded = _records(whole, "decode")
  assert decoded.keys() == {4, 8}
  assert decoded[8].keys() == {"tokens_per_sample", "exact_match", "f1"}
  outputs = sorted(p.name for p in (whole / "decode").glob("*.jsonl"))
  assert outputs == ["4-p.jsonl", "8-other.jsonl", "8-p.jsonl"]
  # The text of another seed is another one.
  abouts = [whole / f"decode/8-{name}.jsonl.json" for name in ("p", "other")]
  seeds = [json.loads(path.read_text())["seed"] for path in abouts]
  assert seeds == [0, 3]
  texts = [
    [json.loads(line)["ids"] for line in path.read_text().splitlines()]
    for path in (whole / "decode/8-p.jsonl", whole / "decode/8-other.jsonl")
  ]
  assert texts[0] != texts[1]
  assert _records(whole, "other").keys() == {8}
  assert (whole / "decode/8-other.tfrecord").stat().st_size > 0

  # Killed within the program of step 6, whose checkpoint is complete.
  monkeypatch.setattr(Norm, "dies_at", 6)
  with pytest.raises(_StopError):
    _train(resumed, prompt_file=prompts)
  monkeypatch.undo()
  _train(resumed, prompt_file=prompts)
  assert (resumed / "norms.txt").read_text().split("\n")[:-1] == norms
  for split in ("norm", "decode"):
    assert _records(resumed, split) == _records(whole, split)
  for name in outputs:
    found, expected = (
      (each / "decode" / name).read_text() for each in (resumed, whole)
    )
    assert found == expected
