// Vercel's AI SDK: its provider for OpenAI (responses, chat and completions) and the one for servers that are like it.

import { strict as assert } from 'node:assert'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from 'ai'
import { z } from 'zod'
import { CODES, MODEL, QUESTION, run } from './tried.mjs'

const [baseURL, apiKey] = [process.env.OPENAI_BASE_URL, process.env.OPENAI_API_KEY]
const openai = createOpenAI({ baseURL, apiKey })
const compatible = createOpenAICompatible({
  name: 'compatible',
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
})

const models = {
  responses: openai.responses(MODEL),
  chat: openai.chat(MODEL),
  compatible: compatible(MODEL),
}
const name = z.enum(Object.keys(CODES))
const schema = z.object({ name, code: z.number().int().min(1000).max(9999) })
const asked = {
  instructions: 'You know codes.',
  prompt: QUESTION,
  temperature: 0,
  maxOutputTokens: 256,
  maxRetries: 0,
  providerOptions: { openai: { store: false } },
}
const find_code = tool({
  description: "Find a person's code.",
  inputSchema: z.object({ name }),
  execute: async ({ name }) => CODES[name],
})

/** A stream's errors do not throw: they are parts of it, and `onError` hears them. */
async function textOf(stream, errors) {
  let text = ''
  for await (const delta of stream.textStream) text += delta
  if (errors.length) throw errors[0]
  return text
}

const parts = {}
for (const [route, model] of Object.entries(models)) {
  parts[`${route}: generateText`] = async () => {
    const { text, usage } = await generateText({ ...asked, model })
    assert(text && usage.outputTokens > 0)
  }

  parts[`${route}: streamText`] = async () => {
    const errors = []
    const stream = streamText({ ...asked, model, onError: ({ error }) => errors.push(error) })
    assert(await textOf(stream, errors))
    assert((await stream.usage).outputTokens > 0)
  }

  parts[`${route}: generateObject`] = async () => {
    const { object } = await generateObject({ ...asked, model, schema })
    assert(object.name in CODES)
  }

  parts[`${route}: streamObject`] = async () => {
    const errors = []
    const stream = streamObject({ ...asked, model, schema, onError: ({ error }) => errors.push(error) })
    await textOf(stream, errors)
    assert((await stream.object).name in CODES)
  }

  parts[`${route}: generateText with Output.object`] = async () => {
    const { output } = await generateText({ ...asked, model, output: Output.object({ schema }) })
    assert(output.name in CODES)
  }

  parts[`${route}: tools, and the answer after the tool's result`] = async () => {
    const { steps } = await generateText({
      ...asked,
      model,
      tools: { find_code },
      toolChoice: 'required',
      stopWhen: isStepCount(2),
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: 'auto' } : {}),
    })
    assert(steps.length === 2 && steps[0].toolResults.every(({ output }) => Object.values(CODES).includes(output)))
    assert(steps[0].toolResults.length && steps[0].finishReason === 'tool-calls')
  }

  parts[`${route}: tools, streamed`] = async () => {
    const errors = []
    const stream = streamText({
      ...asked,
      model,
      tools: { find_code },
      toolChoice: { type: 'tool', toolName: 'find_code' },
      onError: ({ error }) => errors.push(error),
    })
    await textOf(stream, errors)
    const [result] = await stream.toolResults
    assert(Object.values(CODES).includes(result.output))
  }
}

parts['completions: generateText'] = async () => {
  const { text } = await generateText({ ...asked, model: openai.completion(MODEL) })
  assert(text)
}

parts['completions: streamText'] = async () => {
  const errors = []
  const model = compatible.completionModel(MODEL)
  assert(await textOf(streamText({ ...asked, model, onError: ({ error }) => errors.push(error) }), errors))
}

await run(parts)
