"""Limits of a gateway that nobody has to set; what a user may set stands in `config.py`."""

# Connections. Their number is `gateway.max_connections`, or less where the process may have fewer descriptors.

RESERVED_DESCRIPTORS = 64
"""Descriptors that are not for clients: the broker, logs, span files, the metrics' server and its clients."""

SPARE_CONNECTIONS = 8
"""So many connections are left when the others are all answering: for an answer that says so."""

MIN_CONNECTIONS = 2 * SPARE_CONNECTIONS
"""A process that may have fewer than this is no gateway."""

MAX_HEAD_BYTES = 64 * 1024
"""A request's first line, headers and trailers may be so long: what other HTTP servers take. So may all that is sent of
a body beside the body itself, the sizes and extensions of its chunks, but for as much as the body."""

WIRE_BYTES_A_BYTE = 2
"""A byte of a body may take so many: chunks of a few bytes, which nobody sends for long."""

MAX_HEADERS = 128
"""Headers and trailers of one request. Browsers send some twenty."""

PARSED_BYTES = 16 * 1024
"""So much is parsed before it is looked how much of it was body."""

BEGUN_A_TURN = 16
"""Requests with bodies that begin in one turn of the event loop: 5 ms of its time."""

MAX_PIPELINED = 16
"""Requests that a client has sent before its last one was answered. No client that people use sends any."""

# Bodies.

MAX_BODY_BYTES = 24 * 1024 * 1024
"""A request's body may be so long: the largest prompt that fits into a bus message, written as JSON token ids."""

MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
"""Bodies that are being read or understood may be so long all together. One of JSON's shortest values takes thirty
times as much memory once it is read, and a long text two hundred times, but of these one is read at a time."""

MAX_FIELD_BYTES = 64 * 1024
"""One field of a body may be so long, if it is none of LONG_FIELDS. It is measured before it is decoded, as a JSON
object of twenty megabytes takes seconds, for which nobody else is answered."""

LONG_FIELDS = {
    "prompt": MAX_BODY_BYTES, "messages": MAX_BODY_BYTES, "input": MAX_BODY_BYTES, "instructions": MAX_BODY_BYTES,
    "documents": MAX_BODY_BYTES, "tools": 1024 * 1024, "structured_outputs": 512 * 1024, "response_format": 512 * 1024,
    "text": 512 * 1024, "guided_json": 512 * 1024, "guided_choice": 512 * 1024, "guided_grammar": 512 * 1024,
}  # fmt: skip
"""What is part of the prompt, and what holds tools, schemas and grammars, which have bounds of their own once they are
decoded; of these JSON may take several bytes for one of theirs."""

MAX_BESIDE_BYTES = 4 * 1024 * 1024
"""A body may have so much beside its prompts: all other fields, and the names and roles of messages."""

JSON_BYTES_A_BYTE = 6
"""A byte of text may be written like \\u0041."""

MAX_HARMLESS_BYTES = 64
"""No value that asks for nothing is so long."""

FREE_BODY_BYTES = 64 * 1024
"""This much of a body does not count for that bound: short requests are served while long ones fill it."""

UNPACKED_BYTES = 256 * 1024
"""So much of a packed body is unpacked at once, which takes a millisecond."""

MAX_SHORT_BODY_BYTES = 128 * 1024
"""A longer body is understood alone: tokenizing takes 200 bytes of memory for each byte of text."""

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""One text may be so long, however large the model's context: a million tokens of English, and most of a GiB while it
is tokenized."""

MAX_MESSAGES = 4_096
"""Messages of one conversation: the template runs through all of them."""

MAX_TOOLS = 128
"""Tools of one request, as in OpenAI's API."""

MAX_TOOLS_BYTES = 256 * 1024
"""The tools of one request, as JSON: their schemas are part of the prompt, and may become a grammar."""

MAX_TOOL_NAME_CHARACTERS = 64
"""A tool's name, as in OpenAI's API."""

MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024
"""What a client may set of a chat template's variables, as JSON. They are switches and short texts."""

MAX_JSON_DEPTH = 64
"""So deep may tools, documents and template variables be nested; a schema of people's is a fifth of it."""

MAX_ERROR_CHARACTERS = 500
"""An error's message is cut here: it may quote what a client sent."""

# Answers.

REPLY_PART_BYTES = 64 * 1024
"""So much of a reply is given to its connection at once: what it keeps unsent of it is little more."""

MAX_REPLIES_BYTES = MAX_BODIES_BYTES
"""Replies that their clients have yet to take may be so long all together, those of one owner half of it; and one of
any length."""

MAX_CHOICES = 128
"""Answers of one HTTP request, which are prompts times `n`: each is a request of its own to the mesh."""

PLACED_AT_ONCE = 16
"""Placements that are asked for at a time, of a tenant: a scheduler needs two milliseconds for each, and others' come
in between."""

SUBMITTED_AT_ONCE = 4
"""Of these so many are begun, a millisecond each, before others have their turn."""

MAX_COUNT = 2**31 - 1
"""No number of tokens is larger."""

MAX_N = 16
"""Answers to one prompt, OpenAI's `n`."""

MAX_STOPS = 4
"""Stop strings of a request, as in OpenAI's API."""

MAX_STOP_CHARACTERS = 256
"""One stop string may be so long: text that may be its beginning is held back from the client."""

MAX_STOP_TOKEN_IDS = 64
"""They travel to the workers with each attempt."""

MAX_NAMED_TOKENS = 1_024
"""Tokens that `logit_bias` or `allowed_token_ids` may name, and tokens of all `bad_words`; as above."""

MAX_SCHEMA_BYTES = 64 * 1024
"""A JSON Schema may be so long: 0.2 s to understand, 8 MB for a worker to keep."""

GRAMMAR_CPU_S = 2.0
"""What may be spent on understanding a grammar, of which the largest that people have need a quarter. Workers spend it
again, each once."""

GRAMMAR_BYTES = 160 << 20
"""The same in memory, its stack included."""

GRAMMAR_STACK_BYTES = 64 << 20
"""Of the stack: it calls itself for each rule of a chain of rules. Workers have more."""

GRAMMAR_CHILD_S = 30.0
"""So long the process that understands grammars may take to start, and load the model's tokens."""

GRAMMAR_END_S = 0.05
"""Whether it has ended itself, or one of its copies, is seen within this."""

GRAMMAR_NICE = 5
"""So much it gives way to who answers: a third of their time where all want some."""

GRAMMARS_AT_ONCE = 2
"""Grammars that are understood at a time, one of a tenant."""

MAX_LIVE_GRAMMAR_CHARACTERS = 8 * 1024 * 1024
"""What a tenant's answers under way must be may be so long all together. The same for many counts once."""

MAX_KEPT_GRAMMARS = 256
MAX_KEPT_GRAMMAR_BYTES = 4 * 1024 * 1024
"""Grammars that were understood, and are not again: those asked for last."""

MAX_CLIENT_GRAMMAR_CHARACTERS = 32 * 1024
"""A client's own grammar, or all of its choices."""

MAX_REGEX_CHARACTERS = 8 * 1024

MAX_LITERAL_CHARACTERS = 4 * 1024
"""One text that an answer may have to spell: each token of it costs the length of what is left."""

MAX_MULTIPLE_OF = 10_000
"""The least common multiple of what numbers must be multiples of: remainders are counted in a machine that has a state
for each, which is 0.1 s of work here, and minutes for a million."""

MAX_INDENT = 16
"""Characters before a line of JSON that a schema holds."""

MAX_BOUNDS = 64
"""Different bounds of numbers in a schema that are tried, where they are in doubt: some milliseconds each."""

MAX_OPTIONAL_NAMES = 240
"""Properties of one object that may be left out: each takes four of the ways in which a text may go on
(`engine.limits.ROW_ITEMS_MAX`)."""

MAX_BLAMED = 24
"""Parts of a schema that are tried one by one, to name the one that is at fault."""

DEFAULT_COMPLETION_TOKENS = 16
"""A completion that names no `max_tokens` gets so many: OpenAI's own default."""

DEFAULT_RETRY_AFTER_MS = 1_000
"""When a refused client may come back, where whoever refused gave no time."""

# Work on the event loop: what takes longer runs in a thread, so that nobody's tokens wait for it.

MAX_INLINE_BODY_BYTES = 4_096
"""A body up to this length is understood on the event loop; to tokenize a longer one takes many milliseconds."""

MAX_INLINE_TOKENS = 4_096
"""A prompt up to this length is packed and hashed on the event loop; a longer one takes milliseconds."""

# One request.

ENVELOPE_BYTES = 4_096
"""What a message to a worker may need beside its prompt, or a grammar, of the bus's largest one."""

MAX_TROUBLES = 8
"""Failed attempts that an error message describes: the last ones."""

MAX_PARTS = 16
"""Deliveries of one choice that a slow client's mailbox keeps apart; the tokens of later ones join the last."""

PROMPT_END_TOKENS = 256
"""So many of a prompt's last tokens are decoded together with an answer's first ones. A few would do; the others are
for texts in scripts of which a tokenizer has bytes alone: a run of bytes is decoded as a whole or not at all."""

MAX_HELD_TOKENS = 32
"""Tokens that are decoded together in search of a whole character. Bytes that never become one would else be decoded
again from their beginning for each token."""

# What is published of requests for people (`observe/`).

MAX_UNSENT = 2_000
"""Messages that may wait to be sent; beyond it the oldest are dropped."""

MAX_BUFFERED = 2_000
"""Messages that go into the send buffer while the broker is away: the buffer is there for what requests need."""

MAX_ENDED = 1_000
"""Requests that have ended and can still be asked for: so many, and for so long
(`GatewayTimes.ended_kept_ms`)."""

MAX_KEEPS_PER_S = 50
"""Traces that were not sampled and are kept after all: a mesh that fails all its requests must not drown in messages
about them."""

# Asking workers how far an attempt is.

WAITING_ROUNDS = 4
"""An attempt that is in line at a worker is asked after this many times more rarely: hundreds may wait at once."""

MAX_DEATHS = 3
"""So many engines that died within DEATHS_WITHIN_MS as they computed a request, or without a token of it between them,
end it: it may be what kills them."""

DEATHS_WITHIN_MS = 60_000
"""See MAX_DEATHS."""
