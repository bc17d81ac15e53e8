"""The train step and generation of `pure_jax_decoder_lm` in torch.

The train step is what one would write by hand: the fused attention of torch,
its fused AdamW, compiled by `torch.compile`. Generation is `generate` of
transformers, with a Llama model of the same values, or a prefill and a decoding
step of the model of the train step, compiled, with a cache of fixed size. The
tensors are stored in float32 by the train step, and in the dtype of the model
for generation.

Torch and transformers are not required by Paxon, so they are imported where
they are used, with `ImportError` where they are not installed.
"""

from collections.abc import Mapping
import functools
import importlib
import os
from typing import Any

import numpy as np

# The layout of a batch: an array for each of `PURE_JAX_KEYS`.
Batch = Mapping[str, Any]


def import_torch() -> Any:
  """Returns torch, whose threads sleep when they have nothing to do.

  By default they spin for some time, while the other program is measured.

  Raises:
    ImportError: torch is not installed.
  """
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  return importlib.import_module("torch")


class TrainStep:
  """Updates its own copy of the parameters, as `train_step` of plain JAX does.

  Every sequence of a batch must be a single document.
  """

  def __init__(self, c: Any, state: Any, *, is_compiled: bool = True) -> None:
    self._torch = torch = import_torch()
    self._config = c
    self.params = {
      name: torch.tensor(np.asarray(x), requires_grad=True)
      for name, x in state["params"].items()
    }
    groups = [
      {"params": [], "weight_decay": c.weight_decay},
      {"params": [], "weight_decay": 0.0},
    ]
    for name, p in self.params.items():
      groups[name.endswith("norm")]["params"].append(p)
    self._optimizer = torch.optim.AdamW(
      groups, lr=c.peak, betas=(0.9, c.b2), eps=1e-8, fused=True
    )
    self._step = 0
    loss = _make_loss(torch, c)
    self._loss = torch.compile(loss) if is_compiled else loss

  def __call__(self, batch: Batch) -> dict[str, float]:
    """Makes one update; returns metrics."""
    torch = self._torch
    self._optimizer.zero_grad(set_to_none=True)
    loss, accuracy = self._loss(self.params, batch)
    loss.backward()
    params = list(self.params.values())
    with torch.no_grad():
      norms = torch._foreach_norm(params)
      param_norm = torch.linalg.vector_norm(torch.stack(norms))
    grad_norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    rate = _learning_rate(self._config, self._step)
    for group in self._optimizer.param_groups:
      group["lr"] = rate
    self._optimizer.step()
    self._step += 1
    return {
      "loss": loss.item(),
      "accuracy": accuracy.item(),
      "grad_norm": grad_norm.item(),
      "param_norm": param_norm.item(),
      "learning_rate": rate,
    }

  def place(self, batch: Batch) -> dict[str, Any]:
    """Returns the tensors of a batch."""
    tensors = {
      name: self._torch.tensor(np.asarray(x)) for name, x in batch.items()
    }
    return tensors | {
      name: tensors[name].long() for name in ("inputs", "targets")
    }


def _learning_rate(c: Any, step: int) -> float:
  done = (step - c.warmup_steps) / (c.total_steps - c.warmup_steps)
  if done < 0:
    return c.peak * (step + 1) / (c.warmup_steps + 1)
  return c.peak * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * min(done, 1.0))))


def _make_model(torch: Any, c: Any) -> Any:
  """Returns `(weights, ids, positions, attend) -> normalized tokens [B,T,D]`.

  `attend` gets a layer's index and its queries, keys and values [B,N,T,H].
  """
  F, D, H = torch.nn.functional, c.embed_dim, c.head_dim

  def norm(x: Any, scale: Any) -> Any:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return (y * scale).to(x.dtype)

  def rotate(x: Any, sin: Any, cos: Any) -> Any:
    a, b = x.float().chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1).to(x.dtype).transpose(1, 2)

  def run(w: Mapping[str, Any], ids: Any, positions: Any, attend: Any) -> Any:
    speed = 1e4 ** -(torch.arange(0, H, 2).float() / H)
    angle = (positions.float()[..., None] * speed)[:, :, None]
    turn = angle.sin(), angle.cos()
    x = F.embedding(ids, w["table"]) * D**0.5
    for i in range(c.num_layers):
      y = norm(x, w["attention_norm"][i])
      q, k, v = (
        (y @ w[n][i].reshape(D, -1)).unflatten(-1, (-1, H)) for n in "qkv"
      )
      y = attend(i, rotate(q, *turn), rotate(k, *turn), v.transpose(1, 2))
      x = x + y.transpose(1, 2).flatten(2) @ w["out"][i].reshape(-1, D)
      y = norm(x, w["mlp_norm"][i])
      y = F.silu(y @ w["gate"][i]) * (y @ w["up"][i])
      x = x + y @ w["down"][i]
    return norm(x, w["final_norm"])

  return run


def _make_attention(torch: Any, c: Any) -> Any:
  """Returns the attention of torch for heads [B,N,T,H] and [B,K,S,H]."""
  return functools.partial(
    torch.nn.functional.scaled_dot_product_attention,
    enable_gqa=c.num_heads != c.num_kv_heads,
  )


def _cast(torch: Any, c: Any, params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the kernels and the table in the dtype of the model."""
  dtype = getattr(torch, c.dtype)
  return {
    name: x if name.endswith("norm") else x.to(dtype)
    for name, x in params.items()
  }


def _make_loss(torch: Any, c: Any) -> Any:
  """Returns `(parameters, batch) -> (mean loss, accuracy)`."""
  model, attend = _make_model(torch, c), _make_attention(torch, c)
  F = torch.nn.functional

  def run(_: int, q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, is_causal=True)

  def loss(params: Any, batch: Any) -> Any:
    w = _cast(torch, c, params)
    x = model(w, batch["inputs"], batch["positions"], run)
    logits = (x @ w["table"].T).float()
    share = batch["weights"] / batch["weights"].sum()
    each = F.cross_entropy(
      logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    )
    hits = (logits.argmax(-1) == batch["targets"]) * share
    return (each * share.flatten()).sum(), hits.sum()

  return loss


def make_generate(
  c: Any, params: Any, prompts: Any, lengths: Any, *, num_new: int
) -> Any:
  """Returns a function that returns greedy ids [B, num_new] by transformers.

  Args:
    c: Sizes of the model.
    params: Parameters of `pure_jax_decoder_lm`.
    prompts: Ids [B,P], padded on the right.
    lengths: Number of ids of each prompt, [B].
    num_new: Number of ids to generate.

  Raises:
    ImportError: torch or transformers is not installed.
  """
  torch = import_torch()
  library = importlib.import_module("transformers")
  model = library.LlamaForCausalLM(_make_llama_config(library, c)).eval()
  model.load_state_dict(_to_llama(torch, c, params))
  model = model.to(getattr(torch, c.dtype))
  ids, mask = _pad_left(torch, prompts, lengths)
  width = ids.shape[1]

  def generate() -> Any:
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=mask.long(),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
      )
    return out[:, width:]

  return generate


def _make_llama_config(library: Any, c: Any) -> Any:
  """Returns the configuration of a Llama model of the same sizes."""
  return library.LlamaConfig(
    vocab_size=c.vocab_size,
    hidden_size=c.embed_dim,
    intermediate_size=c.mlp_dim,
    num_hidden_layers=c.num_layers,
    num_attention_heads=c.num_heads,
    num_key_value_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    # The table of the inputs has a factor that the head has not.
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )


def _to_llama(torch: Any, c: Any, params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the parameters as the state dict of a Llama model, in float32."""
  w = {name: torch.tensor(np.asarray(x)) for name, x in params.items()}
  stored = {
    "model.embed_tokens.weight": w["table"] * c.embed_dim**0.5,
    "model.norm.weight": w["final_norm"],
    "lm_head.weight": w["table"],
  }
  names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj"}
  names |= {"v": "self_attn.v_proj", "out": "self_attn.o_proj"}
  names |= {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
  norms = {"attention_norm": "input_layernorm"}
  norms |= {"mlp_norm": "post_attention_layernorm"}
  for i in range(c.num_layers):
    for name, own in names.items():
      shape = (-1, c.embed_dim) if name == "out" else (w[name].shape[1], -1)
      kernel = w[name][i].reshape(shape).T.contiguous()
      stored[f"model.layers.{i}.{own}.weight"] = kernel
    for name, own in norms.items():
      stored[f"model.layers.{i}.{own}.weight"] = w[name][i]
  return stored


def _pad_left(torch: Any, prompts: Any, lengths: Any) -> tuple[Any, Any]:
  """Returns prompts [B,P] padded on the left, and their mask, bool [B,P].

  transformers expects this of the prompts of decoders.
  """
  lengths = np.asarray(lengths)
  padded = [
    np.roll(ids, len(ids) - n)
    for ids, n in zip(np.asarray(prompts), lengths, strict=True)
  ]
  ids = torch.tensor(np.stack(padded)).long()
  width = ids.shape[1]
  mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
  return ids, mask


def make_static_generate(
  c: Any,
  params: Any,
  prompts: Any,
  lengths: Any,
  *,
  num_new: int,
  is_compiled: bool = True,
) -> Any:
  """Returns a function that returns greedy ids [B, num_new] by torch alone.

  Called like `make_generate`; the prefill and the decoding step are compiled if
  `is_compiled`. The cache has a fixed size, is allocated once and updated in
  place.

  Raises:
    ImportError: torch is not installed.
  """
  torch = import_torch()
  model, attend = _make_model(torch, c), _make_attention(torch, c)
  tensors = {name: torch.tensor(np.asarray(x)) for name, x in params.items()}
  w = _cast(torch, c, tensors)
  ids = torch.tensor(np.asarray(prompts)).long()
  ends = torch.tensor(np.asarray(lengths)).long()[:, None]
  (B, P), S = ids.shape, ids.shape[1] + num_new - 1
  slots = torch.arange(S)
  in_prompts = slots < ends
  keys, values = (_make_cache(torch, c, B, S) for _ in range(2))

  def choose(x: Any) -> Any:
    return (x @ w["table"].T).float().argmax(-1)

  def prefill() -> Any:
    def run(i: int, q: Any, k: Any, v: Any) -> Any:
      keys[i][:, :, :P], values[i][:, :, :P] = k, v
      # Padding comes after all tokens of a prompt, so none attends to it.
      return attend(q, k, v, is_causal=True)

    x = model(w, ids, slots[:P].expand(B, P), run)
    return choose(torch.take_along_dim(x, ends[..., None] - 1, 1))

  def step(last: Any, slot: Any) -> Any:
    mask = in_prompts | ((slots >= P) & (slots <= slot))

    def run(i: int, q: Any, k: Any, v: Any) -> Any:
      keys[i].index_copy_(2, slot, k)
      values[i].index_copy_(2, slot, v)
      return attend(q, keys[i], values[i], attn_mask=mask[:, None, None])

    # For a single query the kernels that torch.compile makes of the definition
    # are faster than the fused attention of torch.
    backends = torch.nn.attention
    with backends.sdpa_kernel(backends.SDPBackend.MATH):
      return choose(model(w, last, ends + slot - P, run))

  if is_compiled:
    prefill, step = torch.compile(prefill), torch.compile(step)

  def generate() -> Any:
    with torch.inference_mode():
      chosen = [prefill()]
      for i in range(P, S):
        chosen.append(step(chosen[-1], slots[i : i + 1]))
      return torch.cat(chosen, 1)

  return generate


def _make_cache(
  torch: Any, c: Any, batch_size: int, num_slots: int
) -> list[Any]:
  """Returns zeros for the keys or the values of each layer [B,K,S,H].

  A tensor for each layer: the compiled step updates its inputs in place.
  """
  shape = batch_size, c.num_kv_heads, num_slots, c.head_dim
  dtype = getattr(torch, c.dtype)
  return [torch.zeros(shape, dtype=dtype) for _ in range(c.num_layers)]
