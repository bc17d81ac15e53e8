"""Tests for PGLE: what a CPU permits, which takes a profile and ignores it."""

import base64
import functools
import pathlib

from etils import epath
import jax
import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import launch as launch_lib
from paxon.runner.monitoring import metrics_file
from paxon.runner.training import profile_guided, testing, train

_PROFILE = b"times of instructions"
_PROFILED = {"xla_gpu_enable_command_buffer": ""}
_LAST = profile_guided.WARMUP_STEPS + profile_guided.PROFILED_STEPS


def _guide(folder, said, **fields):
  fields = {
    "setting": "auto",
    "platform": "cuda",
    "extract": lambda _: _PROFILE,
  } | fields
  return profile_guided.ProfileGuide(
    folder=epath.Path(folder), log=said.append, **fields
  )


def _program(number=1):
  return jax.jit(lambda x: x + number).lower(1.0)


@pytest.fixture
def no_trace(monkeypatch):
  """Counts the traces that are begun and ended."""
  calls = []
  for name in ("start_trace", "stop_trace"):
    monkeypatch.setattr(
      profile_guided.jax.profiler,
      name,
      lambda *_, name=name: calls.append(name),
    )
  return calls


def _train(folder, said, monkeypatch, extract=None):
  """Trains with a guide that believes in a GPU; returns losses by step."""
  guide = _guide(
    folder.parent / "pgle",
    said,
    **({} if extract is None else {"extract": extract}),
  )
  monkeypatch.setattr(
    train, "_make_optional_hooks", lambda session, run_dir: [guide]
  )
  job, config = testing.make(
    num_train_steps=_LAST + 2,
    num_layers=1,
    checkpoint_every_steps=None,
    eval_every_steps=None,
    max_new_tokens=0,
  )
  folder.mkdir()
  train.run(job, config, epath.Path(folder))
  return {
    record.step: record.values["loss"]
    for record in metrics_file.read(folder / "metrics.jsonl")
    if record.split == "train"
  }


@pytest.mark.nightly
def test_a_run_profiles_recompiles_and_prints_it(tmp_path, monkeypatch):
  traces = []

  def extract(folder):
    # A real trace of real steps is there to be read.
    traces.extend(pathlib.Path(folder).rglob("*.xplane.pb"))
    return _PROFILE

  said = []
  losses = _train(tmp_path / "a", said, monkeypatch, extract)
  assert len(traces) == 1
  assert sorted(losses) == list(range(1, _LAST + 3))
  assert "without CUDA graphs; profiling steps 6 to 8" in said[0]
  assert "compiled again with a profile of 3 steps (21 bytes" in said[1]
  assert len(said) == 2
  # The next run of the same program has the profile from the first step on.
  (kept,) = (tmp_path / "pgle").iterdir()
  assert kept.read_bytes() == _PROFILE
  again = []
  assert _train(tmp_path / "b", again, monkeypatch) == losses
  assert again == [f"pgle: compiled with the profile {kept}"]


def test_another_program_has_another_profile(tmp_path, no_trace):
  said = []
  first = _guide(tmp_path, said)
  # CUDA graphs hide their instructions from the profile.
  assert first.find_options(_program()) == _PROFILED
  assert [first.needs_compilation(0) for _ in range(_LAST + 1)] == [
    *[False] * (_LAST - 1),
    True,
    False,
  ]
  assert no_trace == ["start_trace", "stop_trace"]
  found = {"fdo_profile": _PROFILE}
  assert first.find_options(_program()) == found
  assert _guide(tmp_path, said).find_options(_program()) == found
  assert _guide(tmp_path, said).find_options(_program(2)) == _PROFILED


def test_a_profile_without_times_does_not_leave_the_slower_program(
  tmp_path, no_trace
):
  said = []
  guide = _guide(tmp_path, said, extract=lambda _: b"")
  assert guide.find_options(_program()) == _PROFILED
  again = [guide.needs_compilation(0) for _ in range(_LAST + 1)]
  assert again == [*[False] * (_LAST - 1), True, False]
  assert "the profile has no instruction times; compiled again" in said[-1]
  # With CUDA graphs; and it is not looked for again.
  assert guide.find_options(_program()) == {}
  assert len(said) == 2
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_first_process_decides_whether_there_is_a_profile(
  tmp_path, monkeypatch, no_trace, is_kept
):
  guide = _guide(tmp_path / "kept", [])
  guide.find_options(_program())
  assert any(guide.needs_compilation(0) for _ in range(_LAST))
  # The first has it and this one does not see it yet, or the other way round.
  folder = tmp_path / ("empty" if is_kept else "kept")
  text = base64.b64encode(_PROFILE if is_kept else b"").decode()
  monkeypatch.setattr(profile_guided.agreement, "from_first", lambda make: text)
  options = _guide(folder, []).find_options(_program())
  assert options == ({"fdo_profile": _PROFILE} if is_kept else _PROFILED)


def test_a_run_that_ends_early_ends_its_trace(tmp_path, no_trace):
  guide = _guide(tmp_path, [])
  guide.find_options(_program())
  for _ in range(profile_guided.WARMUP_STEPS):
    guide.needs_compilation(0)
  guide.close()
  guide.close()
  assert no_trace == ["start_trace", "stop_trace"]


def test_other_platforms_leave_it_out(tmp_path, no_trace):
  said = []
  guide = _guide(tmp_path, said, platform="tpu")
  assert guide.find_options(_program()) == {}
  assert not any(guide.needs_compilation(0) for _ in range(_LAST))
  assert not no_trace
  assert said == ["pgle: not used, because compilers for tpu accept no profile"]


def test_a_profile_by_hand(tmp_path, no_trace):
  path = tmp_path / "mine.pb"
  path.write_bytes(_PROFILE)
  said = []
  guide = _guide(tmp_path, said, setting=str(path))
  assert guide.find_options(_program()) == {"fdo_profile": _PROFILE}
  assert not any(guide.needs_compilation(0) for _ in range(_LAST))
  assert said == [f"pgle: compiled with the profile {path}"]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (
      None,
      r"missing\.pb cannot be read \(No such file.*a run with pgle='auto'",
    ),
    (b"", r"missing\.pb is empty"),
  ],
)
def test_rejects_a_profile_before_anything_is_computed(
  tmp_path, content, message
):
  path = tmp_path / "missing.pb"
  if content is not None:
    path.write_bytes(content)
  job, config = testing.make(pgle=str(path))
  run = functools.partial(train.run, job, config, epath.Path(tmp_path))
  with pytest.raises(user_error.UserError, match=message):
    run()


def test_rejects_two_profiles_at_a_time(tmp_path):
  job, config = testing.make(pgle="auto")
  window = launch_lib.parse_window("2:4")
  with pytest.raises(user_error.UserError, match="both profile the first"):
    train.run(
      job,
      config,
      epath.Path(tmp_path),
      launch=launch_lib.Launch(profile=window),
    )


def test_a_job_without_it_has_no_guide():
  job, _ = testing.make()
  assert job.pgle is None
