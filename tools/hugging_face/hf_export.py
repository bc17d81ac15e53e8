"""Export of a checkpoint to Hugging Face weights.

Files are laid out before anything is read. Then each array of ours, which holds
all layers of a stack, is read once, and its pieces are written where they
belong: memory holds a few times the largest array.
"""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import tempfile
from typing import Any

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.inputs import stores
from paxon.layers.models.hugging_face import families, family, mapping
from paxon.layers.models.hugging_face.files import (
  safetensors_file,
  weight_files,
)
from paxon.quantization import lora, served_einsum, stored_kernels
from paxon.runner import files as runner_files
from paxon.runner import units, user_error
from paxon.runner.checkpoints import stored_checkpoint, text_table
from paxon.runner.session import serving
from paxon.sharding import suggestions, variables
from paxon.tools.hugging_face import hf_files, hf_quantized, peft_adapter

# The default of transformers.
SHARD_BYTES = 5 * 10**9
_CHANGES = "task.exported_config"
_DTYPES = ("bfloat16", "float16", "float32")


def run(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  target: epath.Path,
  *,
  like: epath.Path | None,
  dtype: Any,
  shard_bytes: int,
  dry_run: bool,
  adapter_only: bool = False,
  quantized_format: str | None = None,
) -> Iterator[str]:
  """Exports a checkpoint, and yields lines to print.

  Low-rank adapters are merged, or written alone. Quantized weights of serving
  are written in a format of `hf_quantized`.

  Args:
    checkpoint: The checkpoint.
    target: The folder to write. For one in a store, files are written to a
      temporary folder and uploaded, `config.json` last.
    like: A folder with the `config.json` of the model; None for that of an
      imported run directory.
    dtype: Of the written tensors; None keeps that of the checkpoint, and that
      of `config.json`, the base model's, for merged adapters.
    shard_bytes: Maximum size of a file with several tensors.
    dry_run: Only print what would be written.
    adapter_only: Write the adapters alone, as a folder of PEFT.
    quantized_format: Of quantized weights, one of `hf_quantized.FORMATS`; None
      is the first.

  Raises:
    user_error.UserError: The model is not supported, or the checkpoint does
      not match it.
  """
  _check_target(target)
  local = target
  with contextlib.ExitStack() as stack:
    if not dry_run and not runner_files.is_local(target):
      name = stack.enter_context(tempfile.TemporaryDirectory())
      local = epath.Path(name)
    for line in _export(
      checkpoint,
      local,
      like=like,
      dtype=dtype,
      shard_bytes=shard_bytes,
      dry_run=dry_run,
      adapter_only=adapter_only,
      quantized_format=quantized_format,
    ):
      yield line.replace(os.fspath(local), os.fspath(target))
    if local is not target:
      _upload(local, target)


def _upload(local: epath.Path, target: epath.Path) -> None:
  """Copies a folder to a store; what a reader looks for first comes last."""
  last = (peft_adapter.CONFIG, weight_files.INDEX, hf_files.CONFIG)
  found = [each for each in pathlib.Path(local).rglob("*") if each.is_file()]
  for each in sorted(found, key=lambda path: (path.name in last, path.name)):
    place = target / os.fspath(each.relative_to(local))
    try:
      stores.upload(os.fspath(each), os.fspath(place))
    except stores.StoreError as error:
      raise user_error.UserError(str(error)) from error


def _export(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  target: epath.Path,
  *,
  like: epath.Path | None,
  dtype: Any,
  shard_bytes: int,
  dry_run: bool,
  adapter_only: bool,
  quantized_format: str | None,
) -> Iterator[str]:
  """Exports to a local folder; see `run`."""
  folder = like or _find_folder(checkpoint)
  config, names = _find_model(checkpoint, folder, is_like=like is not None)
  adapter = find_adapter(checkpoint)
  quantized = hf_quantized.make_plan(
    checkpoint, names, kind=quantized_format or hf_quantized.COMPRESSED
  )
  _check_quantized(checkpoint, quantized, quantized_format)
  replaced = _find_stored(checkpoint)
  if replaced and not (adapter_only and adapter and _is_additive(adapter)):
    raise user_error.UserError(
      f"{os.fspath(checkpoint.path)} has quantized kernels (frozen_storage),"
      " with which only adapters of kind lora and rslora are written; pass"
      " --adapter, and add them to the imported model with PEFT."
    )
  kernels = {} if quantized is None else quantized.kernels
  _check(checkpoint, names, replaced | kernels.keys())
  if adapter_only:
    base = hf_files.read_source(folder)
    yield _write_adapter(checkpoint, names, adapter, target, base, dry_run)
    return
  if adapter is not None and dtype is None:
    # A base in bfloat16 is float32 in the checkpoint of a training run.
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = jnp.dtype(stated) if stated in _DTYPES else None
  export = _describe(checkpoint, folder, names, adapter, quantized, dtype)
  shards = plan(export.described, shard_bytes=shard_bytes)
  if dry_run:
    yield from _list_tensors(export, shards)
  else:
    stored_checkpoint.verify(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    _write(export, shards, target)
    stored = hf_files.find_dtype(x for x, _ in export.unquantized.values())
    copied = hf_files.copy_beside(folder, target, dtype=stored, config=config)
    if quantized is not None:
      shapes = {name: shape for name, (_, shape) in export.unquantized.items()}
      hf_quantized.add_config(target, quantized.config(shapes))
    yield f"copied: {', '.join(copied)}"
  total = sum(_bytes(each) for each in export.described.values())
  done = "would write" if dry_run else "wrote"
  yield (
    f"{done} {len(export.described)} tensors, {units.size(total)}, in"
    f" {len(shards)} file{'s' if len(shards) > 1 else ''} to"
    f" {os.fspath(target)}"
  )


# Dtype and shape of tensors, by name.
_Described = Mapping[str, tuple[Any, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class _Export:
  """The tensors of an export.

  Attributes:
    checkpoint: Where they come from.
    names: Names of variables and tensors.
    adapter: Merged into its kernels; None without.
    quantized: Quantized weights; None without.
    unquantized: Tensors of variables that are written as they are.
    unused: Weights that an import kept.
    described: All tensors.
  """

  checkpoint: stored_checkpoint.StoredCheckpoint
  names: mapping.Names
  adapter: lora.Lora | None
  quantized: hf_quantized.Plan | None
  unquantized: _Described
  unused: Mapping[str, np.ndarray]
  described: _Described


def _list_tensors(
  export: _Export, shards: Mapping[str, list[str]]
) -> Iterator[str]:
  """Yields the table of `--dry_run`."""
  rows = [("file", "tensor", "shape", "dtype")]
  for file, names in shards.items():
    for name in names:
      dtype, shape = export.described[name]
      rows.append((file, name, str(list(shape)), dtype.name))
  yield from text_table.format_lines(rows, right=())


def _find_model(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  folder: epath.Path,
  *,
  is_like: bool,
) -> tuple[dict[str, Any], mapping.Names]:
  """Returns the configuration of the exported model, and its names."""
  if not folder.is_dir():
    raise user_error.UserError(
      f"{os.fspath(folder)} does not exist; pass --like=FOLDER with the"
      " config.json of the model."
    )
  changes = {} if is_like else _read_changes(checkpoint)
  config = {**hf_files.read_config(folder), **changes}
  try:
    config = dict(families.to_language_model(config))
    return config, families.find(config).names(config)
  except family.UnsupportedConfigError as error:
    raise user_error.UserError(str(error)) from error


def _check_quantized(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  quantized: hf_quantized.Plan | None,
  quantized_format: str | None,
) -> None:
  if quantized is None and quantized_format is not None:
    raise user_error.UserError(
      f"{os.fspath(checkpoint.path)} has no quantized weights, so"
      f" --format={quantized_format} has no effect; export RUN/serving/RECIPE,"
      " which --mode=eval --fdl.quantization=RECIPE:convert writes."
    )


def _describe(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  folder: epath.Path,
  names: mapping.Names,
  adapter: lora.Lora | None,
  quantized: hf_quantized.Plan | None,
  dtype: Any,
) -> _Export:
  """Lays out the tensors, before anything but the kept weights is read."""
  unquantized = {
    name: (_dtype(checkpoint, tensor, dtype), tensor.shape)
    for name, tensor in names.tensors.items()
    if quantized is None or name not in quantized.tensors
  }
  described = dict(unquantized)
  if quantized is not None:
    described |= quantized.describe(dtype)
  unused = _read_unused(folder, names)
  described |= {
    name: (values.dtype if dtype is None else np.dtype(dtype), values.shape)
    for name, values in unused.items()
  }
  return _Export(
    *(checkpoint, names, adapter, quantized),
    *(unquantized, unused, described),
  )


def plan(
  described: Mapping[str, tuple[Any, tuple[int, ...]]], *, shard_bytes: int
) -> dict[str, list[str]]:
  """Returns the tensors of each file, in the order of the model.

  Args:
    described: Dtype and shape by name.
    shard_bytes: A file is not larger, unless it has one tensor only.
  """
  shards: list[list[str]] = [[]]
  size = 0
  for name, each in described.items():
    if shards[-1] and size + _bytes(each) > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += _bytes(each)
  if len(shards) == 1:
    return {weight_files.WEIGHTS: shards[0]}
  stem = weight_files.WEIGHTS.removesuffix(".safetensors")
  return {
    f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": each
    for i, each in enumerate(shards, start=1)
  }


def _write(
  export: _Export, shards: Mapping[str, list[str]], target: epath.Path
) -> None:
  described, quantized = export.described, export.quantized
  with contextlib.ExitStack() as stack:
    writers = {}
    for file, each in shards.items():
      writer = stack.enter_context(
        safetensors_file.Writer(
          target / file, {name: described[name] for name in each}
        )
      )
      writers |= dict.fromkeys(each, writer)
    for name, values in export.unused.items():
      values = values.astype(described[name][0], copy=False)
      writers[name].write_rows(name, 0, values)
    if quantized is not None:
      for name, values in hf_quantized.tensors(
        export.checkpoint, export.names, quantized
      ):
        values = values.astype(described[name][0], copy=False)
        writers[name].write_rows(name, 0, values)
    for leaf in export.names.leaves.values():
      if quantized is not None and leaf.name in quantized.kernels:
        continue
      wanted = [leaf.name, *_find_adapters(export.checkpoint, leaf.name)]
      arrays = stored_checkpoint.read_numpy(export.checkpoint, wanted)
      if export.adapter is not None:
        arrays = peft_adapter.merge(arrays, export.adapter)
      array = arrays[leaf.name]
      for name, start, rows, columns in leaf.to_tensors(array):
        rows = rows.astype(described[name][0], copy=False)
        writers[name].write_rows(name, start, rows, columns)
      # Free it before the next one is read.
      del array, arrays, rows
  if len(shards) > 1:
    index = {
      "metadata": {"total_size": sum(map(_bytes, described.values()))},
      "weight_map": {
        name: file for file, each in shards.items() for name in each
      },
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (target / weight_files.INDEX).write_text(text + "\n")


def _read_unused(
  folder: epath.Path, names: mapping.Names
) -> dict[str, np.ndarray]:
  """Returns the weights that the import kept for the export, by name."""
  path = folder / hf_files.UNUSED
  if not path.exists():
    return {}
  try:
    return {
      name: safetensors_file.read_rows(path, entry, 0, entry.shape[0])
      for name, entry in safetensors_file.read_header(path).items()
      if names.is_kept(name)
    }
  except safetensors_file.DamagedFileError as error:
    raise user_error.UserError(str(error)) from error


def find_adapter(
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> lora.Lora | None:
  """Returns the adapter that the run's configuration has; None without."""
  if not any(re.fullmatch(lora.PATTERN, n) for n in checkpoint.variables()):
    return None
  stored = stored_checkpoint.read_config(checkpoint.run_path)
  beside = checkpoint.run_path / hf_files.FOLDER
  if stored is None and (beside / peft_adapter.CONFIG).exists():
    # An imported adapter, not trained here.
    try:
      return peft_adapter.read_config(beside)
    except peft_adapter.AdapterError as error:
      raise user_error.UserError(str(error)) from error
  stored = stored or {}
  found = {
    text
    for path, text in stored.items()
    # Kernels of experts may be stored quantized without an adapter.
    if path.endswith(".einsum.lora") and text != "None"
  }
  if len(found) != 1:
    raise user_error.UserError(
      f"{os.fspath(checkpoint.path)} has low-rank adapters, and the run's"
      f" configuration describes {len(found)} kinds of them; one is required."
    )
  text = found.pop()
  rank, alpha, kind = (
    re.search(pattern, text)
    for pattern in (r"rank=(\d+)", r"alpha=([\d.e+-]+)", r"Kind\.(\w+)")
  )
  assert rank is not None
  return lora.Lora(
    rank=int(rank[1]),
    alpha=None if alpha is None else float(alpha[1]),
    kind=lora.Kind.LORA if kind is None else lora.Kind[kind[1]],
  )


def _find_adapters(
  checkpoint: stored_checkpoint.StoredCheckpoint, kernel: str
) -> list[str]:
  """Returns the names of the variables of a kernel's adapter."""
  names = (
    lora.name_variable(kernel, variable)
    for variable in (lora.A, lora.B, lora.MAGNITUDE)
  )
  return [name for name in names if name in checkpoint.variables()]


def _write_adapter(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  names: mapping.Names,
  adapter: lora.Lora | None,
  target: epath.Path,
  base: str | None,
  dry_run: bool,
) -> str:
  """Writes a folder of PEFT; returns the line to print."""
  if adapter is None:
    raise user_error.UserError(
      f"--adapter: {os.fspath(checkpoint.path)} has no low-rank adapters; train"
      " with --fdl.lora_rank."
    )
  replaced = checkpoint.run_path / hf_files.FOLDER / peft_adapter.REPLACED
  if replaced.exists():
    names_of_them = replaced.read_text().split()
    raise user_error.UserError(
      f"--adapter: {os.fspath(checkpoint.path)} comes from an imported adapter"
      f" that also changed {suggestions.limit(names_of_them)}, which low-rank"
      " adapters cannot have; export the merged model without --adapter."
    )
  found = [n for n in checkpoint.variables() if re.fullmatch(lora.PATTERN, n)]
  if not dry_run:
    stored_checkpoint.verify(checkpoint)
    kernels = []
    if adapter.kind is lora.Kind.DORA:
      kernels = list(dict.fromkeys(map(lora.find_kernel_name, found)))
    arrays = stored_checkpoint.read_numpy(checkpoint, [*found, *kernels])
    try:
      peft_adapter.write(
        target,
        {name: arrays[name] for name in found},
        names=names,
        adapter=adapter,
        kernels=arrays,
        base=base,
      )
    except peft_adapter.AdapterError as error:
      raise user_error.UserError(str(error)) from error
  done = "would write" if dry_run else "wrote"
  return (
    f"{done} an adapter of rank {adapter.rank}, {len(found)} arrays, to"
    f" {os.fspath(target)}"
  )


def _find_stored(
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> set[str]:
  """Returns the parameters of which the checkpoint has quantized kernels."""
  found = map(stored_kernels.find_parameter, checkpoint.variables())
  return {name for name in found if name is not None}


def _is_additive(adapter: lora.Lora) -> bool:
  """Returns whether an adapter does not depend on its kernel."""
  return adapter.kind is not lora.Kind.DORA


def _read_changes(
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> dict[str, Any]:
  """Returns the fields of config.json that a run of another class changes.

  See `Task.exported_config`.
  """
  stored = stored_checkpoint.read_config(_find_folder(checkpoint).parent) or {}
  text = stored.get(_CHANGES, "None")
  try:
    return {} if text == "None" else dict(json.loads(text))
  except ValueError as error:
    raise user_error.UserError(
      f"{_CHANGES} of {os.fspath(checkpoint.path)} is damaged: {error}."
    ) from error


def _find_folder(checkpoint: stored_checkpoint.StoredCheckpoint) -> epath.Path:
  """Returns the folder with the config.json of a run, or of served weights."""
  run = checkpoint.run_path
  if run.parent.name == serving.FOLDER:
    run = run.parent.parent
  return run / hf_files.FOLDER


def _check(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  names: mapping.Names,
  replaced: Collection[str],
) -> None:
  problems = []
  # A reference or a teacher is not part of the trained model.
  stored = {
    name: array
    for name, array in checkpoint.variables().items()
    if not name.startswith(f"{variables.FROZEN}/")
    and not name.startswith(f"{served_einsum.COLLECTION}/")
    and stored_kernels.find_parameter(name) is None
  }
  for name, leaf in names.leaves.items():
    if name in replaced:
      continue
    if name not in stored:
      problems.append(f"{name} {leaf.shape} is not in the checkpoint")
    elif stored[name].shape != leaf.shape:
      problems.append(
        f"{name} has shape {stored[name].shape} in the checkpoint and"
        f" {leaf.shape} by config.json"
      )
  problems += [
    f"{name} is in the checkpoint but not in the model of config.json"
    for name in stored
    if name not in names.leaves and not re.fullmatch(lora.PATTERN, name)
  ]
  if problems:
    raise user_error.UserError(
      f"The checkpoint {os.fspath(checkpoint.path)} does not match the model:"
      f" {suggestions.limit(problems)}."
    )


def _check_target(target: epath.Path) -> None:
  runner_files.check_store(target)
  if target.exists() and any(
    each.name.endswith(".safetensors") or each.name == weight_files.INDEX
    for each in target.iterdir()
  ):
    raise user_error.UserError(
      f"{os.fspath(target)} holds weights; pass another folder, or delete them."
    )


def _dtype(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  tensor: mapping.Tensor,
  dtype: Any,
) -> np.dtype:
  if dtype is not None:
    return np.dtype(dtype)
  found = {checkpoint.arrays[part.leaf].dtype for part in tensor.slices}
  if len(found) > 1:
    raise user_error.UserError(
      f"The arrays of {tensor.name} have different dtypes in the checkpoint"
      f" ({', '.join(sorted(found))}); pass --dtype."
    )
  # jax's dtype, which supports bfloat16.
  return jnp.dtype(found.pop())


def _bytes(described: tuple[Any, tuple[int, ...]]) -> int:
  return math.prod(described[1]) * np.dtype(described[0]).itemsize
