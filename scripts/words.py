"""Refuse words that only this project understands, and phrases that readers stumble over.

    python scripts/words.py [--count] [PATH ...]

Prose is comments, strings that hold a blank (docstrings, messages) and Markdown; names are
identifiers, also in backticks. Exit code 1 if a word is found; `--count` prints a table by folder.
"""

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS: tuple[str, ...] = (
    *(path.name for path in sorted(ROOT.glob("raybatch*")) if path.is_dir()),
    *("lab", "tests", "docs"),
)
FOLDERS += ("benchmarks", "scripts", "examples", "pipelines")
# history, stored results, texts that a model learns, and this table with its tests
SKIPPED: tuple[str, ...] = ("docs/develop/log.md", "CHANGELOG.md", "benchmarks/results")
SKIPPED += ("benchmarks/.work", "tests/data", "scripts/demo_training")
SKIPPED += ("scripts/words.py", "tests/test_words.py")
# files in which a tile is a piece of a matrix that a kernel or a core computes
KERNELS: tuple[str, ...] = ("raybatch/kernels", "raybatch/engine/forward/ops_choice.py")
KERNELS += ("tests/kernels", "scripts/gpu_call", "docs/develop/kernels.md")

# files that name counters as metrics and run logs do
STORED: tuple[str, ...] = ("raybatch/records/pool_stats.py", "raybatch/report/record.py")


class Word(NamedTuple):
    """Patterns of refused texts and names, what to write instead, and paths that may use them."""

    instead: str
    prose: str = ""  # matched whole words of any case; a blank is any white space
    names: str = ""  # matched whole identifiers, with or without a leading underscore
    allowed: tuple[str, ...] = ()


WORDS = (
    Word("the number, the limit", "so many"),
    Word("the noun: no replica, no reader", "nobody"),
    Word("separate, or `its own X`", "of (?:its|their|one's) own"),
    Word("continue", "(?:goes|going|went) on|go on(?=[,.;:)]| (?:with|from|until))"),
    Word("up to, where, if", "as far as"),
    Word("again", "anew"),
    Word("the noun: a caller that", "whoever"),
    Word("reported, received, notified", "told|heard", "told|heard|said|asked"),
    Word("forever, without end", "for ever"),
    Word("the noun: files, rows", "what (?:lies|stands)"),
    Word("exists, is stored", "lies? there|(?:what|that|it|which|one) (?:is|are) there"),
    Word("the time, memory or cost of", "what (?:an?|the|each|its) (?:[a-z]+ ){1,3}takes?"),
    Word("a sentence with its noun", "(?:that|those|and) of which"),
    Word("stops, no further", "no more (?:units|rows) (?:are|is)|rows? no more"),
    Word("compared with", "beside (?:torch|vllm|transformers|compiled|plain|measured|what)"),
    Word("next to, together with", "(?:no effect|stands?) beside|beside(?=[.,;)])|(?-i:Beside)"),
    Word("execution mode", "ways? of (?:an?|the) engines?", "EngineWay|way_changes|num_ways"),
    Word("inputs, constraints, query", "", "EngineFacts|MemoryQuestion"),
    Word("weight placement", "residence", r"\w*[Rr]esidence"),
    Word("buffer pool", "ring of (?:buffers?|tiles?|slots?)|weight rings?", r"\w+(?:Ring|_ring)"),
    Word("weight shard", "tiles?", "FfnTile|TileSlots|ffn_tiles?", KERNELS),
    Word("rank, peer", "seats?|mates?", "ShareSeat|seats?|mates?"),
    Word("activation exchange", "(?:dummy|mode of) rounds|(?-i:CaS)", "FfnRounds"),
    Word("weight fetch", "(?-i:WaS)|copies of shared weights"),
    Word("weight-sharing group", "share groups?"),
    Word("cascade (shared-prefix) attention", "shared (?:reads?|runs?)", "[Ss]hared_?[Rr]eads"),
    Word("shared-prefix segment", "context parts?", "ContextPart"),
    Word("admission stalls", "held steps?", "held_steps"),
    Word("migrated KV tokens", "carried tokens?", "carried_tokens"),
    Word("TP group", "teams?", r"Team\w*|\w+Team|team_\w+|\w+_teams?", STORED),
    Word("driver rank, worker rank", "leaders?|followers?", "Leader|Follower"),
    Word("compatibility check", "likeness", "Vote|Likeness"),
    Word("rendezvous, generation", "mode epochs?", "Meeting|ModeEpoch"),
    Word("rebalancing", "levelling", r"\w*[Ll]evelling"),
    Word("duplicates, identical rows", "twins?", r"[Tt]wins?|joins_twins|TWIN_KEY_BYTES"),
    Word("speculative copy", "", "RowCopy|CopyCounters"),
    Word("idle, demand, credit", "hungry", "hungry|[Pp]ulls"),
    Word("queue, group batch", "", "BundleLine|WaitingLine"),
    Word("autoscaler", "crew", r"Crew\w*|crew"),
    Word("crash quarantine", "probation", "Probation"),
    Word("crash count, canary row", "strikes?|control rows?", "[Ss]trikes?"),
    Word("batch registry", "mailbox(?:es)?", "[Mm]ailbox"),
    Word("partial results", "", "so_far|UnitsSoFar"),
    Word("throughput model", "", "TokenPace|TeamPace"),
    Word("plan index", "sidecars?", "[Ss]idecar"),
    Word("tree summary", "", "TreeBox|Outline|outline_tree"),
    Word("rows skipped before the engine", "unasked", "unasked"),
    Word("runtime, launcher", "", "(?:Ray|Local|Replica)Site"),
)
_TEXTS = [(word.prose.replace(" ", r"\s+"), word.names) for word in WORDS]
_PROSE = "|".join(f"(?P<w{i}>(?i:{prose}))" for i, (prose, _) in enumerate(_TEXTS) if prose)
_NAMES = "|".join(f"_?(?P<w{i}>{names})" for i, (_, names) in enumerate(_TEXTS) if names)
_IN_PROSE, _IN_NAMES = re.compile(rf"\b(?:{_PROSE})\b"), re.compile(rf"\b(?:{_NAMES})\b")
# names, targets of links, and fields of formatted strings are not prose
_NO_PROSE = re.compile(r"`[^`\n]+`|\]\([^)\s]*\)|\{[^{}\n]*\}")


def main() -> int:
    """Print what is found and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; by default all")
    parser.add_argument("--count", action="store_true", help="print a table by folder instead")
    args = parser.parse_args()
    roots = args.paths or [*(ROOT / folder for folder in FOLDERS), *ROOT.glob("*.md")]
    folders: Counter[str] = Counter()
    for root in (root.resolve() for root in roots):
        for path in sorted(root.rglob("*.*")) if root.is_dir() else [root]:
            name = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
            if path.suffix in (".py", ".md") and not name.startswith(SKIPPED):
                for line, text, instead in find_words(path.read_text(), name):
                    folders["/".join(name.split("/")[:-1][:3])] += 1
                    if not args.count:
                        print(f"{name}:{line}: {text!r}: write {instead}")
    if args.count:
        print("\n".join(f"{num:5d}  {folder}" for folder, num in folders.most_common()))
    print(f"{folders.total()} words to replace")
    return 1 if folders else 0


def find_words(text: str, name: str) -> list[tuple[int, str, str]]:
    """Return line, text and replacement of each refused word in the file of this name."""
    found = []
    for line, matcher, piece in _pieces(text) if name.endswith(".py") else _both(1, text):
        for match in matcher.finditer(piece):
            word = WORDS[int(str(match.lastgroup)[1:])]
            if not (word.allowed and name.startswith(word.allowed)):
                at = line + piece.count("\n", 0, match.start())
                found.append((at, " ".join(match[0].split()), word.instead))
    return sorted(found)


def _pieces(text: str) -> Iterator[tuple[int, re.Pattern[str], str]]:
    """Yield line, matcher and text of comments, sentences and names of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            yield from _both(token.start[0], token.string)
        elif kind == "NAME":
            yield token.start[0], _IN_NAMES, token.string


def _both(line: int, text: str) -> Iterator[tuple[int, re.Pattern[str], str]]:
    """Yield the prose of a text, and each of its names in backticks."""
    yield line, _IN_PROSE, _NO_PROSE.sub("_", text)
    for quoted in re.finditer(r"`([^`\n]+)`", text):
        yield line + text.count("\n", 0, quoted.start()), _IN_NAMES, quoted[1]


if __name__ == "__main__":
    sys.exit(main())
