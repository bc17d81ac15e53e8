"""The style sheet of the page, for light and dark screens and for print."""

from typing import Final

CSS: Final = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --page: #ffffff; --panel: #f6f8fa; --good: #1a7f37;
  --bad: #cf222e; --warn: #9a6700; --c0: #4f7ab8; --c1: #e08a3c; --c2: #5a9e57;
  --c3: #8a6bb5; --c4: #c2554f; --c5: #3a9c9c; --c6: #b58b2a; --c7: #9aa4af; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3;
  --soft: #9198a1; --line: #3d444d; --page: #0d1117; --panel: #151b23;
  --good: #3fb950; --bad: #ff7b72; --warn: #d29922; --c0: #6c95d1;
  --c1: #f0a35e; --c2: #74b871; --c3: #a98ad3; --c4: #dd7570; --c5: #57b8b8;
  --c6: #d1a945; --c7: #6e7681; } }
body { margin: 2rem auto; max-width: 960px; padding: 0 1rem;
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); overflow-wrap: anywhere; }
h1 { margin-bottom: 0; }
h2 { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin: 1.8rem 0 .4rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); }
ul.warnings li::marker { color: var(--warn); }
.table { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 14px; }
caption { text-align: left; color: var(--soft); padding-bottom: .2rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); }
tbody th { font-weight: 400; color: var(--ink); }
.changes tbody th { white-space: normal; min-width: 18em; }
td.best { font-weight: 700; color: var(--good); }
td.wide { white-space: normal; text-align: left; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid var(--line);
  border-radius: 6px; background: var(--panel); font-size: 13px; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .name { fill: var(--ink); }
svg rect { stroke: var(--page); stroke-width: 1; }
svg .limit { stroke: var(--ink); stroke-dasharray: 5 4; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.legend { list-style: none; padding: 0; margin: .2rem 0; font-size: 14px;
  display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em;
  border-radius: 2px; }
.side { display: flex; flex-wrap: wrap; gap: 0 3rem; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
@media print { body { max-width: none; } }
""" + "\n".join(
  f"svg .c{i} {{ fill: var(--c{i}); }} .swatch.c{i}"
  f" {{ background: var(--c{i}); }}"
  for i in range(8)
)
