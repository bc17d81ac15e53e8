"""Pax's configuration in the method `task()`, and ours.

A path is the field of a configuration, such as `layer.tr_atten_tpl.use_bias`;
`SHORT` are the abbreviations of its beginning.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from paxon.tools.pax_migration import class_tables, values

# The longest first. Repeated layers and stages are their block.
SHORT: Final = (
  ("task.train.learner.optimizer", "optimizer"),
  ("task.train.learner", "learner"),
  ("task.train", "train"),
  ("task.model.lm_tpl.stacked_transformer_tpl", "stack"),
  ("task.model.lm_tpl", "lm"),
  ("task.model", "model"),
  ("stack.transformer_layer_params_tpl", "layer"),
)
SAME_LAYER: Final = (".block", ".pipeline_stage")

_SHARDED: Final = "sharding follows rules of logical axes"
_FLOAT32: Final = "norms are computed in float32"
_LOADED: Final = "evaluation starts from the variables of training"


class Field(NamedTuple):
  """A field of Pax's configuration.

  Attributes:
    knob: Our knob; empty for a field that is not needed.
    convert: The conversion of its value.
    note: Reason why it is not needed.
    mixin: A class of ours that becomes a base of the experiment.
  """

  knob: str
  convert: values.Convert = values.same
  note: str = ""
  mixin: str = ""


def _make_unneeded(note: str, convert: values.Convert | None = None) -> Field:
  return Field("", convert or (lambda given: ""), note)


_GAUSSIAN: Final = values.inside("Gaussian")
_NORMS: Final = (
  "layer.ln_tpl",
  "layer.tr_fflayer_tpl.ln_tpl",
  "lm.final_ln_tpl",
)
_ATTENTION: Final = "layer.tr_atten_tpl"
_MLP: Final = "layer.tr_fflayer_tpl"
_SOFTMAX: Final = "lm.softmax_tpl"
_EMBEDDING: Final = "lm.separate_embedding_tpl"
_MIXTURES: Final = "pax_lm.PaxMixture"

FIELDS: Final[Mapping[str, Field]] = {
  "task.summary_verbosity": _make_unneeded("summaries have one level"),
  "task.early_stopping_fn.target_log_pplx": Field("target_log_pplx"),
  "train.num_train_steps": Field("num_train_steps", values.steps),
  "train.save_interval_steps": Field("checkpoint_every_steps"),
  "train.save_max_to_keep": Field("max_checkpoints"),
  "train.summary_interval_steps": Field("summary_every_steps"),
  "train.eval_interval_steps": Field("eval_every_steps"),
  "train.eval_skip_train": _make_unneeded("training data is never evaluated"),
  "train.always_use_train_for_model_init": _make_unneeded(_LOADED),
  "train.inputs_split_mapping": _make_unneeded(_SHARDED),
  "train.compute_steps_per_sec_interval_steps": _make_unneeded(
    "each summary has the steps per second"
  ),
  "train.profiler_num_steps": _make_unneeded("pass --profile_steps=10:13"),
  "train.profiler_min_duration_sec": _make_unneeded(
    "pass --profile_steps=10:13"
  ),
  "train.profiler_capture_step": _make_unneeded("pass --profile_steps=10:13"),
  "train.variable_norm_summary": _make_unneeded("norms are in all summaries"),
  "train.summary_accumulate_interval_steps": _make_unneeded(
    "summaries are means over their interval"
  ),
  "learner.loss_name": _make_unneeded("the model returns one loss"),
  "learner.repeat_prefix_sep": _make_unneeded("variables have logical names"),
  "learner.bprop_variable_inclusion": Field("trainable"),
  "optimizer.learning_rate": Field("learning_rate"),
  "optimizer.weight_decay": Field("weight_decay", values.nonzero(0.0)),
  "optimizer.clip_gradient_norm_to_value": Field("max_grad_norm"),
  "optimizer.beta1": Field("adam_b1"),
  "optimizer.beta2": Field("adam_b2"),
  "optimizer.epsilon": Field("adam_epsilon"),
  "optimizer.epsilon_root": Field("adam_epsilon_root"),
  "optimizer.clip_threshold": Field("max_update_rms", values.positive),
  "optimizer.decay_method": _make_unneeded(
    "Pax's Adafactor decays like Adam",
    values.only("adam", why="set decay_exponent in optimizer()"),
  ),
  "optimizer.decay_adam": Field("adam_b2"),
  "optimizer.ema_decay": Field("ema_decay", values.positive),
  "model.fprop_dtype": Field("dtype", class_tables.dtype),
  "model.params_init": Field("init_stddev", _GAUSSIAN),
  "model.label_smoothing_prob": Field("label_smoothing"),
  "model.mask_token_id": _make_unneeded("the mask token is the knob mask_id"),
  "model.force_mask_generation": _make_unneeded("tokens are masked at random"),
  "model.ici_mesh_shape": _make_unneeded("it is part of `mesh`"),
  "model.dcn_mesh_shape": _make_unneeded("it is part of `mesh`"),
  "model.mesh_axis_names": _make_unneeded("axes of a mesh have fixed names"),
  "model.apply_eval_sample_weights": _make_unneeded(
    "examples that pad the last batch have weight 0"
  ),
  "model.report_strict_acc": _make_unneeded("add a metric to task()"),
  "model.decoder_tpl.eos_id": _make_unneeded("the tokenizer has the end token"),
  "model.decoder_tpl.seqlen": _make_unneeded("the cache has the knob `length`"),
  "lm.packed_input": _make_unneeded(
    "segment ids come with packed batches only"
  ),
  "lm.model_dims": Field("embed_dim"),
  "lm.vocab_size": Field("vocab_size"),
  "lm.name": _make_unneeded("modules are named by their fields"),
  f"{_SOFTMAX}.soft_cap_logits": Field("logit_cap", values.positive),
  f"{_SOFTMAX}.scale_sqrt_depth": Field("scale_embedding"),
  f"{_EMBEDDING}.scale_sqrt_depth": Field("scale_embedding"),
  f"{_SOFTMAX}.lookup_style": _make_unneeded(
    "both styles give the same values"
  ),
  f"{_EMBEDDING}.lookup_style": _make_unneeded(
    "both styles give the same values"
  ),
  "lm.position_emb_tpl.lookup_style": _make_unneeded(
    "both styles give the same values"
  ),
  f"{_SOFTMAX}.feed_forward_tpl.has_bias": Field("head_bias"),
  f"{_SOFTMAX}.feed_forward_tpl.activation_tpl": _make_unneeded(
    "logits have no activation; in Pax the softmax ignores it"
  ),
  f"{_SOFTMAX}.params_init": Field("init_stddev", _GAUSSIAN),
  f"{_SOFTMAX}.input_dims": _make_unneeded("it is embed_dim"),
  f"{_SOFTMAX}.num_classes": _make_unneeded("it is vocab_size"),
  f"{_EMBEDDING}.input_dims": _make_unneeded("it is embed_dim"),
  f"{_EMBEDDING}.num_classes": _make_unneeded("it is vocab_size"),
  "lm.position_emb_tpl.max_seq_length": Field("max_positions"),
  **{f"{norm}.epsilon": Field("norm_epsilon") for norm in _NORMS},
  **{
    f"{norm}.{field}": _make_unneeded(_FLOAT32)
    for norm in _NORMS
    for field in ("reductions_in_fp32", "intermediate_dtype", "direct_scale")
  },
  f"{_ATTENTION}.num_kv_heads": Field("num_kv_heads"),
  f"{_ATTENTION}.use_bias": Field("use_bias"),
  f"{_ATTENTION}.combine_qkv": Field("combine_qkv"),
  f"{_ATTENTION}.atten_logit_cap": Field(
    "attention_logit_cap", values.positive
  ),
  f"{_ATTENTION}.internal_enable_per_dim_scale": Field("per_dim_scale"),
  f"{_ATTENTION}.internal_enable_query_scale": _make_unneeded(
    "queries are scaled by head_dim ** -0.5",
    values.only(True, why="queries are always scaled by head_dim ** -0.5"),
  ),
  f"{_ATTENTION}.use_rotary_position_emb": Field("rotary"),
  f"{_ATTENTION}.rope_min_max_timescales": _make_unneeded(
    "they are those of Rotary",
    values.only([1, 10_000], why="set Rotary(max_wavelength=...)"),
  ),
  "stack.num_pipeline_stages": Field("num_stages"),
  "stack.circular_repeat": Field("circular_repeats"),
  "stack.num_pipeline_microbatches": Field("num_pipeline_microbatches"),
  "stack.pipeline_microbatch_size": Field("pipeline_microbatch_size"),
  "stack.stream_io": Field("stream_io", values.switch("True", "None")),
  "stack.pipeline_broadcast_inputs": _make_unneeded("the compiler chooses"),
  f"{_ATTENTION}.proj_tpl.use_bias": _make_unneeded("it follows use_bias"),
  f"{_ATTENTION}.combined_qkv_proj_tpl.use_bias": _make_unneeded(
    "it follows use_bias"
  ),
  f"{_MLP}.use_gated_activation": Field("gated_activation"),
  f"{_MLP}.activation_tpl": Field("activation", class_tables.activation),
  f"{_MLP}.activation_tpl.approximate": _make_unneeded(
    "nn.gelu is approximate",
    values.only(True, why="pass functools.partial(nn.gelu, approximate=False)"),
  ),
  f"{_MLP}.fflayer_tpl.activation_tpl": _make_unneeded(
    "it is activation_tpl's"
  ),
  f"{_MLP}.has_bias": Field("mlp_bias"),
  f"{_MLP}.fflayer_tpl.has_bias": _make_unneeded("it is has_bias of the layer"),
  "layer.norm_policy": _make_unneeded(
    "blocks are pre-norm",
    values.only("pre", why="set the class of the blocks in model()"),
  ),
  "stack.input_dropout_prob": Field("embedding_dropout", values.positive),
  "stack.model_dims": Field("embed_dim"),
  "stack.hidden_dims": Field("mlp_dim"),
  "stack.num_heads": Field("num_heads"),
  "stack.dim_per_head": Field("head_dim"),
  "stack.num_layers": Field("num_layers", values.more_than_one),
  "stack.x_times": Field("num_layers"),
  "stack.checkpoint_policy": Field("remat_policy", class_tables.remat),
  "stack.num_experts": Field("num_experts", mixin=_MIXTURES),
  "stack.num_groups": Field("num_groups", mixin=_MIXTURES),
  "stack.moe_layers": _make_unneeded(
    "all layers have experts; else mixture_every"
  ),
}

# Any field below a path that contains one of these.
UNNEEDED: Final = {
  "weight_split_dims_mapping": _SHARDED,
  "activation_split_dims_mapping": _SHARDED,
}


class Node(NamedTuple):
  """A class that is assigned to a field.

  Attributes:
    sets: Knobs, with the source of their values.
    mixin: A class of ours that becomes a base of the experiment.
    fields: Fields of the class by argument, where FIELDS has no path.
    unsupported: Reason why it has no counterpart.
  """

  sets: Mapping[str, str] = {}
  mixin: str = ""
  fields: Mapping[str, Field] = {}
  unsupported: str = ""


_RAMP: Final = {
  "max": _make_unneeded(
    "1.0 is the peak itself",
    values.only(1.0, why="multiply learning_rate by it"),
  )
}
_MIXTURE: Final[Mapping[str, Field]] = {
  "name": _make_unneeded("modules are named by their fields"),
  "vocab_size": Field("vocab_size"),
  "num_transformer_layers": Field("num_layers"),
  "moe": _make_unneeded(
    "layers have experts", values.only(True, why="no experts")
  ),
  "model_dim": Field("embed_dim"),
  "ff_dim": Field("mlp_dim"),
  "moe_hidden_dim": Field("mlp_dim"),
  "attention_num_heads": Field("num_heads"),
  "attention_num_groups": Field("num_kv_heads"),
  "attention_key_value_dim": Field("head_dim"),
  "attention_extra_logit": _make_unneeded(
    "an extra logit of 0 is left out; set ConstantSinks in attention()"
  ),
  "use_tgt_labels_size_as_loss_denominator": _make_unneeded(
    "the loss is a mean over the tokens with a weight"
  ),
  "moe_load_balance_loss_weight": Field("load_balance_weight"),
  "z_loss_weight": Field("output_z_loss"),
  "moe_gating_func": _make_unneeded(
    "the router is top-2",
    values.only("top2", why="set another router in feed_forward()"),
  ),
  "moe_gating_embedding_level": _make_unneeded(
    "tokens are routed",
    values.only("token", why="only tokens are routed"),
  ),
  "c_dim": _make_unneeded(
    "capacity_factor gives it",
    values.only(None, why="set capacity_factor instead"),
  ),
  "capacity_factor": Field("capacity_factor"),
  "e_dim": Field("num_experts"),
  "num_groups": Field("num_groups"),
  "use_gated_activation": _make_unneeded(
    "the feed-forward layer is gated",
    values.only(True, why="set gated_activation and gated_experts"),
  ),
  "combine_qkv": Field("combine_qkv"),
  "checkpoint_policy": Field("remat_policy", class_tables.remat),
  "use_fp8": Field("quantization", values.switch("'fp8'", "None")),
  "repeat": _make_unneeded("stacks are always scanned over their layers"),
  "num_pipeline_stages": Field("num_stages"),
  "num_pipeline_microbatches": Field("num_pipeline_microbatches"),
}
_KERNEL: Final = Node(
  unsupported="set attention_kernel = cudnn_attention.cudnn on NVIDIA GPUs"
)

# By path and class; `*` is any path.
NODES: Final[Mapping[tuple[str, str], Node]] = {
  ("optimizer", "Adam"): Node({"optimizer_kind": "'adam'"}),
  ("optimizer", "ShardedAdafactor"): Node({"optimizer_kind": "'adafactor'"}),
  ("optimizer.lr_schedule", "Constant"): Node({"lr_schedule": "'constant'"}),
  ("optimizer.lr_schedule", "LinearRampupExponentialDecay"): Node(
    {"lr_schedule": "'exponential'"},
    fields={
      **_RAMP,
      "warmup_steps": Field("warmup_steps"),
      "decay_start": Field("decay_start"),
      "decay_end": Field("decay_steps"),
      "min_ratio": Field("min_rate_share"),
    },
  ),
  ("optimizer.lr_schedule", "LinearRampupCosineDecay"): Node(
    {"lr_schedule": "'cosine'"},
    fields={
      **_RAMP,
      "warmup_steps": Field("cosine_warmup_steps"),
      "decay_start": Field("cosine_decay_start"),
      "decay_end": Field("cosine_decay_steps"),
      "min_ratio": Field("cosine_min_rate_share"),
    },
  ),
  (_SOFTMAX, "FullSoftmax"): Node(
    {"separate_embedding": "True", "logit_cap": "None"}
  ),
  (_EMBEDDING, "Embedding"): Node(
    {"separate_embedding": "True", "scale_embedding": "False"}
  ),
  ("lm.position_emb_tpl", "None"): Node({"positions": "'none'"}),
  ("lm.position_emb_tpl", "TrainablePositionalEmbedding"): Node(
    {"positions": "'learned'"}
  ),
  ("lm.position_emb_tpl", "PositionalEmbedding"): Node(
    {"positions": "'sinusoidal'"}
  ),
  **{(norm, "RmsNorm"): Node({"rms_norm": "True"}) for norm in _NORMS},
  **{(norm, "LayerNorm"): Node({"rms_norm": "False"}) for norm in _NORMS},
  (_ATTENTION, "DotProductAttention"): Node(),
  (_ATTENTION, "GroupedQueryAttention"): Node(
    {
      "use_bias": "True",
      "combine_qkv": "False",
      "per_dim_scale": "False",
      "attention_logit_cap": "None",
      "rotary": "True",
    }
  ),
  (_ATTENTION, "MultiQueryDotProductAttention"): Node(
    {
      "use_bias": "True",
      "combine_qkv": "False",
      "per_dim_scale": "False",
      "attention_logit_cap": "None",
    }
  ),
  (f"{_ATTENTION}.rotary_position_emb_tpl", "*"): Node(),
  ("*", "GpuTritonFusedDotProductAttention"): _KERNEL,
  ("*", "GpuCudnnFusedDotProductAttention"): _KERNEL,
  ("*", "GpuCudnnFusedGroupedQueryAttention"): _KERNEL,
  ("*", "GpuTritonFusedLayerNorm"): Node(
    unsupported="the compiler fuses norms"
  ),
  ("lm", "GlamUniTransformerLmHParams"): Node(
    {"pipeline_microbatch_size": "None"}, mixin="pax_lm.Glam", fields=_MIXTURE
  ),
  ("lm", "GrokUniTransformerLmHParams"): Node(
    {"pipeline_microbatch_size": "None"}, mixin="pax_lm.Grok", fields=_MIXTURE
  ),
  ("task.early_stopping_fn", "EarlyStoppingFn"): Node(),
}


class Place(NamedTuple):
  """A class that is used for one field only.

  Attributes:
    path: The field.
    sets: Knobs with the values of the class's defaults.
  """

  path: str
  sets: Mapping[str, str] = {}


PLACES: Final[Mapping[str, Place]] = {
  "StackedTransformer": Place(
    "stack",
    {
      "activation": "nn.relu",
      "attention_logit_cap": "None",
      "combine_qkv": "False",
      "gated_activation": "False",
      "mlp_bias": "True",
      "per_dim_scale": "True",
      "rotary": "False",
      "use_bias": "True",
    },
  ),
  "StackedTransformerRepeated": Place("stack"),
  "PipelinedTransformer": Place("stack"),
}


class Call(NamedTuple):
  """A function of Pax that changes a configuration.

  Attributes:
    sets: Knobs, with the source of their values.
    arguments: Knobs by argument of the function.
    note: Reason why it is not needed.
  """

  sets: Mapping[str, str] = {}
  arguments: Mapping[str, str] = {}
  note: str = ""


_DEFAULT_RATES: Final = {
  "learning_rate": "learning_rate",
  "weight_decay": "weight_decay",
  "warmup_steps": "warmup_steps",
  "decay_start": "decay_start",
  "decay_end": "decay_steps",
  "clip_gradient_norm_to_value": "max_grad_norm",
}
_EXPONENTIAL: Final = {
  "max_grad_norm": "5.0",
  "adam_b1": "0.9",
  "adam_b2": "0.99",
  "lr_schedule": "'exponential'",
}
# Comparisons of `praxis.asserts`.
ASSERTS: Final[Mapping[str, str]] = {
  "eq": "==",
  "ne": "!=",
  "lt": "<",
  "le": "<=",
  "gt": ">",
  "ge": ">=",
}
# Positional arguments are in the order of `arguments`, after the task.
CALLS: Final[Mapping[str, Call]] = {
  "set_default_adam": Call(
    {**_EXPONENTIAL, "optimizer_kind": "'adam'", "decay_steps": "300000"},
    _DEFAULT_RATES,
  ),
  "set_default_adafactor": Call(
    {**_EXPONENTIAL, "optimizer_kind": "'adafactor'", "decay_steps": "100000"},
    _DEFAULT_RATES,
  ),
  "set_adam_and_learning_rate_schedule": Call({"optimizer_kind": "'adam'"}),
  "maybe_setup_moe_params": Call(note="experts have the layer's fields"),
  "set_sharding_annotations_v1": Call(note=_SHARDED),
  "set_sharding_annotations_with_expert_parallelism": Call(note=_SHARDED),
  "set_sharding_params_v1": Call(note=_SHARDED),
  "set_sharding_params_with_expert_parallelism": Call(note=_SHARDED),
}


class Input(NamedTuple):
  """An input of Pax.

  Attributes:
    ours: The class of experiments whose data replaces it.
    train: Fields of the training input.
    evaluation: Fields of an evaluation input.
    note: Differences between the two.
  """

  ours: str
  train: Mapping[str, Field] = {}
  evaluation: Mapping[str, Field] = {}
  note: str = ""


# Fields of any input that Paxon's runner or inputs set.
INPUT_FIELDS: Final = (
  "annotate_padding_fields",
  "batch_size",
  "drop_remainder",
  "enable_packing",
  "eval_loop_num_batches",
  "file_buffer_size",
  "infeed_host_index",
  "input_random_seed",
  "is_training",
  "name",
  "num_batches_to_skip",
  "num_infeed_hosts",
  "repeat",
  "reset_for_eval",
  "shuffle",
)
_ONE_LENGTH: Final = Field("length", values.total)
_SEQIO: Final[Mapping[str, Field]] = {
  "task_feature_lengths": _ONE_LENGTH,
  "use_cached": Field("use_cached"),
  "feature_converter": Field(
    "form",
    values.map_call(
      {
        "LanguageModelFeatures": "'language_model'",
        "PrefixLanguageModelFeatures": "'prefix_lm'",
        "SequenceModelFeatures": "'encoder_decoder'",
      }
    ),
  ),
}
INPUTS: Final[Mapping[str, Input]] = {
  "SyntheticLmData": Input(
    "lm_data.Synthetic",
    {"seq_len": Field("length")},
    {"seq_len": Field("length")},
  ),
  "SeqIOInput": Input(
    "pax_lm.SeqIoDataset",
    {
      **_SEQIO,
      "mixture_name": Field("mixture"),
      "split_name": Field("train_split"),
    },
    {
      **_SEQIO,
      "mixture_name": Field("eval_tasks", values.in_tuple),
      "split_name": Field("eval_split"),
    },
    "register the tasks of SeqIO in a method register(), see"
    " tasks.lm.seqio_datasets; the shuffle seed is the knob `seed`",
  ),
  "TFRecordBertInput": Input(
    "lm_data.Text",
    note="MLPerf's files of masked tokens are not read; set train_files to"
    " text, which is masked in each step",
  ),
}
