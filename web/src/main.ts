// The page: one stream of events, and the panels that show it.

import "uplot/dist/uPlot.min.css";
import "./app.css";
import { ClientsTable } from "./clients";
import { DeniedTable } from "./denied";
import { byId, setText } from "./dom";
import type { Encoding } from "./format";
import { PublishForm } from "./publish";
import { showQueues } from "./queues";
import { Rates } from "./rates";
import { Stream, takeToken, type State } from "./server";
import { StatusLine, ratesBetween } from "./status";
import { TailView } from "./tail";
import { TalkDrawing } from "./talk";
import { TreeView } from "./tree";
import type { Events, Sample, Status } from "./types";
import { UnroutedTable } from "./unrouted";

const VIEWS = ["overview", "clients", "messages"] as const;
type View = (typeof VIEWS)[number];

const token = takeToken();
const statusLine = new StatusLine();
const rates = new Rates();
const denied = new DeniedTable();
const publish = new PublishForm();
const clients = new ClientsTable(() => show());
const talk = new TalkDrawing((depth) => {
  settings.depth = depth;
  show();
});
const pick = (key: string, payload?: string, encoding?: Encoding): void => publish.fill(key, payload, encoding);
const unrouted = new UnroutedTable((key) => {
  pick(key);
  location.hash = "messages";
});
const tree = new TreeView((node) => pick(node.encoding === "text" ? node.key : "", node.value, node.valueEncoding));
const tail = new TailView(pick);
const settings = { depth: 2, tail: "", keys: "" };
let last: Sample | null = null;
let view: View = "overview";
let refusal = "";
let busProblem = "";

const stream = new Stream(onEvent, onState);

/** Ask the server for what the view shows, and for nothing else. */
function show(): void {
  const wanted: Record<View, Record<string, string>> = {
    overview: { depth: String(settings.depth) },
    clients: { clients: clients.sort, limit: String(clients.limit) },
    messages: { tail: settings.tail, keys: settings.keys },
  };
  stream.show(wanted[view]);
}

function sampleOf(status: Status): Sample {
  const total = (name: string): number => Number(status.counters[name] ?? 0);
  return [status.time, total("published"), total("routed"), total("dropped"), total("conflated"), total("unrouted"), status.queue_bytes];
}

function addSample(sample: Sample): void {
  if (last !== null && sample[0] <= last[0]) return;
  if (last !== null) {
    const isNew = sample[1] < last[1]; // the bus was started again
    const isGap = sample[0] - last[0] > 5;
    const found = isNew ? [0, 0, 0, 0, 0] : ratesBetween(last, sample);
    rates.add(sample[0], isGap || isNew ? [null, null, null, null, null] : found);
    statusLine.rates(found);
  }
  last = sample;
}

function onEvent<K extends keyof Events>(name: K, value: Events[K]): void {
  const handlers: { [N in keyof Events]: (value: Events[N]) => void } = {
    hello: (hello) => {
      setText(byId("address"), hello.bus);
      byId("address").title = `${hello.bus}, as ${hello.user}; sbus ${hello.version}`;
      document.title = `sbus · ${hello.bus.split("/").at(-1)}`;
    },
    history: (samples) => {
      for (const sample of samples) addSample(sample);
      rates.draw();
    },
    admin: (admin) => {
      refusal = admin.status === 200 ? "" : admin.detail;
      if (refusal !== "") statusLine.reset();
      problem();
    },
    status: (status) => {
      addSample(sampleOf(status));
      statusLine.show(status);
      if (view === "overview") {
        rates.draw();
        unrouted.draw();
        denied.show(status);
      }
    },
    clients: (found) => clients.add(found),
    talk: (found) => talk.add(found),
    unrouted: (found) => {
      unrouted.add(found);
      unrouted.draw();
    },
    queues: showQueues,
    bus: (bus) => {
      busProblem = bus.problem || (bus.state === "connected" ? "" : "The bus does not answer; the page goes on when it does.");
      problem();
    },
    tail: (found) => tail.add(found),
    keys: (found) => tree.add(found),
    missed: (found) => {
      tail.addMissed(found.messages);
      tree.addMissed(found.messages);
    },
  };
  handlers[name](value);
}

function problem(): void {
  const text = [refusal && `The admin socket says: ${refusal}. Messages can still be seen and published.`, busProblem]
    .filter(Boolean)
    .join(" ");
  const element = byId("problem");
  setText(element, text);
  element.hidden = text === "";
  document.body.classList.toggle("refused", refusal !== "");
}

function onState(state: State, detail: string): void {
  const words: Record<State, string> = {
    connecting: "Connecting",
    connected: "Live",
    lost: "Lost; trying again",
    refused: "Refused",
  };
  const element = byId("live");
  element.dataset.state = state;
  setText(element, words[state]);
  busProblem = detail === "" ? "" : `${detail[0]!.toUpperCase()}${detail.slice(1)}.`;
  problem();
}

function route(): void {
  const wanted = location.hash.slice(1);
  view = VIEWS.find((name) => name === wanted) ?? "overview";
  for (const element of document.querySelectorAll<HTMLElement>(".view")) element.hidden = element.dataset.view !== view;
  for (const link of document.querySelectorAll<HTMLElement>("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (token !== null) show();
  if (view === "overview") {
    rates.draw();
    talk.draw();
  }
}

function onPattern(form: string, input: string, set: (pattern: string) => void): void {
  const apply = (): void => {
    set(byId<HTMLInputElement>(input).value);
    show();
  };
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  byId(input).addEventListener("change", apply);
}

function setTheme(theme: string): void {
  if (theme === "") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("sbus-theme", theme);
  rates.recolor();
}

onPattern("tail-form", "tail-pattern", (pattern) => {
  if (settings.tail !== pattern) tail.clear();
  settings.tail = pattern;
});
onPattern("keys-form", "keys-pattern", (pattern) => {
  if (settings.keys !== pattern) tree.clear();
  settings.keys = pattern;
});
const theme = byId<HTMLSelectElement>("theme");
theme.value = localStorage.getItem("sbus-theme") ?? "";
theme.addEventListener("change", () => setTheme(theme.value));
setTheme(theme.value);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => rates.recolor());
window.addEventListener("hashchange", route);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  byId("main").focus();
});
if (token === null) onState("refused", "this page needs the link that sbus web has printed: open it once more");
route();
