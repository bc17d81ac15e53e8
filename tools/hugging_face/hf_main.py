"""Converts weights between Hugging Face and Paxon.

  tools/hf import DIR --to RUN          safetensors files to a checkpoint
  tools/hf import PEFT --base RUN --to RUN2
                                        a PEFT adapter, added to a run
  tools/hf export RUN[@STEP] --to DIR   a checkpoint to safetensors files
  tools/hf export RUN/serving/int4_gptq --to DIR
                                        quantized weights to compressed-tensors,
                                        or, with --format=gptq, to GPTQ's format
  tools/hf gguf DIR --to FILE.gguf      safetensors files to GGUF, for llama.cpp

DIR is a folder with config.json and model.safetensors, or with the files that
model.safetensors.index.json lists; or one such file. It may be in a store
(s3://bucket/model), whose weights are read by ranges, or a model of the Hub,
hf://org/name[@revision], which is downloaded to its cache. Quantized weights
(GPTQ, AWQ, compressed-tensors, bitsandbytes, fp8) are dequantized. `import`
makes the run directory RUN with a checkpoint of step 0, config.json and the
tokenizer files, so that it can be exported again; a run trained from it has
copies of them.
--like=FOLDER takes them from elsewhere. With --base, the new run has the base's
weights and the adapter. --dtype converts values; --dry_run prints names and
shapes and writes nothing. Usage errors print one line to stderr and exit with
status 2.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import os
from typing import Any, Final

from etils import epath
import jax
import jax.numpy as jnp

from paxon.inputs import stores
from paxon.layers.models.hugging_face import families, text_configs
from paxon.runner import files, run_dir, user_error
from paxon.tools import command_line
from paxon.tools.hugging_face import (
  hf_export,
  hf_files,
  hf_gguf,
  hf_import,
  hf_quantized,
  peft_adapter,
  peft_import,
)

_DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns its exit status."""
  return command_line.dispatch(argv, COMMANDS, help_text=_help)


def _help() -> str:
  return (
    f"{__doc__}\nSupported models: {', '.join(families.list_supported())}."
    f"\nLanguage models of {', '.join(text_configs.list_architectures())} are"
    " imported without the parts for images."
  )


def _import(argv: list[str]) -> Any:
  parser = _parser("import", "Converts safetensors files to a checkpoint.")
  parser.add_argument("source", metavar="DIR", help="folder, or one file")
  parser.add_argument(
    "--to", metavar="RUN", required=True, help="run directory to make"
  )
  parser.add_argument(
    "--base",
    metavar="RUN[@STEP]",
    help="imported base model; DIR is then a folder of PEFT",
  )
  arguments = parser.parse_args(argv)
  source = _find_source(arguments.source)
  target = run_dir.resolve(arguments.to, os.environ)
  for place in (source, target):
    files.check_store(place)
  if arguments.base is not None:
    if arguments.dtype is not None:
      raise user_error.UserError(
        "import: --dtype has no effect with --base; import the base with it."
      )
    return peft_import.run(
      source,
      target,
      base=command_line.find_checkpoint(arguments.base),
      dry_run=arguments.dry_run,
    )
  if (source / peft_adapter.CONFIG).exists():
    raise user_error.UserError(
      f"{os.fspath(source)} is a PEFT adapter; pass its base model, an imported"
      " run, as --base=RUN."
    )
  return hf_import.run(
    source,
    target,
    dtype=_dtype(arguments.dtype),
    dry_run=arguments.dry_run,
  )


def _export(argv: list[str]) -> Any:
  parser = _parser("export", "Converts a checkpoint to safetensors files.")
  parser.add_argument("run", metavar="RUN[@STEP]", help="checkpoint to export")
  parser.add_argument(
    "--to", metavar="DIR", required=True, help="folder to write"
  )
  parser.add_argument(
    "--like",
    metavar="RUN",
    help="folder with config.json, or an imported run directory",
  )
  parser.add_argument(
    "--shard_bytes", type=int, default=None, help="maximum size of a file"
  )
  parser.add_argument(
    "--adapter",
    action="store_true",
    help="write the low-rank adapters alone, for PEFT; default: merge them",
  )
  parser.add_argument(
    "--format",
    choices=hf_quantized.FORMATS,
    help=f"format of quantized weights; default: {hf_quantized.COMPRESSED}",
  )
  arguments = parser.parse_args(argv)
  if arguments.shard_bytes is not None and arguments.shard_bytes <= 0:
    raise user_error.UserError(
      f"export: --shard_bytes must be positive, got {arguments.shard_bytes}."
    )
  checkpoint = command_line.find_checkpoint(arguments.run)
  like = None
  if arguments.like is not None:
    like = run_dir.resolve(arguments.like, os.environ)
    files.check_store(like)
    inside = like / hf_files.FOLDER
    like = inside if inside.is_dir() else like
  return hf_export.run(
    checkpoint,
    run_dir.resolve(arguments.to, os.environ),
    like=like,
    dtype=_dtype(arguments.dtype),
    shard_bytes=arguments.shard_bytes or hf_export.SHARD_BYTES,
    dry_run=arguments.dry_run,
    adapter_only=arguments.adapter,
    quantized_format=arguments.format,
  )


def _gguf(argv: list[str]) -> Any:
  parser = command_line.Parser(
    "gguf", "Converts safetensors files to a GGUF file.", program="tools/hf"
  )
  parser.add_argument("source", metavar="DIR", help="folder of a model")
  parser.add_argument(
    "--to", metavar="FILE", required=True, help="file to write"
  )
  parser.add_argument(
    "--type",
    choices=hf_gguf.TYPES,
    default="bf16",
    help="type of matrices; default: bf16",
  )
  arguments = parser.parse_args(argv)
  source = _find_source(arguments.source)
  target = run_dir.resolve(arguments.to, os.environ)
  files.check_store(source)
  return hf_gguf.run(source, target, type_=arguments.type)


def _find_source(given: str) -> epath.Path:
  """Returns a folder or file to read; a model of the Hub is downloaded."""
  try:
    stores.check_package(given)
    if given.startswith(stores.HUB):
      return epath.Path(stores.find_snapshot(given))
    path = run_dir.resolve(given, os.environ)
    if stores.is_remote(given):
      with stores.explain(given):
        path.exists()
  except user_error.UserError:
    raise
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  return path


def _parser(command: str, description: str) -> command_line.Parser:
  parser = command_line.Parser(command, description, program="tools/hf")
  parser.add_argument(
    "--dtype", choices=_DTYPES, help="dtype of the output; default: keep"
  )
  parser.add_argument(
    "--dry_run",
    action="store_true",
    help="print names and shapes, write nothing",
  )
  return parser


def _dtype(name: str | None) -> Any:
  return None if name is None else jnp.dtype(name)


def _print_errors(
  command: Callable[[list[str]], Iterator[str]], argv: list[str]
) -> int:
  for line in command(argv):
    print(line, flush=True)
  return 0


COMMANDS: Final[command_line.Commands] = {
  "import": functools.partial(_print_errors, _import),
  "export": functools.partial(_print_errors, _export),
  "gguf": functools.partial(_print_errors, _gguf),
}


if __name__ == "__main__":
  # Accelerators may be in use by a training run.
  jax.config.update("jax_platforms", "cpu")
  command_line.run(main)
