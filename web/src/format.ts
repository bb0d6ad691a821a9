// Numbers, sizes, times and payloads for people.

const plain = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (value: number): string => plain.format(value);

export function rate(value: number): string {
  if (value === 0) return "0";
  if (value < 0.05) return "<0.1";
  return value < 10 ? value.toFixed(1) : value < 10_000 ? plain.format(Math.round(value)) : short.format(value);
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export const time = (seconds: number): string => clock.format(seconds * 1000);

export function timeWithMs(ms: number): string {
  return `${clock.format(ms)}.${String(ms % 1000).padStart(3, "0")}`;
}

/** A key or payload as sent by the server: text, or base64. */
export type Encoding = "text" | "base64";

export function toBytes(text: string, encoding: Encoding): Uint8Array {
  return encoding === "text" ? new TextEncoder().encode(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

/** One line: control characters become visible. */
export function oneLine(text: string, encoding: Encoding): string {
  if (encoding === "base64") {
    const data = toBytes(text, encoding);
    return Array.from(data.subarray(0, 48), (b) => (b > 31 && b < 127 ? String.fromCharCode(b) : "·")).join("");
  }
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) =>
    c === "\n" ? "↵" : c === "\t" ? "⇥" : "·",
  );
}

export function hex(data: Uint8Array): string {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const part = data.subarray(at, at + 16);
    const codes = Array.from(part, (b) => b.toString(16).padStart(2, "0"));
    const signs = Array.from(part, (b) => (b > 31 && b < 127 ? String.fromCharCode(b) : ".")).join("");
    const halves = `${codes.slice(0, 8).join(" ").padEnd(23)}  ${codes.slice(8).join(" ").padEnd(23)}`;
    lines.push(`${at.toString(16).padStart(6, "0")}  ${halves}  ${signs}`);
  }
  return lines.join("\n");
}

/** Indented JSON, or null if the text is none. */
export function json(text: string): string | null {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}
