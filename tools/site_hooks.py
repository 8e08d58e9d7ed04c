"""Hooks for mkdocs.yml: pages in docs/ link to files elsewhere in the repository, and the site shows those too.

README.md is the home page. Any other page, such as SECURITY.md, becomes repository/SECURITY.md; any other file becomes
a download, and a folder becomes a list of its files.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md")
DOCS = ROOT / "docs"
HOME = "index.md"
SHOWN = "repository"  # the site's folder
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # the second word says what a block needs; mkdocs knows one


def on_files(files: Files, config: MkDocsConfig) -> Files:
    found: set[Path] = set()
    for page in [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)]:
        for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if "://" not in target and path.exists() and not path.is_relative_to(DOCS):
                found.add(path)
    for path in sorted(found | {ROOT / name for name in PAGES}):
        if path.is_dir():
            files.append(File.generated(config, find_uri(path), content=list_folder(path)))
        else:
            content = path.read_bytes()
            shown = content.decode() if path.suffix == ".md" else content
            files.append(File.generated(config, find_uri(path), content=shown))
    files.append(File.generated(config, "decisions/index.md", content=list_decisions()))
    for folder in (path for path in found if path.is_dir()):
        for path in list_files(folder):
            if files.get_file_from_path(find_uri(path)) is None:
                files.append(File.generated(config, find_uri(path), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the rest of the repository to where the site shows their targets."""
    uri = page.file.src_uri
    source = find_source(uri)
    depth = "../" * uri.count("/")

    def move(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = (source.parent / target).resolve()
        if "://" in target or not path.exists():
            return link[0]
        return f"]({depth}{find_uri(path)}{anchor})"

    return FENCE.sub(r"\1", LINK.sub(move, markdown))


def find_uri(path: Path) -> str:
    """Return where the site shows a file or folder of the repository."""
    if path == ROOT / "README.md":
        return HOME
    shown = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"{SHOWN}/{path.relative_to(ROOT)}"
    return f"{shown}/index.md" if path.is_dir() else shown


def find_source(uri: str) -> Path:
    """Return the repository file behind a page of the site."""
    if uri == HOME:
        return ROOT / "README.md"
    return ROOT / uri.removeprefix(f"{SHOWN}/") if uri.startswith(f"{SHOWN}/") else DOCS / uri


def list_decisions() -> str:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    links = [f"- [{title}]({page.name})" for page, title in zip(pages, titles, strict=True)]
    return "\n".join(["# Decisions", "", *links, ""])


def list_files(folder: Path) -> list[Path]:
    hidden = {"__pycache__", ".helmignore"}
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not hidden.intersection(path.parts)]


def list_folder(folder: Path) -> str:
    """Render a page that links to the files in a folder."""
    name = folder.relative_to(ROOT).as_posix()
    links = [f"- [{path.relative_to(folder)}]({path.relative_to(folder).as_posix()})" for path in list_files(folder)]
    return "\n".join([f"# {name}", "", *links, ""])
