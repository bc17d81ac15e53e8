"""Our own main finds our experiment, and trains it."""

import json
import os
import pathlib
import subprocess

from lab import runfiles

EXPERIMENT = "lab.experiments.next_number.NextNumber"


def run(*arguments: str) -> str:
  """Returns what main prints; fails if it fails."""
  done = subprocess.run(
    [str(runfiles.root() / os.environ["TEST_WORKSPACE"] / "main"), *arguments],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return done.stdout


def main() -> None:
  """Asserts that the experiment is listed, and that its loss falls."""
  assert run("--list").split()[0] == EXPERIMENT

  folder = pathlib.Path(os.environ["TEST_TMPDIR"]) / "run"
  run(f"--exp={EXPERIMENT}", f"--job_log_dir={folder}")
  with (folder / "metrics.jsonl").open() as lines:
    metrics = [json.loads(line) for line in lines]
  losses = [line["loss"] for line in metrics if line["split"] == "train"]
  print(f"loss: {losses[0]:.4f} -> {losses[-1]:.6f}")
  assert losses[-1] < 0.1 * losses[0], losses
  assert (folder / "report.html").is_file()
  assert any(line["split"] == "validation" for line in metrics)

  runfiles.assert_no_tensorflow()
  assert "tasks" not in runfiles.packages()


if __name__ == "__main__":
  main()
