"""Tests for what fits into memory."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner import user_error
from paxon.runner.session import memory_fit
from paxon.runner.session import session as session_lib
from paxon.runner.training import preflight, testing


def test_shards_are_counted_on_one_device():
  mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  tree = {
    "split": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=split),
    "whole": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
  }
  assert memory_fit.shard_bytes(tree) == 2 * 3 * 4 + 5 * 2


def test_the_largest_loop_is_found_wherever_it_is():
  def body(x, _):
    return x + 1.0, jnp.zeros((10, 10))

  def program(x):
    return jax.jit(lambda x: jax.lax.scan(body, x, None, length=7))(x)

  jaxpr = jax.make_jaxpr(program)(jnp.zeros((3,)))
  assert memory_fit.loop_bytes(jaxpr) == 4 * (3 + 7 * 100)
  assert memory_fit.loop_bytes(jax.make_jaxpr(jnp.sin)(1.0)) == 0


def test_rejects_what_does_not_fit_with_sizes():
  needs = {"state": 3 * 2**40, "data": 20}
  message = r"needs 3\.00 TiB for state and 20 B for data, but has 1\.00 GiB"
  with pytest.raises(user_error.UserError, match=message):
    memory_fit.check(needs, advice="do less", limit=2**30)
  memory_fit.check(needs, advice="do less", limit=2**43)


def test_rejects_a_batch_beyond_the_machine_before_reading(monkeypatch):
  job, _ = testing.make()
  monkeypatch.setattr(memory_fit, "host_bytes", lambda: 8 * 8 * 16 - 1)
  message = r"global_batch_size \(8\) times length \(16\) does not fit"
  with pytest.raises(user_error.UserError, match=message):
    memory_fit.check_batch(job.train_input)


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    pytest.param({"embed_dim": 10**8}, r"[TPE]iB for state", id="state"),
    pytest.param(
      {"max_new_tokens": 2 * 10**9}, r"for cache, but has", id="cache"
    ),
  ],
)
def test_rejects_a_job_that_cannot_fit(knobs, message):
  job, _ = testing.make(**knobs)
  session = session_lib.open_session(job)
  with pytest.raises(user_error.UserError, match=message):
    preflight.check(session)
  # Another machine may have the memory: it can still be traced here.
  preflight.trace(session)
