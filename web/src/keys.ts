// The keys of the bus as a tree, with rates and last values: the model.

import type { Encoding } from "./format";
import type { Keys } from "./types";

/** Seconds after which a rate has fallen to a third. */
const SMOOTH = 5;

let made = 0;

export interface KeyNode {
  /** Names the node's row, wherever it stands. */
  number: number;
  name: string;
  key: string;
  encoding: Encoding;
  depth: number;
  parent: KeyNode | null;
  children: Map<string, KeyNode> | null;
  /** Whether a message was published with exactly this key. */
  isKey: boolean;
  own: number;
  rate: number;
  /** Keys at and below this node. */
  count: number;
  value: string;
  valueEncoding: Encoding;
  size: number;
  at: number;
}

function node(name: string, key: string, encoding: Encoding, parent: KeyNode | null): KeyNode {
  made += 1;
  return {
    number: made, name, key, encoding, parent, depth: parent === null ? 0 : parent.depth + 1, children: null, isKey: false,
    own: 0, rate: 0, count: 0, value: "", valueEncoding: "text", size: 0, at: 0,
  };
}

export class KeyTree {
  readonly root = node("", "", "text", null);
  private readonly keys = new Map<string, KeyNode>();
  private decayed = 0;
  private began = 0;

  get size(): number {
    return this.keys.size;
  }

  clear(): void {
    this.keys.clear();
    this.root.children = null;
  }

  add(event: Keys, now: number): void {
    if (this.keys.size === 0) this.began = now - 1;
    for (const [key, encoding] of event.removed) this.remove(encoding + key);
    for (const [key, encoding, messages, value, valueEncoding, size] of event.keys) {
      const found = this.keys.get(encoding + key) ?? this.insert(key, encoding);
      found.own += messages / SMOOTH;
      found.value = value;
      found.valueEncoding = valueEncoding;
      found.size = size;
      found.at = now;
    }
  }

  /** Let rates fall, and add them up. */
  settle(now: number): void {
    const factor = this.decayed === 0 ? 1 : Math.exp(-(now - this.decayed) / SMOOTH);
    this.decayed = now;
    // In the first seconds there is less to average over.
    sum(this.root, factor, 1 - Math.exp(-Math.max(0.5, now - this.began) / SMOOTH));
  }

  private insert(key: string, encoding: Encoding): KeyNode {
    const segments = encoding === "text" ? key.split("/") : [key];
    let at = this.root;
    let path = "";
    segments.forEach((segment, i) => {
      path = i === 0 ? segment : `${path}/${segment}`;
      at.children ??= new Map();
      let child = at.children.get(segment);
      if (child === undefined) {
        child = node(segment, path, encoding, at);
        at.children.set(segment, child);
      }
      at = child;
    });
    at.isKey = true;
    this.keys.set(encoding + key, at);
    return at;
  }

  private remove(id: string): void {
    let at: KeyNode | null = this.keys.get(id) ?? null;
    if (at === null) return;
    this.keys.delete(id);
    at.isKey = false;
    while (at !== null && at.parent !== null && !at.isKey && (at.children === null || at.children.size === 0)) {
      at.parent.children?.delete(at.name);
      at = at.parent;
    }
  }
}

function sum(at: KeyNode, factor: number, weight: number): void {
  at.own *= factor;
  if (at.own < 0.004) at.own = 0;
  let rate = at.own / weight;
  let count = at.isKey ? 1 : 0;
  if (at.children !== null) {
    for (const child of at.children.values()) {
      sum(child, factor, weight);
      rate += child.rate;
      count += child.count;
      if (!at.isKey && child.at > at.at) at.at = child.at;
    }
  }
  at.rate = rate;
  at.count = count;
}
