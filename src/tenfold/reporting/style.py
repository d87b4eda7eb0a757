"""The style sheet of a report: light and dark, phone and desk, no font or file from outside."""

CSS = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #17202b; --muted: #5b6675; --grid: #d9dee5; --ghost: #e3e7ed;
  --good: #14794a; --bad: #b42318; --training: #2563c9; --validation: #d9480f; --baseline: #7a8594; --second: #a13fbf;
  --stage0: #2f9e77; --stage1: #4666d6; --stage2: #c2762a; --stage3: #a04bb8; --stage4: #c23b5a; --stage5: #2b93b5; }
@media (prefers-color-scheme: dark) { :root {
  --page: #10141a; --card: #181e26; --ink: #e6eaf0; --muted: #9ba7b6; --grid: #333d4a; --ghost: #2a323d;
  --good: #4fca8e; --bad: #ff8a7a; --training: #6ea3ff; --validation: #ff9358; --baseline: #8f9bab; --second: #d48bea;
  --stage0: #45c299; --stage1: #7c97ff; --stage2: #e09a4e; --stage3: #c987dd; --stage4: #ec718d; --stage5: #5dbfdf; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem .9rem; margin-bottom: 1rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .2rem 0 .6rem; }
.status { border: 1px solid currentColor; border-radius: 1rem; padding: .05rem .7rem; font-size: .85rem;
  color: var(--muted); }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.muted { color: var(--muted); font-size: .9rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.6rem, 1fr)); gap: .7rem; margin: 0; }
.facts div, figure, .card { background: var(--card); border: 1px solid var(--grid); border-radius: .6rem; }
.facts div { padding: .7rem .9rem; }
.facts dt { color: var(--muted); font-size: .85rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3;
  white-space: nowrap; }
.facts small { display: block; white-space: normal; color: var(--muted); font-size: .8rem; font-weight: 400; }
.card { padding: .8rem 1rem; margin-top: .7rem; }
.card > p:last-child { margin-bottom: .2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .4rem .7rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-size: .85rem; font-weight: 500; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
tbody th { font-weight: 600; }
td { white-space: nowrap; } .text td { white-space: normal; overflow-wrap: anywhere; }
.text td:nth-child(2):not(:last-child) { white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: .9rem; }
figure { margin: 0; padding: .8rem .9rem .6rem; min-width: 0; display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; height: auto; margin-top: auto; }
figure svg text { font-family: inherit; }
pre { margin: 0; overflow-x: auto; font: .85rem/1.5 ui-monospace, Consolas, "DejaVu Sans Mono", monospace; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
.views { border: 0; margin: auto 0 0; padding: 0; min-width: 0; }
.views legend { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.views input { position: absolute; opacity: 0; }
.views label { display: inline-block; padding: .1rem .7rem; margin: 0 .3rem .4rem 0; font-size: .85rem;
  border: 1px solid var(--grid); border-radius: 1rem; color: var(--muted); cursor: pointer; }
.views input:checked + label { color: var(--ink); border-color: currentColor; font-weight: 600; }
.views input:focus-visible + label { outline: 2px solid var(--training); }
.view { display: none; }
.views input:nth-of-type(1):checked ~ .view:nth-of-type(1), .views input:nth-of-type(2):checked ~ .view:nth-of-type(2),
.views input:nth-of-type(3):checked ~ .view:nth-of-type(3) { display: block; }
.samples { table-layout: fixed; }
.samples th { width: 6rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.samples small { display: block; color: var(--muted); font-weight: 400; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
details > *:not(summary) { margin-top: .6rem; }
footer { color: var(--muted); font-size: .85rem; margin-top: 2.5rem; }
@media (max-width: 36rem) { th, td { padding: .35rem .4rem; font-size: .9rem; } .card { padding: .7rem; }
  figure { padding: .7rem .5rem .4rem; } figcaption { padding: 0 .3rem; } .facts { gap: .5rem; }
  .samples th { width: 4.5rem; } .sample { font-size: .75rem; } }
@media print { body { background: none; } figure, .card { break-inside: avoid; } }
"""
