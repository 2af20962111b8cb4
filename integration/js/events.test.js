// Every event of GitHub's published examples through the whole way: an INSERT,
// `postern run`, and four receivers that verify as their libraries tell them to,
// one for each style of signature.
//
// Needs a PostgreSQL in POSTERN_TEST_URL and the binary: see `make test-js`.

import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createServer } from 'node:http'
import { createRequire } from 'node:module'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { verify as octokitVerify } from '@octokit/webhooks-methods'
import pg from 'pg'
import { Webhook as StandardWebhook } from 'standardwebhooks'
import Stripe from 'stripe'
import { Webhook as SvixWebhook } from 'svix'

const binary = fileURLToPath(new URL('../../bin/postern', import.meta.url))
const examples = createRequire(import.meta.url)('@octokit/webhooks-examples')
const stripe = new Stripe('sk_test_none')

// Half of the events in the compact form that GitHub sends, half in another: the
// bytes of the row count, not their meaning.
const events = examples.flatMap(({ name, examples }) => examples).map((event, i) => JSON.stringify(event, null, i % 2))

const newSecret = () => 'whsec_' + randomBytes(32).toString('base64')

// Each endpoint is in the middle of a rotation. Where a header has room for one
// signature it is the new secret's.
const endpoint = (style, old, verify) => ({ style, old, verify, secret: newSecret(), previous: newSecret(), got: new Map() })
const endpoints = [
  endpoint('standard', true, async (secret, body, headers) => {
    new StandardWebhook(secret).verify(body, headers, { jsonParse: false })
    new SvixWebhook(secret).verify(body, headers)
    return true
  }),
  endpoint('plain', false, (secret, body, headers) => octokitVerify(secret, body, headers['x-signature'])),
  endpoint('github', false, (secret, body, headers) => octokitVerify(secret, body, headers['x-hub-signature-256'])),
  endpoint('stripe', true, async (secret, body, headers) =>
    stripe.webhooks.signature.verifyHeader(body, headers['stripe-signature'], secret))
]

const accepts = (...args) => args[0].verify(...args.slice(1)).catch(() => false)

// judge answers as a receiver does: by what the library says about the bytes.
// Everything else that it notices makes the test fail later.
async function judge (endpoint, headers, body) {
  const id = headers['webhook-id']
  const text = body.toString()
  const flipped = Buffer.from(body)
  flipped[flipped.length >> 1] ^= 1
  const faults = []
  const expect = async (want, secret, text, what) => {
    if (await accepts(endpoint, secret, text, headers) !== want) faults.push(what)
  }
  await expect(true, endpoint.secret, text, 'the current secret does not verify')
  await expect(endpoint.old, endpoint.previous, text, 'the previous secret: unexpected verdict')
  await expect(false, newSecret(), text, 'a strange secret verifies')
  await expect(false, endpoint.secret, flipped.toString(), 'a flipped byte verifies')
  if (endpoint.got.has(id)) faults.push('it came twice')
  endpoint.got.set(id, { body, faults })
  return faults.length === 0 ? 204 : 401
}

describe('every example event, from INSERT to verified receipt', () => {
  const name = 'js_' + randomBytes(6).toString('hex')
  const url = new URL(process.env.POSTERN_TEST_URL ?? assert.fail('POSTERN_TEST_URL is not set: use make test-js'))
  const admin = new pg.Client({ connectionString: url.href })
  const database = new URL(url)
  database.pathname = '/' + name
  const env = {
    PATH: process.env.PATH,
    DATABASE_URL: database.href,
    POSTERN_SIGNING_SECRET: newSecret(),
    POSTERN_ALLOW_HTTP: 'true',
    POSTERN_ALLOW_NETWORKS: '127.0.0.0/8'
  }
  const application = new pg.Client({ connectionString: database.href })
  let log = ''
  let dispatcher
  let ended

  const server = createServer(async (request, response) => {
    const chunks = []
    for await (const chunk of request) chunks.push(chunk)
    const endpoint = endpoints.find(({ style }) => request.url === '/' + style)
    response.statusCode = await judge(endpoint, request.headers, Buffer.concat(chunks))
    response.end()
  })

  before(async () => {
    await admin.connect()
    await admin.query(`create database ${name}`)
    const migrated = spawnSync(binary, ['migrate', 'up'], { env, encoding: 'utf8' })
    assert.equal(migrated.status, 0, migrated.stderr)
    await application.connect()
    server.listen(0, '127.0.0.1')
    await once(server, 'listening')
    for (const { style, secret, previous } of endpoints) {
      await application.query(
        `insert into postern.endpoint (url, style, secret, previous_secret, previous_until, max_attempts)
         values ($1, $2, $3, $4, now() + interval '1 hour', 1)`, // a refusal is a verdict, not a reason to try again
        [`http://127.0.0.1:${server.address().port}/${style}`, style, secret, previous])
    }
    dispatcher = spawn(binary, ['run'], { env, stdio: ['ignore', 'ignore', 'pipe'] })
    dispatcher.stderr.setEncoding('utf8').on('data', text => { log += text })
    ended = once(dispatcher, 'exit')
  })

  after(async () => {
    dispatcher?.kill('SIGKILL') // nothing happens if it has ended
    await ended
    server.close()
    server.closeAllConnections()
    await application.end()
    await admin.query(`drop database if exists ${name} with (force)`)
    await admin.end()
  })

  test('each arrives once at each endpoint, byte for byte, and verifies', { timeout: 240_000 }, async () => {
    assert.ok(events.length > 300, `${events.length} events`)
    const sent = new Map()
    await application.query('begin')
    for (const payload of events) {
      const { rows } = await application.query(
        "insert into postern.outbox (event_type, payload) values ('github.event', $1) returning message_id", [payload])
      sent.set(rows[0].message_id, payload)
    }
    await application.query('commit')

    for (;;) {
      const { rows: [{ waiting }] } = await application.query(
        "select count(*)::int as waiting from postern.message where status not in ('delivered', 'dead')")
      if (waiting === 0) break
      assert.equal(dispatcher.exitCode, null, log)
      await new Promise(resolve => setTimeout(resolve, 100))
    }
    for (const { style, got } of endpoints) {
      assert.equal(got.size, events.length, style)
      for (const [id, { body, faults }] of got) {
        assert.deepEqual(faults, [], `${style}, ${id}`)
        assert.ok(body.equals(Buffer.from(sent.get(id))), `${style}, ${id}: other bytes`)
      }
    }
    const { rows } = await application.query('select status, attempts, count(*)::int as n from postern.message group by status, attempts')
    assert.deepEqual(rows, [{ status: 'delivered', attempts: 1, n: events.length * endpoints.length }])

    dispatcher.kill('SIGTERM')
    assert.deepEqual(await ended, [0, null], log)
    for (const { secret, previous } of endpoints) {
      assert.ok(!log.includes(secret.slice(6)) && !log.includes(previous.slice(6)), 'a secret is in the log')
    }
  })
})
