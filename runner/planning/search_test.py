"""Tests for the searches, with real traces and compilers."""

import dataclasses
import re
import shlex
import subprocess
import sys

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.hosts import warm_python
from paxon.runner.plan import (
  change_sections,
  child_process,
  layouts,
  result,
  sample_plan,
  testing,
  topology,
)
from paxon.runner.plan import target as targets
from paxon.runner.planning import (
  attempts,
  child,
  job_lint,
  plan_program,
  questions,
  search,
  search_space,
)
from paxon.runner.planning import subject as subject_lib

_GIB = 2**30
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
    asked=questions.Questions(programs="train"),
  )


def _written(folder):
  text = (folder / plan_program.PLAN).read_text()
  (plan,) = result.from_json(text)
  return plan


@pytest.fixture(scope="module", autouse=True)
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.install([child.__name__], folder):
    yield


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setenv("PAXON_CACHE_DIR", str(tmp_path / "cache"))


def test_what_cannot_be_searched_is_refused_at_once(tmp_path):
  message = (
    r"--plan_search: neither the memory .* cpu:8 .* another target, such"
  )
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
    check=False,
  )
  assert done.returncode == 2
  assert re.fullmatch(message + r".*\n", done.stderr)


def test_without_a_compiler_an_estimate_is_proposed(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(topology, "missing", lambda target: ("a-compiler",))
  # State that only two devices hold.
  given = ("--fdl.mesh=data=2", "--fdl.embed_dim=30720")
  _run(tmp_path, targets.parse("h200:1x2"), *given)
  (change,) = _written(tmp_path).verified_changes
  assert not change.compiled
  assert "fsdp=2" in change.overrides[0] or "tensor=2" in change.overrides[0]
  out = capsys.readouterr().out
  assert "It may fit (analytical estimate, not compiled) if you split" in out
  assert f"\n  {shlex.join(change.overrides)}\n" in out


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


@pytest.mark.nightly
def test_what_does_not_fit_is_made_to_fit(tmp_path, capsys):
  target = testing.target("h200:1x1")
  assert _run(tmp_path, target, *_TOO_LARGE) == 1
  out = capsys.readouterr().out
  plan = _written(tmp_path)
  change = plan.verified_changes[0]
  assert plan.fit == "does not fit"
  assert change.compiled
  assert change.fit in ("fits", "fits tightly")
  assert change.peak <= plan.memory.usable < plan.memory.peak
  assert f"It {change.fit} (compiled) if you {change.words}. Add to" in out
  # One change was enough, and what is pasted does what it says.
  (pasted,) = change.overrides
  assert f"\n  {shlex.quote(pasted)}\n" in out
  assert _run(tmp_path, target, *_TOO_LARGE, pasted) == 0
  again = _written(tmp_path)
  assert again.memory.peak == change.peak
  assert again.fit == change.fit
  assert again.bound.step == change.bound
  assert "planning for" not in capsys.readouterr().out  # From the cache.


@pytest.mark.nightly
def test_searching_prints_the_table(tmp_path, capsys, monkeypatch):
  target = testing.target("h200:1x2")
  monkeypatch.setattr(search, "_EXPLORE_COMPILES", 2)
  monkeypatch.setattr(search, "_REFINE_COMPILES", 0)
  knobs = ("--fdl.mesh=fsdp=2", "--fdl.global_batch_size=256")
  assert _run(tmp_path, target, *knobs, is_searched=True) == 0
  plan = _written(tmp_path)
  compiled = [change for change in plan.search if change.compiled]
  # The job as it is, perhaps another kernel, and the best with other options.
  assert 3 <= len(compiled) <= 5
  assert compiled[0].reason == "best"
  assert {change.reason for change in plan.search[len(compiled) :]} == {
    "not compiled: analytical estimates"
  }
  assert plan.num_layouts > 50
  out = capsys.readouterr().out
  assert f"searching {plan.num_layouts} layouts of h200:1x2" in out
  number = f"{len(compiled)} compiled of {plan.num_layouts}"
  assert f"{number} whose state fits" in out


# Plans that are made up: what the search asks for, and how it ranks.


def _subject(monkeypatch, peaks, *assignments, steps=lambda text: 1.0):
  """A job on h200:1x8; `peaks` and `steps` of overrides make its plans."""
  given = _given(["--fdl.global_batch_size=64", *assignments])
  config = resolving.resolve(_TINY, given).config
  job = fdl.build(config)
  asked = []

  class Subject(subject_lib.Subject):
    def plan(self, more=(), **options):
      text = " ".join(map(str, subject_lib.merge(given, more)))
      asked.append(text)
      return _plan(peaks(text), steps(text))

  monkeypatch.setattr(child_process, "count_parallel", lambda: 1)
  subject = Subject(
    experiment=_TINY,
    overrides=given,
    config=config,
    job=job,
    shapes=job_lint.get_shapes(job),
    target=targets.parse("h200:1x8"),
  )
  return subject, asked


def _plan(peak, step=1.0):
  found = sample_plan.plan()
  assert found.estimate is not None
  memory = dataclasses.replace(
    found.memory, peak=peak, usable=100.0 * _GIB, compiler_error=None
  )
  return dataclasses.replace(
    found,
    memory=memory,
    estimate=dataclasses.replace(found.estimate, step=step),
    fit=memory.fit.value,
  )


def test_what_is_expected_to_fit_is_compiled_first(monkeypatch):
  subject, _ = _subject(monkeypatch, lambda text: 0, "--fdl.mesh=fsdp=8")
  searched = attempts.Search(subject, None)
  # GiB of an H200's 141, and seconds.
  expected = {200: 1.0, 50: 3.0, 400: 1.0, 60: 1.0, 300: 0.5, 10: 2.0}
  peaks = dict(zip(searched.candidates, expected, strict=False))
  assert len(peaks) == len(expected)
  monkeypatch.setattr(
    searched,
    "expect",
    lambda c: layouts.Prediction(
      step=expected[peaks[c]], state=0, peak=peaks[c] * _GIB
    ),
  )
  found = [peaks[c] for c in searched.order(peaks)]
  # The fastest first, and then the smallest of those that are too large.
  assert found == [60, 10, 50, 200, 300, 400]


def test_a_fix_changes_one_thing_if_that_is_enough(monkeypatch):
  subject, asked = _subject(
    monkeypatch,
    lambda text: (50 if "num_microbatches=8" in text else 150) * _GIB,
    "--fdl.mesh=fsdp=8",
  )
  found = search.fix(subject, _plan(200 * _GIB))
  # The last of a chain of compiled changes, each a single one, fits.
  assert len(asked) <= search._FIX_COMPILES
  assert all(len(change.overrides) == 1 for change in found.verified_changes)


def test_a_fix_that_finds_nothing_says_how_much_it_compiled(monkeypatch):
  subject, asked = _subject(
    monkeypatch, lambda text: 150 * _GIB, "--fdl.mesh=fsdp=8"
  )
  found = search.fix(subject, _plan(200 * _GIB))
  assert len(asked) == search._FIX_COMPILES
  assert all(c.fit == "does not fit" for c in found.verified_changes)
  note = (
    r"No change was found that fits and makes steps at most 2 times slower: 5"
    r" of \d+ were compiled; --plan_search compiles more\. Most of the memory"
    r" is taken by .* GiB"
  )
  assert re.match(note, found.notes[-1])


def test_a_change_that_is_much_slower_is_no_answer(monkeypatch):
  subject, asked = _subject(
    monkeypatch,
    lambda text: 50 * _GIB,
    "--fdl.mesh=fsdp=8",
    steps=lambda text: 2.5,
  )
  found = search.fix(subject, _plan(200 * _GIB, 1.0))
  # The search goes on behind it.
  assert len(asked) == search._FIX_COMPILES
  titles = [section.title for section in change_sections.make_sections(found)]
  assert titles == [
    "Changes that fit, but make steps more than 2 times slower:"
  ]
  assert found.notes[-1].startswith("No change was found that fits and makes")


def test_a_change_that_should_be_much_slower_is_not_compiled(monkeypatch):
  subject, asked = _subject(
    monkeypatch, lambda text: 150 * _GIB, "--fdl.mesh=fsdp=8"
  )
  usual = layouts.Layouts.predict

  def predict(self, layout):
    found = usual(self, layout)
    if layout.microbatches == 1:
      return found
    return dataclasses.replace(found, step=100 * found.step, peak=0)

  monkeypatch.setattr(layouts.Layouts, "predict", predict)
  search.fix(subject, _plan(200 * _GIB))
  assert asked
  assert not any("num_microbatches" in text for text in asked)


def test_a_layout_that_xla_recomputes_is_compiled_without_that(monkeypatch):
  subject, asked = _subject(
    monkeypatch,
    lambda text: 50 * _GIB,
    "--fdl.mesh=fsdp=8",
    steps=lambda text: 0.9 if "rematerialization" in text else 1.0,
  )
  usual = type(subject).plan

  def plan(self, more=(), **options):
    found = usual(self, more, **options)
    is_kept = any("rematerialization" in str(each) for each in more)
    count = round((1.0 if is_kept else 1.067) * found.flops.hardware)
    return dataclasses.replace(found, compiled_flops=count)

  monkeypatch.setattr(type(subject), "plan", plan)
  before = subject.plan()
  found = search.explore(subject, before).search
  assert found[0].overrides[-1] == (
    '--fdl.compiler_options={"xla_disable_hlo_passes": "rematerialization"}'
  )
  assert sum("rematerialization" in text for text in asked) == 1


def test_the_fastest_is_the_best_and_equal_times_go_by_memory(monkeypatch):
  def step(text):
    return 1.0 if "mesh=fsdp=8" in text else 0.99 if "data=8" in text else 2.0

  subject, asked = _subject(
    monkeypatch,
    lambda text: (80 if "data=8" in text else 40) * _GIB,
    "--fdl.mesh=data=8",
    steps=step,
  )
  found = search.explore(subject, _plan(80 * _GIB, 0.99)).search
  # FSDP over all devices is always compiled.
  assert any("mesh=fsdp=8" in text for text in asked)
  assert found[0].reason == "best"
  assert "--fdl.mesh=fsdp=8" in found[0].overrides
  compiled = [change for change in found if change.compiled]
  slower = [c for c in compiled if c.estimate == 2.0]
  assert all("% slower" in change.reason for change in slower)


def test_the_kernel_is_decided_first(monkeypatch):
  fused = search_space.Choice(
    assignments=(
      "task.model.stack.blocks[0].attention.kernel=layers.attention.kernels.fused",
    ),
    words="compute attention by another kernel",
    fields=(("attention", layouts.Attention.FUSED),),
  )
  monkeypatch.setattr(
    search_space.Space, "_kernels", lambda self: (search_space.Choice(), fused)
  )
  subject, asked = _subject(
    monkeypatch,
    lambda text: 40 * _GIB,
    "--fdl.mesh=fsdp=8",
    steps=lambda text: 1.0 if "kernels.fused" in text else 2.0,
  )
  search.explore(subject, _plan(40 * _GIB, 2.0))
  assert "mesh=fsdp=8" in asked[0]
  assert len(asked) > 4
  # Only split sequences need the other kernel.
  assert all("kernels.fused" in t or "sequence" in t for t in asked)


def test_one_dimension_of_the_best_layout_is_varied_at_a_time(monkeypatch):
  monkeypatch.setattr(search, "compile_rounds", lambda *args: None)
  subject, asked = _subject(
    monkeypatch,
    lambda text: 40 * _GIB,
    "--fdl.mesh=fsdp=8",
    # Any first change helps; no second one does.
    steps=lambda text: 1.0,
  )
  found = search.explore(subject, _plan(40 * _GIB, 2.0)).search
  compiled = [change for change in found if change.compiled]
  # The job, changes of it, and one of these with compiler options.
  assert {len(change.overrides) for change in compiled} <= {0, 1, 2}
  assert any(len(change.overrides) == 1 for change in compiled)
  assert 1 <= len(asked) <= search._REFINE_COMPILES + 1  # With options.


def test_a_failed_candidate_is_in_the_table(monkeypatch):
  subject, _ = _subject(
    monkeypatch, lambda text: 40 * _GIB, "--fdl.mesh=fsdp=8"
  )
  failure = result.Failure(target="", message="no")
  monkeypatch.setattr(type(subject), "plan", lambda *args: failure)
  found = search.explore(subject, _plan(40 * _GIB)).search
  assert "no" in [change.reason for change in found]


def test_a_rejected_first_program_is_not_compiled_again(monkeypatch):
  subject, _ = _subject(
    monkeypatch, lambda text: 150 * _GIB, "--fdl.mesh=fsdp=8"
  )
  before = _plan(None)
  memory = dataclasses.replace(before.memory, compiler_error="Out of memory")
  before = dataclasses.replace(before, memory=memory, compiled=False)
  found = attempts.Search(subject, before)
  assert found.space.current not in found.rest()


@pytest.mark.parametrize(
  ("error", "gibibytes"),
  [
    ("RESOURCE_EXHAUSTED: Used 21.69G of 15.75G hbm.", 21.69),
    ("memory required for HLO temporaries (18.38G) exceeds", 18.38),
    ("Out of memory", None),
  ],
)
def test_the_peak_of_a_rejected_program_is_in_the_error(error, gibibytes):
  found = sample_plan.plan()
  memory = dataclasses.replace(found.memory, peak=None, compiler_error=error)
  rejected = dataclasses.replace(found, memory=memory)
  expected = None if gibibytes is None else round(gibibytes * _GIB)
  assert attempts.get_peak(rejected) == expected
