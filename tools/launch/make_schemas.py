"""JSON schemas from custom resource definitions of Kubernetes, for tests.

Descriptions are left out, and pod templates, which the schemas of Kubernetes
cover. Unknown fields become errors, as for `kubectl`.
"""

from typing import Any


def make_schema(definition: dict[str, Any]) -> dict[str, Any]:
  """Returns the schema of the newest version that a definition serves."""
  versions = [each for each in definition["spec"]["versions"] if each["served"]]
  version = sorted(versions, key=lambda each: each["name"])[-1]
  schema = _simplify(version["schema"]["openAPIV3Schema"])
  names = definition["spec"]["names"]
  schema["properties"]["metadata"] = {"type": "object"}
  schema["properties"].pop("status", None)
  group = definition["spec"]["group"]
  schema["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
  schema["properties"]["kind"] = {"const": names["kind"]}
  return schema


def _simplify(node: Any) -> Any:
  if isinstance(node, list):
    return [_simplify(each) for each in node]
  if not isinstance(node, dict):
    return node
  if "podFailurePolicy" in node.get("properties", {}):
    return {"type": "object"}  # The spec of a Job.
  # A field may be called `description`, but no field is a string here.
  found = {
    key: _simplify(value)
    for key, value in node.items()
    if not (key == "description" and isinstance(value, str))
    and not key.startswith("x-kubernetes")
  }
  if node.get("x-kubernetes-int-or-string"):
    found.pop("type", None)
  if isinstance(found.get("properties"), dict) and "type" in found:
    found.setdefault("additionalProperties", False)
  return found
