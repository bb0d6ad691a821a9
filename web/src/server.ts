// The server of this page: its token, its requests and its stream of events.

import type { Events } from "./types";

const KEY = "sbus-token";
const LONGEST_WAIT = 8000;

/** Take the token out of the link, so that neither the address bar nor the history shows it. */
export function takeToken(): string | null {
  const fragment = decodeURIComponent(location.hash.slice(1));
  if (fragment.length >= 40) {
    sessionStorage.setItem(KEY, fragment);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY);
}

const headers = (): HeadersInit => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` });

/** A refusal, with the server's words. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    detail: string,
  ) {
    super(detail);
  }
}

async function refusal(response: Response): Promise<Refusal> {
  try {
    const problem = (await response.json()) as { detail?: unknown };
    if (typeof problem.detail === "string") return new Refusal(response.status, problem.detail);
  } catch {
    // The body is no JSON.
  }
  return new Refusal(response.status, `the server answered ${response.status}`);
}

export async function get<T>(path: string, parameters: Record<string, string>): Promise<T> {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return (await response.json()) as T;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  return (await response.json()) as T;
}

export type State = "connecting" | "connected" | "lost" | "refused";
type OnEvent = <K extends keyof Events>(name: K, value: Events[K]) => void;

/** The one stream. `show` opens it with other parameters; it comes back by itself after a loss. */
export class Stream {
  private abort: AbortController | null = null;
  private parameters = "";

  constructor(
    private readonly onEvent: OnEvent,
    private readonly onState: (state: State, detail: string) => void,
  ) {}

  show(parameters: Record<string, string>): void {
    const text = new URLSearchParams(parameters).toString();
    if (this.abort !== null && text === this.parameters) return;
    this.parameters = text;
    this.abort?.abort();
    this.abort = new AbortController();
    void this.run(text, this.abort.signal);
  }

  private async run(parameters: string, signal: AbortSignal): Promise<void> {
    let wait = 500;
    while (!signal.aborted) {
      try {
        const response = await fetch(`/api/events?${parameters}`, { headers: headers(), signal, cache: "no-store" });
        if (!response.ok || response.body === null) throw await refusal(response);
        wait = 500;
        this.onState("connected", "");
        await this.read(response.body, signal);
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && error.status < 500) {
          this.onState("refused", error.message);
          return;
        }
        this.onState("lost", error instanceof Refusal ? error.message : "sbus web does not answer; it may have been stopped");
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, LONGEST_WAIT);
    }
  }

  private async read(body: ReadableStream<Uint8Array>, signal: AbortSignal): Promise<void> {
    const reader = body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) this.event(part);
    }
  }

  private event(text: string): void {
    const at = text.indexOf("\ndata: ");
    if (!text.startsWith("event: ") || at < 0) return;
    const name = text.slice(7, at) as keyof Events;
    this.onEvent(name, JSON.parse(text.slice(at + 7)) as never);
  }
}
