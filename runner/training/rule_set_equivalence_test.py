"""Tests that rule sets change neither the numbers nor send what they need not.

Each set trains a dense model on eight devices, two also one whose attention is
a ring over a split row; the losses of five steps are those of one device.
"""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.attention import ring
from paxon.learners import metrics as metrics_lib
from paxon.runner.plan.program_text import (
  collectives,
  dataflow,
  hlo,
  movements,
)
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing
from paxon.sharding import rule_sets

STEPS = 5
# Norms, losses and the scales of norms; the smallest kernel's part is larger.
SMALL_BYTES = 1024
FAILURE = "Involuntary full rematerialization"

WEIGHTS = dataflow.Data.WEIGHTS
ACTIVATIONS = dataflow.Data.ACTIVATIONS
GRADIENTS = dataflow.Data.GRADIENTS
GATHER, REDUCE, PERMUTE = "all-gather", "all-reduce", "collective-permute"

DENSE, RING = "dense", "ring"
# Model, rules and mesh; then which data is sent how, over which mesh axes. The
# compiler for CPUs knows no reduce-scatter: it reduces all and takes a part.
CASES = {
  (DENSE, "data", "data=8"): {(REDUCE, GRADIENTS): {"data"}},
  (DENSE, "fsdp", "data=2,fsdp=4"): {
    (GATHER, WEIGHTS): {"fsdp"},
    (REDUCE, GRADIENTS): {"data", "fsdp"},
  },
  (DENSE, "tensor", "data=4,tensor=2"): {
    (REDUCE, ACTIVATIONS): {"tensor"},
    (REDUCE, GRADIENTS): {"data"},
  },
  # As `tensor`, but what is between layers is gathered; so is its gradient.
  (DENSE, "2d", "data=2,fsdp=2,tensor=2"): {
    (GATHER, WEIGHTS): {"fsdp"},
    (GATHER, ACTIVATIONS): {"tensor"},
    (GATHER, GRADIENTS): {"tensor"},
    (REDUCE, ACTIVATIONS): {"tensor"},
    (REDUCE, GRADIENTS): {"data", "fsdp"},
  },
  # The same over the sequences between layers, as in Megatron.
  (DENSE, "megatron_sequence", "data=2,fsdp=2,tensor=2"): {
    (GATHER, WEIGHTS): {"fsdp"},
    (GATHER, ACTIVATIONS): {"tensor"},
    (GATHER, GRADIENTS): {"tensor"},
    (REDUCE, ACTIVATIONS): {"tensor"},
    (REDUCE, GRADIENTS): {"data", "fsdp"},
  },
  # Attention by XLA gathers keys and values, and reduces their gradients.
  (DENSE, "fsdp+sequence", "fsdp=2,sequence=4"): {
    (GATHER, WEIGHTS): {"fsdp", "sequence"},
    (GATHER, ACTIVATIONS): {"sequence"},
    (REDUCE, ACTIVATIONS): {"sequence"},
    (REDUCE, GRADIENTS): {"fsdp", "sequence"},
  },
  (DENSE, "expert", "data=2,expert=4"): {
    (GATHER, WEIGHTS): {"expert"},
    (REDUCE, GRADIENTS): {"data", "expert"},
  },
  (DENSE, "weight_stationary", "data=2,fsdp=2,tensor=2"): {
    (REDUCE, ACTIVATIONS): {"fsdp", "tensor"},
    (REDUCE, GRADIENTS): {"data"},
  },
  (DENSE, "replicated", "data=2,fsdp=2,sequence=2"): {
    (REDUCE, GRADIENTS): {"data", "fsdp", "sequence"},
  },
  (RING, "sequence", "data=2,sequence=4"): {
    (GATHER, WEIGHTS): {"sequence"},
    (PERMUTE, ACTIVATIONS): {"sequence"},
    (REDUCE, GRADIENTS): {"data", "sequence"},
  },
  (RING, "fsdp+tensor+sequence", "fsdp=2,sequence=2,tensor=2"): {
    (GATHER, WEIGHTS): {"fsdp", "sequence"},
    (PERMUTE, ACTIVATIONS): {"sequence"},
    (REDUCE, ACTIVATIONS): {"tensor"},
    (REDUCE, GRADIENTS): {"fsdp", "sequence"},
  },
}


def _session(model, rules, mesh, devices=None):
  config = testing.TinyLm(
    mesh=mesh, rules=rules, num_train_steps=20, global_batch_size=16
  ).job()
  if model == RING:
    (block,) = config.task.model.stack.blocks
    block.attention.kernel = fdl.Config(ring.Ring)
  return session_lib.open_session(fdl.build(config), devices=devices)


@functools.cache
def _initial():
  # A kernel has no variables, and no layout changes the first values.
  session = _session(DENSE, rule_sets.DEFAULT, "data=1", jax.devices()[:1])
  return jax.device_get(session.initial_state())


def _losses(session, step):
  source = session.job.train_input
  source.reset()
  state = jax.device_put(_initial(), session.state_shardings)
  losses = []
  for _ in range(STEPS):
    state, metrics = step(state, session.place(source.get_next()))
    totals = metrics_lib.Totals()
    totals.add(metrics)
    losses.append(totals.means()["loss"])
  return np.asarray(losses)


@functools.cache
def _expected(model):
  session = _session(model, rule_sets.DEFAULT, "data=1", jax.devices()[:1])
  return _losses(session, compiled_steps.compile_train_step(session))


def _sent(session, step):
  """What is sent: mesh axes by kind and data, the small apart, and gathers."""
  program = hlo.parse(step.as_text())
  found = collectives.find(program, mesh=dict(session.layout.mesh.shape))
  moved = [
    m
    for m in movements.find(program, found) or ()
    if m.collective.group_size > 1
  ]
  large, small = {}, set()
  for m in moved:
    key = m.collective.kind, m.data
    if m.payload_bytes < SMALL_BYTES:
      small.add(m.collective.kind)
    else:
      large.setdefault(key, set()).update(m.collective.axes)
  gathered = sum(
    m.total_bytes
    for m in moved
    if (m.collective.kind, m.data) == (GATHER, WEIGHTS)
  )
  return large, small, gathered


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "case", CASES, ids=[f"{rules} {model}" for model, rules, _ in CASES]
)
def test_losses_and_collectives(case, capfd):
  session = _session(*case)
  step = compiled_steps.compile_train_step(session)
  assert FAILURE not in capfd.readouterr().err
  large, small, gathered = _sent(session, step)
  assert large == CASES[case]
  # Scales are split as weights are, but used as activations are.
  assert small <= {REDUCE, *(kind for kind, _ in large), PERMUTE}
  # Each weight is whole at most once a pass.
  weights = jax.tree.leaves(_initial().variables)
  assert gathered <= 2 * sum(w.nbytes for w in weights)
  np.testing.assert_allclose(
    _losses(session, step), _expected(case[0]), rtol=1e-6
  )


def test_all_rule_sets_are_here():
  tested = {part for _, rules, _ in CASES for part in rules.split("+")}
  # `mesh_equivalence_test` has the default.
  assert tested == set(rule_sets.NAMES) - {rule_sets.DEFAULT}


def test_the_compiler_still_reports_full_gathers(capfd):
  mesh = jax.make_mesh(
    (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  before, after = (
    jax.sharding.NamedSharding(mesh, jax.P(*spec))
    for spec in ((None, "b"), ("a", None))
  )

  def resharded(x):
    return 2 * jax.lax.with_sharding_constraint(jnp.sin(x), after)

  x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=before)
  jax.jit(resharded).lower(x).compile()
  assert FAILURE in capfd.readouterr().err
