"""Tests for the counting of FLOPs."""

import types

import fiddle as fdl
from flax import linen as nn
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, feed_forward, remat, unembedding
from paxon.layers.attention import grouped_query, kernels, ring, splash
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import decoder_lm
from paxon.layers.moe import dispatch, experts, mixture, routers
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import block, stack
from paxon.learners import learner, schedules, train_state, train_step
from paxon.learners.optimizers import adamw
from paxon.runner.plan import flops, kernel_flops
from paxon.runner.session import compiled_steps, model_loss
from paxon.runner.session import session as session_lib
from paxon.runner.training import pipelined_testing
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables

_Phase = flops.Phase


def _decoder(shape, **stack_fields) -> decoder_lm.DecoderLm:
  heads, kv_heads, head_dim = shape["N"], shape["K"], shape["H"]
  layer = block.TransformerBlock(
    attention_norm=rms_norm.RmsNorm(),
    attention=grouped_query.GroupedQueryAttention(
      heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      rotary=rotary_embedding.Rotary(),
    ),
    feed_forward_norm=rms_norm.RmsNorm(),
    feed_forward=feed_forward.GatedFeedForward(shape["F"]),
  )
  tied = shape.get("tied", True)
  return decoder_lm.DecoderLm(
    embedding=embedding.Embedding(shape["V"], embed_dim=shape["D"]),
    stack=stack.Stack((layer,), num_layers=shape["L"], **stack_fields),
    final_norm=rms_norm.RmsNorm(),
    head=None if tied else unembedding.Unembedding(shape["V"]),
  )


def _trace(shape, num_microbatches=1, **stack_fields):
  """Traces the real train step; nothing is computed."""
  model = _decoder(shape, **stack_fields)
  rows = jax.ShapeDtypeStruct((shape["B"], shape["T"]), jnp.int32)
  batch = dict.fromkeys(
    ("inputs", "targets", "positions", "segment_ids"), rows
  ) | {"weights": jax.ShapeDtypeStruct(rows.shape, jnp.float32)}
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  learn = learner.Learner(
    optimizer=adamw.AdamW(
      schedule=schedules.WarmupCosine(peak=1e-3, warmup_steps=1, total_steps=9)
    ),
    max_grad_norm=1.0,
    num_microbatches=num_microbatches,
  )
  step = train_step.make_train_step(
    model_loss.make_loss_fn(model, specs=specs, deterministic=False),
    learner=learn,
    specs=specs,
    seed=0,
  )
  state = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype),
    train_state.state_specs(specs, learner=learn),
  )
  traced = jax.jit(step).trace(state, batch)
  params = sum(
    int(np.prod(spec.shape))
    for spec in jax.tree.leaves(specs)
    if "norm" not in spec.name
    and not (spec.name.endswith("embedding/table") and not shape.get("tied", 1))
  )
  return traced, params


_SMALL = {"B": 2, "T": 16, "D": 8, "F": 24, "N": 4, "K": 2, "H": 4}
_SHAPES = [
  pytest.param(_SMALL | {"L": 3, "V": 32}, id="grouped"),
  pytest.param(
    {"B": 3, "T": 8, "D": 16, "F": 20, "N": 2, "K": 1, "H": 12, "L": 2}
    | {"V": 40, "tied": False},
    id="untied",
  ),
  pytest.param(
    {"B": 1, "T": 48, "D": 32, "F": 8, "N": 8, "K": 8, "H": 2, "L": 5}
    | {"V": 11},
    id="long",
  ),
]


def _expected(shape, params):
  """The identity of the module's docstring, as (all, attention only)."""
  B, T, L = shape["B"], shape["T"], shape["L"]
  attention = 12 * L * shape["N"] * shape["H"] * T**2 * B
  return 6 * params * B * T + attention, attention


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_attention_that_computes_logits_twice(scan):
  # `one_pass` does, for 64 tokens on a CPU; logits are one of six matmuls.
  shape = _SMALL | {"T": 64, "L": 3, "V": 32}
  traced, params = _trace(shape, scan=scan)
  total, attention = _expected(shape, params)
  found = flops.count(traced.jaxpr)
  assert found.hardware_flops - attention // 6 == found.model_flops == total


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_train_step_costs_what_the_formula_says(shape, scan):
  traced, params = _trace(shape, scan=scan)
  found = flops.count(traced.jaxpr)
  total, attention = _expected(shape, params)
  assert found.notes == ()
  assert found.model_flops == found.hardware_flops == total
  assert found.count_by("kind")["attention"] == attention
  # Backward is twice forward: one product for each operand's gradient.
  assert found.phase(_Phase.BACKWARD) == 2 * found.phase(_Phase.FORWARD)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_recomputation_is_apart(scan):
  shape = _SHAPES[0].values[0]
  traced, params = _trace(shape, scan=scan, remat_policy=remat.save_nothing)
  found = flops.count(traced.jaxpr)
  total, _ = _expected(shape, params)
  assert found.model_flops == total
  # Of each block all is computed again but its last product, `down`.
  B, T, L, D, F = (shape[k] for k in "BTLDF")
  head = 2 * B * T * D * shape["V"]
  down = 2 * B * T * L * D * F
  assert found.phase(_Phase.REMAT) == total // 3 - head - down
  assert found.hardware_flops == total + found.phase(_Phase.REMAT)


def test_microbatches_change_nothing():
  shape = _SHAPES[0].values[0]
  traced, params = _trace(shape, num_microbatches=2)
  assert flops.count(traced.jaxpr).model_flops == _expected(shape, params)[0]


def test_causal_attention_is_half_and_half_a_row():
  shape = _SHAPES[0].values[0]
  traced, params = _trace(shape)
  total, attention = _expected(shape, params)
  T = shape["T"]
  visible = sum(t + 1 for t in range(T)) / T**2
  found = flops.count(traced.jaxpr).causal_model_flops(T)
  assert found == pytest.approx(total - attention + visible * attention)


def test_sums_by_part_of_the_model():
  shape = _SHAPES[0].values[0]
  traced, _ = _trace(shape, remat_policy=remat.save_nothing)
  found = flops.count(traced.jaxpr)
  B, T, L, D, F = (shape[k] for k in "BTLDF")
  block_path = "DecoderLm/stack/layers/blocks_0"
  parts = found.count_by("part", remat=False)
  assert parts.pop(f"{block_path}/feed_forward") == 3 * 6 * B * T * L * D * F
  projections = 2 * D * shape["H"] * (shape["N"] + shape["K"])
  _, attention = _expected(shape, 0)
  assert (
    parts.pop(f"{block_path}/attention")
    == 6 * B * T * L * projections + attention
  )
  # What is left is the tied head.
  (head,) = parts
  assert head.startswith("DecoderLm/")
  assert parts[head] == 6 * B * T * D * shape["V"]
  assert found.count_by("dtype") == {"float32": found.hardware_flops}


def test_agrees_with_xla_on_an_unrolled_program():
  shape = {"B": 2, "T": 64, "D": 192, "F": 512, "N": 4, "K": 4, "H": 32}
  traced, _ = _trace(shape | {"L": 2, "V": 256}, scan=False)
  ours = flops.count(traced.jaxpr).hardware_flops
  costs = traced.lower().cost_analysis()
  assert costs is not None
  # XLA also counts elementwise work.
  assert 1.0 < costs["flops"] / ours < 1.04


def _count(function, *shapes):
  args = [
    s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, jnp.float32)
    for s in shapes
  ]
  return flops.count(jax.jit(function).trace(*args).jaxpr)


def test_loops_count_every_trip():
  def loop(x):
    y, _ = jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)
    return jax.lax.fori_loop(0, 3, lambda _, c: c @ c, y)

  assert _count(loop, (4, 4)).hardware_flops == 8 * 2 * 4**3


def test_a_loop_of_unknown_length_is_counted_once_and_said():
  def loop(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ c, x)

  found = _count(loop, (4, 4))
  assert found.hardware_flops == 2 * 4**3
  (note,) = found.notes
  assert "while loop" in note
  assert "counted once" in note


def test_a_condition_costs_its_dearest_branch():
  def choose(x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

  assert _count(choose, (4, 4)).hardware_flops == 2 * 2 * 4**3

  def expect(x):
    usual = jax.named_scope("usual_branch")(lambda x: x @ x)
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ x @ x, usual, x)

  assert _count(expect, (4, 4)).hardware_flops == 2 * 4**3


def test_outer_products_are_elementwise():
  assert (
    _count(lambda x, y: jnp.einsum("i,j->ij", x, y), (3,), (4,)).counts == {}
  )


def test_convolutions_and_their_gradients():
  def conv(x, w):
    return jax.lax.conv_general_dilated(
      x,
      w,
      (2, 2),
      "VALID",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=2,
    ).sum()

  x, w = (3, 8, 8, 4), (2, 2, 2, 6)
  forward = 2 * (3 * 4 * 4 * 6) * (2 * 2 * 2)
  assert _count(conv, x, w).count_by("kind") == {"convolution": forward}
  found = _count(jax.value_and_grad(conv, (0, 1)), x, w)
  assert found.phase(_Phase.FORWARD) == forward
  assert found.phase(_Phase.BACKWARD) == 2 * forward


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_count_no_padding(stride):
  def conv(x, w):
    return jax.lax.conv_general_dilated(
      x,
      w,
      (stride,),
      ((2, 1),),
      dimension_numbers=("NTC", "TIO", "NTC"),
    ).sum()

  # Windows of four of seven inputs, with two zeros before and one after.
  positions = [
    start + i
    for start in range(-2, 7 + 1 - 3, stride)
    for i in range(4)
    if 0 <= start + i < 7
  ]
  forward = 2 * 3 * 5 * 6 * len(positions)
  found = _count(jax.value_and_grad(conv, (0, 1)), (3, 7, 5), (4, 5, 6))
  assert found.phase(_Phase.FORWARD) == forward
  assert found.phase(_Phase.BACKWARD) == 2 * forward


def test_ragged_products_and_their_gradients():
  sizes = jax.ShapeDtypeStruct((3,), jnp.int32)

  def ragged(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes).sum()

  found = _count(jax.value_and_grad(ragged, (0, 1)), (8, 4), (3, 4, 5), sizes)
  assert found.phase(_Phase.FORWARD) == 2 * 8 * 4 * 5
  assert found.phase(_Phase.BACKWARD) == 2 * (2 * 8 * 4 * 5)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mesh", [{}, {"expert": 8}, {"expert": 4, "fsdp": 2}])
@pytest.mark.parametrize("bound", [None, 1.5])
def test_a_mixture_counts_the_chosen_experts(mesh, bound):
  layer = mixture.MixtureOfExperts(
    num_experts=8,
    router=routers.TopK(k=2),
    experts=experts.GatedExperts(mlp_dim=48),
    dispatch=dispatch.Dropless(bound=bound),
  )
  x = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)

  def loss(variables, x):
    return layer.apply(variables, x).sum()

  values = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))
  jit = jax.jit
  if mesh:
    jit = layouts.Layout(meshes.make_mesh(meshes.MeshSpec(ici=mesh))).jit
  step = jit(jax.value_and_grad(loss, (0, 1)))
  found = flops.count(step.trace(values, x).jaxpr)
  # Two experts of three matrices for each token.
  forward = 2 * (8 * 16) * 2 * (3 * 32 * 48)
  grouped = {
    phase: sum(
      count
      for key, count in found.counts.items()
      if key.phase is phase and key.kind is flops.Kind.GROUPED
    )
    for phase in _Phase
  }
  assert grouped == {
    _Phase.FORWARD: forward,
    _Phase.BACKWARD: 2 * forward,
    _Phase.REMAT: 0,
  }
  assert not any("trips" in note for note in found.notes)


def test_a_mixture_in_a_loop_of_layers_that_are_recomputed():
  layer = mixture.MixtureOfExperts(
    num_experts=8,
    router=routers.TopK(k=2),
    experts=experts.GatedExperts(mlp_dim=48),
  )
  x = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
  values = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))

  def loss(values, x):
    def body(x, _):
      return jax.checkpoint(layer.apply)(values, x), None

    return jax.lax.scan(body, x, length=3)[0].sum()

  found = flops.count(jax.jit(jax.grad(loss)).trace(values, x).jaxpr)
  product = 3 * 2 * (8 * 16) * 2 * (32 * 48)
  grouped = {
    key.phase: count
    for key, count in found.counts.items()
    if key.kind is flops.Kind.GROUPED
  }
  # The output of the last product need not be computed again.
  assert grouped == {
    _Phase.FORWARD: 3 * product,
    _Phase.REMAT: 2 * product,
    _Phase.BACKWARD: 6 * product,
  }


def test_a_part_of_each_device_is_multiplied():
  mesh = jax.make_mesh(
    (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )

  def body(x):
    return x @ x.T

  def mapped(names):
    spec = jax.P(tuple(names))
    return jax.shard_map(
      body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names
    )

  # Each device multiplies its [1, 4]; along `a` alone, its [4, 4].
  assert _count(mapped({"a", "b"}), (8, 4)).hardware_flops == 8 * 2 * 1 * 1 * 4
  assert _count(mapped({"a"}), (8, 4)).hardware_flops == 2 * 2 * 4 * 4 * 4


def test_custom_derivatives_are_entered():
  @jax.custom_vjp
  def square(x):
    return x @ x

  square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
  assert _count(square, (4, 4)).hardware_flops == 2 * 4**3
  found = _count(jax.value_and_grad(lambda x: square(x).sum()), (4, 4))
  assert found.phase(_Phase.FORWARD) == 2 * 4**3
  assert found.phase(_Phase.BACKWARD) == 2 * 2 * 4**3


def _pallas(x, y, *, estimate=None):
  def kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] @ y_ref[...]

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((8, 4), jnp.float32),
    grid=(2,),
    in_specs=[
      pl.BlockSpec((4, 4), lambda i: (i, 0)),
      pl.BlockSpec((4, 4), lambda i: (0, 0)),
    ],
    out_specs=pl.BlockSpec((4, 4), lambda i: (i, 0)),
    name="my_matmul",
    cost_estimate=estimate,
  )(x, y)


def test_kernels_by_estimate_or_by_their_body():
  shapes = (8, 4), (4, 4)
  by_body = _count(_pallas, *shapes)
  assert by_body.count_by("kind") == {"kernel": 2 * 8 * 4 * 4}

  estimate = pl.CostEstimate(flops=77, bytes_accessed=1, transcendentals=0)
  by_estimate = _count(lambda x, y: _pallas(x, y, estimate=estimate), *shapes)
  assert by_estimate.hardware_flops == 77


@pytest.mark.parametrize(
  ("kernel", "recomputed", "rows"),
  [
    # Splash has one more product, of each result with its gradient.
    pytest.param(splash.Splash(), 3, 1, id="splash"),
    pytest.param(splash.Splash(fused_backward=True), 1, 1, id="splash, fused"),
    pytest.param(ring.Ring(block_q=64, block_kv=32), 1, 0, id="ring"),
  ],
)
def test_attention_kernels_count_as_plain_attention(kernel, recomputed, rows):
  ids = jnp.ones((2, 128), jnp.int32)
  mask = attention_mask.AttentionMask(
    q_positions=ids, kv_positions=ids, q_segment_ids=ids, kv_segment_ids=ids
  )

  def count(kernel):
    def loss(*inputs):
      # The name of the module that calls it.
      with jax.named_scope("attention"):
        return jnp.sum(kernel(*inputs, mask))

    shapes = (2, 128, 4, 16), (2, 128, 2, 16), (2, 128, 2, 16)
    # With the loss, whose matmul is dead code of the gradients alone.
    return _count(jax.value_and_grad(loss, argnums=(0, 1, 2)), *shapes)

  found, expected = count(kernel), count(kernels.plain)
  row = 2 * (2 * 4 * 128 * 16)
  product, rows = 128 * row, rows * row
  assert found.phase(_Phase.FORWARD) == expected.phase(_Phase.FORWARD)
  assert expected.model_flops == 6 * product
  assert found.model_flops == 6 * product + rows
  assert found.phase(_Phase.REMAT) == recomputed * product
  assert {key.kind for key in found.counts} == {flops.Kind.ATTENTION}
  assert {key.dtype for key in found.counts} == {"float32"}


class _Pipelined(pipelined_testing.PipelinedLm):
  num_layers = 4
  circular_repeats: int = 1

  def adjust(self, config):
    super().adjust(config)
    if self.circular_repeats > 1:
      config.task.model.stack.circular_repeats = self.circular_repeats


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("stages", "knobs", "live"),
  [
    pytest.param(None, {}, 1.0, id="plain"),
    # Four microbatches: 5 ticks of 2 stages, 7 of 4 stages.
    pytest.param(2, {}, 4 / 5, id="2 stages"),
    pytest.param(4, {}, 4 / 7, id="4 stages"),
    # Each microbatch passes twice: 2 x 4 + 1 ticks.
    pytest.param(2, {"circular_repeats": 2}, 8 / 9, id="circular"),
    # Three layers on two stages of two: the last has an empty place.
    pytest.param(2, {"num_layers": 3}, 4 / 5 * 3 / 4, id="uneven"),
    pytest.param(2, {"schedule": "1f1b"}, None, id="1f1b"),
    pytest.param(
      2, {"schedule": "1f1b", "residuals": "save"}, None, id="1f1b, saved"
    ),
  ],
)
def test_a_pipeline_has_the_model_flops_of_the_formula(stages, knobs, live):
  mesh = "data=-1" if stages is None else f"data=-1,stage={stages}"
  job = fdl.build(_Pipelined(num_stages=stages, mesh=mesh, **knobs).job())
  session = session_lib.open_session(job, devices=jax.devices()[:4])
  found = flops.count(compiled_steps.trace_train_step(session).jaxpr)
  B, T = session.batch["inputs"].shape
  params = sum(
    int(np.prod(spec.shape))
    for spec in jax.tree.leaves(session.specs)
    if "norm" not in spec.name and not spec.name.endswith("bias")
  )
  L, N, H = knobs.get("num_layers", 4), 2, 8
  attention = 12 * L * N * H * T**2 * B
  assert found.model_flops == 6 * params * B * T + attention
  hidden = 1 - (1 + 1 / T) / 2
  assert found.model_flops - found.causal_model_flops(T) == pytest.approx(
    hidden * attention
  )
  if live is None:
    assert 0 < found.bubble_flops < 0.7 * found.hardware_flops
  else:
    # The head is computed outside of the stages, once.
    head = 6 * B * T * 16 * session.job.task.model.embedding.vocab_size
    inside = found.hardware_flops - head
    assert found.bubble_flops == pytest.approx((1 - live) * inside)


_CAUSAL = attention_mask.MaskRules(causal=True)
_FULL = attention_mask.MaskRules(causal=False)


@pytest.mark.parametrize(
  ("masks", "share"),
  [
    # Blocks of 128: of 4 x 4 those on and below the diagonal.
    pytest.param([_CAUSAL], 10 / 16, id="causal"),
    pytest.param([_FULL], 1.0, id="full"),
    # A window of a block reaches the block before.
    pytest.param(
      [attention_mask.MaskRules(causal=True, window=128)], 7 / 16, id="window"
    ),
    # Those of an encoder skip nothing.
    pytest.param([_FULL, _CAUSAL], 13 / 16, id="encoder and decoder"),
  ],
)
def test_blocks_that_splash_skips(masks, share):
  kernel = splash.Splash(block_q=128, block_kv=128, interpret=True)
  ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

  def loss(q, k, v, ids):
    for i, rules in enumerate(masks):
      mask = attention_mask.AttentionMask(
        q_positions=ids,
        kv_positions=ids,
        q_segment_ids=ids,
        kv_segment_ids=ids,
        rules=rules,
      )

      def layer(q, _, mask=mask):
        return jax.checkpoint(lambda q: kernel(q, k, v, mask))(q), None

      with jax.named_scope(f"part_{i}"):
        q = jax.lax.scan(layer, q, None, length=3)[0]
    return q.sum()

  shapes = [jax.ShapeDtypeStruct((2, 512, 4, 16), jnp.float32)] * 3
  traced = jax.jit(jax.grad(loss)).trace(*shapes, ids)
  found = flops.count(traced.jaxpr)
  assert found.attention_share() == pytest.approx(share)
  executed = sum(found.count_executed().values())
  row = found.count_by("kind").get("matmul", 0)
  assert executed - row == pytest.approx(share * (found.hardware_flops - row))


@pytest.mark.parametrize(
  ("params", "share"),
  [
    # Of 8 x 8 pairs 36; with a window of 2 tokens 1 + 7 x 2.
    ({"mask_type": 2, "sliding_window_length": None}, 36 / 64),
    ({"mask_type": 3, "sliding_window_length": 0}, 36 / 64),
    ({"mask_type": 2, "sliding_window_length": 2}, 15 / 64),
    # Packed documents: a bias, and no block is skipped.
    ({"mask_type": 0, "sliding_window_length": None}, None),
  ],
)
def test_pairs_that_cudnn_skips(params, share):
  aval = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
  eqn = types.SimpleNamespace(
    primitive=types.SimpleNamespace(name="dot_product_attention_fwd"),
    params=params | {"layout": 0},
    invars=[types.SimpleNamespace(aval=aval)] * 3,
  )
  found = kernel_flops.attention(eqn, {})
  assert found.share == (None if share is None else pytest.approx(share))


class _Dense(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(5, dtype=jnp.bfloat16, name="inner")(x)


def test_keeps_the_dtype_of_the_operands():
  layer = _Dense()
  params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 3)))
  traced = jax.jit(layer.apply).trace(params, jnp.ones((2, 3)))
  found = flops.count(traced.jaxpr)
  assert found.count_by("dtype") == {"bfloat16": 2 * 2 * 3 * 5}
  assert found.count_by("part") == {"_Dense/inner": 2 * 2 * 3 * 5}
