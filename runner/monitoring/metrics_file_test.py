"""Tests for metrics.jsonl."""

import json
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.runner import files
from paxon.runner.monitoring import metrics_file

# As `st.text` has them, without encoding each one first to find that out.
_CHARACTERS = st.characters(exclude_categories=("Cs",))


class _Clock:
  """A clock that is set by hand."""

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_json_objects_with_17_digits(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=0)
  writer.write(10, "train", {"loss": 0.1, "learning_rate": np.float64(0.5)})
  writer.write(10, "validation", {"bits_per_byte": 2.0})
  writer.close()
  assert path.read_text() == (
    '{"step": 10, "split": "train", "loss": 0.10000000000000001,'
    ' "learning_rate": 0.5}\n'
    '{"step": 10, "split": "validation", "bits_per_byte": 2.0}\n'
  )


@hypothesis.given(
  st.lists(
    st.tuples(
      st.integers(0, 2**31),
      st.text(_CHARACTERS),
      st.dictionaries(st.text(_CHARACTERS), st.floats()),
    ),
    unique_by=lambda record: record[:2],
  )
)
def test_every_float_reads_back_exactly(tmp_path_factory, records):
  hypothesis.assume(
    not any({"step", "split"} & values.keys() for _, _, values in records)
  )
  path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=0)
  for record in records:
    writer.write(*record)
  writer.close()
  read = metrics_file.read(path)
  assert [(r.step, r.split) for r in read] == [r[:2] for r in records]
  for found, (_, _, values) in zip(read, records, strict=True):
    assert found.values.keys() == values.keys()
    for name, value in values.items():
      # Bit for bit, except that there are many NaNs.
      both_nan = math.isnan(value) and math.isnan(found.values[name])
      assert both_nan or repr(found.values[name]) == repr(value)


def test_non_finite_values_are_strings(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=0)
  values = {"a": math.nan, "b": math.inf, "c": -math.inf}
  writer.write(1, "train", values)
  writer.close()
  [line] = _lines(path)
  assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")
  assert float(line["c"]) == -math.inf


@pytest.mark.parametrize(
  ("resume_step", "kept"),
  [(0, [0]), (10, [0, 10]), (15, [0, 10]), (None, [0, 10, 20])],
)
def test_later_lines_are_dropped_on_resume(tmp_path, resume_step, kept):
  path = tmp_path / "metrics.jsonl"
  first = metrics_file.MetricsFile(path, resume_step=0)
  for step in (0, 10, 20):
    first.write(step, "train", {"loss": 1 / (step + 3)})
  first.close()
  before = path.read_text().splitlines()
  metrics_file.MetricsFile(path, resume_step=resume_step).close()
  # What is kept is kept to the last byte.
  assert path.read_text().splitlines() == before[: len(kept)]
  assert [line["step"] for line in _lines(path)] == kept


def test_rewritten_metrics_replace_the_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=None)
  writer.write(5, "test", {"loss": 3.0})
  writer.write(5, "train", {"loss": 2.0})
  writer.write(5, "test", {"loss": 1.0})
  writer.close()
  assert [(x["split"], x["loss"]) for x in _lines(path)] == [
    ("test", 1),
    ("train", 2),
  ]


def test_file_is_written_periodically_and_at_every_flush(tmp_path):
  clock = _Clock()
  path = tmp_path / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=0, clock=clock)
  writer.write(1, "train", {"loss": 1.0})
  assert not path.exists()
  writer.flush()
  assert len(_lines(path)) == 1
  writer.write(2, "train", {"loss": 1.0})
  assert len(_lines(path)) == 1
  clock.now = 60.0
  writer.write(3, "train", {"loss": 1.0})
  assert len(_lines(path)) == 3


def test_file_is_never_appended_to(tmp_path, monkeypatch):
  written = []
  monkeypatch.setattr(
    files, "write_text", lambda path, text: written.append(text)
  )
  path = tmp_path / "metrics.jsonl"
  writer = metrics_file.MetricsFile(path, resume_step=0)
  for step in (1, 2):
    writer.write(step, "train", {"loss": 1.0})
    writer.flush()
  assert [text.count("\n") for text in written] == [1, 2]


def test_slow_writes_are_spaced_further():
  clock = _Clock()
  pace = files.FlushPace(clock)

  def slow():
    clock.now += 10.0

  pace.run(slow)
  clock.now += 400.0
  assert not pace.is_due()
  clock.now += 200.0
  assert pace.is_due()


@pytest.mark.parametrize("name", ["step", "split"])
def test_metrics_cannot_have_reserved_names(tmp_path, name):
  writer = metrics_file.MetricsFile(tmp_path / "m", resume_step=0)
  with pytest.raises(ValueError, match=f"cannot be named '{name}'"):
    writer.write(1, "train", {name: 1.0})


@pytest.mark.parametrize(
  "line",
  ["", "{", "[]", "3", '{"step": 1}', '{"step": 1, "split": 2, "a": "x"}'],
)
def test_damaged_file_is_named_with_the_line(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_text(f'{{"step": 1, "split": "train"}}\n{line}\n')
  with pytest.raises(
    ValueError, match=r"metrics\.jsonl, line 2, is not a valid"
  ):
    metrics_file.read(path)


def test_composite_forwards_everything_and_closes_all():
  calls: list[tuple] = []

  class Recorder(metrics_file.SummaryWriter):
    def __init__(self, name):
      self.name = name

    def write(self, step, split, values):
      calls.append((self.name, step, split, dict(values)))

    def flush(self):
      calls.append((self.name, "flush"))

    def close(self):
      calls.append((self.name, "close"))
      raise OSError(self.name)

  writer = metrics_file.CompositeWriter([Recorder("a"), Recorder("b")])
  writer.write(1, "train", {"loss": 2.0})
  writer.flush()
  with pytest.raises(OSError, match="b"):
    writer.close()
  assert calls == [
    ("a", 1, "train", {"loss": 2.0}),
    ("b", 1, "train", {"loss": 2.0}),
    *[("a", "flush"), ("b", "flush"), ("a", "close"), ("b", "close")],
  ]


def test_run_has_metrics_of_training_and_separate_evaluations(
  tmp_path,
):
  assert metrics_file.read_run(tmp_path) == []
  for folder, values in (
    (tmp_path, {(1, "train"): 3.0, (2, "a"): 4.0}),
    (tmp_path / "eval", {(2, "a"): 5.0, (4, "a"): 6.0}),
  ):
    writer = metrics_file.MetricsFile(
      folder / "metrics.jsonl", resume_step=None
    )
    for (step, split), loss in values.items():
      writer.write(step, split, {"loss": loss})
    writer.close()
  joined = metrics_file.read_run(tmp_path)
  assert [(r.step, r.split, r.values["loss"]) for r in joined] == [
    (1, "train", 3.0),
    (2, "a", 5.0),
    (4, "a", 6.0),
  ]
