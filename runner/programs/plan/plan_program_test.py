"""Tests for `--mode=plan`, with real processes."""

import json
import subprocess
import sys

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets
from paxon.runner.programs.plan import child, plan_program

_TINY = "runner.programs.testing.TinyLm"


def _run(folder, target, *assignments):
  given = [overrides.parse_argument(text) for text in assignments]
  job = resolving.build(resolving.resolve(_TINY, given).config)
  return plan_program.run(
    job,
    experiment=_TINY,
    overrides=given,
    to=targets.parse_all(target),
    run_dir=epath.Path(folder),
  )


def test_plans_and_writes_what_it_prints(tmp_path, capsys):
  assert _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=4,tensor=2") == 0
  out = capsys.readouterr().out
  text = (tmp_path / plan_program.PLAN).read_text()
  (plan,) = result.from_json(text)
  assert plan.compiled
  assert plan.experiment == _TINY
  assert plan.overrides == ("--fdl.mesh=fsdp=4,tensor=2",)
  assert "cpu:8: 8 devices (8 chips) as fsdp=4 x tensor=2" in out
  assert "all-gather" in out
  assert f"plan: {tmp_path / plan_program.PLAN}" in out
  assert result.to_json((plan,)) == text
  with pytest.raises(ValueError, match="version 99; this program reads"):
    result.from_json(json.dumps({"version": 99, "plans": []}))


def test_without_compilers_it_says_what_is_missing(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(topology, "missing", lambda target: ("libtpu",))
  status = _run(
    tmp_path,
    "v5e:1x1,v5e:4x4",
    "--fdl.mesh=fsdp=-1",
    "--fdl.embed_dim=32768",
    "--fdl.global_batch_size=16",
  )
  out = capsys.readouterr().out
  assert status == 0
  assert "libtpu is not installed, so nothing was compiled for v5e:1x1" in out
  assert "bazel run --config=plan //runner:main -- --mode=plan" in out
  # The state alone is known to be too large for one chip.
  assert "v5e:1x1: does not fit\n  1. The state alone takes" in out
  assert "v5e:4x4: unknown" in out
  table = out[out.index("\ntarget ") :].splitlines()
  assert [line.split()[0] for line in table[2:4]] == ["v5e:1x1", "v5e:4x4"]


@pytest.mark.parametrize(
  ("assignments", "message"),
  [
    (
      ["--fdl.mesh=tensor=16"],
      r"mesh 'tensor=16' on h200:2x8: .*axis 'heads' of size 2 does not divide"
      r" by tensor=16; make num_heads a multiple of 16, such as 16",
    ),
    (
      ["--fdl.mesh=fsdp=16"],
      r"batch/inputs: axis 'batch' of size 8 .* global_batch_size a multiple",
    ),
    (["--fdl.mesh=fsdp=3"], r"needs exactly 3 devices, but there are 16"),
  ],
)
def test_the_lint_comes_before_any_compiler(
  tmp_path, monkeypatch, assignments, message
):
  def never(*args, **kwargs):
    raise AssertionError("a process was started")

  monkeypatch.setattr(child, "plan", never)
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "h200:2x8", *assignments)
  assert not (tmp_path / plan_program.PLAN).exists()


def test_slices_need_a_mesh_axis_between_them(tmp_path):
  message = r"mesh 'fsdp=-1' has 1 parts .* 2 slices; .*'fsdp=4,dcn.data=2'"
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "v4:2x(2x2x1)", "--fdl.mesh=fsdp=-1")


def test_the_lint_touches_no_backend():
  # A platform that is not there fails as soon as a backend is asked for.
  code = (
    "from paxon.runner.programs.plan import job_lint\n"
    "from paxon.runner.programs import testing\n"
    "job, _ = testing.make(mesh='fsdp=4096', global_batch_size=8)\n"
    "print(len(job_lint.check(job, num_devices=4096)))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=child.environment(targets.parse("cpu:1"), is_compiled=True)
    | {"JAX_PLATFORMS": "no_such_platform"},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 0


def test_a_process_gets_the_modules_and_flags_of_this_one(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
  variables = child.environment(targets.parse("h200:2x8"), is_compiled=False)
  # CPU devices stand in for those of the target.
  assert variables["JAX_NUM_CPU_DEVICES"] == "16"
  assert variables["PYTHONSAFEPATH"] == "1"
  assert variables["PYTHONPATH"]
  assert variables["XLA_FLAGS"] == "--xla_mine=1 --xla_gpu_autotune_level=0"


def test_a_process_that_dies_shows_its_last_lines(monkeypatch):
  monkeypatch.setattr(child, "_WORKER", "paxon.runner.programs.plan.not_there")
  with pytest.raises(RuntimeError, match=r"cpu:1 ended with status 1:\n.*not_"):
    child.plan(
      _TINY, [], targets.parse("cpu:1"), is_compiled=True, time_limit=60.0
    )


def test_errors_of_the_process_are_those_of_the_user():
  given = [overrides.Override("embed_dim", "0")]
  with pytest.raises(user_error.UserError, match="must be positive, got 0"):
    child.plan(
      _TINY, given, targets.parse("cpu:1"), is_compiled=True, time_limit=60.0
    )


def test_a_process_that_takes_too_long_is_stopped():
  with pytest.raises(user_error.UserError, match=r"cpu:1: the compiler took m"):
    child.plan(
      _TINY, [], targets.parse("cpu:1"), is_compiled=True, time_limit=0.1
    )
