"""Tests for `--mode=plan`, with real processes."""

import json
import re
import subprocess
import sys

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.hosts import warm_python
from paxon.runner.plan import child_process, result, sample_plan, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import (
  child,
  plan_cache,
  plan_program,
  questions,
)
from paxon.runner.training import testing

_TINY = "runner.training.testing.TinyLm"


@pytest.fixture(scope="module", name="kept")
def _cache_of_these_tests(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _use_cache_of_these_tests(kept, monkeypatch):
  monkeypatch.setenv("PAXON_CACHE_DIR", str(kept))
  # Sources of a checkout may be edited while its tests run.
  monkeypatch.setattr(plan_cache, "digest_sources", lambda: "the same")


@pytest.fixture(scope="module", name="warm")
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.WarmPython([child.__name__], folder) as warm:
    yield warm.executable


@pytest.fixture(name="_warm")
def _processes_have_their_imports(warm, monkeypatch):
  monkeypatch.setattr(sys, "executable", warm)


def _never(*args, **kwargs):
  raise AssertionError("a process was started")


def _run(folder, target, *assignments, **flags):
  given = [overrides.parse_argument(text) for text in assignments]
  config = resolving.resolve(_TINY, given).config
  return plan_program.run(
    fdl.build(config),
    config,
    experiment=_TINY,
    overrides=given,
    to=targets.parse_all(target),
    run_dir=epath.Path(folder),
    asked=questions.parse(**flags),
  )


def _made_up(experiment, overrides, target, **options):
  given = {each.path: each.text for each in overrides}
  tokens = 16.0 * int(given.get("global_batch_size", 8))
  estimate = sample_plan.estimate(tokens_per_second=tokens * target.num_chips)
  return sample_plan.plan(
    target=target.text, num_chips=target.num_chips, estimate=estimate
  )


def test_a_grid_is_one_table_and_the_best_plan(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(child, "plan", _made_up)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  flags = {"batches": "8,32", "tokens": "1e9"}
  assert _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=8", **flags) == 0
  out = capsys.readouterr().out
  table = out.split("plans for cpu:8 by length and batch\n")[1].splitlines()
  assert [line.split()[1] for line in table[1:3]] == [
    "global_batch_size=8",
    "global_batch_size=32",
  ]
  # 16 tokens a second for each sequence and device.
  assert ["4,096*" in line for line in table[1:3]] == [False, True]
  (plan,) = result.from_json((tmp_path / plan_program.PLAN).read_text())
  assert plan.overrides[1:] == ("--fdl.global_batch_size=32",)
  assert plan.training_cost.tokens == 1e9


def test_the_largest_batch_is_one_number(tmp_path, capsys, monkeypatch):
  def plan(experiment, overrides, target, **options):
    given = {each.path: each.text for each in overrides}
    batch = int(given.get("global_batch_size", 8))
    memory = sample_plan.memory(peak=(20 + batch) * 2**30, usable=118.5 * 2**30)
    flags = tuple(f"--fdl.{name}={text}" for name, text in given.items())
    return sample_plan.plan(
      memory=memory, fit=memory.fit.value, overrides=flags
    )

  monkeypatch.setattr(child, "plan", plan)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  given = ["--fdl.mesh=fsdp=8", "--fdl.task.learner.num_microbatches=2"]
  given.append("--fdl.global_batch_size=16")
  assert _run(tmp_path, "h200:1x8", *given, batches="largest") == 0
  lines = capsys.readouterr().out.splitlines()
  # 20 + 98 GiB fit; the batch is a multiple of 8 shards and 2 microbatches.
  assert "largest batch that fits: 96 (12 per shard), peak 116.00 GiB" in lines


def test_a_notebook_gets_the_plan_of_an_object(monkeypatch, capsys):
  monkeypatch.setattr(child, "plan", _made_up)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  tiny = testing.TinyLm(global_batch_size=32, mesh="fsdp=8")
  plan = plan_program.make_plan(tiny, "cpu:8")
  assert plan.estimate.tokens_per_second == 16 * 32 * 8
  assert capsys.readouterr().out == "planning for cpu:8 ...\n"
  with pytest.raises(user_error.UserError, match="'fsdp=8' needs exactly 8"):
    plan_program.make_plan(tiny, "cpu:4")
  with pytest.raises(user_error.UserError, match="cpu:4,cpu:8"):
    plan_program.make_plan(tiny, "cpu:4,cpu:8")
  inside = type("Inside", (testing.TinyLm,), {"__module__": "__main__"})
  with pytest.raises(user_error.UserError, match="write it to a module"):
    plan_program.make_plan(inside(), "cpu:8")


def test_a_batch_that_does_not_cover_the_mesh_stands_in_the_table(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(child, "plan", _made_up)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  assert _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=8", batches="8,3") == 0
  out = capsys.readouterr().out
  assert re.search(
    r"\ncpu:8 global_batch_size=3 +no plan: mesh 'fsdp=8' on cpu:8: ", out
  )


def test_an_experiment_without_the_knob_of_a_grid(tmp_path):
  message = r"^--fdl.length=16: TinyLm has no knob and Job no field 'length'"
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "cpu:8", lengths="16")


def test_sizes_are_planned_until_one_is_fast_enough(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(child, "plan", _made_up)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  # 64 x 16 tokens/s on each device: 16 devices train 1.416 G tokens a day.
  given = ["--fdl.mesh=data=-1", "--fdl.global_batch_size=64"]
  _run(tmp_path, "cpu:2", *given, tokens="1.41e9", days="1")
  out = capsys.readouterr().out
  assert "cpu:16 is the smallest that trains within 1 day\n" in out
  assert "sizes of cpu to train in 1 day\n" in out


@pytest.mark.usefixtures("_warm")
def test_plans_and_writes_what_it_prints(tmp_path, capsys):
  assert _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=4,tensor=2") == 0
  out = capsys.readouterr().out
  text = (tmp_path / plan_program.PLAN).read_text()
  (plan,) = result.from_json(text)
  assert plan.compiled
  assert plan.experiment == _TINY
  assert plan.overrides == ("--fdl.mesh=fsdp=4,tensor=2",)
  assert "on cpu:8\n" in out
  assert "8 CPU devices, mesh fsdp=4 x tensor=2" in out
  assert "planning for cpu:8 ..." in out
  assert "all-gather" in out
  assert f"plan: {tmp_path / plan_program.PLAN}" in out
  assert f"plan: {tmp_path / plan_program.PAGE}" in out
  assert result.to_json((plan,)) == text
  assert "8 CPU devices" in (tmp_path / plan_program.PAGE).read_text()


@pytest.mark.usefixtures("_warm")
def test_the_same_configuration_is_planned_once(tmp_path, capsys, monkeypatch):
  _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=4,tensor=2")
  capsys.readouterr()
  monkeypatch.setattr(child, "plan", _never)
  # Another assignment that leads to the same configuration.
  given = ["--fdl.mesh=fsdp=4,tensor=2", "--fdl.global_batch_size=8"]
  assert _run(tmp_path, "cpu:8", *given) == 0
  out = capsys.readouterr().out
  assert "from cache, compiled in" in out
  assert "planning for" not in out
  (plan,) = result.from_json((tmp_path / plan_program.PLAN).read_text())
  assert plan.is_from_cache
  assert plan.overrides == tuple(given)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")
  with pytest.raises(AssertionError, match="a process was started"):
    _run(tmp_path, "cpu:8", *given)


@pytest.mark.usefixtures("_warm")
def test_a_target_that_cannot_be_planned_does_not_lose_the_others(
  tmp_path, capsys, monkeypatch
):
  real = child.plan

  def plan(experiment, overrides, target, **options):
    if target.text == "cpu:16":
      raise RuntimeError("Planning for cpu:16 ended with status 1:\nTraceback")
    return real(experiment, overrides, target, **options)

  monkeypatch.setattr(child, "plan", plan)
  given = ["--fdl.mesh=sequence=-1", "--fdl.global_batch_size=16"]
  assert _run(tmp_path, "cpu:3,cpu:16,cpu:2", *given) == 0
  captured = capsys.readouterr()
  assert captured.err == "Traceback\n"
  content = json.loads((tmp_path / plan_program.PLAN).read_text())
  assert [plan["target"] for plan in content["plans"]] == ["cpu:2"]
  first, second = content["failures"]
  assert first["target"] == "cpu:3"
  assert "does not divide by sequence=3" in first["message"]
  assert second == {
    "target": "cpu:16",
    "message": "Planning for cpu:16 ended with status 1.",
  }
  table = captured.out[captured.out.index("\ntarget ") :].splitlines()
  assert [line.split()[0] for line in table[2:5]] == [
    "cpu:2",
    "cpu:3",
    "cpu:16",
  ]
  assert "cpu:16  no plan: Planning for cpu:16 ended" in table[4]


@pytest.mark.usefixtures("_warm")
def test_a_file_that_cannot_be_written(tmp_path, capsys):
  (tmp_path / plan_program.PLAN).mkdir()
  with pytest.raises(user_error.UserError, match=r"plan.json cannot be writ"):
    _run(tmp_path, "cpu:8", "--fdl.mesh=fsdp=4,tensor=2")
  # What was found out is not lost.
  assert "memory per device" in capsys.readouterr().out


def test_where_no_target_can_be_planned_all_reasons_are_given(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(child, "plan", _never)
  message = r"mesh 'fsdp=16' .*there are 2.*mesh 'fsdp=16' .*there are 4"
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "cpu:2,cpu:4", "--fdl.mesh=fsdp=16")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("_warm")
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
  assert "v5e:1x1: does not fit\n  1. The state takes 144.15 GiB;" in out
  assert "v5e:4x4: unknown whether it fits (not compiled); state and" in out
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
      r"batches of 8 examples do not cover the 16 parts .* at least 16",
    ),
    (["--fdl.mesh=fsdp=3"], r"needs exactly 3 devices, but there are 16"),
  ],
)
def test_the_lint_comes_before_any_compiler(
  tmp_path, monkeypatch, assignments, message
):
  monkeypatch.setattr(child, "plan", _never)
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "h200:2x8", *assignments)
  assert not (tmp_path / plan_program.PLAN).exists()


def test_a_mesh_that_a_slice_cannot_hold_is_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(child, "plan", _never)
  message = (
    r"mesh 'fsdp=8,data=2' on v5e:4x4: a slice of 4x4 chips cannot hold this"
    r" mesh, because each axis takes whole sides of the slice: sizes within a"
    r" slice are 4, 16; try mesh=data=4,fsdp=4\."
  )
  given = ("--fdl.mesh=fsdp=8,data=2", "--fdl.global_batch_size=16")
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "v5e:4x4", *given)


def test_slices_need_a_mesh_axis_between_them(tmp_path):
  message = r"mesh 'fsdp=-1' has 1 parts .* 2 slices; .*'fsdp=4,dcn.data=2'"
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, "v4:2x(2x2x1)", "--fdl.mesh=fsdp=-1")


def test_the_lint_touches_no_backend():
  # A platform that is not there fails as soon as a backend is asked for.
  code = (
    "from paxon.runner.planning import job_lint\n"
    "from paxon.runner.training import testing\n"
    "job, _ = testing.make(mesh='fsdp=4096', global_batch_size=8)\n"
    "print(len(job_lint.check(job, num_devices=4096)))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=child_process.environment(targets.parse("cpu:1"), is_compiled=True)
    | {"JAX_PLATFORMS": "no_such_platform"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 0


@pytest.mark.usefixtures("_warm")
def test_errors_of_the_process_are_those_of_the_user():
  given = [overrides.Override("embed_dim", "0")]
  with pytest.raises(user_error.UserError, match="must be positive, got 0"):
    child.plan(
      _TINY, given, targets.parse("cpu:1"), is_compiled=True, time_limit=60.0
    )
