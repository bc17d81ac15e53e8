"""The chunked loss on eight devices: numbers, and what is sent."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, testing, unembedding
from paxon.layers.losses import softmax_loss
from paxon.sharding import axes, layout, logical, mesh, target

BATCH, LENGTH, EMBED, VOCAB = 8, 16, 8, 48
X = testing.normal(BATCH, LENGTH, EMBED)
TARGETS = np.random.default_rng(2).integers(0, VOCAB, (BATCH, LENGTH))
TARGETS = testing.array(TARGETS, jnp.int32)
WEIGHTS = testing.normal(BATCH, LENGTH, seed=4) ** 2
LOSS = softmax_loss.SoftmaxLoss(
  chunk_length=2, label_smoothing=0.1, z_loss_weight=0.01
)


def _gradient(logits_fn):
  def total(variables, x, targets, weights):
    x = logical.constrain(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    output = LOSS(logits_fn, variables, x, targets=targets, weights=weights)
    return output.loss, output

  return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)


def _heads():
  ids = jnp.zeros((1, 1), jnp.int32)
  table = embedding.Embedding(VOCAB, embed_dim=EMBED)
  head = unembedding.Unembedding(VOCAB)
  attend = lambda v, x: table.apply(v, x, method="attend")  # noqa: E731
  return {"tied": (table, ids, attend), "own": (head, X, head.apply)}


def _collectives(text):
  """Yields computation, operation and element count of what is sent."""
  for computation in re.split(r"\n\n", text):
    for line in computation.splitlines():
      found = re.search(
        r"= (\S.*) (all-gather|all-to-all|reduce-scatter|collective-permute|"
        r"all-reduce|ragged-all-to-all)(-start)?\(",
        line,
      )
      if found:
        for dims in re.findall(r"\w\d+\[([\d,]*)\]", found[1]):
          sizes = [int(n) for n in dims.split(",") if n]
          entry = computation.strip().startswith("ENTRY")
          yield entry, found[2], int(np.prod(sizes))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("text", "head"),
  [
    ("data=2,fsdp=2,tensor=2", "own"),
    ("fsdp=2,tensor=4", "tied"),
    ("data=2,sequence=4", "tied"),
  ],
)
@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu"])
def test_sharded_equals_unsharded(text, head, is_gpu, monkeypatch):
  monkeypatch.setattr(target, "is_gpu", lambda: is_gpu)
  module, example, logits_fn = _heads()[head]
  values = testing.random_values(module, example)
  args = values, X, TARGETS, WEIGHTS
  expected = jax.jit(_gradient(logits_fn))(*args)
  where = _layout(text)
  shardings = where.shardings(testing.specs(module, example))
  batch = where.batch_sharding(2)
  compiled = (
    where.jit(
      _gradient(logits_fn),
      in_shardings=(shardings, where.batch_sharding(3), batch, batch),
      out_shardings=(None, (shardings, where.batch_sharding(3))),
    )
    .lower(*args)
    .compile()
  )
  actual = compiled(*testing.place(args, compiled.input_shardings[0]))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )
  _check_collectives(compiled.as_text(), where, is_gpu)


def _check_collectives(text, where, is_gpu):
  rows = BATCH // where.shards(axes.BATCH)
  states = rows * 2 * EMBED
  kernel = EMBED * VOCAB // where.shards(axes.VOCAB)
  sent = list(_collectives(text))
  # What a loop sends is about its chunk: per token a number, or a state. One
  # reduction of two arrays is finished with the parts of all devices.
  in_loops = {"all-reduce", "all-gather"} if is_gpu else {"all-reduce"}
  assert all(
    op in in_loops and size <= states for entry, op, size in sent if not entry
  )
  # The head's gradient is added up once.
  large = [(op, size) for entry, op, size in sent if size > states and entry]
  assert [size for op, size in large if op == "all-reduce"] == [kernel]
  # The head is gathered for its use; logits never are.
  assert all(size == kernel for op, size in large)
  assert {op for _, op, _ in sent} <= {"all-reduce", "all-gather"}


def _layout(text):
  return layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))
