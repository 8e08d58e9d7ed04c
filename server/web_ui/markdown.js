// Markdown as elements. markdown-it turns text into tokens. This module makes elements of known tokens; everything
// else is text. HTML in an answer is text, images are links, and links lead to http, https and mailto only.

import MarkdownIt from "./vendor/markdown-it.mjs";
import { create, createButton } from "./dom.js";

const PARSER = new MarkdownIt({ html: false, linkify: true, typographer: false });
const TAGS = new Set("p ul ol li blockquote em strong s table thead tbody tr th td".split(" "));
const HEADING = /^h([1-6])$/;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ALIGNMENT = /^text-align:(left|center|right)$/;

export class MarkdownView {
  // Shows a text that grows. Blocks that have not changed keep their elements.

  constructor(container) {
    this.container = container;
    this.sources = [];
  }

  update(text, isComplete = false) {
    const lines = text.split("\n");
    const blocks = splitBlocks(PARSER.parse(text, {}));
    const sources = blocks.map((block) => lines.slice(...block[0].map).join("\n"));
    let kept = 0; // definitions of links at the end may change any block, hence all anew when the text is complete
    while (!isComplete && kept < sources.length && sources[kept] === this.sources[kept]) {
      kept += 1;
    }
    while (this.container.childNodes.length > kept) {
      this.container.lastChild.remove();
    }
    for (const block of blocks.slice(kept)) {
      this.container.append(buildBlock(block));
    }
    this.sources = sources;
  }
}

function splitBlocks(tokens) {
  // The tokens of each top-level block.
  const blocks = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) {
      blocks.push([]);
    }
    blocks.at(-1).push(token);
    depth += token.nesting;
  }
  return blocks;
}

function buildBlock(tokens) {
  const root = document.createDocumentFragment();
  appendTokens(root, tokens);
  return root.childNodes.length === 1 ? root.firstChild : create("div", {}, root);
}

function appendTokens(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === 1) {
      const element = buildElement(token);
      parent.append(element);
      open.push(element);
    } else if (token.nesting === -1) {
      open.pop();
    } else if (token.type === "inline") {
      appendTokens(parent, token.children);
    } else {
      parent.append(buildLeaf(token));
    }
  }
}

function buildElement(token) {
  const heading = HEADING.exec(token.tag);
  if (heading) {
    return create(`h${Math.min(6, Number(heading[1]) + 2)}`); // below the headings of the page
  }
  if (token.type === "link_open") {
    return buildLink(token.attrGet("href"));
  }
  const element = create(TAGS.has(token.tag) && !token.hidden ? token.tag : "span");
  const start = Number(token.attrGet("start"));
  if (token.tag === "ol" && Number.isSafeInteger(start)) {
    element.start = start;
  }
  const alignment = ALIGNMENT.exec(token.attrGet("style") ?? "");
  if (alignment) {
    element.classList.add(alignment[1]);
  }
  return element;
}

function buildLeaf(token) {
  switch (token.type) {
    case "code_inline":
      return create("code", { textContent: token.content });
    case "code_block":
    case "fence":
      return buildCode(token.content, token.info.trim().split(/\s+/)[0]);
    case "hardbreak":
      return create("br");
    case "softbreak":
      return document.createTextNode("\n");
    case "hr":
      return create("hr");
    case "image": {
      const link = buildLink(token.attrGet("src"));
      link.append(token.content || "image");
      return link;
    }
    default:
      return document.createTextNode(token.content);
  }
}

function buildLink(address) {
  let url = null;
  try {
    url = new URL(address); // without a base: links into this server would carry its user's trust
  } catch {
    return create("span");
  }
  if (!SCHEMES.has(url.protocol)) {
    return create("span");
  }
  return create("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function buildCode(text, language) {
  const content = text.replace(/\n$/, "");
  const head = create("div", { className: "code-head" }, create("span", { textContent: language }));
  if (navigator.clipboard) { // absent without TLS, except on localhost
    head.append(createCopyButton(content, "Copy code"));
  }
  const code = create("pre", { tabIndex: 0 }, create("code", { textContent: content }));
  return create("div", { className: "code" }, head, code);
}

export function createCopyButton(text, label) {
  const button = createButton("Copy", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
  button.setAttribute("aria-label", label);
  return button;
}
