// The drawing of who talks to whom: three columns, and ribbons between them.

import { byId, fillTable, setText, svg } from "./dom";
import { rate } from "./format";
import { Flows, NOBODY, OTHERS, type Link, type Node, type Picture } from "./flows";
import type { Talk } from "./types";

const BAR = 8;
const SLOT = 26;
const SLOT_OF_TWO_LINES = 38;
const HEADING = 26;
/** The height of all ribbons of one half together. */
const THICKNESS = 210;
const SPACE = 170;

interface Place {
  node: Node;
  column: number;
  top: number;
  height: number;
  /** Where the next ribbon begins on the left and on the right side. */
  next: [number, number];
}

export class TalkDrawing {
  private readonly flows = new Flows();
  private readonly root = byId<SVGSVGElement>("talk-drawing");
  private readonly ribbons = svg("g", { class: "ribbons", "aria-hidden": "true" });
  private readonly bars = svg("g", { class: "bars" });
  private readonly paths = new Map<string, SVGPathElement>();
  private readonly nodes = new Map<string, SVGGElement>();
  private pinned: string | null = null;
  private pointed: string | null = null;
  private isPaused = false;
  private height = 0;
  private readonly headings = ["Publishers", "Prefixes", "Receivers"].map((text) => svg("text", { y: 12 }, text));
  private picture: Picture = { columns: [[], [], []], links: [[], []] };

  constructor(onDepth: (depth: number) => void) {
    this.root.append(svg("g", { class: "headings", "aria-hidden": "true" }, ...this.headings), this.ribbons, this.bars);
    const slider = byId<HTMLInputElement>("depth");
    slider.addEventListener("input", () => {
      setText(byId("depth-value"), slider.value);
      this.flows.clear();
      onDepth(Number(slider.value));
    });
    const pause = byId<HTMLButtonElement>("talk-pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      if (!this.isPaused) this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.root.parentElement!);
    byId("talk-table").closest("details")?.addEventListener("toggle", () => this.table());
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.pin(null);
    });
  }

  add(talk: Talk): void {
    this.flows.add(talk);
    if (!this.isPaused) this.draw();
  }

  draw(): void {
    this.picture = this.flows.picture();
    const isEmpty = this.picture.columns[0].length === 0;
    byId("talk-empty").hidden = !isEmpty;
    this.root.toggleAttribute("hidden", isEmpty);
    setText(
      byId("talk-foot"),
      isEmpty
        ? ""
        : "Left of the prefixes: messages. Right of them: copies." +
            (this.flows.part < 0.995 ? ` Estimated from ${Math.max(1, Math.round(this.flows.part * 100))} % of the messages: the bus looks at a sample, to stay fast.` : "") +
            (this.flows.others >= 0.05 ? ` ${rate(this.flows.others)} messages a second are of more flows than are counted.` : ""),
    );
    const width = this.root.parentElement!.clientWidth - 44;
    if (!isEmpty && width > 0) this.layOut(width);
    this.table();
  }

  private layOut(width: number): void {
    const { columns, links } = this.picture;
    const slots = columns.map((_, at) => (at === 1 ? SLOT : SLOT_OF_TWO_LINES));
    const side = Math.min(SPACE, width * 0.28);
    const xs = [side, (width - BAR) / 2, width - side - BAR];
    const total = (list: Link[]): number => list.reduce((sum, link) => sum + link.rate, 0) || 1;
    const scales = [THICKNESS / total(links[0]), THICKNESS / total(links[1])] as const;
    const places = new Map<string, Place>();
    const out = new Map<string, number>();
    for (const link of links[1]) out.set(link.from, (out.get(link.from) ?? 0) + link.rate);
    const heights = columns.map((column, at) =>
      column.map((node) => {
        const right = at === 1 ? (out.get(node.id) ?? 0) * scales[1] : 0;
        return Math.max(3, node.rate * scales[at === 2 ? 1 : 0], right);
      }),
    );
    const used = heights.map((column, at) => column.reduce((sum, value) => sum + Math.max(value + 9, slots[at]!), 0));
    // Grow at once and shrink in large steps, so that the page below does not dance.
    const needed = Math.max(200, ...used) + HEADING;
    if (needed > this.height || needed < this.height - 90) this.height = needed;
    const { height } = this;
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.setAttribute("height", String(height));
    this.root.setAttribute("width", String(width));
    columns.forEach((column, at) => {
      let top = HEADING + (height - HEADING - used[at]!) / 2;
      column.forEach((node, i) => {
        const own = heights[at]![i]!;
        const slot = Math.max(own + 9, slots[at]!);
        const start = top + (slot - own) / 2;
        places.set(`${at}${node.id}`, { node, column: at, top: start, height: own, next: [start, start] });
        top += slot;
      });
    });
    this.headings.forEach((heading, at) => {
      heading.setAttribute("x", String(at === 0 ? xs[0]! - 8 : xs[at]! + BAR + 8));
      heading.setAttribute("text-anchor", at === 0 ? "end" : "start");
    });
    this.drawBars(places, xs, width);
    this.drawRibbons(places, xs, links, scales);
    this.highlight();
  }

  private drawBars(places: Map<string, Place>, xs: number[], width: number): void {
    for (const [id, element] of this.nodes) {
      if (places.has(id)) continue;
      element.remove();
      this.nodes.delete(id);
    }
    let before: Element | null = null;
    for (const [id, place] of places) {
      const element = this.nodes.get(id) ?? this.newNode(id, place);
      const x = xs[place.column]!;
      const [bar, label, detail] = element.children as unknown as [SVGRectElement, SVGTextElement, SVGTextElement];
      for (const [name, value] of [["x", x], ["y", place.top], ["width", BAR], ["height", place.height]] as const) {
        bar.setAttribute(name, value.toFixed(1));
      }
      const middle = place.top + place.height / 2;
      const room = place.column === 1 ? width / 2 - 60 - xs[0]! : xs[0]! - 14;
      const anchor = place.column === 0 ? x - 8 : x + BAR + 8;
      const unit = place.column === 2 ? "copies" : "messages";
      setText(label, clip(place.node.label, room / 7.4));
      setText(detail, place.column === 1 ? `${rate(place.node.rate)}/s` : clip(`${rate(place.node.rate)}/s${place.node.detail && ` · ${place.node.detail}`}`, room / 6.2));
      label.setAttribute("x", anchor.toFixed(1));
      label.setAttribute("y", (place.column === 1 ? middle + 4.5 : middle - 1.5).toFixed(1));
      const shift = place.column === 1 ? label.getComputedTextLength() + 8 : 0;
      detail.setAttribute("x", (anchor + shift).toFixed(1));
      detail.setAttribute("y", (place.column === 1 ? middle + 4.5 : middle + 11.5).toFixed(1));
      const what = ["publishes", "published", "receives"][place.column]!;
      element.setAttribute("aria-description", `${what} ${rate(place.node.rate)} ${unit} a second`);
      element.classList.toggle("nobody", place.column === 2 && place.node.id === NOBODY);
      element.classList.toggle("rest", place.node.id === OTHERS);
      const wanted: Element | null = before === null ? this.bars.firstElementChild : before.nextElementSibling;
      if (wanted !== element) this.bars.insertBefore(element, wanted);
      before = element;
    }
  }

  private newNode(id: string, place: Place): SVGGElement {
    const element = svg(
      "g",
      { class: `node column-${place.column}`, tabindex: 0, role: "button", "aria-pressed": "false" },
      svg("rect", { rx: 2 }),
      svg("text", { class: "label" }),
      svg("text", { class: "detail" }),
    );
    const point = (to: string | null) => (): void => {
      this.pointed = to;
      this.highlight();
    };
    element.addEventListener("pointerenter", point(id));
    element.addEventListener("pointerleave", point(null));
    element.addEventListener("focus", point(id));
    element.addEventListener("blur", point(null));
    element.addEventListener("click", () => this.pin(id));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.pin(id);
    });
    this.nodes.set(id, element);
    return element;
  }

  private drawRibbons(places: Map<string, Place>, xs: number[], links: Picture["links"], scales: readonly [number, number]): void {
    const seen = new Set<string>();
    links.forEach((list, half) => {
      const scale = scales[half as 0 | 1];
      const placed = list
        .map((link) => ({ link, from: places.get(`${half}${link.from}`), to: places.get(`${half + 1}${link.to}`) }))
        .filter((each): each is { link: Link; from: Place; to: Place } => each.from !== undefined && each.to !== undefined);
      placed.sort((a, b) => a.from.top - b.from.top || a.to.top - b.to.top);
      const starts = new Map(placed.map((each) => [each, take(each.from, 1, each.link.rate * scale)]));
      placed.sort((a, b) => a.to.top - b.to.top || a.from.top - b.from.top);
      for (const each of placed) {
        const wide = Math.max(1.2, each.link.rate * scale);
        const id = `${half}${each.link.from}\u0000${each.link.to}`;
        seen.add(id);
        const path = this.paths.get(id) ?? this.newPath(id, half, each.link);
        const a = starts.get(each)! + wide / 2;
        const b = take(each.to, 0, each.link.rate * scale) + wide / 2;
        const [x, y] = [xs[half]! + BAR, xs[half + 1]!];
        const bend = (x + y) / 2;
        path.setAttribute("d", `M${x} ${a.toFixed(1)}C${bend} ${a.toFixed(1)} ${bend} ${b.toFixed(1)} ${y} ${b.toFixed(1)}`);
        path.setAttribute("stroke-width", wide.toFixed(1));
      }
    });
    for (const [id, path] of this.paths) {
      if (seen.has(id)) continue;
      path.remove();
      this.paths.delete(id);
    }
  }

  private newPath(id: string, half: number, link: Link): SVGPathElement {
    const path = svg("path", { class: half === 1 && link.to === NOBODY ? "nobody" : null });
    path.dataset.from = `${half}${link.from}`;
    path.dataset.to = `${half + 1}${link.to}`;
    this.paths.set(id, path);
    this.ribbons.append(path);
    return path;
  }

  private pin(id: string | null): void {
    this.pinned = this.pinned === id ? null : id;
    this.highlight();
  }

  /** Emphasise the links of the node in question, and through a prefix those behind it. */
  private highlight(): void {
    const id = this.pointed ?? this.pinned;
    const lit = new Set<string>(id === null ? [] : [id]);
    if (id !== null) {
      const middles = id.startsWith("1") ? new Set([id]) : new Set<string>();
      for (const path of this.paths.values()) {
        if (path.dataset.from === id) middles.add(path.dataset.to!);
        if (path.dataset.to === id) middles.add(path.dataset.from!);
      }
      for (const path of this.paths.values()) {
        const { from, to } = path.dataset as { from: string; to: string };
        const isLit = id.startsWith("1")
          ? from === id || to === id
          : (from === id || to === id || (middles.has(from) && id.startsWith("0")) || (middles.has(to) && id.startsWith("2")));
        path.classList.toggle("lit", isLit);
        if (isLit) lit.add(from).add(to);
      }
    } else {
      for (const path of this.paths.values()) path.classList.remove("lit");
    }
    this.root.classList.toggle("focus", id !== null);
    for (const [each, element] of this.nodes) {
      element.classList.toggle("lit", lit.has(each));
      element.setAttribute("aria-pressed", String(each === this.pinned));
    }
  }

  private table(): void {
    const table = byId<HTMLTableElement>("talk-table");
    if (!table.closest("details")?.open) return;
    const names = this.picture.columns.map((column) => new Map(column.map((node) => [node.id, node])));
    const text = (at: number, id: string): string => {
      const node = names[at]?.get(id);
      return node === undefined ? id : node.detail ? `${node.label} (${node.detail})` : node.label;
    };
    const rows: string[][] = [];
    const [left, right] = this.picture.links;
    for (const link of [...left].sort((a, b) => b.rate - a.rate)) rows.push([text(0, link.from), "publishes", text(1, link.to), rate(link.rate)]);
    for (const link of [...right].sort((a, b) => b.rate - a.rate)) rows.push([text(2, link.to), "receives", text(1, link.from), rate(link.rate)]);
    fillTable(table, [{ text: "Client" }, { text: "" }, { text: "Prefix" }, { text: "A second", isNumber: true }].map((head, at) => (at === 1 ? { text: "Does" } : head)), rows);
  }
}

function take(place: Place, side: 0 | 1, height: number): number {
  const at = place.next[side];
  place.next[side] += height;
  return Math.min(at, place.top + Math.max(0, place.height - 1.2));
}

function clip(text: string, most: number): string {
  const length = Math.max(4, Math.floor(most));
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}
