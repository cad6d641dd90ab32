// A conversation with the model: streamed, with parameters, n answers side by side, of which one goes on, and which can
// be forked at a token.
import { Answer } from "./answer.js";
import { byId, make } from "./elements.js";
import { whenChosen } from "./models.js";
import { chat, complete } from "./server.js";
import { closeSessions, sessionBefore, whyNone } from "./sessions.js";

let model = null;
let turns = []; // what the next request sends: {role, content}
let running = null; // the AbortController of the answer that streams
let forks = null; // whether answers can be forked; null: not asked yet
let numForks = 0;

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("fresh").addEventListener("click", () => {
    beginAnew();
    byId("prompt").focus();
  });
  whenChosen((name) => {
    model = name;
    beginAnew();
  });
}

/** What was said belongs to the model that said it: its tokens mean nothing to another one. */
function beginAnew() {
  running?.abort();
  turns = [];
  closeSessions();
  byId("talk").replaceChildren();
  byId("timing").textContent = "";
}

/** The service is there and answers by this name. */
export async function useModel(name) {
  model = name;
  if (forks !== null) return;
  const why = await whyNone().catch(() => undefined); // asked again in a moment
  if (why === undefined) return;
  forks = why === null;
  byId("forking").textContent = forks ? "Choose a token of an answer to fork there." : `No forks at tokens: ${why}.`;
}

function parameters() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const names = ["temperature", "top_p", "max_tokens", "n", "seed"];
  return Object.fromEntries(names.map((name) => [name, number(name)]).filter(([, value]) => value !== undefined));
}

async function ask() {
  const said = byId("prompt").value;
  const system = byId("system").value;
  const wanted = parameters();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: said }];
  const row = make("li", {}, make("div", { className: "answers" }));
  byId("talk").append(make("li", { className: "said" }, said), row);
  const round = { row, asked: messages.filter(({ role }) => role !== "system"), answers: [] };
  const answers = Array.from({ length: wanted.n ?? 1 }, (_, index) => new Answer(row, `Answer ${index + 1}`));
  const done = await show(round, answers, (signal) => chat({ model, messages, ...wanted }, signal));
  if (done) {
    goOn(round, answers[0]);
    byId("prompt").value = "";
  }
}

/** Go on from before a token of an answer, in a session, beside that answer. */
async function fork(round, from, at) {
  if (running) return;
  const wanted = parameters();
  delete wanted.n;
  numForks += 1;
  if (wanted.seed !== undefined) wanted.seed += numForks; // the same seed would draw the same tokens again
  const answer = new Answer(round.row, `Fork of ${from.label} at token ${at + 1}`);
  answer.keep(from, at);
  const done = await show(round, [answer], async function* (signal) {
    const { id, tokens } = await sessionBefore(from, at, model);
    answer.session = id;
    for await (const chunk of complete({ model, session_id: id, prompt: tokens, ...wanted }, signal)) {
      for (const choice of chunk.choices) delete choice.prompt_token_ids; // the answer knows more
      yield chunk;
    }
  });
  answer.box.scrollIntoView({ block: "nearest" });
  if (done) goOn(round, answer);
}

/** Stream into new answers of a round; whether they ended by themselves. */
async function show(round, answers, chunks) {
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  const begun = performance.now();
  let first = null;
  let done = false;
  try {
    for await (const chunk of chunks(controller.signal)) {
      for (const choice of chunk.choices) {
        const text = choice.text ?? choice.delta.content ?? "";
        if (text && first === null) first = performance.now() - begun;
        answers[choice.index].add(text, choice);
      }
      if (chunk.usage) tellTiming(first, performance.now() - begun, chunk.usage.completion_tokens);
    }
    done = running === controller;
  } catch (error) {
    const left = error.name === "AbortError";
    for (const answer of answers) answer.close(left ? "stopped" : "failed");
    if (!left) round.row.append(make("p", { className: "error", role: "alert" }, error.message));
  } finally {
    if (running === controller) {
      running = null;
      setBusy(false);
    }
  }
  round.answers.push(...answers);
  if (forks) for (const answer of answers) answer.offerForks((at) => fork(round, answer, at));
  return done;
}

/** The conversation goes on with `chosen`; where a round has several answers, buttons let another one be chosen. */
function goOn(round, chosen) {
  const several = round.answers.length > 1;
  for (const answer of round.answers) {
    if (several && !answer.footer.querySelector("button")) {
      const button = make("button", { type: "button" }, "Go on with this");
      button.addEventListener("click", () => goOn(round, answer));
      answer.footer.append(button);
    }
    answer.box.setAttribute("aria-current", `${answer === chosen}`);
  }
  turns = [...round.asked, { role: "assistant", content: chosen.content }];
  while (round.row.nextSibling) round.row.nextSibling.remove(); // what was said behind it belonged to another answer
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
}

function tellTiming(first, whole, tokens) {
  const wait = first === null ? "no text" : `first text after ${Math.round(first)} ms`;
  byId("timing").textContent = `${wait}, ${tokens} tokens in ${(whole / 1000).toFixed(1)} s`;
}
