"""Tests for the searches, with real traces and compilers."""

import re
import subprocess
import sys

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.hosts import warm_python
from paxon.runner.plan import result, testing, topology
from paxon.runner.plan import target as targets
from paxon.runner.plan.search import oracle, table
from paxon.runner.planning import (
  child,
  plan_program,
  plan_search,
  trace_worker,
  tracer,
)

_TINY = "runner.training.testing.TinyLm"
# What its many layers save is too much for one H200.
_TOO_LARGE = (
  "--fdl.embed_dim=256",
  "--fdl.num_layers=256",
  "--fdl.global_batch_size=16384",
)


def _given(assignments):
  return [overrides.parse_argument(text) for text in assignments]


def _run(folder, target, *assignments, is_searched=False):
  given = _given(assignments)
  config = resolving.resolve(_TINY, given).config
  return plan_program.run(
    fdl.build(config),
    config,
    experiment=_TINY,
    overrides=given,
    to=(target,),
    run_dir=epath.Path(folder),
    is_searched=is_searched,
  )


def _written(folder):
  text = (folder / plan_program.PLAN).read_text()
  (plan,) = result.from_json(text)
  return plan


@pytest.fixture(scope="module", autouse=True)
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  modules = [child.__name__, trace_worker.__name__]
  with warm_python.installed(modules, folder):
    yield


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setenv("PAXON_CACHE_DIR", str(tmp_path / "cache"))


def test_a_process_traces_one_change_after_the_other():
  target = targets.parse("h200:1x2")
  given = _given(["--fdl.mesh=fsdp=2", "--fdl.num_layers=8"])
  with tracer.Tracer(_TINY, given, target, time_limit=120.0) as traces:

    def forecast(*assignments):
      return traces.plan(_given(assignments))

    whole = forecast()
    less = forecast(
      "--fdl.task.model.stack.remat_policy=layers.remat.save_nothing"
    )
    assert not whole.compiled
    assert less.memory.forecast < whole.memory.forecast
    assert less.flops.recomputed > whole.flops.recomputed == 0
    refused = forecast("--fdl.task.learner.num_microbatches=3")
    assert "must be a multiple of 6: num_microbatches (3)" in refused.message
    # A change that cannot be made does not end the process.
    again = forecast("--fdl.mesh=tensor=2")
    assert again.mesh == {"tensor": 2}
    traces._process.kill()
    with pytest.raises(tracer.TraceError, match="ended with status -9"):
      forecast()


def test_a_trace_that_takes_too_long(monkeypatch):
  target = targets.parse("h200:1x1")
  with (
    tracer.Tracer(_TINY, [], target, time_limit=0.01) as traces,
    pytest.raises(tracer.TraceError, match=r"took more than 0 s"),
  ):
    traces.plan([])


def test_what_cannot_be_searched_is_refused_at_once(tmp_path):
  message = r"--plan_search: for cpu:8 there is nothing .* another target, such"
  with pytest.raises(user_error.UserError, match=message):
    _run(tmp_path, targets.parse("cpu:8"), is_searched=True)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "paxon.runner.main", f"--exp={_TINY}"),
      *("--mode=plan", "--target=cpu:8", "--plan_search"),
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 2
  assert re.fullmatch(message + r".*\n", done.stderr)


def test_without_a_compiler_the_closed_form_proposes(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(topology, "missing", lambda target: ("a-compiler",))
  _run(tmp_path, targets.parse("h200:1x1"), *_TOO_LARGE)
  (change,) = _written(tmp_path).verified_changes
  assert not change.compiled
  assert change.peak_after < _written(tmp_path).memory.usable
  assert change.peak_after < change.peak_before
  out = capsys.readouterr().out
  assert "It fits (analytical estimate) if you " in out
  assert f"\n  {table.paste(change)}\n" in out


def test_a_state_that_is_too_large_says_how_many_devices(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(topology, "missing", lambda target: ("a-compiler",))
  _run(
    tmp_path,
    targets.parse("v5e:2x2"),
    *("--fdl.mesh=fsdp=4", "--fdl.embed_dim=32768"),
  )
  assert _written(tmp_path).verified_changes == ()
  assert re.search(
    r"At least \d+ such devices hold it, \d+ leave half of their memory",
    capsys.readouterr().out,
  )


def test_what_does_not_fit_is_made_to_fit(tmp_path, capsys):
  target = testing.target("h200:1x1")
  assert _run(tmp_path, target, *_TOO_LARGE) == 1
  out = capsys.readouterr().out
  plan = _written(tmp_path)
  change = plan.verified_changes[0]
  assert plan.fit == "does not fit"
  assert change.compiled
  assert change.fit in ("fits", "fits tightly")
  assert change.peak_after <= plan.memory.usable < change.peak_before
  assert change.peak_before == plan.memory.peak
  assert f"It {change.fit} (compiled) if you {change.words}. Add to" in out
  # One change was enough, and what is pasted does what it says.
  (pasted,) = change.overrides
  assert f"\n  {pasted}\n" in out
  assert _run(tmp_path, target, *_TOO_LARGE, pasted) == 0
  again = _written(tmp_path)
  assert again.memory.peak == change.peak_after
  assert again.fit == change.fit
  assert again.bound.step == change.bound_after
  assert "planning for" not in capsys.readouterr().out  # From the cache.


def test_searching_prints_the_front(tmp_path, capsys, monkeypatch):
  target = testing.target("h200:1x2")
  monkeypatch.setattr(plan_search, "_EXPLORE_COMPILES", 2)
  monkeypatch.setattr(plan_search, "_EXPLORE_TRACES", 6)
  knobs = ("--fdl.mesh=fsdp=2", "--fdl.global_batch_size=256")
  assert _run(tmp_path, target, *knobs, is_searched=True) == 0
  plan = _written(tmp_path)
  assert 1 <= len(plan.search) <= 2
  peaks = [change.peak_after for change in plan.search]
  assert peaks == sorted(peaks, reverse=True)
  assert all(change.compiled for change in plan.search)
  out = capsys.readouterr().out
  assert "searching 3 meshes, 5 remat policies and up to 64 times" in out
  assert "Pareto front of step time and memory (compiled), fastest first" in out
  assert "note: --plan_search was cut short before all was traced" in out


def test_a_search_that_cannot_trace_leaves_the_plan(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(topology, "missing", lambda target: ("a-compiler",))
  monkeypatch.setattr(tracer, "_WORKER", "paxon.runner.planning.not_there")
  assert _run(tmp_path, targets.parse("h200:1x1"), is_searched=True) == 0
  out = capsys.readouterr().out
  assert (
    "note: No changes were searched for: Tracing ended with status 1" in out
  )


@pytest.mark.parametrize("narrow", ["int8", "int4", "float8_e4m3fn"])
def test_what_is_not_quantized_has_the_bytes_of_other_products(narrow):
  flops = {narrow: 100, "bfloat16": 20, "float32": 3}
  assert plan_search._itemsize(flops) == 2
  assert plan_search._itemsize({narrow: 100}) == 4


def test_answers_are_an_oracle():
  assert issubclass(plan_search._Answers, oracle.Oracle)
