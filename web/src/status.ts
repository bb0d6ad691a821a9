// The status line: what the bus does now, and how far it is from its limits.

import { byId, h, setText, svg } from "./dom";
import { bytes, count, duration, rate } from "./format";
import type { Sample, Status } from "./types";

const SPARK = 60;
type Tone = "" | "warn" | "bad";

interface Tile {
  element: HTMLElement;
  figure: HTMLElement;
  unit: HTMLElement;
  note: HTMLElement;
  spark: SVGPathElement | null;
  meter: HTMLElement | null;
}

/** The rates between two samples, a second: published, delivered, dropped, conflated, unrouted. */
export function ratesBetween(before: Sample, after: Sample): number[] {
  const seconds = Math.max(0.1, after[0] - before[0]);
  const of = (at: 1 | 2 | 3 | 4 | 5): number => Math.max(0, (after[at] - before[at]) / seconds);
  return [of(1), Math.max(0, of(2) - of(3) - of(4)), of(3), of(4), of(5)];
}

export class StatusLine {
  private readonly tiles = new Map<string, Tile>();
  private readonly history: number[][] = [];

  constructor() {
    for (const [name, label, hasSpark, hasMeter] of [
      ["published", "Published", true, false],
      ["delivered", "Delivered", true, false],
      ["dropped", "Dropped", true, false],
      ["unrouted", "Nobody subscribed", true, false],
      ["lagging", "Lagging", false, false],
      ["held", "Held", false, false],
      ["queue", "Queues", false, true],
      ["clients", "Clients", false, true],
    ] as const) {
      this.add(name, label, hasSpark, hasMeter);
    }
  }

  private add(name: string, label: string, hasSpark: boolean, hasMeter: boolean): void {
    const figure = h("span", { class: "figure" }, "–");
    const unit = h("span", { class: "unit" });
    const note = h("span", { class: "note" });
    const spark = hasSpark ? svg("path") : null;
    const meter = hasMeter
      ? h("span", { class: "meter", role: "meter", "aria-label": `${label} against the limit`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 }, h("i"))
      : null;
    const element = h(
      "div",
      { class: "tile", "data-tile": name },
      h("dt", {}, label),
      h(
        "dd",
        {},
        h("span", { class: "line" }, figure, unit),
        note,
        spark && svg("svg", { class: "spark", viewBox: `0 0 ${SPARK - 1} 16`, preserveAspectRatio: "none", "aria-hidden": "true" }, spark),
        meter,
      ),
    );
    byId("tiles").append(element);
    this.tiles.set(name, { element, figure, unit, note, spark, meter });
  }

  private set(name: string, figure: string, unit: string, note: string, tone: Tone = ""): void {
    const tile = this.tiles.get(name)!;
    setText(tile.figure, figure);
    setText(tile.unit, unit);
    setText(tile.note, note);
    tile.element.dataset.tone = tone;
  }

  private meter(name: string, part: number, text: string): void {
    const meter = this.tiles.get(name)!.meter!;
    const percent = Math.min(100, Math.round(part * 100));
    meter.setAttribute("aria-valuenow", String(percent));
    meter.setAttribute("aria-valuetext", text);
    (meter.firstElementChild as HTMLElement).style.width = `${Math.max(part > 0 ? 1.5 : 0, percent)}%`;
  }

  reset(): void {
    this.history.length = 0;
    for (const name of this.tiles.keys()) this.set(name, "–", "", "");
  }

  rates(rates: number[]): void {
    this.history.push(rates);
    if (this.history.length > SPARK) this.history.shift();
    for (const [name, at] of [["published", 0], ["delivered", 1], ["dropped", 2], ["unrouted", 4]] as const) {
      const values = this.history.map((each) => each[at] ?? 0);
      const top = Math.max(...values, 1e-9);
      const from = SPARK - values.length;
      const way = values.map((value, x) => `${x ? "L" : "M"}${from + x} ${(15 - (13 * value) / top).toFixed(1)}`).join("");
      this.tiles.get(name)!.spark!.setAttribute("d", way);
    }
  }

  show(status: Status): void {
    const now = this.history.at(-1) ?? [0, 0, 0, 0, 0];
    const total = (name: string): number => Number(status.counters[name] ?? 0);
    const [published = 0, delivered = 0, dropped = 0, conflated = 0, unrouted = 0] = now;
    this.set("published", rate(published), "/s", `${count(total("published"))} in ${duration(status.time - status.started_at)}`);
    this.set("delivered", rate(delivered), "/s", published ? `${(delivered / published).toFixed(1)} copies each` : "copies to receivers");
    this.set(
      "dropped",
      rate(dropped),
      "/s",
      conflated >= 0.05 ? `${rate(conflated)}/s replaced by newer` : `${count(total("dropped"))} so far`,
      dropped > 0 ? "bad" : "",
    );
    this.set("unrouted", rate(unrouted), "/s", `${count(total("unrouted"))} so far`, unrouted > 0 ? "warn" : "");
    const lagging = status.queues ?? 0;
    this.set("lagging", count(lagging), lagging === 1 ? "client" : "clients", lagging ? "have a queue" : "all keep up", lagging ? "warn" : "");
    const held = status.held_publishers ?? 0;
    this.set("held", count(held), held === 1 ? "publisher" : "publishers", held ? "wait for a receiver" : "none waits", held ? "warn" : "");
    const part = status.queue_bytes / (status.queue_limit_bytes || 1);
    this.set("queue", bytes(status.queue_bytes), "", `of ${bytes(status.queue_limit_bytes)}`, part > 0.9 ? "bad" : part > 0.5 ? "warn" : "");
    this.meter("queue", part, `${bytes(status.queue_bytes)} of ${bytes(status.queue_limit_bytes)}`);
    const full = status.clients / (status.clients_limit || 1);
    const users = `${count(status.users)} user${status.users === 1 ? "" : "s"}`;
    this.set("clients", count(status.clients), "", `${users}, limit ${count(status.clients_limit)}`, full > 0.9 ? "bad" : "");
    this.meter("clients", full, `${status.clients} of ${status.clients_limit}`);
  }
}
