"""The page at `/`: its files, its headers, and properties that need no browser (see tests/e2e/test_web_ui.py)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

from serve_llm.server.http.auth import OPEN_PATHS
from serve_llm.server.web_ui.files import FOLDER, PAGE_FILES
from support.serving import Served

ROOT = Path(__file__).parents[3]
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.js"))}
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")
LIBRARY = FOLDER / "vendor" / "markdown-it.mjs"


class Page(HTMLParser):
    """Collects all elements, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed((FOLDER / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


def test_the_files(served: Served) -> None:
    assert set(PAGE_FILES) <= OPEN_PATHS and len(PAGE_FILES) == len(SCRIPTS) + 3
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
    for path, file in PAGE_FILES.items():
        reply = served.get(path)
        assert reply.status == 200 and reply.content == file.read_bytes()
        assert reply.headers["content-type"] == f"{kinds[file.suffix]}; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert served.post("/", {}).status == 405
    for path in ("/web_ui/files.py", "/web_ui/../files.py", "/web_ui/vendor/LICENSES.md", "/web_ui/"):
        assert served.get(path).status == 404


def test_a_server_without_the_page(serve: Callable[..., Served]) -> None:
    served = serve(options={"page": False})
    for path in (*PAGE_FILES, "/docs"):
        assert served.get(path).status == 404
    assert served.get("/openapi.json").status == 200


def test_the_policy_lets_nothing_in(served: Served) -> None:
    policy = served.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'" and "unsafe" not in policy


def test_the_page_needs_no_other_server_and_nothing_inline() -> None:
    page = Page()
    assert set(page.values("src") + page.values("href")) - {"data:,"} == {"web_ui/main.js", "web_ui/style.css"}
    inline = [
        name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"
    ]
    assert inline == [] and all("src" in attributes for tag, attributes in page.elements if tag == "script")
    for name, text in SCRIPTS.items():
        text = text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
        assert not re.search(r"https?://|//[a-z]", text), name
    assert not re.search(r"url\(|@import", STYLE)


def test_every_import_is_served() -> None:
    imported = {found for text in SCRIPTS.values() for found in re.findall(r'from "\./([\w./-]+)"', text)}
    served = {path.removeprefix("/web_ui/") for path in PAGE_FILES}
    assert "vendor/markdown-it.mjs" in imported and imported <= served
    assert served - imported == {"/", "main.js", "style.css"}, "nothing that no one loads"


@pytest.mark.parametrize("name", [*SCRIPTS, LIBRARY.name])
def test_text_never_becomes_html(name: str) -> None:
    words = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|localStorage|cookie"
    )
    text = SCRIPTS[name] if name in SCRIPTS else LIBRARY.read_text(encoding="utf-8")
    assert re.findall(words, text) == []


def test_the_library_comes_with_its_licences() -> None:
    """The library's version is in its first line, and in the list."""
    version = re.search(r"markdown-it (\S+) ", LIBRARY.read_text(encoding="utf-8").splitlines()[0])
    assert version is not None
    licences = (FOLDER / "vendor" / "LICENSES.md").read_text(encoding="utf-8")
    assert f"## markdown-it {version[1]} (MIT)" in licences
    assert set(re.findall(r"^## (\S+) ", licences, re.MULTILINE)) == {
        "markdown-it",
        "linkify-it",
        "mdurl",
        "uc.micro",
        "entities",
        "punycode.js",
    }


def test_every_control_has_a_label_and_every_reference_a_target() -> None:
    page = Page()
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    references = [page.values(name) for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls")]
    assert set().union(*references) <= set(ids)
    controls = {
        attributes["id"] for tag, attributes in page.elements if tag in ("input", "select", "textarea", "meter")
    }
    assert controls <= set(page.values("for"))
    found = {found for text in SCRIPTS.values() for found in re.findall(r'(?:find|show)\("([\w-]+)"', text)}
    assert found <= set(ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(scheme: str) -> None:
    """Contrasts reach WCAG 2's level AA: 4.5 for text, 3 for borders."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark))
    assert len(colours) == 12
    pairs = [(text, under) for text in ("text", "muted", "problem", "accent") for under in ("background", "panel")]
    lines = [(f"line-{number}", "panel") for number in range(3)]
    for one, other in [*pairs, *lines, ("on-accent", "accent"), ("text", "heat")]:
        assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    assert min(contrast(colours["border"], colours[under]) for under in ("background", "panel")) >= 3


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_files_are_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = setuptools["package-data"]["serve_llm.server.web_ui"]
    assert "serve_llm.server.web_ui" in setuptools["packages"]
    needed = [path.relative_to(FOLDER).as_posix() for path in PAGE_FILES.values()] + ["vendor/LICENSES.md"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in needed)
