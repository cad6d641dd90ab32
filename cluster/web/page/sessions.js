// Sessions of the playground: what an answer is forked through. A service may have been told to keep none.
import { drop, get, post } from "./server.js";

let opened = []; // ids of those that the conversation has opened

/** Null where the service keeps sessions; else why it does not, in its own words. */
export async function whyNone() {
  try {
    await get("v1/sessions");
    return null;
  } catch (error) {
    if (error.status !== 400) throw error;
    return error.message;
  }
}

/**
 * A session for the tokens of `answer` before its `at`-th, and the tokens that it must be given first: a generation
 * needs at least one. Where the answer has a session it is forked; else a new one is given everything, of which the
 * worker still holds the cells. The session is of `model`.
 */
export async function sessionBefore(answer, at, model) {
  const tokens = [...answer.prompt, ...answer.ids.slice(0, at)];
  if (answer.session !== null) {
    try {
      const { id } = await post(`v1/sessions/${answer.session}/fork`, { at: tokens.length - 1 });
      opened.push(id);
      return { id, tokens: tokens.slice(-1) };
    } catch (error) {
      if (error.status !== 404) throw error; // it was idle for too long, and is forgotten
    }
  }
  const { id } = await post("v1/sessions", { model });
  opened.push(id);
  return { id, tokens };
}

export function closeSessions() {
  const ids = opened;
  opened = [];
  for (const id of ids) drop(`v1/sessions/${id}`).catch(() => {}); // one that is gone already is closed, too
}
