"""The cases of golden files with images or speech."""

from paxon.layers.models.hugging_face.golden_models import golden_case

_IMAGES = {
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "image_size": 12,
  "patch_size": 4,
}
_TEXTS = {
  "vocab_size": 64,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 3,
  "num_attention_heads": 3,
  "max_position_embeddings": 20,
  "eos_token_id": 2,
}
_VIT_NAMES = {
  "vit.layers.": "vit.encoder.layer.",
  ".attention.q_proj": ".attention.attention.query",
  ".attention.k_proj": ".attention.attention.key",
  ".attention.v_proj": ".attention.attention.value",
  ".attention.o_proj": ".attention.output.dense",
  ".mlp.fc1": ".intermediate.dense",
  ".mlp.fc2": ".output.dense",
}
_SPEECH = {
  "vocab_size": 64,
  "num_mel_bins": 6,
  "d_model": 32,
  "encoder_layers": 2,
  "decoder_layers": 2,
  "encoder_attention_heads": 4,
  "decoder_attention_heads": 4,
  "encoder_ffn_dim": 24,
  "decoder_ffn_dim": 24,
  "max_source_positions": 12,
  "max_target_positions": 24,
  "decoder_start_token_id": 1,
  "bos_token_id": 2,
  "eos_token_id": 2,
  "pad_token_id": 2,
  "begin_suppress_tokens": None,
}
_AUDIO = {
  "vocab_size": 12,
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "intermediate_size": 40,
  "conv_dim": [8, 6, 10],
  "conv_stride": [3, 2, 2],
  "conv_kernel": [5, 3, 2],
  "num_conv_pos_embeddings": 4,
  "num_conv_pos_embedding_groups": 2,
  "mask_time_prob": 0.0,
}
_AUDIO_NAMES = {
  "parametrizations.weight.original0": "weight_g",
  "parametrizations.weight.original1": "weight_v",
}

CASES = (
  golden_case.Case(
    name="vit",
    architecture="ViTForImageClassification",
    config={**_IMAGES, "num_labels": 5},
    renamed=_VIT_NAMES,
  ),
  golden_case.Case(
    name="vit_unbiased",
    architecture="ViTForImageClassification",
    config={
      **_IMAGES,
      "num_channels": 1,
      "qkv_bias": False,
      "hidden_act": "gelu_new",
      "layer_norm_eps": 1e-3,
    },
    renamed=_VIT_NAMES,
  ),
  golden_case.Case(
    name="clip",
    architecture="CLIPModel",
    config={
      "vision_config": {**_IMAGES, "hidden_act": "gelu"},
      "text_config": {**_TEXTS, "eos_token_id": 7},
      "projection_dim": 16,
    },
  ),
  # The end of a text is its largest id.
  golden_case.Case(
    name="clip_first",
    architecture="CLIPModel",
    config={
      "vision_config": {**_IMAGES, "num_channels": 1},
      "text_config": {**_TEXTS, "layer_norm_eps": 1e-3},
      "projection_dim": 16,
    },
  ),
  golden_case.Case(
    name="siglip",
    architecture="SiglipModel",
    config={
      "vision_config": _IMAGES,
      "text_config": {**_TEXTS, "projection_size": 32},
    },
  ),
  golden_case.Case(
    name="whisper",
    architecture="WhisperForConditionalGeneration",
    config={**_SPEECH},
  ),
  golden_case.Case(
    name="whisper_untied",
    architecture="WhisperForConditionalGeneration",
    config={
      **_SPEECH,
      "activation_function": "gelu_new",
      "decoder_attention_heads": 2,
      "decoder_ffn_dim": 40,
      "decoder_layers": 3,
      "tie_word_embeddings": False,
    },
  ),
  golden_case.Case(
    name="wav2vec2",
    architecture="Wav2Vec2ForCTC",
    config={**_AUDIO},
    renamed=_AUDIO_NAMES,
  ),
  golden_case.Case(
    name="wav2vec2_stable",
    architecture="Wav2Vec2ForCTC",
    config={
      **_AUDIO,
      "conv_bias": True,
      "do_stable_layer_norm": True,
      "feat_extract_activation": "gelu_new",
      "feat_extract_norm": "layer",
      "hidden_act": "relu",
      "layer_norm_eps": 1e-3,
      "num_conv_pos_embeddings": 5,
      "pad_token_id": 3,
    },
    renamed=_AUDIO_NAMES,
  ),
)
