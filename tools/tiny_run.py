"""A run of the tiny language model, for tests of tools that read runs."""

import pathlib

from paxon.runner import main as runner_main

_EXPERIMENT = "paxon.runner.training.testing.TinyLm"


def trained(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a run of one layer and six steps.

  Args:
    folder: Where it is, or is made if it is not there yet: tests of several
      files have one if they give the base of their temporary folders.
  """
  path = folder / "tiny_run"
  if not path.exists():
    status = None
    try:
      runner_main.run(
        argv=[
          "main",
          f"--exp={_EXPERIMENT}",
          f"--job_log_dir={path}",
          "--fdl.num_train_steps=6",
          "--fdl.num_layers=1",
        ]
      )
    except SystemExit as ended:
      status = ended.code
    assert status == 0, status
  return path
