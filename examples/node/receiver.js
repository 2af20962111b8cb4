// Takes webhooks: verifies them with the public Standard Webhooks library and
// counts each event once, however often it comes.
//
//   DATABASE_URL=… WEBHOOK_SECRET=whsec_… PORT=8080 node receiver.js

import http from 'node:http'
import pg from 'pg'
import { Webhook } from 'standardwebhooks'

const webhook = new Webhook(process.env.WEBHOOK_SECRET)
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL })
await pool.query(`
  create table if not exists webhook_seen (id text primary key);
  create table if not exists received (id bigint generated always as identity, event text not null, body text not null)`)

const server = http.createServer(async (request, response) => {
  const answer = (status) => response.writeHead(status).end()
  if (request.method !== 'POST' || request.url !== '/hooks') return answer(404)
  try {
    // The signature is over these bytes: read them before anything parses.
    const body = await read(request, 1 << 20)
    if (body === undefined) return answer(413)
    try {
      webhook.verify(body, request.headers)
    } catch {
      return answer(401)
    }
    await handle(request.headers['webhook-id'], body)
    answer(204)
  } catch (error) {
    console.error(error.message)
    answer(500) // it will be tried again
  }
})

server.listen(Number(process.env.PORT), '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}/hooks`)
})

// Does the work once for each id: the id and the work commit together.
async function handle (id, body) {
  const client = await pool.connect()
  try {
    await client.query('begin')
    const seen = await client.query(
      'insert into webhook_seen (id) values ($1) on conflict (id) do nothing', [id])
    if (seen.rowCount === 1) { // else a duplicate: it was handled, so say yes again
      await client.query('insert into received (event, body) values ($1, $2)', [id, body])
    }
    await client.query('commit')
  } catch (error) {
    await client.query('rollback')
    throw error
  } finally {
    client.release()
  }
}

// Reads a body of at most limit bytes; undefined when there are more.
async function read (request, limit) {
  const chunks = []
  let size = 0
  for await (const chunk of request) {
    size += chunk.length
    if (size > limit) return undefined
    chunks.push(chunk)
  }
  return Buffer.concat(chunks).toString('utf8')
}
