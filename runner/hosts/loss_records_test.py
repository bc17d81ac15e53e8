"""Tests for what supervisors write down."""

from etils import epath

from paxon.runner.hosts import loss_records


def _loss(process, *, time, status=-9, follows=False):
  return loss_records.Loss(
    process=process, host="a", time=time, status=status, follows=follows
  )


def test_round_trip_with_the_cause_first(tmp_path):
  folder = epath.Path(tmp_path)
  assert loss_records.read(folder, since=0.0) == []
  assert loss_records.cause([]) is None
  followed = _loss(0, time=5.0, status=-6, follows=True)
  first, second = _loss(2, time=6.0), _loss(1, time=7.0)
  for loss in (_loss(1, time=1.0), second, followed, first):
    loss_records.write(folder, loss)
  found = loss_records.read(folder, since=2.0)
  assert found == [first, second, followed]
  assert loss_records.cause(found) == first
  assert loss_records.cause([followed]) is None
  assert loss_records.read(folder, since=8.0) == []


def test_damaged_records_are_left_out(tmp_path):
  folder = epath.Path(tmp_path)
  loss_records.write(folder, _loss(0, time=1.0))
  for name, text in (("process-1.json", "{"), ("process-2.json", '{"a": 1}')):
    (folder / loss_records.FOLDER / name).write_text(text)
  assert [loss.process for loss in loss_records.read(folder, since=0.0)] == [0]


def test_words():
  assert loss_records.how(3) == "it ended with status 3"
  assert loss_records.how(-9) == "it was ended by SIGKILL"
  assert loss_records.how(-99) == "it was ended by signal 99"
  sentence = _loss(1, time=0.0).sentence()
  assert sentence.startswith("process 1 (a) was lost at 19")
  assert sentence.endswith(": it was ended by SIGKILL")
