"""Batches of transcribed audio, shuffled, with a position."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import base_input, checks
from paxon.inputs.sources import example_source
from paxon.inputs.speech import alphabet as alphabet_lib
from paxon.inputs.streams import document_order

# Windows, hops and range of the spectrograms in reports.
_FRAME_SECONDS = 0.032
_HOP_SECONDS = 0.01
_DECIBELS = 70


@dataclasses.dataclass(kw_only=True, eq=False)
class SpeechInput(document_order.OrderedInput):
  """Batches of the clips of a source.

  A batch has `audio` float32 [B,S] and `audio_lengths` int32 [B], its samples;
  `labels` int32 [B,L] and `label_lengths` int32 [B], the ids of the text; and
  `example_weights` float32 [B]. Zeros follow the samples and the labels. An
  epoch that does not fill the last batch ends with clips of length and weight
  0. The clip at position n of the run depends on the seed and n only.

  Attributes:
    source: A source of `speech_sources`, or another one with such items.
    sample_rate: Samples of the source per second.
    max_seconds: Length of the audio of a batch, at least that of the longest
      clip.
    max_labels: Number of labels of a batch, at least those of the longest text.
    alphabet: The characters of texts.
    shuffle_seed: Seed of each epoch's order. `None` keeps the source's order.
    num_epochs: Number of epochs. `None` repeats without end.
  """

  length: int = 1
  source: Any
  sample_rate: int
  max_seconds: float
  max_labels: int
  alphabet: alphabet_lib.Alphabet = dataclasses.field(
    default_factory=alphabet_lib.Alphabet
  )
  shuffle_seed: int | None
  num_epochs: int | None = None
  _next: int = dataclasses.field(default=0, init=False, repr=False)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(
      self,
      "sample_rate",
      "max_seconds",
      "max_labels",
      optional=["num_epochs"],
    )
    rate = example_source.find_optional(
      self.source, "sample_rate", self.sample_rate
    )
    if rate != self.sample_rate:
      raise ValueError(
        f"SpeechInput.sample_rate ({self.sample_rate}) must be that of the"
        f" source, {rate}."
      )

  @property
  def unit(self) -> str:
    """Clips, each of which has one weight."""
    return "clips"

  @property
  def num_samples(self) -> int:
    """Samples of the audio of a batch."""
    return round(self.max_seconds * self.sample_rate)

  def get_next(self) -> base_input.Batch:
    """Returns this host's clips of the next batch; see the class.

    Raises:
      StopIteration: All epochs have been read.
      ValueError: A clip or its text is too long, or has another character.
    """
    end = self._begin_batch()
    count = self.per_host_batch_size
    batch = {
      key: np.zeros(shape, dtype)
      for key, (shape, dtype) in self.batch_shapes().items()
    }
    first = self._next + self.infeed_host_index * count
    for i, place in enumerate(range(first, first + count)):
      if end is not None and place >= end:
        break
      audio, labels = self._read(place)
      batch["audio"][i, : len(audio)] = audio
      batch["audio_lengths"][i] = len(audio)
      batch["labels"][i, : len(labels)] = labels
      batch["label_lengths"][i] = len(labels)
      batch["example_weights"][i] = 1
    self._next += self.global_batch_size
    return batch

  def view_example(
    self,
    batch: Mapping[str, np.ndarray],
    index: int,
    predicted: Mapping[str, np.ndarray],
  ) -> base_input.ExampleView:
    """Returns the sound and spectrogram of a clip, and its texts."""
    length = batch["label_lengths"][index]
    caption = self.alphabet.decode(batch["labels"][index, :length])
    if "labels" in predicted:
      length = predicted["label_lengths"][index]
      text = self.alphabet.decode(predicted["labels"][index, :length])
      caption += f" — predicted: {text}"
    samples = batch["audio"][index, : batch["audio_lengths"][index]]
    return base_input.ExampleView(
      caption=caption,
      image=draw_spectrogram(samples, self.sample_rate),
      audio=samples,
      sample_rate=self.sample_rate,
    )

  def required_vocab_size(self) -> int:
    """Returns the number of ids of the alphabet."""
    return self.alphabet.vocab_size

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes and dtypes of the arrays of `get_next`."""
    count = self.per_host_batch_size
    return {
      "audio": ((count, self.num_samples), np.dtype(np.float32)),
      "audio_lengths": ((count,), np.dtype(np.int32)),
      "labels": ((count, self.max_labels), np.dtype(np.int32)),
      "label_lengths": ((count,), np.dtype(np.int32)),
      "example_weights": ((count,), np.dtype(np.float32)),
    }

  def check_readable(self) -> None:
    """Raises ValueError if the source cannot be read or is empty."""
    example_source.call_optional(self.source, "check")
    self._read(0)

  def _read(self, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the audio and the labels at a position of the run."""
    number = self._number(place)
    example = self.source[number]
    audio = np.asarray(example["audio"], np.float32)
    labels = self.alphabet.encode(example["text"])
    if len(audio) > self.num_samples:
      raise ValueError(
        f"Clip {number} has {len(audio) / self.sample_rate:.2f} seconds;"
        f" SpeechInput.max_seconds is {self.max_seconds}."
      )
    if len(labels) > self.max_labels:
      raise ValueError(
        f"Clip {number} has {len(labels)} labels, {example['text']!r};"
        f" SpeechInput.max_labels is {self.max_labels}."
      )
    return audio, labels


def draw_spectrogram(audio: np.ndarray, sample_rate: int) -> np.ndarray:
  """Returns a spectrogram as gray pixels, uint8 [F,T].

  Columns are Hann windows of 32 ms, one each 10 ms, and rows frequencies, the
  highest first, to half of the sample rate. Black is 70 dB below white, the
  loudest.

  Args:
    audio: Samples [N]; zeros follow them up to one window.
    sample_rate: Samples per second.
  """
  size = round(_FRAME_SECONDS * sample_rate)
  hop = round(_HOP_SECONDS * sample_rate)
  audio = np.pad(audio, (0, max(0, size - len(audio))))
  frames = np.lib.stride_tricks.sliding_window_view(audio, size)[::hop]
  power = np.abs(np.fft.rfft(frames * np.hanning(size), axis=1)) ** 2
  loudest = max(float(np.max(power)), np.finfo(np.float32).tiny)
  decibels = 10 * np.log10(np.maximum(power / loudest, 10 ** (-_DECIBELS / 10)))
  pixels = np.rint(255 * (1 + decibels / _DECIBELS))
  return np.ascontiguousarray(pixels.T[::-1].astype(np.uint8))
