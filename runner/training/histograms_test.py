"""Tests of histograms of variables, against numpy."""

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from paxon.runner import user_error
from paxon.runner.session import session as session_lib
from paxon.runner.training import histograms, testing, train

KNOBS = {"num_train_steps": 4, "eval_every_steps": None, "max_new_tokens": 0}


def _session(**knobs):
  job, _ = testing.make(**KNOBS, **knobs)
  return session_lib.open_session(job)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "mesh", ["fsdp=8", "fsdp=2,data=4"], ids=["sharded", "both"]
)
def test_values_are_those_of_numpy(mesh):
  session = _session(mesh=mesh)
  state = session.initial_state()
  found = histograms.Histograms(session, every_steps=1).compute(state)
  specs = jax.tree.leaves(session.specs)
  assert set(found) == {spec.name for spec in specs}
  for spec, array in zip(specs, jax.tree.leaves(state.variables), strict=True):
    histogram, x = found[spec.name], np.asarray(array, np.float64).ravel()
    assert histogram.count == x.size == sum(histogram.counts)
    assert (histogram.minimum, histogram.maximum) == (x.min(), x.max())
    assert histogram.total == pytest.approx(x.sum(), rel=1e-4, abs=1e-4)
    assert histogram.total_squares == pytest.approx((x**2).sum(), rel=1e-4)
    assert len(histogram.limits) == len(histogram.counts) == 32
    below = [np.sum(x <= limit) for limit in histogram.limits]
    assert np.cumsum(histogram.counts).tolist() == below


def test_other_values_are_left_out():
  x = jnp.array([[1.0, jnp.nan], [jnp.inf, -3.0]])
  limits, below, total, squares = histograms._histogram(x)
  assert (limits[0], limits[-1], below[-1]) == (-3, 1, 2)
  assert (total, squares) == (-2, 10)
  assert histograms._histogram(jnp.array([jnp.nan]))[1][-1] == 0


def _events(folder):
  """Returns `(step, tag)` of the histograms in event files."""
  found = []
  for path in sorted(folder.glob("train/*")):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])  # pyrefly: ignore
      found += [
        (event.step, value.tag)
        for value in event.summary.value
        if value.HasField("histo")
      ]
      data = data[16 + size :]
  return found


def _train(folder, **settings):
  config = testing.TinyLm(**KNOBS).job()
  for name, value in settings.items():
    setattr(config.observability, name, value)
  folder.mkdir()
  return train.run(fdl.build(config), config, epath.Path(folder))


@pytest.mark.nightly
def test_a_run_writes_them_and_trains_the_same(tmp_path):
  plain = _train(tmp_path / "plain")
  assert _events(tmp_path / "plain" / "events") == []
  shown = _train(
    tmp_path / "shown",
    histogram_every_steps=2,
    histogram_names=r"params/embedding/.*",
  )
  found = _events(tmp_path / "shown" / "events")
  assert {step for step, _ in found} == {2, 4}
  assert all(tag.startswith("variables/params/emb") for _, tag in found)
  assert testing.digest(shown.state) == testing.digest(plain.state)


@pytest.mark.parametrize(
  ("names", "message"),
  [
    ("(", r"histogram_names must be a regular expression, got '\('"),
    ("kernel", r"histogram_names \('kernel'\) matches no floating-point var"),
  ],
)
def test_patterns_are_checked(names, message):
  with pytest.raises(user_error.UserError, match=message):
    histograms.Histograms(_session(), every_steps=1, names=names)
