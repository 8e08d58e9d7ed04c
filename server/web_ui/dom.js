// Elements of the page. Text is always given to the DOM as text, never as HTML.

export const DIGITS = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

export function find(id) {
  return document.getElementById(id);
}

export function create(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  const { dataset, ...others } = properties;
  Object.assign(element, others);
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
}

export function createButton(text, onClick, properties = {}) {
  const button = create("button", { type: "button", textContent: text, ...properties });
  button.addEventListener("click", onClick);
  return button;
}

export function createSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function show(id, text) {
  if (find(id).textContent !== text) { // an unchanged text is not announced again
    find(id).textContent = text;
  }
}

export function createTable(caption, heads, rows) {
  // rows: lists of texts; the first of each row is its head.
  const head = create("tr", {}, ...heads.map((text) => create("th", { scope: "col", textContent: text })));
  const body = rows.map(([first, ...others]) =>
    create(
      "tr",
      {},
      create("th", { scope: "row", textContent: first }),
      ...others.map((text) => create("td", { textContent: text })),
    ),
  );
  return create(
    "table",
    {},
    create("caption", { textContent: caption }),
    create("thead", {}, head),
    create("tbody", {}, ...body),
  );
}
