"""Tests for the settings, and for what the command line knows."""

import subprocess
import sys
import time

import pytest

from paxon.runner.monitoring import launch, settings


def test_defaults_watch_and_report():
  defaults = settings.Settings()
  assert defaults.watchdog is not None
  assert defaults.spikes is not None
  assert defaults.wandb_project is None


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"wandb_project": " "}, r"Settings.wandb_project must not be empty"),
    ({"wandb_entity": "me"}, r"wandb_entity \('me'\) has no meaning without"),
  ],
)
def test_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    settings.Settings(**fields)


def test_a_process_knows_when_it_began():
  code = (
    "import time; time.sleep(0.5)\n"
    "from paxon.runner.monitoring import launch\n"
    "print(launch.process_begin())"
  )
  before = time.time()
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
    env={"PYTHONPATH": ":".join(sys.path)},
  )
  # The system counts in hundredths of a second.
  assert before - 0.1 <= float(done.stdout) <= before + 0.45
  assert launch.process_begin() < before
