"""Tests of samples that are drawn while a run trains."""

import dataclasses
import json

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.generation import decode
from paxon.runner.monitoring import metrics_file, sample_file
from paxon.runner.settings import monitoring
from paxon.runner.training import testing, train

KNOBS = {"mesh": "data=8", "eval_every_steps": None}
SAMPLED = monitoring.MonitoringSettings(sample_every_steps=4)


def _train(folder, settings, **knobs):
  job, config = testing.make(**KNOBS, **knobs)
  job = dataclasses.replace(job, observability=settings)
  train.run(job, config, epath.Path(folder))
  return sample_file.read(epath.Path(folder) / "samples.jsonl")


@pytest.fixture(name="sampled", scope="module")
def _sampled(tmp_path_factory):
  folder = tmp_path_factory.mktemp("sampled")
  return folder, _train(folder, SAMPLED)


def test_samples_are_those_of_the_checkpoints(sampled):
  folder, texts = sampled
  assert [each.step for each in texts] == [4, 8, 12]
  assert (folder / "samples.txt").read_text() == texts[-1].text
  job, _ = testing.make(**KNOBS)
  for each in texts:
    assert decode.run(job, epath.Path(folder), None, step=each.step) == 0
    lines = (folder / f"decode/{each.step}.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
      assert line["prompt"] + line["continuation"] in each.text


def test_samples_are_in_the_report(sampled):
  folder, texts = sampled
  report = (folder / "report.html").read_text()
  for each in texts:
    assert f"<summary>Step {each.step}</summary>" in report


def test_samples_change_no_bit_of_the_training(sampled, tmp_path):
  assert [
    t.step
    for t in _train(
      tmp_path, dataclasses.replace(SAMPLED, sample_every_steps=None)
    )
  ] == [12]
  for name in ("loss", "grad_norm"):
    one, two = (
      [
        record.values[name]
        for record in metrics_file.read(folder / "metrics.jsonl")
        if record.split == "train"
      ]
      for folder in (sampled[0], tmp_path)
    )
    assert one == two


def test_a_resumed_run_keeps_its_samples(tmp_path):
  first = _train(tmp_path, SAMPLED, num_train_steps=6)
  assert [each.step for each in first] == [4, 6]
  both = _train(tmp_path, SAMPLED, num_train_steps=10)
  assert [each.step for each in both] == [4, 6, 8, 10]
  assert both[:2] == first


def test_a_model_that_cannot_generate_is_an_error(tmp_path):
  job, config = testing.make(**KNOBS)
  job = dataclasses.replace(job, observability=SAMPLED, generation=None)
  message = "sample_every_steps is 4, but .*: its generation settings are miss"
  with pytest.raises(user_error.UserError, match=message):
    train.run(job, config, epath.Path(tmp_path))
  assert list(tmp_path.iterdir()) == []
