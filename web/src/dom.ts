// Elements without markup in strings: text from the bus is never parsed as HTML.

type Child = Node | string | null | undefined;
type Properties = Record<string, string | number | boolean | null | undefined | EventListener>;

const SVG = "http://www.w3.org/2000/svg";

export function byId<T extends Element = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element ${id}`);
  return found as unknown as T;
}

function fill<E extends Element>(element: E, properties: Properties, children: Child[]): E {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Properties = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), properties, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  properties: Properties = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Change an element's text, if it is another. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Call `draw` at the next frame, once however often it was asked for. */
export function perFrame(draw: () => void): () => void {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
}

/** Fill a table from rows of texts; rows and cells are kept where they are, so that focus and selection stay. */
export function fillTable(
  table: HTMLTableElement,
  heads: { text: string; isNumber?: boolean }[],
  rows: (string | Node)[][],
): void {
  if (table.tHead === null) {
    const row = h("tr");
    for (const head of heads) row.append(h("th", { scope: "col", class: head.isNumber ? "number" : null }, head.text));
    table.append(h("thead", {}, row), h("tbody"));
  }
  const body = table.tBodies[0]!;
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    cells.forEach((value, column) => {
      let cell = row.cells[column];
      if (cell === undefined) {
        cell = row.insertCell();
        if (heads[column]?.isNumber) cell.className = "number";
      }
      if (typeof value === "string") setText(cell, value);
      else cell.replaceChildren(value);
    });
  });
}
