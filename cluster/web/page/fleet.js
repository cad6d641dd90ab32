// The fleet, drawn anew each second: figures, a card for each worker, events.
import { byId, make } from "./elements.js";

const MAP_ROWS = 16;
const MAX_ROWS = 12;

let before = null;

export function drawFigures(fleet) {
  const sum = (name) => fleet.workers.reduce((total, worker) => total + worker[name], 0);
  const seconds = before ? fleet.at - before.at : 0;
  const tokens = sum("tokens_generated");
  const rate = seconds > 0 ? Math.max(0, tokens - before.tokens) / seconds : 0;
  before = { at: fleet.at, tokens };
  const queries = sum("prefix_queries");
  const figures = {
    "Tokens a second": rate.toFixed(rate < 100 ? 1 : 0),
    Running: sum("num_running"),
    Waiting: sum("num_waiting"),
    "Prefix hits": queries ? `${Math.round((100 * sum("prefix_hits")) / queries)} %` : "none yet",
    "Open requests": fleet.gateway.num_open,
    "Clients that left": fleet.gateway.num_cancelled,
    Failovers: fleet.gateway.num_failovers,
  };
  byId("figures").replaceChildren(
    ...Object.entries(figures).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, `${value}`))),
  );
}

export function drawEvents(events) {
  const items = events.map(({ at, text }) => {
    const when = new Date(at * 1000);
    return make("li", {}, make("time", { dateTime: when.toISOString() }, when.toLocaleTimeString()), text);
  });
  byId("events").replaceChildren(...(items.length ? items.reverse() : [make("li", { className: "quiet" }, "none yet")]));
}

/** `fleet` is fresh; `pools` may be a little older, and lack a worker; `silent` are those that did not tell of theirs. */
export function drawWorkers(fleet, pools, silent) {
  const parent = byId("workers");
  const cards = new Map([...parent.children].map((card) => [card.dataset.worker, card]));
  const drawn = fleet.workers.map((worker) => {
    const card = cards.get(worker.worker) ?? newCard(worker.worker);
    card.children[0].textContent = fleet.models.length > 1 ? `${worker.worker}: ${worker.model}` : worker.worker;
    fillCard(card, worker, pools.get(worker.worker), silent.includes(worker.worker));
    return card;
  });
  parent.replaceChildren(...(drawn.length ? drawn : [make("p", { className: "quiet" }, "No worker is connected.")]));
}

function newCard(name) {
  const card = make("article", { className: "worker" });
  card.dataset.worker = name;
  card.append(make("h3", {}, name), make("p", { className: "quiet" }), make("canvas", { role: "img", hidden: true }), make("div"));
  return card;
}

function fillCard(card, worker, pool, isSilent) {
  const [, line, canvas, details] = card.children;
  const share = Math.round((100 * worker.owned_cells) / worker.capacity);
  line.textContent =
    `${isSilent ? "does not answer; " : ""}${worker.draining ? "draining, " : ""}${worker.num_running} running, ${worker.num_waiting} waiting; ` +
    `${share} % of ${worker.capacity} cells owned, ${worker.cached_cells} cached, ${worker.free_cells} free`;
  canvas.ariaLabel = `Map of the pool of ${card.dataset.worker}: ${share} % owned`;
  if (!pool) return;
  canvas.hidden = false;
  paint(canvas, pool.kv.map);
  details.replaceChildren(...(pool.sequences.length ? [table(pool)] : []));
  if (!pool.kv.adds_up) line.textContent += "; THE CELLS DO NOT ADD UP";
}

function paint(canvas, spans) {
  const style = getComputedStyle(document.documentElement);
  const fixed = { free: style.getPropertyValue("--free"), cached: style.getPropertyValue("--cached") };
  const bins = spans.flatMap(({ owner, num_bins }) => new Array(num_bins).fill(fixed[owner] ?? colourOf(owner)));
  canvas.width = Math.ceil(bins.length / MAP_ROWS);
  canvas.height = Math.min(MAP_ROWS, bins.length);
  const pen = canvas.getContext("2d");
  bins.forEach((colour, at) => {
    pen.fillStyle = colour;
    pen.fillRect(Math.floor(at / MAP_ROWS), at % MAP_ROWS, 1, 1);
  });
}

/** Neighbouring sequences get hues far apart: steps of the golden angle. */
export function colourOf(sequence) {
  return `hsl(${(Number(sequence) * 137.508) % 360} 70% 50%)`;
}

function table(pool) {
  const head = ["", "Request", "Does", "Tokens", "Cells"];
  const rows = pool.sequences.slice(0, MAX_ROWS).map((one) => {
    const swatch = make("span", { className: "swatch" });
    if (one.sequence !== null) swatch.style.background = colourOf(one.sequence);
    const values = [swatch, `${one.request}/${one.index}`, one.phase, `${one.num_computed} of ${one.num_tokens}`, `${one.num_cells}`];
    return make("tr", {}, ...values.map((value) => make("td", {}, value)));
  });
  const more = pool.num_sequences - rows.length;
  if (more > 0) rows.push(make("tr", {}, make("td", { colSpan: 5 }, `and ${more} more`)));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
}
