// The view of the API: the description of each route in /openapi.json.

import { HttpError, request } from "./api.js";
import { create, createTable, find } from "./dom.js";

let isShown = false;

export async function showRoutes() {
  if (isShown) {
    return;
  }
  try {
    const document = await (await request("openapi.json")).json();
    const routes = Object.entries(document.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, route]) => buildRoute(document, `${method.toUpperCase()} ${path}`, route)),
    );
    find("routes").replaceChildren(...routes);
    isShown = true;
  } catch (error) {
    const unauthorized = error instanceof HttpError && error.status === 401;
    const text = unauthorized ? "Enter an API key, and choose this view again." : error.message;
    find("routes").replaceChildren(create("p", { className: "help", textContent: text }));
  }
}

function buildRoute(document, title, route) {
  const summary = create("summary", {}, create("code", { textContent: title }));
  const text = create("p", { className: "text", textContent: route.description ?? "" });
  const details = create("details", { className: "route" }, summary, text);
  const body = route.requestBody?.content["application/json"]?.schema;
  const answer = route.responses["200"]?.content?.["application/json"]?.schema;
  for (const [caption, schema] of [["Fields of the body", body], ["Fields of the answer", answer]]) {
    const fields = schema && resolve(document, schema).properties;
    if (fields) {
      const table = createTable(caption, ["Name", "Type", "Meaning"], listFields(fields));
      const place = create("div", { className: "scrolling", tabIndex: 0 }, table);
      place.setAttribute("role", "region");
      place.setAttribute("aria-label", `${caption} of ${title}`);
      details.append(place);
    }
  }
  return details;
}

function listFields(fields) {
  return Object.entries(fields).map(([name, schema]) => [name, describeType(schema), schema.description ?? ""]);
}

function resolve(document, schema) {
  const name = schema.$ref?.split("/").at(-1);
  return name === undefined ? schema : document.components.schemas[name];
}

function describeType(schema) {
  const options = schema.anyOf ?? schema.oneOf;
  if (options !== undefined) {
    return options.map(describeType).filter((text) => text !== "null").join(" | ");
  }
  if (schema.enum !== undefined || schema.const !== undefined) {
    return (schema.enum ?? [schema.const]).map((value) => JSON.stringify(value)).join(" | ");
  }
  if (schema.type === "array") {
    return `list of ${describeType(schema.items ?? {})}`;
  }
  return schema.$ref?.split("/").at(-1) ?? schema.type ?? "any";
}
