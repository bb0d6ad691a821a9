// The form to publish a message.

import { byId } from "./dom";
import { json, toBytes, type Encoding } from "./format";
import { get, post } from "./server";

interface Explained {
  total: number;
  receivers: { client: number; pid: number; uid: number; pattern: string | null }[];
}

export class PublishForm {
  private readonly key = byId<HTMLInputElement>("publish-key");
  private readonly payload = byId<HTMLTextAreaElement>("publish-payload");
  private readonly encoding = byId<HTMLSelectElement>("publish-encoding");
  private readonly result = byId("publish-result");

  constructor() {
    byId<HTMLFormElement>("publish-form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.publish();
    });
    byId("publish-explain").addEventListener("click", () => void this.explain());
    this.payload.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        byId<HTMLFormElement>("publish-form").requestSubmit();
      }
    });
  }

  /** Fill in a message that was picked elsewhere. */
  fill(key: string, payload?: string, encoding: Encoding = "text"): void {
    this.key.value = key;
    if (payload !== undefined) {
      this.payload.value = encoding === "text" ? payload : Array.from(toBytes(payload, encoding), (b) => b.toString(16).padStart(2, "0")).join(" ");
      this.encoding.value = encoding === "text" ? "text" : "hex";
    }
    this.say("");
  }

  private say(text: string, tone = ""): void {
    this.result.textContent = text;
    this.result.dataset.tone = tone;
  }

  private async publish(): Promise<void> {
    const kind = this.encoding.value;
    if (kind === "json" && json(this.payload.value) === null) {
      this.say("The payload is no JSON: mend it, or send it as text.", "bad");
      return;
    }
    try {
      const found = await post<{ has_subscribers: boolean | null }>("/api/publish", {
        key: this.key.value,
        payload: this.payload.value,
        encoding: kind === "hex" ? "hex" : "text",
      });
      if (found.has_subscribers === false) this.say("Published. Nobody subscribes to this key.", "warn");
      else this.say(found.has_subscribers ? "Published." : "Published. The bus does not say whether anybody subscribes.", "good");
    } catch (error) {
      this.say(`Not published: ${(error as Error).message}`, "bad");
    }
  }

  private async explain(): Promise<void> {
    try {
      const found = await get<Explained>("/api/explain", { key: this.key.value });
      if (found.total === 0) this.say("Nobody would get it.", "warn");
      else {
        const named = found.receivers.slice(0, 5).map((each) => `#${each.client} (PID ${each.pid}) by ${each.pattern ?? "a secret pattern"}`);
        this.say(`${found.total} client${found.total === 1 ? "" : "s"} would get it: ${named.join(", ")}${found.total > 5 ? ", …" : ""}`);
      }
    } catch (error) {
      this.say((error as Error).message, "bad");
    }
  }
}

