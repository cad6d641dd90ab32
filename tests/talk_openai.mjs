// A conversation by OpenAI's client for Node: `node talk_openai.mjs BASE_URL`. Prints one JSON object of what it heard.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.env.RAYCOMB_NODE_MODULES}/`));
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "k", maxRetries: 0 });
const model = "tiny";
const heard = {};

const hello = { model, messages: [{ role: "user", content: "hello" }] };
heard.whole = (await client.chat.completions.create(hello)).choices[0].message.content;
heard.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...hello, stream: true }))
  heard.streamed += chunk.choices[0]?.delta?.content ?? "";

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "d", parameters } }];
const messages = [{ role: "user", content: "weather?" }];
const first = await client.chat.completions.create({ model, messages, tools });
const call = first.choices[0].message.tool_calls[0];
heard.call = [first.choices[0].finish_reason, call.function.name, JSON.parse(call.function.arguments)];
messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" });
heard.answer = (await client.chat.completions.create({ model, messages, tools })).choices[0].message.content;
heard.call_streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages: messages.slice(0, 1), tools, stream: true }))
  heard.call_streamed += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";

const response_format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: parameters } };
heard.structured = JSON.parse((await client.chat.completions.create({ ...hello, response_format })).choices[0].message.content);
const events = [];
for await (const event of await client.responses.create({ model, input: "hello", stream: true })) events.push(event.type);
heard.response_events = [events[0], events.at(-1)];
heard.vector = (await client.embeddings.create({ model, input: "hello" })).data[0].embedding.length;
heard.errors = [];
for (const body of [{ ...hello, temperature: -1 }, { ...hello, model: "other" }])
  await client.chat.completions.create(body).catch((error) => heard.errors.push([error.status, error.param]));
console.log(JSON.stringify(heard));
