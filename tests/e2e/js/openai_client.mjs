// OpenAI's npm client as it comes: one answer whole, the same one streamed, a list of models, and an error.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: process.argv[3] }];
const asked = { model: "demo", messages, max_tokens: 24, temperature: 0 };

const whole = await client.chat.completions.create(asked);
let streamed = "";
let usage = null;
let facts = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
  facts = chunk.kvasir ?? facts;
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
let refused = null;
try {
  await client.chat.completions.create({ ...asked, temperature: 9 });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, param: error.param };
}
const text = whole.choices[0].message.content;
console.log(JSON.stringify({ text, streamed, usage, facts, models, refused }));
