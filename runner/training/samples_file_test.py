"""Tests for the file of samples."""

import dataclasses
import json

from etils import epath
import pytest

from paxon.layers.decoding import samplers
from paxon.runner import user_error
from paxon.runner.settings import generation
from paxon.runner.training import samples, samples_file, testing


@pytest.fixture(scope="module")
def job():
  return testing.make(seed=3)[0]


def _sample(prompt, continuation="x\n\u2028é"):
  return samples.Sample(prompt=prompt, continuation=continuation, ids=(5, 7))


def _lines(path):
  text = path.read_text()
  assert text.endswith("\n")
  return [json.loads(line) for line in text[:-1].split("\n")]


def test_a_line_says_everything_of_a_sample(tmp_path, job):
  path = samples_file.write(
    epath.Path(tmp_path), [_sample("a"), _sample("")], step=12, job=job
  )
  assert path == tmp_path / "decode" / "12.jsonl"
  first, second = _lines(path)
  assert first == {
    "step": 12,
    "prompt": "a",
    "continuation": "x\n\u2028é",
    "ids": [5, 7],
    "seed": 3,
    "sampler": "Greedy()",
    "max_new_tokens": 12,
  }
  assert second["prompt"] == ""


def test_a_sample_drawn_again_replaces_its_line_and_others_stay(tmp_path, job):
  folder = epath.Path(tmp_path)
  samples_file.write(folder, [_sample("a"), _sample("b")], step=4, job=job)
  samples_file.write(folder, [_sample("a", "new")], step=4, job=job)
  warm = dataclasses.replace(
    job,
    generation=generation.GenerationSettings(
      max_new_tokens=12, sampler=samplers.Temperature(temperature=0.5)
    ),
  )
  path = samples_file.write(folder, [_sample("a", "warm")], step=4, job=warm)
  found = [(line["prompt"], line["continuation"]) for line in _lines(path)]
  assert found == [("a", "new"), ("b", "x\n\u2028é"), ("a", "warm")]
  assert _lines(path)[2]["sampler"].startswith("Temperature(temperature=0.5,")


def test_a_function_is_named(tmp_path, job):
  def mine(logits, key):
    return logits

  named = dataclasses.replace(
    job,
    generation=generation.GenerationSettings(sampler=mine),
  )
  path = samples_file.write(
    epath.Path(tmp_path), [_sample("a")], step=4, job=named
  )
  assert _lines(path)[0]["sampler"].endswith(".mine")


@pytest.mark.parametrize("text", ["{", "[]\n", '{"prompt": "a"}\n'])
def test_a_file_of_something_else_is_named(tmp_path, job, text):
  (tmp_path / "decode").mkdir()
  (tmp_path / "decode" / "4.jsonl").write_text(text)
  with pytest.raises(user_error.UserError, match=r"4.jsonl does not hold samp"):
    samples_file.write(epath.Path(tmp_path), [_sample("a")], step=4, job=job)
