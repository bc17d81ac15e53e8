"""Gemma 1 (Gemma Team 2024, https://arxiv.org/abs/2403.08295)."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  gated_decoder,
  rope,
)


def common(fields: config_fields.Fields, *, kv_heads: int) -> dict[str, Any]:
  """Returns what all Gemmas have in common, as fields of `GatedDecoder`.

  Norms store their factor less one. Embedded tokens are multiplied by the root
  of their width, rounded to the dtype of the model.

  Args:
    fields: Of the file.
    kv_heads: Number of key/value heads where the file does not say it.

  Raises:
    UnservedConfigError: A field has a value that is not served.
  """
  sizes = gated_decoder.heads(fields, kv_heads=kv_heads, head_dim=256)
  bias = fields.flag("attention_bias", False)
  # Masks that look ahead are for models of sentences, without a head.
  fields.one_of(
    "use_bidirectional_attention", False, {False: False, None: False}
  )
  return {
    **sizes,
    "vocab_size": fields.size("vocab_size"),
    "mlp_dim": fields.size("intermediate_size"),
    "epsilon": fields.number("rms_norm_eps", 1e-6),
    "tied": fields.flag("tie_word_embeddings", True),
    "qkv_bias": bias,
    "output_bias": bias,
    "norm_offset": 1.0,
    "input_scale": sizes["embed_dim"] ** 0.5,
  }


def _read(config: Mapping[str, Any]) -> gated_decoder.GatedDecoder:
  fields = config_fields.Fields(config, architecture=FAMILY.architecture)
  sizes = common(fields, kv_heads=16)
  result = gated_decoder.GatedDecoder(
    **sizes,
    windows=(None,) * fields.size("num_hidden_layers"),
    rope=rope.read(
      fields,
      head_dim=sizes["head_dim"],
      max_length=fields.size("max_position_embeddings", 8192),
    ),
    activation=_activation(fields),
  )
  fields.check_all_read()
  return result


def _activation(fields: config_fields.Fields) -> activations.Activation:
  # The first files say "gelu" and mean its approximation; later ones have it
  # in a second field, which some versions of transformers read.
  served = {**activations.SERVED, "gelu": activations.gelu_tanh}
  first = fields.one_of("hidden_act", "gelu_pytorch_tanh", served)
  second = fields.one_of("hidden_activation", None, {**served, None: first})
  if second is not first:
    fields.refuse("hidden_activation", "null or the activation of hidden_act")
  return first


FAMILY = family.Family(
  model_type="gemma",
  architecture="GemmaForCausalLM",
  read=_read,
)
