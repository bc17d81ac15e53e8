"""Golden cases of BERT."""

from paxon.layers.models.hugging_face import golden_case

_SIZES = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "max_position_embeddings": 24,
}

CASES = (
  golden_case.Case(
    name="bert", architecture="BertForMaskedLM", config={**_SIZES}
  ),
  golden_case.Case(
    name="bert_untied",
    architecture="BertForMaskedLM",
    config={
      **_SIZES,
      "type_vocab_size": 3,
      "hidden_act": "gelu_new",
      "layer_norm_eps": 1e-3,
      "tie_word_embeddings": False,
    },
  ),
)
