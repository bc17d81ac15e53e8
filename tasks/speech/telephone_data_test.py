"""Tests for the data of telephone prompts, with a made-up voice."""

import gzip
import itertools
import os
import stat
import wave

import numpy as np
import pytest

from paxon.tasks.speech import telephone_data

# Writes half a second at 16 kHz, and its arguments beside it.
_VOICE = """#!/bin/sh
for a; do
  [ "$before" = -w ] && path=$a
  before=$a
done
cp "$(dirname "$0")/half.wav" "$path"
echo "$@" >> "$(dirname "$0")/calls"
"""
_LINES = """; Comment

hello: Hello World!
digits/7: 7
menu: Press 1 to hear it.  Press * to leave.
tone: [a tone]
spy: DAHDI channel
missing: not recorded
"""


def _write_wav(path, rate, count):
  with wave.open(str(path), "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(rate)
    file.writeframes(np.arange(count, dtype="<i2").tobytes())


def _make(tmp_path):
  texts, sounds = tmp_path / "texts.gz", tmp_path / "sounds"
  texts.write_bytes(gzip.compress(_LINES.encode()))
  (sounds / "digits").mkdir(parents=True)
  for name in ("hello", "digits/7", "menu", "tone", "spy"):
    _write_wav(sounds / f"{name}.wav", 8000, 80)
  return str(texts), str(sounds)


def test_normalize():
  assert (
    telephone_data.normalize("Press *7, it's [beep] O'Clock: A.M.#")
    == "press star seven it's o'clock a m pound"
  )


def test_prompts_are_those_with_sound_and_speech(tmp_path):
  prompts = telephone_data.read_prompts(*_make(tmp_path))
  assert [p.sentences for p in prompts] == [
    ("hello world",),
    ("seven",),
    ("press one to hear it", "press star to leave"),
  ]
  assert prompts[2].text == "press one to hear it press star to leave"


def test_errors_name_the_packages(tmp_path):
  with pytest.raises(ValueError, match="asterisk-core-sounds-en and -wav"):
    telephone_data.read_prompts("/none/a.gz", "/none")
  texts, _ = _make(tmp_path)
  with pytest.raises(ValueError, match=r"No clip of .* is in /none"):
    telephone_data.read_prompts(texts, "/none")


def test_phrases_have_no_held_out_text():
  sentences = ["one two three", "four five"]
  phrases = itertools.islice(
    telephone_data.make_phrases(
      sentences,
      [["a", "list", "of", "its", "parts"]],
      excluded=["two three"],
      count=200,
      seed=0,
    ),
    300,
  )
  found = list(phrases)
  assert len(found) == 200
  assert not any("two three" in text for text in found)
  words = {word for text in found for word in text.split()}
  known = "one two three four five a list of its parts"
  assert " ".join(sorted(words)) == " ".join(sorted(known.split()))


def test_docstrings_are_plain_words():
  found = telephone_data.read_docstrings()
  words = {word for run in found for word in run}
  assert len(words) > 1000
  assert all(w.isalpha() and w.islower() for w in words)


def _fake_voice(tmp_path, monkeypatch):
  program = tmp_path / "espeak-ng"
  program.write_text(_VOICE)
  program.chmod(program.stat().st_mode | stat.S_IXUSR)
  _write_wav(tmp_path / "half.wav", 16000, 8000)
  monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
  return tmp_path / "calls"


def test_writes_tables_of_disjoint_texts(tmp_path, monkeypatch, capsys):
  calls = _fake_voice(tmp_path, monkeypatch)
  texts, sounds = _make(tmp_path)
  held_out = "press one to hear it press star to leave"
  monkeypatch.setattr(telephone_data, "is_held_out", lambda t: t == held_out)
  folder = tmp_path / "data"
  arguments = [
    f"--folder={folder}",
    f"--texts={texts}",
    f"--sounds={sounds}",
    "--phrases=3",
    "--repeats=2",
  ]
  assert telephone_data.main(arguments) == 0
  assert "train.tsv: 11 clips" in capsys.readouterr().out
  tables = {
    name: [
      line.split("\t")
      for line in (folder / f"{name}.tsv").read_text().splitlines()
    ]
    for name in ("train", "synthesized_test", "recorded_test")
  }
  assert [text for _, text in tables["recorded_test"]] == [held_out]
  test = {text for _, text in tables["synthesized_test"]}
  assert test == {"press one to hear it", "press star to leave"}
  for path, text in tables["train"]:
    assert not any(other in text for other in test)
    assert os.path.exists(folder / path)
  with wave.open(str(folder / "train/00000.wav")) as file:
    assert (file.getframerate(), file.getnframes()) == (8000, 4000)
  said = calls.read_text().splitlines()
  assert len(said) == 11
  assert all("-v en-us" in line for line in said)
  assert len(set(said)) == 11


def test_a_missing_voice_is_an_error(tmp_path, monkeypatch, capsys):
  texts, sounds = _make(tmp_path)
  monkeypatch.setenv("PATH", "")
  arguments = [
    f"--folder={tmp_path / 'data'}",
    f"--texts={texts}",
    f"--sounds={sounds}",
    "--phrases=1",
  ]
  assert telephone_data.main(arguments) == 1
  assert "espeak-ng is missing" in capsys.readouterr().err
