import json

import pytest

from paxon.tasks.speech import transcribe

_SYMBOLS = " ab"
_SURE, _NOT = -100, -6000


def _line(labels, best, **changes):
  log_probs = [[_SURE if i == b else _NOT for i in range(4)] for b in best]
  example = {
    "example": 0,
    "labels": labels,
    "num_frames": len(best),
    # Padding, which must be left out.
    "log_probs": [*log_probs, [_NOT, _NOT, _NOT, _SURE]],
  }
  return json.dumps(example | changes)


def _run(tmp_path, lines, texts="7.wav\tab b\nx\tb ab\n", **flags):
  (tmp_path / "texts.tsv").write_text(texts)
  (tmp_path / "found.jsonl").write_text("".join(f"{x}\n" for x in lines))
  given = {"symbols": _SYMBOLS, **flags}
  return transcribe.main(
    [
      f"--predictions={tmp_path / 'found.jsonl'}",
      f"--texts={tmp_path / 'texts.tsv'}",
      *(f"--{name}={value}" for name, value in given.items()),
    ]
  )


def test_writes_transcripts_and_error_rates(tmp_path, capsys):
  # The second clip sounds like "aa b"; only "ab" is a word.
  log_probs = [
    [_NOT, _NOT, _SURE, _NOT],
    [_SURE, _NOT, _NOT, _NOT],
    [_NOT, _NOT, -700, -710],
    [_NOT, _SURE, _NOT, _NOT],
    [_NOT, _NOT, _NOT, _SURE],
  ]
  lines = [
    _line([3, 1, 2, 3, 0], [3, 3, 0, 1, 2, 3]),
    _line([2, 3, 1, 3], [], num_frames=5, log_probs=log_probs),
  ]
  assert _run(tmp_path, lines) == 0
  assert (tmp_path / "found.tsv").read_text() == (
    "b ab\tb ab\tb ab\nab b\taa b\tab b\n"
  )
  assert capsys.readouterr().out.splitlines() == [
    f"2 clips: {tmp_path / 'found.tsv'}",
    "greedy: word error rate 25.0%, character error rate 12.5%",
    "with words: word error rate 0.0%, character error rate 0.0%",
  ]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "Line 2 of the predictions: Expecting"),
    ('{"labels": []}', "expected labels, num_frames, log_probs"),
    (_line([1], [[0]], log_probs=[[0, -1]]), "log_probs have 2 labels, but"),
    (_line([4], [2]), "labels must be below 4: [4]"),
  ],
)
def test_wrong_predictions(tmp_path, capsys, line, message):
  assert _run(tmp_path, [_line([2], [2]), line]) == 2
  assert message in capsys.readouterr().err


def test_wrong_texts(tmp_path, capsys):
  assert _run(tmp_path, [], texts="abc") == 2
  assert "'abc' has characters that are not in" in capsys.readouterr().err
  assert _run(tmp_path, [], texts="\n") == 2
  assert "at least one word" in capsys.readouterr().err
  flags = ["--predictions=/no/file", "--texts=/no/texts"]
  assert transcribe.main(flags) == 2
  assert "Cannot read /no/texts" in capsys.readouterr().err
