"""
The report's style sheet. Colours are Okabe & Ito's (2008), told apart by colour-blind readers and in grey.

Dark mode swaps the palette for its lighter members; print is always light. The narrow layouts are for screens
only: paper is narrow too, but it can be held closer. No font or image is loaded.
"""

CSS = """
:root { color-scheme: light dark;
  --page: #f6f7f8; --card: #ffffff; --ink: #1b2126; --muted: #5b6670; --rule: #dfe3e7; --grid: #e9ecef;
  --hot: #c2500a; --cool: #0072b2; --part1: #0072b2; --part2: #8a5a83; --part3: #4d5a63; --inside: #ffffff;
  --warn-bg: #f0e442; --warn-ink: #2b2800; --real-bg: #d9efe6; --real-ink: #04543c; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181b; --card: #1d2327; --ink: #e8ecef; --muted: #9fabb5; --rule: #343c43; --grid: #2b3238;
  --hot: #f0913a; --cool: #56b4e9; --part1: #56b4e9; --part2: #cc9bc4; --part3: #a4b0b9; --inside: #10161a;
  --real-bg: #0d4433; --real-ink: #c4f0df; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 48px; }
.kicker { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; margin: 0 0 12px;
  font-size: 14px; color: var(--muted); }
.badge { display: inline-block; padding: 2px 9px; border-radius: 3px; font-size: 12px; font-weight: 700;
  letter-spacing: .06em; white-space: nowrap; background: var(--warn-bg); color: var(--warn-ink); }
.badge.real { background: var(--real-bg); color: var(--real-ink); }
.banner { margin: 0 0 24px; padding: 10px 16px; border-radius: 4px; background: var(--warn-bg);
  color: var(--warn-ink); }
h1 { margin: 0 0 10px; max-width: 26em; font-size: 30px; line-height: 1.25; letter-spacing: -.01em;
  text-wrap: balance; overflow-wrap: anywhere; }
h2 { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; margin: 0 0 4px; font-size: 18px;
  line-height: 1.3; overflow-wrap: anywhere; }
.lead { margin: 0 0 24px; max-width: 46em; font-size: 17px; }
.note { margin: 0 0 14px; max-width: 60em; font-size: 14px; color: var(--muted); }
.pin { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px 28px;
  margin: 0 0 24px; padding: 16px 0; border: solid var(--rule); border-width: 1px 0; }
.pin dt { font-size: 13px; color: var(--muted); }
.pin dd { margin: 0; font-size: 14.5px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
section { margin: 0 0 24px; padding: 20px 24px; border: 1px solid var(--rule); border-radius: 6px;
  background: var(--card); }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 24px; margin-bottom: 24px; }
.grid section { margin: 0; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; }
th { padding: 6px 10px; font-size: 13px; font-weight: 600; color: var(--muted); text-align: left;
  vertical-align: bottom; border-bottom: 1px solid var(--rule); }
td { padding: 6px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; }
tr.suspect td { font-weight: 650; } tr.suspect .verdict { color: var(--hot); }
.verdict { color: var(--muted); }
.key span { white-space: nowrap; } .key { display: flex; flex-wrap: wrap; gap: 2px 18px; }
.key i { font-style: normal; } .key .h { color: var(--hot); } .key .c { color: var(--cool); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--ink); }
svg .tick, svg .axis { fill: var(--muted); } svg .tick { font-size: 11.5px; }
svg .strong { font-weight: 700; } svg .number { font-variant-numeric: tabular-nums; }
svg .inside { fill: var(--inside); font-weight: 700; }
svg line { stroke-width: 1; } svg .grid { stroke: var(--grid); } svg .reference { stroke: var(--muted); }
svg .median { stroke: var(--ink); stroke-width: 2.4; } svg .whisker { stroke-width: 2; }
svg .hot { fill: var(--hot); stroke: var(--hot); } svg .cool { fill: var(--cool); stroke: var(--cool); }
svg circle.cool { fill-opacity: .45; } svg path.hot { fill-opacity: .85; } svg rect { stroke: none; }
svg .part-1 { fill: var(--part1); } svg .part-2 { fill: var(--part2); } svg .part-3 { fill: var(--part3); }
.split { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.2fr); gap: 16px 40px;
  align-items: center; }
.read p { margin: 0 0 8px; max-width: 60em; font-size: 14.5px; }
@media screen and (max-width: 760px) {
  main { padding: 20px 14px 32px; } h1 { font-size: 23px; } .lead { font-size: 16px; }
  section { padding: 16px 14px; } .grid, .split { grid-template-columns: minmax(0, 1fr); gap: 16px; }
  .grid { margin-bottom: 16px; } section { margin-bottom: 16px; }
  .pin { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px 16px; }
  svg text { font-size: 13.5px; } svg .tick { font-size: 13px; }
  table { font-size: 13.5px; line-height: 1.25; } td, th { padding: 5px 6px; }
  td.verdict { white-space: normal; } .wide { display: none; } }
@media screen and (max-width: 480px) {
  section { padding: 14px 12px; } .rank { display: none; } .pin dd { font-size: 13.5px; }
  table { font-size: 12.5px; } th { font-size: 12px; } td, th { padding: 5px 4px; }
  td:nth-child(2), th:nth-child(2) { padding-left: 0; } }
@media print { :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --muted: #444;
    --rule: #bbb; --grid: #ddd; --hot: #c2500a; --cool: #0072b2; --part1: #0072b2; --part2: #8a5a83;
    --part3: #4d5a63; --inside: #fff; --real-bg: #d9efe6; --real-ink: #04543c; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } section { break-inside: avoid; } .scroll { overflow: visible; }
  body { font-size: 12px; } h1 { font-size: 22px; } h2 { font-size: 14px; } .lead { font-size: 13px; }
  section { margin-bottom: 12px; padding: 10px 12px; } .grid { gap: 12px; margin-bottom: 12px; }
  .pin { grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 8px 20px; padding: 10px 0;
    margin-bottom: 14px; }
  .pin dd, .read p { font-size: 11px; } .pin dt, .note { font-size: 10.5px; }
  table, th { font-size: 10.5px; } td, th { padding: 3px 5px; } .badge { font-size: 9px; } }
@page { margin: 14mm; }
"""
