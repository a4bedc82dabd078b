"""The one style sheet of all pages, for light and dark surroundings."""

_LIGHT = (
    "--paper:#fcfcfb;--ink:#16181d;--soft:#5a606b;--line:#dfe2e6;--bar:#2a6fc9;--other:#a9b4c2;"
    "--own:#d9dce1;--l1:#1c4f94;--l2:#2f75cc;--l3:#5b9be6;--l4:#8fbdf0;--l5:#bcd8f7;"
    "--t1:#fff;--t2:#fff;--t3:#0b1b2e;--t4:#0b1b2e;--t5:#0b1b2e;"
    "--cold:#bcd8f7;--warn:#d97a1e;--good:#2b7d4f;--bad:#c2312f;"
)
_DARK = (
    "--paper:#15171b;--ink:#eceef1;--soft:#a2a9b4;--line:#343941;--bar:#5a9df0;--other:#59616d;"
    "--own:#3a3f48;--l1:#b5d3f7;--l2:#86b6ef;--l3:#5a97df;--l4:#3d76bd;--l5:#2d5890;"
    "--t1:#0b1b2e;--t2:#0b1b2e;--t3:#0b1b2e;--t4:#fff;--t5:#fff;"
    "--cold:#2d5890;--warn:#e8974a;--good:#5cc08a;--bad:#f0736c;"
)

# a window of a telephone, or half of a narrow one: cells below each other, drawings that are
# too wide to be read at that size in a box of their own that scrolls
_NARROW = (
    "@media (max-width:640px){"
    ".raybatch{padding:14px}"
    ".raybatch dl{grid-template-columns:1fr}"
    ".raybatch dd{margin-bottom:6px}"
    ".raybatch :is(table,tbody,tr){display:block}"
    ".raybatch tr:has(th){display:none}"
    ".raybatch tr{padding:6px 0;border-bottom:1px solid var(--line)}"
    ".raybatch td,.raybatch td:is(:first-child,:last-child,.long){display:grid;"
    "grid-template-columns:7.5em minmax(0,1fr);gap:10px;padding:1px 0;border:0;text-align:left;"
    "white-space:normal;overflow-wrap:anywhere;min-width:0}"
    ".raybatch td::before{content:attr(data-name);color:var(--soft)}"
    ".raybatch figure.wide{overflow-x:auto}"
    ".raybatch figure.wide>svg{min-width:720px}"
    ".raybatch figure.wide>figcaption{position:sticky;left:0}"
    "}"
)

STYLE = (
    f".raybatch{{{_LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{.raybatch{{{_DARK}}}}}"
    ".raybatch{background:var(--paper);color:var(--ink);padding:24px;"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}"
    ".raybatch>*{max-width:980px;margin-left:auto;margin-right:auto}"
    ".raybatch h1{font-size:22px;margin-bottom:4px;overflow-wrap:anywhere}"
    ".raybatch h2{font-size:17px;margin:28px 0 6px;padding-top:14px;"
    "border-top:1px solid var(--line)}"
    ".raybatch h3{font-size:14px;margin:12px 0 4px}"
    ".raybatch dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:8px 0}"
    ".raybatch dt{color:var(--soft)}"
    ".raybatch dd{margin:0;overflow-wrap:anywhere}"
    ".raybatch p{margin:6px 0;max-width:78ch}"
    ".raybatch .scroll{overflow-x:auto}"
    ".raybatch table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}"
    ".raybatch th,.raybatch td{padding:4px 14px 4px 0;text-align:right;"
    "border-bottom:1px solid var(--line);white-space:nowrap}"
    ".raybatch th{color:var(--soft);font-weight:500}"
    ".raybatch :is(th,td):is(:first-child,:last-child){text-align:left}"
    ".raybatch td{vertical-align:top}"
    ".raybatch td.long{white-space:normal;overflow-wrap:anywhere;min-width:12em;text-align:left}"
    ".raybatch figure{margin:10px 0}"
    ".raybatch figcaption{color:var(--soft);font-size:13px;max-width:90ch}"
    ".raybatch .cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));"
    "gap:10px}"
    ".raybatch .pair{display:grid;"
    "grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));"
    "gap:8px 28px}"
    ".raybatch svg{display:block;width:100%;height:auto}"
    ".raybatch svg text{fill:var(--ink);font-size:12px;font-family:inherit}"
    ".raybatch svg .tick,.raybatch svg .axis{fill:var(--soft)}"
    ".raybatch svg .grid{stroke:var(--line);stroke-width:1}"
    ".raybatch svg .base{stroke:var(--soft);stroke-width:1}"
    ".raybatch svg .bar{fill:var(--bar)}"
    ".raybatch svg .other{fill:var(--other)}"
    ".raybatch svg .own{fill:var(--own)}"
    + "".join(
        f".raybatch svg .level{i}{{fill:var(--l{i})}}.raybatch svg .onlevel{i}{{fill:var(--t{i})}}"
        for i in range(1, 6)
    )
    + ".raybatch svg .many{opacity:.85}"
    ".raybatch svg .area{fill:var(--bar);fill-opacity:.55;stroke:var(--bar);stroke-width:1.2}"
    ".raybatch svg .area.other{fill:var(--other);stroke:var(--soft)}"
    ".raybatch svg .busy{fill:var(--bar)}"
    ".raybatch svg .cold{fill:var(--cold)}"
    ".raybatch svg .starved{fill:var(--warn)}"
    ".raybatch svg .tail{fill:var(--own)}"
    ".raybatch svg .mark{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3}"
    ".raybatch svg .card{fill:none;stroke:var(--line)}"
    ".raybatch svg .big{font-size:26px;font-weight:600}"
    ".raybatch svg .long{font-size:19px}"
    ".raybatch svg .good{fill:var(--good)}"
    ".raybatch svg .bad{fill:var(--bad)}"
    ".raybatch svg .inbox{font-size:11px;pointer-events:none}" + _NARROW
)

# of a page of its own, which a notebook must not get
PAGE_STYLE = (
    "html{color-scheme:light dark}"
    "body{margin:0}"
    "main.raybatch{min-height:100vh;box-sizing:border-box}"
)
