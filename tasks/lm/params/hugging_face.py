r"""Imported Hugging Face models, to train further and to generate text.

  tools/hf import Qwen3-0.6B --to runs/qwen3 --dtype float32
  tools/python -m paxon.runner.main --mode=decode --job_log_dir=runs/qwen3 \
      --prompt="Once upon a time"

The imported `config.json` defines the architecture. The tokenizer, the end
tokens, the sampler and the chat template are those of the folder, too.
docs/fine_tune_a_model.md goes from an import to an exported model.
"""

from collections.abc import Mapping
import inspect
import json
import os
from typing import Any, ClassVar, Literal

from etils import epath
import fiddle as fdl

from paxon.inputs import byte_tokenizer, packed_input, packing
from paxon.inputs.sources import text_pairs
from paxon.inputs.streams import example_stream
from paxon.inputs.tokenizers import chat_template as chat_templates
from paxon.inputs.tokenizers import chats, record_formats, text_tokenizer
from paxon.inputs.tokenizers import load as load_tokenizer
from paxon.layers.losses import softmax_loss
from paxon.layers.models.hugging_face import families, family
from paxon.learners import learner, metrics, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment, run_dir, user_error
from paxon.runner import task as task_lib
from paxon.runner.configuration import tree
from paxon.runner.settings import generation as generation_lib
from paxon.runner.settings import training
from paxon.tasks.lm import encoders, lm_data, upcycling

FOLDER = "hugging_face"
_CONFIG = f"{FOLDER}/config.json"
_LENGTH = 512
_MAX_NEW_TOKENS = 128
# A toy, to try the experiment without weights.
_TOY: Mapping[str, Any] = {
  "model_type": "llama",
  "vocab_size": 264,
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "tie_word_embeddings": True,
}
_TOY_T5: Mapping[str, Any] = {
  "model_type": "t5",
  "vocab_size": 264,
  "d_model": 32,
  "d_kv": 8,
  "d_ff": 64,
  "num_layers": 2,
  "num_heads": 4,
}


class HuggingFaceLm(lm_data.Text, experiment.Experiment):
  """Continued training of a decoder imported by `tools/hf import`.

  Without `weights` it is a randomly initialized toy of bytes. Samples are drawn
  as `generation_config.json` says, unless the knobs of the sampler are set.

  Attributes:
    weights: Folder created by `tools/hf import`, with the architecture, the
      initial weights and the tokenizer.
    tokenizer: A vocabulary file, a Hugging Face folder, or `bytes`; None for
      the tokenizer of `weights`. If that has none, reading or generating text
      is an error.
    messages_key: Key of a chat, a list of messages, in the JSON lines or
      Parquet files of `train_files` and `validation_files`; lines with `prompt`
      and `completion` are read, too. The chat template makes the text of it,
      and the loss is that of the assistant's turns. Without this and
      `chat_format` documents are read (`text_key`).
    chat_format: Format of the chats: `messages`, `sharegpt`, whose key is
      `conversations` unless `messages_key` is set, or `alpaca`, which has none;
      see `inputs.tokenizers.record_formats`.
    long_chats: Treatment of chats that are longer than `length`: `cut_right`
      (also None), `cut_left`, `drop` or `error`. The metrics `cut_tokens` and
      `cut_chats` are the shares of tokens and chats. Only with chats.
    trained_turns: Which turns of the assistant have a loss: `all` (also None),
      each as it would be generated, or `last`. Only with chats.
    chat_template: File with a chat template, or a Hugging Face folder with one;
      None for that of `weights`.
    learning_rate: Peak learning rate.
    warmup_steps: Warmup steps of the learning rate.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
    loss_chunk_length: Positions per chunk of the loss; None computes all at
      once.
  """

  num_train_steps = 1000
  global_batch_size = 8
  checkpoint_every_steps = 500
  eval_every_steps = 500
  summary_every_steps = 10

  weights: str | None = None
  # pyrefly: ignore[bad-override-mutable-attribute]
  tokenizer: str | None = None
  messages_key: str | None = None
  chat_format: Literal["messages", "sharegpt", "alpaca"] | None = None
  long_chats: Literal["cut_right", "cut_left", "drop", "error"] | None = None
  trained_turns: Literal["all", "last"] | None = None
  chat_template: str | None = None
  learning_rate: float = 1e-5
  warmup_steps: int = 50
  weight_decay: float = 0.0
  loss_chunk_length: int | None = 256
  prompts = ("The ", "def ")

  path_knobs = (*lm_data.Text.path_knobs, "weights", "chat_template")

  _toy: ClassVar[Mapping[str, Any]] = _TOY
  # Purpose of the experiment, and the ends of its architectures' names.
  _kind: ClassVar[tuple[str, tuple[str, ...]]] = (
    "decoders",
    ("ForCausalLM", "LMHeadModel"),
  )

  @property
  def length(self) -> int:  # pyrefly: ignore[bad-override]
    """At most the positions that the model has, and 512."""
    config = self._config()[0]
    names = ("max_position_embeddings", "n_positions")
    return min(_LENGTH, *(config.get(name) or _LENGTH for name in names))

  @property
  def max_new_tokens(self) -> int | None:  # pyrefly: ignore[bad-override]
    """At most half of the learned positions that the model has, and 128."""
    positions = self._config()[0].get("n_positions")
    if not isinstance(positions, int):
      return _MAX_NEW_TOKENS
    return max(1, min(_MAX_NEW_TOKENS, positions // 2))

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the imported model and its learner."""
    model = self._model()
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupCosine,
        peak=self.learning_rate,
        warmup_steps=min(self.warmup_steps, self.num_train_steps),
        total_steps=self.num_train_steps,
        end=0.1 * self.learning_rate,
      ),
      b2=0.95,
      weight_decay=self.weight_decay,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner, optimizer=optimizer, max_grad_norm=1.0
      ),
      **self.get_data_fields(),
    )

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint."""
    if self.weights is None:
      return None
    # Parameters are float32, for any dtype of the files.
    return fdl.Config(training.WarmStart, checkpoint=self.weights, cast=True)

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns documents, or the assistant's turns of chats."""
    splits = super().datasets()
    if not self._reads_chats():
      return splits
    return {split: self._chats(split, each) for split, each in splits.items()}

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the tokenizer and the metrics of the data."""
    found = super().get_data_fields()
    if self._reads_chats():
      found["metrics"] = (*found["metrics"], metrics.cut_tokens)
    return found

  def make_tokenizer(self) -> Any:
    """Returns the tokenizer of the knob or of the model, or None."""
    if self._lacks_tokenizer():
      return None
    path = self.tokenizer or load_tokenizer.BYTES
    if self._has_own_tokenizer():
      path = self._folder()
    if path == load_tokenizer.BYTES:
      return fdl.Config(byte_tokenizer.ByteTokenizer)
    path = os.fspath(run_dir.resolve(path, os.environ))
    size = self._config()[0].get("vocab_size")
    return fdl.Config(load_tokenizer.load, path=path, padded_size=size)

  def generation(self) -> fdl.Config[generation_lib.GenerationSettings] | None:
    """Returns prompts, and the sampler and end tokens of the folder."""
    settings = super().generation()
    if settings is None or self.weights is None:
      return settings
    found = self._read_json("generation_config.json")
    ends = found.get("eos_token_id", self._config()[0].get("eos_token_id"))
    if ends is not None and self._has_own_tokenizer():
      settings.end_ids = generation_lib.read_end_ids(ends)
    knobs = self.get_group(generation_lib.GenerationKnobs)
    generation_lib.use_file(settings, found, knobs)
    own = self.chat_template or chat_templates.find(self._folder())
    if own is not None:
      settings.chat_template = self._chat_template()
    return settings

  def run_files(self) -> dict[str, str]:
    """Returns the files of the model, with which a run can be exported."""
    if self.weights is None:
      return super().run_files()
    return {**super().run_files(), FOLDER: f"{self.weights}/{FOLDER}"}

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return (
      super()
      .shrink()
      .replace(
        weights=None,
        length=64,
        global_batch_size=8,
        loss_chunk_length=None,
        max_new_tokens=8,
      )
    )

  def _source(self, split: str, key: str | None = None) -> fdl.Config | None:
    found = super()._source(split, key)
    if found is not None:
      self._check_tokenizer()
    return found

  def _check_tokenizer(self) -> None:
    """Raises UserError if there is no tokenizer to read text."""
    if self._lacks_tokenizer():
      raise user_error.UserError(
        f"{type(self).__name__} has no tokenizer to read text:"
        f" {self._folder()} has no file of one"
        f" ({', '.join(load_tokenizer.NAMES)}); pass a file or a folder with"
        " one as --fdl.tokenizer=PATH, or"
        f" --fdl.tokenizer={load_tokenizer.BYTES} for bytes."
      )

  def _sources(self) -> dict[str, fdl.Config]:
    """Returns the documents of each split that has any."""
    found = {each: self._source(each) for each in ("train", "validation")}
    return {split: each for split, each in found.items() if each is not None}

  def _pack(self, split: str, source: fdl.Config, **fields: Any) -> fdl.Config:
    """Returns the packed examples of a split, endless for training."""
    is_training = split == "train"
    return fdl.Config(
      packed_input.PackedInput,
      examples=fdl.Config(
        example_stream.Examples,
        source=source,
        shuffle_seed=self.seed if is_training else None,
        num_epochs=None if is_training else 1,
      ),
      **fields,
    )

  def _folder(self) -> str:
    assert self.weights is not None
    path = run_dir.resolve(self.weights, os.environ) / FOLDER
    return os.fspath(path)

  def _read_json(self, name: str) -> Mapping[str, Any]:
    try:
      return text_tokenizer.read_json(self._folder(), name)
    except ValueError as error:
      raise user_error.UserError(str(error)) from error

  def _has_own_tokenizer(self) -> bool:
    """Whether the tokenizer is that of `weights`."""
    if self.weights is None or self.tokenizer is not None:
      return False
    try:
      load_tokenizer.find(self._folder())
    except ValueError:
      return False
    return True

  def _lacks_tokenizer(self) -> bool:
    """Whether neither the model nor the knob has a tokenizer."""
    return (
      self.weights is not None
      and self.tokenizer is None
      and not self._has_own_tokenizer()
    )

  def _chat_template(self) -> fdl.Config[chat_templates.ChatTemplate]:
    found = fdl.Config(chat_templates.load, folder=self._folder())
    if self.chat_template is not None:
      path = run_dir.resolve(self.chat_template, os.environ)
      found.path = os.fspath(path)
    return found

  def _trained_turns(self) -> chats.TrainedTurns:
    return chats.TrainedTurns(self.trained_turns or "all")

  def _reads_chats(self) -> bool:
    return (self.messages_key or self.chat_format) is not None

  def _chat_fields(self) -> dict[str, Any]:
    """Returns the key and the format of chats."""
    try:
      return record_formats.make_fields(self.chat_format, self.messages_key)
    except ValueError as error:
      raise user_error.UserError(f"{type(self).__name__}.{error}") from error

  def _chats(self, split: str, config: fdl.Config) -> fdl.Config:
    """Returns packed chats with the settings of packed documents."""
    if self.weights is None:
      raise user_error.UserError(
        f"{type(self).__name__} reads chats only with weights, which have the"
        " chat template."
      )
    fields, files = self._chat_fields(), self._files(split)
    if (
      fdl.get_callable(config) is not packed_input.pack_documents
      or files is None
      or self.documents != "files"
    ):
      return config
    rows = self._table(files, columns=None)
    lines = (
      fdl.Config(chats.ChatLines, files=files, **fields)
      if rows is None
      else fdl.Config(chats.ChatRows, rows=rows, **fields)
    )
    source = fdl.Config(
      chats.TokenizedChats,
      source=lines,
      template=self._chat_template(),
      tokenizer=config.tokenizer,
      length=config.length,
      too_long=chats.TooLong(self.long_chats or "cut_right"),
      trained_turns=self._trained_turns(),
    )
    examples = fdl.Config(
      example_stream.Examples,
      source=source,
      shuffle_seed=config.shuffle_seed,
      num_epochs=tree.find_value(config, "num_epochs"),
    )
    return fdl.Config(
      packed_input.PackedInput,
      examples=examples,
      # A chat is never split between sequences.
      packing=packing.Packing.BEST_FIT,
      tokenizer=config.tokenizer,
      global_batch_size=config.global_batch_size,
      length=config.length,
    )

  def _model(self) -> fdl.Config[Any]:
    """Returns the language model with its loss."""
    model = self._make_model()
    model.token_loss = fdl.Config(
      softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
    )
    return model

  def _make_model(self) -> fdl.Config[Any]:
    """Returns the model of the `config.json`."""
    config, of = self._config()
    try:
      return of.model(config, fdl.Config)
    except family.UnsupportedConfigError as error:
      raise user_error.UserError(str(error)) from error

  def _config(self) -> tuple[Mapping[str, Any], family.Family]:
    """Returns the `config.json` of the model and its family."""
    if self.weights is None:
      return self._toy, families.find(self._toy)
    name, (kind, endings) = type(self).__name__, self._kind
    config, of = read_config(self.weights, name)
    found = (config.get("architectures") or [of.architecture])[0]
    if not str(found).endswith(endings):
      raise user_error.UserError(
        f"{name}.weights is {self.weights!r}, a {found}; this experiment is for"
        f" {kind} alone."
      )
    return config, of


class HuggingFaceUpcycled(HuggingFaceLm):
  """A mixture of experts that starts from an imported dense decoder.

  Every expert starts as a copy of the feed-forward layer. The run cannot be
  exported, because the imported `config.json` describes the dense model.

  Attributes:
    num_experts: Experts per layer.
    num_choices: Experts of a token.
    load_balance_weight: Factor of Switch's auxiliary loss.
    noise: Standard deviation of noise in the copies, divided by the root mean
      square of the imported weights.
  """

  num_experts: int = 8
  num_choices: int = 2
  load_balance_weight: float = 0.01
  noise: float = 0.0

  # The experts together are as large as the dense toy's layer.
  _toy: ClassVar[Mapping[str, Any]] = {**_TOY, "intermediate_size": 64}

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint."""
    weights, noise = self.weights, self.noise
    if weights is None:
      return None
    return upcycling.warm_start(weights, noise=noise, cast=True)

  def run_files(self) -> dict[str, str]:
    """Returns the files of the dense model, which an export does not use."""
    found = super().run_files()
    dense = found.pop(FOLDER, None)
    return found if dense is None else {**found, f"dense/{FOLDER}": dense}

  def shrink(self) -> Any:
    """Returns a toy-sized version with two experts."""
    return super().shrink().replace(num_experts=2)

  def _model(self) -> fdl.Config[Any]:
    model = super()._model()
    upcycling.use_mixtures(
      model,
      num_experts=self.num_experts,
      num_choices=self.num_choices,
      load_balance_weight=self.load_balance_weight,
    )
    return model


class HuggingFaceBert(encoders.MaskedEncoder, HuggingFaceLm):
  """Continued pretraining of an imported BERT: random tokens are masked."""


class HuggingFaceT5(HuggingFaceLm):
  """Fine-tuning of an imported T5 on pairs of texts.

  JSON lines have a source in `source_key` and its target in `text_key`. With
  `documents="python_stdlib"` a file's second half is predicted from its first.

  Attributes:
    source_key: Key of the text that the encoder reads.
    source_length: Tokens of an encoder's sequence.
  """

  text_key = "targets"
  source_key: str = "inputs"
  source_length: int = 512

  _toy = _TOY_T5
  _kind = "T5 models", ("T5ForConditionalGeneration",)

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the tokenizer, which begins targets as the model's decoder does.

    With the token of `decoder_start_token_id`, usually that of padding.
    """
    found = super().get_data_fields()
    tokenizer = found["tokenizer"]
    if tokenizer is None:
      return found
    make = fdl.get_callable(tokenizer)
    if "begin" in inspect.signature(make).parameters:
      tokenizer.begin = self._find_first_token(tokenizer)
    return found

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training pairs and one validation epoch."""
    # Read here, because they have an effect only with files.
    lengths = {"length": self.length, "encoder_length": self.source_length}
    key, tokenizer = self.source_key, self.get_data_fields()["tokenizer"]
    splits = {
      split: self._pairs(split, found, key, tokenizer, lengths)
      for split, found in self._sources().items()
    }
    if "train" not in splits:
      splits = super().datasets()
      splits["train"].encoder_length = self.source_length
    return splits

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return super().shrink().replace(source_length=64)

  def _find_first_token(self, tokenizer: fdl.Config[Any]) -> str:
    config, name = self._config()[0], "decoder_start_token_id"
    file = {}
    if self.weights is not None:
      file = self._read_json("generation_config.json")
    # The order of `generate` of transformers; the model is trained the same.
    given = [
      file.get(name),
      config.get(name),
      file.get("bos_token_id"),
      config.get("pad_token_id"),
    ]
    number = next((x for x in given if x is not None), 0)
    try:
      is_id = type(number) is int and number >= 0
      token = fdl.build(tokenizer).find_token(number) if is_id else None
    except (OSError, ValueError) as error:
      raise user_error.UserError(str(error)) from error
    if token is None:
      raise user_error.UserError(
        f"{name} must be the id of a token of {tokenizer.path}, got {number!r}."
      )
    return token

  def _pairs(
    self,
    split: str,
    documents: fdl.Config[Any],
    source_key: str,
    tokenizer: fdl.Config[Any],
    lengths: Mapping[str, int],
  ) -> fdl.Config[Any]:
    sources, targets = documents, None
    if self.documents == "files":
      sources, targets = self._source(split, source_key), documents
    source = fdl.Config(
      text_pairs.TokenizedPairs,
      sources=sources,
      targets=targets,
      tokenizer=tokenizer,
    )
    size = self.global_batch_size
    return self._pack(
      split,
      source,
      packing=packing.Packing.FIRST_FIT,
      tokenizer=tokenizer,
      global_batch_size=size if split == "train" else self._eval_batch_size(),
      cut_long_examples=True,
      **lengths,
    )


def read_config(
  weights: str, experiment: str
) -> tuple[Mapping[str, Any], family.Family]:
  """Returns the configuration of imported weights and its family."""
  path = run_dir.resolve(weights, os.environ) / epath.Path(_CONFIG)
  try:
    config = json.loads(path.read_text())
    of = families.find(config)
  except (OSError, ValueError, RecursionError) as error:
    raise user_error.UserError(
      f"{experiment}.weights is {weights!r}, and {os.fspath(path)} cannot be"
      f" used ({error}); give the folder that `tools/hf import` has made."
    ) from error
  return config, of
