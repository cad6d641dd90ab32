// One answer as it is shown: its tokens, which can be forked at, and how it ended.
import { make } from "./elements.js";

/** `prompt` and `ids` are token ids before and of the answer; `session`, where there is one, holds all of them. */
export class Answer {
  constructor(row, label) {
    this.prompt = [];
    this.ids = [];
    this.session = null;
    this.text = make("p", { role: "group", ariaLabel: `Tokens of ${label}` });
    this.ending = make("span", {}, "…");
    this.footer = make("footer", {}, this.ending);
    this.box = make("article", { className: "answer", ariaLabel: label }, this.text, this.footer);
    this.label = label;
    this.numShown = 0; // tokens whose text is there
    row.firstChild.append(this.box);
  }

  get content() {
    return this.text.textContent;
  }

  get open() {
    return this.ending.textContent === "…";
  }

  /** News of a choice. Its text is that of the new tokens and of those before them whose text was held back. */
  add(text, choice) {
    if (choice.prompt_token_ids) this.prompt = choice.prompt_token_ids;
    this.ids.push(...(choice.token_ids ?? []));
    if (text) {
      const token = make("span", { className: "token" }, text);
      token.dataset.at = this.numShown;
      this.text.append(token);
      this.numShown = this.ids.length;
    }
    if (choice.finish_reason) this.ending.textContent = choice.finish_reason;
  }

  close(why) {
    if (this.open) this.ending.textContent = why;
  }

  /** Begin with what `other` has before its `at`-th token, shown as kept. */
  keep(other, at) {
    this.prompt = other.prompt;
    this.ids = other.ids.slice(0, at);
    this.numShown = at;
    const kept = [...other.text.children].filter((token) => Number(token.dataset.at) < at);
    this.text.append(...kept.map((token) => token.cloneNode(true)));
    for (const token of this.text.children) token.classList.add("kept");
    tidy(this.text);
  }

  /** Let tokens be chosen, by pointer, or by Tab, arrows and Enter; `fork` is told how many tokens are before one. */
  offerForks(fork) {
    const tokens = [...this.text.children];
    if (!tokens.length || !this.prompt.length) return;
    for (const [index, token] of tokens.entries()) {
      token.setAttribute("role", "button");
      token.tabIndex = index ? -1 : 0;
      token.title = "Fork here: keep what is before, and draw anew from here";
    }
    const chosen = (event) => event.target.closest?.(".token");
    this.text.addEventListener("click", (event) => chosen(event) && fork(Number(chosen(event).dataset.at)));
    this.text.addEventListener("keydown", (event) => {
      const here = tokens.indexOf(event.target);
      const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -here, End: tokens.length - 1 - here };
      if (event.key === "Enter" || event.key === " ") fork(Number(event.target.dataset.at));
      else if (event.key in steps) moveTo(tokens, here, here + steps[event.key]);
      else return;
      event.preventDefault();
    });
  }
}

/** Copies of tokens that could be chosen cannot be. */
function tidy(text) {
  for (const token of text.children) {
    token.removeAttribute("role");
    token.removeAttribute("tabindex");
    token.removeAttribute("title");
  }
}

/** One token of an answer takes part in Tab's round: the one that was focused last. */
function moveTo(tokens, from, to) {
  if (!tokens[to]) return;
  tokens[from].tabIndex = -1;
  tokens[to].tabIndex = 0;
  tokens[to].focus();
}
