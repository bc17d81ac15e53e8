"""WAV files as arrays, and resampling.

Reads PCM of 8, 16, 24 and 32 bits and floating-point samples of 32 and 64 bits,
with any number of channels, of which it returns the mean; writes PCM of
16 bits.
"""

import functools
import io
import math
import os
import struct
import wave

import numpy as np

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# Zero crossings of the sinc on each side, and the share of the band that the
# low-pass filter keeps.
_CROSSINGS, _ROLL_OFF = 24, 0.95
# Outputs that are computed together, so that memory is bounded.
_BLOCK = 1 << 15


def read_wav(path: str) -> tuple[np.ndarray, int]:
  """Returns samples from -1 to 1, float32 [N], and their number per second.

  Raises:
    ValueError: The file is missing, damaged, or in another format.
  """
  try:
    with open(path, "rb") as file:
      data = file.read()
  except OSError as error:
    reason = os.strerror(error.errno) if error.errno else str(error)
    raise ValueError(f"Cannot read {path}: {reason}.") from None
  if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
    raise ValueError(f"{path} is not a WAV file: it begins with {data[:12]!r}.")
  chunks, at = {}, 12
  while at + 8 <= len(data):
    name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
    chunks.setdefault(name, data[at + 8 : at + 8 + size])
    # Writers to pipes, such as espeak-ng, leave the size of the data open.
    if name != b"data" and at + 8 + size > len(data):
      raise ValueError(f"{path} is damaged: its chunk {name!r} is cut.")
    at += 8 + size + size % 2
  header = chunks.get(b"fmt ", b"")
  if len(header) < 16 or b"data" not in chunks:
    raise ValueError(f"{path} is damaged: it has no format or no data.")
  kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", header)
  if kind == _EXTENSIBLE and len(header) >= 26:
    kind = struct.unpack_from("<H", header, 24)[0]
  if not channels or not rate or frame * 8 != channels * bits:
    raise ValueError(
      f"{path} is damaged: {channels} channels of {bits} bits at {rate} Hz in"
      f" frames of {frame} bytes."
    )
  content = chunks[b"data"]
  samples = _to_samples(content[: len(content) // frame * frame], kind, bits)
  if samples is None:
    raise ValueError(
      f"{path} has the format {kind} with {bits} bits; read are PCM (1) of 8,"
      " 16, 24 and 32 bits and floating point (3) of 32 and 64 bits."
    )
  return samples.reshape(-1, channels).mean(axis=1, dtype=np.float32), rate


def to_wav(samples: np.ndarray, sample_rate: int) -> bytes:
  """Returns the file of samples from -1 to 1 [N], as PCM of 16 bits."""
  values = np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2")
  file = io.BytesIO()
  with wave.open(file, "wb") as writer:
    writer.setnchannels(1)
    writer.setsampwidth(2)
    writer.setframerate(sample_rate)
    writer.writeframes(values.tobytes())
  return file.getvalue()


def _to_samples(content: bytes, kind: int, bits: int) -> np.ndarray | None:
  if kind == _FLOAT and bits in (32, 64):
    return np.frombuffer(content, f"<f{bits // 8}").astype(np.float32)
  if kind != _PCM or bits not in (8, 16, 24, 32):
    return None
  if bits == 8:
    values = np.frombuffer(content, np.uint8).astype(np.int32) - 128
  elif bits == 24:
    parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, 1:] = parts
    # The sign is in the highest byte.
    values = wide.reshape(-1).view("<i4") >> 8
  else:
    values = np.frombuffer(content, f"<i{bits // 8}")
  return (values / 2.0 ** (bits - 1)).astype(np.float32)


def resample(samples: np.ndarray, *, rate: int, new_rate: int) -> np.ndarray:
  """Returns the samples at another rate, float32 [ceil(N * new_rate / rate)].

  Output n is the band-limited signal at the time n / new_rate: a sum over the
  input with a sinc in a Hann window, whose cutoff is below half of the smaller
  rate. Samples before the first and after the last are zero.

  Raises:
    ValueError: A rate is not positive.
  """
  if rate <= 0 or new_rate <= 0:
    raise ValueError(f"Rates must be positive, got {rate} and {new_rate}.")
  if rate == new_rate:
    return samples.astype(np.float32)
  common = math.gcd(rate, new_rate)
  up, down = new_rate // common, rate // common
  weights = _phases(up, down)
  half = weights.shape[1] // 2
  count = -(-len(samples) * up // down)
  # After the last output's window, too.
  padded = np.pad(samples.astype(np.float32), (half - 1, half + 1))
  made = [np.zeros(0, np.float32)]
  for begin in range(0, count, _BLOCK):
    times = np.arange(begin, min(count, begin + _BLOCK)) * down
    window = padded[(times // up)[:, None] + np.arange(2 * half)]
    made.append(np.einsum("nk,nk->n", window, weights[times % up]))
  return np.concatenate(made)


@functools.lru_cache(maxsize=8)
def _phases(up: int, down: int) -> np.ndarray:
  """Returns the weights of the inputs around each fraction of a sample.

  Float32 [up, 2 * half]; the input before the output is at half - 1.
  """
  cutoff = _ROLL_OFF * min(1.0, up / down)
  half = math.ceil(_CROSSINGS / cutoff)
  distance = np.arange(1 - half, half + 1) - np.arange(up)[:, None] / up
  window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / half, -1, 1))
  return (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32)
