"""The files of the page at `/`, by the path that serves them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
PAGE_FILES = {"/": FOLDER / "index.html"} | {
    f"/web_ui/{path.relative_to(FOLDER).as_posix()}": path
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in (".css", ".js", ".mjs")
}

# Only files of this server may run and load, other sites must not embed the page, and no text can become HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_headers(path: str) -> dict[str, str]:
    """Return the headers for a path in PAGE_FILES."""
    return {"content-type": f"{MEDIA_TYPES[PAGE_FILES[path].suffix]}; charset=utf-8", **HEADERS}
