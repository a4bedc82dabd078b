"""Hooks of mkdocs: they rewrite links out of docs/ and write llms.txt.

Pages link to files of the repository outside docs/ by relative paths, which work on GitHub and in
an editor. On the site these links lead to the repository; a link to a missing file fails the build.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Protocol

# `[text](../../path#part)`, and the target of an image
_LINK = re.compile(r"(?<=\]\()(\.\.?/[^)\s#]+)(#[^)\s]*)?(?=\))")
_log = logging.getLogger("mkdocs.hooks.site")
# title and first sentence of each page by address, in the order of the site
_pages: dict[str, tuple[str, str]] = {}


class Config(Protocol):
    config_file_path: str
    repo_url: str
    site_name: str
    site_description: str
    site_dir: str


class File(Protocol):
    src_uri: str


class Page(Protocol):
    file: File
    canonical_url: str


def on_page_markdown(markdown: str, *, page: Page, config: Config, **_: object) -> str:
    """Return a page whose links to files outside docs/ lead to the repository."""
    root = Path(config.config_file_path).parent
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def moved(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        if not (root / path).exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        kind = "tree" if (root / path).is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{path}{found[2] or ''}"

    _pages[page.canonical_url] = _summary(markdown)
    return _LINK.sub(moved, markdown)


def on_post_build(*, config: Config, **_: object) -> None:
    """Write llms.txt: the pages with their titles and first sentences (llmstxt.org)."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for address, (title, first) in _pages.items():
        lines.append(f"- [{title}]({address})" + (f": {first}" if first else ""))
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n")


def _summary(markdown: str) -> tuple[str, str]:
    """Return the title of a page and its first sentence, "" if no paragraph has one."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    rest = markdown[title.end() :] if title else markdown
    for block in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", rest, flags=re.DOTALL)):
        text = " ".join(block.split())
        if text and not text.startswith(("#", "|", "```", "-", "!", "1.")):
            plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
            return title[1] if title else "", re.split(r"(?<=[.:]) ", plain)[0]
    return title[1] if title else "", ""
