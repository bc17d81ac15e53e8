"""Checkpoints in the layouts of Pax, and Praxis's models in float64 numpy.

Files are written with TensorStore, msgpack and flax as paxml does, and the
models follow Praxis's definitions; nothing here uses our reader or layers.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any

from flax import serialization, struct
import jax
import numpy as np
import optax
import tensorstore as ts

KINDS = ("zarr", "OCDBT", "FLAX")


class NestedMap(dict):
  """Praxis's nested dictionary, a node of pytrees."""


jax.tree_util.register_pytree_with_keys(
  NestedMap,
  lambda x: (
    [(jax.tree_util.DictKey(k), x[k]) for k in sorted(x)],
    tuple(sorted(x)),
  ),
  lambda keys, values: NestedMap(zip(keys, values, strict=True)),
)


class TrainState(struct.PyTreeNode):
  """Pax's train state."""

  step: Any
  mdl_vars: Any
  opt_states: Any
  extra_state: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a model."""

  layers: int = 2
  embed: int = 32
  heads: int = 4
  head_dim: int = 8
  mlp: int = 128
  vocab: int = 264


def nest(flat: Mapping[str, Any]) -> NestedMap:
  """Returns nested maps from names joined by dots."""
  root = NestedMap()
  for name, value in flat.items():
    node = root
    *folders, last = name.split(".")
    for folder in folders:
      node = node.setdefault(folder, NestedMap())
    node[last] = value
  return root


def make_layer(sizes: Sizes, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Returns the variables of a layer of LmCloud's models."""
  D, N, H, F = sizes.embed, sizes.heads, sizes.head_dim, sizes.mlp
  shapes = {
    "layer_norm.scale": (D,),
    "layer_norm.bias": (D,),
    "self_attention.combined_qkv.w": (3, D, N, H),
    "self_attention.per_dim_scale.per_dim_scale": (H,),
    "self_attention.post.w": (D, N, H),
    "ff_layer.layer_norm.scale": (D,),
    "ff_layer.layer_norm.bias": (D,),
    "ff_layer.ffn_layer1.linear.w": (D, F),
    "ff_layer.ffn_layer1.bias.b": (F,),
    "ff_layer.ffn_layer2.linear.w": (F, D),
    "ff_layer.ffn_layer2.bias.b": (D,),
  }
  return {
    name: rng.normal(0, 0.3 if len(shape) == 1 else 0.1, shape).astype("f4")
    for name, shape in shapes.items()
  }


def make_lm(
  sizes: Sizes = Sizes(),
  *,
  seed: int = 0,
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
  """Returns the variables of an LmCloud model, apart from layers, and those."""
  rng = np.random.default_rng(seed)
  D, V = sizes.embed, sizes.vocab
  others = {
    "lm.final_ln.scale": rng.normal(0, 0.3, D).astype("f4"),
    "lm.final_ln.bias": rng.normal(0, 0.3, D).astype("f4"),
    "lm.softmax.logits_ffn.linear.w": rng.normal(0, 0.2, (D, V)).astype("f4"),
    "lm.softmax.logits_ffn.bias.b": rng.normal(0, 0.3, V).astype("f4"),
  }
  return others, [make_layer(sizes, rng) for _ in range(sizes.layers)]


def stack_layers(
  layers: list[dict[str, np.ndarray]],
  *,
  where: str = "repeat.sub.",
  leading: tuple[int, ...] | None = None,
  numbered: int = 1,
) -> dict[str, np.ndarray]:
  """Returns layers as Praxis's stacks store them.

  Args:
    layers: The variables of each layer.
    where: The layers that repeat, with a dot at the end.
    leading: The axes of circular repeats, stages and repeats; () for none.
    numbered: The number of `x_layers_<i>` in each repetition.
  """
  if leading is None:
    leading = (len(layers) // numbered,)
  stacked = {}
  for i in range(numbered):
    for name in layers[i]:
      values = np.stack([x[name] for x in layers[i::numbered]])
      values = values.reshape(*leading, *values.shape[1:])
      stacked[f"lm.transformer.{where}x_layers_{i}.{name}"] = values
  return stacked


def make_adam_state(
  variables: Mapping[str, np.ndarray],
  *,
  count: int,
  m: Mapping[str, np.ndarray],
  v: Mapping[str, np.ndarray],
  ema: Mapping[str, np.ndarray] | None = None,
) -> NestedMap:
  """Returns a learner's state as praxis's chain with sharded_adam keeps it.

  Names have no `params.`; those with `.repeat.` or `.pipeline.` are stacked.
  """
  groups: dict[str, list[str]] = {"no_prefix": []}
  for name, value in variables.items():
    depth = name.count(".repeat.") + name.count(".pipeline.")
    sizes = ".".join(map(str, value.shape[:depth]))
    key = f"p#{sizes}#{'.'.join(['i-1'] * depth)}" if depth else "no_prefix"
    groups.setdefault(key, []).append(name)
  found = NestedMap()
  for key, names in groups.items():
    shape = () if key == "no_prefix" else variables[names[0]].shape[:1]
    number = np.full(shape, count, np.int32)

    def mask(values: Mapping[str, np.ndarray], names: list[str] = names) -> Any:
      return nest(
        {
          f"params.{name}": value if name in names else optax.MaskedNode()
          for name, value in values.items()
        }
      )

    counter = NestedMap(count=number)
    chain = (
      *(counter, counter),
      NestedMap(count=number, m=mask(m), v=mask(v)),
      counter,
    )
    if ema is not None:
      chain = (*chain, NestedMap(count=number, ema=mask(ema)))
    found[key] = chain
  return found if len(groups) > 1 else found["no_prefix"]


def make_state(
  variables: Mapping[str, np.ndarray],
  *,
  step: int = 7,
  opt_states: Any = (),
) -> TrainState:
  """Returns a train state with variables below `params`."""
  return TrainState(
    step=np.asarray(step, np.uint32),
    mdl_vars=nest({f"params.{k}": v for k, v in variables.items()}),
    opt_states=list(opt_states),
  )


def write(
  folder: pathlib.Path,
  state: TrainState,
  *,
  kind: str,
  version: float | None = 1.1,
  padding: Mapping[str, tuple[int, ...]] | None = None,
  digits: bool = False,
) -> pathlib.Path:
  """Writes a checkpoint and returns its path.

  Args:
    folder: The directory of checkpoints.
    state: Its content.
    kind: One of `KINDS`.
    version: Version of the layout: 0.0 has no items, from 1.1 on the metadata
      have shapes.
    padding: Stored shapes of arrays by name, larger than theirs.
    digits: Whether its name is the step alone.
  """
  step = int(state.step)
  path = folder / (
    str(step)
    if digits
    else f"checkpoint_{step}"
    if kind == "FLAX"
    else f"checkpoint_{step:08d}"
  )
  items = path / "state" if version else path
  items.mkdir(parents=True)
  padding = padding or {}
  if kind == "FLAX":
    leaves, structure = jax.tree_util.tree_flatten(state)
    content = {"flattened_state": leaves, "str_pytree_state": str(structure)}
    (items / "checkpoint").write_bytes(serialization.to_bytes(content))
  else:
    separator = "." if kind == "OCDBT" else "_"
    for name, value in list_names(state, separator):
      shape = padding.get(name, value.shape)
      padded = np.zeros(shape, value.dtype)
      padded[tuple(map(slice, value.shape))] = value
      write_array(items, kind, name, padded)
  if version:
    metadata: dict[str, Any] = {"version": version}
    if version >= 1.1:
      shapes = jax.tree.map(_describe, {"mdl_vars": state.mdl_vars})
      metadata["train_state_metadata"] = shapes
    (path / "metadata").mkdir()
    (path / "metadata" / "metadata").write_text(json.dumps(metadata))
  return path


def list_names(
  node: Any, separator: str, prefix: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields arrays with the names that paxml gives them in TensorStore."""
  if isinstance(node, TrainState):
    node = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
  if isinstance(node, optax.MaskedNode):
    return
  if hasattr(node, "_fields"):
    node = node._asdict()
  if isinstance(node, dict):
    for key, value in node.items():
      name = f"{prefix}.{key}" if prefix else key
      yield from list_names(value, separator, name)
  elif isinstance(node, list | tuple):
    for i, value in enumerate(node):
      yield from list_names(value, separator, f"{prefix}{separator}{i}")
  else:
    yield prefix, node


def _describe(value: np.ndarray) -> dict[str, Any]:
  return {
    "_array_metadata_tag": True,
    "is_optax_masked_node": False,
    "unpadded_shape": list(value.shape),
    "dtype": value.dtype.name,
  }


def write_array(
  items: pathlib.Path,
  kind: str,
  name: str,
  value: np.ndarray,
  *,
  shards: int = 2,
  chunks: Sequence[int] | None = None,
) -> None:
  """Writes an array into `items` with TensorStore, in shards or chunks."""
  if kind == "OCDBT":
    kvstore = {"driver": "ocdbt", "base": f"file://{items}", "path": f"{name}/"}
  else:
    kvstore = {"driver": "file", "path": f"{items / name}/"}
  if chunks is None:
    chunks = list(value.shape)
    # Along the first axis that divides.
    for i, size in enumerate(chunks):
      if size % shards == 0:
        chunks[i] = size // shards
        break
  store = ts.open(
    {
      "driver": "zarr",
      "kvstore": kvstore,
      "metadata": {
        "shape": list(value.shape),
        "chunks": [max(1, size) for size in chunks],
        "dtype": value.dtype.str
        if value.dtype.kind != "V"
        else value.dtype.name,
        "compressor": {"id": "zstd", "level": 1},
      },
    },
    create=True,
  ).result()
  store.write(value).result()


def lm_logits(
  others: Mapping[str, np.ndarray],
  layers: list[dict[str, np.ndarray]],
  ids: np.ndarray,
  *,
  attention_cap: float = 50.0,
  logit_cap: float = 30.0,
  causal: bool = True,
) -> np.ndarray:
  """Returns the logits of Praxis's `TransformerLm` as LmCloud configures it.

  In float64: SharedEmbeddingSoftmax with scale_sqrt_depth, sinusoids, pre layer
  norms with the scale minus one, combined_qkv without biases, PerDimScale,
  capped attention logits, GELU, and capped logits.
  """
  wide = {name: value.astype(np.float64) for name, value in others.items()}
  table = wide["lm.softmax.logits_ffn.linear.w"]
  D = table.shape[0]
  x = table.T[ids] * math.sqrt(D) + sinusoids(ids.shape[1], D)
  for layer in layers:
    w = {name: value.astype(np.float64) for name, value in layer.items()}
    h = layer_norm(x, w["layer_norm.scale"], w["layer_norm.bias"])
    x = x + attend(h, w, attention_cap, causal=causal)
    h = layer_norm(
      x, w["ff_layer.layer_norm.scale"], w["ff_layer.layer_norm.bias"]
    )
    h = h @ w["ff_layer.ffn_layer1.linear.w"] + w["ff_layer.ffn_layer1.bias.b"]
    h = gelu(h) @ w["ff_layer.ffn_layer2.linear.w"]
    x = x + h + w["ff_layer.ffn_layer2.bias.b"]
  x = layer_norm(x, wide["lm.final_ln.scale"], wide["lm.final_ln.bias"])
  logits = x @ table + wide["lm.softmax.logits_ffn.bias.b"]
  return logit_cap * np.tanh(logits / logit_cap)


def gelu(x: np.ndarray) -> np.ndarray:
  """Returns Praxis's GELU, approximated by tanh."""
  inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return x * (1 + np.tanh(inner)) / 2


def layer_norm(
  x: np.ndarray, scale: np.ndarray, bias: np.ndarray
) -> np.ndarray:
  """Returns Praxis's LayerNorm, whose scale is stored minus one."""
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  return x * (1 + scale) + bias


def sinusoids(length: int, width: int) -> np.ndarray:
  """Returns Praxis's PositionalEmbedding [T, D]."""
  half = width // 2
  rates = np.exp(-np.arange(half) * math.log(10_000) / max(half - 1, 1))
  angles = np.arange(length)[:, None] * rates
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def attend(
  x: np.ndarray, w: Mapping[str, np.ndarray], cap: float, *, causal: bool
) -> np.ndarray:
  """Returns Praxis's DotProductAttention with combined_qkv."""
  query, key, value = np.einsum(
    "BTD,KDNH->KBTNH", x, w["self_attention.combined_qkv.w"]
  )
  scale = np.log1p(np.exp(w["self_attention.per_dim_scale.per_dim_scale"]))
  query = query * scale * 1.442695041 / math.sqrt(query.shape[-1])
  logits = np.einsum("BTNH,BSNH->BNTS", query, key)
  logits = cap * np.tanh(logits / cap)
  length = x.shape[1]
  if causal:
    logits = np.where(np.tri(length, dtype=bool), logits, -np.inf)
  logits = np.exp(logits - logits.max(-1, keepdims=True))
  weights = logits / logits.sum(-1, keepdims=True)
  context = np.einsum("BNTS,BSNH->BTNH", weights, value)
  return np.einsum("BTNH,DNH->BTD", context, w["self_attention.post.w"])
