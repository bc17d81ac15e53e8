"""Training of tokenizers: byte-level BPE, and SentencePiece.

The same texts in the same order give the same vocabulary. Ids 0, 1 and 2 are
padding, begin and end, as the `ByteTokenizer` has them.
"""

from collections.abc import Iterable, Iterator
import enum
import io
import json
import os

from paxon.inputs import optional_library

_PAD, _BEGIN, _END = "<|pad|>", "<|begin_of_text|>", "<|end_of_text|>"
_NUM_BYTES = 256
# SentencePiece skips longer lines, in bytes.
_MAX_LINE = 1 << 16
# The sums of its unigram training depend on the number of threads.
_THREADS = 8


class Kind(enum.Enum):
  """Kind of tokenizer."""

  BPE = "bpe"
  SENTENCE_PIECE_BPE = "sentencepiece_bpe"
  SENTENCE_PIECE_UNIGRAM = "sentencepiece_unigram"


def train(
  texts: Iterable[bytes], folder: str, *, kind: Kind, vocab_size: int
) -> str:
  """Trains a tokenizer and writes it to a new folder, as Hugging Face's.

  Args:
    texts: The documents; invalid UTF-8 is replaced.
    folder: The folder; created if it does not exist.
    kind: The kind of tokenizer.
    vocab_size: The number of ids with special tokens and bytes.

  Returns:
    The path of the vocabulary file.

  Raises:
    ValueError: The size is too small or, for the texts, too large; or the
      folder has a tokenizer already.
  """
  is_bpe = kind is Kind.BPE
  path = os.path.join(folder, "tokenizer.json" if is_bpe else "tokenizer.model")
  if os.path.exists(path):
    raise ValueError(f"{path} exists already; remove it, or choose another.")
  least = 3 + _NUM_BYTES + (not is_bpe)
  if vocab_size < least:
    raise ValueError(
      f"vocab_size must be at least {least}, for special tokens and bytes, got"
      f" {vocab_size}."
    )
  decoded = (text.decode(errors="replace") for text in texts)
  make = _make_byte_level_bpe if is_bpe else _make_sentence_piece
  content = make(decoded, kind, vocab_size)
  config = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": _BEGIN,
    "eos_token": _END,
    "pad_token": _PAD,
    "tokenizer_class": "PreTrainedTokenizerFast"
    if is_bpe
    else "LlamaTokenizer",
  }
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
    file.write(json.dumps(config, indent=2) + "\n")
  with open(path + ".part", "wb") as file:
    file.write(content)
  os.replace(path + ".part", path)
  return path


def _make_byte_level_bpe(
  texts: Iterator[str], kind: Kind, vocab_size: int
) -> bytes:
  """Returns a `tokenizer.json` with GPT-2's alphabet and splits."""
  del kind
  with optional_library.explain("tokenizers", extra="text"):
    import tokenizers
    from tokenizers import (
      decoders,
      models,
      pre_tokenizers,
      processors,
      trainers,
    )
  library = tokenizers.Tokenizer(models.BPE())
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[_PAD, _BEGIN, _END],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  library.train_from_iterator(texts, trainer)
  # Template that adds the begin token to a prompt, here and in transformers.
  library.post_processor = processors.TemplateProcessing(
    single=f"{_BEGIN} $A", special_tokens=[(_BEGIN, 1)]
  )
  if library.get_vocab_size() < vocab_size:
    raise ValueError(
      f"The texts have merges for {library.get_vocab_size()} ids only; lower"
      f" vocab_size ({vocab_size}), or give more text."
    )
  return (library.to_str(pretty=True) + "\n").encode()


def _make_sentence_piece(
  texts: Iterator[str], kind: Kind, vocab_size: int
) -> bytes:
  """Returns a model with byte pieces that changes no text."""
  with optional_library.explain("sentencepiece", extra="text"):
    import sentencepiece
  writer = io.BytesIO()
  is_unigram = kind is Kind.SENTENCE_PIECE_UNIGRAM
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(line for text in texts for line in text.splitlines()),
      model_writer=writer,
      model_type="unigram" if is_unigram else "bpe",
      vocab_size=vocab_size,
      max_sentence_length=_MAX_LINE,
      num_threads=_THREADS,
      byte_fallback=True,
      split_digits=True,
      allow_whitespace_only_pieces=True,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
      **{"pad_piece": _PAD, "bos_piece": _BEGIN, "eos_piece": _END},
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = str(error).rpartition("] ")[2] or str(error)
    raise ValueError(f"SentencePiece cannot train: {reason}") from error
  return writer.getvalue()
