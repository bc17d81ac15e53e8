"""Tests for compiler flags as users of Pax type them."""

import os
import re
import subprocess
import sys

import pytest

from paxon.runner import command_line, user_error, xla_flags
from paxon.runner.training import profile_guided

# The environment of Pax's page on GPUs, for profiles by JAX and by hand.
_AUTO = {
  "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true",
  "JAX_ENABLE_PGLE": "true",
  "JAX_PGLE_PROFILING_RUNS": "3",
  "JAX_PGLE_AGGREGATION_PERCENTILE": "85",
}
_PROFILE = "--xla_gpu_pgle_profile_file_or_directory_path=/tmp/profile.pb"
_MANUAL = {"XLA_FLAGS": f"{_AUTO['XLA_FLAGS']} {_PROFILE}"}


def _parse(*arguments):
  found = command_line.parse(["main", "--exp=a.B", *arguments])
  return {x.path: x.text for x in found.overrides}, found.notes


@pytest.mark.parametrize(
  ("environ", "value"), [(_AUTO, "auto"), (_MANUAL, "/tmp/profile.pb")]
)
def test_the_environment_becomes_a_knob(monkeypatch, environ, value):
  for name, text in environ.items():
    monkeypatch.setenv(name, text)
  found, notes = _parse()
  assert found == {"pgle": value}
  assert any(f"read as --fdl.pgle={value}" in note for note in notes)
  # Notes name all flags but those that XLA reads itself.
  assert len(notes) == len(environ) - (environ is _AUTO)
  assert not any("\n" in note for note in notes)
  xla_flags.clear(os.environ)
  assert os.environ["XLA_FLAGS"] == _AUTO["XLA_FLAGS"]
  assert not any("PGLE" in name for name in os.environ)
  assert _parse() == ({}, ())


def test_the_command_line_is_stronger_and_other_modes_ignore_profiles(
  monkeypatch,
):
  monkeypatch.setenv("JAX_ENABLE_PGLE", "true")
  found, notes = _parse("--fdl.pgle=/tmp/mine.pb")
  assert found == {"pgle": "/tmp/mine.pb"}
  assert "--fdl.pgle is given, too, and is used" in notes[0]
  assert _parse("--mode=eval") == ({}, ())
  monkeypatch.setenv("JAX_ENABLE_PGLE", "false")
  assert _parse() == ({}, ())


def test_flags_on_the_command_line_become_knobs():
  found, notes = _parse(
    "--jax_enable_pgle",
    "--jax_pgle_profiling_runs=3",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_all_reduce_combine_threshold_bytes",
    "51200",
    "--xla_gpu_enable_command_buffer=''",
  )
  options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 51200,
    "xla_gpu_enable_command_buffer": "",
  }
  assert found == {"pgle": "auto", "compiler_options": str(options)}
  assert len(notes) == 3
  found, notes = _parse(_PROFILE)
  assert found == {"pgle": "/tmp/profile.pb"}
  message = "--xla_a and --fdl.compiler_options are both given"
  with pytest.raises(user_error.UserError, match=message):
    _parse("--xla_a=1", "--fdl.compiler_options={}")


@pytest.mark.parametrize("name", xla_flags.REMOVED)
def test_removed_flags_are_rejected_in_one_line(monkeypatch, name):
  message = f"--{name}=1: XLA no longer has this flag; "
  with pytest.raises(user_error.UserError, match=re.escape(message)) as error:
    _parse(f"--{name}=1")
  assert "\n" not in str(error.value)
  monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --{name}=1")
  with pytest.raises(user_error.UserError, match=f"^XLA_FLAGS: {message}"):
    _parse("--mode=eval")


def test_as_many_steps_are_profiled():
  assert xla_flags.PROFILED_STEPS == profile_guided.PROFILED_STEPS


@pytest.mark.nightly
def test_xla_itself_rejects_the_removed_flags():
  flags = [f"--{name}=true" for name in xla_flags.REMOVED]
  found = subprocess.run(
    [sys.executable, "-c", "import jax; jax.devices()"],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
    capture_output=True,
    text=True,
  )
  (line,) = [x for x in found.stderr.splitlines() if "Unknown flag" in x]
  assert set(re.findall(r"--(\w+)", line)) == set(xla_flags.REMOVED)
