"""Tests for `tools/calibrate`, from the machine to the estimate of a run."""

from etils import epath
import pytest

from paxon.runner.monitoring import metrics_file
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import calibration, microbenchmarks
from paxon.runner.planning import measure
from paxon.runner.training import testing, train
from paxon.tools import calibrate_main

_TINY = microbenchmarks.Sizes(
  products=(32, 64), memory_bytes=2**16, link_bytes=2**12, repetitions=2
)


def _plan(job, file):
  plan = measure.measure(job, targets.parse("cpu:8"), experiment="a.TinyLm")
  file.write_text(result.to_json((plan,)))
  return plan


def test_a_run_corrects_the_estimate(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(microbenchmarks, "SMALL", _TINY)
  small, after = tmp_path / "small.json", tmp_path / "after.json"
  assert calibrate_main.main([f"--out={small}"]) == 0
  made = calibration.read(small)
  assert made.hardware == ("cpu",)
  assert made.source == "microbenchmarks on 8 cpu"
  assert f"PAXON_PLAN_CALIBRATION={small}" in capsys.readouterr().out

  knobs = {"mesh": "fsdp=8", "summary_every_steps": 2, "num_train_steps": 12}
  job, config = testing.make(**knobs)
  monkeypatch.setenv("PAXON_PLAN_CALIBRATION", str(small))
  before = _plan(job, tmp_path / "plan.json")
  assert before.estimate is not None, before.notes
  run = epath.Path(tmp_path / "run")
  run.mkdir()
  train.run(job, config, run)
  arguments = [f"--job_log_dir={run}", f"--plan={tmp_path / 'plan.json'}"]
  assert calibrate_main.main([*arguments, f"--out={after}"]) == 0

  # With the corrected file the estimate is the time of the run.
  monkeypatch.setenv("PAXON_PLAN_CALIBRATION", str(after))
  planned = _plan(job, tmp_path / "again.json").estimate
  rates = [
    record.values["model_tflops_per_device"]
    for record in metrics_file.read(run / "metrics.jsonl")
    if record.split == "train"
  ]
  slowest, fastest = min(rates[1:]), max(rates[1:])
  flops = before.flops.causal_model / 8 / 1e12
  assert flops / fastest <= planned.step <= flops / slowest
  assert planned.source.startswith("measured, 20")
  assert "run run of a.TinyLm on 8 cpu, 5 reports" in planned.source
  # The rates of the machine itself are no shares, and stay.
  assert planned.datasheet_step == pytest.approx(before.estimate.datasheet_step)


def _status(capsys, *arguments):
  status = calibrate_main.main(arguments)
  return status, capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--fast"], "There is an argument '--fast', but known are --small"),
    (["--out="], "There is an argument '--out='"),
    (["--small"], "--out=FILE is required"),
    (["--out=x", "--plan=p"], "--job_log_dir=RUN and --plan=PLAN go together"),
    (
      ["--out=x", "--plan=missing.json", "--job_log_dir=r"],
      "--plan=missing.json is no plan.json: ",
    ),
  ],
)
def test_wrong_use_is_one_line(capsys, arguments, message):
  status, said = _status(capsys, *arguments)
  assert status == 2
  assert said.startswith(message)
  assert said.count("\n") == 1


def test_a_plan_of_several_targets_or_a_run_without_figures(tmp_path, capsys):
  file = tmp_path / "plan.json"
  file.write_text(result.to_json(()))
  arguments = [f"--plan={file}", f"--job_log_dir={tmp_path}", "--out=x"]
  status, said = _status(capsys, *arguments)
  assert (status, "has 0 plans; give one" in said) == (2, True)
  job, _ = testing.make()
  traced = measure.measure(
    job, targets.parse("cpu:8"), experiment="a.B", is_compiled=False
  )
  file.write_text(result.to_json((traced,)))
  status, said = _status(capsys, *arguments)
  assert status == 2
  assert "has no metrics:" in said


def test_it_prints_its_help(capsys):
  assert calibrate_main.main(["--help"]) == 0
  assert "tools/calibrate --out=FILE" in capsys.readouterr().out
