"""Tests for the training-loop callbacks."""

import contextlib
import re
import time

from etils import epath
import jax
import jax.numpy as jnp
import pytest

from paxon.runner.monitoring import (
  goodput,
  launch,
  observer,
  spikes,
)
from paxon.runner.settings import monitoring


def _step():
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  traced = jax.jit(lambda x: x @ x).trace(x)
  return traced, traced.lower().compile()


def test_without_arguments_it_monitors_and_writes_nothing(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  with observer.Observer() as watching, watching.training(0):
    with watching.span(goodput.Cause.EVALUATION):
      pass
    watching.on_dispatch(1, before={}, after={})
    watching.on_finish(1, {"loss": float("nan")})
    assert watching.metrics(0.5) == {"step_seconds": 0.5}
  assert list(tmp_path.iterdir()) == []
  assert capsys.readouterr() == ("", "")


def test_metrics_of_a_compiled_step(capsys):
  watching = observer.Observer()
  devices = jax.devices()[:2]
  with watching.compiling():
    assert capsys.readouterr().out == "compiling the training step\n"
    watching.on_compile(*_step(), length=8, devices=devices)
  # No line about the peak of a CPU, which nobody knows.
  assert re.fullmatch(r"compiled in \d+\.\d s\n", capsys.readouterr().out)
  figures = watching.metrics(1e-6)
  assert figures["model_tflops_per_device"] == pytest.approx(
    2 * 8**3 / 1e-6 / 2 / 1e12
  )
  assert figures["step_memory_bytes"] >= 2 * 8 * 8 * 4
  assert figures["host_memory_peak_bytes"] >= figures["host_memory_bytes"] > 0
  assert 0 <= figures["goodput"] <= 1


def _full(tmp_path, **options):
  return observer.Observer(
    monitoring.MonitoringSettings(
      watchdog=monitoring.WatchdogSettings(min_seconds=0.05, factor=1.0),
      spikes=monitoring.SpikeSettings(window=4, min_steps=2),
    ),
    run_dir=epath.Path(tmp_path),
    **options,
  )


def test_spikes_name_the_batch_of_their_own_step(tmp_path):
  # Two steps are in flight when the first one's metrics are read.
  with _full(tmp_path) as watching:
    for step in range(1, 7):
      watching.on_dispatch(step, before={"at": step - 1}, after={"at": step})
      if step > 1:
        loss = 9.0 if step - 1 == 4 else 2.0
        watching.on_finish(step - 1, {"loss": loss})
  [spike] = spikes.read(tmp_path / "spikes.jsonl")
  assert spike.step == 4
  assert spike.position_before == {"at": 3}
  assert spike.position_after == {"at": 4}


@pytest.mark.parametrize(
  ("cause", "speaks"),
  [
    (goodput.Cause.CHECKPOINT, True),
    (goodput.Cause.EVALUATION, False),
    (goodput.Cause.COMPILE, False),
  ],
)
def test_watchdog_is_suspended_except_in_checkpoints(
  tmp_path, capsys, cause, speaks
):
  with _full(tmp_path) as watching, watching.training(3), watching.span(cause):
    if speaks:
      while not (tmp_path / "stacks-3.txt").exists():
        time.sleep(0.01)
    else:
      time.sleep(0.5)
  assert ("since step 3" in capsys.readouterr().err) == speaks
  assert (tmp_path / "stacks-3.txt").exists() == speaks


def test_watchdog_is_disarmed_before_and_after_the_loop(tmp_path):
  with _full(tmp_path) as watching:
    time.sleep(0.2)
    with watching.training(0):
      pass
    watching.on_finish(1, {"loss": 1.0})
    time.sleep(0.2)
  assert list(tmp_path.iterdir()) == []


def test_error_of_the_loop_is_not_hidden_by_a_full_disk(tmp_path):
  (tmp_path / "file").write_text("")
  ledger = goodput.Ledger(epath.Path(tmp_path) / "file" / "goodput.jsonl")

  def fail():
    with observer.Observer(ledger=ledger) as watching, watching.training(0):
      raise ValueError("the first error")

  with pytest.raises(ValueError, match="the first error"):
    fail()


def test_failed_loop_leaves_its_account(tmp_path):
  path = epath.Path(tmp_path) / "goodput.jsonl"

  def fail():
    watching = observer.Observer(ledger=goodput.Ledger(path))
    with watching, watching.training(0):
      watching.on_finish(1, {})
      raise ValueError("no")

  with pytest.raises(ValueError, match="no"):
    fail()
  [attempt] = goodput.read(path)
  assert attempt.last_step == 1
  assert not attempt.finished


def test_the_devices_are_drained_at_the_edges_of_a_profile_only(
  tmp_path, capsys
):
  drained = []

  @contextlib.contextmanager
  def paused():
    drained.append(step)
    yield

  given = launch.Launch(profile=launch.parse_window("2:4"))
  with _full(tmp_path, launch=given) as watching:
    for step in range(1, 6):
      with watching.before_step(step, paused=paused):
        pass
  assert drained == [2, 4]
  assert "profile of steps 2:4: " in capsys.readouterr().out
  assert list((tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize(("step", "is_said"), [(2, False), (3, True)])
def test_profile_window_before_the_resume_step_is_reported(
  tmp_path, capsys, step, is_said
):
  given = launch.Launch(profile=launch.parse_window("2:4"))
  _full(tmp_path, launch=given, resume_step=step)
  said = f"nothing is profiled: --profile_steps=2:4 is before step {step + 1}"
  assert (said in capsys.readouterr().out) == is_said


def test_interrupted_profile_is_written(tmp_path):
  given = launch.Launch(profile=launch.parse_window("1:9"))

  def fail():
    with _full(tmp_path, launch=given) as watching:
      with watching.before_step(1, paused=contextlib.nullcontext):
        pass
      raise OSError("disk")

  with pytest.raises(OSError, match="disk"):
    fail()
  assert list((tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", r"--profile_steps= must be FIRST:STOP, such as 10:13"),
    ("10", r"--profile_steps=10 must be FIRST:STOP"),
    ("a:b", r"must be FIRST:STOP"),
    ("1:2:3", r"must be FIRST:STOP"),
    ("-1:3", r"must be FIRST:STOP"),
    ("1.5:3", r"must be FIRST:STOP"),
    ("0:3", r"--profile_steps=0:3: steps are numbered from 1"),
    ("5:5", r"--profile_steps=5:5 is empty: .* must be at least 6"),
    ("7:5", r"is empty: .* must be at least 8"),
  ],
)
def test_invalid_windows(text, message):
  with pytest.raises(ValueError, match=message):
    launch.parse_window(text)


def test_window_is_half_open():
  window = launch.parse_window("10:13")
  assert [step for step in range(20) if step in window] == [10, 11, 12]
  assert window == range(10, 13)


def test_window_beyond_the_training_is_rejected():
  window = launch.parse_window("10:13")
  launch.check_window(window, num_train_steps=12)
  with pytest.raises(
    ValueError, match=r"=10:13 ends at step 12, but num_train_steps is 11"
  ):
    launch.check_window(window, num_train_steps=11)


def _run(profiler, steps):
  """Runs steps as the loop does; returns where the window had an edge."""
  edges, lines = [], []
  add = jax.jit(lambda x: x + 1)
  x = jnp.zeros(4)
  for step in steps:
    if profiler.is_edge(step):
      x.block_until_ready()
      edges.append(step)
      lines.append(profiler.move(step))
    with profiler.step(step):
      x = add(x)
  x.block_until_ready()
  lines.append(profiler.close())
  return edges, [line for line in lines if line]


@pytest.mark.parametrize(
  ("text", "edges"), [("2:4", [2, 4]), ("1:3", [1, 3]), ("5:7", [5])]
)
def test_the_window_is_traced_once(tmp_path, text, edges):
  folder = epath.Path(tmp_path) / "profile"
  profiler = observer.Profiler(launch.parse_window(text), folder)
  found, lines = _run(profiler, range(1, 7))
  assert found == edges
  assert lines == [f"profile of steps {text}: {folder}"]
  [path] = folder.glob("plugins/profile/*/*.xplane.pb")
  first, stop = map(int, text.split(":"))
  trace = jax.profiler.ProfileData.from_file(str(path))
  names = [
    event.name
    for plane in trace.planes
    for line in plane.lines
    for event in line.events
  ]
  assert names.count("train") == stop - first
  assert b"step_num" in path.read_bytes()
  assert _run(profiler, range(1, 7)) == ([], [])


def test_resumed_run_after_the_window_traces_nothing(tmp_path):
  folder = epath.Path(tmp_path) / "profile"
  profiler = observer.Profiler(launch.parse_window("2:4"), folder)
  assert _run(profiler, range(4, 7)) == ([], [])
  assert not folder.exists()


def test_without_a_window_nothing_happens(tmp_path):
  profiler = observer.Profiler(None, epath.Path(tmp_path))
  assert _run(profiler, range(1, 4)) == ([], [])
