"""Tests of `tools/ckpt average`."""

import json
import re
from typing import Any

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train
from paxon.sharding import variables
from paxon.tools.checkpoints import ckpt_main

KNOBS = {
  "num_train_steps": 3,
  "checkpoint_every_steps": 1,
  "learning_rate": 0.05,
  "max_new_tokens": 6,
  "mesh": "fsdp=4,tensor=2",
}


def _read(run, step):
  found = stored_checkpoint.find_checkpoint(epath.Path(run), step=step)
  return stored_checkpoint.read_numpy(found, found.arrays)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  train.run(*testing.make(**KNOBS), folder)
  return folder


@pytest.mark.nightly
def test_the_average_is_evaluated_and_decoded(run, tmp_path, capsys):
  to = epath.Path(tmp_path / "averaged")
  assert ckpt_main.main(["average", str(run), str(to), "--last=2"]) == 0
  assert "average of the steps 2, 3" in capsys.readouterr().out
  old, newest, mean = _read(run, 2), _read(run, 3), _read(to, 3)
  assert mean.keys() == newest.keys()
  for name, value in mean.items():
    if name.startswith("params/"):
      exact = (old[name].astype(np.float64) + newest[name]) / 2
      np.testing.assert_array_equal(value, exact.astype(value.dtype), name)
      assert np.any(value != newest[name])
    else:
      np.testing.assert_array_equal(value, newest[name], name)
  job, _ = testing.make(**KNOBS)
  assert evaluate.run(job, to) == 0
  (line,) = (to / "eval" / "metrics.jsonl").read_text().splitlines()
  trained = (run / "metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(line)["step"] == 3
  assert json.loads(line)["loss"] != json.loads(trained)["loss"]
  tree: dict[str, Any] = traverse_util.unflatten_dict(
    {n: x for n, x in mean.items() if n.startswith("params/")}, sep="/"
  )
  _, ids = testing.greedy_continuation(
    session_lib.open_session(job), tree, "def "
  )
  assert decode.run(job, to, "def ") == 0
  line = json.loads((to / "decode" / "3.jsonl").read_text())
  assert line["ids"] == ids


def _save(run, *, width=4, steps=(1, 2)):
  spec = variables.VariableSpec(
    "params/w", (width,), jnp.dtype("bfloat16"), ("embed",)
  )
  count = variables.VariableSpec("step", (), jnp.dtype("int32"), ())
  folder = epath.Path(run) / "checkpoints"
  with checkpointer.Checkpointer(folder) as checkpoints:
    for step in steps:
      tree = [jnp.full(width, step, jnp.bfloat16), jnp.int32(step)]
      checkpoints.save(step, tree, specs=[spec, count], data={"at": step})
      checkpoints.wait()
  return epath.Path(run)


def test_keeps_dtypes_counts_and_the_position_in_the_data(tmp_path):
  run, to = _save(tmp_path / "run", steps=(1, 2, 4)), tmp_path / "to"
  assert ckpt_main.main(["average", str(run), str(to), "--steps=4,1"]) == 0
  found = _read(to, 4)
  np.testing.assert_array_equal(found["params/w"].astype(np.float32), 2.5)
  assert found["params/w"].dtype == jnp.bfloat16
  assert int(found["step"]) == 4
  with checkpointer.Checkpointer(
    epath.Path(to) / "checkpoints", read_only=True
  ) as checkpoints:
    count = variables.VariableSpec("step", (), jnp.dtype("int32"), ())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = checkpoints.restore(4, specs=[count], shardings=[place])
  assert restored.data == {"at": 4}
  assert ckpt_main.main(["verify", str(to)]) == 0


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--last=1"], r"--last must be a number from 2 to .*, 2, got '1'"),
    (["--last=3"], r"--last must be a number from 2 to .* has the steps 1, 2"),
    (["--steps=1,x"], r"--steps must be numbers .* got '1,x'"),
    (["--steps=1,7"], r"no checkpoint of step 7; .* has the steps 1, 2"),
    (["--steps=1"], r"--steps must be at least two different steps, got '1'"),
    (["--steps=1,1"], r"--steps must be at least two different steps"),
    ([], r"one of the arguments --last --steps is required"),
  ],
)
def test_rejects(tmp_path, capsys, arguments, message):
  run = _save(tmp_path / "run")
  status = ckpt_main.main(
    ["average", str(run), str(tmp_path / "x"), *arguments]
  )
  assert status == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert re.search(message, error), error
  assert not (tmp_path / "x").exists()


def test_rejects_a_directory_with_files(tmp_path, capsys):
  run = _save(tmp_path / "run")
  assert ckpt_main.main(["average", str(run), str(run), "--last=2"]) == 2
  assert "NEW_RUN must be a directory that does not" in capsys.readouterr().err


def test_rejects_different_models(tmp_path, capsys):
  run = _save(tmp_path / "run", steps=(1,))
  _save(run, width=5, steps=(2,))
  to = str(tmp_path / "to")
  assert ckpt_main.main(["average", str(run), to, "--last=2"]) == 2
  assert "have different arrays params/w" in capsys.readouterr().err
