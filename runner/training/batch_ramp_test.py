"""Tests of training whose batches grow."""

import shutil

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.inputs import synthetic_lm_input
from paxon.learners import privacy
from paxon.runner import user_error
from paxon.runner.session import prefetch
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import preflight, testing, train

# Two steps of 4 sequences, three of 8, and 16 from the sixth on.
RAMP = ((2, 4), (5, 8))
STEPS = 8
SIZES = [4, 4, 8, 8, 8, 16, 16, 16]


def _config(ramp=RAMP, **knobs):
  config = testing.TinyLm(
    **{
      "num_train_steps": STEPS,
      "global_batch_size": 16,
      "checkpoint_every_steps": 1,
      "eval_every_steps": None,
      "max_new_tokens": 0,
      "mesh": "fsdp=4,tensor=2",
    }
    | knobs
  ).job()
  config.batch_ramp = ramp
  config.retention = fdl.Config(training.Retention, newest=None)
  return config


def _keep(batch):
  return {name: jax.device_put(value) for name, value in batch.items()}


def _run(folder, config):
  folder.mkdir(exist_ok=True)
  return train.run(fdl.build(config), config, epath.Path(folder))


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  return _run(folder, _config())


def test_the_schedule_is_that_of_the_pairs():
  job = fdl.build(_config())
  size_at = job.make_batch_size_schedule()
  assert [size_at(step) for step in range(1, STEPS + 1)] == SIZES
  assert job.count_sequences() == sum(SIZES)
  assert job.batch_sizes == (4, 8, 16)
  for steps in (2, 3, 5):
    job = fdl.build(_config(num_train_steps=steps))
    assert job.count_sequences() == sum(SIZES[:steps])


def test_sequences_are_those_of_equal_batches_in_order():
  job = fdl.build(_config())
  size_at = job.make_batch_size_schedule()
  with prefetch.Prefetcher(
    job.train_input,
    place=_keep,
    limit=STEPS,
    size_of=lambda index: size_at(index + 1),
  ) as batches:
    found = [batch.arrays["inputs"] for batch in batches]
  assert [len(x) for x in found] == SIZES
  # Read to the end, and of the size of the job again.
  assert job.train_input.global_batch_size == 16
  same = fdl.build(_config(ramp=(), global_batch_size=4)).train_input
  expected = [same.get_next()["inputs"] for _ in range(sum(SIZES) // 4)]
  np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
  assert (
    job.train_input.get_state()["position"] == (same.get_state()["position"])
  )


@pytest.mark.nightly
def test_metrics_count_the_tokens_of_each_batch(whole):
  source = fdl.build(_config()).train_input
  for record in whole.history():
    if record.split != "train" or "loss" not in record.values:
      continue
    source.set_global_batch_size(SIZES[record.step - 1])
    batch = source.get_next()
    assert record.values["bits_per_byte"] == pytest.approx(
      record.values["loss"]
      * batch["weights"].sum()
      / (batch["target_bytes"] * batch["weights"]).sum()
      / np.log(2),
      rel=1e-5,
    )


# At a change of the size, one before, one after, and in the last stage.
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_a_run_resumes_with_the_same_bits(tmp_path, whole, step):
  folder = tmp_path / "resumed"
  for name in ("config.json", "config.txt"):
    if (whole.run_dir / name).exists():
      folder.mkdir(exist_ok=True)
      shutil.copy(whole.run_dir / name, folder / name)
  shutil.copytree(
    whole.run_dir / "checkpoints" / str(step),
    folder / "checkpoints" / str(step),
  )
  resumed = _run(folder, _config())
  assert testing.digest(resumed.state) == testing.digest(whole.state)
  before = {r.step: r.values["loss"] for r in whole.history() if r.step > step}
  after = {r.step: r.values["loss"] for r in resumed.history()}
  assert after == before


def test_the_session_and_the_summary_have_all_sizes(tmp_path):
  session = session_lib.open_session(fdl.build(_config()))
  assert session.batch["inputs"].shape == (16, 16)
  small = session.with_batch_size(4)
  assert small.batch["inputs"].shape == (4, 16)
  assert small.batch["inputs"].sharding == session.batch["inputs"].sharding
  lines = preflight.summary(session, epath.Path(tmp_path))
  assert (
    "batch: 4 sequences to step 2, 8 sequences to step 5, 16 sequences x 16 ="
    f" 256 tokens; 8 steps = {sum(SIZES) * 16:,} tokens" in lines
  )


def test_a_batch_that_the_mesh_does_not_divide_is_an_error():
  job = fdl.build(_config(mesh="fsdp=8"))
  with pytest.raises(
    user_error.UserError, match=r"global_batch_size \(4\).*multiple of 8"
  ):
    session_lib.open_session(job)


@pytest.mark.parametrize(
  ("ramp", "text"),
  [
    (((2, 2), (2, 4)), "increasing positive steps"),
    (((0, 2),), "increasing positive steps"),
    (((2, 8), (5, 8)), "increasing positive batch sizes"),
    (((2, 16),), "increasing positive batch sizes"),
    (((2, 0),), "increasing positive batch sizes"),
  ],
)
def test_a_ramp_must_rise(ramp, text):
  with pytest.raises(ValueError, match=rf"Job\.batch_ramp must have {text}"):
    fdl.build(_config(ramp=ramp))


def test_other_settings_must_fit():
  config = _config()
  config.train_input = fdl.Config(
    synthetic_lm_input.SyntheticLmInput,
    vocab_size=264,
    length=16,
    global_batch_size=16,
  )
  with pytest.raises(ValueError, match=r"train_input whose .*got SyntheticLm"):
    fdl.build(config)
  config = _config()
  config.task.learner.privacy = privacy.Privacy(
    clip_norm=1.0, noise_multiplier=1.0
  )
  with pytest.raises(ValueError, match=r"batch_ramp and task\.learner\.priv"):
    fdl.build(config)
