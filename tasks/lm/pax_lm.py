"""Base classes of experiments that `tools/migrate_pax` rewrites from Pax.

They have the names, values and models of the classes in
`paxml/tasks/lm/model_params.py` and `paxml/tasks/lm/params/c4.py`, whose
constants are knobs here. `exact` is on, so the parameters, their initial
distributions and the learning rate of each step are Pax's; other differences
are listed in `tasks.lm.transformer_lm_spmd`.
"""

import math
from typing import Any, Literal

import fiddle as fdl
from flax import linen as nn

from paxon.inputs import unset_input
from paxon.layers import feed_forward, remat, unembedding
from paxon.layers.attention import position_bias, projections
from paxon.layers.norms import rms_norm
from paxon.layers.positions import position_embedding, rotary_embedding
from paxon.learners import schedules
from paxon.learners.optimizers import adamw
from paxon.runner import knobs, user_error
from paxon.runner import task as task_lib
from paxon.runner.settings import training
from paxon.tasks.lm import (
  lm_data,
  masked_lm,
  mixture_lm,
  mlp_lm,
  seqio_datasets,
  transformer_lm_spmd,
)

# The batch of MLPerf's GPT-3, and the largest one with the smaller rate.
_MLPERF_BATCH, _SMALL_BATCH = 1536, 3584
_SCHEDULES = {
  "exponential": schedules.Exponential,
  "cosine": schedules.Cosine,
}


class LayerKnobs(knobs.Group):
  """Knobs of layers.

  Attributes:
    gated_activation: Whether feed-forward layers are gated.
    mlp_bias: Whether feed-forward layers have biases.
    separate_embedding: Whether the head has its own table.
    head_bias: Whether the head has a bias.
    scale_embedding: Whether embedded tokens are multiplied by
      `sqrt(embed_dim)`.
    positions: Kind of position embedding; `none` for rotary or relative ones.
    max_positions: Size of a learned position embedding; None is `length`.
    rms_norm: Whether norms are RMS norms instead of layer norms.
    norm_epsilon: Added to the variance in norms.
    embedding_dropout: Dropout rate of embedded tokens; None disables it.
  """

  gated_activation: bool = False
  mlp_bias: bool = True
  separate_embedding: bool = False
  head_bias: bool = True
  scale_embedding: bool = True
  positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
  max_positions: int | None = 16_384
  rms_norm: bool = False
  norm_epsilon: float = 1e-6
  embedding_dropout: float | None = None


class AttentionKnobs(knobs.Group):
  """Knobs of attention.

  Attributes:
    num_heads: Number of query heads; None is `embed_dim // head_dim`.
    head_dim: Width of a head; None is `embed_dim // num_heads`.
    num_kv_heads: Number of key/value heads; None is `num_heads`.
    use_bias: Whether attention projections have biases.
    combine_qkv: Whether one array holds the three projections of the input.
    per_dim_scale: Whether queries have a learned scale per feature of a head.
    rotary: Whether attention has rotary positions.
    relative_bias: Whether attention has T5's relative biases.
  """

  num_heads: int | None = None
  head_dim: int | None = 128
  num_kv_heads: int | None = None
  use_bias: bool = False
  combine_qkv: bool = True
  per_dim_scale: bool = True
  rotary: bool = False
  relative_bias: bool = False


class TrainingKnobs(knobs.Group):
  """Knobs of the optimizer and its schedule, of checkpoints and of the end.

  Attributes:
    optimizer_kind: Adam, or Adafactor with Pax's factoring.
    adam_b1: Decay of the first moment, also of Adafactor.
    adam_b2: Decay of the second moment, also of Adafactor.
    adam_epsilon: Added to the root of the second moment.
    adam_epsilon_root: Added to the second moment.
    max_update_rms: Largest RMS of an update of Adam; None disables it.
    learning_rate: Peak learning rate; None is MLPerf's for the batch size.
    lr_schedule: Kind of the decay; `constant` has no warmup.
    decay_start: Step at which the exponential decay starts.
    min_rate_share: Final rate of the exponential decay, as a share.
    cosine_warmup_steps: Warmup of the cosine schedule; None is MLPerf's.
    cosine_decay_start: Step at which the cosine starts; None follows the
      warmup.
    cosine_decay_steps: Step at which the cosine ends; None is MLPerf's.
    cosine_min_rate_share: Final rate of the cosine, as a share of the peak.
    max_checkpoints: Number of newest checkpoints that are kept.
    target_log_pplx: Training ends when the validation loss is at most this;
      None disables it.
  """

  optimizer_kind: Literal["adam", "adafactor"] = "adafactor"
  adam_b1: float = 0.9
  adam_b2: float = 0.99
  adam_epsilon: float = 1e-6
  adam_epsilon_root: float = 0.0
  max_update_rms: float | None = 1.0
  learning_rate: float | None = 2.5e-4
  lr_schedule: Literal["exponential", "cosine", "constant"] = "exponential"
  decay_start: int = 4001
  min_rate_share: float = 0.1
  cosine_warmup_steps: int | None = 4000
  cosine_decay_start: int | None = 4001
  cosine_decay_steps: int | None = 300_000
  cosine_min_rate_share: float = 0.1
  max_checkpoints: int = 10
  target_log_pplx: float | None = None


class PaxLm(  # pyrefly: ignore[inconsistent-inheritance]
  LayerKnobs,
  AttentionKnobs,
  TrainingKnobs,
  transformer_lm_spmd.TransformerLmSpmd,
):
  """Pax's `TransformerLmSpmdAdafactor` with its options as knobs."""

  exact = True
  decay_steps = 100_000

  def get_heads(self) -> tuple[int, int]:
    """Returns the number of heads and their width.

    Raises:
      UserError: They do not make up `embed_dim`.
    """
    count, width = self.num_heads, self.head_dim
    count = self.embed_dim // width if count is None and width else count
    width = self.embed_dim // count if width is None and count else width
    if not count or not width or count * width != self.embed_dim:
      raise user_error.UserError(
        f"{type(self).__name__}: num_heads * head_dim must be embed_dim"
        f" ({self.embed_dim}), got {self.num_heads} and {self.head_dim}."
      )
    return count, width

  def norm(self) -> fdl.Config[Any]:
    """Returns an RMS norm, or a layer norm that stores its scale minus one."""
    if self.rms_norm:
      return fdl.Config(rms_norm.RmsNorm, epsilon=self.norm_epsilon)
    made = super().norm()
    made.epsilon = self.norm_epsilon
    return made

  def embedding(self) -> fdl.Config[Any]:
    """Returns the token embedding, which is the head unless separate."""
    made = super().embedding()
    if not self.scale_embedding:
      made.input_scale = 1.0
    made.use_bias = self.head_bias and not self.separate_embedding
    return made

  def head(self) -> fdl.Config[Any] | None:
    """Returns the separate head, or None."""
    if not self.separate_embedding:
      return None
    return fdl.Config(
      unembedding.Unembedding,
      vocab_size=self.vocab_size,
      use_bias=self.head_bias,
      **self.initial("kernel_init"),
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns the position embedding, or None."""
    size = self.max_positions
    if self.positions == "none":
      return None
    if self.positions == "sinusoidal":
      return super().position_embedding()
    return fdl.Config(
      position_embedding.LearnedPositions,
      max_length=self.length if size is None else size,
      **self.initial("embedding_init"),
    )

  def attention(self) -> fdl.Config[Any]:
    """Returns the attention of a layer."""
    made = super().attention()
    made.num_heads, made.head_dim = self.get_heads()
    made.num_kv_heads = self.num_kv_heads or made.num_heads
    if not self.combine_qkv or made.num_kv_heads != made.num_heads:
      made.projections = fdl.Config(
        projections.SeparateProjections,
        **self.initial("kernel_init", "output_init"),
      )
    made.projections.use_bias = self.use_bias
    if not self.per_dim_scale:
      made.logits.query_scale = None
    if self.rotary:
      made.rotary = fdl.Config(rotary_embedding.Rotary)
    if self.relative_bias:
      made.logits.position_bias = fdl.Config(position_bias.RelativeBias)
    return made

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward layer."""
    made = super().feed_forward()
    if self.gated_activation:
      fdl.update_callable(made, feed_forward.GatedFeedForward)
    made.use_bias = self.mlp_bias
    return made

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    model = super().model()
    if self.embedding_dropout is not None:
      model.embedding_dropout = fdl.Config(nn.Dropout, self.embedding_dropout)
    return model

  def schedule(self) -> fdl.Config[Any]:
    """Returns Pax's schedule; missing values are MLPerf's."""
    peak, batch = self.learning_rate, self.global_batch_size
    if peak is None:
      peak = 2e-5 if batch <= _SMALL_BATCH else 3e-5
    warmup, start = self.cosine_warmup_steps, self.cosine_decay_start
    if warmup is None:
      warmup = math.ceil(265 * _MLPERF_BATCH / batch)
    end = self.cosine_decay_steps
    if end is None:
      end = math.ceil(108_600 * _MLPERF_BATCH / batch)
    start = warmup + 1 if start is None else start
    cosine = warmup, start, end, self.cosine_min_rate_share
    exponential = (
      self.warmup_steps,
      self.decay_start,
      self.decay_steps,
      self.min_rate_share,
    )
    kind = self.lr_schedule
    if kind == "constant":
      return fdl.Config(schedules.Constant, value=peak)
    warmup, start, end, share = cosine if kind == "cosine" else exponential
    return fdl.Config(
      schedules.RampHoldDecay,
      peak=peak,
      warmup_steps=warmup,
      decay_start=start,
      decay_end=end,
      min_ratio=share,
      decay=_SCHEDULES[kind],
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Adam or Adafactor."""
    fields: dict[str, Any] = {
      "epsilon": self.adam_epsilon,
      "epsilon_root": self.adam_epsilon_root,
      "max_update_rms": self.max_update_rms,
    }
    if self.optimizer_kind == "adafactor":
      made, fields = self.adafactor(), {}
    else:
      made = fdl.Config(
        adamw.AdamW, schedule=self.schedule(), weight_decay=self.weight_decay
      )
    for field, value in {
      "b1": self.adam_b1,
      "b2": self.adam_b2,
      **fields,
    }.items():
      setattr(made, field, value)
    return made

  def retention(self) -> fdl.Config[training.Retention]:
    """Returns the number of checkpoints that are kept."""
    return fdl.Config(training.Retention, newest=self.max_checkpoints)

  def early_stopping(self) -> fdl.Config[training.EarlyStopping] | None:
    """Returns the target, if it is set and there is a validation split."""
    return self.stop_at_log_pplx(self.target_log_pplx)

  def shrink(self) -> Any:
    """Returns a toy-sized version."""
    kv_heads = None if self.num_kv_heads is None else 2
    return super().shrink().replace(max_positions=None, num_kv_heads=kv_heads)


class TransformerLmSpmdAdafactor(PaxLm):
  """Pax's base class with Adafactor, 0.57 B parameters."""

  num_layers = 10
  embed_dim = 2048
  mlp_dim = 8192


class TransformerLmSpmdPipelineAdafactor(TransformerLmSpmdAdafactor):
  """Pax's base class of pipelines; subclasses set the stages."""


class TransformerLmSpmdAdam(TransformerLmSpmdAdafactor):
  """Pax's base class with Adam, 32 layers."""

  num_layers = 32
  num_heads = 16
  embed_dim = 1024
  mlp_dim = 4096
  dtype = "float32"
  learning_rate = 1e-3
  decay_steps = 300_000
  optimizer_kind = "adam"


class TransformerLmSpmdPipelineAdam(TransformerLmSpmdAdam):
  """Pax's base class of pipelines with Adam; subclasses set the stages."""


class TransformerLmPmapAdam(TransformerLmSpmdAdam):
  """Pax's base class of replicated models; the mesh is one device.

  Pax used all devices of the run; here `--fdl.mesh=data=N` sets their number.
  """

  head_dim = None
  remat_policy = None
  logit_cap = None
  rules = "replicated"
  mesh = "data=1"
  checkpoint_every_steps = 100
  combine_qkv = False


class TransformerBertSpmdAdafactor(PaxLm, masked_lm.MaskedTransformerLm):
  """Pax's base class of BERT with Adafactor, 32 layers."""

  length = 512
  num_layers = 32
  num_heads = 16  # pyrefly: ignore[bad-override]
  embed_dim = 1024
  mlp_dim = 4096
  head_dim = None  # pyrefly: ignore[bad-override-mutable-attribute]
  dtype = "float32"
  learning_rate = 1e-3  # pyrefly: ignore[bad-override-mutable-attribute]
  remat_policy = remat.save_projections
  checkpoint_every_steps = 500


class TransformerBertPmapAdam(TransformerBertSpmdAdafactor):
  """Pax's base class of replicated BERT models with Adam."""

  num_layers = 4
  num_heads = 8
  embed_dim = 128
  mlp_dim = 512
  dtype = "bfloat16"
  decay_steps = 300_000
  optimizer_kind = "adam"
  rules = "replicated"
  mesh = "data=1"
  checkpoint_every_steps = 5000


class ClassificationModelAdam(mlp_lm.MlpLm):
  """Pax's MLP, whose softmax has a bias."""

  embed_dim = 4096
  mlp_dim = 7168

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    task = super().task()
    task.model.embedding.use_bias = True
    return task


class PaxMixture(mixture_lm.MixtureLm, PaxLm):
  """Experts in some layers of a `PaxLm`; use it as the first base class.

  Dense layers are those of the `PaxLm`, whatever `gated_experts` is.
  """

  gated_experts = False
  load_balance_weight = 1.0

  def dense_feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward layer of dense layers."""
    return super(mixture_lm.MixtureLm, self).feed_forward()

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    # Reads its knobs, which have no effect if all layers have experts.
    self.dense_feed_forward()
    return super().model()


class Glam(PaxMixture):
  """Pax's GLaM: experts in every second layer, RMS norms, relative biases.

  As in GShard, attention logits are not scaled, and the head's input is.
  """

  mixture_every = 2
  load_balance_weight = 0.01
  output_z_loss = 1e-4
  activation = nn.gelu
  gated_activation = True
  mlp_bias = False
  use_bias = False
  combine_qkv = False
  per_dim_scale = False
  positions = "none"
  relative_bias = True
  rms_norm = True
  norm_epsilon = 1e-6
  head_bias = False
  scale_embedding = False
  logit_cap = None
  attention_logit_cap = None

  @property
  def stream_io(self) -> bool | None:  # pyrefly: ignore[bad-override]
    """On in a pipeline."""
    return None if self.num_stages is None else True

  def embedding(self) -> fdl.Config[Any]:
    """Returns Pax's `GShardSharedEmbeddingSoftmax`."""
    made = super().embedding()
    made.embedding_init = fdl.Config(nn.initializers.normal, 1.0)
    made.attend_scale = self.embed_dim**-0.5
    return made

  def attention(self) -> fdl.Config[Any]:
    """Returns attention whose initial queries replace the scale of logits."""
    made = super().attention()
    heads, width = made.num_heads, made.head_dim
    made.logits.scale = 1.0
    for field, fan in {
      "kernel_init": self.embed_dim,
      "query_init": self.embed_dim * width,
      "output_init": heads * width,
    }.items():
      init = fdl.Config(nn.initializers.normal, fan**-0.5)
      setattr(made.projections, field, init)
    return made


class Grok(Glam):
  """Pax's Grok: gated experts in each layer, grouped queries, biases."""

  mixture_every = 1
  gated_experts = True
  use_bias = True
  relative_bias = False


class SyntheticDataset(lm_data.Synthetic):
  """Pax's synthetic tokens, 16 sequences per device."""

  length = 1024
  per_device_batch_size = 16


class C4UnsupervisedDataset(seqio_datasets.C4):
  """Pax's C4, one sequence per device."""

  length = 1024
  per_device_batch_size = 1


class SeqIoDataset(seqio_datasets.SeqIo):
  """A SeqIO mixture whose tasks a method `register()` adds.

  Without the method, plans and lints work, and a run fails with one line.
  """

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the mixture's tokenizer; without tasks, none."""
    return super().get_data_fields() if self.register() else {}

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns the mixture and the evaluation tasks."""
    splits = super().datasets()
    if self.register() is not None:
      return splits
    return {
      "train": fdl.Config(
        unset_input.UnsetInput,
        global_batch_size=self.global_batch_size,
        length=self.length,
        knob="mixture",
        example=f"{self.mixture}, with a method register() that adds it",
      )
    }


class BertDataset(lm_data.Text):
  """Text instead of MLPerf's files of masked tokens, 8 sequences per device."""

  length = 512
  per_device_batch_size = 8


class PileUnsupervisedDataset(lm_data.Text):
  """The Pile as text files, one sequence per device."""

  length = 2048
  per_device_batch_size = 1
