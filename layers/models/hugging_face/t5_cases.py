"""Golden cases of T5."""

from paxon.layers.models.hugging_face import golden_case

_SIZES = {
  "vocab_size": 64,
  "d_model": 32,
  "num_heads": 4,
  "num_layers": 2,
  # Rows reach all buckets.
  "relative_attention_num_buckets": 8,
  "relative_attention_max_distance": 16,
  "decoder_start_token_id": 0,
}

CASES = (
  golden_case.Case(
    name="t5",
    architecture="T5ForConditionalGeneration",
    config={
      **_SIZES,
      "d_kv": 8,
      "d_ff": 40,
      "num_layers": 3,
      "num_decoder_layers": 2,
    },
  ),
  golden_case.Case(
    name="t5_v1_1",
    architecture="T5ForConditionalGeneration",
    config={
      **_SIZES,
      "d_kv": 12,
      "d_ff": 64,
      "feed_forward_proj": "gated-gelu",
      "layer_norm_epsilon": 1e-3,
      "tie_word_embeddings": False,
    },
    has_own_head=True,
  ),
)
