"""Pax's names in classes of experiments, and ours.

Constants that are not here are the user's own.
"""

from collections.abc import Iterator, Mapping
import re
from typing import Final, NamedTuple

from paxon.tools.pax_migration import values

_SCALED: Final = "stacks are always scanned over their layers"
_PROFILER: Final = "pass --profile_steps=10:13 to a run"

ACTIVATIONS: Final[Mapping[str, str]] = {
  "ELU": "nn.elu",
  "Exp": "jnp.exp",
  "GELU": "nn.gelu",
  "ReLU": "nn.relu",
  "ReLU6": "nn.relu6",
  "SiLU": "nn.silu",
  "Sigmoid": "nn.sigmoid",
  "Softplus": "nn.softplus",
  "Swish": "nn.silu",
  "Tanh": "nn.tanh",
}
# Values of AutodiffCheckpointType.
REMAT: Final[Mapping[str, str]] = {
  "SAVE_EVERYTHING": "None",
  "SAVE_NOTHING": "remat.save_nothing",
  "SAVE_ITERATION_INPUT": "remat.save_nothing",
  "SAVE_TRANSFORMER_LAYER_OUTPUT": "remat.save_nothing",
  "SAVE_DOT_ONLY": "remat.save_matmuls",
  "SAVE_DOT_WITH_NO_BATCH_DIM": "remat.save_projections",
  "SAVE_OUT_PROJ": "remat.save_only(remat.ATTENTION_OUTPUT)",
  "SAVE_CONTEXT": "remat.save_only(remat.ATTENTION_CONTEXT)",
  "SAVE_CONTEXT_AND_OUT_PROJ": (
    "remat.save_only(remat.ATTENTION_CONTEXT, remat.ATTENTION_OUTPUT)"
  ),
  "SAVE_QKV_OUT_PROJ": (
    "remat.save_only(*remat.ATTENTION_INPUTS, remat.ATTENTION_OUTPUT)"
  ),
  "SAVE_QKV_OUT_PROJ_SEPARATE": (
    "remat.save_only(*remat.ATTENTION_INPUTS, remat.ATTENTION_OUTPUT)"
  ),
  "SAVE_DOT_FOR_MLPERF_200B": "remat.save_only(*remat.ATTENTION)",
  "SAVE_DOT_EXCEPT_LOGITS_FFN1": (
    "remat.save_only(*remat.ATTENTION, remat.FEED_FORWARD_OUTPUT)"
  ),
  "SAVE_DOT_EXCEPT_LOGITS": (
    "remat.save_only(*remat.ATTENTION, *remat.FEED_FORWARD)"
  ),
}
SCHEDULES: Final[Mapping[str, str]] = {
  "linear_rampup_exponential_decay": "'exponential'",
  "linear_rampup_cosine_decay": "'cosine'",
  "constant": "'constant'",
}

activation: Final = values.map_name("the activation", ACTIVATIONS)
remat: Final = values.map_name("the checkpoint policy", REMAT)
dtype: Final = values.map_name(
  "the dtype", {"bfloat16": '"bfloat16"', "float32": '"float32"'}
)


class Constant(NamedTuple):
  """A class constant of Pax.

  Attributes:
    knob: Our knob; empty for a constant that is not needed.
    convert: The conversion of its value.
    note: Reason why it is not needed.
  """

  knob: str
  convert: values.Convert = values.same
  note: str = ""


def _make_unneeded(
  note: str, convert: values.Convert | None = None
) -> Constant:
  return Constant("", convert or (lambda given: ""), note)


_LM: Final[Mapping[str, Constant]] = {
  "ACTIVATION_CLS": Constant("activation", activation),
  "ADAM_BETA1": Constant("adam_b1", values.nonzero(0.9)),
  "ADAM_BETA2": Constant("adam_b2", values.nonzero(0.999)),
  "ADAM_CLIP_THRESHOLD": Constant("max_update_rms", values.positive),
  "ADAM_EPSILON": Constant("adam_epsilon", values.nonzero(1e-6)),
  "ADAM_EPSILON_ROOT": Constant("adam_epsilon_root"),
  "ATTEN_LOGIT_CAP": Constant("attention_logit_cap", values.positive),
  "CHECKPOINT_EVERY_N_STEPS": Constant("checkpoint_every_steps"),
  "CHECKPOINT_MAX_TO_KEEP": Constant("max_checkpoints"),
  "CHECKPOINT_POLICY": Constant("remat_policy", remat),
  "CIRCULAR_REPEAT": Constant("circular_repeats"),
  "CLIP_GRADIENT_NORM_TO_VALUE": Constant("max_grad_norm", values.nonzero(5.0)),
  "COMBINE_QKV": Constant("combine_qkv"),
  "DECAY_END": Constant("decay_steps"),
  "DIMS_PER_HEAD": Constant("head_dim"),
  "DROPOUT_PROB": _make_unneeded(
    "0.0 means no dropout",
    values.only(0, why="set the fields `dropout` of the blocks in model()"),
  ),
  "EMBEDDING_LOOKUP_STYLE": _make_unneeded("both styles give the same values"),
  "EMB_W_DATA_DIMS": _make_unneeded("sharding rules place the embedding"),
  "ENABLE_DCONV": _make_unneeded(
    "there is no convolution by default",
    values.only(False, why="set the field `convolution` in attention()"),
  ),
  "EVAL_INTERVAL_STEPS": Constant("eval_every_steps"),
  "FPROP_DTYPE": Constant("dtype", dtype),
  "HIDDEN_DIMS": Constant("mlp_dim"),
  "INPUT_DROPOUT_PROB": Constant("embedding_dropout", values.positive),
  "LEARNING_RATE": Constant("learning_rate"),
  "LR_COS_DECAY_END": Constant("cosine_decay_steps"),
  "LR_COS_DECAY_START": Constant("cosine_decay_start"),
  "LR_COS_MAX": _make_unneeded(
    "1.0 is the peak itself",
    values.only(1.0, why="multiply learning_rate by it"),
  ),
  "LR_COS_MIN_RATIO": Constant("cosine_min_rate_share"),
  "LR_COS_WARMUP": Constant("cosine_warmup_steps"),
  "LR_LRED_DECAY_END": Constant("decay_steps"),
  "LR_LRED_DECAY_START": Constant("decay_start"),
  "LR_LRED_MAX": _make_unneeded(
    "1.0 is the peak itself",
    values.only(1.0, why="multiply learning_rate by it"),
  ),
  "LR_LRED_MIN_RATIO": Constant("min_rate_share"),
  "LR_LRED_WARMUP": Constant("warmup_steps"),
  "LR_SCHEDULE": Constant(
    "lr_schedule", values.map_name("the schedule", SCHEDULES)
  ),
  "MAX_SEQ_LEN": Constant("length"),
  "MICROBATCH_SIZE": Constant("pipeline_microbatch_size"),
  "MODEL_CLASS": _make_unneeded(
    "the model class is that of the base class",
    values.only(values.UNKNOWN, why="the model class is of the base class"),
  ),
  "MODEL_DIMS": Constant("embed_dim"),
  "NORM_POLICY": _make_unneeded(
    "blocks are pre-norm",
    values.only("pre", why="set the class of the blocks in model()"),
  ),
  "NUM_HEADS": Constant("num_heads"),
  "NUM_LAYERS": Constant("num_layers"),
  "NUM_MICROBATCHES": Constant("num_pipeline_microbatches"),
  "NUM_STAGES": Constant("num_stages"),
  "PACKED_INPUT": _make_unneeded(
    "segment ids come with packed batches only",
  ),
  "PIPELINE_BROADCAST_INPUTS": _make_unneeded("the compiler chooses"),
  "PROFILER_CAPTURE_STEP": _make_unneeded(_PROFILER),
  "PROFILER_MIN_DURATION_SEC": _make_unneeded(_PROFILER),
  "PROFILER_NUM_STEPS": _make_unneeded(_PROFILER),
  "RELATIVE_BIAS": Constant("relative_bias"),
  "SEPARATE_EMBEDDING": Constant("separate_embedding"),
  "SOFTMAX_CAP_LOGITS": Constant("logit_cap", values.positive),
  "STREAM_IO": Constant("stream_io", values.switch("True", "None")),
  "SUMMARY_INTERVAL_STEPS": Constant("summary_every_steps"),
  "TRAINABLE_PE_MAX_SEQ_LEN": Constant("max_positions"),
  "TRAINABLE_POSITION_EMB": Constant(
    "positions", values.switch("'learned'", "'sinusoidal'")
  ),
  "TRAINING_OPTIMIZED_SHARDING": _make_unneeded(
    "sharding rules are for training",
    values.only(True, why="set rules = 'weight_stationary' for sampling"),
  ),
  "USE_BIAS": Constant("use_bias"),
  "USE_CUDNN_FLASH_ATTENTION": _make_unneeded(
    "the kernel is chosen by device",
    values.only(
      False, why="set attention_kernel = cudnn_attention.cudnn on NVIDIA GPUs"
    ),
  ),
  "USE_EXPERT_PARALLEL": _make_unneeded("the mesh has the axis `expert`"),
  "USE_FP8": Constant("quantization", values.switch("'fp8'", "None")),
  "USE_GATED_ACTIVATION": Constant("gated_activation"),
  "USE_REPEATED_LAYER": _make_unneeded(_SCALED),
  "USE_ROTARY_POSITION_EMB": Constant("rotary"),
  "VOCAB_SIZE": Constant("vocab_size"),
  "WEIGHT_DECAY": Constant("weight_decay"),
}
_BERT: Final[Mapping[str, Constant]] = {
  **_LM,
  "CHECKPOINT_SAVE_MAX_TO_KEEP": Constant("max_checkpoints"),
  "ENABLE_BFLOAT16": Constant(
    "dtype", values.switch("'bfloat16'", "'float32'")
  ),
  "FORCE_MASK_GENERATION": _make_unneeded(
    "tokens are masked at random each step"
  ),
  "MASK_TOKEN_ID": _make_unneeded(
    "MLPerf's data is masked with the id of its input, 103, the default here"
  ),
}
_MLP: Final[Mapping[str, Constant]] = {
  "CHECKPOINT_EVERY_N_STEPS": Constant("checkpoint_every_steps"),
  "HIDDEN_DIM": Constant("mlp_dim"),
  "INPUT_DIM": Constant("embed_dim"),
  "LEARNING_RATE": Constant("learning_rate"),
  "MLP_WEIGHT_SHARDING": _make_unneeded("sharding follows rules"),
  "NUM_LAYER": Constant("num_layers"),
  "NUM_TRAIN_STEPS": Constant("num_train_steps", values.steps),
  "OUTPUT_DIM": _make_unneeded("it is INPUT_DIM, which is `embed_dim`"),
  "SOFTMAX_WEIGHT_SHARDING": _make_unneeded("sharding follows rules"),
  "SUMMARY_INTERVAL_STEPS": Constant("summary_every_steps"),
  "TRAINING_OPTIMIZED_SHARDING": _make_unneeded(
    "sharding rules are for training"
  ),
  "WEIGHT_DECAY": Constant("weight_decay"),
}
_DATA: Final[Mapping[str, Constant]] = {
  "MESH_AXIS_NAMES": _make_unneeded("axes of a mesh have fixed names"),
  "MAX_SEQ_LEN": Constant("length"),
  "PERCORE_BATCH_SIZE": Constant("per_device_batch_size"),
  "PERCORE_EVAL_BATCH_SIZE": _make_unneeded(
    "evaluation has the training batch",
    values.only(None, why="set the batch of the split in datasets()"),
  ),
  "TRAINING_NUM_BATCHES_TO_SKIP": _make_unneeded(
    "a run resumes at the position of its data",
    values.only(None, why="a run resumes at the position of its data"),
  ),
}
_C4: Final[Mapping[str, Constant]] = {
  **_DATA,
  "TRAINING_SEED": Constant("data_seed"),
  "TRAIN_MIXTURE": _make_unneeded(
    "C4's mixture is fixed",
    values.only("c4_lm_v301_gpt", why="use seqio_datasets.SeqIo"),
  ),
  "EVAL_MIXTURE": _make_unneeded(
    "C4's mixture is fixed",
    values.only(
      "c4_lm_v301_gpt_eval_tokenized", why="use seqio_datasets.SeqIo"
    ),
  ),
}
# The mesh is made of them.
SHAPES: Final = ("ICI_MESH_SHAPE", "MESH_SHAPE", "DCN_MESH_SHAPE")


# Values of switches in Pax's base classes.
DEFAULTS: Final[Mapping[str, object]] = {
  "ENABLE_DCONV": False,
  "USE_CUDNN_FLASH_ATTENTION": False,
  "USE_FP8": False,
}


class Base(NamedTuple):
  """A base class of Pax.

  Attributes:
    ours: Our class, with its module.
    constants: The constants that it declares.
    is_data: Whether it has data and no model.
  """

  ours: str
  constants: Mapping[str, Constant]
  is_data: bool = False


def _lm(name: str, constants: Mapping[str, Constant] = _LM) -> Base:
  return Base(f"pax_lm.{name}", constants)


BASES: Final[Mapping[str, Base]] = {
  **{
    name: _lm(name)
    for name in (
      "TransformerLmPmapAdam",
      "TransformerLmSpmdAdafactor",
      "TransformerLmSpmdAdam",
      "TransformerLmSpmdPipelineAdafactor",
      "TransformerLmSpmdPipelineAdam",
    )
  },
  "BaseExperiment": Base("experiment.Experiment", _DATA),
  "BertDataset": Base(
    "pax_lm.BertDataset",
    {
      **_DATA,
      "MLPERF_REMASK": _make_unneeded("tokens are masked at random each step"),
      "RANDOM_BUFFER_SIZE": _make_unneeded("all documents are shuffled"),
    },
    is_data=True,
  ),
  "C4UnsupervisedDataset": Base(
    "pax_lm.C4UnsupervisedDataset", _C4, is_data=True
  ),
  "ClassificationModelAdam": Base("pax_lm.ClassificationModelAdam", _MLP),
  "LambadaDataset": Base("pax_lm.PileUnsupervisedDataset", _DATA, is_data=True),
  "PileUnsupervisedDataset": Base(
    "pax_lm.PileUnsupervisedDataset", _DATA, is_data=True
  ),
  "SyntheticDataset": Base("pax_lm.SyntheticDataset", _DATA, is_data=True),
  "TransformerBertPmapAdam": _lm("TransformerBertPmapAdam", _BERT),
  "TransformerBertSpmdAdafactor": _lm("TransformerBertSpmdAdafactor", _BERT),
}

# What replaces names in layers, inputs and helpers, which a person rewrites.
HINTS: Final[Mapping[str, str]] = {
  "BaseInput": "inputs.base_input.BaseInput",
  "BaseLayer": "flax.linen.Module",
  "BaseModel": "a module with loss(batch), see DESIGN in docs/one_layer.md",
  "ConvBNAct": "nn.Conv and layers.norms.batch_norm.BatchNorm",
  "DotProductAttention": (
    "layers.attention.grouped_query.GroupedQueryAttention"
  ),
  "Dropout": "nn.Dropout",
  "Embedding": "layers.embedding.Embedding",
  "FeedForward": "layers.linear.Linear",
  "FiddleBaseParameterizable": ("early_stopping() or the knob target_log_pplx"),
  "HParams": "fields of the class itself, annotated",
  "LayerNorm": "layers.norms.layer_norm.LayerNorm",
  "LayerNormalizedLstmCellSimple": "layers.recurrent",
  "Linear": "layers.linear.Linear",
  "NestedMap": "a plain dict",
  "Pooling": "nn.avg_pool or nn.max_pool",
  "RmsNorm": "layers.norms.rms_norm.RmsNorm",
  "StackedTransformer": "layers.stacks.stack.Stack",
  "TaskRegistry": (
    "SeqIO's tasks, which a method register() adds, see tasks.lm.seqio_datasets"
  ),
  "TransformerFeedForward": "layers.feed_forward.FeedForward",
  "WeightHParams": "logical.partitioned(init, names of axes)",
  "add_summary": "layers.summaries",
  "asserts": "if ...: raise ValueError(...)",
  "create_child": "a field of the module",
  "create_children": "a field of the module",
  "create_variable": "self.param(...) in a method with nn.compact",
  "extend_step": "decode_step",
  "paddings": "segment_ids, 0 is padding; mask, True attends",
  "pax_fiddle": "fdl.Config of the class",
  "template_field": "a field whose default is the module",
}

# Import statements of the modules that the output names.
IMPORTS: Final[Mapping[str, str]] = {
  "ClassVar": "from typing import ClassVar",
  "adamw": "from paxon.learners.optimizers import adamw",
  "experiment": "from paxon.runner import experiment",
  "jnp": "from jax import numpy as jnp",
  "lm_data": "from paxon.tasks.lm import lm_data",
  "math": "import math",
  "nn": "from flax import linen as nn",
  "np": "import numpy as np",
  "pax_lm": "from paxon.tasks.lm import pax_lm",
  "remat": "from paxon.layers import remat",
}


def find_hints(source: str, line: int) -> Iterator[tuple[int, str]]:
  """Yields lines of a source and what replaces a name of Pax in it.

  Args:
    source: The source.
    line: The number of its first line in the file.
  """
  seen = set()
  for i, text in enumerate(source.splitlines()):
    for name in re.findall(r"\w+", text.partition("#")[0]):
      if name in HINTS and name not in seen:
        seen.add(name)
        yield line + i, f"{name}: {HINTS[name]}"
