"""`quantization_config` of `config.json`: the storage of quantized weights.

A field that changes how weights are read is checked against the values that
`quantized_weights` supports. Fields of calibration, kernels and activations are
in `_INERT`; any other field must be null, false or empty.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import enum
import re
from typing import Any, Final, Never

import jax.numpy as jnp
import numpy as np

FIELD: Final = "quantization_config"
_METHOD: Final = "quant_method"

# Fields without effect on the values of weights.
_INERT_FIELDS = """
  _load_in_4bit _load_in_8bit act_bits act_data_type act_dynamic
  act_group_aware act_group_size act_sym activation_scale_ub
  activation_scheme amp autoround_version backend batch_size
  block_name_to_quantize bnb_4bit_compute_dtype bnb_4bit_quant_storage
  bnb_4bit_use_double_quant cache_block_outputs calib_data calibration_data
  damp_auto_increment damp_percent dataset dequantize desc_act
  disable_exllama do_fuse enable_minmax_tuning enable_norm_bias_tuning
  enable_quanted_input exllama_config failsafe fallback foem
  fuse_max_seq_len gptaq gptaq_alpha global_compression_ratio
  gradient_accumulate_steps hyb_act ignore ignored_layers iters
  kv_cache_scheme kv_cache_quant_algo lm_head
  llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
  llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit
  low_cpu_mem_usage low_gpu_mem_usage lr max_input_length meta minmax_lr
  model_file_base_name model_name_or_path model_seqlen
  module_name_preceding_first_block modules_in_block_to_quantize
  modules_to_convert modules_to_fuse modules_to_not_convert momentum mse
  not_use_best_mse nsamples offload_to_disk offload_to_disk_path
  pad_token_id quant_block_list quantization_status quantizer run_compressed
  sampler scale_dtype seqlen static_groups super_bits super_group_size sym
  tokenizer to_quant_block_names true_sequential use_cuda_fp16 use_exllama
  use_optimized_inference v2 v2_alpha version_of_quantizer zero_point
  """
_INERT = frozenset(_INERT_FIELDS.split())
# Of `_INERT`: names or patterns of modules.
_MODULES = (
  "ignore",
  "ignored_layers",
  "llm_int8_skip_modules",
  "modules_to_not_convert",
)
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_SIZE = 1 << 31
# Dtypes and observers of a scheme, which say how scales were found.
_INERT_OF_GROUP = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
# Classes of modules that targets of compressed-tensors name, and the modules.
_CLASSES = {"Embedding": r".*embed[^.]*$", "Linear": ".*"}


class QuantizationError(ValueError):
  """A `quantization_config` is not supported."""


class Form(enum.Enum):
  """Layouts of quantized weights in files, see `quantized_weights`."""

  AWQ_GEMM = "AWQ (gemm)"
  AWQ_GEMV = "AWQ (gemv)"
  BITSANDBYTES_4 = "bitsandbytes in 4 bits"
  BITSANDBYTES_8 = "bitsandbytes in 8 bits"
  FP8 = "fp8"
  GPTQ = "GPTQ"
  INT8 = "int8"
  MXFP4 = "MXFP4"
  PACKED = "pack-quantized"


# Outputs and inputs of a weight that share a scale; None is all of them.
Block = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
  """Storage of the weights of some modules.

  Attributes:
    form: Layout of the tensors.
    bits: Bits of a value.
    blocks: Possible sizes of the blocks that share a scale; the shape of the
      scales decides.
    zero_offset: Added to stored zero points.
  """

  form: Form
  bits: int = 8
  blocks: tuple[Block, ...] = ()
  zero_offset: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """The quantized weights of a model.

  Attributes:
    method: `quant_method`; empty if `config.json` has none.
    dtype: Of the values that the weights are read as.
    storages: Patterns that match a module's name from its start, and how its
      weight is stored; the first match decides.
  """

  method: str
  dtype: np.dtype
  storages: tuple[tuple[re.Pattern[str], Storage], ...]

  @property
  def forms(self) -> tuple[Form, ...]:
    """The layouts that may occur."""
    return tuple(dict.fromkeys(each.form for _, each in self.storages))

  def find(self, module: str, forms: Iterable[Form]) -> Storage | None:
    """Returns the storage of a module's weight in one of the forms."""
    wanted = set(forms)
    for pattern, storage in self.storages:
      if storage.form in wanted and pattern.match(module):
        return storage
    return None


class _Given:
  """Fields of an object; records which were read."""

  def __init__(self, method: str, values: Any, path: str = FIELD) -> None:
    self.method, self.path, self._read = method, path, {_METHOD}
    if not isinstance(values, dict):
      raise QuantizationError(
        f"{path} is {_show(values)}; {method} supports only an object."
      )
    self.values: Mapping[str, Any] = values

  def get(self, name: str, default: Any = None) -> Any:
    """Returns a value; null is the default."""
    self._read.add(name)
    value = self.values.get(name)
    return default if value is None else value

  def reject(self, name: str, supported: str) -> Never:
    raise QuantizationError(
      f"{self.path}.{name} is {_show(self.values.get(name))}; {self.method}"
      f" supports only {supported}."
    )

  def map_value(self, name: str, default: Any, supported: Iterable[Any]) -> Any:
    """Returns one of some values; texts are in lower case."""
    value = self.get(name, default)
    value = value.lower() if isinstance(value, str) else value
    for each in supported:
      if type(each) is type(value) and each == value:
        return value
    self.reject(name, " or ".join(map(repr, supported)))

  def group(self, default: int | None) -> int | None:
    """Returns `group_size`; None is all inputs."""
    value = self.get("group_size", default)
    if value in (-1, None):
      return None
    if type(value) is not int or not 0 < value < _MAX_SIZE:
      self.reject("group_size", "a positive integer or -1")
    return value

  def finish(self, inert: Iterable[str] = _INERT) -> None:
    """Checks the fields that were not read."""
    for name in _MODULES:
      value = self.get(name, [])
      if not isinstance(value, list) or not all(
        isinstance(each, str) for each in value
      ):
        self.reject(name, "a list of names")
    known = self._read | set(inert)
    for name, value in self.values.items():
      if name not in known and value not in (None, False, 0, "", [], {}):
        raise QuantizationError(
          f"{self.path}.{name} is {_show(value)}, an unknown field of"
          f" {self.method}; delete it if it does not change the weights."
        )


def get(config: Mapping[str, Any]) -> Any:
  """Returns the field of a `config.json`; None if it has none."""
  return _get(config, FIELD)


def parse(config: Mapping[str, Any]) -> Scheme:
  """Returns the quantized weights that a `config.json` describes.

  Without the field, they are those that name themselves: MXFP4, and fp8 in
  blocks of 128 x 128.

  Raises:
    QuantizationError: The method or the value of a field is not supported.
  """
  dtype = _get(config, "dtype") or _get(config, "torch_dtype")
  dtype = np.dtype(jnp.dtype(dtype if dtype in _DTYPES else "bfloat16"))
  given = get(config)
  if given is None:
    found = (*_parse_fp8(_Given("fp8", {})), *_everywhere(Form.MXFP4))
    return Scheme(method="", dtype=dtype, storages=tuple(found))
  method = find_method(given)
  if method not in _PARSERS:
    raise QuantizationError(
      f"{FIELD} has the {_METHOD} {_show(method)}; use one of"
      f" {', '.join(METHODS)}."
    )
  fields = _Given(method, given)
  return Scheme(
    method=method, dtype=dtype, storages=tuple(_PARSERS[method](fields))
  )


def find_method(given: Any) -> str | None:
  """Returns `quant_method`, which old files of bitsandbytes leave out.

  None is none.
  """
  if not isinstance(given, dict):
    return None
  method = given.get(_METHOD)
  if method is None and (
    given.get("load_in_4bit") or given.get("load_in_8bit")
  ):
    return "bitsandbytes"
  return None if method is None else str(method)


def _get(config: Mapping[str, Any], name: str) -> Any:
  """Returns a field, which a model of texts and images has in `text_config`."""
  value = config.get(name)
  inner = config.get("text_config")
  if value is None and isinstance(inner, dict):
    return inner.get(name)
  return value


_Storages = Iterable[tuple[re.Pattern[str], Storage]]


def _everywhere(form: Form, **fields: Any) -> _Storages:
  return [(re.compile(""), Storage(form=form, **fields))]


def _parse_awq(given: _Given) -> _Storages:
  given.map_value("bits", 4, (4,))
  if given.get("backend") == "llm-awq":
    given.reject("backend", "the format of AutoAWQ")
  names = ("version", "format", "checkpoint_format")
  for name in names:
    given.map_value(name, "gemm", ("gemm", "gemv"))
  found = {str(given.get(name)).lower() for name in names} & {"gemm", "gemv"}
  if len(found) > 1:
    given.reject("version", "the same value as format")
  form = Form.AWQ_GEMV if found == {"gemv"} else Form.AWQ_GEMM
  block = 1, given.group(128)
  given.map_value("pack_dtype", "int32", ("int32",))
  given.map_value("method", "awq", ("awq",))
  given.finish()
  return _everywhere(form, bits=4, blocks=(block,))


def _parse_gptq(given: _Given) -> _Storages:
  formats = ("gptq", "gptq_v2")
  kinds = [
    given.map_value(name, "gptq", formats)
    for name in ("checkpoint_format", "format")
    if given.get(name) is not None
  ]
  if len(set(kinds)) > 1:
    given.reject("format", "the same value as checkpoint_format")
  given.map_value("pack_dtype", "int32", ("int32",))
  given.map_value("method", "gptq", ("gptq",))
  # The first format stores zero points minus one.
  offset = 0 if kinds[:1] == ["gptq_v2"] else 1
  base = _read_gptq(given, offset, bits=None, group=128)
  dynamic = given.get("dynamic", {})
  given.finish()
  if not isinstance(dynamic, dict):
    given.reject("dynamic", "an object")
  found = []
  for pattern, each in dynamic.items():
    # Modules after "-:" are not quantized.
    storage = base
    if not pattern.startswith("-:"):
      own = _Given("gptq", each, f"{FIELD}.dynamic[{pattern!r}]")
      storage = _read_gptq(own, offset, bits=base.bits, group=base.blocks[0][1])
      own.finish()
    regex = pattern.removeprefix("-:").removeprefix("+:")
    found.append((_compile(given, "dynamic", regex), storage))
  return (*found, (re.compile(""), base))


def _read_gptq(
  given: _Given, offset: int, *, bits: int | None, group: int | None
) -> Storage:
  if type(given.get("bits", bits)) is not int:
    given.reject("bits", "2 or 3 or 4 or 8")
  bits = given.map_value("bits", bits, (2, 3, 4, 8))
  block = 1, given.group(group)
  assert bits is not None
  return Storage(form=Form.GPTQ, bits=bits, blocks=(block,), zero_offset=offset)


def _parse_auto_round(given: _Given) -> _Storages:
  """Reads folders of AutoRound in the layouts of GPTQ and AWQ."""
  layouts = {
    "auto_round": (Form.GPTQ, 0),
    "auto_round:gptqmodel": (Form.GPTQ, 0),
    "auto_round:gptq": (Form.GPTQ, 1),
    "auto_round:auto_gptq": (Form.GPTQ, 1),
    "auto_round:auto_awq": (Form.AWQ_GEMM, 0),
    "auto_round:awq": (Form.AWQ_GEMM, 0),
  }
  layout = given.map_value("packing_format", "auto_round:auto_gptq", layouts)
  given.map_value("data_type", "int", ("int",))
  form, offset = layouts[layout]
  sizes = (4,) if form is Form.AWQ_GEMM else (2, 3, 4, 8)
  bits = given.map_value("bits", 4, sizes)
  block = 1, given.group(128)
  given.finish()
  return _everywhere(form, bits=bits, blocks=(block,), zero_offset=offset)


def _parse_bitsandbytes(given: _Given) -> _Storages:
  given.map_value("bnb_4bit_quant_type", "fp4", ("fp4", "nf4"))
  given.finish()
  return [
    *_everywhere(Form.BITSANDBYTES_4, bits=4),
    *_everywhere(Form.BITSANDBYTES_8, blocks=((1, None),)),
  ]


def _parse_fp8(given: _Given) -> _Storages:
  given.map_value("fmt", "e4m3", ("e4m3", "e4m3fn", "float8_e4m3fn"))
  given.map_value("scale_fmt", "float", ("float", "ue8m0"))
  given.map_value("expert_dtype", "fp8", ("fp8",))
  one, name = (None, None), "weight_block_size"
  block = given.get(name)
  if block is not None:
    blocks = (_to_block(given, name, block),)
  elif name in given.values:
    blocks = (one,)
  else:
    # The shape of the scales decides.
    blocks = ((128, 128), one, (1, None))
  given.finish()
  return _everywhere(Form.FP8, blocks=blocks)


def _parse_fbgemm(given: _Given) -> _Storages:
  given.finish()
  return _everywhere(Form.FP8, blocks=((1, None),))


def _parse_mxfp4(given: _Given) -> _Storages:
  given.finish()
  return _everywhere(Form.MXFP4)


def _parse_compressed(given: _Given) -> _Storages:
  """Reads compressed-tensors: groups of modules with their schemes."""
  forms = {
    "pack-quantized": (Form.PACKED, Form.PACKED),
    "int-quantized": (Form.INT8, Form.INT8),
    "float-quantized": (Form.FP8, Form.FP8),
    "naive-quantized": (Form.INT8, Form.FP8),
  }
  whole = given.map_value("format", "dense", (*forms, "mixed-precision"))
  for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
    each = given.get(name, {})
    if not isinstance(each, dict):
      given.reject(name, "an object")
    if name == "sparsity_config" and each.get("format") is not None:
      inner = _Given(given.method, each, f"{given.path}.{name}")
      inner.map_value("format", "dense", ("dense",))
    elif any(each.values()):
      given.reject(name, "an empty one")
  groups = given.get("config_groups", {})
  if not isinstance(groups, dict):
    given.reject("config_groups", "an object")
  given.get("version")
  given.finish()
  found: list[tuple[tuple[int, str], re.Pattern[str], Storage]] = []
  for name, each in groups.items():
    path = f"{given.path}.config_groups.{name}"
    group = _Given(given.method, each, path)
    targets = group.get("targets", [])
    if not isinstance(targets, list) or not all(
      isinstance(target, str) for target in targets
    ):
      group.reject("targets", "a list of names")
    default = None if whole == "mixed-precision" else whole
    if group.get("weights") is None:
      continue
    pair = forms[group.map_value("format", default, forms)]
    weights = _Given(given.method, group.get("weights"), f"{path}.weights")
    storage = _read_weights(weights, pair)
    group.finish({"input_activations", "output_activations"})
    for target in targets:
      # The order of compressed-tensors: names, patterns, classes.
      if target.startswith("re:"):
        order, regex = 1, target.removeprefix("re:")
      elif target in _CLASSES:
        order, regex = 2, _CLASSES[target]
      else:
        order, regex = 0, re.escape(target) + "$"
      pattern = _compile(group, "targets", regex)
      found.append(((order, target), pattern, storage))
  found.sort(key=lambda each: each[0])
  return [(pattern, storage) for _, pattern, storage in found]


def _read_weights(given: _Given, forms: tuple[Form, Form]) -> Storage:
  """Reads the scheme of a group's weights."""
  kind = given.map_value("type", "int", ("int", "float"))
  form = forms[kind == "float"]
  if (form is Form.FP8) != (kind == "float"):
    given.reject("type", f"the type of the format {form.value}")
  sizes = (8,) if kind == "float" else range(1, 9)
  bits = given.map_value("num_bits", 8, sizes)
  given.map_value("symmetric", True, (True, False))
  given.map_value("dynamic", False, (False,))
  orders = (False, "group", "dynamic", "weight", "static")
  given.map_value("actorder", False, orders)
  group = given.group(None)
  inferred = "group" if group else "tensor"
  if given.get("group_size") == -1:
    inferred = "channel"
  strategies = ("tensor", "channel", "group", "block")
  strategy = given.map_value("strategy", inferred, strategies)
  block: Block = (None, None)
  if strategy == "channel":
    block = 1, None
  elif strategy == "group":
    if group is None:
      given.reject("group_size", "a positive integer for the strategy group")
    block = 1, group
  structure = given.get("block_structure")
  if strategy == "block":
    if isinstance(structure, str) and re.fullmatch(r"\d+x\d+", structure):
      structure = list(map(int, structure.split("x")))
    block = _to_block(given, "block_structure", structure)
  given.finish(_INERT_OF_GROUP)
  return Storage(form=form, bits=bits, blocks=(block,))


def _to_block(given: _Given, name: str, value: Any) -> Block:
  if (
    not isinstance(value, list | tuple)
    or len(value) != 2
    or not all(type(each) is int and 0 < each < _MAX_SIZE for each in value)
  ):
    given.reject(name, "two positive integers")
  return value[0], value[1]


def _compile(given: _Given, name: str, regex: str) -> re.Pattern[str]:
  try:
    return re.compile(regex)
  except re.error:
    given.reject(name, f"valid patterns, and {_show(regex)} is none")


def _show(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 200 else f"{shown[:200]}..."


_PARSERS: Mapping[str, Callable[[_Given], _Storages]] = {
  "auto-round": _parse_auto_round,
  "awq": _parse_awq,
  "bitsandbytes": _parse_bitsandbytes,
  "compressed-tensors": _parse_compressed,
  "fbgemm_fp8": _parse_fbgemm,
  "fp8": _parse_fp8,
  "gptq": _parse_gptq,
  "intel/auto-round": _parse_auto_round,
  "mxfp4": _parse_mxfp4,
}
METHODS: Final = tuple(_PARSERS)
# Those of weights of single layers, not of stacks of experts.
OF_LAYERS: Final = tuple(each for each in METHODS if each != "mxfp4")
