"use strict";
// The page works without this: it filters by prefix, adds local times, shows the values of a window, and zooms.

// --- local times beside UTC
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const offset = (at) => new Date(at).getTimezoneOffset();
const isAway = (at) => offset(at) !== 0;
const local = (at, style) => new Date(at).toLocaleString([], style);
// In the night of a clock change, an hour comes twice or not at all: then each time names its zone.
const { start: begin, end: finish } = document.querySelector(".local").dataset;
const SHIFT = offset(2 * begin - finish) !== offset(+finish) || offset(+begin) !== offset(+finish) ? { timeZoneName: "short" } : {};
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", ...SHIFT };
const DAY = { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...SHIFT };
for (const place of document.querySelectorAll("[data-start]")) {
  const start = +place.dataset.start, end = place.dataset.end && +place.dataset.end;
  if (!isAway(start) && !(end && isAway(end))) { continue; }
  const text = local(start, place.hidden ? DAY : CLOCK) + (end ? " to " + local(end, place.hidden ? DAY : CLOCK) : "");
  if (place.hidden) {
    place.textContent = text + " in your time zone" + (zone ? " (" + zone + ")" : "");
    place.hidden = false;
  } else {
    const here = document.createElement("span");
    here.className = "here"; here.textContent = " (" + text + " here)";
    place.append(here);
  }
}

// --- charts
const charts = [...document.querySelectorAll(".chart[data-of]")].map((chart) => {
  const data = JSON.parse(document.getElementById(chart.dataset.of).textContent);
  return { chart, data, svg: chart.querySelector("svg"), marks: [...chart.querySelectorAll(".band")].map((mark) =>
    ({ mark, left: parseFloat(mark.style.left) / 100, width: parseFloat(mark.style.width) / 100 })) };
});
let from = 0, to = charts.length ? charts[0].data.times.length : 0, prefix = "";
const whole = to;
const belongs = (name) => name.startsWith(prefix) || (name.endsWith("/") && prefix.startsWith(name));
const make = (kind, inside, text = "") => {
  const part = document.createElement("div");
  part.className = kind; part.textContent = text;
  inside.append(part);
  return part;
};
const nice = (most, count) => {
  const step = 10 ** Math.floor(Math.log10(most / count));
  return [1, 2, 5, 10].map((n) => n * step).find((n) => most / n <= count) || step;
};
const steps = (heights) => heights.map((y) => "V" + y + "h1").join("");
const draw = ({ chart, data, svg, marks }) => {
  const at = [...Array(to - from).keys()].map((i) => i + from), seconds = data.width / 1000;
  const shown = data.layers.map((layer, i) => (prefix && !(data.labels[i] !== null && belongs(data.labels[i])) ? null : layer));
  const sums = at.map((i) => shown.reduce((sum, layer) => sum + (layer ? layer[i] : 0), 0) / seconds);
  const before = prefix ? null : data.before;
  const most = Math.max(...sums, ...at.map((i) => (before ? before[i] / seconds : 0))) || 1;
  const step = nice(most, 4), top = Math.ceil(most / step - 1e-9) * step, scale = data.height / top;
  let low = at.map(() => 0);
  svg.replaceChildren(svg.firstElementChild);
  svg.setAttribute("viewBox", "0 0 " + at.length + " " + data.height);
  const path = (kind, d) => {
    const one = document.createElementNS(svg.namespaceURI, "path");
    one.setAttribute("class", kind); one.setAttribute("d", d);
    svg.append(one);
  };
  shown.forEach((layer, number) => {
    if (!layer) { return; }
    const high = at.map((i, n) => low[n] + layer[i] / seconds);
    const y = (values) => values.map((v) => Math.round(data.height - v * scale));
    const back = y(low).reverse().map((v) => "V" + v + "h-1").join("");
    path("area n" + number, "M0 " + y(high)[0] + steps(y(high)) + back + "z");
    low = high;
  });
  if (before) { path("ghost-line", "M0 " + Math.round(data.height - before[from] / seconds * scale) + steps(at.map((i) => Math.round(data.height - before[i] / seconds * scale)))); }
  chart.querySelectorAll(".y, .rule, .x").forEach((old) => old.remove());
  let power = 0, unit = 1;
  while (top / unit >= 1000 && power < data.units.length - 1) { unit *= 1000; power += 1; }
  for (let value = 0; value <= top * 1.0001; value += step) {
    make(value ? "rule" : "rule zero", chart).style.bottom = 100 * value / top + "%";
    make("y", chart, value ? +(value / unit).toPrecision(6) + data.units[power] : "0").style.bottom = 100 * value / top + "%";
  }
  const start = data.start + from * data.width, length = at.length * data.width;
  const minutes = [1 / 600, 1 / 60, 1 / 12, 1 / 4, 1, 5, 15, 30, 60, 180, 360, 720, 1440, 2880, 10080, 40320, 262080];
  const distance = 60000 * (minutes.find((m) => length / m / 60000 <= 8) || 524160);
  for (let time = Math.ceil(start / distance) * distance, n = 0; time < start + length * 0.985; time += distance, n += 1) {
    const iso = new Date(time).toISOString(), isDay = time % 86400000 === 0;
    const text = isDay ? iso.slice(5, 10) : distance < 1000 ? iso.slice(11, 21) : distance < 60000 ? iso.slice(11, 19) : iso.slice(11, 16);
    const kind = time === start ? " first" : "";
    if (kind || time > start + length * 0.01) { make("x" + kind + (isDay ? " day" : n % 2 ? " odd" : ""), chart, text).style.left = 100 * (time - start) / length + "%"; }
  }
  for (const { mark, left, width } of marks) {
    const a = Math.max(0, (left * whole - from) / at.length), b = Math.min(1, ((left + width) * whole - from) / at.length);
    mark.hidden = b <= a; mark.style.display = b <= a ? "none" : "";
    mark.style.left = a * 100 + "%"; mark.style.width = (b - a) * 100 + "%";
  }
};
const zoomed = document.querySelector(".zoom");
const zoom = (a, b) => {
  from = Math.max(0, Math.min(a, whole - 1)); to = Math.min(whole, Math.max(b, from + 1));
  charts.forEach(draw);
  const { data } = charts[0], isPart = to - from < whole;
  zoomed.hidden = !isPart;
  zoomed.firstElementChild.textContent = "From " + data.times[from].split(" + ")[0] + " to " + new Date(data.start + to * data.width).toISOString().slice(11, 19) + " UTC.";
};
if (zoomed) { zoomed.lastElementChild.addEventListener("click", () => zoom(0, whole)); }
for (const { chart, data } of charts) {
  const cursor = make("cursor", chart), tip = make("tip", chart), brush = make("brush", chart);
  tip.setAttribute("role", "status");
  cursor.hidden = tip.hidden = brush.hidden = true;
  let at = -1, down = null;
  const line = (swatch, name, value) => {
    const row = document.createElement("div");
    for (const [tag, kind, text] of [["i", "swatch " + swatch, ""], ["span", "key", name], ["span", "", value]]) {
      const part = document.createElement(tag);
      part.className = kind; part.textContent = text;
      row.append(part);
    }
    return row;
  };
  const show = (window) => {
    at = Math.max(from, Math.min(to - 1, window));
    const x = (at - from + 0.5) / (to - from), time = data.start + at * data.width;
    const head = document.createElement("b");
    head.textContent = data.times[at] + (isAway(time) ? " (" + local(time, CLOCK) + " here)" : "");
    tip.replaceChildren(head, ...data.rows.filter((r) => r.values[at] !== "").map((r) => line(r.swatch, r.name, r.values[at])));
    cursor.style.left = x * 100 + "%";
    tip.style.left = x < 0.5 ? "calc(" + x * 100 + "% + 10px)" : "auto";
    tip.style.right = x < 0.5 ? "auto" : "calc(" + (1 - x) * 100 + "% + 10px)";
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const place = (e) => {
    const box = chart.getBoundingClientRect();
    return (e.clientX - box.left) / box.width;
  };
  const drag = (e) => {
    const x = Math.max(0, Math.min(1, place(e)));
    brush.hidden = Math.abs(x - down) < 0.01;
    brush.style.left = Math.min(down, x) * 100 + "%"; brush.style.width = Math.abs(x - down) * 100 + "%";
  };
  const drop = (e) => {
    const x = Math.max(0, Math.min(1, place(e))), start = down, count = to - from;
    for (const [name, act] of [["pointermove", drag], ["pointerup", drop], ["pointercancel", drop]]) { document.removeEventListener(name, act); }
    down = null; brush.hidden = true;
    if (e.type === "pointerup" && Math.abs(x - start) >= 0.01) {
      zoom(from + Math.floor(Math.min(start, x) * count), from + Math.ceil(Math.max(start, x) * count));
      hide();
    }
  };
  chart.addEventListener("pointerdown", (e) => {
    if (e.button !== 0 || down !== null) { return; }
    down = Math.max(0, Math.min(1, place(e)));
    for (const [name, act] of [["pointermove", drag], ["pointerup", drop], ["pointercancel", drop]]) { document.addEventListener(name, act); }
  });
  chart.addEventListener("pointermove", (e) => {
    const x = place(e);
    if (x >= 0 && x <= 1) { show(from + Math.floor(x * (to - from))); } else { hide(); }
  });
  chart.addEventListener("dblclick", () => zoom(0, whole));
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (step) { e.preventDefault(); show(at < 0 ? (step > 0 ? from : to - 1) : at + step); }
    if (e.key === "+" && to - from > 2) {
      const half = Math.ceil((to - from) / 4), middle = at < from || at >= to ? (from + to) >> 1 : at;
      zoom(Math.max(from, middle - half), Math.min(to, middle + half));
    }
    if (e.key === "Escape") { if (!zoomed.hidden) { zoom(0, whole); } hide(); }
  });
}

// --- filter by prefix
const filter = document.querySelector(".filter");
if (filter) {
  const input = filter.querySelector("input"), places = [...document.querySelectorAll("[data-scope]")];
  filter.hidden = false;
  filter.addEventListener("submit", (e) => e.preventDefault());
  input.addEventListener("input", () => {
    prefix = input.value;
    let hidden = 0;
    for (const place of places) {
      const isOut = !belongs(place.dataset.scope);
      place.classList.toggle("filtered", isOut);
      hidden += isOut;
    }
    filter.querySelector("output").textContent = hidden ? hidden + " lines are hidden; tiles and sizes are those of all keys" : "";
    charts.forEach(draw);
  });
}
