// Payloads signed with the libraries that senders use, delivered to
// `postern receive`: what they sign is taken, once; what was touched on the way
// or comes at the wrong time is refused, and nothing of it is written.
//
// Needs a PostgreSQL in POSTERN_TEST_URL and the binary: see `make test-js`.

import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { request } from 'node:http'
import { createRequire } from 'node:module'
import { createServer } from 'node:net'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { sign as octokitSign } from '@octokit/webhooks-methods'
import pg from 'pg'
import { Webhook as StandardWebhook } from 'standardwebhooks'
import Stripe from 'stripe'

const binary = fileURLToPath(new URL('../../bin/postern', import.meta.url))
const examples = createRequire(import.meta.url)('@octokit/webhooks-examples')
const stripe = new Stripe('sk_test_none')
const secret = 'whsec_' + randomBytes(32).toString('base64')
const seconds = offset => Math.floor(Date.now() / 1000) + offset

// Each sender signs text at a time (seconds from now) under an id, as its
// library does it. What a scheme does not sign cannot be wrong in it.
const senders = {
  standard: {
    source: "('standard', '/standard', 'standard', $1, 'header:webhook-id', 'json:type')",
    timed: true,
    sign: async (id, text, offset) => {
      const at = new Date(seconds(offset) * 1000)
      return {
        'webhook-id': id,
        'webhook-timestamp': String(seconds(offset)),
        'webhook-signature': new StandardWebhook(secret).sign(id, at, text)
      }
    },
    signature: 'webhook-signature'
  },
  github: {
    source: "('github', '/github', 'github', $1, 'header:X-GitHub-Delivery', 'header:X-GitHub-Event')",
    timed: false,
    sign: async (id, text) => ({
      'x-github-delivery': id,
      'x-github-event': 'push',
      'x-hub-signature-256': await octokitSign(secret, text)
    }),
    signature: 'x-hub-signature-256'
  },
  stripe: {
    source: "('stripe', '/stripe', 'stripe', $1, 'json:id', 'json:type')",
    timed: true,
    sign: async (id, text, offset) => ({
      'stripe-signature': stripe.webhooks.generateTestHeaderString({ payload: text, secret, timestamp: seconds(offset) })
    }),
    signature: 'stripe-signature'
  }
}

describe('what libraries sign, postern receive takes', () => {
  const name = 'js_' + randomBytes(6).toString('hex')
  const url = new URL(process.env.POSTERN_TEST_URL ?? assert.fail('POSTERN_TEST_URL is not set: use make test-js'))
  const admin = new pg.Client({ connectionString: url.href })
  const database = new URL(url)
  database.pathname = '/' + name
  const db = new pg.Client({ connectionString: database.href })
  let port
  let log = ''
  let receiver
  let ended

  // post sends headers as a list of pairs, so that one can be there twice.
  const post = (path, headers, text) => new Promise((resolve, reject) => {
    const body = Buffer.from(text)
    const outgoing = request({ port, host: '127.0.0.1', path, method: 'POST' }, response => {
      response.resume().on('end', () => resolve(`${response.statusCode} ${response.headers['postern-outcome']}`))
    })
    outgoing.on('error', reject)
    const grouped = new Map()
    for (const [header, value] of headers) grouped.set(header, [...(grouped.get(header) ?? []), value])
    for (const [header, values] of grouped) outgoing.setHeader(header, values)
    outgoing.setHeader('content-length', body.length)
    outgoing.end(body)
  })

  before(async () => {
    await admin.connect()
    await admin.query(`create database ${name}`)
    const probe = createServer().listen(0, '127.0.0.1')
    await once(probe, 'listening')
    port = probe.address().port
    probe.close()
    const env = { PATH: process.env.PATH, DATABASE_URL: database.href, POSTERN_RECEIVE_ADDR: `127.0.0.1:${port}` }
    const migrated = spawnSync(binary, ['migrate', 'up'], { env, encoding: 'utf8' })
    assert.equal(migrated.status, 0, migrated.stderr)
    await db.connect()
    for (const { source } of Object.values(senders)) {
      await db.query(`insert into postern.source (name, path, scheme, secret, id_from, type_from) values ${source}`, [secret])
    }
    receiver = spawn(binary, ['receive'], { env, stdio: ['ignore', 'ignore', 'pipe'] })
    receiver.stderr.setEncoding('utf8').on('data', text => { log += text })
    ended = once(receiver, 'exit')
    for (;;) {
      assert.equal(receiver.exitCode, null, log)
      const ready = await fetch(`http://127.0.0.1:${port}/readyz`).then(r => r.ok, () => false)
      if (ready) break
      await new Promise(resolve => setTimeout(resolve, 50))
    }
  })

  after(async () => {
    receiver?.kill('SIGKILL') // nothing happens if it has ended
    await ended
    await db.end()
    await admin.query(`drop database if exists ${name} with (force)`)
    await admin.end()
  })

  for (const [path, sender] of Object.entries(senders)) {
    // Real bodies, with an id and a type where the sender has them in the body.
    const events = examples.flatMap(({ name, examples }) => examples).slice(0, 60).map((example, i) => {
      const id = `${path}_${i}`
      return { id, text: JSON.stringify({ id, type: 'github.example', example }, null, i % 2) }
    })

    test(`${path}: taken once, byte for byte`, { timeout: 120_000 }, async () => {
      for (const { id, text } of events) {
        const headers = Object.entries(await sender.sign(id, text, 0))
        assert.equal(await post('/' + path, headers, text), '200 accepted', log)
        assert.equal(await post('/' + path, headers, text), '200 duplicate', log)
      }
      const { rows } = await db.query('select event_id, payload from postern.outbox where tenant = $1', [path])
      assert.deepEqual(new Map(rows.map(row => [row.event_id, row.payload])),
        new Map(events.map(({ id, text }) => [id, text])))
    })

    test(`${path}: refused when touched, late or early`, { timeout: 120_000 }, async () => {
      const id = `${path}_refused`
      const text = JSON.stringify({ id, type: 'github.example', é: '✓' })
      const count = async () => (await db.query('select count(*)::int as n from postern.outbox')).rows[0].n
      const before = await count()
      const good = await sender.sign(id, text, 0)
      const without = { ...good }
      delete without[sender.signature]
      const garbled = good[sender.signature].slice(0, -1) + '?'

      const refusals = {
        'one byte flipped': [Object.entries(good), text.replace('✓', '✔')],
        'a line break at the end': [Object.entries(good), text + '\n'],
        'no signature': [Object.entries(without), text],
        'a doubled signature': [[...Object.entries(good), [sender.signature, good[sender.signature]]], text],
        'a garbled signature': [Object.entries({ ...good, [sender.signature]: garbled }), text]
      }
      if (sender.timed) {
        refusals['six minutes old'] = [Object.entries(await sender.sign(id, text, -360)), text]
        refusals['six minutes ahead'] = [Object.entries(await sender.sign(id, text, 360)), text]
      }
      for (const [what, [headers, body]] of Object.entries(refusals)) {
        assert.equal(await post('/' + path, headers, body), '401 refused', what)
      }
      assert.equal(await count(), before)
      assert.equal(await post('/' + path, Object.entries(good), text), '200 accepted')
    })
  }

  test('a signal ends it, and nothing secret is in the log', { timeout: 60_000 }, async () => {
    receiver.kill('SIGTERM')
    assert.deepEqual(await ended, [0, null], log)
    assert.ok(!log.includes(secret.slice(6)), 'the secret is in the log')
  })
})
