// The live tail: the newest messages, one line each; a line opens to show its payload.

import { byId, h, perFrame, setText } from "./dom";
import { bytes, count, hex, json, oneLine, timeWithMs, toBytes, type Encoding } from "./format";
import type { Tail, TailLine } from "./types";

const MOST = 400;
const WAITING = 2000;
const LONGEST = 240;

type Format = "auto" | "json" | "hex";

export class TailView {
  private readonly target = byId("lines");
  private waiting: TailLine[] = [];
  private isPaused = false;
  private whilePaused = 0;
  private skipped = 0;
  private missed = 0;
  private format: Format = "auto";
  private readonly draw = perFrame(() => this.paint());

  constructor(private readonly onPick: (key: string, payload: string, encoding: Encoding) => void) {
    const pause = byId<HTMLButtonElement>("tail-pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      this.whilePaused = 0;
      this.draw();
    });
    byId("tail-clear").addEventListener("click", () => this.clear());
    byId("tail-find").addEventListener("input", () => this.filter());
    const format = byId<HTMLSelectElement>("tail-format");
    format.addEventListener("change", () => {
      this.format = format.value as Format;
      for (const line of this.target.querySelectorAll<HTMLDetailsElement>("details[open]")) this.fill(line);
    });
  }

  clear(): void {
    this.waiting = [];
    this.whilePaused = this.skipped = this.missed = 0;
    this.target.replaceChildren();
    this.draw();
  }

  add(event: Tail): void {
    if (this.isPaused) this.whilePaused += event.messages.length + event.skipped;
    else {
      this.waiting.push(...event.messages);
      this.skipped += event.skipped + Math.max(0, this.waiting.length - WAITING);
      this.waiting = this.waiting.slice(-WAITING);
    }
    this.draw();
  }

  addMissed(messages: number): void {
    this.missed += messages;
    this.draw();
  }

  private paint(): void {
    const isAtEnd = this.target.scrollHeight - this.target.scrollTop - this.target.clientHeight < 40;
    if (!this.isPaused && this.waiting.length > 0) {
      const lines = this.waiting.slice(-MOST).map((line) => this.line(line));
      this.waiting = [];
      this.target.append(...lines);
      while (this.target.childElementCount > MOST) this.target.firstElementChild!.remove();
      if (isAtEnd) this.target.scrollTop = this.target.scrollHeight;
    }
    byId("tail-empty").hidden = this.target.childElementCount > 0;
    const parts = [];
    if (this.isPaused) parts.push(`Paused; ${count(this.whilePaused)} messages since`);
    else parts.push(`The newest ${count(MOST)}`);
    const unseen = this.skipped + this.missed;
    if (unseen > 0) parts.push(`${count(unseen)} too fast to show`);
    setText(byId("tail-hint"), parts.join(", "));
  }

  private line(line: TailLine): HTMLDetailsElement {
    const [ms, key, keyEncoding, payload, encoding, size, isLast] = line;
    const element = h(
      "details",
      {},
      h(
        "summary",
        {},
        h("time", { class: "soft" }, isLast ? "last value" : timeWithMs(ms)),
        h("span", { class: "topic mono" }, oneLine(key, keyEncoding) || "(empty)"),
        h("span", { class: "payload mono" }, oneLine(payload.slice(0, LONGEST), encoding)),
        h("span", { class: "soft size" }, bytes(size)),
      ),
    );
    element.hidden = !matches(element, byId<HTMLInputElement>("tail-find").value);
    element.addEventListener("toggle", () => {
      if (element.open) this.fill(element, line);
    });
    return element;
  }

  private readonly lines = new WeakMap<HTMLDetailsElement, TailLine>();

  private fill(element: HTMLDetailsElement, given?: TailLine): void {
    const line = given ?? this.lines.get(element);
    if (line === undefined) return;
    this.lines.set(element, line);
    const [, key, keyEncoding, payload, encoding, size] = line;
    const data = toBytes(payload, encoding);
    const pretty = encoding === "text" ? json(payload) : null;
    const text = this.format === "hex" || (encoding === "base64" && this.format === "auto") ? hex(data) : this.format === "json" && pretty !== null ? pretty : encoding === "text" ? payload : hex(data);
    const notes = [];
    if (data.length < size) notes.push(`the first ${bytes(data.length)} of ${bytes(size)}`);
    if (this.format === "json" && pretty === null) notes.push("no JSON");
    element.querySelector(".opened")?.remove();
    element.append(
      h(
        "div",
        { class: "opened" },
        h("pre", { tabindex: 0, "aria-label": "Payload" }, text || "(empty)"),
        h(
          "p",
          {},
          h("button", { type: "button", class: "button", click: () => this.onPick(keyEncoding === "text" ? key : "", payload, encoding) }, "Use in Publish"),
          notes.length > 0 ? h("span", { class: "soft" }, notes.join(", ")) : null,
        ),
      ),
    );
  }

  private filter(): void {
    const words = byId<HTMLInputElement>("tail-find").value;
    for (const line of this.target.children) (line as HTMLElement).hidden = !matches(line, words);
  }
}

function matches(line: Element, words: string): boolean {
  return words === "" || (line.firstElementChild?.textContent ?? "").toLowerCase().includes(words.toLowerCase());
}
