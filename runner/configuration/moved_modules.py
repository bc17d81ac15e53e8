"""Modules that moved, so that stored runs and commands keep their meaning.

Stored configurations and `--fdl` flags name classes and functions by their
module. A name of before a move is read as the name of today.
"""

import re

# The package of today, the package before, and the modules that moved.
_MOVES = (
  (
    "inputs.sources",
    "inputs",
    "corpus_shards corpus_tokenizer data_files example_source grain_sources"
    " json_lines python_stdlib record_columns record_files text_files"
    " text_pairs token_file token_file_writer",
  ),
  (
    "inputs.streams",
    "inputs",
    "document_order example_stream filtered mixture read_ahead"
    " sequential_stream",
  ),
  ("layers.cpu", "layers.attention", "causal_blocks one_pass"),
  (
    "layers.losses",
    "layers",
    "auxiliary_loss bi_tempered_loss contrastive_losses cross_entropy"
    " policy_losses preference_losses softmax_loss",
  ),
  (
    "layers.models.hugging_face.files",
    "layers.models.hugging_face",
    "safetensors_file weight_files",
  ),
  (
    "layers.norms",
    "layers",
    "batch_norm group_norm layer_norm moments norm_scale rms_norm",
  ),
  (
    "layers.positions",
    "layers",
    "position_embedding rotary_embedding rotary_scaling",
  ),
  ("layers.speech", "layers", "stacked_frames temporal_shift"),
  (
    "layers.stacks",
    "layers",
    "adapter block edged_stack encoder_decoder_block shared stack"
    " stacked_cache stochastic_residual tied_parts",
  ),
  (
    "learners.optimizers",
    "learners",
    "adafactor adam_8bit adam_mini adamw cautious initial_scaling kron lion"
    " matrix_view muon optax_optimizer optimizer optimizer_by_path pruning"
    " regularization sgd shampoo soap sophia width_scaling",
  ),
  (
    "runner.evaluation",
    "runner.training",
    "evaluate evaluation example_outputs infer text_evaluation"
    " weight_conversion",
  ),
  (
    "runner.generation",
    "runner.training",
    "decode decode_file decode_requests decoding_state generation_limits"
    " generation_program samples",
  ),
  (
    "runner.session",
    "runner.training",
    "compiled_steps example_views kernel_checks memory_fit model_loss"
    " output_parts prefetch restore run_files run_metrics same_run serving"
    " session stop_signals",
  ),
  (
    "tools.checkpoints",
    "tools",
    "ckpt_average ckpt_main ckpt_preview",
  ),
  (
    "tools.hugging_face",
    "tools",
    "hf_export hf_files hf_gguf hf_import hf_main hf_quantized peft_adapter"
    " peft_import peft_layers peft_reader",
  ),
  (
    "tools.lm_evaluation",
    "tools",
    "lm_eval_harness lm_eval_main lm_eval_model",
  ),
  ("tools.sweeps", "tools", "sweep_main sweep_report sweep_study"),
)
MOVED = {
  f"{before}.{name}": f"{now}.{name}"
  for now, before, names in _MOVES
  for name in names.split()
}
# A module, and the class or function in it: `layers.stack.Stack`.
_NAME = re.compile(
  r"(?<![\w.])(paxon\.)?("
  + "|".join(re.escape(name) for name in MOVED)
  + r")(?=\.[A-Za-z_])"
)


def update_names(text: str) -> str:
  """Returns `text` with the names of today for classes and functions.

  Args:
    text: Any text, such as a stored configuration or the value of a flag. Only
      names with their module change, such as `paxon.layers.stack.Stack`; the
      `paxon.` may be missing.
  """
  return _NAME.sub(lambda match: (match[1] or "") + MOVED[match[2]], text)
