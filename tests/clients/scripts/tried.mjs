// Says of each thing that a script tries whether it worked: a line on standard output, with tabs between its parts.

import { strict as assert } from 'node:assert'

export const MODEL = process.env.MODEL
assert(MODEL, 'MODEL names the model')

const FACTS = 'The code of Ada Brook is 7412. The code of Max Reed is 3055.'
export const QUESTION = `${FACTS} What is the code of Ada Brook?`
export const QUESTION_JSON = `${QUESTION} Answer in JSON, like {"name": "Max Reed", "code": 3055}.`
export const CODES = { 'Ada Brook': 7412, 'Max Reed': 3055 }

/** A tool, as OpenAI's API has it. */
export const FIND_CODE = {
  name: 'find_code',
  description: "Find a person's code.",
  parameters: {
    type: 'object',
    properties: { name: { type: 'string', enum: Object.keys(CODES), description: 'Whose code.' } },
    required: ['name'],
    additionalProperties: false,
  },
}

/** Call each of `parts`, { what: function }, in order. The process ends with 1 where something failed. */
export async function run(parts) {
  for (const [what, part] of Object.entries(parts)) {
    try {
      await part()
      console.log(`ok\t${what}`)
    } catch (error) {
      console.error(error)
      process.exitCode = 1
      console.log(`failed\t${what}\t${error.name}: ${error.message.replaceAll(/\s+/g, ' ')}`)
    }
  }
}
