"use strict";
// Everything can be read without this script; it adds zoom, dragging, and the reading of one box in full.

for (const figure of document.querySelectorAll(".picture")) {
  const view = figure.querySelector(".view");
  const graph = view.querySelector("svg");
  const inspect = figure.querySelector(".inspect");
  const natural = { width: graph.width.baseVal.value, height: graph.height.baseVal.value };
  const SMALLEST = 0.62; // below it the text is not legible: the picture scrolls instead
  let scale = 1;

  const zoom = (wanted) => {
    const next = Math.min(3, Math.max(0.15, wanted));
    const middle = (view.scrollTop + view.clientHeight / 2) / (natural.height * scale);
    const centre = (view.scrollLeft + view.clientWidth / 2) / (natural.width * scale);
    scale = next;
    graph.setAttribute("width", natural.width * scale);
    graph.setAttribute("height", natural.height * scale);
    view.scrollTop = middle * natural.height * scale - view.clientHeight / 2;
    view.scrollLeft = centre * natural.width * scale - view.clientWidth / 2;
  };
  const fit = () => Math.min(1, (view.clientWidth - 2) / natural.width);
  const start = () => {
    zoom(Math.max(SMALLEST, fit()));
    const ended = graph.querySelector(".node.ended"); // of a near miss: what one wants to see
    const box = (ended ?? graph.querySelector("a")).getBBox();
    view.scrollLeft = (box.x + box.width / 2) * scale - view.clientWidth / 2;
    view.scrollTop = ended ? (box.y + box.height) * scale - 0.6 * view.clientHeight : 0;
  };
  const whole = () => zoom(Math.min(fit(), view.clientHeight / natural.height));

  figure.querySelector(".zoom").addEventListener("click", (event) => {
    const action = event.target.dataset.zoom;
    if (action === "in") zoom(scale * 1.25);
    if (action === "out") zoom(scale / 1.25);
    if (action === "fit") Math.abs(scale - fit()) < 0.01 ? whole() : zoom(fit());
  });
  view.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") zoom(scale * 1.25);
    if (event.key === "-") zoom(scale / 1.25);
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(scale * Math.exp(-event.deltaY / 200));
  }, { passive: false });
  view.addEventListener("pointerdown", (down) => {
    if (down.pointerType !== "mouse" || down.button !== 0 || down.target.closest("a")) return;
    const from = { left: view.scrollLeft, top: view.scrollTop };
    const move = (event) => {
      view.classList.add("dragged");
      view.scrollLeft = from.left - (event.clientX - down.clientX);
      view.scrollTop = from.top - (event.clientY - down.clientY);
    };
    const up = () => {
      view.classList.remove("dragged");
      removeEventListener("pointermove", move);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up, { once: true });
  });

  const show = (box) => {
    graph.classList.toggle("asking", box !== null);
    for (const hot of graph.querySelectorAll(".hot")) hot.classList.remove("hot");
    if (box === null) return;
    box.classList.add("hot");
    for (const edge of graph.querySelectorAll(".edge")) {
      if (edge.dataset.from === box.dataset.step || edge.dataset.to === box.dataset.step) edge.classList.add("hot");
    }
    const row = document.getElementById(box.getAttribute("href").slice(1));
    const [part, value, meaning, shape, line] = row.cells;
    const lead = document.createElement("p");
    lead.className = "lead";
    for (const cell of [part, value, shape]) lead.append(copy(cell, "span"));
    const link = document.createElement("a");
    link.href = box.getAttribute("href");
    link.textContent = "in the table";
    lead.append(link);
    inspect.replaceChildren(lead, copy(meaning, "p", "says"), copy(line, "p"));
  };
  const copy = (cell, tag, name = "") => {
    const made = document.createElement(tag);
    made.className = name;
    for (const child of [...cell.cloneNode(true).childNodes]) made.append(child.nodeName === "BR" ? " " : child);
    return made;
  };
  for (const kind of ["focusin", "pointerover"]) { // not on the graph itself: an svg that listens takes the focus
    view.addEventListener(kind, (event) => {
      const box = event.target.closest("a");
      if (box) show(box);
    });
  }
  view.addEventListener("click", (event) => {
    if (event.target.closest("a")) event.preventDefault(); // the box is shown below; from there a link leads on
  });
  view.addEventListener("pointerleave", () => show(graph.querySelector("a:focus")));
  view.addEventListener("focusout", () => show(null));

  // A figure in a closed layer has no size yet.
  const closed = figure.closest("details:not([open])");
  if (closed) closed.addEventListener("toggle", start, { once: true });
  else start();
}

const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let outer = target; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") outer.open = true;
  if (target) target.scrollIntoView({ block: "nearest" });
};
addEventListener("hashchange", open);
open();

const select = document.getElementById("card");
if (select) {
  const choose = () => {
    for (const part of document.querySelectorAll("[data-card]")) part.hidden = part.dataset.card !== select.value;
  };
  select.addEventListener("change", choose);
  choose();
}
