"use strict";
// Show the values of the window under the pointer; the arrow keys move the window. The page works without it.
for (const chart of document.querySelectorAll(".chart[data-of]")) {
  const data = JSON.parse(document.getElementById(chart.dataset.of).textContent);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor"; tip.className = "tip";
  tip.setAttribute("role", "status");
  cursor.hidden = tip.hidden = true;
  chart.append(cursor, tip);
  let at = -1;
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
    at = Math.max(0, Math.min(data.times.length - 1, window));
    const x = (at + 0.5) / data.times.length;
    const head = document.createElement("b");
    head.textContent = data.times[at];
    tip.replaceChildren(head, ...data.rows.filter((r) => r.values[at] !== "").map((r) => line(r.swatch, r.name, r.values[at])));
    cursor.style.left = x * 100 + "%";
    tip.style.left = x < 0.5 ? "calc(" + x * 100 + "% + 10px)" : "auto";
    tip.style.right = x < 0.5 ? "auto" : "calc(" + (1 - x) * 100 + "% + 10px)";
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  chart.addEventListener("pointermove", (e) => {
    const box = chart.getBoundingClientRect();
    const x = (e.clientX - box.left) / box.width;
    if (x < 0 || x > 1) { hide(); } else { show(Math.floor(x * data.times.length)); }
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (step) { e.preventDefault(); show(at < 0 ? (step > 0 ? 0 : data.times.length - 1) : at + step); }
    if (e.key === "Escape") { hide(); }
  });
}
