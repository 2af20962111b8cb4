// v1a of Standard Webhooks (Ed25519), checked in both directions with OpenSSL,
// by way of node:crypto, and with @noble/curves. Go does its part in ./counterpart.

import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { createPrivateKey, createPublicKey, generateKeyPairSync, sign as opensslSign, verify as opensslVerify } from 'node:crypto'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { ed25519 } from '@noble/curves/ed25519.js'
import { Webhook as StandardWebhook } from 'standardwebhooks'

const here = fileURLToPath(new URL('.', import.meta.url))
const counterpart = requests => JSON.parse(execFileSync('go', ['run', './counterpart'], { cwd: here, input: JSON.stringify(requests) }))

// fresh makes a key pair with OpenSSL and writes it as the specification does.
function fresh () {
  const { privateKey } = generateKeyPairSync('ed25519')
  const { d, x } = privateKey.export({ format: 'jwk' })
  const seed = Buffer.from(d, 'base64url')
  const point = Buffer.from(x, 'base64url')
  return {
    seed,
    point,
    private: 'whsk_' + Buffer.concat([seed, point]).toString('base64'),
    privateSeed: 'whsk_' + seed.toString('base64'),
    public: 'whpk_' + point.toString('base64')
  }
}

const jwk = pair => ({ kty: 'OKP', crv: 'Ed25519', x: pair.point.toString('base64url') })
const openssl = (pair, content, sum) => opensslVerify(null, content, createPublicKey({ key: jwk(pair), format: 'jwk' }), sum)
const noble = (pair, content, sum) => ed25519.verify(sum, content, pair.point)

const at = Math.floor(Date.now() / 1000)
const content = (id, body) => Buffer.concat([Buffer.from(`${id}.${at}.`), body])
const bodies = ['{"test": 2432232314}', '[]', '{"name":"Zoë 😀"}\n', 'x'.repeat(200_000)].map(text => Buffer.from(text))
const shared = 'whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8='

test('OpenSSL and noble verify what Go signs, whichever way the private key is written', () => {
  const [current, previous, stranger] = [fresh(), fresh(), fresh()]
  const requests = bodies.flatMap((body, i) => [current.private, current.privateSeed].map(key => (
    { Style: 'standard', Secrets: [shared, key, previous.private], ID: `evt_${i}`, At: at, Body: body.toString('base64') })))
  const answers = counterpart(requests)
  answers.forEach(({ headers, error }, i) => {
    assert.equal(error, undefined)
    const entries = headers['Webhook-Signature'].split(' ')
    assert.deepEqual(entries.map(entry => entry.split(',')[0]), ['v1', 'v1a', 'v1a'])
    const body = bodies[i >> 1]
    const signed = content(requests[i].ID, body)
    // A receiver that knows v1 alone is not disturbed.
    new StandardWebhook(shared).verify(body, Object.fromEntries(Object.entries(headers).map(([k, v]) => [k.toLowerCase(), v])), { jsonParse: false })
    for (const [entry, pair] of [[entries[1], current], [entries[2], previous]]) {
      const sum = Buffer.from(entry.slice('v1a,'.length), 'base64')
      const flipped = Buffer.from(signed)
      flipped[flipped.length >> 1] ^= 1
      for (const verify of [openssl, noble]) {
        assert.equal(verify(pair, signed, sum), true)
        assert.equal(verify(pair, flipped, sum), false)
        assert.equal(verify(stranger, signed, sum), false)
      }
    }
  })
})

test('Go verifies what OpenSSL and noble sign, until a byte changes', () => {
  const [pair, stranger] = [fresh(), fresh()]
  const signers = [
    message => opensslSign(null, message, createPrivateKey({ key: { ...jwk(pair), d: pair.seed.toString('base64url') }, format: 'jwk' })),
    message => Buffer.from(ed25519.sign(message, pair.seed))
  ]
  const cases = signers.flatMap(sign => bodies.flatMap((body, i) => {
    const id = `evt_${i}`
    const list = ['v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=', 'v1a,' + sign(content(id, body)).toString('base64')].join(' ')
    const request = (key, body) => ({
      Scheme: 'standard',
      Secrets: [key],
      ID: id,
      At: at,
      Body: body.toString('base64'),
      Headers: { 'Webhook-Id': [id], 'Webhook-Timestamp': [String(at)], 'Webhook-Signature': [list] }
    })
    const flipped = Buffer.from(body)
    flipped[flipped.length >> 1] ^= 1
    return [[request(pair.public, body), undefined], [request(pair.private, body), undefined],
      [request(pair.public, flipped), 'mismatch'], [request(stranger.public, body), 'mismatch']]
  }))
  counterpart(cases.map(([request]) => request)).forEach(({ error }, i) => {
    const want = cases[i][1]
    assert.ok(want === undefined ? error === undefined : error?.includes(want), `${i}: ${error}`)
  })
})
