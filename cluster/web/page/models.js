// Whom the playground talks to, where there is more than one name: models, their other names, and adapters.
import { byId, make } from "./elements.js";
import { get } from "./server.js";

let listed = "";

/** Calls `onChange` with the name that somebody chose. */
export function whenChosen(onChange) {
  byId("choice").addEventListener("change", () => onChange(byId("choice").value));
}

/** Asks which names there are, which is known once a worker has come. One that has gone is no longer chosen. */
export async function offerModels() {
  const names = await get("v1/models").then(
    ({ data }) => data.map(({ id }) => id),
    (error) => (error.status === 503 ? [] : Promise.reject(error)),
  );
  const choice = byId("choice");
  byId("model").hidden = names.length > 1;
  choice.hidden = names.length < 2;
  if (names.join("\n") === listed) return;
  listed = names.join("\n");
  const chosen = choice.value;
  choice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) choice.value = chosen;
  else if (chosen) choice.dispatchEvent(new Event("change"));
}

/** The name to ask for; `first` where there is no choice. */
export const chosenModel = (first) => (byId("choice").hidden ? first : byId("choice").value);
