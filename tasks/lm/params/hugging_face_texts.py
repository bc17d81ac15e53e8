r"""Imported BERT encoders for whole texts: classifiers and embeddings.

  tools/hf import all-MiniLM-L6-v2 --to runs/minilm
  tools/python -m paxon.runner.main --mode=infer --job_log_dir=runs/minilm \
      --fdl.infer_files=texts.txt

Any import of a BERT can be the `weights` of each experiment; a head that it
lacks is new. docs/encoders.md goes from an import to vectors and classifiers.
"""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any, Literal

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp

from paxon.inputs import packing
from paxon.inputs.sources import python_stdlib, text_files
from paxon.inputs.tokenizers import encoder_texts
from paxon.layers import initializers
from paxon.layers.models import sentence_encoder
from paxon.layers.models.hugging_face import bert, family, sentence_modules
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.learners import metrics
from paxon.runner import job as job_lib
from paxon.runner import task as task_lib
from paxon.runner import user_error
from paxon.runner.settings import training
from paxon.tasks.lm import encoders
from paxon.tasks.lm.params import hugging_face

# Weights that `tools/hf import` keeps in the folder of the model.
_KEPT = "unused.safetensors"
_POOLER = "pooler.dense"
# Of the training files, in an error.
_MAX_LABELS = 20
_TOY_LABELS = ("0", "1")


class _Texts(encoders.Encoder, hugging_face.HuggingFaceLm):
  """Experiments on whole texts.

  Attributes:
    pair_key: Key of a second text in each line, or None.
    infer_files: Files of texts for `--mode=infer`, which reads them in place of
      `validation_files`; labels and pairs are not needed.
  """

  loss_chunk_length = None

  pair_key: str | None = None
  infer_files: str | tuple[str, ...] | None = None

  path_knobs = (*hugging_face.HuggingFaceLm.path_knobs, "infer_files")
  _documents = text_files.Documents.LINE

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the tokenizer, and the metric of texts that were cut."""
    return {
      "metrics": (metrics.cut_tokens,),
      "tokenizer": self.make_tokenizer(),
    }

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training texts and one validation epoch."""
    fields = {
      "key": self.text_key,
      "pair_key": self.pair_key,
      **self._text_fields(),
    }
    if self.documents == "python_stdlib":
      return {
        split: self._make_toy(split, fields)
        for split in ("train", "validation")
      }
    splits = {}
    if self.train_files is not None:
      rows = self._rows(self.train_files)
      splits["train"] = self._make_input("train", rows, fields)
    else:
      splits["train"] = fdl.Config(
        encoder_texts.UnsetTexts,
        global_batch_size=self.global_batch_size,
        length=self.length,
        knob="train_files",
        example="texts.jsonl",
      )
    held_out, files = self.validation_files, self.infer_files
    if files is not None:
      first = files if isinstance(files, str) else files[0]
      name = os.path.basename(first).partition(".")[0]
      alone = {**fields, **self._infer_fields()}
      rows = self._rows(files)
      splits[_to_split(name)] = self._make_input("infer", rows, alone)
    elif held_out is not None:
      rows = self._rows(held_out)
      splits["validation"] = self._make_input("validation", rows, fields)
    return splits

  def _text_fields(self) -> dict[str, Any]:
    """Returns further fields of `EncoderTexts`."""
    return {}

  def _toy_fields(self) -> dict[str, Any]:
    """Returns further fields of `DocumentRows` for a toy."""
    return {}

  def _make_toy(self, split: str, fields: Mapping[str, Any]) -> fdl.Config[Any]:
    """Returns a split of Python's standard library."""
    toy = self._toy_fields()
    rows = fdl.Config(
      encoder_texts.DocumentRows,
      source=fdl.Config(python_stdlib.PythonStdlib, split=split),
      key=fields["key"],
      **toy,
    )
    names = {
      name: toy[name] for name in ("pair_key", "label_key") if name in toy
    }
    return self._make_input(split, rows, {**fields, **names})

  def _make_input(
    self, split: str, rows: fdl.Config[Any], fields: Mapping[str, Any]
  ) -> fdl.Config[Any]:
    """Returns the texts of rows; `fields` are those of `EncoderTexts`."""
    self._check_tokenizer()
    tokenizer = self.make_tokenizer()
    has_other = fields.get("is_separate") and fields["pair_key"] is not None
    return self._pack(
      split,
      fdl.Config(
        encoder_texts.EncoderTexts,
        source=rows,
        tokenizer=tokenizer,
        length=self.length,
        **fields,
      ),
      packing=packing.Packing.NONE,
      tokenizer=tokenizer,
      global_batch_size=self.global_batch_size,
      length=self.length,
      encoder_length=self.length if has_other else None,
    )

  def _infer_fields(self) -> dict[str, Any]:
    """Returns changes of `_text_fields` for texts alone."""
    return {}

  def _rows(self, files: str | tuple[str, ...]) -> fdl.Config[Any]:
    """Returns the rows of JSON lines, Parquet or lines of text."""
    documents = self._text_files(files)
    if documents is not None:
      return fdl.Config(
        encoder_texts.DocumentRows, source=documents, key=self.text_key
      )
    rows = self._table(files, columns=None)
    if rows is not None:
      return rows
    return fdl.Config(encoder_texts.JsonRows, files=files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelPredictions:
  """Outputs of `--mode=infer` per text: label and log-probabilities.

  Attributes:
    labels: The names of the labels.
  """

  labels: tuple[str, ...]

  @property
  def names(self) -> dict[str, tuple[str, ...]]:
    """The texts of numbers, by the name of the prediction."""
    return {"label": self.labels}

  def __call__(
    self, batch: metrics.Batch, outputs: metrics.Outputs
  ) -> dict[str, jax.Array]:
    """Returns `label` int32 [B] and `log_probs` float32 [B,C]."""
    del batch
    log_probs = outputs["label_log_probs"]
    label = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    return {"label": label, "log_probs": log_probs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPredictions:
  """Outputs of `--mode=infer` per text: its vector.

  Attributes:
    description: Settings of the vectors besides the model and the texts.
  """

  description: str

  def __call__(
    self, batch: metrics.Batch, outputs: metrics.Outputs
  ) -> dict[str, jax.Array]:
    """Returns `embedding`, float32 [B,E]."""
    del batch
    return {"embedding": outputs["embedding"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeight:
  """Initial value: a weight that an import has kept.

  Attributes:
    file: Its safetensors file.
    name: Its name there.
  """

  file: str
  name: str

  def __call__(
    self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
  ) -> jax.Array:
    """Returns the weight, transposed as a kernel [D,F] is."""
    del key
    path = epath.Path(self.file)
    entry = safetensors_file.read_header(path)[self.name]
    rows = safetensors_file.read_rows(path, entry, 0, entry.shape[0]).T
    assert rows.shape == tuple(shape)
    return jnp.asarray(rows.astype(jnp.float32), dtype)


class HuggingFaceClassifier(_Texts):
  """Text classification with an imported BERT.

  A line of the files has a text in `text_key` and its label in `label_key`, a
  name in `labels` or its number. The run is exported as a
  `BertForSequenceClassification`, and one can be imported, to be evaluated or
  trained further. The pooler is that of the import, or a new one.

  Attributes:
    labels: The names of the labels, in the order of their numbers; None for
      those of the import.
    label_key: Key of the label.
    pair_key: Key of a second text in each line, read after the first, or None.
    infer_files: Files of texts for `--mode=infer`, which reads them in place of
      `validation_files`; labels are not needed.
  """

  global_batch_size = 32
  learning_rate = 2e-5

  labels: tuple[str, ...] | None = None
  label_key: str = "label"

  _architecture = bert.CLASSIFIER

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the classifier."""
    task = super().task()
    labels = self._find_labels()
    task.predictions = fdl.Config(LabelPredictions, labels=labels)
    return task

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint, which may be another model's."""
    start = super().warm_start()
    if start is None:
      return None
    if self._imported_class() != bert.CLASSIFIER:
      start.patterns = (
        (r"params/encoder/(.*)", r"params/\1"),
        (r"params/(pooler|head)/.*", None),
      )
    elif not self._keeps_head():
      start.patterns = ((r"params/head/.*", None),)
    return start

  def _toy_fields(self) -> dict[str, Any]:
    count = len(self._find_labels())
    return {"label_key": self.label_key, "num_labels": count}

  def _text_fields(self) -> dict[str, Any]:
    return {"label_key": self.label_key, "labels": self._find_labels()}

  def _infer_fields(self) -> dict[str, Any]:
    return {"label_key": None, "labels": ()}

  def _exported_config(self) -> dict[str, Any]:
    labels = self._find_labels()
    count = {"num_labels": len(labels)}
    return {
      **(count if "num_labels" in self._imported_config()[0] else {}),
      "architectures": [bert.CLASSIFIER],
      "id2label": {str(i): name for i, name in enumerate(labels)},
      "label2id": {name: i for i, name in enumerate(labels)},
      "problem_type": "single_label_classification",
    }

  def _imported_labels(self) -> tuple[str, ...] | None:
    """Returns the labels of the `config.json`; None if it has no classifier."""
    if self._imported_class() != bert.CLASSIFIER:
      return None
    config = self._imported_config()[0]
    kind = config.get("problem_type")
    labels = bert.read_labels(config.get)
    if kind not in (None, "single_label_classification") or len(labels) < 2:
      raise user_error.UserError(
        f"{type(self).__name__}.weights is {self.weights!r}, whose config.json"
        f" has {len(labels)} labels and problem_type {kind!r}; supported are"
        " two or more labels, of which each text has one"
        " (single_label_classification)."
      )
    return labels

  def _find_labels(self) -> tuple[str, ...]:
    name, labels = type(self).__name__, self.labels
    if labels is None:
      labels = _TOY_LABELS if self.weights is None else self._imported_labels()
    if labels is None:
      raise user_error.UserError(
        f"{name}.labels is missing: the names of the labels, in the order of"
        f" their numbers{self._suggest_labels()}."
      )
    if len(labels) < 2 or len(set(labels)) < len(labels):
      raise user_error.UserError(
        f"{name}.labels must be two or more different names, got {labels}."
      )
    return labels

  def _suggest_labels(self) -> str:
    """Returns the labels of the training files for an error."""
    if self.train_files is None:
      return ', such as --fdl.labels=\'("negative","positive")\''
    try:
      rows = fdl.build(self._rows(self.train_files))
      found = encoder_texts.find_labels(rows, self.label_key)
    except (OSError, ValueError) as error:
      raise user_error.UserError(user_error.one_line(error)) from error
    if len(found) > _MAX_LABELS:
      return f"; train_files has {len(found):,} different ones"
    names = ",".join(f'"{each}"' for each in found)
    numbers = [each for each in found if not isinstance(each, str)]
    if numbers:
      return (
        f"; train_files has {', '.join(map(str, found))}: pass one name for"
        f" each number from 0 to {max(numbers)}"
      )
    return f"; for those of train_files pass --fdl.labels='({names})'"

  def _keeps_head(self) -> bool:
    """Whether the import has a head for these labels."""
    imported, labels = self._imported_labels(), self._find_labels()
    if imported is None:
      return False
    unnamed = tuple(f"LABEL_{i}" for i in range(len(labels)))
    return imported in (labels, unnamed)

  def _model(self) -> fdl.Config[Any]:
    model = self._make_model()
    new = fdl.Config(initializers.Normal, scale=0.02)
    model.head.kernel_init = model.pooler.kernel_init = new
    if self.weights is not None and self._imported_class() != bert.CLASSIFIER:
      file = epath.Path(self._folder()) / _KEPT
      entries = safetensors_file.read_header(file) if file.exists() else {}
      for field, end in (("kernel_init", "weight"), ("bias_init", "bias")):
        for name in entries:
          if name.endswith(f"{_POOLER}.{end}"):
            kept = fdl.Config(StoredWeight, file=os.fspath(file), name=name)
            setattr(model.pooler, field, kept)
    return model


class HuggingFaceEmbeddings(_Texts):
  """Vectors of texts by an imported BERT (`--mode=infer`).

  Pooling, normalization, the longest text and the prompt are those of the
  folder's `modules.json`, as in sentence-transformers; without that file the
  vector is the mean of the tokens. Training makes the texts of a pair, in
  `text_key` and `pair_key`, more similar than those of different pairs. Dense
  modules are not trained.

  Attributes:
    pooling: The pooling; None for that of the folder.
    normalize: Whether vectors have length one; None follows the folder.
    prompt: Text before each text; None for that of the folder.
    pair_key: Key of the second text of a pair, for training, or None.
    infer_files: Files of texts for `--mode=infer`, which reads them in place of
      `validation_files`.
  """

  global_batch_size = 32
  learning_rate = 2e-5

  pooling: (
    Literal[
      "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
    ]
    | None
  ) = None
  normalize: bool | None = None
  prompt: str | None = None

  _kind = ("encoders", encoders.ENCODERS)

  @property
  def length(self) -> int:  # pyrefly: ignore[bad-override]
    """The tokens of the longest text, as in sentence-transformers."""
    positions = self._config()[0].get("max_position_embeddings", 512)
    length = self._modules().max_length
    if length is None and self.weights is not None:
      length = self._read_json("tokenizer_config.json").get("model_max_length")
    return min(positions, int(length or positions))

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the encoder with its pooling."""
    task = super().task()
    parts = [*task.model.pooling]
    for step in task.model.steps:
      is_dense = isinstance(step, fdl.Buildable)
      parts.append("dense" if is_dense else step.__name__)
    task.predictions = fdl.Config(
      EmbeddingPredictions, description=", ".join(parts)
    )
    return task

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Adds a line about the pooling of a folder that does not say it."""
    super().adjust(config)
    modules, pooling = self._modules(), self.pooling
    if self.weights is None or modules.is_described or pooling is not None:
      return
    line = (
      f"{self._folder()} has no {sentence_modules.MODULES}: vectors are the"
      " mean of the tokens, not normalized"
    )
    config.notes = (*config.notes, line)

  def _modules(self) -> sentence_modules.SentenceModules:
    if self.weights is None:
      return sentence_modules.SentenceModules()
    try:
      return sentence_modules.read(epath.Path(self._folder()))
    except family.UnsupportedConfigError as error:
      raise user_error.UserError(str(error)) from error

  def _toy_fields(self) -> dict[str, Any]:
    return {"pair_key": "second"}

  def _text_fields(self) -> dict[str, Any]:
    modules, prompt = self._modules(), self.prompt
    if self.train_files is not None and self.pair_key is None:
      raise user_error.UserError(
        f"{type(self).__name__}.pair_key is missing: training needs the key of"
        " the second text of each pair, such as --fdl.pair_key=answer."
      )
    return {
      "is_separate": True,
      "prompt": modules.prompt if prompt is None else prompt,
      "lower_case": modules.lower_case,
    }

  def _infer_fields(self) -> dict[str, Any]:
    return {"pair_key": None}

  def _model(self) -> fdl.Config[Any]:
    modules, pooling = self._modules(), self.pooling
    folder = "" if self.weights is None else self._folder()
    return fdl.Config(
      sentence_encoder.SentenceEncoder,
      encoder=self._make_model(),
      pooling=modules.pooling if pooling is None else (pooling,),
      steps=sentence_modules.make_steps(
        modules, folder, fdl.Config, normalize=self.normalize
      ),
    )


def _to_split(name: str) -> str:
  """Returns the name of a split from that of a file."""
  kept = "".join(x if x.isalnum() or x in "-_" else "_" for x in name)
  return kept if kept not in ("", "train") else f"{kept or 'texts'}_"
