// The signatures that receivers check with JavaScript libraries, checked with
// those libraries, in both directions. Go does its part in ./counterpart.

import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { createHmac, randomBytes, randomUUID } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { sign as octokitSign, verify as octokitVerify } from '@octokit/webhooks-methods'
import { Webhook as StandardWebhook } from 'standardwebhooks'
import Stripe from 'stripe'
import { Webhook as SvixWebhook } from 'svix'

const here = fileURLToPath(new URL('.', import.meta.url))
const vectors = JSON.parse(readFileSync(new URL('../../outbox/signature/testdata/vectors.json', import.meta.url), 'utf8'))
const stripe = new Stripe('sk_test_none')

// counterpart asks Go to sign or verify a whole list at once.
function counterpart (requests) {
  const out = execFileSync('go', ['run', './counterpart'], {
    cwd: here,
    input: JSON.stringify(requests),
    maxBuffer: 64 << 20
  })
  const answers = JSON.parse(out)
  assert.equal(answers.length, requests.length)
  return answers
}

// at runs check with the clock stopped at a time in seconds: two of the
// libraries take the time from Date alone, and the vectors are old.
function at (seconds, check) {
  const RealDate = globalThis.Date
  globalThis.Date = class extends RealDate {
    constructor (...args) { super(...(args.length > 0 ? args : [seconds * 1000])) }
    static now () { return seconds * 1000 }
  }
  try {
    return check()
  } finally {
    globalThis.Date = RealDate
  }
}

const lower = headers => Object.fromEntries(Object.entries(headers).map(([name, value]) => [name.toLowerCase(), value]))

// Each verifier throws, or resolves to false, when it refuses. Style is what Go
// signs with, scheme what Go verifies with, sign what the library signs.
const verifiers = [
  {
    name: 'standardwebhooks',
    style: 'standard',
    scheme: 'standard',
    rotates: true,
    verify: (secret, body, headers, seconds) =>
      at(seconds, () => new StandardWebhook(secret).verify(body, headers, { jsonParse: false })),
    sign: (secret, id, seconds, body) => ({
      'Webhook-Id': [id],
      'Webhook-Timestamp': [String(seconds)],
      'Webhook-Signature': [new StandardWebhook(secret).sign(id, new Date(seconds * 1000), body)]
    })
  },
  {
    name: 'svix',
    style: 'standard',
    scheme: 'standard',
    rotates: true,
    verify: (secret, body, headers, seconds) =>
      at(seconds, () => new SvixWebhook(secret).verify(body, headers)),
    sign: (secret, id, seconds, body) => ({
      'Webhook-Id': [id],
      'Webhook-Timestamp': [String(seconds)],
      'Webhook-Signature': [new SvixWebhook(secret).sign(id, new Date(seconds * 1000), body)]
    })
  },
  {
    name: 'stripe',
    style: 'stripe',
    scheme: 'stripe',
    rotates: true,
    verify: (secret, body, headers, seconds) =>
      stripe.webhooks.signature.verifyHeader(body, headers['stripe-signature'], secret, 300, undefined, seconds * 1000),
    sign: (secret, id, seconds, body) => ({
      'Stripe-Signature': [stripe.webhooks.generateTestHeaderString({ payload: body, secret, timestamp: seconds })]
    })
  },
  {
    name: '@octokit/webhooks-methods',
    style: 'github',
    scheme: 'github',
    rotates: false,
    verify: (secret, body, headers) => octokitVerify(secret, body, headers['x-hub-signature-256']),
    sign: async (secret, id, seconds, body) => ({ 'X-Hub-Signature-256': [await octokitSign(secret, body)] })
  },
  {
    name: '@octokit/webhooks-methods on X-Signature',
    style: 'standard',
    scheme: 'hmac',
    rotates: false,
    verify: (secret, body, headers) => octokitVerify(secret, body, headers['x-signature']),
    sign: async (secret, id, seconds, body) => ({ 'X-Signature': [await octokitSign(secret, body)] })
  }
]

async function accepts (verifier, ...args) {
  try {
    return (await verifier.verify(...args)) !== false
  } catch {
    return false
  }
}

// flips are the body with one bit changed, once for every character. The
// libraries take strings, and a flip that is no UTF-8 is a string all the same.
function * flips (body) {
  const bytes = Buffer.from(body)
  for (let i = 0; i < bytes.length; i++) {
    bytes[i] ^= 1
    yield bytes.toString()
    bytes[i] ^= 1
  }
}

// These libraries read a body as UTF-8 text, so other bytes never verify, and
// some refuse an empty one. The outbox takes neither.
const isText = body => body.length > 0 && Buffer.from(body.toString()).equals(body)

const newSecret = () => 'whsec_' + randomBytes(32).toString('base64')

// messages are fresh ones, of all sizes, with what JSON libraries would write in
// other ways if they were let.
function messages () {
  const odd = ['"é"', '"😀"', '"漢字"', '"\u2028"', '"<&>"', '"\\u0000"', '1.10', '1e3', '-0', '12345678901234567890123']
  return Array.from({ length: 40 }, (_, i) => ({
    id: 'evt_' + randomUUID(),
    body: `{ "n":${i},  "odd":${odd[i % odd.length]} ,"fill":"${'x'.repeat(i * i)}"}${'\n'.repeat(i % 3)}`
  }))
}

describe('every library verifies the published vectors, and refuses one flipped byte', () => {
  assert.equal(vectors.length, 8)
  for (const v of vectors) {
    const body = Buffer.from(v.body, 'base64')
    const text = body.toString()
    const headers = {
      'webhook-id': v.id,
      'webhook-timestamp': String(v.at),
      'webhook-signature': v.standard,
      'stripe-signature': v.stripe,
      'x-hub-signature-256': v.plain,
      'x-signature': v.plain
    }
    for (const verifier of verifiers) {
      test(`${verifier.name}: ${v.name}`, async () => {
        if (body.length === 0) {
          assert.equal(await accepts(verifier, v.secrets[0], text, headers, v.at), verifier.name === 'standardwebhooks')
          return
        }
        assert.equal(await accepts(verifier, v.secrets[0], text, headers, v.at), isText(body))
        if (v.secrets.length > 1) {
          assert.equal(await accepts(verifier, v.secrets[1], text, headers, v.at), verifier.rotates)
        }
        assert.equal(await accepts(verifier, newSecret(), text, headers, v.at), false)
        for (const flipped of flips(text)) {
          assert.equal(await accepts(verifier, v.secrets[0], flipped, headers, v.at), false, JSON.stringify(flipped))
        }
      })
    }
  }
})

describe('Go signs, JavaScript verifies', () => {
  const seconds = Math.floor(Date.now() / 1000)
  const secrets = [newSecret(), newSecret()] // in the middle of a rotation
  const list = messages()
  let answers
  before(() => {
    answers = counterpart(list.flatMap(m => verifiers.map(verifier => ({
      style: verifier.style, secrets, id: m.id, at: seconds, body: Buffer.from(m.body).toString('base64')
    }))))
  })
  verifiers.forEach((verifier, n) => {
    test(verifier.name, async () => {
      for (const [i, m] of list.entries()) {
        const { headers, error } = answers[i * verifiers.length + n]
        assert.equal(error, undefined)
        assert.equal(headers['Webhook-Id'], m.id)
        const got = lower(headers)
        assert.ok(await accepts(verifier, secrets[0], m.body, got, seconds), m.body)
        assert.equal(await accepts(verifier, secrets[1], m.body, got, seconds), verifier.rotates)
        assert.equal(await accepts(verifier, newSecret(), m.body, got, seconds), false)
        for (const flipped of [...flips(m.body)].slice(0, 40)) {
          assert.equal(await accepts(verifier, secrets[0], flipped, got, seconds), false, flipped)
        }
      }
    })
  })
})

describe('JavaScript signs, Go verifies', () => {
  const seconds = Math.floor(Date.now() / 1000)
  const secret = newSecret()
  const list = messages()
  verifiers.forEach(verifier => {
    test(verifier.name, async () => {
      const signed = await Promise.all(list.map(m => verifier.sign(secret, m.id, seconds, m.body)))
      const ask = (i, change) => ({
        scheme: verifier.scheme,
        secrets: [newSecret(), secret],
        at: seconds,
        headers: signed[i],
        body: Buffer.from(list[i].body).toString('base64'),
        ...change
      })
      const flipped = body => {
        const bytes = Buffer.from(body)
        bytes[bytes.length >> 1] ^= 1
        return bytes.toString('base64')
      }
      const timed = verifier.rotates // the schemes that sign several times are those that sign the time
      const twice = Object.fromEntries(Object.entries(signed[0]).map(([name, [value]]) => [name, [value, value]]))
      const cases = [
        ...list.map((m, i) => [ask(i, {}), undefined]),
        ...list.map((m, i) => [ask(i, { body: flipped(m.body) }), /^signature: mismatch/]),
        [ask(0, { secrets: [newSecret()] }), /^signature: mismatch/],
        [ask(0, { at: seconds + 299 }), undefined],
        [ask(0, { at: seconds - 299 }), undefined],
        [ask(0, { at: seconds + 301 }), timed ? /^signature: too old/ : undefined],
        [ask(0, { at: seconds - 301 }), timed ? /^signature: too new/ : undefined],
        [ask(0, { headers: {} }), /^signature: missing/],
        [ask(0, { headers: twice }), /^signature: malformed/]
      ]
      const answers = counterpart(cases.map(([request]) => request))
      cases.forEach(([request, want], i) => {
        if (want === undefined) {
          assert.equal(answers[i].error, undefined, Buffer.from(request.body, 'base64').toString())
        } else {
          assert.match(String(answers[i].error), want)
        }
      })
    })
  })
})

// One header of X-Signature, as a receiver without any library checks it.
test('five lines of node:crypto verify X-Signature', () => {
  const v = vectors[1]
  const expected = 'sha256=' + createHmac('sha256', v.secrets[0]).update(Buffer.from(v.body, 'base64')).digest('hex')
  assert.equal(v.plain, expected)
})
