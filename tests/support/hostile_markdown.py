"""Answers that try to run code in the page, or to send the user or the key elsewhere."""

from __future__ import annotations

RUN = "window.attacked=1"
SCRIPT_ADDRESSES = (
    f"javascript:{RUN}",
    f"JaVaScRiPt:{RUN}",
    f"java\tscript:{RUN}",
    f"java&#9;script:{RUN}",
    f"javascript&colon;{RUN}",
    f"&#106;avascript:{RUN}",
    f"\x01javascript:{RUN}",
    f"%6aavascript:{RUN}",
    f"vbscript:{RUN}",
    f"data:text/html,<script>{RUN}</script>",
    f"data:image/svg+xml,<svg onload={RUN}>",
    "blob:http://127.0.0.1/x",
    "file:///etc/passwd",
    "//evil.example/x",
    "/status",
    "web_ui/main.js",
    "?key=1",
    "#chat",
)
HTML = (
    f"<script>{RUN}</script>",
    f"<ScRiPt>{RUN}</sCrIpT>",
    f"<script src=data:text/javascript,{RUN}></script>",
    f'<img src=x onerror="{RUN}">',
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}></style></mglyph></table></mtext></math>",
    f"<iframe srcdoc='<script>{RUN}</script>'></iframe>",
    f"<iframe src=javascript:{RUN}></iframe>",
    f"<object data=javascript:{RUN}></object>",
    f"<embed src=javascript:{RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<body onload={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<input autofocus onfocus={RUN}>",
    f"<form action=javascript:{RUN}><button>x</button></form>",
    f"<a href=javascript:{RUN}>x</a>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import '//evil.example'</style>",
    f"<div style='background:url(javascript:{RUN})'>x</div>",
    f"<template><script>{RUN}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    f"<!--><script>{RUN}</script>-->",
    f"<![CDATA[<script>{RUN}</script>]]>",
    f"<a id=attacked></a><form id=messages><input name=childNodes>{RUN}</form>",
    f"</textarea><script>{RUN}</script>",
    f"<x contenteditable onblur={RUN} tabindex=1 id=x>",
)
SHAPES = (
    f"```<img src=x onerror={RUN}>\ncode\n```",
    f'```" onmouseover="{RUN}\ncode\n```',
    f'[x](https://example.com "a\\" onmouseover={RUN}")',
    f'![a" onerror="{RUN}](https://evil.example/pixel.png)',
    f"![<img src=x onerror={RUN}>](data:image/png;base64,AAAA)",
    f"`<script>{RUN}</script>`",
    f"    <script>{RUN}</script>",
    f"| <img src=x onerror={RUN}> |\n|:-:|\n| <script>{RUN}</script> |",
    f"# <svg onload={RUN}>",
    f"> - 1. <img src=x onerror={RUN}>",
    f"1{'0' * 400}. <script>{RUN}</script>",
    "[" * 2000 + f"x](javascript:{RUN})",
    "> " * 2000 + "deep",
    "*" * 5000 + f"<script>{RUN}</script>",
    "\u202e<script>\u0000</script>\ufeff\ud83d",
)


def list_attacks() -> list[str]:
    links = [
        shape.format(address)
        for address in SCRIPT_ADDRESSES
        for shape in ("[x]({0})", "[x](<{0}>)", "<{0}>", "![x]({0})", "[x]\n\n[x]: {0}")
    ]
    wrapped = [shape.format(html) for html in HTML for shape in ("{0}", "text {0} text", "- {0}\n- **{0}**")]
    return [*links, *wrapped, *SHAPES]
