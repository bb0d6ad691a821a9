// "Published and nobody subscribed": the keys of messages that no client wanted.

import { byId, fillTable, h } from "./dom";
import { bytes, count, duration, rate } from "./format";
import type { Unrouted } from "./types";

const MOST = 500;
const SHOWN = 100;

interface Row {
  messages: number;
  bytes: number;
  rate: number;
  at: number;
}

export class UnroutedTable {
  private readonly rows = new Map<string, Row>();

  constructor(private readonly onPick: (key: string) => void) {}

  add(event: Unrouted): void {
    const now = Date.now() / 1000;
    for (const row of this.rows.values()) row.rate *= 0.6;
    for (const { key, messages, bytes: size } of event.keys) {
      const row = this.rows.get(key) ?? { messages: 0, bytes: 0, rate: 0, at: now };
      row.messages += messages;
      row.bytes += size;
      row.rate += (0.4 * messages) / Math.max(0.1, event.seconds);
      row.at = now;
      this.rows.delete(key);
      this.rows.set(key, row);
    }
    for (const key of this.rows.keys()) {
      if (this.rows.size <= MOST) break;
      this.rows.delete(key);
    }
  }

  draw(): void {
    const now = Date.now() / 1000;
    const rows = [...this.rows].sort((a, b) => b[1].messages - a[1].messages).slice(0, SHOWN);
    byId("unrouted-empty").hidden = rows.length > 0;
    byId("unrouted-table").hidden = rows.length === 0;
    fillTable(
      byId<HTMLTableElement>("unrouted-table"),
      [{ text: "Key" }, { text: "Messages", isNumber: true }, { text: "Rate", isNumber: true }, { text: "Last", isNumber: true }],
      rows.map(([key, row]) => [
        key,
        count(row.messages),
        `${rate(row.rate < 0.05 ? 0 : row.rate)}/s`,
        now - row.at < 2 ? "now" : `${duration(now - row.at)} ago`,
      ]),
    );
    const body = byId<HTMLTableElement>("unrouted-table").tBodies[0];
    rows.forEach(([key, row], at) => {
      const cell = body?.rows[at]?.cells[0];
      if (cell === undefined) return;
      cell.className = "mono clip";
      cell.title = `${key} · ${bytes(row.bytes)}`;
      if (!(cell.firstChild instanceof HTMLButtonElement) || cell.firstChild.textContent !== key) {
        cell.replaceChildren(h("button", { type: "button", class: "link", click: () => this.onPick(key) }, key));
      }
    });
  }
}
