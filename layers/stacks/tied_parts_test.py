"""Tests for the check of parameters that are tied by accident."""

from flax import linen as nn
import pytest

from paxon.layers import embedding, feed_forward, testing
from paxon.layers.attention import grouped_query
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, shared, stack, tied_parts


def _block(norms=None, attention=None, dropout=None):
  first, second = norms or (rms_norm.RmsNorm(), rms_norm.RmsNorm())
  attention = attention or grouped_query.GroupedQueryAttention(
    2, num_kv_heads=1, head_dim=2
  )
  return block.TransformerBlock(
    first, attention, second, feed_forward.GatedFeedForward(4), dropout
  )


class Model(nn.Module):
  """Embedding, stack and norm."""

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module

  def __call__(self, ids, *args):
    """Returns the normed output of the stack."""
    return self.final_norm(self.stack(self.embedding(ids), *args))


def _model(*blocks, final_norm=None):
  return Model(
    embedding.Embedding(8, embed_dim=4),
    stack.Stack(blocks, num_layers=2 * len(blocks)),
    final_norm or rms_norm.RmsNorm(),
  )


def _check(model):
  ids = testing.make_positions(1, 3)
  calls = []

  def variables_of(m):
    calls.append(m)
    return testing.specs(m, *testing.in_context(ids, ids, testing.ones(1, 3)))

  tied_parts.check(model, variables_of)
  return len(calls)


def test_a_model_of_distinct_parts_costs_nothing():
  assert _check(_model(_block())) == 0


def test_one_norm_in_two_fields_of_a_block_is_an_error():
  norm = rms_norm.RmsNorm()
  message = (
    r"One RmsNorm object is in two fields, stack.blocks.attention_norm and "
    r"stack.blocks.feed_forward_norm, .*params/stack/layers/blocks_0/"
    r"feed_forward_norm/scale.*layers\.stacks\.shared"
  )
  with pytest.raises(ValueError, match=message):
    _check(_model(_block((norm, norm))))


def test_one_part_in_two_models_fields_is_an_error():
  table = embedding.Embedding(8, embed_dim=4)

  class Two(nn.Module):
    first: nn.Module
    second: nn.Module

    def __call__(self, ids, *args):
      del args
      return self.first(ids) + self.second(ids)

  with pytest.raises(ValueError, match=r"One Embedding .* first and second"):
    _check(Two(table, table))
  marked = (shared.shared("table", embedding.Embedding(8, embed_dim=4)),) * 2
  _check(Two(*marked))


def test_what_blocks_of_a_stack_have_in_common_is_no_sharing():
  """Blocks are templates: each layer gets a copy of its own."""
  attention = grouped_query.GroupedQueryAttention(2, num_kv_heads=1, head_dim=2)
  one, two = (_block(attention=attention) for _ in range(2))
  assert _check(_model(one, two)) > 0
  assert _check(_model(one, one)) == 0


def test_a_part_without_parameters_may_stand_anywhere():
  dropout = nn.Dropout(0.1)
  assert _check(_model(_block(dropout=dropout), _block(dropout=dropout))) > 0


def test_a_part_inside_and_outside_of_a_stack_is_an_error():
  """Linen would store the outer one's parameters under the inner's name."""
  norm = rms_norm.RmsNorm()
  model = _model(_block((norm, rms_norm.RmsNorm())), final_norm=norm)
  with pytest.raises(ValueError, match=r"params/final_norm/scale is missing"):
    _check(model)
