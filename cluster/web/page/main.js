// Starts the page and keeps it fresh, while somebody can see it.
import { byId } from "./elements.js";
import { drawEvents, drawFigures, drawWorkers } from "./fleet.js";
import { chosenModel, offerModels } from "./models.js";
import { start, useModel } from "./playground.js";
import { get, useKey } from "./server.js";

const FLEET_MS = 1000;
const POOLS_EVERY = 2; // turns: looking through pools costs the workers something
const MODELS_EVERY = 5; // turns: adapters come and go

let pools = new Map();
let silent = [];
let looking = false;
let turn = 0;

function tellState(text, bad = false) {
  const state = byId("state");
  state.classList.toggle("bad", bad);
  if (state.textContent !== text) state.textContent = text; // told again only when it changes
}

/** Nobody waits for it: a worker that hangs keeps the answer for seconds. */
async function lookThroughPools(fleet) {
  if (looking) return;
  looking = true;
  try {
    const told = await get("debug/kv");
    pools = new Map(told.workers.map((worker) => [worker.worker, worker]));
    silent = told.silent;
  } catch {
    pools = new Map();
    silent = [];
  } finally {
    looking = false;
  }
  drawWorkers(fleet, pools, silent);
}

async function refresh() {
  const fleet = await get("debug/fleet");
  if (turn % MODELS_EVERY === 0) await offerModels();
  await useModel(chosenModel(fleet.model));
  byId("model").textContent = fleet.model;
  if (turn++ % POOLS_EVERY === 0) lookThroughPools(fleet);
  drawFigures(fleet);
  drawWorkers(fleet, pools, silent);
  drawEvents(fleet.events);
  tellState(fleet.ready ? "ready" : "no worker takes requests", !fleet.ready);
  byId("key-form").hidden = true;
}

async function turnForEver() {
  for (;;) {
    if (!document.hidden) {
      try {
        await refresh();
      } catch (error) {
        tellState(error.status === 401 ? "a key is needed" : "the service does not answer", true);
        if (error.status === 401) byId("key-form").hidden = false;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, FLEET_MS));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
});
start();
turnForEver();
