"""Whether a compiled program permutes inside of branches.

Stages run different branches of a schedule's program. A collective-permute
inside of one waits for all devices, those of other stages included, and so
forever. Chunks must have none; but the partitioner may make one where an
activation inside of a chunk changes how it is split.

On a CPU such programs were seen to hang. On GPUs none was run, but XLA puts all
devices into the group of a permute, whatever its pairs are, unless
`xla_gpu_collective_permute_connected_components` says otherwise
(https://github.com/openxla/xla/pull/40505), and the first call of a collective
waits for all devices of its group in the process. So they are refused for every
hardware.
"""

import re

_NAME = re.compile(r"%([\w.\-]+)")
_BRANCHES = re.compile(
  r" conditional\(.*?(?:branch_computations=\{([^}]*)\}"
  r"|true_computation=(%[\w.\-]+), false_computation=(%[\w.\-]+))"
)


def count(text: str) -> int:
  """Returns the number of collective-permutes in branches.

  Args:
    text: Of the compiled program.
  """
  bodies: dict[str, list[str]] = {}
  name = ""
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      name = _NAME.findall(line)[0]
      bodies[name] = []
    elif name:
      bodies[name].append(line)
  todo = {
    called
    for lines in bodies.values()
    for line in lines
    for groups in _BRANCHES.findall(line)
    for called in _NAME.findall(" ".join(groups))
  }
  inside: set[str] = set()
  while todo:
    current = todo.pop()
    inside.add(current)
    called = _NAME.findall("\n".join(bodies[current]))
    todo |= {other for other in called if other in bodies} - inside
  return sum(
    " collective-permute" in line.partition("metadata=")[0]
    and "-done(" not in line
    for current in inside
    for line in bodies[current]
  )
