"""Tests for WAV files, resampling, sources and batches of speech."""

import io
import struct
import wave

import numpy as np
import pytest

from paxon.inputs.speech import (
  alphabet,
  speech_input,
  speech_sources,
  wav_file,
)

RNG = np.random.default_rng(0)


def _wav(samples, *, kind, bits, channels=1, rate=8000, data_size=None):
  """Returns a WAV file, written from the description of the format."""
  if kind == 3:
    content = np.asarray(samples, f"<f{bits // 8}").tobytes()
  else:
    whole = np.rint(np.asarray(samples) * 2.0 ** (bits - 1)).astype(np.int64)
    content = b"".join(
      (int(v) + (128 if bits == 8 else 0)).to_bytes(
        bits // 8, "little", signed=bits != 8
      )
      for v in whole.reshape(-1)
    )
  frame = channels * bits // 8
  head = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)
  size = len(content) if data_size is None else data_size
  return (
    b"RIFF\xff\xff\xff\x7fWAVE"
    + b"LIST\x03\0\0\0abc\0"
    + struct.pack("<4sI", b"fmt ", len(head))
    + head
    + struct.pack("<4sI", b"data", size)
    + content
  )


@pytest.mark.parametrize(
  ("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)]
)
def test_reads_every_format(kind, bits, tmp_path):
  samples = RNG.uniform(-0.99, 0.99, (50, 2))
  path = tmp_path / "a.wav"
  path.write_bytes(_wav(samples, kind=kind, bits=bits, channels=2, rate=123))
  found, rate = wav_file.read_wav(str(path))
  assert rate == 123
  assert found.dtype == np.float32
  tolerance = 1e-6 if kind == 3 else 1e-6 + 0.5 ** (bits - 1)
  np.testing.assert_allclose(found, samples.mean(1), atol=tolerance)


def test_reads_what_the_standard_library_writes(tmp_path):
  path = str(tmp_path / "a.wav")
  samples = RNG.integers(-(2**15), 2**15, 99).astype("<i2")
  with wave.open(path, "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(16000)
    file.writeframes(samples.tobytes())
  found, rate = wav_file.read_wav(path)
  assert rate == 16000
  np.testing.assert_array_equal(found, samples / np.float32(2**15))


def test_the_size_of_the_data_may_be_open(tmp_path):
  path = tmp_path / "a.wav"
  path.write_bytes(_wav([0.5, -0.5], kind=1, bits=16, data_size=0x7FFFF000))
  found, _ = wav_file.read_wav(str(path))
  np.testing.assert_array_equal(found, [0.5, -0.5])


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (None, r"Cannot read .*a\.wav: No such file or directory\."),
    (b"OggS", r"is not a WAV file: it begins with b'OggS'"),
    (b"RIFF\0\0\0\0WAVE", "has no format or no data"),
    (b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0ab", r"chunk b'fmt ' is cut"),
    (_wav([0.0], kind=6, bits=8), "has the format 6 with 8 bits"),
    (_wav([0.0], kind=1, bits=16, rate=0), "1 channels of 16 bits at 0 Hz"),
  ],
)
def test_error_of_a_damaged_file(data, message, tmp_path):
  path = tmp_path / "a.wav"
  if data is not None:
    path.write_bytes(data)
  with pytest.raises(ValueError, match=message):
    wav_file.read_wav(str(path))


@pytest.mark.parametrize(
  "rates", [(22050, 8000), (8000, 16000), (44100, 16000)]
)
def test_resampling_keeps_the_signal_and_removes_what_aliases(rates):
  rate, new_rate = rates
  time = np.arange(rate) / rate
  kept = np.sin(2 * np.pi * 1234.5 * time)
  found = wav_file.resample(kept, rate=rate, new_rate=new_rate)
  assert len(found) == new_rate
  expected = np.sin(2 * np.pi * 1234.5 * np.arange(new_rate) / new_rate)
  middle = slice(new_rate // 10, -new_rate // 10)
  np.testing.assert_allclose(found[middle], expected[middle], atol=2e-3)
  if new_rate < rate:
    high = np.sin(2 * np.pi * 0.6 * new_rate * time)
    gone = wav_file.resample(high, rate=rate, new_rate=new_rate)
    assert np.abs(gone[middle]).max() < 2e-3


def test_written_samples_are_pcm_of_16_bits():
  audio = np.asarray([0.0, 0.5, -1.0, 2.0])
  with wave.open(io.BytesIO(wav_file.to_wav(audio, 8000))) as reader:
    assert reader.getframerate() == 8000
    assert reader.getnchannels() == 1
    content = reader.readframes(reader.getnframes())
  np.testing.assert_array_equal(
    np.frombuffer(content, "<i2"), [0, 16384, -32767, 32767]
  )


def test_resampling_is_the_sum_of_its_definition():
  rate, new_rate, cutoff, half = 3, 2, 0.95 * 2 / 3, 38
  x = RNG.standard_normal(120)
  expected = np.zeros(80)
  for n in range(80):
    for k, value in enumerate(x):
      distance = k - n * rate / new_rate
      if abs(distance) <= half:
        window = 0.5 + 0.5 * np.cos(np.pi * distance / half)
        expected[n] += value * cutoff * np.sinc(cutoff * distance) * window
  found = wav_file.resample(x, rate=rate, new_rate=new_rate)
  np.testing.assert_allclose(found, expected, atol=2e-6)
  np.testing.assert_array_equal(
    wav_file.resample(x, rate=5, new_rate=5), x.astype(np.float32)
  )
  assert not len(wav_file.resample(x[:0], rate=3, new_rate=2))
  with pytest.raises(ValueError, match="must be positive, got 0 and 2"):
    wav_file.resample(x, rate=0, new_rate=2)


def test_long_audio_is_resampled_in_blocks():
  x = RNG.standard_normal(100_000)
  whole = wav_file.resample(x, rate=2, new_rate=1)
  part = wav_file.resample(x[60_000:80_000], rate=2, new_rate=1)
  np.testing.assert_allclose(whole[30_200:39_800], part[200:9800], atol=1e-5)


def test_alphabet():
  letters = alphabet.Alphabet()
  assert letters.vocab_size == 29
  assert letters.space_id == 1
  ids = letters.encode("it's a")
  assert ids.tolist() == [11, 22, 2, 21, 1, 3]
  assert letters.decode([0, *ids.tolist(), 0]) == "it's a"
  assert alphabet.Alphabet(symbols="ab").space_id is None
  assert letters.encode("").shape == (0,)
  with pytest.raises(ValueError, match=r"'Hi' has 'H', which is not in"):
    letters.encode("Hi")
  with pytest.raises(ValueError, match=r"each once, got 'aba'"):
    alphabet.Alphabet(symbols="aba")


def _files(tmp_path, lengths=(300, 500, 100)):
  lines = []
  for i, count in enumerate(lengths):
    name = f"clip{i}.wav"
    samples = RNG.uniform(-0.9, 0.9, count)
    (tmp_path / name).write_bytes(_wav(samples, kind=3, bits=32, rate=1000))
    lines.append(f"{name}\tclip {'abc'[i]}\n")
  table = tmp_path / "clips.tsv"
  table.write_text("".join(lines))
  return speech_sources.TranscribedFiles(table=str(table), sample_rate=500)


def test_transcribed_files(tmp_path):
  source = _files(tmp_path)
  source.check()
  assert len(source) == 3
  assert source[1]["text"] == "clip b"
  assert source[1]["audio"].shape == (250,)
  short = speech_sources.TranscribedFiles(
    table=source.table, sample_rate=1000, max_seconds=0.4
  )
  assert [short[i]["text"] for i in range(len(short))] == ["clip a", "clip c"]


def test_errors_of_tables(tmp_path):
  missing = speech_sources.TranscribedFiles(
    table="/none/a.tsv", sample_rate=8, how="Make it."
  )
  with pytest.raises(
    ValueError, match=r"Cannot read /none/a.tsv: No such file.*\. Make it\."
  ):
    missing.check()
  table = tmp_path / "a.tsv"
  table.write_text("a.wav\ta\na.wav b\n")
  with pytest.raises(ValueError, match=r"line 2 must be a path, a tab"):
    len(speech_sources.TranscribedFiles(table=str(table), sample_rate=8))


def test_tone_speech_is_a_function_of_its_index():
  source = speech_sources.ToneSpeech(num_examples=50)
  other = speech_sources.ToneSpeech(num_examples=50, seed=1)
  letters = 1 + source.max_words * 7
  longest = letters * round(1.5 * source.letter_seconds * source.sample_rate)
  for i in range(50):
    clip = source[i]
    assert len(clip["audio"]) <= longest
    np.testing.assert_array_equal(clip["audio"], source[i]["audio"])
    assert alphabet.Alphabet().encode(clip["text"]).size
  assert source[0]["text"] != other[0]["text"]


def _input(**kwargs):
  given = {
    "source": speech_sources.ToneSpeech(num_examples=10),
    "sample_rate": 8000,
    "max_seconds": 3.0,
    "max_labels": 24,
    "global_batch_size": 4,
    "shuffle_seed": 3,
  }
  return speech_input.SpeechInput(**{**given, **kwargs})


def _assert_equal(one, other):
  assert one.keys() == other.keys()
  for key, value in one.items():
    np.testing.assert_array_equal(value, other[key])


class _Clips:
  """Clips whose samples are their number, with texts of given lengths."""

  sample_rate = 10

  def __init__(self, sizes):
    self.sizes = sizes

  def __len__(self):
    return len(self.sizes)

  def __getitem__(self, index):
    samples, count = self.sizes[index]
    text = chr(ord("a") + index % 26) * count
    return {"audio": np.full(samples, index, np.float32), "text": text}


def test_joined_clips_are_all_clips_in_full_items():
  sizes = [(int(n), 1 + i % 5) for i, n in enumerate(RNG.integers(3, 30, 200))]
  clips = _Clips(sizes)
  joined = speech_sources.JoinedClips(
    source=clips, max_seconds=4.0, max_characters=18
  )
  assert joined.sample_rate == 10
  found = []
  for i in range(len(joined)):
    item = joined[i]
    assert len(item["audio"]) <= 40
    assert len(item["text"]) <= 18
    starts = np.flatnonzero(np.diff(item["audio"], prepend=-1))
    numbers = item["audio"][starts].astype(int)
    assert item["text"] == " ".join(clips[n]["text"] for n in numbers)
    expected = np.concatenate([clips[n]["audio"] for n in numbers])
    np.testing.assert_array_equal(item["audio"], expected)
    found += numbers.tolist()
  assert sorted(found) == list(range(200))
  total = sum(samples for samples, _ in sizes)
  assert len(joined) <= 1.05 * total / 40


def test_joined_clips_have_few_characters_and_keep_long_clips():
  clips = _Clips([(50, 3), (10, 7), (10, 7), (10, 2)])
  joined = speech_sources.JoinedClips(
    source=clips, max_seconds=4.0, max_characters=10
  )
  texts = [joined[i]["text"] for i in range(len(joined))]
  assert texts == ["aaa", "bbbbbbb dd", "ccccccc"]


@pytest.mark.parametrize("max_seconds", [None, 0.45])
def test_joined_clips_are_measured_by_reading_each_once(
  max_seconds, tmp_path, monkeypatch
):
  table, reads = _files(tmp_path, (301, 500, 101)).table, []
  files = speech_sources.TranscribedFiles(
    table=table, sample_rate=700, max_seconds=max_seconds
  )
  read_wav = wav_file.read_wav
  monkeypatch.setattr(
    wav_file, "read_wav", lambda path: reads.append(path) or read_wav(path)
  )
  joined = speech_sources.JoinedClips(
    source=files, max_seconds=0.45, max_characters=20
  )
  texts = {None: ["clip b", "clip a clip c"], 0.45: ["clip a clip c"]}
  assert len(joined) == len(texts[max_seconds])
  assert len(reads) == len(set(reads)) == 3
  assert [joined[i]["text"] for i in range(len(joined))] == texts[max_seconds]
  for i in range(len(files)):
    clip = files[i]
    assert files.size(i) == (len(clip["audio"]), len(clip["text"]))


def test_joined_clips_check_their_source(tmp_path):
  files = speech_sources.TranscribedFiles(
    table=str(tmp_path / "none.tsv"), sample_rate=8000
  )
  joined = speech_sources.JoinedClips(
    source=files, max_seconds=4.0, max_characters=10
  )
  with pytest.raises(ValueError, match=r"Cannot read .*none\.tsv: No such"):
    joined.check()
  with pytest.raises(ValueError, match=r"JoinedClips\.max_seconds"):
    speech_sources.JoinedClips(source=files, max_seconds=0.0, max_characters=1)


def test_batches_hold_the_clips():
  source = _input(shuffle_seed=None, num_epochs=1)
  batches = list(source)
  assert len(batches) == 3
  letters = alphabet.Alphabet()
  for n in range(10):
    batch, i = batches[n // 4], n % 4
    clip = source.source[n]
    length = batch["audio_lengths"][i]
    np.testing.assert_array_equal(batch["audio"][i, :length], clip["audio"])
    assert not batch["audio"][i, length:].any()
    count = batch["label_lengths"][i]
    assert letters.decode(batch["labels"][i, :count]) == clip["text"]
    assert not batch["labels"][i, count:].any()
  last = batches[-1]
  assert last["example_weights"].tolist() == [1, 1, 0, 0]
  assert last["audio_lengths"].tolist()[2:] == [0, 0]
  shapes = source.batch_shapes()
  for key, value in last.items():
    assert (value.shape, value.dtype) == shapes[key]


def test_epochs_are_shuffled_and_complete():
  source = _input(global_batch_size=5)
  texts = [
    [
      source.alphabet.decode(row)
      for b in range(2)
      for row in epoch[b]["labels"]
    ]
    for epoch in (
      [source.get_next() for _ in range(2)],
      [source.get_next() for _ in range(2)],
    )
  ]
  assert sorted(texts[0]) == sorted(texts[1])
  assert texts[0] != texts[1]


def test_a_state_restores_the_position_on_any_number_of_hosts():
  source = _input()
  for _ in range(3):
    source.get_next()
  state = source.get_state()
  expected = [source.get_next() for _ in range(4)]
  for count in (1, 2, 4):
    parts = []
    for host in range(count):
      restored = _input()
      restored.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=count)
      restored.set_state(state)
      parts.append([restored.get_next() for _ in range(4)])
    for i, batch in enumerate(expected):
      whole = {k: np.concatenate([p[i][k] for p in parts]) for k in batch}
      _assert_equal(whole, batch)


def test_a_state_of_other_data_is_rejected():
  state = _input().get_state()
  with pytest.raises(ValueError, match="shuffle_seed 3, and this input"):
    _input(shuffle_seed=4).set_state(state)
  other = speech_sources.ToneSpeech(num_examples=10, seed=1)
  with pytest.raises(ValueError, match="saved with the content"):
    _input(source=other).set_state(state)
  with pytest.raises(ValueError, match=r"must have the keys"):
    _input().set_state({"next": 1})
  with pytest.raises(ValueError, match=r"number of clips, got -1"):
    _input().set_state({**state, "next": -1})


def test_errors_of_clips_that_do_not_fit(tmp_path):
  files = _files(tmp_path)
  with pytest.raises(ValueError, match=r"must be that of the source, 500"):
    _input(source=files)
  given = {"source": files, "sample_rate": 500, "shuffle_seed": None}
  long = _input(**given, max_seconds=0.4)
  with pytest.raises(
    ValueError, match=r"Clip 1 has 0\.50 seconds; SpeechInput.max_seconds is"
  ):
    long.get_next()
  wide = _input(**given, max_labels=5)
  with pytest.raises(ValueError, match=r"Clip 0 has 6 labels, 'clip a'"):
    wide.check_readable()
  empty = _input(source=speech_sources.ToneSpeech(num_examples=1))
  empty.source.num_examples = 0
  with pytest.raises(ValueError, match="holds no clips"):
    empty.get_next()


def test_view_has_the_sound_and_both_texts():
  source = _input(shuffle_seed=None)
  batch = source.get_next()
  predicted = {
    "labels": np.asarray([[3, 4, 0]] * 4),
    "label_lengths": np.asarray([2] * 4),
  }
  view = source.view_example(batch, 0, predicted)
  assert view.caption == f"{source.source[0]['text']} — predicted: ab"
  assert view.audio is not None
  assert view.sample_rate == 8000
  assert len(view.audio) == batch["audio_lengths"][0]
  assert view.image is not None
  assert view.image.shape[1] == 1 + (len(view.audio) - 256) // 80
  assert "predicted" not in source.view_example(batch, 0, {}).caption


@pytest.mark.parametrize("hz", [500, 3000])
def test_a_tone_is_a_line_of_its_spectrogram(hz):
  rate = 8000
  tone = np.sin(2 * np.pi * hz * np.arange(rate) / rate)
  # Then a tenth of the amplitude, which is 20 dB.
  pixels = speech_input.draw_spectrogram(
    np.concatenate([tone, tone / 10]).astype(np.float32), rate
  )
  assert pixels.dtype == np.uint8
  # Windows of 256 samples have frequencies each 31.25 Hz, the lowest last.
  assert pixels.shape == (129, 1 + (2 * rate - 256) // 80)
  row = 128 - round(hz / 31.25)
  assert np.all(np.argmax(pixels, axis=0) == row)
  assert pixels[row, 10] == 255
  np.testing.assert_allclose(pixels[row, -10], 255 * (1 - 20 / 70), atol=1)
  assert np.all(pixels[np.abs(np.arange(129) - row) > 8, 10] == 0)


def test_a_spectrogram_of_silence_is_black():
  assert not np.any(speech_input.draw_spectrogram(np.zeros(10), 8000))
