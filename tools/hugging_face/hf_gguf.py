"""GGUF files of Hugging Face models, for llama.cpp and what is built on it.

`tools/hf gguf DIR --to FILE` converts the folder of a model, such as one that
`export` wrote, with the names and metadata of the `gguf` package. Matrices have
one of these types, vectors are float32:

  f32, f16, bf16
  q8_0    int8 with a float16 scale per 32 inputs of an output
  q4_0    int4, the same; embedding and output layer are q8_0

Tensors are read, converted and written one after the other.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import json
import math
import os
from typing import Any, Final

from etils import epath
import numpy as np

from paxon.inputs import optional_library
from paxon.inputs.tokenizers import chat_template, text_tokenizer
from paxon.layers.models.hugging_face import families, family
from paxon.layers.models.hugging_face.files import (
  safetensors_file,
  weight_files,
)
from paxon.runner import files, units, user_error
from paxon.tools.hugging_face import hf_files

TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0")
# Inputs of a block of q8_0 and q4_0.
_BLOCK = 32

# The architecture of llama.cpp by `model_type`. Its `llama` rotates neighboring
# features, the others rotate halves, as Hugging Face does.
_ARCHITECTURES: Final = {
  "llama": "llama",
  "mistral": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
}
# Fields that change the model and that these architectures do not have.
_NEUTRAL: Final[Mapping[str, Any]] = {
  "hidden_act": "silu",
  "mlp_bias": False,
  "use_sliding_window": False,
}

_REQUIRED: Final = (
  "hidden_size",
  "intermediate_size",
  "max_position_embeddings",
  "num_attention_heads",
  "num_hidden_layers",
  "rms_norm_eps",
  "vocab_size",
)

# Names of llama.cpp for rules that split text before BPE, by their last regular
# expression in tokenizer.json.
_SPLITS: Final = {
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
_GPT2 = "gpt-2"
_MODEL, _JSON = "tokenizer.model", "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
  """A tensor of the file.

  Attributes:
    name: Its name in the file.
    shape: Its shape.
    type: One of `TYPES`.
    read: Returns its values, float32.
  """

  name: str
  shape: tuple[int, ...]
  type: str
  read: Callable[[], np.ndarray]


def run(folder: epath.Path, target: epath.Path, *, type_: str) -> Iterator[str]:
  """Converts a folder to a file, and yields lines to print.

  Args:
    folder: A folder with config.json, safetensors files and a tokenizer.
    target: The local file to write.
    type_: Type of matrices, one of `TYPES`.

  Raises:
    user_error.UserError: The model or its tokenizer is not supported, its files
      are missing or damaged, or the target exists.
  """
  _check_target(target)
  config = hf_files.read_config(folder)
  _check_config(folder, config)
  kind = config["model_type"]
  try:
    names = families.find(config).names(config)
    weights = weight_files.find(folder, names=names)
    weights.check()
  except (
    family.UnsupportedConfigError,
    weight_files.WeightsError,
    safetensors_file.DamagedFileError,
  ) as error:
    raise user_error.UserError(str(error)) from error
  try:
    with optional_library.explain("gguf", extra="serve"):
      import gguf
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  library: Any = gguf
  tensors = list(_find_tensors(library, config, weights, type_))
  partial = target.parent / f"{target.name}.part"
  target.parent.mkdir(parents=True, exist_ok=True)
  writer = library.GGUFWriter(os.fspath(partial), _ARCHITECTURES[kind])
  try:
    _add_model(library, writer, config, type_)
    _add_tokenizer(library, writer, folder, config)
    _write(library, writer, tensors)
  except BaseException:
    writer.close()
    partial.unlink(missing_ok=True)
    raise
  writer.close()
  size = partial.stat().length
  partial.rename(target)
  if kind == "mistral" and config.get("sliding_window"):
    yield (
      f"warning: sliding_window={config['sliding_window']} is not stored;"
      " llama.cpp attends to all tokens of longer texts."
    )
  yield (
    f"wrote {len(tensors)} tensors, {units.size(size)}, as {type_} to"
    f" {os.fspath(target)}"
  )


def _check_config(folder: epath.Path, config: Mapping[str, Any]) -> None:
  """Raises UserError if the format cannot describe a model."""
  kind = config.get("model_type")
  if kind not in _ARCHITECTURES:
    raise user_error.UserError(
      f"{os.fspath(folder)} has the model_type {kind!r}, which gguf cannot"
      f" store; supported: {', '.join(_ARCHITECTURES)}."
    )
  missing = [name for name in _REQUIRED if config.get(name) is None]
  if missing:
    raise user_error.UserError(
      f"{os.fspath(folder / hf_files.CONFIG)} does not have"
      f" {', '.join(missing)}, which gguf needs; add the values of the model."
    )
  for name, neutral in _NEUTRAL.items():
    if config.get(name, neutral) not in (neutral, None):
      raise user_error.UserError(
        f"{os.fspath(folder / hf_files.CONFIG)} has {name}={config[name]!r};"
        f" the architecture {_ARCHITECTURES[kind]} of gguf needs {neutral!r}."
      )


def _check_target(target: epath.Path) -> None:
  if not files.is_local(os.fspath(target)):
    raise user_error.UserError(
      f"--to={os.fspath(target)} is not a local file; write one, and copy it."
    )
  if target.suffix != ".gguf":
    raise user_error.UserError(
      f"--to={os.fspath(target)} must be a file whose name ends with .gguf."
    )
  if target.exists():
    raise user_error.UserError(
      f"{os.fspath(target)} exists; pass another file, or delete it."
    )


def _head_dim(config: Mapping[str, Any]) -> int:
  heads = config["num_attention_heads"]
  return config.get("head_dim") or config["hidden_size"] // heads


def _add_model(
  library: Any, writer: Any, config: Mapping[str, Any], type_: str
) -> None:
  """Adds the fields of the model."""
  heads = config["num_attention_heads"]
  writer.add_name(str(config.get("_name_or_path") or config["model_type"]))
  writer.add_vocab_size(config["vocab_size"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(heads)
  writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
  writer.add_key_length(_head_dim(config))
  writer.add_value_length(_head_dim(config))
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_dimension_count(_head_dim(config))
  rope = _rope(config)
  writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
  kind = rope["rope_type"]
  if kind in ("linear", "yarn"):
    types = library.RopeScalingType
    is_linear = kind == "linear"
    writer.add_rope_scaling_type(types.LINEAR if is_linear else types.YARN)
    writer.add_rope_scaling_factor(float(rope["factor"]))
    if not is_linear:
      _add_yarn(writer, rope, config["max_position_embeddings"])
  elif kind not in ("default", "llama3"):
    raise user_error.UserError(
      f"config.json has rope_type={kind!r}, which gguf cannot store; supported:"
      " default, linear, llama3, yarn."
    )
  file_type = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
  }[type_]
  writer.add_file_type(library.LlamaFileType[file_type])
  writer.add_quantization_version(library.GGML_QUANT_VERSION)


def _add_yarn(writer: Any, rope: Mapping[str, Any], length: int) -> None:
  """Adds the fields of YaRN.

  Raises:
    user_error.UserError: llama.cpp computes one of them otherwise.
  """
  original = rope.get("original_max_position_embeddings")
  writer.add_rope_scaling_orig_ctx_len(original or length)
  if rope.get("beta_fast") is not None:
    writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
  if rope.get("beta_slow") is not None:
    writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
  expected = 0.1 * math.log(float(rope["factor"])) + 1
  for name, neutral in (
    ("attention_factor", expected),
    ("mscale", None),
    ("mscale_all_dim", None),
    ("truncate", True),
  ):
    given = rope.get(name)
    if given is None or given == neutral:
      continue
    if name == "attention_factor" and math.isclose(given, expected):
      continue
    raise user_error.UserError(
      f"config.json has {name}={given!r} for YaRN, which gguf cannot store; it"
      f" must be {neutral!r} or absent."
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the rotary embedding, of older and newer files."""
  rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
  rope.setdefault("rope_type", rope.get("type", "default"))
  if "rope_theta" in config:
    rope.setdefault("rope_theta", config["rope_theta"])
  return rope


def _rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
  """Returns the divisors of Llama 3.1's frequencies, [head_dim / 2]."""
  rope = _rope(config)
  if rope["rope_type"] != "llama3":
    return None
  size = _head_dim(config)
  exponents = np.arange(0, size, 2) / size
  lengths = 2 * math.pi * float(rope["rope_theta"]) ** exponents
  factor, low, high = (
    float(rope[name])
    for name in ("factor", "low_freq_factor", "high_freq_factor")
  )
  turns = rope["original_max_position_embeddings"] / lengths
  smooth = np.clip((turns - low) / (high - low), 0, 1)
  return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _find_tensors(
  library: Any,
  config: Mapping[str, Any],
  weights: weight_files.WeightFiles,
  type_: str,
) -> Iterator[_Tensor]:
  """Yields the tensors of the file in the order of the model.

  Raises:
    user_error.UserError: A tensor has no name in gguf, or blocks do not fit.
  """
  kind = _ARCHITECTURES[config["model_type"]]
  archs = {name: arch for arch, name in library.MODEL_ARCH_NAMES.items()}
  layers = config["num_hidden_layers"]
  to_name = library.get_tensor_name_map(archs[kind], layers).get_name
  factors = _rope_factors(config)
  if factors is not None:
    yield _Tensor(
      name="rope_freqs.weight",
      shape=factors.shape,
      type="f32",
      read=lambda: factors,
    )
  is_tied = config.get("tie_word_embeddings", False)
  heads = config["num_attention_heads"]
  by_part = {
    "q_proj": heads,
    "k_proj": config.get("num_key_value_heads") or heads,
  }
  for name, tensor in weights.names.tensors.items():
    if is_tied and name == "lm_head.weight":
      continue
    found = to_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
      raise user_error.UserError(
        f"The tensor {name} has no name in the architecture {kind} of gguf."
      )
    chosen = "f32" if len(tensor.shape) < 2 else type_
    if type_ == "q4_0" and found in ("token_embd.weight", "output.weight"):
      chosen = "q8_0"
    if chosen.startswith("q") and tensor.shape[-1] % _BLOCK:
      raise user_error.UserError(
        f"The tensor {name} has {tensor.shape[-1]} inputs; {chosen} needs a"
        f" multiple of {_BLOCK}; use --type=bf16."
      )
    part = by_part.get(name.split(".")[-2]) if kind == "llama" else None
    yield _Tensor(
      name=found,
      shape=tensor.shape,
      type=chosen,
      read=_reader(weights, name, tensor.shape, heads=part),
    )


def _reader(
  weights: weight_files.WeightFiles,
  name: str,
  shape: tuple[int, ...],
  *,
  heads: int | None,
) -> Callable[[], np.ndarray]:
  """Returns a function that reads a tensor.

  With `heads`, halves of the features of a head become neighbors.
  """

  def read() -> np.ndarray:
    values = weights.read_rows(name, 0, shape[0]).astype(np.float32)
    if heads is not None:
      split = values.reshape(heads, 2, -1, *shape[1:])
      values = split.swapaxes(1, 2).reshape(shape)
    return values

  return read


def _write(library: Any, writer: Any, tensors: list[_Tensor]) -> None:
  """Writes all fields and tensors."""
  types, sizes = library.GGMLQuantizationType, library.GGML_QUANT_SIZES
  for each in tensors:
    raw = types[each.type.upper()]
    block, bytes_ = sizes[raw]
    shape = (*each.shape[:-1], each.shape[-1] // block * bytes_)
    writer.add_tensor_info(
      each.name, shape, np.dtype(np.uint8), math.prod(shape), raw
    )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for each in tensors:
    raw = types[each.type.upper()]
    made = library.quants.quantize(each.read(), raw)
    writer.write_tensor_data(np.ascontiguousarray(made))


def _add_tokenizer(
  library: Any, writer: Any, folder: epath.Path, config: Mapping[str, Any]
) -> None:
  """Adds the tokenizer, its special ids and the chat template.

  Raises:
    user_error.UserError: There is none, or llama.cpp does not have its rules.
  """
  size = config["vocab_size"]
  if (folder / _MODEL).exists():
    model, tokens, scores, types = _read_pieces(library, folder)
    pre, merges = "default", None
  elif (folder / _JSON).exists():
    model, pre, tokens, scores, types, merges = _read_json(library, folder)
  else:
    raise user_error.UserError(
      f"{os.fspath(folder)} has neither {_MODEL} nor {_JSON}; a gguf file"
      " contains the tokenizer."
    )
  if len(tokens) > size:
    raise user_error.UserError(
      f"The tokenizer in {os.fspath(folder)} has {len(tokens)} ids, and"
      f" config.json vocab_size={size}."
    )
  unused = library.TokenType.UNUSED
  rest = range(len(tokens), size)
  tokens += [f"[PAD{i}]" for i in rest]
  types += [unused] * len(rest)
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  if scores is not None:
    writer.add_token_scores(scores + [-1000.0] * len(rest))
  writer.add_token_types(types)
  if merges is not None:
    writer.add_token_merges(merges)
  _add_special(writer, folder, config, tokens)


def _add_special(
  writer: Any,
  folder: epath.Path,
  config: Mapping[str, Any],
  tokens: list[str],
) -> None:
  """Adds the ids of special tokens, and the chat template."""
  try:
    given = text_tokenizer.read_json(os.fspath(folder), "tokenizer_config.json")
    template = chat_template.find(os.fspath(folder))
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  for name in ("bos", "eos", "unk", "pad"):
    token = given.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = config.get(f"{name}_token_id")
    found = found[0] if isinstance(found, list) and found else found
    if token in tokens:
      found = tokens.index(token)
    if isinstance(found, int):
      getattr(writer, f"add_{name}_token_id")(found)
  for name in ("bos", "eos"):
    if isinstance(given.get(f"add_{name}_token"), bool):
      getattr(writer, f"add_add_{name}_token")(given[f"add_{name}_token"])
  if template is not None:
    writer.add_chat_template(template)


def _read_pieces(
  library: Any, folder: epath.Path
) -> tuple[str, list[str], list[float], list[Any]]:
  """Returns model, tokens, scores and types of a SentencePiece file."""
  import sentencepiece

  processor: Any = sentencepiece.SentencePieceProcessor()
  try:
    processor.LoadFromSerializedProto((folder / _MODEL).read_bytes())
  except (RuntimeError, OSError) as error:
    raise user_error.UserError(
      f"{os.fspath(folder / _MODEL)} is not a SentencePiece file; copy it."
    ) from error
  count = processor.vocab_size()
  kinds = library.TokenType
  types = []
  for i in range(count):
    if processor.is_unknown(i):
      types.append(kinds.UNKNOWN)
    elif processor.is_control(i):
      types.append(kinds.CONTROL)
    elif processor.is_unused(i):
      types.append(kinds.UNUSED)
    elif processor.is_byte(i):
      types.append(kinds.BYTE)
    else:
      types.append(kinds.NORMAL)
  tokens = [processor.id_to_piece(i) for i in range(count)]
  scores = [float(processor.get_score(i)) for i in range(count)]
  # Those of BPE are the order of its merges; a unigram model has logarithms.
  if any(
    not score.is_integer()
    for score, kind in zip(scores, types, strict=True)
    if kind == kinds.NORMAL
  ):
    raise user_error.UserError(
      f"{os.fspath(folder / _MODEL)} is a unigram model; gguf stores BPE for"
      " these architectures."
    )
  try:
    path = os.fspath(folder / _MODEL)
    added = text_tokenizer.read_added_tokens(path)
    listed = text_tokenizer.read_json(
      os.fspath(folder), "tokenizer_config.json"
    ).get("added_tokens_decoder")
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  special = {
    each["content"] for each in (listed or {}).values() if each.get("special")
  }
  by_id = {i: token for token, i in added.items() if i >= count}
  for i in range(count, max(by_id, default=count - 1) + 1):
    token = by_id.get(i)
    tokens.append(f"[PAD{i}]" if token is None else token)
    kind = kinds.CONTROL if token in special else kinds.USER_DEFINED
    types.append(kinds.UNUSED if token is None else kind)
    scores.append(-1000.0)
  return "llama", tokens, scores, types


def _read_json(
  library: Any, folder: epath.Path
) -> tuple[
  str, str, list[str], list[float] | None, list[Any], list[str] | None
]:
  """Returns model, split rule, tokens, scores, types and merges of a file.

  Of BPE with byte fallback (that of SentencePiece) the scores are the order of
  its merges, by which llama.cpp merges pieces.

  Raises:
    user_error.UserError: It is not BPE, or has no known split rule.
  """
  path = folder / _JSON
  try:
    content = json.loads(path.read_text())
    model, added = content["model"], content.get("added_tokens") or []
    kind, by_token = model["type"], dict(model["vocab"])
    pairs = [
      each.split(" ") if isinstance(each, str) else each
      for each in model["merges"]
    ]
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} is not a BPE tokenizer ({error!r}); gguf stores BPE,"
      f" or the {_MODEL} of SentencePiece."
    ) from error
  if kind != "BPE":
    raise user_error.UserError(
      f"{os.fspath(path)} has a model of type {kind!r}; gguf stores BPE, or the"
      f" {_MODEL} of SentencePiece."
    )
  kinds = library.TokenType
  types = dict.fromkeys(by_token.values(), kinds.NORMAL)
  is_fallback = bool(model.get("byte_fallback"))
  if is_fallback:
    bytes_ = (by_token.get(f"<0x{i:02X}>") for i in range(256))
    types |= dict.fromkeys((i for i in bytes_ if i is not None), kinds.BYTE)
  for each in added:
    by_token[each["content"]] = each["id"]
    special = each.get("special")
    types[each["id"]] = kinds.CONTROL if special else kinds.USER_DEFINED
  unknown = by_token.get(model.get("unk_token"))
  if unknown is not None:
    types[unknown] = kinds.UNKNOWN
  by_id = {number: token for token, number in by_token.items()}
  tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
  of_tokens = [types.get(i, kinds.UNUSED) for i in range(len(tokens))]
  if not is_fallback:
    pre = _find_split(path, content.get("pre_tokenizer") or {})
    return "gpt2", pre, tokens, None, of_tokens, [" ".join(p) for p in pairs]
  ranks: dict[str, int] = {}
  for rank, pair in enumerate(pairs):
    ranks.setdefault("".join(pair), rank)
  scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
  return "llama", "default", tokens, scores, of_tokens, None


def _find_split(path: epath.Path, pre: Mapping[str, Any]) -> str:
  """Returns llama.cpp's name of the rule that splits text before BPE."""
  steps = pre.get("pretokenizers") or [pre]
  byte_level = [each for each in steps if each.get("type") == "ByteLevel"]
  splits = [each for each in steps if each.get("type") == "Split"]
  if byte_level and len(splits) + len(byte_level) == len(steps):
    if not splits and byte_level[-1].get("use_regex", True):
      return _GPT2
    if len(splits) == 1:
      rule = (splits[0].get("pattern") or {}).get("Regex", "")
      name = _SPLITS.get(rule)
      if name is not None:
        return name
  raise user_error.UserError(
    f"{os.fspath(path)} splits text by rules for which llama.cpp has no name"
    f" here; supported: {', '.join(sorted({_GPT2, *_SPLITS.values()}))}."
  )
