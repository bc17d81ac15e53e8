"""Tests for the comparison with published speeds."""

import dataclasses
import importlib.util
import json

import pytest

from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import hardware, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import calibration
from paxon.runner.planning import child
from paxon.tools import plan_accuracy_main as command
from paxon.tools import plan_accuracy_page as page
from paxon.tools import published_speeds


def _prediction(name="16B", **changes):
  estimate = {
    "step": 10.0,
    "compute": 6.0,
    "memory": 1.0,
    "overhead": 0.0,
    "exposed": {"tensor": 2.5, "fsdp": 0.5},
    "tokens_per_second": 1.0,
    "mfu": 0.48,
    "band": (0.75, 1.5),
    "source": "measured, 2026-01-31: a machine",
    "datasheet_step": 9.0,
    "datasheet_mfu": 0.53,
    "ceiling_mfu": 0.81,
  }
  return page.Prediction(
    name=name,
    bound_mfu=0.80,
    bound_step=6.0,
    estimate=result.Estimate(**estimate | changes),
    used=0.76,
    date="2026-01-31",
    fingerprint="fd43fa093e6d5263",
    versions={"jax": "0.10.2"},
  )


def test_json_round_trip():
  found = _prediction()
  assert page.from_json(page.to_json([found])) == {"16B": found}
  with pytest.raises(ValueError, match="version 9, not 1; make them again"):
    page.from_json(json.dumps({"version": 9}))


def test_table_has_errors_and_bands():
  text = page.to_markdown({"16B": _prediction()})
  # 42 % are published; the band of 48 % is 48 / 1.5 to 48 / 0.75.
  row = "| 16B | `v4:2x4x4` | 42 % | 81 % | 80 % | 53 % | 48 % | 32 to 64 % |"
  assert f"{row} yes | +6 |" in text
  assert "| 16B | 10 s | 60 % | 10 % | 0 % | 25 % | 5 % |" in text
  assert "exposed (tensor) | exposed (fsdp) |" in text
  assert (
    "16B spends 25 % of its step on exposed `tensor` communication." in text
  )
  assert "memory-bound kernels" not in text
  assert "Not predicted yet: 32B, 128B, 256B, 512B, 1024B, Llama-2" in text
  assert "1 of 1 published MFUs are within the band" in text
  assert "--exp=tasks.lm.params.c4.C4Spmd16BAdam32Replicas" in text


@pytest.mark.parametrize(
  ("mfus", "words"),
  [
    ((0.48, 0.60), "Pax on v4: every estimate is too fast."),
    ((0.40, 0.50), "Pax on v4: every estimate is too slow."),
    ((0.48, 0.50), None),
  ],
)
def test_errors_of_one_sign_are_named(mfus, words):
  names = ("16B", "1024B")
  text = page.to_markdown(
    {n: _prediction(n, mfu=m) for n, m in zip(names, mfus, strict=True)}
  )
  assert ("every estimate is" in text) == (words is not None)
  assert words is None or words in text


def test_memory_bound_time_is_a_cause():
  found = _prediction(compute=3.0, memory=4.0, exposed={"fsdp": 0.1})
  text = page.to_markdown({"16B": found})
  assert "16B spends 40 % of its step in memory-bound kernels" in text
  assert "on exposed" not in text


def test_value_outside_the_band():
  text = page.to_markdown({"16B": _prediction(band=(0.95, 1.05))})
  assert "| 46 to 51 % | no | +6 |" in text
  assert "0 of 1 published MFUs are within the band" in text


def test_errors_of_several_rows():
  found = {
    "16B": _prediction(mfu=0.48),
    "256B": _prediction("256B", mfu=0.50),
    "1024B": _prediction("1024B", mfu=0.49),
  }
  text = page.to_markdown(found)
  # |48 - 42|, |50 - 53|, |49 - 54|; ranks 1 3 2 and 1 2 3.
  assert "| Pax on v4 | estimate | 4.7 | 6 | +0.50 |" in text
  # Means of the others 53.5, 48 and 47.5: errors 11.5, 5 and 6.5.
  assert "| Pax on v4 | mean of the others | 7.7 | 12 | - |" in text
  # One that does not vary orders nothing.
  assert "| Pax on v4 | upper bound | 30.3 | 38 | - |" in text


@pytest.mark.parametrize(
  ("a", "b", "expected"),
  [
    ([1.0, 2.0, 3.0], [10.0, 20.0, 90.0], 1.0),
    ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
    # Ranks 0.5 0.5 2 3 and 0 1 2 3: covariance 4.5, variances 4.5 and 5.
    ([4.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0], 4.5 / (4.5 * 5.0) ** 0.5),
    ([4.0, 4.0, 4.0], [1.0, 2.0, 3.0], None),
  ],
)
def test_rank_correlation(a, b, expected):
  found = page.spearman(a, b)
  assert found == (None if expected is None else pytest.approx(expected))


def test_page_matches_json():
  # After a change, run `tools/plan_accuracy`.
  found = page.from_json(command.DATA.read_text())
  assert found
  assert command.PAGE.read_text() == page.to_markdown(found)


def test_nothing_was_fitted():
  for found in page.from_json(command.DATA.read_text()).values():
    kind = next(
      targets.parse(speed.target).hardware
      for speed in published_speeds.ALL
      if speed.name == found.name
    )
    own = calibration.for_hardware(kind)
    # Estimates use the calibrations in the repository, which are older.
    assert found.estimate.source == own.summary
    assert not own.measured
    assert own.date <= found.date


@pytest.mark.parametrize("speed", published_speeds.ALL, ids=lambda s: s.name)
def test_each_speed_has_an_experiment(speed):
  target = targets.parse(speed.target)
  assert calibration.for_hardware(target.hardware) is not None
  assert target.hardware != hardware.named("cpu")
  if importlib.util.find_spec("paxon.tasks") is None:
    pytest.skip("in Bazel, experiments are edges of //runner:main alone")
  given = [overrides.Override(*item) for item in speed.assigned]
  config = resolving.resolve(speed.experiment, given).config
  assert config is not None


def _plan(name, **changes):
  speed = next(s for s in published_speeds.ALL if s.name == name)
  memory = result.Memory(
    parameters=0,
    other_variables=0,
    optimizer=0,
    batch=0,
    gradients=0,
    peak=3,
    usable=4.0,
  )
  fields = {
    "experiment": speed.experiment,
    "overrides": tuple(f"--fdl.{n}={v}" for n, v in speed.assigned),
    "target": speed.target,
    "device_kind": "v4",
    "num_devices": 32,
    "num_chips": 32,
    "mesh": {},
    "batch": {"inputs": (8, 8)},
    "compiled": True,
    "memory": memory,
    "flops": result.Flops(
      model=1,
      causal_model=1.0,
      hardware=1,
      recomputed=0,
      by_module={},
      by_kind={},
      by_dtype={},
    ),
    "collectives": (),
    "kernels": {},
    "bound": result.Bound(
      compute=6.0,
      memory=None,
      fast_link=None,
      network=None,
      step=6.0,
      tokens_per_second=None,
      mfu=0.8,
    ),
    "fit": "fits",
    "advice": (),
    "findings": (),
    "notes": (),
    "fingerprint": "f",
    "versions": {"jax": "1"},
    "compile_seconds": 1.0,
    "estimate": _prediction().estimate,
    "made_at": "2026-01-31T10:00:00Z",
  }
  return result.Plan(**fields | changes)


@pytest.fixture(name="files")
def _files(tmp_path, monkeypatch):
  monkeypatch.setattr(command, "DATA", tmp_path / "a.json")
  monkeypatch.setattr(command, "PAGE", tmp_path / "a.md")
  return tmp_path


def test_reads_given_plan_and_makes_the_others(files, monkeypatch):
  file = files / "plan.json"
  file.write_text(result.to_json((_plan("16B"),)))
  asked = []

  def plan(experiment, given, target, **options):
    asked.append(target.text)
    (name,) = (s.name for s in published_speeds.ALL if s.target == target.text)
    if name == "32B":
      return _plan(name, estimate=None, notes=("The time is not predicted.",))
    return _plan(name)

  monkeypatch.setattr(child, "plan", plan)
  monkeypatch.setattr(command.topology, "missing", lambda target: ())
  # One plan has no estimate.
  assert command.main([f"--plan=16B={file}"]) == 1
  assert len(asked) == len(published_speeds.ALL) - 1
  text = command.PAGE.read_text()
  assert "| 1024B |" in text
  assert "Not predicted yet: 32B." in text
  stored = page.from_json(command.DATA.read_text())
  assert stored["16B"].date == "2026-01-31"
  asked.clear()
  # Known models are planned again only with --again.
  assert command.main(["--again=128B"]) == 1
  assert asked == ["v4:4x4x4", "v4:4x8x8"]


def test_missing_compiler_is_reported(files, monkeypatch, capsys):
  monkeypatch.setattr(command.topology, "missing", lambda target: ("libtpu",))
  assert command.main([]) == 1
  assert "16B: libtpu must be installed." in capsys.readouterr().err
  assert "Not predicted yet: 16B, 32B" in command.PAGE.read_text()


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--fast", "Unknown argument '--fast'; choose from --again"),
    ("--again=17B", "--again=17B: unknown program '17B'; choose from 16B, 32B"),
    ("--plan=16B", "Unknown argument '--plan=16B'"),
    ("--plan=16B=missing", "--plan=16B=missing cannot be taken: "),
  ],
)
def test_wrong_use_is_one_line(files, capsys, argument, message):
  assert command.main([argument]) == 2
  printed = capsys.readouterr().err
  assert printed.startswith(message)
  assert printed.count("\n") == 1


def test_rejects_plan_of_another_program(files, capsys):
  file = files / "plan.json"
  file.write_text(result.to_json((_plan("32B"),)))
  assert command.main([f"--plan=16B={file}"]) == 2
  assert "cannot be taken: it is of (" in capsys.readouterr().err
  rejected = _plan("16B", estimate=None, notes=("Why not.",))
  file.write_text(result.to_json((rejected,)))
  assert command.main([f"--plan=16B={file}"]) == 2
  assert "16B has no estimate: Why not." in capsys.readouterr().err


def test_a_plan_that_does_not_fit_has_no_estimate():
  memory = dataclasses.replace(
    _plan("16B").memory, peak=None, compiler_error="RESOURCE_EXHAUSTED"
  )
  with pytest.raises(ValueError, match="has no estimate: RESOURCE_EXHAUSTED"):
    page.of_plan("16B", _plan("16B", memory=memory), date="")
