"""Tests of the names of Praxis's models beyond decoders, by their logits."""

import math

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import embedding, feed_forward, linear
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import classifier, encoder_decoder
from paxon.layers.norms import layer_norm
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import block, encoder_decoder_block, stack
from paxon.layers.vision import vit
from paxon.sharding import variables
from paxon.tools.pax_checkpoints import (
  name_map,
  pax_files,
  testing,
  variable_plan,
)

D, N, H, F, V, L = 16, 2, 8, 24, 40, 2
SEPARATE = projections.SeparateProjections(use_bias=True)


def _norm():
  return layer_norm.LayerNorm(scale_offset=1.0)


def _attention(*, causal, scaled):
  return grouped_query.GroupedQueryAttention(
    num_heads=N,
    num_kv_heads=N,
    head_dim=H,
    mask=attention_mask.MaskRules(causal=causal),
    projections=SEPARATE,
    logits=_logits(scaled),
  )


def _logits(scaled):
  scale = head_norm.PerDimScale() if scaled else None
  return kernels.Logits(query_scale=scale)


def _feed_forward():
  return feed_forward.FeedForward(F, activation=nn.relu, use_bias=True)


def _import(folder, values, model, *args):
  """Returns the variables of a model, imported from a checkpoint."""
  testing.write(folder, testing.make_state(values), kind="zarr")
  found = pax_files.open_checkpoint(epath.Path(folder)).arrays
  arrays = {
    name.removeprefix("mdl_vars."): array
    for name, array in found.items()
    if name.startswith("mdl_vars.")
  }
  abstract = jax.eval_shape(model.init, jax.random.key(0), *args)
  specs = variables.get_specs(abstract)
  leaves = jax.tree.leaves(specs)
  plan = variable_plan.make(
    leaves, arrays, name_map.read(None), direct_scale=None
  )
  used = {name for each in plan.assignments.values() for name in each.names}
  assert used == set(arrays)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      plan.assignments[spec.name].read(arrays, dtype=spec.dtype).to_numpy()
    ),
    specs,
  )


def _draw(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return {k: rng.normal(0, 0.3, v).astype("f4") for k, v in shapes.items()}


def _attention_shapes(name, *, scaled):
  return {
    **{f"{name}.{x}.w": (D, N, H) for x in ("query", "key", "value")},
    **{f"{name}.{x}.b": (N, H) for x in ("query", "key", "value")},
    f"{name}.post.w": (D, N, H),
    f"{name}.post.b": (D,),
    **({f"{name}.per_dim_scale.per_dim_scale": (H,)} if scaled else {}),
  }


def _norm_shapes(name):
  return {f"{name}.scale": (D,), f"{name}.bias": (D,)}


def _layer_shapes(*, cross=False, scaled=True):
  shapes = {
    **_norm_shapes("layer_norm"),
    **_attention_shapes("self_attention", scaled=scaled),
    **_norm_shapes("ff_layer.layer_norm"),
    "ff_layer.ffn_layer1.linear.w": (D, F),
    "ff_layer.ffn_layer1.bias.b": (F,),
    "ff_layer.ffn_layer2.linear.w": (F, D),
    "ff_layer.ffn_layer2.bias.b": (D,),
  }
  if cross:
    shapes |= _norm_shapes("cross_layer_norm")
    shapes |= _attention_shapes("cross_attention", scaled=scaled)
  return shapes


def _normed(x, w, name):
  return testing.layer_norm(x, w[f"{name}.scale"], w[f"{name}.bias"])


def _attend(x, memory, w, name, *, causal):
  """Returns Praxis's DotProductAttention with separate projections."""
  query, key, value = (
    np.einsum("BTD,DNH->BTNH", y, w[f"{name}.{part}.w"]) + w[f"{name}.{part}.b"]
    for part, y in (("query", x), ("key", memory), ("value", memory))
  )
  query = query / math.sqrt(H)
  if f"{name}.per_dim_scale.per_dim_scale" in w:
    scale = w[f"{name}.per_dim_scale.per_dim_scale"]
    query = query * np.log1p(np.exp(scale)) * 1.442695041
  logits = np.einsum("BTNH,BSNH->BNTS", query, key)
  if causal:
    logits = np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  context = np.einsum("BNTS,BSNH->BTNH", weights, value)
  out = np.einsum("BTNH,DNH->BTD", context, w[f"{name}.post.w"])
  return out + w[f"{name}.post.b"]


def _run(x, layers, *, causal, memory=None):
  """Returns the output of Praxis's StackedTransformer in float64."""
  for layer in layers:
    w = {name: value.astype(np.float64) for name, value in layer.items()}
    h = _normed(x, w, "layer_norm")
    x = x + _attend(h, h, w, "self_attention", causal=causal)
    if memory is not None:
      h = _normed(x, w, "cross_layer_norm")
      x = x + _attend(h, memory, w, "cross_attention", causal=False)
    h = _normed(x, w, "ff_layer.layer_norm")
    h = h @ w["ff_layer.ffn_layer1.linear.w"] + w["ff_layer.ffn_layer1.bias.b"]
    h = np.maximum(h, 0) @ w["ff_layer.ffn_layer2.linear.w"]
    x = x + h + w["ff_layer.ffn_layer2.bias.b"]
  return x


def test_encoder_decoder(tmp_path):
  encoder = [_draw(_layer_shapes(), 1 + i) for i in range(L)]
  decoder = [_draw(_layer_shapes(cross=True), 9 + i) for i in range(L)]
  others = _draw(
    {
      **_norm_shapes("model.encoder_ln"),
      **_norm_shapes("model.decoder_ln"),
      "model.softmax.logits_ffn.linear.w": (D, V),
      "model.softmax.logits_ffn.bias.b": (V,),
    }
  )
  values = dict(others)
  for i, layer in enumerate(encoder):
    values |= {f"model.encoder.x_layers_{i}.{k}": v for k, v in layer.items()}
  for name in decoder[0]:
    where = f"model.decoder.repeat.sub.x_layers_0.{name}"
    values[where] = np.stack([layer[name] for layer in decoder])
  positions = position_embedding.SinusoidalPositions
  model = encoder_decoder.EncoderDecoder(
    embedding=embedding.Embedding(V, embed_dim=D, use_bias=True),
    encoder=stack.Stack(
      (
        block.TransformerBlock(
          attention_norm=_norm(),
          attention=_attention(causal=False, scaled=True),
          feed_forward_norm=_norm(),
          feed_forward=_feed_forward(),
        ),
      ),
      num_layers=L,
    ),
    encoder_norm=_norm(),
    decoder=stack.Stack(
      (
        encoder_decoder_block.CrossBlock(
          self_attention_norm=_norm(),
          self_attention=_attention(causal=True, scaled=True),
          cross_attention_norm=_norm(),
          cross_attention=cross_attention.CrossAttention(
            num_heads=N,
            num_kv_heads=N,
            head_dim=H,
            projections=SEPARATE,
            logits=_logits(True),
          ),
          feed_forward_norm=_norm(),
          feed_forward=_feed_forward(),
        ),
      ),
      num_layers=L,
    ),
    decoder_norm=_norm(),
    encoder_position_embedding=positions(),
    decoder_position_embedding=positions(),
  )
  rng = np.random.default_rng(3)
  source, target = rng.integers(0, V, (2, 7)), rng.integers(0, V, (2, 5))
  args = [
    jnp.asarray(x, jnp.int32)
    for ids in (target, source)
    for x in (
      ids,
      np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
      np.ones(ids.shape),
    )
  ]
  state = _import(tmp_path, values, model, *args)
  found = model.apply(state, *args)
  wide = {k: v.astype(np.float64) for k, v in others.items()}
  table = wide["model.softmax.logits_ffn.linear.w"]
  x = table.T[source] + testing.sinusoids(7, D)
  memory = _normed(_run(x, encoder, causal=False), wide, "model.encoder_ln")
  x = table.T[target] + testing.sinusoids(5, D)
  x = _run(x, decoder, causal=True, memory=memory)
  expected = _normed(x, wide, "model.decoder_ln") @ table
  expected += wide["model.softmax.logits_ffn.bias.b"]
  np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_vision_transformer(tmp_path):
  layers = [_draw(_layer_shapes(scaled=False), 1 + i) for i in range(L)]
  entry, ends = "network.entry_stack", "network.exit_stack"
  others = _draw(
    {
      f"{entry}.patch_projection.linear.w": (2 * 2 * 3, D),
      f"{entry}.patch_projection.bias.b": (D,),
      f"{entry}.pos_emb.emb_var": (6, D),
      f"{entry}.prepend_cls_embs": (1, 1, D),
      **_norm_shapes(f"{ends}.ln"),
      f"{ends}.fc_tanh.linear.w": (D, D),
      f"{ends}.fc_tanh.bias.b": (D,),
      "softmax.logits_ffn.linear.w": (D, 5),
      "softmax.logits_ffn.bias.b": (5,),
    }
  )
  values = dict(others)
  for i, layer in enumerate(layers):
    start = f"network.transformers_stack.x_layers_{i}"
    values |= {f"{start}.{k}": v for k, v in layer.items()}
  model = classifier.Classifier(
    encoder=vit.VisionTransformer(
      patch_size=2,
      projection=linear.Linear(D, kernel_axes=(None, "embed")),
      positions=vit.PatchPositions(height=2, width=3),
      stack=stack.Stack(
        (
          block.TransformerBlock(
            attention_norm=_norm(),
            attention=_attention(causal=False, scaled=False),
            feed_forward_norm=_norm(),
            feed_forward=_feed_forward(),
          ),
        ),
        num_layers=L,
      ),
      final_norm=_norm(),
      pooling=vit.pool_max,
      output=linear.Linear(D, activation=jnp.tanh),
      tokens_before=1,
    ),
    head=linear.Linear(5, kernel_axes=("embed", None)),
    input_keys=("images",),
  )
  images = np.random.default_rng(5).normal(size=(2, 4, 6, 3)).astype("f4")
  batch = {"images": jnp.asarray(images)}
  state = _import(tmp_path, values, model, batch)
  found = model.apply(state, batch)
  w = {k: v.astype(np.float64) for k, v in others.items()}
  patches = [
    images[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(2, -1)
    for i in range(2)
    for j in range(3)
  ]
  x = np.stack(patches, 1) @ w[f"{entry}.patch_projection.linear.w"]
  x += w[f"{entry}.patch_projection.bias.b"] + w[f"{entry}.pos_emb.emb_var"]
  token = np.broadcast_to(w[f"{entry}.prepend_cls_embs"], (2, 1, D))
  x = _run(np.concatenate([token, x], 1), layers, causal=False)
  x = _normed(x, w, f"{ends}.ln").max(1)
  x = np.tanh(x @ w[f"{ends}.fc_tanh.linear.w"] + w[f"{ends}.fc_tanh.bias.b"])
  expected = x @ w["softmax.logits_ffn.linear.w"]
  expected += w["softmax.logits_ffn.bias.b"]
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
