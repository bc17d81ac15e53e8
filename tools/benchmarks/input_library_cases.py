"""Inputs whose speed is measured: TFRecords, and those of other libraries.

A library that is not installed is an error of its case alone, when the case is
made. Records and rows hold one text each, in one file of each format, as the
libraries write it by default.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib
import pathlib
from typing import Any

import numpy as np

from paxon.inputs import base_input, record_columns, tokenizer_protocol
from paxon.inputs.grain_sources import (
  array_record_files,
  grain_rows,
  hugging_face_rows,
  optional_library,
  parquet_rows,
)
from paxon.inputs.seqio_tasks import (
  feature_converters,
  seqio_library,
  task_stream,
  vocabulary_tokenizer,
)
from paxon.inputs.tf_records import (
  tf_example,
  tf_example_rows,
  tf_record_files,
  tf_record_writer,
)
from paxon.tools.benchmarks import input_cases

_BYTES, _PIECES = "bench_bytes", "bench_pieces"
_NUM_PIECES = 4096
# Of the SentencePiece model: what is learnt from is a part of the text.
_LEARN_BYTES = 1_000_000


def make(
  documents: Sequence[bytes], folder: pathlib.Path
) -> dict[str, input_cases.Make]:
  """Returns inputs by the name of the case, made when they are called.

  Each writes its files when it is made, and may raise `MissingLibraryError`.

  Args:
    documents: The text.
    folder: Where its files are written.
  """
  kinds: dict[str, Callable[..., base_input.BaseInput]] = {
    "TFRecord": _tf_record,
    "TFRecord of Examples": _tf_example,
    "ArrayRecord": _array_record,
    "Grain over ArrayRecord": _grain,
    "Parquet, in order": _parquet,
    "Hugging Face data set": _hugging_face,
    "SeqIO, bytes": functools.partial(_seqio, name=_BYTES),
    "SeqIO, SentencePiece": functools.partial(_seqio, name=_PIECES),
  }
  return {
    name: functools.partial(kind, documents, folder)
    for name, kind in kinds.items()
  }


def sentence_pieces(
  documents: Sequence[bytes], folder: pathlib.Path
) -> tokenizer_protocol.Tokenizer:
  """Returns SeqIO's SentencePiece vocabulary of the text as a tokenizer.

  Raises:
    MissingLibraryError: SeqIO is not installed.
  """
  seqio_library.seqio()
  register = _write_examples(documents, folder)
  return vocabulary_tokenizer.VocabularyTokenizer(
    name_in_registry=_PIECES, register=register
  )


def _tf_record(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  path = folder / "texts.tfrecord"
  tf_record_writer.write(path, documents)
  return input_cases.of_text(tf_record_files.TfRecordFiles(files=str(path)))


def _tf_example(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  _write_examples(documents, folder)
  records = tf_record_files.TfRecordFiles(files=f"{folder}/examples-*")
  return _of_rows(tf_example_rows.TfExampleRows(records=records))


def _array_record(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  path = _write_array_records(documents, folder)
  return input_cases.of_text(array_record_files.ArrayRecordFiles(files=path))


def _grain(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  path = _write_array_records(documents, folder)
  grain = optional_library.grain()
  source = functools.partial(grain.sources.ArrayRecordDataSource, [path])
  return input_cases.of_text(grain_rows.GrainRows(open=source))


def _parquet(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  parquet = optional_library.parquet()
  table = importlib.import_module("pyarrow").table(
    {"text": input_cases.strings(documents)}
  )
  parquet.write_table(table, folder / "texts.parquet", row_group_size=1024)
  rows = parquet_rows.ParquetRows(
    files=f"{folder}/texts.parquet", columns=("text",)
  )
  # A shuffle of single rows reads a group for each.
  return _of_rows(rows, shuffle_seed=None)


def _hugging_face(
  documents: Sequence[bytes], folder: pathlib.Path
) -> base_input.BaseInput:
  datasets = optional_library.datasets()
  table = datasets.table.InMemoryTable.from_pydict(
    {"text": input_cases.strings(documents)}
  )
  # Named here: the library would pickle all of the table for a name.
  given = datasets.Dataset(table, fingerprint="bench")
  path = str(folder / "hugging_face")
  datasets.disable_progress_bars()
  given.save_to_disk(path)
  return _of_rows(hugging_face_rows.HuggingFaceRows(path=path))


def _seqio(
  documents: Sequence[bytes], folder: pathlib.Path, *, name: str
) -> base_input.BaseInput:
  seqio_library.seqio()
  stream = task_stream.TaskStream(
    name_in_registry=name,
    split="train",
    converter=feature_converters.LanguageModel(),
    shuffle_seed=0,
    register=_write_examples(documents, folder),
  )
  return input_cases.packed(stream)


def _of_rows(
  rows: record_columns.Rows, *, shuffle_seed: int | None = 0
) -> base_input.BaseInput:
  text = record_columns.TextColumn(rows=rows)
  return input_cases.of_text(text, shuffle_seed=shuffle_seed)


def _write_array_records(
  documents: Sequence[bytes], folder: pathlib.Path
) -> str:
  path = str(folder / "texts.array_record")
  optional_library.array_record()
  module = importlib.import_module("array_record.python.array_record_module")
  # One record a group, which random access wants.
  writer = module.ArrayRecordWriter(path, "group_size:1")
  for document in documents:
    writer.write(document)
  writer.close()
  return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tasks:
  """Adds tasks over TFRecord files: one of bytes, one of pieces.

  Attributes:
    folder: Where `examples-*` are, and where the model of pieces is kept.
    text: What pieces are learnt from.
  """

  folder: str
  text: Sequence[str]

  def __call__(self) -> None:
    """Adds them; learns the pieces first."""
    seqio = seqio_library.seqio()
    model = self._learn()
    for name, vocabulary in (
      (_BYTES, seqio.ByteVocabulary()),
      (_PIECES, seqio.SentencePieceVocabulary(model)),
    ):
      # A process may measure more than once, in other folders.
      if name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(name)
      seqio.TaskRegistry.add(
        name,
        source=self._source(),
        preprocessors=[
          functools.partial(
            seqio.preprocessors.rekey, key_map={"targets": "text"}
          ),
          seqio.preprocessors.tokenize,
          seqio.preprocessors.append_eos,
        ],
        output_features={"targets": seqio.Feature(vocabulary)},
      )

  def _source(self) -> Any:
    tensorflow = seqio_library.tensorflow()
    return seqio_library.seqio().TFExampleDataSource(
      {"train": f"{self.folder}/examples-*"},
      {"text": tensorflow.io.FixedLenFeature([], tensorflow.string)},
    )

  def _learn(self) -> str:
    sentencepiece = importlib.import_module("sentencepiece")
    prefix = f"{self.folder}/pieces"
    if not pathlib.Path(prefix + ".model").exists():
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(self.text),
        model_prefix=prefix,
        vocab_size=_NUM_PIECES,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        num_threads=1,
      )
    return prefix + ".model"


def _write_examples(documents: Sequence[bytes], folder: pathlib.Path) -> _Tasks:
  """Writes TFRecords of Examples; returns what adds tasks over them."""
  path = folder / "examples-0"
  if not path.exists():
    tf_record_writer.write(
      path,
      (
        tf_example.serialize({"text": np.array([document], object)})
        for document in documents
      ),
    )
  size, learnt = 0, []
  for text in input_cases.strings(documents):
    if size < _LEARN_BYTES:
      learnt.extend(text.splitlines())
      size += len(text)
  return _Tasks(folder=str(folder), text=learnt)
