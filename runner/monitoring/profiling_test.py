"""Tests for profiles of a few steps."""

from etils import epath
import jax
import jax.numpy as jnp
import pytest

from paxon.runner.monitoring import launch, profiling


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
  assert str(window) == "10:13"


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
  profiler = profiling.Profiler(launch.parse_window(text), folder)
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
  profiler = profiling.Profiler(launch.parse_window("2:4"), folder)
  assert _run(profiler, range(4, 7)) == ([], [])
  assert not folder.exists()


def test_without_a_window_nothing_happens(tmp_path):
  profiler = profiling.Profiler(None, epath.Path(tmp_path))
  assert _run(profiler, range(1, 4)) == ([], [])
