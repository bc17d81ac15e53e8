"""SeqIO tasks and mixtures as data of experiments.

Combine with a model family, as the classes of `lm_data`:

  class MyModel(seqio_datasets.SeqIo, MyFamily):
    mixture = "my_mixture"

    def register(self):
      return fdl.Config(my_tasks.Tasks, folder="/data")

Reading requires TensorFlow: `bazel run --config=tf ...`.
"""

from typing import Any, ClassVar, Literal

import fiddle as fdl

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.seqio_tasks import (
  c4,
  feature_converters,
  task_metrics,
  task_stream,
  vocabulary_tokenizer,
)
from paxon.inputs.tokenizers import load
from paxon.runner import experiment, user_error
from paxon.tasks.lm import lm_data

_CONVERTERS = {
  "language_model": feature_converters.LanguageModel,
  "prefix_lm": feature_converters.PrefixLm,
  "encoder_decoder": feature_converters.EncoderDecoder,
}


class SeqIo(experiment.Experiment):
  """A SeqIO mixture for training and tasks for evaluation.

  Attributes:
    length: Sequence length in tokens.
    mixture: Name of a task or mixture.
    train_split: Training split of the mixture.
    eval_tasks: Names of evaluation tasks or mixtures; each is a split of the
      experiment. Metrics of a mixture are those of its tasks.
    eval_split: Split of the evaluation tasks.
    form: Feature converter: model inputs from a task's features.
    encoder_length: Sequence length of the encoder, for `encoder_decoder`.
    use_cached: Whether to read tasks from SeqIO's cache.
    index_folder: Folder that keeps record offsets between runs.
    begin_id: Input before the first target.
    end_id: Token appended to texts that do not end with it; None appends
      nothing.
    metric_kinds: Kinds of metrics to compute: `score`, and `predict`, which
      generates text for each example.
    predict_every_steps: Interval of steps of the kind `predict`, by
      `decode_programs.DecodeSplit`; None computes it in each evaluation.
  """

  length: int
  mixture: str
  train_split: str = "train"
  eval_tasks: tuple[str, ...] = ()
  eval_split: str = "validation"
  form: Literal["language_model", "prefix_lm", "encoder_decoder"] = (
    "language_model"
  )
  encoder_length: int | None = None
  use_cached: bool = False
  index_folder: str | None = None
  begin_id: int = 0
  end_id: int | None = 1
  metric_kinds: tuple[str, ...] = ("score", "predict")
  predict_every_steps: int | None = None

  run_requires: ClassVar[tuple[str, ...]] = ("seqio",)

  def register(self) -> fdl.Config[Any] | None:
    """Returns a callable that registers the tasks, or None."""
    return None

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the mixture's tokenizer; metrics come from its tasks."""
    return {"metrics": (), "tokenizer": self._tokenizer()}

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns the endless mixture and one epoch of each evaluation task."""
    shared: dict[str, Any] = {
      "length": self.length,
      "encoder_length": self.encoder_length,
      "global_batch_size": self.global_batch_size,
      "tokenizer": self._tokenizer(),
    }
    split_text = self.form == "language_model"
    packing = packing_lib.Packing
    splits = {
      "train": fdl.Config(
        packed_input.PackedInput,
        examples=self._stream(
          self.mixture, self.train_split, shuffle_seed=self.seed
        ),
        packing=packing.SPLIT if split_text else packing.FIRST_FIT,
        cut_long_examples=not split_text,
        **shared,
      )
    }
    eval_split, kinds = self.eval_split, self.metric_kinds
    if self.predict_every_steps is not None:
      kinds = tuple(x for x in kinds if x != task_metrics.PREDICT)
    for task in self.eval_tasks:
      splits[task] = fdl.Config(
        task_metrics.TaskEvalInput,
        examples=self._stream(
          task, eval_split, shuffle_seed=None, num_epochs=1, provenance=True
        ),
        packing=packing.NONE,
        cut_long_examples=True,
        metric_kinds=kinds,
        **shared,
      )
    return splits

  def programs(self) -> tuple[fdl.Config[Any], ...]:
    """Returns the generation of texts for the evaluation tasks."""
    every_steps = self.predict_every_steps
    if every_steps is None:
      return super().programs()
    from paxon.runner.training import decode_programs  # Few jobs need it.

    return (
      *super().programs(),
      *(
        fdl.Config(
          decode_programs.DecodeSplit, split=task, every_steps=every_steps
        )
        for task in self.eval_tasks
      ),
    )

  def _tokenizer(self) -> fdl.Config[Any]:
    return fdl.Config(
      vocabulary_tokenizer.VocabularyTokenizer,
      name_in_registry=self.mixture,
      register=self.register(),
      begin_id=self.begin_id,
    )

  def _stream(self, name: str, split: str, **given: Any) -> fdl.Config[Any]:
    return fdl.Config(
      task_stream.TaskStream,
      name_in_registry=name,
      split=split,
      converter=fdl.Config(
        _CONVERTERS[self.form], begin_id=self.begin_id, end_id=self.end_id
      ),
      register=self.register(),
      use_cached=self.use_cached,
      index_folder=self.index_folder,
      **given,
    )


class C4(lm_data.Text):
  """C4 as in Pax with a `c4_folder`, else `lm_data.Text`.

  Pax trains on SeqIO's mixture `c4_lm_v301_gpt`, split `train2`, packed and
  shuffled with seed 9876, and evaluates on the token ids of the split
  `validation_tokenized_5662seqs`. Texts begin with 0 and end with 1.

  Attributes:
    c4_folder: Folder with the TensorFlow data sets `c4/en/3.0.4` and
      `c4/en/3.0.5` as TFRecord files.
    vocabulary_file: SentencePiece model.
    index_folder: Folder that keeps record offsets between runs; requires
      `c4_folder`.
    data_seed: Shuffle seed with a `c4_folder`; `lm_data.Text` uses `seed`.
  """

  c4_folder: str | None = None
  vocabulary_file: str | None = None
  index_folder: str | None = None
  data_seed: int = 9876

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the tokenizer, and bits per byte if tokens are bytes."""
    register = self._register()
    if register is None:
      return super().get_data_fields()
    if self.tokenizer != load.BYTES:
      raise user_error.UserError(
        f"tokenizer is {self.tokenizer!r}, but with c4_folder text is read with"
        " vocabulary_file; leave one of them out."
      )
    return {"metrics": (), "tokenizer": self._tokenizer(register)}

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training text and one validation epoch."""
    register = self._register()
    seed, folder = self.data_seed, self.index_folder
    text = super().datasets()
    if register is None:
      return text
    shared: dict[str, Any] = {
      "length": self.length,
      "global_batch_size": self.global_batch_size,
      "tokenizer": self._tokenizer(register),
    }
    given: dict[str, Any] = {"register": register, "index_folder": folder}
    return {
      "train": fdl.Config(
        packed_input.PackedInput,
        examples=fdl.Config(
          task_stream.TaskStream,
          name_in_registry=c4.TRAIN,
          split=c4.TRAIN_SPLIT,
          converter=fdl.Config(
            feature_converters.LanguageModel, begin_id=0, end_id=1
          ),
          shuffle_seed=seed,
          **given,
        ),
        **shared,
      ),
      "validation": fdl.Config(
        packed_input.PackedInput,
        examples=fdl.Config(
          task_stream.TaskStream,
          name_in_registry=c4.EVAL,
          split=c4.EVAL_SPLIT,
          # Without an end token, since these examples are tokenized already.
          converter=fdl.Config(feature_converters.LanguageModel, begin_id=0),
          shuffle_seed=None,
          num_epochs=1,
          **given,
        ),
        packing=packing_lib.Packing.NONE,
        cut_long_examples=True,
        **shared,
      ),
    }

  def shrink(self) -> Any:
    """Returns a toy-sized version that reads Python's standard library."""
    real = ("c4_folder", "vocabulary_file", "index_folder")
    return super().shrink().replace(**dict.fromkeys(real))

  def _register(self) -> fdl.Config[Any] | None:
    folder, file = self.c4_folder, self.vocabulary_file
    if (folder is None) != (file is None):
      raise ValueError(
        "c4_folder and vocabulary_file belong together: set both, or neither,"
        f" got {folder!r} and {file!r}."
      )
    if folder is None:
      if self.index_folder is not None:
        raise ValueError(
          "index_folder requires c4_folder, whose records it indexes,"
          f" got {self.index_folder!r} and no c4_folder."
        )
      return None
    return fdl.Config(c4.C4Tasks, folder=folder, vocabulary_file=file)

  def _tokenizer(self, register: fdl.Config[Any]) -> fdl.Config[Any]:
    return fdl.Config(
      vocabulary_tokenizer.VocabularyTokenizer,
      name_in_registry=c4.TRAIN,
      register=register,
    )
