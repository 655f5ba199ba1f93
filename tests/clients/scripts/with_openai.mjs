// openai-node.

import { strict as assert } from 'node:assert'
import OpenAI from 'openai'
import { CODES, FIND_CODE, MODEL, QUESTION, QUESTION_JSON, run } from './tried.mjs'

const client = new OpenAI()
const model = MODEL
const messages = [
  { role: 'developer', content: 'You know codes.' },
  { role: 'user', content: QUESTION },
]
const tools = [{ type: 'function', function: { ...FIND_CODE, strict: true } }]
const entry = {
  type: 'object',
  properties: {
    name: { type: 'string', enum: Object.keys(CODES) },
    code: { type: 'integer', minimum: 1000, maximum: 9999 },
  },
  required: ['name', 'code'],
  additionalProperties: false,
}

function nameOf(json) {
  const { name } = JSON.parse(json)
  assert(name in CODES, name)
  return name
}

function isEntry(json) {
  const { name, code } = JSON.parse(json)
  return name in CODES && Number.isInteger(code)
}

await run({
  models: async () => {
    const ids = []
    for await (const each of client.models.list()) ids.push(each.id)
    assert(ids.includes(model))
  },

  chat: async () => {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 16 })
    assert(answer.choices[0].message.content && answer.usage.completion_tokens > 0)
  },

  'chat, streamed': async () => {
    let [text, usage] = ['', null]
    const stream = await client.chat.completions.create({
      model,
      messages,
      max_completion_tokens: 16,
      stream: true,
      stream_options: { include_usage: true },
    })
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? ''
      usage = chunk.usage ?? usage
    }
    assert(text && usage.completion_tokens > 0)
  },

  'chat, logprobs': async () => {
    const { choices } = await client.chat.completions.create({
      model,
      messages,
      max_completion_tokens: 4,
      logprobs: true,
      top_logprobs: 2,
    })
    for (const token of choices[0].logprobs.content) assert(token.logprob <= 0 && token.top_logprobs.length === 2)
  },

  'tools: required, and the answer after the tool\'s result': async () => {
    const turn = await client.chat.completions.create({
      model,
      messages,
      tools,
      tool_choice: 'required',
      parallel_tool_calls: false,
      max_completion_tokens: 128,
    })
    const [call] = turn.choices[0].message.tool_calls
    assert.equal(call.function.name, 'find_code')
    const result = { role: 'tool', tool_call_id: call.id, content: `${CODES[nameOf(call.function.arguments)]}` }
    const last = await client.chat.completions.create({
      model,
      messages: [...messages, turn.choices[0].message, result],
      tools,
      max_completion_tokens: 16,
    })
    assert(last.choices[0].message.content || last.choices[0].message.tool_calls)
  },

  'tools, streamed': async () => {
    const stream = client.chat.completions.stream({
      model,
      messages,
      tools,
      tool_choice: { type: 'function', function: { name: 'find_code' } },
      max_completion_tokens: 128,
    })
    const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls
    assert(nameOf(call.function.arguments))
  },

  'tools that it runs itself': async () => {
    const called = []
    const runner = client.chat.completions.runTools({
      model,
      messages,
      max_completion_tokens: 128,
      tool_choice: { type: 'function', function: { name: 'find_code' } },
      tools: [
        {
          type: 'function',
          function: {
            ...FIND_CODE,
            parse: JSON.parse,
            function: ({ name }) => {
              called.push(name)
              return `${CODES[name]}`
            },
          },
        },
      ],
    })
    await runner.done()
    assert(called.length === 1 && called[0] in CODES)
  },

  'JSON mode': async () => {
    const { choices } = await client.chat.completions.create({
      model,
      messages: [{ role: 'user', content: QUESTION_JSON }],
      temperature: 0,
      max_completion_tokens: 256,
      response_format: { type: 'json_object' },
    })
    assert.equal(typeof JSON.parse(choices[0].message.content), 'object')
  },

  'JSON schema, parsed': async () => {
    const { choices } = await client.chat.completions.parse({
      model,
      messages,
      max_completion_tokens: 128,
      response_format: { type: 'json_schema', json_schema: { name: 'entry', schema: entry, strict: true } },
    })
    assert(isEntry(choices[0].message.content))
  },

  'completions, streamed': async () => {
    let text = ''
    const stream = await client.completions.create({ model, prompt: `${QUESTION} A:`, max_tokens: 8, stream: true })
    for await (const chunk of stream) text += chunk.choices[0].text
    assert(text)
  },

  responses: async () => {
    const answer = await client.responses.create({ model, input: QUESTION, max_output_tokens: 16, store: false })
    assert(answer.output_text)
  },

  'responses, streamed, with a schema': async () => {
    const stream = client.responses.stream({
      model,
      input: QUESTION,
      max_output_tokens: 128,
      store: false,
      text: { format: { type: 'json_schema', name: 'entry', schema: entry, strict: true } },
    })
    let text = ''
    stream.on('response.output_text.delta', ({ delta }) => (text += delta))
    const answer = await stream.finalResponse()
    assert(isEntry(text) && answer.output_text === text)
  },

  'responses, tools, and the answer after the tool\'s result': async () => {
    const responseTools = [{ type: 'function', ...FIND_CODE, strict: true }]
    const asked = { role: 'user', content: QUESTION }
    const turn = await client.responses.create({
      model,
      input: [asked],
      tools: responseTools,
      tool_choice: 'required',
      parallel_tool_calls: false,
      max_output_tokens: 128,
      store: false,
    })
    const [call] = turn.output
    assert(call.type === 'function_call' && nameOf(call.arguments))
    const result = { type: 'function_call_output', call_id: call.call_id, output: `${CODES[nameOf(call.arguments)]}` }
    const last = await client.responses.create({
      model,
      input: [asked, call, result],
      tools: responseTools,
      max_output_tokens: 16,
      store: false,
    })
    assert(last.output.length)
  },

  'errors: no such model': async () => {
    await assert.rejects(client.chat.completions.create({ model: 'no-such-model', messages }), OpenAI.NotFoundError)
  },
})
