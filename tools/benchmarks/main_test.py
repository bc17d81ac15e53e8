"""Tests of the command line, with cases that measure nothing."""

import json

import pytest

from paxon.tools.benchmarks import (
  cases,
  comparison,
  interleaving,
  main,
)


@pytest.fixture(name="asked")
def _asked(monkeypatch):
  """Replaces every case's measurement; returns what was asked of them."""
  asked = []

  def run(workload, name, rounds):
    asked.append((name, workload, rounds))
    return comparison.Comparison(
      case=name,
      first="a",
      second="b",
      pairs=interleaving.Pairs(first=(1.0,), second=(1.0,)),
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


def test_a_group_is_measured_by_its_name(asked):
  assert main.run(["layers", "--rounds=2"]) == 0
  names = [name for name, _, _ in asked]
  assert {"attention_grouped", "block_pre", "generation"} <= set(names)
  assert names[-1] == "compile_depth"
  assert not set(names) & set(cases.defaults())


def test_sizes_and_rounds_are_options(asked):
  main.run(["gpt2_124m", "--num_layers=2", "--length=64", "--rounds=3"])
  ((name, workload, rounds),) = asked
  assert (name, rounds) == ("gpt2_124m", 3)
  assert workload.config.num_layers == 2
  assert workload.length == 64
  assert workload.config.embed_dim == cases.GPT2_124M.config.embed_dim


def test_writes_json_and_a_page(asked, tmp_path):
  del asked
  arguments = [
    "loop",
    f"--json={tmp_path}/x.json",
    f"--markdown={tmp_path}/x.md",
  ]
  main.run(arguments)
  data = json.loads((tmp_path / "x.json").read_text())
  assert data["command"].startswith("tools/bench loop")
  assert data["environment"]["device"] == "cpu"
  assert [one["case"] for one in data["comparisons"]] == ["loop"]
  assert "| loop | a / b |" in (tmp_path / "x.md").read_text()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["lop"], "there is no case 'lop'; there are train_step,"),
    (
      ["block_pre", "--num_layers=3"],
      "the case block_pre has no use for --num_layers",
    ),
    (["--rounds=0"], "must be a positive integer, got 0"),
    (["--length=x"], "must be a positive integer, got x"),
    (["--dtype=int8"], "invalid choice: 'int8'"),
    (
      ["--json=/no/such/x.json"],
      "the folder of /no/such/x.json does not exist",
    ),
    (["--batch=2"], "unrecognized arguments: --batch=2"),
    (["inputs", "--json=x.json"], "inputs has no use for --json"),
    (["inputs", "--rounds=2"], "inputs has no use for --rounds"),
    (["inputs", "--num_heads=2"], "inputs has no use for --num_heads"),
    (["inputs", "--dtype=float32"], "inputs has no use for --dtype"),
    (
      ["inputs", "--markdown=/no/such/x.md"],
      "the folder of /no/such/x.md does not exist",
    ),
  ],
)
def test_wrong_use_is_answered_by_one_line(asked, capsys, arguments, message):
  with pytest.raises(SystemExit) as error:
    main.run(arguments)
  assert error.value.code == 2
  assert message in capsys.readouterr().err
  assert not asked
