"""Tests that a Python whose imports are shared is like any other."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxon.runner.hosts import warm_python

_REAL = sys.executable


@pytest.fixture(name="python", scope="module")
def _python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.WarmPython(["colorsys"], folder) as warm:
    yield warm.executable


def _printed(program, code, *arguments, **options):
  done = subprocess.run(
    [*program, "-c", code, *arguments],
    capture_output=True,
    text=True,
    check=False,
    **options,
  )
  return done.returncode, done.stdout, done.stderr


_TELLS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["MINE"], sys.path)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""


def test_it_does_what_python_does(python, tmp_path):
  environ = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {
    "PYTHONPATH": os.pathsep.join(
      [os.fspath(tmp_path), *filter(None, sys.path)]
    ),
    "MINE": "1",
  }
  options = {"cwd": tmp_path, "env": environ, "input": "given"}
  expected, found = (
    _printed([program], _TELLS, "a", "--b", **options)
    for program in (_REAL, python)
  )
  assert found == expected
  status, out, err = found
  assert (status, err) == (7, "given\n")
  assert out.startswith(f"__main__ ['-c', 'a', '--b'] {tmp_path} 1 ['', ")


def test_a_module_runs_anew_with_the_imports_at_hand(python, tmp_path):
  (tmp_path / "mine.py").write_text(
    "import sys\nprint(__name__, 'colorsys' in sys.modules, sys.argv[1:])\n"
  )
  for _ in range(2):
    done = subprocess.run(
      [python, "-W", "error", "-m", "mine", "x"],
      cwd=tmp_path,
      env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout == "__main__ True ['x']\n"
  status, _, err = _printed(
    [python, "-W", "error"], "import warnings; warnings.warn('here')"
  )
  assert status == 1
  assert "UserWarning: here" in err


def test_options_of_jax_are_those_of_the_command(python):
  code = "import jax; print(jax.device_count(), jax.config.jax_enable_x64)"
  for variables, expected in (
    ({"JAX_NUM_CPU_DEVICES": "3"}, "3 False\n"),
    # Cannot be had afterwards: another Python.
    ({"JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_X64": "1"}, "2 True\n"),
  ):
    status, out, err = _printed([python], code, env=os.environ | variables)
    assert (status, out) == (0, expected), err


def test_what_is_installed_is_found_also_without_a_path(python):
  code = "import sys; print(sys.path)"
  environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  real, warm = (
    _printed([program], code, env=environ) for program in (_REAL, python)
  )
  assert warm == real


def test_other_arguments_are_pythons_own(python):
  assert subprocess.check_output([python, "-V"]) == subprocess.check_output(
    [_REAL, "-V"]
  )


_WAITS = """
import os, pathlib, signal, sys, time
def stop(number, frame):
  print("asked", flush=True)
  sys.exit(5)
if "deaf" not in sys.argv:
  signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


def _start(python, file, *arguments):
  process = subprocess.Popen(
    [python, "-c", _WAITS, os.fspath(file), *arguments],
    stdout=subprocess.PIPE,
    text=True,
  )
  _wait_until(lambda: file.exists() and file.read_text())
  return process, int(file.read_text())


def _wait_until(is_so):
  while not is_so():
    time.sleep(0.01)


def _is_running(number):
  return pathlib.Path(f"/proc/{number}").exists()


def test_signals_reach_it_and_its_end_is_known(python, tmp_path):
  process, _ = _start(python, tmp_path / "a")
  process.send_signal(signal.SIGTERM)
  assert process.communicate() == ("asked\n", None)
  assert process.returncode == 5
  process, _ = _start(python, tmp_path / "b", "deaf")
  process.send_signal(signal.SIGTERM)
  process.communicate()
  assert process.returncode == -signal.SIGTERM


def test_it_ends_with_the_program_that_was_killed(python, tmp_path):
  process, number = _start(python, tmp_path / "a")
  assert _is_running(number)
  process.kill()
  process.communicate()
  _wait_until(lambda: not _is_running(number))


def test_it_takes_the_place_of_python_for_a_time(tmp_path):
  with warm_python.install([], tmp_path):
    assert sys.executable != _REAL
    # What it starts is started in the same way.
    code = "import sys; print(sys.executable)"
    done = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert done == f"{sys.executable}\n"
  assert sys.executable == _REAL
