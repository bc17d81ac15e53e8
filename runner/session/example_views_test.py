"""Tests for the images and sounds of reports."""

import struct
import zlib

import numpy as np
import pytest

from paxon.inputs import base_input
from paxon.inputs.speech import wav_file
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import example_views


def _decode(png):
  """Returns the pixels of a PNG without filters, chunk by chunk."""
  assert png[:8] == b"\x89PNG\r\n\x1a\n"
  chunks, at = {}, 8
  while at < len(png):
    size, name = struct.unpack_from(">I4s", png, at)
    content = png[at + 8 : at + 8 + size]
    (check,) = struct.unpack_from(">I", png, at + 8 + size)
    assert check == zlib.crc32(name + content)
    chunks[name] = content
    at += 12 + size
  width, height, bits, kind, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
  assert (bits, rest) == (8, [0, 0, 0])
  channels = {0: 1, 2: 3}[kind]
  rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
  rows = rows.reshape(height, -1)
  assert not rows[:, 0].any()
  return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("shape", [(5, 7, 3), (4, 6, 1), (2, 3)])
def test_images_are_png_files(shape):
  image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  found = _decode(example_views.to_png(image))
  np.testing.assert_array_equal(found, image.reshape(found.shape))


@pytest.mark.parametrize(
  "image", [np.zeros((2, 2, 4), np.uint8), np.zeros((2, 2)), np.zeros(3)]
)
def test_other_images_are_rejected(image):
  with pytest.raises(ValueError, match=r"must be uint8 \[height, width\], or"):
    example_views.to_png(image)


def test_an_input_without_views_has_none():
  fn = base_input.BaseInput.view_example
  assert fn(None, {}, 0, {}) is None


class _Recorder(metrics_file.SummaryWriter):
  def __init__(self):
    self.media, self.texts = [], []

  def write(self, step, split, values):
    raise AssertionError

  def write_text(self, step, split, name, text):
    self.texts.append((step, split, name, text))

  def write_media(self, step, split, name, kind, content):
    self.media.append((step, split, name, kind, content))

  def close(self):
    pass


def test_images_and_sounds_go_to_a_writer():
  image = np.arange(12, dtype=np.uint8).reshape(3, 4)
  audio = np.linspace(-1, 1, 5)
  png, wav = example_views.to_png(image), wav_file.to_wav(audio, 8000)
  views = {
    "split": "validation",
    "step": 7,
    "examples": [
      example_views._encode(
        base_input.ExampleView(caption="a cat", image=image)
      ),
      example_views._encode(
        base_input.ExampleView(caption="yes", audio=audio, sample_rate=8000)
      ),
    ],
  }
  recorder = _Recorder()
  example_views.write(recorder, views)
  assert recorder.media == [
    (7, "validation", "examples/00", "image/png", png),
    (7, "validation", "examples/01", "audio/wav", wav),
  ]
  assert [text[2:] for text in recorder.texts] == [
    ("examples/00", "a cat"),
    ("examples/01", "yes"),
  ]
