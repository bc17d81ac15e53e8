"""Base class of experiments that train a Conformer with CTC."""

import abc
from typing import Any, Literal

import fiddle as fdl
from flax import linen as nn

from paxon.inputs.speech import alphabet, speech_input, speech_sources
from paxon.layers import feed_forward, linear
from paxon.layers.attention import grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import recognizer
from paxon.layers.norms import batch_norm, layer_norm
from paxon.layers.positions import rotary_embedding
from paxon.layers.speech import audio_encoder, conformer, spectrogram
from paxon.layers.stacks import stack
from paxon.layers.vision import convolutions
from paxon.learners import learner, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.sharding import axes

_TRAIN = "train"


class SpeechData(experiment.Experiment):
  """Clips of speech and their texts.

  Attributes:
    sample_rate: Samples per second.
    symbols: The characters of texts.
    clips: `files`, or `tones`, made-up words of chords, which need no data.
    max_seconds: Longer training clips are left out.
    max_labels: Labels of the longest text in training.
    join_clips: Whether training joins short clips up to these lengths, so that
      batches have less padding.
    max_test_seconds: Longer test clips are left out.
    max_test_labels: Labels of the longest text in test splits.
  """

  sample_rate: int = 8000
  symbols: str = alphabet.ENGLISH
  clips: Literal["files", "tones"] = "files"
  max_seconds: float = 5.0
  max_labels: int = 100
  join_clips: bool = False
  max_test_seconds: float = 15.0
  max_test_labels: int = 240

  @abc.abstractmethod
  def table(self, split: str) -> str:
    """Returns the path of a split's table of clips and texts."""

  @abc.abstractmethod
  def test_splits(self) -> tuple[str, ...]:
    """Returns the splits that are evaluated."""

  def data_hint(self) -> str:
    """Returns a sentence about how to get the data, for errors."""
    return ""

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless training clips and one epoch of each test split."""
    made = {
      _TRAIN: fdl.Config(
        speech_input.SpeechInput,
        source=self._source(_TRAIN),
        global_batch_size=self.global_batch_size,
        shuffle_seed=self.seed,
        max_seconds=self.max_seconds,
        max_labels=self.max_labels,
        **self._get_shared_fields(),
      )
    }
    for split in self.test_splits():
      made[split] = fdl.Config(
        speech_input.SpeechInput,
        source=self._source(split),
        global_batch_size=self.global_batch_size,
        shuffle_seed=None,
        num_epochs=1,
        max_seconds=self.max_test_seconds,
        max_labels=self.max_test_labels,
        **self._get_shared_fields(),
      )
    return made

  def _get_shared_fields(self) -> dict[str, Any]:
    return {
      "sample_rate": self.sample_rate,
      "alphabet": fdl.Config(alphabet.Alphabet, symbols=self.symbols),
    }

  def _source(self, split: str) -> fdl.Config[Any]:
    clips = self._clips(split)
    if not self.join_clips or split != _TRAIN:
      return clips
    return fdl.Config(
      speech_sources.JoinedClips,
      source=clips,
      max_seconds=self.max_seconds,
      max_characters=self.max_labels,
    )

  def _clips(self, split: str) -> fdl.Config[Any]:
    files = fdl.Config(
      speech_sources.TranscribedFiles,
      table=self.table(split),
      sample_rate=self.sample_rate,
      max_seconds=self.max_seconds
      if split == _TRAIN
      else self.max_test_seconds,
      how=self.data_hint(),
    )
    if self.clips == "files":
      return files
    splits = (_TRAIN, *self.test_splits())
    return fdl.Config(
      speech_sources.ToneSpeech,
      num_examples=2 * self.global_batch_size,
      sample_rate=self.sample_rate,
      seed=splits.index(split),
    )


class SpeechRecognition(SpeechData):
  """Trains a Conformer that maps audio to characters.

  Attributes:
    num_bins: Number of log-mel features.
    subsampling: Convolutions with stride 2 before the blocks.
    num_layers: Number of Conformer blocks.
    embed_dim: Width of the model.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of attention heads.
    kernel_size: Frames that a convolution sees.
    scan_layers: Whether the program loops over the layers.
    dropout: Rate of the dropout in the blocks.
    bin_masks: Blocks of features that SpecAugment zeroes.
    max_bins: Largest number of features of such a block.
    frame_masks: Blocks of frames that SpecAugment zeroes.
    max_frame_share: Largest size of such a block, as a share of the frames.
    peak_learning_rate: Learning rate after the warmup; it decays to zero with a
      cosine.
    warmup_fraction: Share of the steps that warm up.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
  """

  num_bins: int = 40
  subsampling: int = 2
  num_layers: int = 4
  embed_dim: int = 144
  mlp_dim: int = 576
  num_heads: int = 4
  kernel_size: int = 15
  scan_layers: bool = True
  dropout: float = 0.0
  bin_masks: int = 2
  max_bins: int = 8
  frame_masks: int = 4
  max_frame_share: float = 0.05
  peak_learning_rate: float = 1e-3
  warmup_fraction: float = 0.1
  weight_decay: float = 0.01

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    steps = self.num_train_steps
    letters = alphabet.Alphabet(symbols=self.symbols)
    model = fdl.Config(
      recognizer.Recognizer,
      encoder=self.encoder(),
      head=fdl.Config(
        linear.Linear,
        output_dim=letters.vocab_size,
        # Few characters are not split.
        kernel_axes=(axes.EMBED, None),
      ),
      space_id=letters.space_id,
    )
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupCosine,
        peak=self.peak_learning_rate,
        warmup_steps=int(self.warmup_fraction * steps),
        total_steps=steps,
        end=0.0,
      ),
      weight_decay=self.weight_decay,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner, optimizer=optimizer, max_grad_norm=1.0
      ),
      predictions=recognizer.write_log_probs,
    )

  def encoder(self) -> fdl.Config[Any]:
    """Returns the encoder from audio [B,S] to frames [B,T,D]."""
    return fdl.Config(
      audio_encoder.AudioEncoder,
      features=fdl.Config(
        spectrogram.LogMel,
        sample_rate=self.sample_rate,
        num_bins=self.num_bins,
      ),
      augmentation=fdl.Config(
        spectrogram.SpecAugment,
        bin_masks=self.bin_masks,
        max_bins=self.max_bins,
        frame_masks=self.frame_masks,
        max_frame_share=self.max_frame_share,
      ),
      subsampling=[self._subsample() for _ in range(self.subsampling)],
      projection=fdl.Config(
        linear.Linear,
        output_dim=self.embed_dim,
        kernel_axes=(axes.EMBED, None),
      ),
      stack=fdl.Config(
        stack.Stack,
        [self.block()],
        num_layers=self.num_layers,
        scan=self.scan_layers,
      ),
    )

  def block(self) -> fdl.Config[conformer.ConformerBlock]:
    """Returns a Conformer block."""

    # Fiddle builds a configuration that occurs twice as one module.
    def layer() -> fdl.Config[Any]:
      return fdl.Config(
        feed_forward.FeedForward, mlp_dim=self.mlp_dim, activation=nn.silu
      )

    return fdl.Config(
      conformer.ConformerBlock,
      first_norm=fdl.Config(layer_norm.LayerNorm),
      first=layer(),
      attention_norm=fdl.Config(layer_norm.LayerNorm),
      attention=fdl.Config(
        grouped_query.GroupedQueryAttention,
        num_heads=self.num_heads,
        num_kv_heads=self.num_heads,
        head_dim=self.embed_dim // self.num_heads,
        rotary=fdl.Config(rotary_embedding.Rotary),
        mask=fdl.Config(attention_mask.MaskRules, causal=False),
      ),
      convolution_norm=fdl.Config(layer_norm.LayerNorm),
      convolution=fdl.Config(
        conformer.LightConvolution,
        convolution=fdl.Config(
          convolutions.DepthwiseConv,
          kernel_size=(self.kernel_size,),
          kernel_axes=(None, axes.MLP),
        ),
        norm=fdl.Config(batch_norm.BatchNorm, decay=0.98),
      ),
      last_norm=fdl.Config(layer_norm.LayerNorm),
      last=layer(),
      final_norm=fdl.Config(layer_norm.LayerNorm),
      dropout=self._dropout(),
    )

  def _subsample(self) -> fdl.Config[Any]:
    return fdl.Config(
      convolutions.ConvNormAct,
      conv=fdl.Config(
        convolutions.Conv,
        output_dim=self.embed_dim,
        kernel_size=(3,),
        strides=2,
        # Unlike `SAME`, does not depend on the length of the batch.
        padding=convolutions.Padding.CENTERED,
        kernel_axes=(None, axes.EMBED),
      ),
    )

  def shrink(self) -> Any:
    """Returns a toy-sized version on made-up words."""
    return (
      super()
      .shrink()
      .replace(
        clips="tones",
        max_test_seconds=self.max_seconds,
        max_test_labels=self.max_labels,
        num_layers=2,
        embed_dim=16,
        mlp_dim=32,
        num_heads=2,
        kernel_size=3,
        bin_masks=1,
      )
    )

  def _dropout(self) -> fdl.Config[nn.Dropout] | None:
    return fdl.Config(nn.Dropout, rate=self.dropout) if self.dropout else None
