"""Imported BERT encoders: which class is trained and exported, masked text.

Each class is combined with `params.hugging_face.HuggingFaceLm`, of which the
methods with an underscore are:

  class MyEncoder(encoders.MaskedEncoder, hugging_face.HuggingFaceLm): ...

Any import of a BERT can be the `weights`; a head that it lacks is new.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from etils import epath
import fiddle as fdl

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import text_files
from paxon.inputs.tokenizers import encoder_texts
from paxon.layers.models import random_masking
from paxon.layers.models.hugging_face import bert, family, sentence_modules
from paxon.runner import task as task_lib
from paxon.runner import user_error
from paxon.runner.settings import training
from paxon.tasks.lm import lm_data

# A toy, to try an experiment without weights.
TOY: Final[Mapping[str, Any]] = {
  "model_type": "bert",
  "vocab_size": 264,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
}
# Imports without and with the head of a classifier.
ENCODERS: Final = (bert.MASKED, "BertForPreTraining", bert.ENCODER)
ANY: Final = (*ENCODERS, bert.CLASSIFIER)
# Fields of a model's files, as in `params.hugging_face`.
_FOLDER = "hugging_face"
# Customary names of the mask token, and its id in the vocabularies of BERT.
_MASKS = ("[MASK]", "<mask>")
_MASK_ID = 103


class Encoder(lm_data.Text):
  """An imported BERT, trained and exported as a class of transformers."""

  # Encoders do not generate.
  prompts = None
  max_new_tokens = None

  _toy: ClassVar[Mapping[str, Any]] = TOY
  _kind: ClassVar[tuple[str, tuple[str, ...]]] = ("encoders", ANY)
  # The class that is trained; None for the imported one.
  _architecture: ClassVar[str | None] = None

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model, and what its export changes in `config.json`."""
    parent: Any = super()
    task = parent.task()
    if changes := self._exported_config():
      task.exported_config = changes
    return task

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return super().shrink().replace(max_new_tokens=None)

  def run_files(self) -> dict[str, str]:
    """Returns the files of the model and the folders of its modules."""
    found = super().run_files()
    if _FOLDER not in found:
      return found
    path = epath.Path(self._imported._folder())
    try:
      names = sentence_modules.find_folders(path)
    except family.UnsupportedConfigError as error:
      raise user_error.UserError(str(error)) from error
    folders = {f"{_FOLDER}/{x}": f"{found[_FOLDER]}/{x}" for x in names}
    return {**found, **folders}

  @property
  def _imported(self) -> Any:
    """This object, with the methods of `HuggingFaceLm`."""
    return self

  def _imported_config(self) -> tuple[Mapping[str, Any], family.Family]:
    """Returns the imported `config.json` and its family."""
    parent: Any = super()
    return parent._config()

  def _imported_class(self) -> str:
    """Returns the class of transformers in the imported `config.json`."""
    config, of = self._imported_config()
    return (config.get("architectures") or [of.architecture])[0]

  def _config(self) -> tuple[Mapping[str, Any], family.Family]:
    """Returns the `config.json` of the trained model, and its family."""
    config, of = self._imported_config()
    return {**config, **self._exported_config()}, of

  def _exported_config(self) -> dict[str, Any]:
    """Returns the fields of `config.json` that differ from the import's."""
    if self._architecture in (None, self._imported_class()):
      return {}
    return {"architectures": [self._architecture]}


class MaskedEncoder(Encoder):
  """Continued pretraining of an imported BERT: random tokens are masked.

  Documents are whole, with the begin and the end token of the tokenizer;
  special tokens are not masked. An import without the head, such as a sentence
  encoder, gets a new one.

  Attributes:
    mask_id: Id of the mask token; None for that of the tokenizer.
    masked_share: Share of tokens to mask and predict.
  """

  mask_id: int | None = None
  masked_share: float = 0.15

  _kind = ("masked language models", ENCODERS)
  _architecture = bert.MASKED
  _documents = text_files.Documents.PARAGRAPH

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns packed documents, endless and shuffled for training."""
    model, size = self._imported, self.global_batch_size
    tokenizer = self.make_tokenizer()
    splits = {
      split: model._pack(
        split,
        fdl.Config(
          encoder_texts.WholeDocuments, source=source, tokenizer=tokenizer
        ),
        tokenizer=tokenizer,
        global_batch_size=size if split == "train" else self._eval_batch_size(),
        length=self.length,
      )
      for split, source in model._sources().items()
    }
    return splits if "train" in splits else super().datasets() | splits

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint, which may have no head."""
    start = super().warm_start()
    if start is not None:
      start.may_be_missing = (r"params/((transform|head)/.*|embedding/bias)",)
    return start

  def _exported_config(self) -> dict[str, Any]:
    pretraining = self._imported_class() == "BertForPreTraining"
    return {} if pretraining else super()._exported_config()

  def _model(self) -> fdl.Config[Any]:
    parent: Any = super()
    model = parent._model()
    size = self._config()[0]["vocab_size"]
    mask_id, special_ids = self._find_ids(size)
    model.masking = fdl.Config(
      random_masking.RandomMasking,
      mask_id=mask_id,
      vocab_size=size,
      rate=self.masked_share,
      special_ids=special_ids,
    )
    return model

  def _find_ids(self, vocab_size: int) -> tuple[int, tuple[int, ...]]:
    """Returns the id of the mask token, and those that are not masked."""
    config, mask_id = self.make_tokenizer(), self.mask_id
    if config is None:
      return (_MASK_ID if mask_id is None else mask_id), ()
    try:
      tokenizer = fdl.build(config)
      if not isinstance(tokenizer, tokenizer_protocol.FindsTokens):
        # Bytes have a free id after them.
        special = {tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id}
        found = [tokenizer.vocab_size]
      else:
        special = tokenizer.special_ids
        found = [tokenizer.find_id(name) for name in self._list_masks()]
    except (OSError, ValueError) as error:
      raise user_error.UserError(str(error)) from error
    known = [x for x in found if x is not None and x < vocab_size]
    if mask_id is None and not known:
      raise user_error.UserError(
        f"{type(self).__name__}: the tokenizer has no mask token"
        f" ({' or '.join(_MASKS)}); pass its id as --fdl.mask_id=ID."
      )
    mask_id = known[0] if mask_id is None else mask_id
    return mask_id, tuple(sorted(x for x in special if x < vocab_size))

  def _list_masks(self) -> list[str]:
    """Returns names of the mask token, the folder's first."""
    model = self._imported
    if not model._has_own_tokenizer():
      return [*_MASKS]
    files = "tokenizer_config.json", "special_tokens_map.json"
    found = [model._read_json(name).get("mask_token") for name in files]
    names = [x.get("content") if isinstance(x, dict) else x for x in found]
    return [*(name for name in names if isinstance(name, str)), *_MASKS]
