// A conversation with the model: streamed, with parameters, n answers side by side, of which one goes on.
import { byId, make } from "./elements.js";
import { chat } from "./server.js";

let model = null;
let turns = []; // what the next request sends: {role, content}
let running = null; // the AbortController of the answer that streams

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
    running?.abort();
    turns = [];
    byId("talk").replaceChildren();
    byId("timing").textContent = "";
    byId("prompt").focus();
  });
}

export function useModel(name) {
  model = name;
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
  const answers = Array.from({ length: wanted.n ?? 1 }, (_, index) => newAnswer(row, index));
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  const begun = performance.now();
  let first = null;
  try {
    for await (const chunk of chat({ model, messages, ...wanted }, controller.signal)) {
      for (const choice of chunk.choices) {
        const text = choice.delta.content ?? "";
        if (text && first === null) first = performance.now() - begun;
        answers[choice.index].add(text, choice.finish_reason);
      }
      if (chunk.usage) tellTiming(first, performance.now() - begun, chunk.usage.completion_tokens);
    }
    if (running === controller) goOn(messages, answers, 0);
  } catch (error) {
    const left = error.name === "AbortError";
    for (const answer of answers) answer.close(left ? "stopped" : "failed");
    if (!left) row.append(make("p", { className: "error", role: "alert" }, error.message));
  } finally {
    if (running === controller) {
      running = null;
      setBusy(false);
    }
  }
}

function newAnswer(row, index) {
  const text = make("p");
  const ending = make("span", {}, "…");
  const footer = make("footer", {}, ending);
  const box = make("article", { className: "answer", ariaLabel: `Answer ${index + 1}` }, text, footer);
  row.firstChild.append(box);
  return {
    box,
    footer,
    get content() {
      return text.textContent;
    },
    add(more, finish) {
      text.append(more);
      if (finish) ending.textContent = finish;
    },
    close(why) {
      if (ending.textContent === "…") ending.textContent = why;
    },
  };
}

/** The conversation goes on with one of the answers; the buttons let another one be chosen. */
function goOn(messages, answers, chosen) {
  const asked = messages.filter(({ role }) => role !== "system");
  const choose = (index) => {
    turns = [...asked, { role: "assistant", content: answers[index].content }];
    answers.forEach(({ box }, at) => box.setAttribute("aria-current", `${at === index}`));
  };
  if (answers.length > 1) {
    answers.forEach(({ footer }, index) => {
      const button = make("button", { type: "button" }, "Go on with this");
      button.addEventListener("click", () => choose(index));
      footer.append(button);
    });
  }
  choose(chosen);
  byId("prompt").value = "";
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
}

function tellTiming(first, whole, tokens) {
  const wait = first === null ? "no text" : `first text after ${Math.round(first)} ms`;
  byId("timing").textContent = `${wait}, ${tokens} tokens in ${(whole / 1000).toFixed(1)} s`;
}
