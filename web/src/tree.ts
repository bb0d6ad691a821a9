// The drawing of the tree of keys: only the rows in sight are in the document.

import { byId, h, perFrame, setText } from "./dom";
import { count, oneLine, rate } from "./format";
import { KeyTree, type KeyNode } from "./keys";
import type { Keys } from "./types";

const ROW = 26;
const MARGIN = 8;
const FRESH = 1.2;

export class TreeView {
  private readonly tree = new KeyTree();
  private readonly target = byId("tree");
  private readonly space = h("div", { class: "space", role: "presentation" });
  private readonly open = new Set<string>();
  private readonly elements = new Map<number, HTMLElement>();
  private rows: { node: KeyNode; index: number; of: number }[] = [];
  private active = "";
  private limit = 0;
  private more = 0;
  private isFull = false;
  private missed = 0;
  private readonly draw = perFrame(() => this.paint());

  constructor(private readonly onPick: (node: KeyNode) => void) {
    this.target.append(this.space);
    this.target.addEventListener("scroll", () => this.draw());
    this.target.addEventListener("keydown", (event) => this.onKey(event));
    this.target.addEventListener("focus", () => {
      if (this.active === "" && this.rows[0] !== undefined) this.activate(this.rows[0].node);
      this.draw();
    });
    this.space.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.draw()).observe(this.target);
    setInterval(() => {
      if (this.target.offsetParent === null) return;
      this.settle();
    }, 1000);
  }

  clear(): void {
    this.tree.clear();
    this.open.clear();
    this.isFull = false;
    this.missed = 0;
    this.settle();
  }

  add(event: Keys): void {
    const isFirst = this.tree.size === 0;
    this.tree.add(event, Date.now() / 1000);
    this.limit = event.limit;
    this.more = event.more;
    this.isFull ||= event.removed.length > 0;
    if (isFirst) this.openFirst();
    this.settle();
  }

  addMissed(messages: number): void {
    this.missed += messages;
  }

  private openFirst(): void {
    const tops = [...(this.tree.root.children?.values() ?? [])];
    if (tops.length <= 12) for (const top of tops) this.open.add(top.key);
  }

  private settle(): void {
    this.tree.settle(Date.now() / 1000);
    this.list();
    this.draw();
  }

  private list(): void {
    this.rows = [];
    const walk = (node: KeyNode): void => {
      const children = [...(node.children?.values() ?? [])].sort((a, b) => (a.name < b.name ? -1 : 1));
      children.forEach((child, index) => {
        this.rows.push({ node: child, index: index + 1, of: children.length });
        if (child.children !== null && child.children.size > 0 && this.open.has(child.key)) walk(child);
      });
    };
    walk(this.tree.root);
    byId("keys-empty").hidden = this.rows.length > 0;
    const parts = [`${count(this.tree.size)} key${this.tree.size === 1 ? "" : "s"}`];
    if (this.isFull) parts.push(`the ${count(this.limit)} newest are kept`);
    if (this.more > 0) parts.push(`${count(this.more)} to follow`);
    if (this.missed > 0) parts.push(`${count(this.missed)} messages too fast to see`);
    setText(byId("keys-hint"), parts.join(", "));
  }

  private paint(): void {
    this.space.style.height = `${this.rows.length * ROW}px`;
    const first = Math.max(0, Math.floor(this.target.scrollTop / ROW) - MARGIN);
    const last = Math.min(this.rows.length, Math.ceil((this.target.scrollTop + this.target.clientHeight) / ROW) + MARGIN);
    for (const [at, element] of this.elements) {
      if (at >= first && at < last) continue;
      element.remove();
      this.elements.delete(at);
    }
    const now = Date.now() / 1000;
    const top = Math.max(1, ...(this.tree.root.children ? [...this.tree.root.children.values()].map((each) => each.rate) : [1]));
    for (let at = first; at < last; at += 1) this.paintRow(at, now, top);
    const active = this.rows.findIndex((row) => row.node.key === this.active);
    if (active >= first && active < last) this.target.setAttribute("aria-activedescendant", `key-${this.rows[active]!.node.number}`);
    else this.target.removeAttribute("aria-activedescendant");
  }

  private paintRow(at: number, now: number, top: number): void {
    const { node, index, of } = this.rows[at]!;
    let element = this.elements.get(at);
    if (element === undefined) {
      element = h(
        "div",
        { class: "branch", role: "treeitem" },
        h("span", { class: "caret", "aria-hidden": "true" }),
        h("span", { class: "name mono" }),
        h("span", { class: "value mono" }),
        h("span", { class: "pace" }, h("i", { "aria-hidden": "true" }), h("b")),
      );
      element.style.top = `${at * ROW}px`;
      this.space.append(element);
      this.elements.set(at, element);
    }
    const isParent = node.children !== null && node.children.size > 0;
    const isOpen = isParent && this.open.has(node.key);
    const [caret, name, value, pace] = element.children as unknown as HTMLElement[];
    element.id = `key-${node.number}`;
    element.dataset.key = node.key;
    element.style.setProperty("--depth", String(node.depth - 1));
    element.setAttribute("aria-level", String(node.depth));
    element.setAttribute("aria-posinset", String(index));
    element.setAttribute("aria-setsize", String(of));
    element.setAttribute("aria-selected", String(node.key === this.active));
    if (isParent) element.setAttribute("aria-expanded", String(isOpen));
    else element.removeAttribute("aria-expanded");
    setText(caret!, isParent ? (isOpen ? "▾" : "▸") : "");
    setText(name!, oneLine(node.name, node.encoding) || "(empty)");
    const text = node.isKey ? oneLine(node.value, node.valueEncoding) || "(empty)" : isOpen ? "" : `${count(node.count)} key${node.count === 1 ? "" : "s"}`;
    setText(value!, text);
    value!.classList.toggle("soft", !node.isKey || node.size === 0);
    setText(pace!.lastElementChild!, node.rate >= 0.05 ? `${rate(node.rate)}/s` : "");
    const part = node.rate < 0.05 ? 0 : Math.max(3, (100 * Math.log1p(node.rate)) / Math.log1p(top));
    (pace!.firstElementChild as HTMLElement).style.width = `${part.toFixed(0)}%`;
    element.classList.toggle("fresh", now - node.at < FRESH);
  }

  private activate(node: KeyNode): void {
    this.active = node.key;
    const at = this.rows.findIndex((row) => row.node === node);
    if (at >= 0) {
      if (at * ROW < this.target.scrollTop) this.target.scrollTop = at * ROW;
      if ((at + 1) * ROW > this.target.scrollTop + this.target.clientHeight) {
        this.target.scrollTop = (at + 1) * ROW - this.target.clientHeight;
      }
    }
    this.draw();
  }

  private toggle(node: KeyNode, isOpen: boolean): void {
    if (isOpen) this.open.add(node.key);
    else this.open.delete(node.key);
    this.list();
    this.draw();
  }

  private onClick(event: Event): void {
    const key = (event.target as Element).closest<HTMLElement>(".branch")?.dataset.key;
    const row = this.rows.find((each) => each.node.key === key);
    if (row === undefined) return;
    this.activate(row.node);
    if (row.node.children !== null && row.node.children.size > 0) this.toggle(row.node, !this.open.has(row.node.key));
    if (row.node.isKey) this.onPick(row.node);
  }

  private onKey(event: KeyboardEvent): void {
    const at = this.rows.findIndex((row) => row.node.key === this.active);
    const node = this.rows[at]?.node;
    if (node === undefined) return;
    const page = Math.max(1, Math.floor(this.target.clientHeight / ROW) - 1);
    const isOpen = this.open.has(node.key);
    const hasChildren = node.children !== null && node.children.size > 0;
    const go = (to: number): void => this.activate(this.rows[Math.max(0, Math.min(this.rows.length - 1, to))]!.node);
    switch (event.key) {
      case "ArrowDown": go(at + 1); break;
      case "ArrowUp": go(at - 1); break;
      case "PageDown": go(at + page); break;
      case "PageUp": go(at - page); break;
      case "Home": go(0); break;
      case "End": go(this.rows.length - 1); break;
      case "ArrowRight":
        if (hasChildren && !isOpen) this.toggle(node, true);
        else if (hasChildren) go(at + 1);
        break;
      case "ArrowLeft":
        if (hasChildren && isOpen) this.toggle(node, false);
        else if (node.parent !== null && node.parent.parent !== null) this.activate(node.parent);
        break;
      case "Enter": case " ":
        if (node.isKey) this.onPick(node);
        else if (hasChildren) this.toggle(node, !isOpen);
        break;
      default: return;
    }
    event.preventDefault();
  }
}
