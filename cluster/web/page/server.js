// What the page asks the gateway. Addresses are relative, so the page works below any prefix.

let key = sessionStorage.getItem("raycomb-key") ?? "";

export function useKey(value) {
  key = value;
  sessionStorage.setItem("raycomb-key", value);
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Refused(answer.status, told?.error?.message ?? `the service answered ${answer.status}`);
  }
  return answer;
}

export async function get(path) {
  return (await call(path)).json();
}

export async function post(path, body) {
  return (await call(path, withJson(body))).json();
}

export async function drop(path) {
  await call(path, { method: "DELETE" });
}

export const chat = (body, signal) => streamed("v1/chat/completions", body, signal);
export const complete = (body, signal) => streamed("v1/completions", body, signal);

function withJson(body) {
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
}

/** The chunks of a streamed answer, in order. Throws `Refused`, also for an error inside the stream. */
async function* streamed(path, body, signal) {
  const wanted = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const answer = await call(path, { ...withJson(wanted), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Refused(answer.status, chunk.error.message);
      yield chunk;
    }
  }
}
