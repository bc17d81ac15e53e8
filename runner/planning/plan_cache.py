"""Plans that were made before, in a folder of the user's.

    PAXON_CACHE_DIR/plans, else XDG_CACHE_HOME/paxon/plans, else
    ~/.cache/paxon/plans

One JSON file a plan, named by the digest of what the plan was made of (see
`plan_key`). The cache is a convenience: an entry that is damaged, foreign or
cannot be read is as good as none, and a folder that cannot be written is left
alone. PAXON_CACHE_DIR=off turns it off; its files may be deleted at any time.
"""

from collections.abc import Callable, Mapping
import dataclasses
import datetime
import json
import os
import pathlib
from typing import Final

from paxon.runner import files
from paxon.runner.plan import result
from paxon.runner.planning import plan_key

OFF: Final = "off"

# About 20 kB each; the oldest go first.
_MOST: Final = 1000


def plan(
  make: Callable[[], result.Plan],
  *,
  find_key: Callable[[], str | None],
  environ: Mapping[str, str],
) -> result.Plan:
  """Returns the plan with a key, made only if it was not made before.

  Args:
    make: Makes it.
    find_key: Returns `plan_key.of` what it is made of; None for a plan that is
      not kept.
    environ: The environment, which tells where plans are kept.
  """
  place = folder(environ)
  key = None if place is None else find_key()
  if place is None or key is None:
    return _dated(make())
  found = read(place, key)
  if found is None:
    found = _dated(make())
    # A source may have been edited meanwhile; then the plan has no key.
    if find_key() == key:
      write(place, key, found)
  return found


def _dated(plan: result.Plan) -> result.Plan:
  now = datetime.datetime.now(datetime.UTC)
  return dataclasses.replace(plan, made_at=f"{now:%Y-%m-%dT%H:%M:%SZ}")


def folder(environ: Mapping[str, str]) -> pathlib.Path | None:
  """Returns where plans are kept, or None for nowhere.

  Args:
    environ: The environment.
  """
  given = environ.get(plan_key.CACHE_VARIABLE, "")
  if given == OFF:
    return None
  if given:
    # `bazel run` starts programs elsewhere than where the user stands.
    start = environ.get("BUILD_WORKING_DIRECTORY", "")
    return pathlib.Path(start, os.path.expanduser(given), "plans")
  # Its specification says that a relative path is to be ignored.
  caches = pathlib.Path(environ.get("XDG_CACHE_HOME", ""))
  if not caches.is_absolute():
    home = environ.get("HOME", "")
    if not os.path.isabs(home):
      return None
    caches = pathlib.Path(home) / ".cache"
  return caches / "paxon" / "plans"


def read(place: pathlib.Path, key: str) -> result.Plan | None:
  """Returns the plan with this key, or None if there is no sound one.

  Args:
    place: What `folder` returned.
    key: What `plan_key.of` returned.
  """
  try:
    entry = json.loads((place / f"{key}.json").read_text())
    if entry["key"] != key:
      return None
    if plan_key.digest_of(entry["plan"]) != entry["digest"]:
      return None
    (plan,) = result.from_json(entry["plan"])
  except (OSError, ValueError, TypeError, KeyError, AttributeError):
    return None
  return dataclasses.replace(plan, is_from_cache=True)


def write(place: pathlib.Path, key: str, plan: result.Plan) -> None:
  """Keeps a plan; does nothing where nothing can be written.

  Args:
    place: What `folder` returned.
    key: What `plan_key.of` returned.
    plan: As it was made.
  """
  text = result.to_json((plan,))
  entry = {"key": key, "digest": plan_key.digest_of(text), "plan": text}
  try:
    files.write_text(place / f"{key}.json", json.dumps(entry))
    kept = sorted(place.glob("*.json"), key=lambda p: p.stat().st_mtime)
    for old in kept[:-_MOST]:
      old.unlink(missing_ok=True)
  except OSError:
    return
