"""Telephone prompts: recorded and synthesized English, 8 kHz.

Everything is in packages of Debian. The data is made once, in minutes:

  apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en espeak-ng
  tools/python -m paxon.tasks.speech.telephone_data --folder=/data/telephone
  bazel run //runner:main --
  --exp=tasks.speech.params.telephone.TelephoneConformer
"""

import os

from paxon.tasks.speech import recognition


class TelephoneConformer(recognition.SpeechRecognition):
  """A Conformer of 0.7 M parameters.

  Measured 2026-11-27 with three seeds, under ten minutes on two cores: word
  error rates of held-out synthesized clips are 16.7 to 19.7 % by greedy
  decoding, and 8.4 to 9.0 % by `tasks/speech/transcribe.py`.

  Attributes:
    data: Folder that `tasks/speech/telephone_data.py` has made.
  """

  num_train_steps = 3000
  global_batch_size = 16
  summary_every_steps = 50
  max_seconds = 4.5
  max_labels = 100
  join_clips = True
  num_layers = 3
  embed_dim = 96
  mlp_dim = 384
  num_heads = 2
  scan_layers = False
  bin_masks = 1
  max_bins = 6
  frame_masks = 2
  peak_learning_rate = 2.5e-3

  data: str = "/data/telephone"

  path_knobs = ("data",)

  def table(self, split: str) -> str:
    """Returns the table of a split."""
    return os.path.join(self.data, f"{split}.tsv")

  def test_splits(self) -> tuple[str, ...]:
    """Returns held-out texts, synthesized and recorded."""
    return ("synthesized_test", "recorded_test")

  def data_hint(self) -> str:
    """Returns the command."""
    return "tasks/speech/telephone_data.py makes the folder, --fdl.data."
