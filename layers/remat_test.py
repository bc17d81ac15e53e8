"""Tests for rematerialization policies, by what they make JAX save."""

import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat, testing
from paxon.layers.attention import grouped_query
from paxon.layers.stacks import stack
from paxon.sharding import target


def _saved(capsys, fn, policy, *args):
  """What the backward pass keeps, less the arguments of `fn`."""
  ad_checkpoint.print_saved_residuals(jax.checkpoint(fn, policy=policy), *args)
  lines = capsys.readouterr().out.splitlines()
  return [line for line in lines if "from the argument" not in line]


def _named(x):
  first = remat.tag(jnp.sin(x), "first")
  return jnp.sum(jnp.cos(remat.tag(jnp.sin(first), "second")))


def test_save_only_keeps_the_named_values(capsys):
  x = jnp.ones((3,))
  kept = _saved(capsys, _named, remat.save_only("second"), x)
  assert len(kept) == 1
  assert "second" in kept[0]
  both = _saved(capsys, _named, remat.save_only("first", "second"), x)
  assert len(both) == 2


def test_save_nothing_keeps_arguments_only(capsys):
  assert not _saved(capsys, _named, remat.save_nothing, jnp.ones((3,)))


def test_save_projections_keeps_products_with_weights(capsys):
  def fn(x, weight):
    y = jnp.sin(jnp.einsum("BTD,DF->BTF", x, weight))
    return jnp.sum(jnp.sin(jnp.einsum("BTF,BSF->BTS", y, y)))

  args = (jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
  kept = _saved(capsys, fn, remat.save_projections, *args)
  assert ["f32[2,3,5]" in line for line in kept] == [True]


@pytest.mark.parametrize(
  ("name", "count"), [(remat.FEED_FORWARD_HIDDEN, 2), ("other", 3)]
)
def test_recompute_elementwise_saves_what_takes_time(capsys, name, count):
  def fn(x, weight):
    y = jnp.sin(jnp.einsum("BTD,DF->BTF", x, weight))
    y = jax.nn.silu(remat.tag(y, name))
    y = jnp.cumsum(jnp.exp(y), axis=1)
    return jnp.sum(jnp.sin(jnp.sin(y)))

  args = (jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
  kept = _saved(capsys, fn, remat.recompute_elementwise, *args)
  assert ["f32[2,3,5]" in line for line in kept] == [True] * count


def test_one_cpu_saves_bfloat16_as_float32(capsys, monkeypatch):
  x = jnp.linspace(-1, 1, 6, dtype=jnp.bfloat16)
  policy = remat.save_only("second")
  checkpointed = jax.checkpoint(_named, policy=policy)
  kept = _saved(capsys, _named, policy, x)
  assert ["f32[6]" in line for line in kept] == [True]
  on_cpu = [f(checkpointed)(x) for f in (jax.grad, jax.hessian)]
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  jax.clear_caches()
  kept = _saved(capsys, _named, policy, x)
  assert ["bf16[6]" in line for line in kept] == [True]
  elsewhere = [f(_named)(x) for f in (jax.grad, jax.hessian)]
  jax.tree.map(np.testing.assert_array_equal, on_cpu, elsewhere)
  assert jnp.any(elsewhere[1] != 0)


def test_results_of_fused_attention_are_saved_with_projections(capsys):
  def fn(x, weight):
    y = jnp.sin(jnp.einsum("BTD,DF->BTF", x, weight))
    y = remat.tag(jnp.sin(y), remat.ATTENTION_RESIDUALS)
    return jnp.sum(jnp.sin(jnp.einsum("BTF,BSF->BTS", y, y)))

  args = (jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
  for policy, count in (
    (remat.save_projections, 1),
    (remat.save_projections_and_attention, 2),
  ):
    kept = _saved(capsys, fn, policy, *args)
    assert ["f32[2,3,5]" in line for line in kept] == [True] * count


@pytest.mark.parametrize(
  "name",
  [
    remat.ATTENTION_QUERY,
    remat.ATTENTION_KEY,
    remat.ATTENTION_VALUE,
    remat.ATTENTION_CONTEXT,
  ],
)
def test_attention_names_its_values(capsys, name):
  layer = grouped_query.GroupedQueryAttention(2, num_kv_heads=1, head_dim=4)
  x, context = testing.in_context(
    testing.normal(1, 3, 4), testing.make_positions(1, 3), testing.ones(1, 3)
  )
  values = testing.random_values(layer, x, context)

  def loss(values, x):
    return jnp.sum(jnp.sin(layer.apply(values, x, context)))

  kept = _saved(capsys, loss, remat.save_only(name), values, x)
  assert any(name in line for line in kept)


def test_every_layer_names_its_output_and_hidden(capsys):
  layer = feed_forward.GatedFeedForward(8)
  x = testing.normal(1, 3, 4)
  values = testing.random_values(layer, x)

  def loss(values, x):
    return jnp.sum(jnp.sin(layer.apply(values, x)))

  names = (remat.FEED_FORWARD_HIDDEN, remat.FEED_FORWARD_OUTPUT)
  kept = _saved(capsys, loss, remat.save_only(*names), values, x)
  assert [any(name in line for line in kept) for name in names] == [True] * 2


def test_equal_names_make_equal_policies():
  assert remat.save_only("a", "b") == remat.save_only("a", "b")
  assert hash(remat.save_only("a")) == hash(remat.SaveOnly(("a",)))
  assert remat.save_only("a") != remat.save_only("b")


def test_rejects_no_names():
  with pytest.raises(ValueError, match=r"must not be empty; use `save_nothing"):
    remat.save_only()


_JAX = jax.checkpoint_policies


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    (None, None),
    (remat.save_matmuls, remat.save_matmuls),
    ("save_nothing", remat.save_nothing),
    (" layers.remat.save_matmuls", remat.save_matmuls),
    ("nothing_saveable", remat.save_nothing),
    ("jax.checkpoint_policies.checkpoint_dots", remat.save_matmuls),
    (_JAX.nothing_saveable, remat.save_nothing),
    (_JAX.everything_saveable, remat.save_everything),
    (_JAX.dots_saveable, remat.save_matmuls),
    (_JAX.dots_with_no_batch_dims_saveable, remat.save_projections),
    ("save_only_these_names('a', 'b')", remat.save_only("a", "b")),
    ("layers.remat.SaveOnly(('a', 'b'))", remat.save_only("a", "b")),
    ("Offload(names=('a',))", remat.offload("a")),
    (
      "save_projections | save_only('a') | offload('b')",
      remat.save_projections | remat.save_only("a") | remat.offload("b"),
    ),
  ],
)
def test_policies_are_named_by_text_and_by_jax(given, expected):
  assert remat.to_policy(given) == expected
  assert remat.to_policy(remat.to_policy(given)) == expected


@pytest.mark.parametrize(
  "name", [name for name in remat._POLICIES if hasattr(_JAX, name)]
)
def test_policies_of_the_same_name_save_the_same_as_those_of_jax(capsys, name):
  def fn(x, weight):
    y = jnp.sin(jnp.einsum("BTD,DF->BTF", x, weight))
    return jnp.sum(jnp.sin(jnp.einsum("BTF,BSF->BTS", y, y)))

  args = (jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
  ours = _saved(capsys, fn, remat.to_policy(name), *args)
  assert len(ours) == len(_saved(capsys, fn, getattr(_JAX, name), *args))


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ("save_nothin", r"no 'save_nothin'; did you mean 'save_nothing'"),
    ("save_only()", r"names no policy: SaveOnly.names must not be empty"),
    ("save_only(a)", r"remat_policy='save_only\(a\)' names no policy"),
    ("save_only('a'", r"names no policy; write names of layers.remat or"),
    ("", r"remat_policy='' names no policy"),
    ("os.system('x')", r"there is no 'os.system'"),
    ("save_nothing + save_matmuls", r"there is no 'save_nothing \+ save_matm"),
  ],
)
def test_rejects_text_that_names_no_policy(given, message):
  with pytest.raises(ValueError, match=message):
    remat.to_policy(given)


JOINED = remat.save_only("first") | remat.offload("second")


def test_joined_policies_keep_what_either_keeps(capsys):
  kept = _saved(capsys, _named, JOINED, jnp.ones((3,)))
  assert len(kept) == 2
  assert sum("<host>" in line for line in kept) == 1


def test_the_first_policy_that_keeps_a_value_says_where(capsys):
  for policy, moved in (
    (remat.save_only("first") | remat.offload("first", "second"), 1),
    (remat.offload("first", "second") | remat.save_only("first"), 2),
  ):
    kept = _saved(capsys, _named, policy, jnp.ones((3,)))
    assert len(kept) == 2
    assert sum("<host>" in line for line in kept) == moved


def test_functions_and_names_are_joined_in_either_order(capsys):
  def fn(x, weight):
    y = remat.tag(jnp.sin(jnp.einsum("BTD,DF->BTF", x, weight)), "named")
    return jnp.sum(jnp.sin(jnp.einsum("BTF,BSF->BTS", y, y)))

  args = (jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
  name = remat.save_only("named")
  for policy in (name | remat.save_projections, remat.save_projections | name):
    assert len(_saved(capsys, fn, policy, *args)) == 2
  # All products: that of attention, too.
  assert len(_saved(capsys, fn, remat.save_matmuls, *args)) == 2
  moved = _saved(capsys, fn, remat.offload_projections, *args)
  assert ["<host>" in line for line in moved] == [True]


@pytest.mark.parametrize(
  ("policy", "saved"),
  [
    (remat.save_only(*remat.ATTENTION), 5),
    (remat.save_only(*remat.ATTENTION_INPUTS, remat.ATTENTION_OUTPUT), 4),
    (remat.save_only(remat.ATTENTION_OUTPUT), 1),
  ],
)
def test_attention_policies_of_pax(capsys, policy, saved):
  layer = grouped_query.GroupedQueryAttention(2, num_kv_heads=1, head_dim=4)
  x, context = testing.in_context(
    testing.normal(1, 3, 4), testing.make_positions(1, 3), testing.ones(1, 3)
  )
  values = testing.random_values(layer, x, context)

  def loss(values, x):
    return jnp.sum(jnp.sin(layer.apply(values, x, context)))

  kept = _saved(capsys, loss, policy, values, x)
  assert sum("named" in line for line in kept) == saved


@pytest.mark.parametrize("scan", [True, False])
def test_offloaded_values_change_no_number(scan):
  """In a stack, compiled: where there is one memory, a copy within it."""
  names = remat.FEED_FORWARD_HIDDEN, remat.FEED_FORWARD_OUTPUT

  def gradients(policy):
    layers = stack.Stack(
      (feed_forward.GatedFeedForward(8),),
      num_layers=3,
      scan=scan,
      remat_policy=policy,
    )
    x = testing.normal(1, 3, 4)
    values = testing.random_values(layers, x)

    def loss(values):
      return jnp.sum(jnp.sin(layers.apply(values, x)))

    return jax.jit(jax.grad(loss))(values)

  expected = gradients(None)
  for policy in (
    remat.offload(*names),
    remat.save_only(names[0]) | remat.offload(names[1]),
  ):
    jax.tree.map(
      lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
      gradients(policy),
      expected,
    )


def test_joined_policies_are_values():
  again = remat.save_only("first") | remat.offload("second")
  assert again == JOINED
  assert hash(again) == hash(JOINED)
  assert JOINED | remat.save_matmuls == remat.Either(
    (remat.save_only("first"), remat.offload("second"), remat.save_matmuls)
  )


def test_rejects_nothing_to_offload():
  with pytest.raises(ValueError, match=r"Offload.names must not be empty"):
    remat.offload()
