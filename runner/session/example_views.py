"""Images and sounds of a split with the model's predictions, for reports.

Inputs define what is shown of an example (`BaseInput.view_example`), and models
may have a method `predict`, from a batch to arrays by example.
"""

import base64
from collections.abc import Mapping
import struct
from typing import Any
import zlib

import jax
import numpy as np

from paxon.inputs import base_input
from paxon.inputs.speech import wav_file
from paxon.layers import contracts
from paxon.learners import train_state
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import session as session_lib

_COUNT = 24


def make(
  session: session_lib.Session, state: train_state.TrainState
) -> dict[str, Any] | None:
  """Returns the first examples of the first split that has views; or None.

  The result can be written as JSON; images and sounds are `data:` addresses.
  All processes must call it.
  """
  job = session.job
  for split, source in (*job.eval_inputs.items(), ("train", job.train_input)):
    if type(source).view_example is base_input.BaseInput.view_example:
      continue
    batch, predicted = _predict(session, state, source)
    weights = batch.get("example_weights", np.ones(_COUNT))
    views = [
      source.view_example(batch, row, predicted)
      for row in range(min(map(len, batch.values())))
      if weights[row] > 0
    ]
    shown = [_encode(view) for view in views if view is not None]
    return {"split": split, "step": int(state.step), "examples": shown}
  return None


def _predict(
  session: session_lib.Session,
  state: train_state.TrainState,
  source: base_input.BaseInput,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns the first examples of a split, and what the model predicts."""
  model = session.job.task.model
  position = source.get_state()
  source.reset()
  placed = session.place(source.get_next())
  source.set_state(position)

  def run(state: Any, batch: Any) -> Any:
    predicted: Any = {}
    if isinstance(model, contracts.Predictor):
      variables = session.evaluation_variables(state)
      predicted = model.apply(variables, batch, method="predict")
    return jax.tree.map(lambda x: x[:_COUNT], (batch, predicted))

  program = session.layout.jit(
    run,
    out_shardings=session.layout.replicated,
    compiler_options=session.compiler_options,
  )
  return jax.tree.map(np.asarray, program(state, placed))


def _encode(view: base_input.ExampleView) -> dict[str, str]:
  found = {"caption": view.caption}
  if view.image is not None:
    found["image"] = _to_address("image/png", to_png(view.image))
  if view.audio is not None:
    found["audio"] = _to_address(
      "audio/wav", wav_file.to_wav(view.audio, view.sample_rate)
    )
  return found


def write(writer: metrics_file.SummaryWriter, views: Mapping[str, Any]) -> None:
  """Writes the images and sounds of `make` to a writer of metrics."""
  step, split = views["step"], views["split"]
  for number, view in enumerate(views["examples"]):
    for name, address in view.items():
      if name in ("image", "audio"):
        kind, _, content = address.removeprefix("data:").partition(";base64,")
        writer.write_media(
          step,
          split,
          f"examples/{number:02}",
          kind,
          base64.b64decode(content),
        )
    writer.write_text(step, split, f"examples/{number:02}", view["caption"])


def _to_address(kind: str, content: bytes) -> str:
  return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def to_png(image: np.ndarray) -> bytes:
  """Returns the PNG of an image, uint8 [H,W], [H,W,1] or [H,W,3].

  Raises:
    ValueError: The image has another shape or dtype.
  """
  pixels = image if image.ndim == 3 else image[..., None]
  if (
    pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or image.dtype != np.uint8
  ):
    raise ValueError(
      "An image must be uint8 [height, width], or with 1 or 3 channels, got"
      f" {image.dtype} {list(image.shape)}."
    )
  height, width, channels = pixels.shape
  # Rows begin with the number of their filter, none.
  rows = np.zeros((height, 1 + width * channels), np.uint8)
  rows[:, 1:] = pixels.reshape(height, -1)
  # Bits of a value, gray or RGB, and the only compression, filters and order.
  head = struct.pack(">IIBBBBB", width, height, 8, 2 * (channels == 3), 0, 0, 0)

  def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    size, end = struct.pack(">I", len(content)), struct.pack(">I", check)
    return size + name + content + end

  return b"".join(
    [
      b"\x89PNG\r\n\x1a\n",
      chunk(b"IHDR", head),
      chunk(b"IDAT", zlib.compress(rows.tobytes())),
      chunk(b"IEND", b""),
    ]
  )
