"""Tests for the composition of decoders."""

import functools

import jax
import numpy as np
import pytest

from paxon.layers import embedding, feed_forward, remat, unembedding
from paxon.layers.attention import grouped_query
from paxon.layers.models import decoder_lm, pre_norm_decoder, testing
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack


def _attention():
  return grouped_query.GroupedQueryAttention(4, num_kv_heads=2, head_dim=4)


def _composed(make=pre_norm_decoder.build, **fields):
  return pre_norm_decoder.compose(
    make,
    embedding=embedding.Embedding(testing.VOCAB, embed_dim=testing.EMBED),
    norm=functools.partial(make, rms_norm.RmsNorm, epsilon=1e-5),
    attention=_attention(),
    feed_forward=feed_forward.GatedFeedForward(12),
    num_layers=3,
    **fields,
  )


def _by_hand(**fields):
  norm = functools.partial(rms_norm.RmsNorm, epsilon=1e-5)
  layer = block.TransformerBlock(
    norm(), _attention(), norm(), feed_forward.GatedFeedForward(12)
  )
  table = embedding.Embedding(testing.VOCAB, embed_dim=testing.EMBED)
  layers = stack.Stack((layer,), num_layers=3)
  return decoder_lm.DecoderLm(table, layers, norm(), **fields)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("head", [None, unembedding.Unembedding(testing.VOCAB)])
def test_is_what_would_be_written_by_hand(head):
  args = testing.token_args(testing.packed_batch([[5, 3], [8]], 8))
  composed = _composed(head=head, logit_cap=2.0)
  by_hand = _by_hand(head=head, logit_cap=2.0)
  variables = jax.jit(by_hand.init)(jax.random.key(0), *args)
  assert jax.tree.structure(variables) == jax.tree.structure(
    jax.eval_shape(composed.init, jax.random.key(0), *args)
  )
  np.testing.assert_array_equal(
    jax.jit(composed.apply)(variables, *args),
    jax.jit(by_hand.apply)(variables, *args),
  )


def test_the_stack_gets_its_settings():
  made = _composed(scan=False, remat_policy=remat.save_nothing)
  assert made.stack.num_layers == 3
  assert not made.stack.scan
  assert made.stack.remat_policy is remat.save_nothing


def test_every_part_is_made_by_the_caller_and_stands_once():
  made = []

  class Part:
    pass

  def make(cls, **fields):
    made.append((cls, fields))
    return Part()

  root = _composed(make)
  names = [cls.__name__ for cls, _ in made]
  assert names == [
    *("RmsNorm", "RmsNorm", "TransformerBlock", "Stack", "RmsNorm", "DecoderLm")
  ]
  fields = [x for _, given in made for x in given.values()]
  parts = [id(x) for x in jax.tree.leaves(fields) if isinstance(x, Part)]
  assert len(parts) == len(set(parts)) == len(made) - 1
  assert id(root) not in parts
