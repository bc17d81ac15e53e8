"""Tests of runs in which a loss, a gradient or a parameter is not finite."""

import dataclasses
import math
import re

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.runner import main, run_dir
from paxon.runner.checkpoints import checkpointer
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import hooks, non_finite, testing, train

KNOBS = {"num_train_steps": 8, "checkpoint_every_steps": 3}


@dataclasses.dataclass(kw_only=True, eq=False)
class Damaged(packed_input.PackedInput):
  """An input with NaN in some batches, and without some others.

  Attributes:
    poisoned: Indices of the batches with NaN as the weight of a token.
    left_out: Indices of the batches that are skipped.
    empty: Indices of the batches without targets.
  """

  poisoned: tuple[int, ...] = ()
  left_out: tuple[int, ...] = ()
  empty: tuple[int, ...] = ()

  def get_next(self):
    while (index := self.get_state()["batches"]) in self.left_out:
      super().get_next()
    batch = dict(super().get_next())
    weights = batch["weights"].copy()
    if index in self.poisoned:
      weights[0, 0] = np.nan
    if index in self.empty:
      weights[:] = 0
    return {**batch, "weights": weights}

  @property
  def may_lack_targets(self):
    return bool(self.empty)


def _run(folder, *, policy=None, limit=10, knobs=(), **damage):
  config = testing.TinyLm(
    **{**KNOBS, "eval_every_steps": None, "max_new_tokens": 0, **dict(knobs)}
  ).job()
  fdl.update_callable(config.train_input, Damaged, drop_invalid_args=True)
  # Also of a run that ends earlier.
  config.task.learner.optimizer.schedule.total_steps = 8
  for name, indices in damage.items():
    setattr(config.train_input, name, indices)
  if policy is not None:
    config.non_finite = training.NonFinite(policy=policy, limit=limit)
  return train.run(fdl.build(config), config, epath.Path(folder))


def _steps(folder):
  path = epath.Path(folder) / run_dir.CHECKPOINTS
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    return checkpoints.steps()


def test_a_nan_ends_the_run_and_no_checkpoint_holds_it(tmp_path):
  with pytest.raises(non_finite.NonFiniteError) as caught:
    _run(tmp_path, poisoned=(4,))
  text = str(caught.value)
  assert text.startswith("loss is nan at step 5; its batch is at data position")
  assert '"batches": 4' in text
  assert '"batches": 5' in text
  assert "the newest checkpoint, of step 3, is finite" in text
  assert caught.value.status == 70
  assert _steps(tmp_path) == [3]
  records = list(metrics_file.read(tmp_path / run_dir.METRICS))
  assert records[-1].step == 5
  assert math.isnan(records[-1].values["loss"])
  # The same run again meets the same batch, unless it may do without it.
  with pytest.raises(non_finite.NonFiniteError, match="at step 5"):
    _run(tmp_path, poisoned=(4,))
  result = _run(
    tmp_path, policy=training.NonFinitePolicy.ROLL_BACK, poisoned=(4,)
  )
  assert result.step == 8


@pytest.mark.nightly
def test_a_roll_back_is_a_run_without_the_data(tmp_path, capsys):
  policy = training.NonFinitePolicy.ROLL_BACK
  # The second comes after the checkpoint of step 6.
  damaged = _run(tmp_path / "damaged", policy=policy, poisoned=(4, 9))
  said = capsys.readouterr().out
  assert said.count("; rolling back\n") == 2
  assert said.count("resuming from the checkpoint of step") == 2
  whole = _run(tmp_path / "whole", left_out=(3, 4, 8, 9))
  assert testing.digest(damaged.state) == testing.digest(whole.state)
  found = {r.step: r.values["loss"] for r in damaged.history()}
  assert found == {r.step: r.values["loss"] for r in whole.history()}


def test_roll_backs_have_a_limit_and_need_no_checkpoint(tmp_path, capsys):
  policy = training.NonFinitePolicy.ROLL_BACK
  with pytest.raises(
    non_finite.NonFiniteError,
    match=r"step 1; .*there is no checkpoint; gave up after 2 roll-backs",
  ):
    _run(tmp_path, policy=policy, limit=2, poisoned=(0, 1, 2))
  assert capsys.readouterr().out.count("; rolling back\n") == 2


@pytest.mark.nightly
def test_skipped_updates_have_a_limit(tmp_path):
  skip = {"non_finite": "skip"}
  result = _run(tmp_path / "few", knobs=skip, poisoned=(2, 3, 5))
  assert int(result.state.skipped) == 3
  assert _steps(tmp_path / "few") == [3, 6, 8]
  stop = training.NonFinitePolicy.STOP
  with pytest.raises(
    non_finite.NonFiniteError,
    match=r"at step 5, and the 2 updates before it were skipped",
  ):
    _run(
      tmp_path / "many", knobs=skip, policy=stop, limit=2, poisoned=(2, 3, 4)
    )


@pytest.mark.nightly
def test_a_batch_without_targets_is_no_error_and_nan_may_be_ignored(tmp_path):
  result = _run(
    tmp_path,
    policy=training.NonFinitePolicy.IGNORE,
    poisoned=(6,),
    empty=(1,),
  )
  losses = [
    record.values.get("loss")
    for record in result.history()
    if record.split == "train"
  ]
  assert [loss is not None and math.isfinite(loss) for loss in losses] == (
    [True, False, True, True, True, True, False, False]
  )
  assert losses[1] is None


def test_a_batch_without_targets_is_no_update(tmp_path, capsys):
  empty = (0, 2, 6)
  whole = _run(tmp_path / "whole", empty=empty)
  text = capsys.readouterr().out
  assert re.findall(r"step (\d)/8  no targets", text) == ["1", "3", "7"]
  assert "spike" not in text
  assert "NaN" not in (tmp_path / "whole" / run_dir.METRICS).read_text()
  # As if only the other batches were there.
  others = _run(
    tmp_path / "others", left_out=empty, knobs={"num_train_steps": 5}
  )
  _run(tmp_path / "resumed", empty=empty, knobs={"num_train_steps": 3})
  resumed = _run(tmp_path / "resumed", empty=empty)
  assert [int(run.state.step) for run in (whole, others, resumed)] == [8, 5, 8]
  for other in (others, resumed):
    jax.tree.map(
      np.testing.assert_array_equal,
      (whole.state.variables, whole.state.opt_state),
      (other.state.variables, other.state.opt_state),
    )
  rates = [
    [
      record.values["learning_rate"]
      for record in run.history()
      if record.split == "train" and "loss" in record.values
    ]
    for run in (whole, others)
  ]
  assert rates[0] == rates[1]


def test_a_rate_that_is_too_large_ends_the_command(tmp_path, capsys):
  flags = ["learning_rate=3e38", "checkpoint_every_steps=1", "max_new_tokens=0"]
  with pytest.raises(SystemExit) as caught:
    main.run(
      ("paxon.tasks",),
      [
        "main",
        "--exp=runner.training.testing.TinyLm",
        f"--job_log_dir={tmp_path}",
        *(f"--fdl.{flag}" for flag in flags),
      ],
    )
  assert caught.value.code == 70
  [line] = capsys.readouterr().err.splitlines()
  assert re.match("(loss|grad_norm) is (nan|inf) at step [23]; ", line)
  assert "is finite; lower the learning rate, or" in line


def test_a_guard_allows_as_many_skipped_updates_as_its_limit():
  _, config = testing.make(non_finite="skip")
  stop = training.NonFinitePolicy.STOP
  config.non_finite = training.NonFinite(policy=stop, limit=2)
  guard = non_finite.Guard(session_lib.open_session(fdl.build(config)))
  guard.on_finish(1, {"loss": math.nan})
  guard.on_finish(2, {"loss": math.nan})
  # A finite step begins the count again.
  guard.on_finish(3, {"loss": 1.0})
  guard.on_finish(4, {"loss": math.nan})
  guard.on_finish(5, {"loss": 1.0, "grad_norm": math.inf})
  with pytest.raises(
    non_finite.NonFiniteError,
    match=r"loss is nan at step 6, and the 2 updates before it were skipped",
  ):
    guard.on_finish(6, {"loss": math.nan})


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_is_checked_before_it_is_saved(value):
  job, _ = testing.make(average_decay=0.9)
  session = session_lib.open_session(job)
  guard = non_finite.Guard(session)
  state = session.initial_state()

  def check(state):
    writer = metrics_file.CompositeWriter(())
    guard.check_state(hooks.Progress(3, state, {"batches": 3}, False, writer))

  check(state)
  leaves, tree = jax.tree.flatten(state)
  names = [spec.name for spec in jax.tree.leaves(session.state_specs)]
  # Parameters, the optimizer's state and the average.
  assert len({name.partition("/")[0] for name in names}) > 2
  for index, leaf in enumerate(leaves):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      continue
    bad = jnp.ravel(leaf).at[-1].set(value).reshape(leaf.shape)
    broken = [*leaves[:index], bad, *leaves[index + 1 :]]
    with pytest.raises(
      non_finite.NonFiniteError,
      match=rf"^{re.escape(names[index])} is not finite after step 3; .*: 3",
    ):
      check(jax.tree.unflatten(tree, broken))
