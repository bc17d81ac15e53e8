"""Tests for spike detection."""

import json
import math

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import example_source
from paxon.runner import user_error
from paxon.runner.monitoring import spikes
from paxon.runner.settings import monitoring

SETTINGS = monitoring.SpikeSettings(window=40, min_steps=20)


def _detector(settings=SETTINGS, factor=1.5, rise=0.05):
  return spikes.Detector(settings, factor=factor, rise=rise)


def _noise(count, mean=2.0, deviation=0.02, seed=0):
  random = np.random.default_rng(seed)
  return random.normal(mean, deviation, count).tolist()


def test_limit_matches_the_definition():
  detector, values = _detector(), _noise(100)
  assert [detector.find(v) for v in values] == [None] * 100
  median, limit = detector.find(2.9)
  last = np.sort(values[-40:])
  middle = (last[19] + last[20]) / 2
  gaps = np.sort(np.abs(last - middle))
  deviations = 10 * 1.4826 * (gaps[19] + gaps[20]) / 2
  assert median == pytest.approx(middle)
  assert limit == pytest.approx(middle + deviations)


def test_spikes_match_the_definition():
  random = np.random.default_rng(1)
  values = np.round(random.standard_t(2, 600) * 0.1 + 1, 3)
  detector, before, was_high, jumps = _detector(), [], False, 0
  for value in values.tolist():
    median = limit = math.nan
    if before:
      median = np.median(before[-40:])
    if len(before) >= 20:
      gaps = np.abs(np.asarray(before[-40:]) - median)
      limit = median + max(14.826 * np.median(gaps), 0.05 * abs(median))
      limit = min(limit, 1.5 * median)
    expected = None
    if value > limit and not was_high:
      expected, jumps = pytest.approx((median, limit)), jumps + 1
    assert detector.find(value) == expected
    was_high = value > limit
    before.append(value)
  assert jumps > 5


def test_noise_and_falling_losses_are_no_spikes():
  detector = _detector(monitoring.SpikeSettings())
  falling = [8 * math.exp(-i / 300) + 2 for i in range(3000)]
  noisy = np.asarray(falling) + np.asarray(_noise(3000, 0.0, 0.05))
  assert [detector.find(float(v)) for v in noisy] == [None] * 3000


def test_value_without_noise_must_exceed_the_smallest_rise():
  for value, expected in ((1.04, None), (1.06, (1.0, 1.05))):
    detector = _detector()
    for _ in range(30):
      detector.find(1.0)
    assert detector.find(value) == pytest.approx(expected)


def test_value_above_the_factor_is_a_spike_despite_noise():
  detector = _detector()
  for value in _noise(60, 2.0, 0.5):
    detector.find(value)
  median, limit = detector.find(3.2)
  assert limit == pytest.approx(1.5 * median)


def test_lasting_spike_is_reported_once():
  detector = _detector()
  for value in _noise(40):
    detector.find(value)
  found = [detector.find(v) is not None for v in (3.0, 4.0, 5.0, 2.0, 3.0)]
  assert found == [True, False, False, False, True]


def test_non_finite_values_are_spikes_from_the_first_step():
  detector = _detector()
  assert detector.find(math.nan) is not None
  assert detector.find(2.0) is None
  assert detector.find(math.inf)[0] == 2.0
  # Neither is part of the window.
  for value in _noise(40):
    assert detector.find(value) is None


def test_negative_losses_can_spike():
  detector = _detector()
  for value in _noise(40, -2.0):
    detector.find(value)
  assert detector.find(-1.0) is not None


def _position(step):
  return {"index": step}


def _feed(report, steps, **special):
  found = []
  for step in steps:
    values = {"loss": 2.0 + step % 3 / 100, "grad_norm": 1.0}
    values |= special.get(f"s{step}", {})
    found += report.observe(
      step, values, before=_position(step - 1), after=_position(step)
    )
  return found


def test_report_names_the_batch_in_a_line_and_in_the_file(tmp_path, capsys):
  path = tmp_path / "spikes.jsonl"
  report = spikes.SpikeReport(SETTINGS, path)
  assert not path.exists()
  found = _feed(
    report, range(1, 61), s30={"loss": 7.0}, s50={"grad_norm": 2000.0}
  )
  assert [(s.step, s.metric) for s in found] == [
    (30, "loss"),
    (50, "grad_norm"),
  ]
  assert spikes.read(path) == found
  lines = capsys.readouterr().out.splitlines()
  assert lines == [
    "spike at step 30: loss 7, expected 2.01",
    "spike at step 50: grad_norm 2000, expected 1",
  ]
  assert json.loads(path.read_text().splitlines()[0])["position_before"] == {
    "index": 29
  }


def test_resumed_run_drops_spikes_of_repeated_steps(tmp_path):
  path = tmp_path / "spikes.jsonl"
  _feed(
    spikes.SpikeReport(SETTINGS, path),
    range(1, 60),
    s30={"loss": 7.0},
    s45={"loss": math.nan},
  )
  report = spikes.SpikeReport(SETTINGS, path, resume_step=40)
  _feed(report, range(41, 50), s42={"grad_norm": math.inf})
  assert [s.step for s in spikes.read(path)] == [30, 42]


def test_batch_of_a_spike_can_be_read_again(tmp_path):
  source = packed_input.pack_documents(
    source=example_source.InMemoryDocuments(
      tuple(f"document {i}\n" * (i % 5 + 1) for i in range(30))
    ),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    shuffle_seed=4,
    global_batch_size=2,
    length=64,
  )
  report = spikes.SpikeReport(
    SETTINGS, tmp_path / "spikes.jsonl", train_input=source
  )
  poisoned = {}
  for step in range(1, 30):
    before, batch = source.get_state(), source.get_next()
    values = {"loss": 9.0 if step == 27 else 2.0}
    report.observe(step, values, before=before, after=source.get_state())
    if step == 27:
      poisoned = batch
  [spike] = spikes.read(tmp_path / "spikes.jsonl")
  again = spikes.read_batch(spike, source)
  for name, value in poisoned.items():
    np.testing.assert_array_equal(again[name], value)
  assert source.get_state() == spike.position_after
  text = source.tokenizer.decode(poisoned["targets"].reshape(-1))
  for number in spike.documents[1:-1]:
    assert f"document {number}\n" in text
  assert len(spike.documents) == len(set(spike.documents)) > 2


@pytest.mark.parametrize("line", ['{"step": 1}', "[]", "x"])
def test_damaged_file(tmp_path, line):
  (tmp_path / "spikes.jsonl").write_text(line)
  with pytest.raises(user_error.UserError, match=r"line 1, is not a valid"):
    spikes.read(tmp_path / "spikes.jsonl")
