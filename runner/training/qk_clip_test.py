"""QK-clip in the training step of a decoder."""

import fiddle as fdl
from fiddle import selectors
import jax
import numpy as np
import pytest

from paxon.layers.attention import grouped_query, max_logits
from paxon.learners import qk_clip, schedules
from paxon.learners.optimizers import sgd
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

THRESHOLD = 0.02


def _maxima(state):
  return jax.tree.leaves(state.variables[max_logits.COLLECTION])


def _run(**knobs):
  """Returns the state and metrics of two steps on one batch, at rate 1e-12."""
  _, config = testing.make(**knobs)
  for attention in selectors.select(
    config, grouped_query.GroupedQueryAttention
  ):
    attention.max_logits = fdl.Config(max_logits.MaxLogits, chunk=8)
  config.task.learner.optimizer = fdl.Config(
    sgd.Sgd, schedule=fdl.Config(schedules.Constant, value=1e-12)
  )
  config.task.learner.after_update = fdl.Config(
    qk_clip.QkClip, threshold=THRESHOLD
  )
  job = fdl.build(config)
  session = session_lib.open_session(job)
  step = compiled_steps.compile_train_step(session)
  batch = session.place(job.train_input.get_next())
  state, results = session.initial_state(), []
  for _ in range(2):
    state, metrics = step(state, batch)
    results.append(jax.device_get((_maxima(state), metrics)))
  return results


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "knobs",
  [
    {"scan": True, "mesh": "data=8"},
    {"scan": False, "mesh": "data=2,fsdp=2,tensor=2", "num_microbatches": 2},
  ],
)
def test_the_next_step_on_the_same_batch_is_at_the_threshold(knobs):
  (before, metrics), (after, _) = _run(**knobs)
  # Two layers of two heads, some above and some below.
  before, after = (
    np.concatenate([x.ravel() for x in y]) for y in (before, after)
  )
  assert before.shape == (4,)
  assert np.any(before > THRESHOLD)
  np.testing.assert_allclose(metrics["max_attention_logit"][0], before.max())
  np.testing.assert_allclose(
    metrics["clipped_heads"][0], np.mean(before > THRESHOLD)
  )
  # The inputs of the second layer change with the first.
  first = slice(0, 2)
  np.testing.assert_allclose(
    after[first], np.minimum(before[first], THRESHOLD), rtol=1e-4
  )
