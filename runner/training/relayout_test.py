"""Tests that a run goes on in another layout from the same checkpoints.

Stacks are stored stacked and names are logical, so a run that was scanned on
one mesh goes on unrolled on another, and back.
"""

import shutil

from etils import epath
import numpy as np
import pytest

from paxon.runner.monitoring import metrics_file
from paxon.runner.training import testing, train

KNOBS = {
  "num_train_steps": 4,
  "checkpoint_every_steps": 1,
  "eval_every_steps": None,
  "max_new_tokens": 0,
}
SCANNED = {"scan": True, "mesh": "data=8"}
UNROLLED = {"scan": False, "mesh": "data=2,fsdp=2,tensor=2"}


def _train(folder, **layout):
  job, config = testing.make(**KNOBS | layout)
  train.run(job, config, epath.Path(folder))
  records = metrics_file.read(folder / "metrics.jsonl")
  losses = {r.step: r.values["loss"] for r in records if r.split == "train"}
  assert sorted(losses) == [1, 2, 3, 4]
  return np.asarray([losses[step] for step in sorted(losses)])


def _copy_until(source, target, *, step):
  shutil.copytree(source, target)
  for path in (target / "checkpoints").iterdir():
    if int(path.name) > step:
      shutil.rmtree(path)
  return target


@pytest.mark.nightly
def test_scanned_to_unrolled_on_another_mesh_and_back(tmp_path, capsys):
  expected = _train(tmp_path / "a", **SCANNED)
  # Checkpoints 2, 3 and 4 are kept.
  there = _copy_until(tmp_path / "a", tmp_path / "b", step=2)
  unrolled = _train(there, **UNROLLED)
  np.testing.assert_allclose(unrolled, expected, rtol=1e-6)
  back = _copy_until(there, tmp_path / "c", step=3)
  capsys.readouterr()
  np.testing.assert_allclose(_train(back, **SCANNED), expected, rtol=1e-6)
  assert "resuming from the checkpoint of step 3" in capsys.readouterr().out
