"""The command line of plans: files, limits, and errors of one line."""

import json
import textwrap

import pytest

from paxon.runner.plan import result
from paxon.runner.plan.functions import plan_main

_TRAIN = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

def apply(weight, x):
  return weight + 1, x @ weight

def _shapes(width):
  return (jax.ShapeDtypeStruct((width, width), jnp.float32),
          jax.ShapeDtypeStruct((64, width), jnp.float32))

def make():
  return apply, *_shapes(256)

def make_wide():
  return {"function": apply, "arguments": _shapes(512),
          "in_shardings": (PartitionSpec("fsdp"),) * 2, "donate": 0,
          "mesh": {"fsdp": 8}}

def make_nothing():
  return 3
"""


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
  (tmp_path / "plan_main_subject.py").write_text(textwrap.dedent(_TRAIN))
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def _run(capsys, *argv):
  status = plan_main.main(argv)
  printed = capsys.readouterr()
  return status, printed.out, printed.err


def test_plans_are_printed_written_and_compared(folder, capsys):
  run = ("run", "--target=cpu:8", "--mesh=fsdp=8", "--donate=weight")
  status, out, _ = _run(
    capsys, *run, "plan_main_subject:make", "--json=a.json", "--html=a.html"
  )
  assert status == 0
  assert "plan: apply on cpu:8" in out
  assert "<html" in (folder / "a.html").read_text()
  (plan,) = result.from_json((folder / "a.json").read_text())
  # Whole on each device, as nothing is sharded.
  assert plan.memory.arguments == 256 * 256 * 4 + 64 * 256 * 4
  wide = ("run", "--target=cpu:8", "plan_main_subject:make_wide")
  assert _run(capsys, *wide, "--json=b.json")[0] == 0
  (plan,) = result.from_json((folder / "b.json").read_text())
  assert plan.memory.arguments == (512 * 512 * 4 + 64 * 512 * 4) // 8

  # Of 320 KiB, 176 are 55 %; of 144 KiB, 122.2 %.
  status, out, _ = _run(capsys, "diff", "a.json", "b.json")
  assert status == 0
  row = "arguments 320.00 KiB 144.00 KiB -176.00 KiB (-55.0%)"
  assert row in " ".join(out.split())
  assert "adds 1.00 MiB of all-gathers over fsdp" in out
  status, out, _ = _run(
    capsys, "diff", "a.json", "b.json", "--fail_if=all-gather>+1KiB"
  )
  assert status == 1
  assert "exceeded: all-gather>+1KiB: 0 B -> 1.00 MiB" in out
  status, out, _ = _run(
    capsys, "diff", "b.json", "a.json", "--fail_if=peak>+5%", "--markdown"
  )
  assert (
    "| arguments | 144.00 KiB | 320.00 KiB | +176.00 KiB (+122.2%) |" in out
  )


def test_a_target_that_cannot_be_planned_does_not_stop_the_others(
  folder, capsys
):
  run = ("run", "plan_main_subject:make_wide", "--json=a.json")
  status, out, _ = _run(capsys, *run, "--target=cpu:4,cpu:8")
  assert status == 0
  assert "cpu:4  no plan: mesh: fsdp=8 has 8 devices" in out
  content = json.loads((folder / "a.json").read_text())
  assert [each["target"] for each in content["failures"]] == ["cpu:4"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
  ("argv", "text"),
  [
    ((), "arguments are required: COMMAND"),
    (("run", "plan_main_subject:make"), "required: --target"),
    (("run", "plan_main_subject", "--target=cpu:1"), "not MODULE:FACTORY"),
    (("run", "absent_module:make", "--target=cpu:1"), "No module named"),
    (("run", "plan_main_subject:mak", "--target=cpu:1"), "no attribute 'mak'"),
    (
      ("run", "plan_main_subject:make_nothing", "--target=cpu:1"),
      "returned int",
    ),
    (
      ("run", "plan_main_subject:make", "--target=h2000:1x8"),
      "is not a target",
    ),
    (
      ("run", "plan_main_subject:make", "--target=cpu:8", "--mesh=8"),
      "--mesh='8'",
    ),
    (
      ("run", "plan_main_subject:make", "--target=cpu:8", "--mesh=a=2"),
      "a=2 has 2",
    ),
    (
      ("run", "plan_main_subject:make", "--target=cpu:1", "--donate=w"),
      "donate: 'w'",
    ),
    (("diff", "absent.json", "absent.json"), "absent.json"),
    (("diff", "absent.json", "absent.json", "--fail_if=x"), "--fail_if='x'"),
    (("diff", "absent.json"), "HEAD.json"),
  ],
)
def test_wrong_use_is_one_line_and_status_2(argv, text, capsys):
  status, out, error = _run(capsys, *argv)
  assert (status, out) == (2, "")
  assert error.count("\n") == 1
  assert text in error


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", '{"version": 6}', '{"version": 7, "plans": [{}]}']
)
def test_a_file_without_plans_is_one_line(folder, capsys, text):
  (folder / "a.json").write_text(text)
  status, _, error = _run(capsys, "diff", "a.json", "a.json")
  assert status == 2
  assert error.startswith("a.json is not a file of plans: ")
  assert error.count("\n") == 1


def test_models_of_hugging_face_need_the_trainer(monkeypatch, capsys):
  monkeypatch.setattr(plan_main, "_HUGGING_FACE", "paxon.no_trainer")
  assert plan_main.main(["hf", "config.json", "--target=h200:1x8"]) == 2
  error = capsys.readouterr().err
  assert "paxon.no_trainer" in error
  assert "pip install 'paxon[plan]'" in error
  assert error.count("\n") == 1
