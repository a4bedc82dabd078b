"""Draw the figures of README and docs as plain SVG: `python docs/figures/draw.py`.

Boxes have their own background. Lines and labels outside are a grey that is readable on white and
on black, so a figure needs no theme; with a dark theme, boxes are dark.
"""

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .box { fill: #f2f4f7; stroke: #8a94a6; stroke-width: 1.2; }
  .key { fill: #dce8ff; stroke: #3b6fe0; stroke-width: 1.6; }
  .good { fill: #d9f2e1; stroke: #2f8f57; stroke-width: 1.4; }
  .bad { fill: #fde2df; stroke: #c4483c; stroke-width: 1.2; }
  .warm { fill: #fff0d1; stroke: #c28a1d; stroke-width: 1.2; }
  .title { fill: #1c2430; font-weight: 600; }
  .small { fill: #4a5568; font-size: 11.5px; }
  .label { fill: #7d8794; font-size: 11.5px; }
  .line { fill: none; stroke: #7d8794; stroke-width: 1.6; }
  .dash { stroke-dasharray: 5 4; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #232b38; stroke: #6d7789; }
    .key { fill: #1c3160; stroke: #7aa2ff; }
    .good { fill: #173a28; stroke: #58b881; }
    .bad { fill: #4a211d; stroke: #e0796f; }
    .warm { fill: #453410; stroke: #dba93c; }
    .title { fill: #eef1f6; }
    .small { fill: #b6bfcc; }
    .label { fill: #9aa4b2; }
    .line { stroke: #9aa4b2; }
  }
""".strip("\n")


class Figure:
    """Boxes and arrows on a canvas of pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#7d8794"/></marker>'
            "</defs>",
        ]

    def box(
        self, x: int, y: int, w: int, h: int, title: str, *lines: str, kind: str = "box"
    ) -> None:
        """Draw a box with a title and small lines below it, in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="7"/>')
        top = y + h / 2 + 4.5 - 8 * len(lines)
        for i, line in enumerate((title, *lines)):
            self.text(x + w / 2, top + 16 * i, line, "small" if i else "title")

    def text(self, x: float, y: float, text: str, kind: str = "label", at: str = "middle") -> None:
        """Write one line of text."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{at}">{escape(text)}</text>'
        )

    def arrow(
        self, path: str, label: str = "", *, at: tuple[int, int] | None = None, **flags: bool
    ) -> None:
        """Draw a path (SVG) with a tip, and a label at a place."""
        dash = " dash" if flags.get("dashed") else ""
        self.parts.append(f'<path class="line{dash}" d="{path}" marker-end="url(#tip)"/>')
        if label and at:
            self.text(*at, label)

    def svg(self) -> str:
        """Return the file."""
        return "\n".join((*self.parts, "</svg>", ""))


def flow() -> Figure:
    """Draw how rows flow through a job."""
    f = Figure(960, 258, "rows go from Parquet through plan and pool to Parquet")
    f.box(8, 78, 100, 62, "Input", "Parquet, JSONL", "local or URI")
    f.box(150, 78, 116, 62, "Tokenize", "template, ids,", "once")
    f.box(
        312, 66, 136, 86, "Plan", "one prefix tree", "over all rows;", "groups, order", kind="key"
    )
    f.box(508, 66, 112, 86, "Queue", "one for all", "engines; rows", "are pulled", kind="key")
    for i in range(3):
        f.box(680, 22 + 62 * i, 112, 50, f"Engine {i + 1}", "native, vLLM, ...")
    f.box(852, 66, 100, 86, "Output", "Parquet, each", "row once;", "report", kind="good")
    f.arrow("M108 109H146")
    f.arrow("M266 109H308")
    f.text(287, 101, "hashes")
    f.arrow("M448 109H504", "rows in", at=(476, 86))
    f.text(476, 101, "order")
    for y in (47, 109, 171):
        f.arrow(f"M620 109C650 109 650 {y} 676 {y}")
        f.arrow(f"M792 {y}C822 {y} 822 109 848 109")
    f.arrow("M208 140V226H902V156", dashed=True)
    f.text(555, 219, "a failed row becomes an error row; the job continues")
    f.text(
        555, 245, "finished units are committed at once: after a crash, run the same command again"
    )
    return f


def plan() -> Figure:
    """Draw rows, their prefix tree, groups and units."""
    f = Figure(960, 250, "shuffled rows become a prefix tree, groups in order, and units")
    f.text(95, 22, "rows in input order")
    kinds = ("key", "good", "key", "warm", "good", "key", "warm")
    for i, kind in enumerate(kinds):
        f.box(20, 34 + 28 * i, 86, 22, "", kind=kind)
        f.box(106, 34 + 28 * i, 50, 22, "")
    f.text(318, 22, "prefix tree")
    f.box(258, 112, 50, 34, "root")
    for i, (kind, name) in enumerate((("key", "A"), ("good", "B"), ("warm", "C"))):
        y = 46 + 66 * i
        f.box(350, y, 60, 34, name, kind=kind)
        f.arrow(f"M308 129C330 129 330 {y + 17} 346 {y + 17}")
    f.text(560, 22, "groups, in order")
    places = (("key", 3), ("good", 2), ("warm", 2))
    y = 34
    for kind, num in places:
        f.box(500, y, 40, 28 * num - 6, "", kind=kind)
        for i in range(num):
            f.box(544, y + 28 * i, 76, 22, "")
        y += 28 * num + 4
    f.text(810, 22, "units: run, then commit")
    f.box(720, 40, 190, 76, "unit 0", "prefix A once, 3 rows", "then part-000000.parquet")
    f.box(720, 138, 190, 76, "unit 1", "prefixes B and C once", "then part-000001.parquet")
    f.arrow("M164 129H252", "hash blocks", at=(208, 120))
    f.arrow("M414 129H494", "choose", at=(454, 120))
    f.arrow("M626 129C670 129 670 78 716 78")
    f.arrow("M626 129C670 129 670 176 716 176")
    return f


def pool() -> Figure:
    """Draw feeders, the coordinator with its queue, and replicas."""
    f = Figure(960, 250, "feeders fill one queue, replicas pull from it")
    for i in range(2):
        f.box(20, 46 + 92 * i, 140, 66, f"Feeder {i + 1}", "tokenize, hand over,", "write units")
    f.box(330, 34, 260, 182, "", kind="key")
    f.text(460, 58, "Coordinator", "title")
    for i, (kind, text) in enumerate((("box", "batch: group A"), ("box", "batch: group B"))):
        f.box(352, 72 + 34 * i, 216, 27, text, kind=kind)
    f.box(352, 140, 216, 27, "reserved for replica 1: A", kind="good")
    f.box(352, 174, 216, 27, "suspects, one at a time", kind="bad")
    for i in range(3):
        f.box(
            770,
            26 + 68 * i,
            160,
            54,
            f"Replica {i + 1}",
            ("has prefix A", "runs group B", "died: restarts")[i],
            kind=("good", "box", "bad")[i],
        )
    for y in (79, 171):
        f.arrow(f"M160 {y}C250 {y} 250 125 326 125")
    f.text(244, 66, "row batches")
    for y in (53, 121, 189):
        f.arrow(f"M766 {y}C680 {y} 680 125 594 125")
    f.text(680, 30, "pull when they have capacity")
    f.text(690, 236, "only its unfinished rows return to the queue")
    return f


def moves() -> Figure:
    """Draw a row that moves: who decides, who owns it when, and which bytes travel."""
    f = Figure(960, 292, "a running row moves from one replica to another")
    lanes = ((44, "Coordinator"), (124, "Source"), (204, "Target"))
    for y, name in lanes:
        f.box(16, y - 24, 110, 48, name, kind="key" if y == 44 else "box")
    f.box(150, 22, 130, 44, "plan_pool", "measured seconds", kind="key")
    f.box(690, 22, 120, 44, "commit", "one step", kind="key")
    f.box(150, 102, 380, 44, "decodes on", "whole blocks are copied between steps", kind="good")
    f.box(550, 102, 170, 44, "stopped", "keeps all", kind="warm")
    f.box(830, 102, 100, 44, "frees it")
    f.box(200, 182, 100, 44, "reserves", "blocks")
    f.box(320, 182, 210, 44, "writes blocks")
    f.box(550, 182, 170, 44, "last block, tokens", "checked", kind="warm")
    f.box(770, 182, 160, 44, "decodes", kind="good")
    f.arrow("M215 66V98")
    for x in (360, 430, 500):
        f.arrow(f"M{x} 146V178")
    f.arrow("M635 146V178")
    f.arrow("M700 182C740 150 740 100 746 70")
    f.arrow("M780 66C800 110 800 150 806 178")
    f.text(445, 262, "the source owns the row, also if a process dies or hangs here")
    f.arrow("M150 272H748")
    f.text(860, 262, "the target owns it")
    f.arrow("M758 272H940")
    return f


def weights() -> Figure:
    """Draw who owns which feed-forward blocks, who reads them, and when."""
    f = Figure(
        960, 316, "three replicas own two of six feed-forward blocks each and read the others"
    )
    f.text(70, 20, "owned, read by all")
    f.text(545, 20, "computes layer by layer: from its own memory, or from a slot")
    for rank in range(3):
        y = 32 + 86 * rank
        own = f"blocks {rank} and {rank + 3}"
        f.box(16, y, 118, 52, f"Replica {rank}", own, kind="key")
        for layer in range(6):
            owner = layer % 3
            kind, origin = ("good", "own") if owner == rank else ("warm", f"from replica {owner}")
            f.box(166 + 128 * layer, y, 116, 52, f"layer {layer}", origin, kind=kind)
        shifted = [[(rank + i) % 3 + c for i in range(3)] for c in (0, 3)]
        turns = [", ".join(str(x) for x in cycle if x % 3 != rank) for cycle in shifted]
        f.text(
            166,
            y + 70,
            f"fetches blocks {turns[0]}, then {turns[1]}, then those of the next pass",
            at="start",
        )
    f.text(
        480,
        306,
        "in each turn every replica reads from another owner; none waits for another's progress",
    )
    return f


def commit() -> Figure:
    """Draw how a unit becomes a part, and parts a success."""
    f = Figure(960, 240, "a unit is checked, created once, and audited")
    f.box(16, 70, 130, 66, "Unit", "about 1,024 rows", "of the plan")
    f.box(214, 70, 130, 66, "Check", "every position once,", "sum of row numbers")
    f.box(
        412,
        62,
        170,
        82,
        "Create part",
        "link or conditional write:",
        "the first one wins,",
        "others discard rows",
        kind="key",
    )
    f.box(650, 70, 120, 66, "Audit", "footer of", "every part")
    f.box(838, 70, 106, 66, "_SUCCESS", "created last", kind="good")
    for start, end in ((146, 210), (344, 408), (582, 646), (770, 834)):
        f.arrow(f"M{start} 103H{end}")
    f.box(16, 182, 328, 44, "Journal", "finished rows of open units, every 5 s")
    f.arrow("M81 136V178", dashed=True)
    f.box(412, 182, 170, 44, "Second driver", "too late: no effect", kind="bad")
    f.arrow("M497 182V148", dashed=True)
    f.text(497, 44, "data/part-000042.parquet, never replaced")
    return f


def engine() -> Figure:
    """Draw one step of the engine, plain and as coroutines."""
    f = Figure(960, 290, "one step: schedule, forward pass, sample, finish")
    f.box(16, 20, 150, 56, "Schedule", "decodes first, then", "chunks of prompts")
    f.box(16, 116, 150, 56, "KV blocks", "device, host memory,", "prefixes pinned")
    f.box(790, 20, 150, 56, "Sample", "seed and position")
    f.box(790, 116, 150, 56, "Finish", "stop, length, error")
    f.arrow("M91 76V112")
    f.arrow("M166 48H236")
    f.arrow("M726 48H786")
    f.arrow("M865 76V112")
    f.text(480, 16, "plain: all tokens through every module at once")
    for i, name in enumerate(("attention 0", "experts 0", "attention 1", "experts 1")):
        f.box(240 + 124 * i, 26, 114, 44, name, kind="key" if i % 2 else "box")
    f.text(480, 104, "coroutines: attention by parts, experts for all rows that have arrived")
    for part in range(3):
        y = 116 + 42 * part
        for layer in range(2):
            x = 240 + 248 * layer
            f.box(x, y, 90, 34, f"part {part}")
            f.arrow(f"M{x + 90} {y + 17}H{x + 120}")
            if layer:
                f.arrow(f"M{x - 30} {y + 17}H{x - 4}")
    for x, name in ((364, "experts 0"), (612, "experts 1")):
        f.box(x, 116, 94, 118, name, "combined", kind="key")
    f.text(480, 262, "yield before a module, combine to run together, split again")
    f.text(480, 280, "same tokens in any order")
    return f


def window() -> Figure:
    """Draw a layer in time, with KV in host memory."""
    f = Figure(960, 262, "a layer in time, with KV in host memory")
    rows = (("copies in", 40), ("computes", 106), ("copies out", 172))
    for name, y in rows:
        f.text(84, y + 24, name, at="end")
    for part in range(3):
        x = 100 + 176 * part
        f.box(x, 34, 150, 44, f"KV of part {part}", f"into buffer {part % 2}")
        f.box(x + 66, 100, 150, 44, f"attention {part}", "its rows", kind="warm")
        f.box(x + 132, 166, 150, 44, "new tokens", f"from buffer {part % 2}")
        f.arrow(f"M{x + 100} 78V96")
        f.arrow(f"M{x + 166} 144V162")
    f.box(684, 100, 200, 44, "experts", "all rows of the step, once", kind="key")
    f.box(794, 34, 150, 44, "KV of part 0", "of the next layer")
    f.arrow("M668 122H680")
    f.text(480, 18, "a part: the rows whose KV of one layer fits one of two buffers")
    f.text(
        480,
        240,
        "hidden states of all rows wait for the experts; on a CPU copies and kernels take turns",
    )
    return f


FIGURES = {
    "flow": flow,
    "plan": plan,
    "pool": pool,
    "moves": moves,
    "weights": weights,
    "commit": commit,
    "engine": engine,
    "window": window,
}


def main() -> None:
    """Write all figures next to this file."""
    for name, draw in FIGURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
