"""The command line of the bench, with cases that measure nothing."""

import json

import pytest

from paxon.tools.benchmarks import cases, main, timing


@pytest.fixture(name="asked")
def _asked(monkeypatch):
  """Replaces every case's measurement; returns what was asked of them."""
  asked = []

  def run(workload, *, name, rounds):
    asked.append((name, workload, rounds))
    return timing.Comparison(
      case=name,
      first="a",
      second="b",
      pairs=timing.Pairs(first=(1.0,), second=(1.0,)),
    )

  fake = {
    name: cases.dataclasses.replace(case, run=run)
    for name, case in cases.CASES.items()
  }
  monkeypatch.setattr(cases, "CASES", fake)
  return asked


def test_measures_the_default_cases_in_order(asked, capsys):
  assert main.run([]) == 0
  names = [name for name, _, _ in asked]
  assert names == ["train_step", "train_step_larger", "save_blocking", "loop"]
  assert "train_step_larger  a / b" in capsys.readouterr().out


def test_sizes_and_rounds_are_options(asked):
  main.run(["gpt2_124m", "--num_layers=2", "--length=64", "--rounds=3"])
  ((name, workload, rounds),) = asked
  assert (name, rounds) == ("gpt2_124m", 3)
  assert workload.config.num_layers == 2
  assert workload.length == 64
  assert workload.config.embed_dim == cases.GPT2_124M.config.embed_dim


def test_unrolling_is_an_option(asked):
  main.run(["tuned", "train_step", "--unroll"])
  main.run(["tuned"])
  assert [workload.scan for _, workload, _ in asked] == [False, False, True]


def test_a_case_whose_library_is_missing_is_left_out(
  asked, capsys, monkeypatch
):
  def run(*_, **__):
    raise ModuleNotFoundError("No module named 'torch'")

  missing = cases.dataclasses.replace(cases.CASES["torch"], run=run)
  monkeypatch.setitem(cases.CASES, "torch", missing)
  assert main.run(["torch", "tuned"]) == 0
  assert [name for name, *_ in asked] == ["tuned"]
  printed = capsys.readouterr()
  assert "torch is left out: No module named 'torch'" in printed.err
  assert "tuned  a / b" in printed.out


def test_writes_json(asked, tmp_path):
  del asked
  main.run(["loop", f"--json={tmp_path}/x.json"])
  data = json.loads((tmp_path / "x.json").read_text())
  assert data["command"].startswith("tools/bench loop")
  assert data["environment"]["device"] == "cpu"
  assert [one["case"] for one in data["comparisons"]] == ["loop"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["lop"], "unknown case 'lop'; choose from train_step,"),
    (["--rounds=0"], "must be a positive integer, got 0"),
    (["--length=x"], "must be a positive integer, got x"),
    (["--dtype=int8"], "invalid choice: 'int8'"),
    (
      ["--json=/no/such/x.json"],
      "the folder of /no/such/x.json does not exist",
    ),
    (["--batch=2"], "unrecognized arguments: --batch=2"),
    (["inputs", "--json=x.json"], "--json does not apply to inputs"),
    (["inputs", "--rounds=2"], "--rounds does not apply to inputs"),
    (["inputs", "--num_heads=2"], "--num_heads does not apply to inputs"),
    (["inputs", "--unroll"], "--unroll does not apply to inputs"),
    (["inputs", "--dtype=float32"], "--dtype does not apply to inputs"),
  ],
)
def test_usage_errors_name_the_argument(asked, capsys, arguments, message):
  with pytest.raises(SystemExit) as error:
    main.run(arguments)
  assert error.value.code == 2
  assert message in capsys.readouterr().err
  assert not asked
